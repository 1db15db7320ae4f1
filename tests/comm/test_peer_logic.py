"""The peer backend and its kernels without a GPU: see ``fake_peer``.  The same conformance suite, ranks as threads."""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest

from kos import PremulSum, ReduceOp
from kos.comm import watchdog
from kos.comm.failures import EndedEarly, blaming
from kos.comm.gpu import shared as gpu_shared
from kos.comm.gpu.order import Order
from kos.comm.gpu.peer import backend as peer_backend
from kos.comm.gpu.peer import engine as peer_engine
from kos.comm.gpu.peer.engine import PeerEngine, _Word
from kos.comm.gpu.peer.launches import Launch, Launches
from kos.comm.operation import Call, Operation
from kos.comm.reduction import resolve
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.rendezvous.threads import ThreadGroup, ThreadRendezvous
from kos.cuda import driver
from kos.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CompileError,
    CudaError,
    InvalidArgument,
    KosError,
    RankLost,
)
from kos.memory import as_buffer
from kos.memory.array import Array
from kos.testing.conformance import results
from tests.comm import test_conformance as conformance
from tests.comm import test_peer as on_gpus
from tests.comm.fake_nccl import captures
from tests.comm.fake_peer import HostKernel, HostMemory, communicator, no_gpus
from tests.comm.gpu_ranks import OnGPU, Prepared
from tests.comm.peer_storm import FLOAT, KINDS, storm
from tests.comm.ranks import assert_bits, inputs
from tests.comm.test_conformance import test_shapes_and_scalars  # noqa: F401 -- collected here
from tests.comm.test_peer import (  # noqa: F401 -- collected here
    test_any_bytes_to_and_from_anybody,
    test_messages,
    test_messages_of_a_batch_wait_for_none_of_it,
    test_minimum_keeps_nan,
    test_what_overlaps_goes_by_copy_engines,
    test_windows_are_freed_when_all_ranks_let_go,
)
from tests.host_compiler import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (g++ or clang++)")

SIZE = 3
HANG = 240.0  # seconds, less than pytest gives a test; each wait of a rank, and of a kernel, has a limit of its own
BF16 = np.dtype(ml_dtypes.bfloat16)
REDUCTIONS = [  # one of each way in which kernels treat a type
    (BF16, ReduceOp.SUM), (np.dtype(np.float64), ReduceOp.PREMUL_SUM), (np.dtype(np.float16), ReduceOp.MAX),
    (np.dtype(np.int8), ReduceOp.SUM), (np.dtype(np.complex64), ReduceOp.AVG),
    (np.dtype(np.complex128), ReduceOp.PROD),
]  # fmt: skip


class ThreadRanks:
    """Ranks on threads that live as long as the tests, each with a GPU that is a stand-in."""

    pool = ThreadPoolExecutor(4)

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, fn: Callable[[Any], Any], timeout: float = 20.0) -> list[Any]:
        return self.run_bare(lambda rendezvous: self._with_communicator(fn, rendezvous, timeout), timeout)

    @staticmethod
    def _with_communicator(fn: Callable[[Any], Any], rendezvous: Rendezvous, timeout: float) -> Any:
        comm = communicator(rendezvous, timeout)
        result = fn(OnGPU(comm))
        comm.close()
        return result

    def run_bare(self, fn: Callable[[Rendezvous], Any], timeout: float = 20.0) -> list[Any]:
        threads, failures = ThreadGroup(self.size), []

        def rank(index: int) -> Any:
            try:
                return fn(ThreadRendezvous(threads, index, timeout))
            except BaseException:
                failures.append((index, traceback.format_exc()))
                threads.fail(RankLost("another rank failed"))

        running = [self.pool.submit(rank, i) for i in range(self.size)]
        results = [each.result(HANG) for each in running]
        assert not failures, "rank {} failed:\n{}".format(*failures[0])
        return results


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with no_gpus(monkeypatch, SIZE):
        monkeypatch.setattr(on_gpus, "LARGE", 20_011)
        monkeypatch.setattr(on_gpus, "MUCH", 400_000)
        for module, name in ((on_gpus, "BESIDE"), (peer_backend, "_BESIDE")):
            monkeypatch.setattr(module, name, 10_000)
        yield


