"""The peer backend and its kernels without a GPU (see ``fake_peer``): the conformance suite, with threads as ranks."""

import threading
import time
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos import PremulSum, ReduceOp
from kos.comm.communicator import Communicator
from kos.comm.compression import FORMATS
from kos.comm.gpu.peer import bind as peer_bind
from kos.comm.gpu.peer import engine as peer_engine
from kos.comm.gpu.peer import exchange as peer_exchange
from kos.comm.gpu.peer.concurrent import ConcurrentKernels
from kos.comm.gpu.peer.engine import PeerEngine
from kos.comm.tuning import KernelConfig, Launches
from kos.errors import InvalidArgument
from kos.memory.array import Array
from kos.testing.conformance import results
from kos.testing.conformance.model import MOVING, REDUCING, Step
from tests.comm import gpu_programs
from tests.comm import test_conformance as conformance
from tests.comm import test_peer as on_gpus
from tests.comm.fake_nccl import WAIT
from tests.comm.fake_peer import HostMemory, ThreadRanks, no_gpus, of_peer
from tests.comm.gpu_ranks import engine_of, prepared_of
from tests.comm.host_kernel import HostKernel
from tests.comm.peer_storm import KINDS, storm
from tests.comm.ranks import assert_bits, inputs, on_each_rank
from tests.comm.test_conformance import test_compressed_errors_are_within_the_bounds  # noqa: F401 -- collected here
from tests.comm.test_peer import (  # noqa: F401 -- collected here
    test_any_bytes_to_and_from_anybody,
    test_messages_of_a_batch_wait_for_none_of_it,
    test_parts_of_any_size_go_by_one_kernel,
    test_refusals,
    test_what_overlaps_goes_by_copy_engines,
)
from tests.fake_cuda import GPU, installed
from tests.host_compiler import needs_compiler

pytestmark = needs_compiler

SIZE = 3
BF16 = np.dtype(ml_dtypes.bfloat16)
REDUCTIONS = [  # one of each way in which kernels treat a type
    (BF16, ReduceOp.SUM), (np.dtype(np.float64), ReduceOp.PREMUL_SUM), (np.dtype(np.float16), ReduceOp.MAX),
    (np.dtype(np.int8), ReduceOp.SUM), (np.dtype(np.complex64), ReduceOp.AVG),
    (np.dtype(np.complex128), ReduceOp.PROD), (np.dtype(np.bool_), ReduceOp.BXOR),
]  # fmt: skip
OPERATIONS = ("reduce_scatter_v", "scan", "exscan", *MOVING[:-1])


@on_each_rank(ThreadRanks(SIZE).run_bare)
def test_a_process_that_drives_two_gpus(rendezvous, /, no_gpu):
    """It has one communicator per GPU; an array on another GPU is refused, and the error names that GPU."""
    child = rendezvous.split(0)
    assert child is not None
    comms = [Communicator(of_peer(each, device=i), each, {}, WAIT) for i, each in enumerate((rendezvous, child))]
    arrays = [Array.from_numpy(np.full(100, comm.rank + comm.device, np.float32), comm.device) for comm in comms]
    for comm, other, mine, foreign in zip(comms, comms[::-1], arrays, arrays[::-1], strict=True):
        assert (comm.all_reduce(mine).numpy() == SIZE * (SIZE - 1) / 2 + SIZE * comm.device).all()
        got = f"x: expected memory of cuda:{comm.device} .backend peer., got Array in memory of cuda:{other.device}"
        with pytest.raises(InvalidArgument, match=f"{got}; a communicator uses one GPU: kos.init.device="):
            comm.all_reduce(foreign)
    for comm in comms[::-1]:
        comm.close()


@pytest.fixture
def no_gpu(monkeypatch):
    with no_gpus(monkeypatch, SIZE) as fake:
        monkeypatch.setattr(on_gpus, "LARGE", 20_011)
        monkeypatch.setattr(on_gpus, "MUCH", 400_000)
        monkeypatch.setattr(gpu_programs, "COUNTS", (1, 5, 64, 1000))
        for module, name in ((on_gpus, "OVERLAPPED_FROM"), (peer_bind, "_OVERLAPPED_FROM")):
            monkeypatch.setattr(module, name, 10_000)
        yield fake


@pytest.fixture
def ranks(no_gpu):
    return ThreadRanks(SIZE)


def copy_directly(monkeypatch: pytest.MonkeyPatch, engines_from: int = 0) -> None:
    """Let data of any size go directly to its place, and data of so many bytes or more by copy engines."""
    monkeypatch.setattr(peer_engine, "_DIRECT_FROM", 0)
    monkeypatch.setattr(peer_engine, "_COPIES_FROM", engines_from)


