"""What passes between ranks, threads and GPUs, message by message, as the modules of kos.comm that are named do it."""

from __future__ import annotations

from docs.drawings.svg import COLOURS, GREY, LIGHT, Box, exchange, timeline
from kos.comm.host.tcp_messages import CREDIT_BYTES, EAGER_BYTES
from kos.comm.watchdog import TICK


def messages() -> str:
    """``kos.comm.host.tcp_messages``."""
    limits = f"up to {EAGER_BYTES >> 10} KiB, and within {CREDIT_BYTES >> 20} MiB of credits"
    note = f"between hosts, {limits}: eager; else: rendezvous"
    return exchange("Messages over TCP", note, ["rank 0: program", "rank 0: socket", "rank 1: socket",
                                                "rank 1: program"], [
        (0, 1, "send(short)"), (1, 2, "EAGER, data"), (2, 2, "no receive yet: buffered"),
        (3, 2, "recv(out)"), (2, 3, "copied"),
        (0, 1, "send(long)"), (1, 2, "RTS, no data"), (3, 2, "recv(out)"), (2, 1, "CTS, credits"),
        (1, 2, "DATA"), (2, 3, "read straight into out"),
    ])  # fmt: skip


def rendezvous() -> str:
    """``kos.comm.control.place``, ``hub`` and ``wire``."""
    return exchange("Rendezvous over TCP", "the hub is a thread of rank 0, at MASTER_ADDR:MASTER_PORT",
                    ["rank 0", "hub", "rank 1", "rank 2", "rank 3"], [
        (0, 1, "starts, socket pair"), (2, 1, "call, proves secret"), (4, 1, "call, proves secret"),
        (3, 1, "call, proves secret"), (1, 1, "all ranks are here"),
        (0, 1, "bytes of 0"), (2, 1, "bytes of 1"), (3, 1, "bytes of 2"), (4, 1, "bytes of 3"),
        (1, 4, "all four, to all"), (1, 0, "all four"),
        (3, 2, "connects, if needed"),
    ])  # fmt: skip


def core() -> str:
    """``kos/_core``: a call that the core completes, and one whose other rank was killed."""
    return exchange("A call through the compiled core", "Python runs for the first call and for failures",
                    ["rank 0: Python", "rank 0: core", "segment", "rank 1: core"], [
        (0, 1, "first all_reduce(x)"), (1, 0, "not in the cache"), (0, 1, "prepare(signature)"),
        (0, 1, "all_reduce(x)"), (1, 2, "fingerprint, data, stamp"), (3, 2, "fingerprint, data, stamp"),
        (2, 1, "stamp of 1: same call"), (1, 0, "x"),
        (0, 1, "all_reduce(y)"), (1, 2, "fingerprint, data, stamp"), (3, 3, "killed"), (1, 0, "after 10 ms: a Work"),
        (0, 0, "process of rank 1 ended"), (0, 1, "fail(call)"), (1, 2, "failure flag"), (1, 0, "FAILED: RankLost"),
    ])  # fmt: skip


def core_gpu() -> str:
    """``kos/_core/module_launch.c`` and ``kos.comm.gpu.eager``."""
    return exchange("A call on a GPU through the core", "Python makes the first call, and those with a changed guard",
                    ["rank 0: Python", "rank 0: core", "segment", "driver or NCCL"], [
        (0, 1, "first all_reduce(x)"), (1, 0, "not in the cache"), (0, 3, "order the stream, launch"),
        (0, 1, "the launch and its guards"),
        (0, 1, "all_reduce(x)"), (1, 1, "the guards hold"), (1, 2, "fingerprint"),
        (1, 3, "launch, without the GIL"), (1, 0, "x"),
        (0, 1, "all_reduce(y), stream 2"), (1, 0, "a guard has changed"), (0, 3, "event, wait, launch"),
        (0, 1, "every 64th all_reduce(x)"), (1, 0, "back to Python"), (0, 2, "compare fingerprints"),
    ])  # fmt: skip


def failures() -> str:
    """``kos.comm.failures`` and ``kos.comm.host.shared``."""
    return exchange("The first cause travels", "rank 1 waits for rank 2, which waits for rank 3; all are on one host",
                    ["rank 0", "rank 1", "shared memory", "rank 2", "rank 3"], [
        (3, 2, "waits for 3"), (1, 2, "waits for 2"), (0, 2, "waits for 1"), (4, 4, "killed"),
        (3, 3, "process of 3 ended"), (3, 2, "first: RankLost 3"), (3, 3, "raises: rank 3 is gone"),
        (2, 1, "first failure"), (2, 0, "first failure"), (1, 1, "raises: rank 3 is gone"),
        (0, 0, "raises: rank 3 is gone"),
    ])  # fmt: skip


def transfer() -> str:
    """``kos.transfer``: a version that a server reads while the trainer publishes the next one."""
    note = "two buffers: the server reads one while the trainer writes the other"
    return exchange("A version goes to a server", note,
                    ["trainer rank 0", "trainer rank 1", "buffers of both", "server"], [
        (0, 2, "publish(7): a copy"), (1, 2, "publish(7): a copy"), (0, 0, "version 7 is visible"),
        (3, 0, "the newest? I have 6"), (0, 3, "7, and a lease on it"),
        (2, 3, "sequence number: it is 7"), (2, 3, "the boxes of the plan"),
        (0, 2, "publish(8): other buffer"), (1, 2, "publish(8): other buffer"),
        (2, 3, "sequence number: still 7"), (3, 0, "end of the lease"), (3, 3, "staging to arrays: 7"),
    ])  # fmt: skip