@pytest.fixture
def ranks(no_gpu: None) -> ThreadRanks:
    return ThreadRanks(SIZE)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [pytest.param(*pair, marks=pytest.mark.slow if n in (1, 5) else ()) for n, pair in enumerate(REDUCTIONS)],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_all_reduce(ranks: Any, seed: int, dtype: np.dtype, op: ReduceOp) -> None:
    conformance.test_all_reduce(ranks, seed, dtype, op)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(BF16, ReduceOp.AVG), pytest.param(np.dtype(np.float32), ReduceOp.SUM, marks=pytest.mark.slow)],
    ids=str,
)
def test_blocks_of_one_role_each(ranks: Any, seed: int, dtype: np.dtype, op: ReduceOp) -> None:
    on_gpus.test_blocks_of_one_role_each(ranks, seed, dtype, op)


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS[::2], ids=lambda x: getattr(x, "name", str(x)))
def test_reduce_scatter(ranks: Any, seed: int, dtype: np.dtype, op: ReduceOp) -> None:
    for deterministic in (False, True):
        ranks.run(lambda comm, d=deterministic: results.correct(comm, seed, "reduce_scatter", dtype, op, 0, d))


OPERATIONS = (
    "reduce_scatter_v", "broadcast", "all_gather", "all_gather_v", "all_to_all", "all_to_all_v", "gather_and_scatter",
    "gather_v_and_scatter_v", "scan",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=pytest.mark.slow if (i + j) % 2 else (), id=f"{name}-{dtype}")
        for i, name in enumerate(OPERATIONS)
        for j, dtype in enumerate((BF16, np.dtype(np.int64)))
    ],
)
def test_operation(ranks: Any, seed: int, name: str, dtype: np.dtype) -> None:
    getattr(conformance, f"test_{name}")(ranks, seed, dtype)


def test_reduce(ranks: Any, seed: int) -> None:
    conformance.test_reduce(ranks, seed, BF16, False)


@pytest.mark.parametrize("algorithm", ["two_shot", "ring", "tree"])
def test_named_algorithms(ranks: Any, seed: int, algorithm: str) -> None:
    on_gpus.test_named_algorithms(ranks, seed, algorithm)


def test_a_broadcast_by_parts(ranks: ThreadRanks, seed: int) -> None:
    def body(gpu: Any) -> None:
        for count in (1 << 18, 300_011):
            for root in range(gpu.size):
                xs = inputs(seed, gpu.size, count, np.uint8)
                out = np.full(count, 7, np.uint8)
                assert gpu.broadcast(xs[gpu.rank], root, out=out) is out
                assert_bits(out, xs[root], "out of place")
                gpu.broadcast(xs[gpu.rank], root)
                assert_bits(xs[gpu.rank], xs[root], "in place")

    ranks.run(body)


@pytest.mark.parametrize("part", [1, 8, 4000])  # elements: less than a vector, whole vectors
def test_an_all_to_all_into_symmetric_memory(
    ranks: ThreadRanks, part: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_engine, "_DIRECT_FROM", 0)
    data = np.random.default_rng(seed).integers(-99, 99, (SIZE, SIZE, part)).astype(np.float32)

    def body(gpu: Any) -> None:
        comm = gpu.comm
        outs = comm.allocate(SIZE * part, np.float32), Array.zeros(SIZE * part, np.float32, 0)
        for out in outs:
            out.fill_bytes(255)
            comm.all_to_all(Array.from_numpy(data[comm.rank].reshape(-1), 0), out)
            np.testing.assert_array_equal(out.numpy().reshape(SIZE, part), data[:, comm.rank])

    ranks.run(body)


def test_back_to_back(ranks: ThreadRanks, seed: int) -> None:
    assert ranks.run_bare(lambda r: storm(r, HostMemory, seed, KINDS, 80)) == [0] * SIZE


def test_epochs_start_over(ranks: ThreadRanks, seed: int) -> None:
    """A channel that has counted to its end wipes its inbox and goes on."""
    packets = ["one_shot", "two_shot", "ring", "tree"]
    assert ranks.run_bare(lambda r: storm(r, HostMemory, seed, packets, 60, RENEW_EPOCH=20)) == [0] * SIZE


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("one_shot", "direct") else pytest.mark.slow) for kind in KINDS]
)
def test_without_waits_the_storm_is_wrong(ranks: ThreadRanks, seed: int, kind: str) -> None:
    """The negative control: kernels that look at no flag must read what has not come."""
    assert sum(ranks.run_bare(lambda r: storm(r, HostMemory, seed, [kind], 40, BROKEN=1))) > 0