@pytest.mark.parametrize("seed", range(4))
@on_each_rank("ranks.run")
def test_random_programs(gpu, /, seed):
    """The programs that run on GPUs: calls in flight at the same time, and batches, on smaller arrays."""
    rng = np.random.default_rng(seed)
    for _ in range(5):
        assert gpu_programs.run_program(gpu, rng)


NAMES = [f"{name} {dtype}{' SUM' * (name in REDUCING)}" for name in OPERATIONS for dtype in ("bfloat16", "int64")]
NAMES += [f"{name} {dtype} {op.name}" for dtype, op in REDUCTIONS for name in ("all_reduce", "reduce_scatter")]
NAMES += [f"{name} bfloat16 SUM deterministic" for name in ("reduce", "reduce_scatter")]
NAMES += ["scan bool BXOR"]
NAMES += [f"compressed {form} {dtype}" for form, dtype in (("fp8", BF16), ("int8", "float32"), ("int4", BF16))]
NAMES += ["shapes_and_scalars", *(f"feedback_keeps_what_is_lost {form} float32" for form in FORMATS)]
NAMES += [f"all_reduce {dtype} {op} with NaN and zeros" for dtype in ("float32", BF16) for op in ("MIN", "MAX")]


@pytest.mark.parametrize("name", NAMES)
def test_promise(ranks, seed, name):
    conformance.check(ranks, seed, name)


ON_GPUS: list[Any] = [("named_algorithms", algorithm) for algorithm in ("two_shot", "ring", "tree")]
ON_GPUS += [("blocks_of_one_role_each", *pair) for pair in ((BF16, ReduceOp.AVG), (np.dtype("f4"), ReduceOp.SUM))]


@pytest.mark.parametrize("case", ON_GPUS, ids=str)
def test_as_on_gpus(ranks, seed, case):
    name, *arguments = case
    getattr(on_gpus, f"test_{name}")(ranks, seed, *arguments)


def test_what_no_kernel_takes_is_exchanged_and_added(ranks, seed, monkeypatch):
    monkeypatch.setattr(peer_engine, "_SCANNED_UP_TO", 0)
    kind, op = np.dtype(np.complex64), ReduceOp.PROD
    steps = [Step(name, dtype=BF16, op=ReduceOp.PREMUL_SUM) for name in ("scan", "exscan")]
    for step in (*steps, *(Step(name, dtype=kind, op=op) for name in ("scan", "reduce_scatter_v"))):
        ranks.run(lambda comm, step=step: results.correct(comm, seed, step))


def test_booleans_in_a_group_of_one(no_gpu, seed):
    """Their bytes in a result are 0 or 1, as in other groups.  Other dtypes are copied."""
    for name in REDUCING:
        step = Step(name, dtype=np.bool_, op=ReduceOp.BAND)
        ThreadRanks(1).run(lambda comm, step=step: results.correct(comm, seed, step))


@on_each_rank("ranks.run")
def test_a_broadcast_by_parts(gpu, /, seed):
    for count in (1 << 18, 300_011):
        for root in range(gpu.size):
            xs = inputs(seed, gpu.size, count, np.uint8)
            out = np.full(count, 7, np.uint8)
            assert gpu.broadcast(xs[gpu.rank], root, out=out) is out
            assert_bits(out, xs[root], "out of place")
            gpu.broadcast(xs[gpu.rank], root)
            assert_bits(xs[gpu.rank], xs[root], "in place")


@pytest.mark.parametrize("copies_from", [0, 1 << 40], ids=["copy engines", "kernel"])
@pytest.mark.parametrize("part", [1, 8, 4000])  # elements: less than a vector, whole vectors
def test_an_all_to_all_into_symmetric_memory(ranks, part, copies_from, seed, monkeypatch):
    copy_directly(monkeypatch, copies_from)
    data = np.random.default_rng(seed).integers(-99, 99, (SIZE, SIZE, part)).astype(np.float32)

    def body(gpu):
        comm = gpu.comm
        outs = comm.allocate(SIZE * part, np.float32), Array.zeros(SIZE * part, np.float32, 0)
        for out in outs:
            out.fill_bytes(255)
            comm.all_to_all(Array.from_numpy(data[comm.rank].reshape(-1), 0), out)
            np.testing.assert_array_equal(out.numpy().reshape(SIZE, part), data[:, comm.rank])

    ranks.run(body)


def test_back_to_back(ranks, seed):
    assert ranks.run_bare(lambda r: storm(r, HostMemory, seed, KINDS, 80)) == [0] * SIZE


