"""Every kernel over peer memory back to back, on the host (``fake_peer``) and on a GPU."""

from typing import Any

import numpy as np

from kos.comm.compression import FORMATS
from kos.comm.control.base import ControlPlane
from kos.comm.gpu.peer.bind import bind_compressed
from kos.comm.gpu.peer.engine import PeerEngine
from kos.comm.reduction import ReduceOp
from kos.comm.tuning import KernelConfig, Launches
from kos.dtypes import dtype_of
from kos.memory.array import Array
from kos.testing.conformance.model import Step, result

FLOAT = dtype_of(np.dtype(np.float32))
LAUNCHES = {
    "one_shot": KernelConfig("one_shot", threads=32), "two_shot": KernelConfig("two_shot", blocks=2, threads=64),
    "ring": KernelConfig("ring", threads=32), "tree": KernelConfig("tree", threads=32),
    "push": KernelConfig("push", blocks=2, threads=32), "direct": KernelConfig("direct", blocks=2, threads=32),
    "copies": KernelConfig("copies", threads=32, pieces=3),
    "specialized": KernelConfig("specialized", threads=64, tile=512),
}  # fmt: skip
KINDS = [
    "exchange", "broadcast", "all_gather", "all_to_all", "reduce_scatter", "reduce_scatter by packets",
    "reduce_scatter_v", "reduce_scatter_v by packets", "scan", *LAUNCHES,
]  # fmt: skip
BY_KERNEL, BY_PACKETS = (Launches(rows, rows) for name in ("push", "two_shot") for rows in [((None, LAUNCHES[name]),)])


def operation(kind: str) -> str:
    """The operation that does what kernels of this kind do, unless they exchange bytes."""
    return "all_reduce" if kind in LAUNCHES else "reduce_scatter_v" if kind.startswith("reduce_scatter") else kind