@pytest.mark.parametrize("count", [8001, 40_003], ids=["small", "large"])
@pytest.mark.parametrize("first", ["recv", "send"])
def test_a_send_recv_meets_the_two_one_after_the_other(
    ranks: ThreadRanks, first: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one block carries all channels: neither direction waits for the other."""
    monkeypatch.setattr(peer_engine, "BESIDE_BLOCKS", 1)

    def body(rendezvous: Rendezvous) -> None:
        engine, rank, none = PeerEngine(rendezvous, 0, timeout=20.0, staging=1 << 13), rendezvous.rank, (0, 0)
        assert engine.small < 40_003
        x, out = Array.from_numpy(np.full(count, rank, np.uint8), 0), Array.zeros(count, np.uint8, 0)
        send, recv = ([none] * SIZE, [none] * SIZE)
        if rank < 2:
            send[1 - rank], recv[1 - rank] = (x.pointer, x.nbytes), (out.pointer, out.nbytes)
        apart = [([none] * SIZE, recv), (send, [none] * SIZE)]
        for each in [(send, recv)] if rank == 0 else apart if first == "recv" else apart[::-1]:
            engine.bind_exchange(*each, beside=True)(0)
        engine.check("exchange")
        assert rank == 2 or (out.numpy() == 1 - rank).all()
        engine.close()

    ranks.run_bare(body)


def test_a_sender_runs_ahead_by_two_small_messages_and_no_more(ranks: ThreadRanks, seed: int) -> None:
    sent, rng = threading.Event(), np.random.default_rng(seed)
    messages = [rng.integers(0, 256, int(n), np.uint8) for n in rng.integers(1, 2000, 60)]

    def body(gpu: Any) -> None:
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


def test_a_message_beside_others_takes_few_blocks_and_no_turn(
    ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for what its other rank computes first, with other communicators of this GPU."""
    launched, entered, local = [], [], threading.local()
    bind, enter = HostKernel.bind, Order.enter

    def bound(self: Any, blocks: int, *arguments: Any, **options: Any) -> Any:
        launched.append(blocks)
        return bind(self, blocks, *arguments, **options)

    def entering(self: Order, *arguments: Any) -> bool:
        if self in peer_backend._orders.values():
            entered.append(local.now)
        return enter(self, *arguments)

    monkeypatch.setattr(HostKernel, "bind", bound)
    monkeypatch.setattr(Order, "enter", entering)
    monkeypatch.setattr(peer_engine, "BESIDE_BLOCKS", 2)

    def body(gpu: Any) -> None:
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
    assert launched.count(2) == 4 and set(entered) == {"collective"}


def test_pieces_that_do_not_belong_together(ranks: ThreadRanks) -> None:
    """A message of another length, also one that travels in another way, and a message where a collective expects its
    own; nobody waits for long."""

    def body(gpu: Any, mixed: bool, more: int = 0) -> None:
        comm, rank = gpu.comm, gpu.rank
        x, out = (Array.zeros(100 + rank * more, np.float32, 0) for _ in range(2))
        other = 400 + 4 * more

        def call() -> None:
            comm.all_gather(x) if mixed else comm.send_recv(x, out, 1 - rank, 1 - rank)
            comm.synchronize()

        if rank == 0 and mixed:
            comm.send(x, 1)
        text = b""
        if rank < 2 or mixed:
            try:
                call()  # of ranks that can be done before another finds out
            except (CollectiveMismatch, RankLost) as error:
                text = str(error).encode()
        texts = b" ".join(comm.rendezvous.allgather(text))
        expected = [
            b"expected 400 bytes of a message from rank 1, got %d bytes of a message" % other,
            b"expected %d bytes of a message from rank 0, got 400 bytes of a message" % other,
        ]
        if mixed:
            expected = [b"expected 400 bytes of a collective from rank 0, got 400 bytes of a message"]
        assert (b"all_gather #0" if mixed else b"send_recv #0") + b" of float32" in texts, texts
        assert any(each in texts for each in expected), texts
        comm.abort()

    for more in (1, 10_000):
        ranks.run(lambda gpu, more=more: body(gpu, False, more))
    ranks.run(lambda gpu: body(gpu, True))


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "reduce_scatter", "barrier", "send_recv", "large"])
def test_a_rank_that_does_not_come(ranks: ThreadRanks, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels end, the error names the rank, and a new communicator of the others works."""
    monkeypatch.setattr(watchdog, "TICK", 0.03)
    began: dict[int, float] = {}
    ended = threading.Barrier(SIZE)
    timeout = 2.5

    def body(rendezvous: Rendezvous) -> None:
        comm, rank = communicator(rendezvous, 20.0), rendezvous.rank
        x, out = (Array.zeros(4 * SIZE, np.float32, 0) for _ in range(2))
        large = [Array.zeros(10_000 * SIZE, np.float32, 0) for _ in range(2)]  # in batches
        calls = {
            "barrier": comm.barrier,
            "broadcast": lambda: comm.broadcast(x, SIZE - 1),
            "send_recv": lambda: comm.send_recv(x, out, SIZE - 1, SIZE - 1),
            "large": lambda: comm.all_to_all(*large),
        }

        def call() -> None:
            calls.get(kind, lambda: getattr(comm, kind)(x))()
            comm.synchronize()

        comm.all_reduce(x)
        comm.synchronize()  # the timeout below is not for this one
        rendezvous.barrier()
        comm.timeout = timeout
        rendezvous.timeout = 20.0
        if rank < SIZE - 1:
            began[rank] = time.monotonic()
            with pytest.raises((CollectiveTimeout, RankLost)) as raised:
                call()
            message = str(raised.value)
            name = "all_to_all" if kind == "large" else kind
            assert f"{name} #{0 if kind == 'send_recv' else 1}" in message
            if isinstance(raised.value, CollectiveTimeout):
                absent = rf"rank (\d) did not arrive within {timeout} s \(channel 0, phase"
                found = re.search(absent, message)
                assert found is not None, message
                late = int(found[1])
                assert raised.value.ranks == (late,)
                # The other may have been held up as it began.
                assert late == SIZE - 1 or began.get(late, 1e9) > began[rank] + 0.8 * timeout, message
            with pytest.raises(CollectiveError, match="failed before"):
                comm.all_reduce(x)
        ended.wait(40)  # outside kos: the rank that does not come waits for nobody
        rest = rendezvous.split(None if rank == SIZE - 1 else 0)
        rendezvous.barrier()
        comm.abort()
        if rest is not None:
            again = communicator(rest, 20.0)
            assert (again.all_reduce(Array.from_numpy(np.ones(5, np.float32), 0)).numpy() == 2).all()
            again.close()

    ranks.run_bare(body)


def test_a_message_that_the_watchdog_ends_is_named(ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collective before it has ended well."""
    monkeypatch.setattr(watchdog, "TICK", 0.01)

    def body(rendezvous: Rendezvous) -> None:
        comm = communicator(rendezvous, 20.0)
        x = Array.zeros(4, np.float32, 0)
        comm.all_reduce(x)
        comm.synchronize()
        rendezvous.barrier()
        comm.timeout, rendezvous.timeout = 0.5, 20.0
        if rendezvous.rank == 0:
            found = threading.Event()
            comm.on_failure(lambda error: found.set())  # the program waits outside kos
            comm.recv(x, SIZE - 1)
            assert found.wait(20)
            with pytest.raises(CollectiveError, match=rf"recv #0 .*rank {SIZE - 1} did not arrive within 0.5 s"):
                comm.synchronize()
        rendezvous.barrier()
        comm.abort()

    ranks.run_bare(body)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce"])  # by a kernel that is bound beforehand, and at its launch
@pytest.mark.parametrize(("usual", "own", "late"), [(0.3, 20.0, None), (20.0, 0.3, 0.3)])
def test_a_timeout_of_one_call_is_that_call_s_alone(
    ranks: ThreadRanks, kind: str, usual: float, own: float, late: float | None
) -> None:
    def body(rendezvous: Rendezvous) -> None:
        comm, rank = communicator(rendezvous, 20.0), rendezvous.rank
        x = Array.zeros(4 * SIZE, np.float32, 0)
        comm.all_reduce(x)
        rendezvous.barrier()
        comm.timeout = usual
        rendezvous.timeout = 20.0
        if late is None:
            rendezvous.barrier()
            getattr(comm, kind)(x, timeout=own)
            rendezvous.barrier()
        if rank < SIZE - 1:
            getattr(comm, kind)(x, timeout=None if late is None else own)
            with pytest.raises((CollectiveTimeout, RankLost), match=r"within 0.3 s|ended early|is gone"):
                comm.synchronize(20.0)
        rendezvous.barrier()
        comm.abort()

    ranks.run_bare(body)


@pytest.mark.parametrize("how", ["timeout", "abort"])
def test_blocks_of_one_role_each_do_not_wait_for_ever(ranks: ThreadRanks, how: str) -> None:
    """Whichever of a rank's blocks gives up first, it names the rank that is not there."""

    def body(rendezvous: Rendezvous) -> None:
        engine = PeerEngine(rendezvous, 0, timeout=20.0)
        memory, count = HostMemory(rendezvous, 1 << 17, 0), 16 * SIZE * 99
        engine.register(memory)
        assert engine._roles(4 * count)
        for turn in range(2):
            if turn == 0 or rendezvous.rank < SIZE - 1:
                if turn and how == "abort":
                    threading.Timer(0.2, engine.abort).start()
                launch = Launch("specialized", tile=512)
                engine.bind_all_reduce(memory.pointer, memory.pointer, count, FLOAT, ReduceOp.SUM, launch=launch)(0)
                if turn == 0:
                    engine.check("x")
                    engine.timeout = 0.3 if how == "timeout" else 20.0
            rendezvous.barrier()
        if rendezvous.rank < SIZE - 1:
            timed_out = rf"rank {SIZE - 1} did not arrive within 0.3 s \(channel \d+, phase [13]"
            why = timed_out if how == "timeout" else "aborted"
            with pytest.raises(CollectiveError, match=f"{why}|kernel of rank [01] ended early"):
                engine.check("x")
        rendezvous.barrier()

    ranks.run_bare(body)


def test_what_a_replayed_graph_met_is_raised_where_its_end_is_waited_for(ranks: ThreadRanks) -> None:
    """Of its calls the communicator knows nothing, and it runs to its end."""

    def body(rendezvous: Rendezvous) -> None:
        comm, rank = communicator(rendezvous, 20.0), rendezvous.rank
        looks, engine = iter((False, True)), comm.backend._engine
        x = Array.zeros(4, np.float32, 0)
        comm.all_reduce(x)
        comm.synchronize(until=lambda: next(looks))
        assert not list(looks), "asked until it was over"
        engine.timeout = 0.3
        if rank < SIZE - 1:
            engine.bind_all_reduce(x.pointer, x.pointer, 4, FLOAT, ReduceOp.SUM)(0)
            late = rf"rank {SIZE - 1} did not arrive within 0.3 s|kernel of rank [01] ended early"
            with pytest.raises(CollectiveError, match=f"all_reduce #0 .*: ({late})"):
                comm.synchronize(until=lambda: True)
            with pytest.raises(CollectiveError, match="failed before"):
                comm.synchronize(until=lambda: True)
        rendezvous.barrier()
        comm.abort()

    ranks.run_bare(body)


def test_views_put_and_get(ranks: ThreadRanks) -> None:
    """Each rank reaches the arrays of all, in what it allocated and in parts of that, until the group is closed."""
    views: list[list[Array]] = [[] for _ in range(SIZE)]

    def body(gpu: Any) -> None:
        comm, me = gpu.comm, gpu.rank
        comm.allocate(4, np.int64)
        x = comm.allocate((SIZE, 2), np.float32)
        mine = views[me] = comm.views(x)
        for view in mine:
            assert (view.shape, view.dtype, view.device, view.stream) == (x.shape, x.dtype, x.device, x.stream)
            view[me].copy_from(np.full(2, me, np.float32))
        comm.barrier(stream=5)
        assert x.numpy().tolist() == [[rank] * 2 for rank in range(SIZE)]
        ends = comm.views(x[SIZE - 1 :])
        comm.barrier(stream=5)
        ends[(me + 1) % SIZE].copy_from(np.full((1, 2), 10 + me, np.float32))
        comm.barrier(stream=5)
        assert x[SIZE - 1].numpy().tolist() == [10 + (me - 1) % SIZE] * 2
        for other in (Array.zeros(6, np.float32, 0), np.zeros(6, np.float32)):
            with pytest.raises(InvalidArgument, match=r"^x: expected an array of allocate, .* another float32\[6\]"):
                comm.views(other)
        comm.allocate(2, np.float32)  # frees what no rank uses any more
        windows = len(comm.backend._windows.memories)
        del x, ends
        comm.barrier()
        comm.allocate(2, np.float32)
        assert len(comm.backend._windows.memories) == windows, "freed, although there are views of it"

    ranks.run(body)
    while views:
        several = views.pop()
        while several:
            with pytest.raises(InvalidArgument, match="expected an array with memory, got one that was freed"):
                as_buffer(several.pop(), "x", writable=False)


def test_addresses_mean_nothing_once_their_window_is_freed(ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not either where the memory that was asked for then is not to be had."""

    def body(gpu: Any) -> None:
        comm = gpu.comm
        x = comm.allocate(4, np.float32)
        comm.all_reduce(x)
        comm.barrier()
        assert len(comm.backend._routes) == 2
        del x
        comm.rendezvous.barrier()
        monkeypatch.setattr(peer_backend, "SymmetricMemory", lambda *arguments: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            comm.allocate(4, np.float32)
        assert not comm.backend._windows.memories and not comm.backend._routes

    ranks.run(body)


def test_abort_ends_a_wait(ranks: ThreadRanks) -> None:
    def body(rendezvous: Rendezvous) -> None:
        engine = PeerEngine(rendezvous, 0, timeout=20.0)
        if rendezvous.rank == 0:
            x = Array.zeros(100, np.float32, 0)
            threading.Timer(0.2, engine.abort).start()
            begun = time.monotonic()
            engine.bind_all_reduce(x.pointer, x.pointer, 100, FLOAT, ReduceOp.SUM)(0)
            assert 0.2 <= time.monotonic() - begun < 10
            with pytest.raises(CollectiveError, match="x: aborted while it waited for rank"):
                engine.check("x")
            assert "the GPU waited for rank" in engine.last_wait(0)
        rendezvous.barrier()

    ranks.run_bare(body)


def test_what_ranks_must_agree_on(ranks: ThreadRanks) -> None:
    """Where buffers lie decides the kernel of large calls, so it is compared; small ones go anywhere."""

    def body(gpu: Any) -> None:
        comm = gpu.comm
        symmetric = (1000, Launch("one_shot", threads=64)), (None, Launch("direct"))  # packets go as elsewhere
        comm.backend.use(Launches(symmetric, ((1000, Launch("one_shot")), (None, Launch("two_shot")))))
        ordinary, symmetric = Array.zeros(1 << 18, np.float32, 0), comm.allocate(1 << 18, np.float32)
        other = comm.allocate(1 << 18, np.float32)
        ways, names = {}, ("ordinary", "symmetric", "shifted", "another")
        for count in (100, 1 << 17):
            for name, x in zip(names, (ordinary, symmetric, symmetric[4:], other), strict=True):
                buffer = as_buffer(x[:count], "x", writable=True)
                reduction = resolve(ReduceOp.SUM, buffer.dtype, comm.size)
                call = Call(Operation("all_reduce", comm.rank, send=buffer, recv=buffer, reduction=reduction))
                comm.backend.prepare(call)
                ways[name, count] = call.fingerprint()["kernel"]
        assert len({ways[name, 100] for name in names}) == 1
        assert len({ways[name, 1 << 17] for name in names}) == 4
        prepared = Prepared(comm)
        for _ in range(2):
            comm.all_reduce(other)
        assert not prepared.by(lambda: comm.all_reduce(other))
        comm.backend.use(comm.backend._engine.launches)
        assert prepared.by(lambda: comm.all_reduce(other)), "as before, and perhaps not on all ranks"
        comm.barrier()  # or the last operation keeps its array, whose memory the backend gives back
        assert len({tuple(data) for data in comm.rendezvous.allgather(str(sorted(ways.items())).encode())}) == 1

    ranks.run(body)


def test_a_tag_is_refused_of_a_message_that_went_without_one(ranks: ThreadRanks) -> None:
    """Launches are kept by what was called."""

    def body(gpu: Any) -> None:
        comm, x = gpu.comm, Array.zeros(5, np.float32, 0)
        to, other = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        y = Array.zeros(5, np.float32, 0)
        for _ in range(2):
            comm.send_recv(x, y, to, other)
            with pytest.raises(InvalidArgument, match="tag: expected 0"):
                comm.send_recv(x, y, to, other, tag=1)

    ranks.run(body)


def test_what_the_root_alone_has_does_not_decide(ranks: ThreadRanks) -> None:
    """``auto`` routes by where buffers lie: every rank must find the same."""

    def body(gpu: Any) -> None:
        comm, root = gpu.comm, gpu.comm.rank == 0
        symmetric, ordinary = comm.allocate(300, np.float32), Array.zeros(300, np.float32, 0)
        part = symmetric[:100]
        for each in (
            comm.gather_init(part, 0, ordinary if root else None),
            comm.reduce_init(symmetric, out=ordinary if root else None),
            comm.broadcast_init(ordinary if root else symmetric, out=symmetric if root else None),
            comm.scatter_init(ordinary if root else None, part),
        ):
            assert comm.backend.is_symmetric(each._call.operation), each._call
        assert not comm.backend.is_symmetric(comm.all_reduce_init(symmetric, out=ordinary)._call.operation)

    ranks.run(body)


def test_windows_keep_their_names_when_others_are_freed(ranks: ThreadRanks) -> None:
    """A rank may prepare a persistent operation earlier than another."""

    def body(gpu: Any) -> None:
        comm = gpu.comm
        freed, x = (comm.allocate(1 << 17, np.float32) for _ in range(2))
        early = comm.all_reduce_init(x)
        del freed
        comm.allocate(1, np.float32)
        assert len(comm.backend._windows.memories) == 2
        assert comm.all_reduce_init(x)._call.route.kernel == early._call.route.kernel

    ranks.run(body)


def test_what_is_said_of_an_all_reduce_is_what_is_launched(ranks: ThreadRanks) -> None:
    """Where the staging does not hold what ``specialized`` needs, and where the operation is not for the launch."""
    table = Launches(((None, Launch("specialized", tile=512)),), ((None, Launch("direct")),))

    def body(gpu: Any) -> None:
        comm, backend = gpu.comm, gpu.comm.backend
        staging, launches = backend._engine.staging, backend._engine.launches
        try:
            backend._engine.staging = 1 << 12
            backend.use(table)
            for nbytes, way in (16 * 100, "specialized"), (16 * 5000, "push"):
                x = comm.allocate(nbytes // 4, np.float32)
                assert backend.route_of("all_reduce", nbytes, True) == f"peer {way}"
                assert f"'{way}'" in comm.all_reduce_init(x)._call.route.kernel
                scaled = comm.all_reduce_init(x, PremulSum(2.0))._call.route.kernel
                assert "'two_shot'" in scaled and scaled.endswith("at []")
        finally:
            backend._engine.staging = staging
            backend.use(launches)

    ranks.run(body)


def test_launches_are_bound_where_a_capture_allows_it(ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a batch too, which are bound when it ends: kernels are loaded then."""
    local, bind = threading.local(), PeerEngine.bind_exchange

    @contextmanager
    def relaxed() -> Iterator[None]:
        former, local.relaxed = getattr(local, "relaxed", False), True
        yield
        local.relaxed = former

    def bound(*arguments: Any, **options: Any) -> Any:
        assert getattr(local, "relaxed", False)
        return bind(*arguments, **options)

    monkeypatch.setattr(peer_backend, "relaxed_capture", relaxed)
    monkeypatch.setattr(PeerEngine, "bind_exchange", bound)

    def body(gpu: Any) -> None:
        comm, x, y = gpu.comm, Array.zeros(9, np.float32, 0), Array.zeros(9, np.float32, 0)
        with comm.batch():
            comm.send(x, (comm.rank + 1) % SIZE)
            comm.recv(y, (comm.rank - 1) % SIZE)
        comm.all_to_all(x, y)

    ranks.run(body)


def test_a_broken_gpu_is_the_loss_of_its_rank(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the others; nothing that ends it raises anything more, on whatever thread."""
    reported: list[KosError] = []
    more: list[Any] = []

    def broken(device: int) -> None:
        raise CudaError("cuCtxSynchronize failed")

    backend = communicator(ThreadRendezvous(ThreadGroup(1), 0, 20.0)).backend
    monkeypatch.setattr(threading, "excepthook", more.append)
    monkeypatch.setattr(driver, "synchronize", broken)
    monkeypatch.setattr(driver, "broken", lambda: "CUDA_ERROR_ILLEGAL_ADDRESS")
    late = CollectiveTimeout("all_reduce #7: ranks [1] did not arrive")
    calls = SimpleNamespace(check=Mock(side_effect=late), fail=lambda error, sequence: reported.append(error))
    backend.unwatch()
    backend.shared.calls = calls
    error, seventh = CudaError("cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS (why)"), Operation("all_reduce", 0)
    assert backend.failed(Call(seventh, sequence=7), error) is error
    assert type(backend.broken) is CudaError and not more
    assert [(type(each), str(each)) for each in reported] == [(RankLost, f"rank 0 is gone: {error}")]
    monkeypatch.setattr(driver, "broken", lambda: None)  # the GPU works: other ranks may know the cause
    reported.clear()
    for known in (None, late):
        calls.check.side_effect, backend.broken = known, None
        refused = CompileError("sum.cu:3: undefined")
        assert backend.failed(Call(seventh, sequence=7), refused) is (known or refused)
    assert [(type(each), str(each)) for each in reported] == [
        (CollectiveError, "rank 0: sum.cu:3: undefined"),
        (CollectiveTimeout, "all_reduce #7: ranks [1] did not arrive"),
    ]


def _silent() -> dict[str, Any]:
    """Of the calls of ranks that report nothing."""
    nothing = lambda *arguments: None  # noqa: E731
    return {"fail": nothing, "raise_failure": nothing, "killed": nothing}


def test_the_cause_is_that_of_the_rank_that_failed_first(no_gpu: None) -> None:
    """A kernel that ended because another rank's did waits for that rank's report, which may come a little later."""
    backend = communicator(ThreadRendezvous(ThreadGroup(1), 0, 20.0)).backend
    first = CollectiveTimeout("all_reduce #7: rank 2 did not arrive within 0.3 s")
    reports = iter([None, None, first])
    check = Mock(side_effect=lambda call: _raise(next(reports)))
    backend.unwatch()
    backend.shared.calls = SimpleNamespace(check=check, **_silent())
    call = Call(Operation("all_reduce", 0), sequence=7)
    assert backend.failed(call, EndedEarly("all_reduce #7: the kernel of rank 1 ended early")) is first
    assert check.call_count == 3


def test_a_cause_that_nobody_reports_is_not_awaited_for_ever(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_shared, "_REPORT_SECONDS", 0.05)
    backend = communicator(ThreadRendezvous(ThreadGroup(1), 0, 20.0)).backend
    backend.unwatch()
    backend.shared.calls = SimpleNamespace(check=lambda call: None, **_silent())
    ended = blaming(EndedEarly("rank 1 ended early"), [1])
    failure = backend.failed(Call(Operation("all_reduce", 0), sequence=7), ended)
    assert type(failure) is RankLost and "rank 1 ended early" in str(failure)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def test_errors_of_kernels_name_ranks_of_the_world(ranks: ThreadRanks) -> None:
    """Rank 0 of a group, which is rank 2 of the world."""

    def body(rendezvous: Rendezvous) -> None:
        rank = rendezvous.rank
        part = rendezvous.split(0, -rank)
        assert part is not None
        comm = communicator(part, 20.0)
        comm.all_reduce(Array.zeros(4, np.float32, 0))
        part.barrier()
        comm.timeout, part.timeout = 0.3, 20.0
        if rank == 1:
            comm.recv(Array.zeros(4, np.float32, 0), 0)  # returns when its kernel has given up
            with pytest.raises(CollectiveTimeout) as raised:
                comm.synchronize()
            assert "rank 2 of world did not arrive within 0.3 s (channel 0" in str(raised.value)
            assert raised.value.ranks == (2,)
        rendezvous.barrier()
        comm.abort()

    ranks.run_bare(body)


def test_whom_a_kernel_waits_for_is_shown(ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the program is elsewhere: here in the launch, which on a GPU would return."""
    monkeypatch.setattr(watchdog, "TICK", 0.05)
    shown = threading.Event()

    def body(rendezvous: Rendezvous) -> None:
        comm, rank = communicator(rendezvous, 20.0), rendezvous.rank
        x, board = Array.zeros(4, np.float32, 0), rendezvous.ledger.board
        rendezvous.barrier()
        if rank == 1:  # announced, and not launched
            call = Call(Operation("barrier", rank), "world", sequence=0)
            comm.backend.shared.calls.announce(call)
            while board.awaited(0) != (1,) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert board.awaited(0) == (1,)
            shown.set()
            comm.send(x, 0)
        elif rank == 0:
            comm.recv(x, 1)
        else:
            assert shown.wait(20)
        comm.synchronize()
        rendezvous.barrier()
        comm.abort()

    deadline = time.monotonic() + 15
    ranks.run_bare(body)


def test_what_ends_a_kernel_is_what_is_raised(ranks: ThreadRanks) -> None:
    """The watchdog ends a kernel because a rank died: the program finds the kernel's end, and raises the cause."""

    def body(rendezvous: Rendezvous) -> None:
        comm, rank = communicator(rendezvous, 20.0), rendezvous.rank
        backend, call = comm.backend, Call(Operation("all_reduce", rank), sequence=0)
        backend.unwatch()

        def ended_meanwhile() -> bool:
            backend.failed(call, blaming(RankLost("all_reduce #0: rank 1 is gone: its process ended"), [1]))
            backend._engine._record[[_Word.CAUSE, _Word.PEER, _Word.FAILED]] = 2, 1, 1  # aborted, waiting for rank 1
            return False

        if rank == 0:
            with pytest.raises(RankLost, match="rank 1 is gone: its process ended") as raised:
                backend.wait_on_host(call, ended_meanwhile, 20.0)
            assert raised.value.ranks == (1,)
        rendezvous.barrier()
        comm.abort()

    ranks.run_bare(body)


def test_the_rank_waited_for_is_blamed_only_if_it_is_late(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_shared, "_REPORT_SECONDS", 0.01)
    backend = communicator(ThreadRendezvous(ThreadGroup(1), 0, 20.0)).backend
    shared, board = backend.shared, Mock(awaited=lambda rank: None, failure=lambda rank: None)
    shared.ledger.world, shared.ledger.board, halted = [0, 3], board, set[int]()
    board.halted = board.ended = lambda rank: rank in halted
    board.runs = lambda rank: rank not in halted
    ended = blaming(EndedEarly("all_reduce #7: aborted while it waited for rank 3 of world"), [3])
    error = shared.explained(Call(Operation("all_reduce", 0), sequence=7), ended)
    assert type(error) is RankLost and error.ranks == () and str(error) == str(ended)
    halted.add(3)
    error = shared.explained(Call(Operation("all_reduce", 0), sequence=7), ended)
    assert error.ranks == (3,) and str(error) == f"{ended}: ranks [3] of world did not arrive"


def test_a_window_outlives_the_graphs_that_captured_it(ranks: ThreadRanks) -> None:
    """On one rank or on all: kernels of other ranks reach into it as long as any graph is replayed."""

    def body(gpu: Any) -> None:
        comm = gpu.comm
        x, other = comm.allocate(1 << 12, np.float32), comm.allocate(1 << 12, np.float32)
        x.stream = 5
        with captures() as graph:
            comm.all_reduce(x)
        comm.all_reduce(other)  # or the last operation keeps its array
        windows, pointer = comm.backend._windows.memories, x.pointer
        del x
        for ends in ([], [1], [0, 2], []):
            alive = any(window.pointer == pointer for window in windows.values())
            assert alive, "a graph on some rank uses it"
            if comm.rank in ends:
                graph.destroy()
            comm.rendezvous.barrier()
            comm.allocate(1, np.float32)
            if ends == [0, 2]:
                break
        assert all(window.pointer != pointer for window in windows.values())

    ranks.run(body)