def replacement() -> str:
    """A rank of an elastic run is lost within a step, and another one joins (``kos.train.elastic``)."""
    events = [
        (1, 0, "epoch 0, step 7"),
        (2, 0, "epoch 0, step 7"),
        (0, 0, "all equal: update 7"),
        (2, 2, "killed"),
        (1, 1, "RankLost: no update"),
        (0, 1, "shrink: applied 7"),
        (1, 0, "shrink: applied 6"),
        (1, 1, "applies update 7"),
        (0, 0, "epoch 1: 2 ranks"),
        (3, 0, "join"),
        (0, 1, "step 8, 1 newcomer"),
        (0, 3, "grow: weights and state"),
        (0, 0, "epoch 2: 3 ranks"),
    ]
    actors = ["rank 0", "rank 1", "rank 2", "newcomer"]
    about = "each rank's entry reaches all others; some of these messages are not drawn"
    return exchange("A rank is replaced", about, actors, events)


def watchdog() -> str:
    """``kos.comm.watchdog``, ``kos.comm.gpu.backend`` and ``kos/comm/gpu/kernels/channel.cuh``."""
    return exchange("The watchdog", f"a thread of each process; it checks every {TICK:g} s",
                    ["program", "GPU", "watchdog", "other ranks"], [
        (0, 1, "all_reduce, queued"), (0, 0, "waits for the stream"), (1, 1, "kernel waits for rank 2"),
        (2, 3, "is a process gone?"), (2, 1, "which rank is awaited?"), (2, 3, "publishes: waits for 2"),
        (1, 1, "deadline in the kernel"), (1, 3, "notifies all kernels"), (1, 0, "stream ends"),
        (2, 2, "records CollectiveTimeout"), (2, 0, "next call names rank 2"),
    ])  # fmt: skip


def batches() -> str:
    """``kos/comm/gpu/kernels/exchange.cu``: a large piece."""
    return exchange("A large piece of the exchange kernel", "two slots for each pair of ranks, two counters",
                    ["rank 0: sending half", "slots of the pair on rank 1", "rank 1: receiving half"], [
        (0, 1, "batch 0 to slot 0, sent = 1"), (0, 1, "batch 1 to slot 1, sent = 2"), (1, 2, "batch 0 to the output"),
        (2, 0, "taken = 1: slot 0 is free"), (0, 1, "batch 2 to slot 0, sent = 3"), (1, 2, "batch 1 to the output"),
        (2, 0, "taken = 2: slot 1 is free"), (1, 2, "batch 2 to the output"),
    ])  # fmt: skip


def packets() -> str:
    """``kos/comm/gpu/kernels/packets.cuh`` and ``pieces.cuh``; beside them NCCL's LL (``src/device/prims_ll.h``)."""
    rows = {"sums, up to 4-byte elements": [12, 4], "sums, 8-byte elements": [8, 4, 4], "exchange": [8, 8],
            "LL of NCCL": [4, 4, 4, 4]}  # fmt: skip
    flags = {(0, 1), (1, 2), (2, 1), (3, 1), (3, 3)}
    boxes = []
    for row, parts in enumerate(rows.values()):
        at = 0
        for number, nbytes in enumerate(parts):
            flag, unused = (row, number) in flags, (row, number) == (1, 1)
            name = "unused" if unused else "flag" if flag else f"{nbytes} bytes of data"
            boxes.append(Box(row, at, at + nbytes, name, GREY if unused else COLOURS[1] if flag else COLOURS[0]))
            at += nbytes
    return timeline("A packet carries its own flag", "16 bytes, written by one store", [*rows], boxes,
                    {"data": COLOURS[0], "flag: the epoch, or the number of the piece": COLOURS[1]})  # fmt: skip


def shared_memory(ranks: int = 4, pairs: int = 3) -> str:
    """``kos/_core/slots.c``: an all_reduce of several pairs of stages, with ranks of unequal speed."""
    names, colours = ("put", "reduce", "take"), COLOURS[:3]
    boxes: list[Box] = []
    ended = [[0.0] * ranks for _ in range(3 * pairs)]  # by step: when each rank has passed it
    for step in range(3 * pairs):
        pair, kind = divmod(step, 3)
        for rank in range(ranks):
            # put: all have reduced what was in slot 0; reduce: all have put; take: all have reduced this pair's data.
            others = ended[step - (1 if kind else 2)] if step else []
            start = max([ended[step - 1][rank] if step else 0.0, *others])
            seconds = (4, 4, 3)[kind] + (rank + 2 * step) % 4 / 2
            ended[step][rank] = start + seconds
            shade = (colours if pair % 2 == 0 else LIGHT)[kind]
            boxes.append(Box(rank, start, start + seconds, names[kind], shade))
    legend = {"put own data": colours[0], "reduce own part": colours[1], "take the others": colours[2],
              "lighter: every other pair": LIGHT[0]}  # fmt: skip
    note = f"{pairs} pairs of stages in 2 slots in turn; blank: waiting for stamps"
    return timeline("all_reduce in shared memory", note, [f"rank {rank}" for rank in range(ranks)], boxes, legend)