def test_epochs_start_over(ranks, seed):
    """When the counter of a channel reaches its end, the channel clears its inbox and continues."""
    packets = ["one_shot", "two_shot", "ring", "tree"]
    assert ranks.run_bare(lambda r: storm(r, HostMemory, seed, packets, 60, RENEW_EPOCH=20)) == [0] * SIZE


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("one_shot", "direct") else pytest.mark.slow) for kind in KINDS]
)
def test_without_waits_the_storm_is_wrong(ranks, seed, kind):
    """The negative control: kernels that check no flag must read data that has not arrived."""
    assert sum(ranks.run_bare(lambda r: storm(r, HostMemory, seed, [kind], 40, BROKEN=1))) > 0


@pytest.mark.parametrize(
    ("count", "beside"),
    [(8001, True), (40_003, True), (70_003, True), (1001, False)],
    ids=["small", "more packets than threads", "large", "one channel"],
)
@pytest.mark.parametrize("first", ["recv", "send"])
def test_a_send_recv_meets_the_two_one_after_the_other(ranks, first, count, beside, monkeypatch):
    """Neither direction waits for the other, even if all channels share a block or threads are fewer than packets."""
    monkeypatch.setattr(peer_exchange, "OVERLAPPED_BLOCKS", 1)

    def body(rendezvous):
        engine, rank, none = PeerEngine(rendezvous, 0, timeout=20.0, staging=1 << 13), rendezvous.rank, (0, 0)
        assert 40_003 < engine.small < 70_003
        x, out = Array.from_numpy(np.full(count, rank, np.uint8), 0), Array.zeros(count, np.uint8, 0)
        send, recv = ([none] * SIZE, [none] * SIZE)
        if rank < 2:
            send[1 - rank], recv[1 - rank] = (x.pointer, x.nbytes), (out.pointer, out.nbytes)
        apart = [([none] * SIZE, recv), (send, [none] * SIZE)]
        for each in [(send, recv)] if rank == 0 else apart if first == "recv" else apart[::-1]:
            engine.bind_exchange(*each, messages=True, overlapped=beside)(0)
        engine.record.check("exchange")
        assert rank == 2 or (out.numpy() == 1 - rank).all()
        engine.close()

    ranks.run_bare(body)


def test_send_recvs_of_more_packets_than_threads_run_a_message_behind(ranks):
    """A send_recv sends all packets before it waits for any, but only after the receiver has reported what it read."""

    def body(rendezvous):
        engine, rank, none = PeerEngine(rendezvous, 0, timeout=5.0, staging=1 << 13), rendezvous.rank, [(0, 0)] * SIZE
        x, out = (Array.from_numpy(np.full(1001, number, np.uint8), 0) for number in (rank, 9))
        to, back = list(none), list(none)
        to[1 - rank % 2], back[1 - rank % 2] = (x.pointer, x.nbytes), (out.pointer, out.nbytes)
        for send, recv in [(to, none), *[(to, back)] * 4, (none, back)] if rank < 2 else []:
            engine.bind_exchange(send, recv, messages=True)(0)
            engine.record.check("exchange")
        assert rank == 2 or (out.numpy() == 1 - rank).all()
        engine.close()

    ranks.run_bare(body)


def test_a_sender_runs_ahead_by_two_small_messages_and_no_more(ranks, seed):
    sent, rng = threading.Event(), np.random.default_rng(seed)
    messages = [rng.integers(0, 256, int(n), np.uint8) for n in rng.integers(1, 2000, 60)]

    def body(gpu):
        comm = gpu.comm
        if comm.rank == 0:
            for data in messages[:2]:
                comm.send(Array.from_numpy(data, 0), 1)
        comm.rendezvous.barrier()
        if comm.rank == 0:
            for data in messages[2:]:
                comm.send(Array.from_numpy(data, 0), 1)
                sent.set()
        if comm.rank == 1:
            assert not sent.wait(0.2), "the third message took the place of the first"
            for data in messages:
                out = Array.zeros(data.size, np.uint8, 0)
                comm.recv(out, 0)
                np.testing.assert_array_equal(out.numpy(), data)

    ranks.run(body)


@on_each_rank("ranks.run_bare")
def test_a_piece_after_the_expected_one_is_not_taken_for_another(rendezvous, /):
    """Both arrive while the receiver, which is slow, looks for data of another kind."""
    rank, nothing = rendezvous.rank, [(0, 0)] * SIZE
    engine = PeerEngine(rendezvous, 0, timeout=20.0, staging=1 << 13)
    engine.small = 64
    x, out = Array.from_numpy(np.arange(200, dtype=np.uint8), 0), Array.zeros(200, np.uint8, 0)
    for _ in range(3):
        rendezvous.barrier()
        time.sleep(0.3 * (rank == 0))
        for nbytes, stall in ((8, 200_000_000), (200, 1)):  # as a packet, and in a batch
            if rank == 0:
                engine.bind_exchange([(0, 0), (x.pointer, nbytes), (0, 0)], nothing, messages=True)(0)
            elif rank == 1:
                engine._macros["STALL"] = stall
                engine.bind_exchange(nothing, [(out.pointer, nbytes), (0, 0), (0, 0)], messages=True)(0)
            engine.record.check(f"{nbytes} bytes")
    assert rank != 1 or (out.numpy() == x.numpy()).all()
    engine.close()