def storm(
    rendezvous: ControlPlane,
    memory_of: Any,
    seed: int,
    kinds: list[str],
    turns: int,
    *,
    device: int = 0,
    stream: Any = None,
    **macros: Any,
) -> int:
    """Operations back to back, of random kinds, sizes and places; wrong elements on this rank."""
    rng, rank, size = np.random.default_rng(seed), rendezvous.rank, rendezvous.size
    engine = PeerEngine(rendezvous, device, timeout=20.0, staging=1 << 13, **macros)
    memory = memory_of(rendezvous, 1 << 17, device)
    engine.register(memory)
    sizes = [0, 3000, engine.small]
    symmetric = Array(memory.pointer, (1 << 15,), np.float32, device)
    wrong = 0
    for _ in range(turns):
        count, start = int(rng.integers(1, 5000)), int(rng.integers(0, 9))
        kind = rng.choice(kinds)
        engine.small = 0 if kind in ("all_gather", "all_to_all") else int(rng.choice(sizes))  # 0: nothing by packets
        if kind in ("reduce_scatter", "all_gather", "all_to_all"):
            count = count // 4 // size * 4 + 4
        elif kind.startswith("reduce_scatter"):
            count = count // size + 1
        if kind == "specialized":  # most of which it takes
            count, start = count // 4 * 4 + (4 if rng.random() < 0.9 else 5), start // 4 * 4
        counts = rng.integers(0, count + 1, size).tolist() if kind.startswith("reduce_scatter_v") else [count] * size
        x, out = (Array.zeros(5200, np.float32, device, stream=stream) for _ in range(2))
        if kind in ("all_gather", "all_to_all", "specialized") or rng.random() < 0.5:
            x, out = symmetric[:5200], symmetric[8192 : 8192 + 3 * 5200]
        scatters = kind.startswith("reduce_scatter")
        total = sum(counts) if scatters or kind == "all_to_all" else count
        count = counts[rank]
        x = x[start : start + total]
        if kind in ("all_gather", "all_to_all"):
            out = out[4 * start : 4 * start + size * count]
        else:
            out = out[start : start + count]
        if (kind in LAUNCHES or kind == "scan") and rng.random() < 0.3:
            out = x
        data = [rng.integers(-99, 99, total).astype(np.float32) for _ in range(size)]
        x.copy_from(data[rank], stream)
        root = int(rng.integers(size))
        step = Step(operation(kind), count, root=root, counts=tuple(counts))
        expected: Any = None if kind == "exchange" else result(step, data, rank)
        match kind:
            case "exchange":  # some bytes of everybody to everybody
                unit = int(rng.choice([1, 8]))  # whole packets have a kernel of their own
                nbytes = rng.integers(0, max(4 * count // unit, 1), (size, size)) * unit
                out = Array.zeros(int(nbytes[:, rank].sum()), np.uint8, device, stream=stream)
                starts = np.cumsum([0, *nbytes[:, rank]])
                sends = [(x.pointer, int(n)) for n in nbytes[rank]]
                recvs = [(out.pointer + int(a), int(n)) for a, n in zip(starts, nbytes[:, rank], strict=False)]
                run = engine.bind_exchange(sends, recvs)
                expected = np.concatenate([data[r].view(np.uint8)[: nbytes[r, rank]] for r in range(size)])
            case "all_gather":
                run = engine.bind_writes("all_gather", x.pointer, out.pointer, x.nbytes)
            case "all_to_all":
                run = engine.bind_writes("all_to_all", x.pointer, out.pointer, 4 * count)
            case "broadcast":
                source = x if rng.random() < 0.5 and rank == root else out
                source.copy_from(data[rank], stream)
                run = engine.bind_broadcast((source.pointer, x.nbytes), (out.pointer, x.nbytes), root)
            case "scan":
                engine.launches = BY_PACKETS
                run = engine.bind_scan("scan", x.pointer, out.pointer, count, FLOAT, ReduceOp.SUM)
            case _ if scatters:
                engine.launches = BY_PACKETS if kind.endswith("packets") else BY_KERNEL
                part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
                out = x[part] if rng.random() < 0.3 else out
                run = engine.bind_reduce_scatter(x.pointer, out.pointer, counts, FLOAT, ReduceOp.SUM)
            case _:
                run = engine.bind_all_reduce(x.pointer, out.pointer, count, FLOAT, ReduceOp.SUM, launch=LAUNCHES[kind])
        if total:
            if stream is not None:
                rendezvous.barrier()  # kernels are loaded by now: on a GPU that waits for those that run
            run(stream)
            got = out.numpy(stream)
            engine.record.check("storm")
            wrong += int((got != expected).sum())
    rendezvous.barrier()
    engine.close()
    memory.close()
    return wrong


def compressed_storm(
    rendezvous: ControlPlane, seed: int, form: str, dtype: Any, turns: int, *, device: int = 0, stream: Any = None,
    **macros: Any,
) -> int:  # fmt: skip
    """Compressed reductions back to back, some between those of other kernels; wrong elements on this rank.

    In some engines a batch is one tile, of which a channel has dozens; each launch is used twice, as in a graph.
    """
    rng, rank, size, form = np.random.default_rng(seed), rendezvous.rank, rendezvous.size, FORMATS[form]
    staging = -(-8 * size * form.nbytes(1024) * (1, 5, 64)[seed % 3] // 48) * 16
    engine = PeerEngine(rendezvous, device, timeout=20.0, staging=staging, **macros)
    kind, wrong = dtype_of(np.dtype(dtype)), 0
    x, out = (Array.zeros(60_016, dtype, device, stream=stream) for _ in range(2))
    for _ in range(turns):
        name = "all_reduce" if rng.random() < 0.7 else "reduce_scatter"
        op = ReduceOp.SUM if rng.random() < 0.7 else ReduceOp.AVG
        spread, start, several = name == "all_reduce", int(rng.integers(0, 9)), rng.random() < 0.3
        part = int(rng.integers(1, 60_000 if several else 5000)) // size + 1
        count = part * size - (int(rng.integers(0, size)) if spread else 0)
        send, mine = x[start : start + count], slice(None) if spread else slice(rank * part, rank * part + part)
        to = send[mine] if rng.random() < 0.3 else out[rng.choice([0, start]) :][: count if spread else part]
        run = bind_compressed(engine, name, send.pointer, to.pointer, count, kind, op, form)
        other = engine.bind_all_reduce(send.pointer, send.pointer, count, kind, ReduceOp.MAX, launch=LAUNCHES["push"])
        assert run is not None
        for _ in range(2):
            data = [(rng.standard_normal(count) * rng.choice([0, 1, 1e-3])).astype(dtype) for _ in range(size)]
            if rng.random() < 0.3:
                data[0][int(rng.integers(count))] = np.inf
            send.copy_from(data[rank], stream)
            if stream is not None:
                rendezvous.barrier()  # kernels are loaded by now: on a GPU that waits for those that run
            run(stream)
            got = to.numpy(stream)
            step = Step(name, part, dtype, op, compress=form.name)
            expected = result(step, data, rank)
            assert expected is not None
            wrong += int((got.view(np.uint8) != expected.view(np.uint8)).sum())
        if rng.random() < 0.5:
            other(stream)
    engine.record.check("storm")
    rendezvous.barrier()
    engine.close()
    return wrong