def test_an_async_message_takes_few_blocks_and_is_not_ordered(ranks, no_gpu, monkeypatch):
    """It may wait for results that its peer first computes with other communicators of this GPU."""
    launched, entered, local = [], [], threading.local()
    record = ConcurrentKernels.record

    class Counted(HostKernel):
        def bind(self, blocks, *arguments, **options):
            launched.append(blocks)
            return super().bind(blocks, *arguments, **options)

    def recording(self, *arguments):
        entered.append(local.now)
        record(self, *arguments)

    no_gpu.load_kernel = Counted
    monkeypatch.setattr(ConcurrentKernels, "record", recording)
    monkeypatch.setattr(peer_exchange, "OVERLAPPED_BLOCKS", 2)

    def body(gpu):
        comm, count = gpu.comm, 100_003
        for number in range(2):
            local.now = "message"
            if comm.rank == 0:
                comm.send(Array.from_numpy(np.arange(count) + number, 0), 1, async_op=True).wait()
            if comm.rank == 1:
                out = Array.zeros(count, np.int64, 0)
                comm.recv(out, 0, async_op=True).wait()
                np.testing.assert_array_equal(out.numpy(), np.arange(count) + number)
            local.now = "collective"
            comm.all_reduce(Array.zeros(9, np.float32, 0))

    ranks.run(body)
    assert launched.count(2) == 2 and set(entered) == {"collective"}


def test_what_is_said_of_an_all_reduce_is_what_is_launched(ranks):
    """Also if the staging memory is too small for ``specialized``, or the operation does not suit the launch."""
    table = Launches(((None, KernelConfig("specialized", tile=512)),), ((None, KernelConfig("direct")),))

    def body(gpu):
        comm, backend = gpu.comm, gpu.comm.backend
        engine = engine_of(comm)
        staging, launches = engine.staging, engine.launches
        try:
            engine.staging = 1 << 12
            backend.routes[0].use(table)
            for nbytes, way in (16 * 100, "specialized"), (16 * 5000, "push"):
                x = comm.allocate(nbytes // 4, np.float32)
                assert backend.route_of("all_reduce", nbytes, True) == f"peer {way}"
                assert f"'{way}'" in prepared_of(comm, partial(comm.all_reduce, x)).plan.name
                scaled = prepared_of(comm, partial(comm.all_reduce, x, PremulSum(2.0))).plan.name
                assert "'two_shot'" in scaled and scaled.endswith("at []")
        finally:
            engine.staging = staging
            backend.routes[0].use(launches)

    ranks.run(body)


def test_exchanges_of_a_product_overlap_nothing_beside_another_communicator(ranks, no_gpu, monkeypatch):
    """A kernel that started early would occupy multiprocessors that kernels of the other communicator may need."""
    launched = set[bool]()

    class Noted(HostKernel):
        def bind(self, *arguments, overlap=False, **options):
            run = super().bind(*arguments, **options)
            return lambda *given: (launched.add(overlap), run(*given))

    no_gpu.load_kernel = Noted
    own = [GPU(uuid=str(rank), compute_capability=(8, 9), multiprocessors=21) for rank in range(SIZE)]

    def body(rendezvous):
        device = rendezvous.rank  # on a GPU that ranks share, no kernel overlaps another one
        comm = Communicator(of_peer(rendezvous, device=device), rendezvous, {}, WAIT)
        x = Array.from_numpy(np.ones(4, np.complex64), device)
        comm.all_reduce(x, ReduceOp.PROD)  # an exchange, and a kernel that multiplies
        rendezvous.barrier()
        assert True in launched
        child = rendezvous.split(0)
        assert child is not None
        other = Communicator(of_peer(child, device=device), child, {}, WAIT)
        rendezvous.barrier()
        launched.clear()
        rendezvous.barrier()
        comm.all_reduce(x, ReduceOp.PROD)
        rendezvous.barrier()
        assert launched == {False}
        for each in (other, comm):
            each.close()

    with installed(monkeypatch, no_gpu.cu, own, no_gpu.driver.library):
        ranks.run_bare(body)
