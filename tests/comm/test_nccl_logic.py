"""The nccl backend's own work, without a GPU (see ``fake_nccl``): the conformance suite, on ranks that are threads."""

import asyncio
import gc
import re
import threading
import time
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import kos
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.gpu import nccl_binding
from kos.comm.gpu.memory import Windows, exchange_of
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.operation import Operation
from kos.cuda import driver
from kos.cuda.kernels import Address, Launch, Plan
from kos.errors import CollectiveMismatch, InvalidArgument
from kos.memory.array import Array
from kos.memory.windows import WindowMemory
from kos.testing.conformance import results
from kos.testing.conformance.model import GATHERING, REDUCING, SCATTERING, Step, call, contributions, result, uneven
from tests.comm import test_conformance as conformance
from tests.comm.fake_gpu import captures
from tests.comm.fake_nccl import FakeRanks, alone, of_nccl, waits_that_are_bounded
from tests.comm.gpu_ranks import Prepared, windows_of
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core
from tests.comm.test_conformance import *  # noqa: F403 -- the tests that GPUs run too
from tests.comm.test_nccl import (  # noqa: F401 -- collected here
    test_deterministic_is_in_rank_order,
    test_refusals,
    test_several_communicators,
)
from tests.host_compiler import COMPILER

SIZE = 3


@pytest.fixture
def ranks(fake, request):
    if COMPILER is None and ("compressed" in request.node.name or "feedback" in request.node.name):
        pytest.skip("needs a C++ compiler: g++ or clang++")  # for the kernels that quantize
    return FakeRanks(SIZE)


COMPRESSED = ("compressed int4 bfloat16", "feedback_keeps_what_is_lost fp8 float32")  # their emulated kernels take long
KINDS = re.compile(".* (float32|bfloat16|complex64|bool) .*")  # one for each way in which NCCL adds


def is_drawn(name: str) -> bool:
    """Whether a promise that is checked on GPUs is checked here, too.

    Promises of float32 are.  Of other dtypes, one promise in two is checked for the dtypes of ``KINDS`` and for SUM and
    MAX, so that each such pair of a dtype and a reduce operation is checked in an all_reduce or in a reduce_scatter.
    Of the remaining promises, one in eight is checked.
    """
    if name.startswith(("compressed", "feedback")):
        return name in COMPRESSED
    if not conformance.OF_OTHER_DTYPES.fullmatch(name):
        return True
    one_in_two = KINDS.fullmatch(name) or name.endswith((" SUM", " MAX"))
    return conformance.is_for_mpi(name) if one_in_two else crc32(name.encode()) % 8 == 0


@pytest.mark.parametrize("name", filter(is_drawn, conformance.names_of(gpu=True)))
def test_promise(ranks, seed, name):
    conformance.check(ranks, seed, name)


@pytest.mark.parametrize("step", [s for s in conformance.STEPS if KINDS.fullmatch(f" {s.dtype} ")], ids=str)
def test_result(ranks, seed, step):  # of fewer dtypes than on GPUs
    ranks.run(lambda comm: results.correct(comm, seed, step))


def test_booleans_in_a_group_of_one(fake, seed):
    """Their bytes in a result are 0 or 1, as in other groups.  Other dtypes are copied."""
    for name in REDUCING:
        step = Step(name, dtype=np.bool_, op=kos.ReduceOp.BAND)
        FakeRanks(1).run(lambda comm, step=step: results.correct(comm, seed, step))


@on_each_rank(FakeRanks(3).run)
def test_messages_of_a_batch_come_before_what_adds_in_rank_order(gpu, /, fake):
    """Also on a rank that has only one of the two.  In another order, NCCL would wait forever."""
    comm, (x, sent, received) = gpu.comm, [Array.from_numpy(np.full(4, gpu.rank, np.float32), 0) for _ in range(3)]
    with comm.batch():
        comm.all_reduce(x, deterministic=True)
        if gpu.rank > 0:
            comm.recv(received, gpu.rank - 1)
        if gpu.rank < 2:
            comm.send(sent, gpu.rank + 1)
    assert (x.numpy().tolist(), received.numpy().tolist()) == ([3] * 4, [max(gpu.rank - 1, 0)] * 4)


@on_each_rank("ranks.run")
def test_calls_with_error_feedback_in_a_batch(gpu, /, seed):
    """Their kernels run between their exchanges.  A group of NCCL would delay the exchanges to its end."""
    comm, rng = gpu.comm, np.random.default_rng((seed, gpu.rank))
    data = [rng.standard_normal(300).astype(np.float32) for _ in range(3)]
    alone, together = ([(Array.from_numpy(x, 0), Array.zeros(300, np.float32, 0)) for x in data] for _ in range(2))
    for x, residual in alone:
        comm.all_reduce(x, compress="int8", residual=residual)
    with comm.batch():
        for x, residual in together:
            comm.all_reduce(x, compress="int8", residual=residual)
    for one, other in zip(alone, together, strict=True):
        assert [each.numpy().tolist() for each in one] == [each.numpy().tolist() for each in other]


@on_each_rank(FakeRanks(3).run)
def test_the_first_message_to_each_peer_is_launched_with_a_timeout(gpu, /, fake):
    """NCCL connects two ranks when one first sends to the other, even if that rank has sent to other ranks before."""
    comm, x, y = gpu.comm, Array.zeros(5, np.float32, 0), Array.zeros(5, np.float32, 0)
    bounded = waits_that_are_bounded(comm.backend.routes[0])
    for step in (1, 2, 1, 2):
        comm.send_recv(x, y, (comm.rank + step) % 3, (comm.rank - step) % 3)
    assert [what[:18] for what in bounded] == ["world: send_recv #"] * 2


@on_each_rank(FakeRanks(2).run)
def test_scratch_memory_does_not_grow_with_the_streams(gpu, /, fake):
    """After the host has waited for all streams, scratch memory is freed, unless a graph may hold it."""
    comm, x = gpu.comm, Array.zeros(5, np.int16, 0)
    for stream in range(5, 25):
        with captures() if stream == 7 else nullcontext():
            comm.all_reduce(x, stream=stream)
    comm.all_reduce(Array.zeros(1 << 20, np.int16, 0), stream=24)
    pieces = [piece for each in comm.backend._scratch._pieces.values() for piece in each]
    assert len(pieces) == 21
    comm.synchronize()
    assert {stream: len(each) for stream, each in comm.backend._scratch._pieces.items()} == {(7, 0): 1, (24, 0): 1}
    assert sum(not piece.pointer for piece in pieces) == 19
    comm.all_reduce(x, stream=7)
    comm.all_reduce(x, stream=5)


def test_no_window_is_allocated_unless_all_ranks_have_joined(fake):
    fake.comm_init_rank_scalable = lambda *arguments: 1 // 0
    fake.mem_alloc = lambda nbytes: pytest.fail("nobody frees it")
    backend = of_nccl(ThreadControlPlane(ThreadGroup(1), 0, 20.0))
    with pytest.raises(ZeroDivisionError):
        backend.allocate(3, np.int32)


def test_a_window_outlives_the_calls_that_use_it(fake):
    """Its array is freed as soon as a call is queued.

    The next ``allocate``, or the close, waits and then frees the window.
    """
    log, over = fake.windows, list[int]()

    def query(stream):
        log.append(("looked", stream))
        return (over.pop() if over else 0,)

    driver.cu.cuStreamQuery = query
    comm = alone()
    x, lives_on = comm.allocate(5, np.float32), comm.allocate(5, np.float32)
    first, last = x.pointer, lives_on.pointer
    comm.all_reduce(x)
    comm.all_reduce(lives_on)  # or the last operation keeps its array
    log.clear()
    del x
    assert not log, "freed behind a call that has not run"
    over.append(driver.cu.CUresult.CUDA_ERROR_NOT_READY)
    y = comm.allocate(6, np.float32)
    second = y.pointer
    assert [what for what, _ in log] == ["looked", "looked", "deregister", "free", "register"]
    assert {address for _, address in log[2:4]} == {first}
    del y, log[:]
    comm.close()
    assert log == [("deregister", second), ("free", second)]
    del lives_on
    assert log[2:] == [("free", last)]


BY_MESSAGES = (
    "all_gather_v", "gather_v", "scatter_v", "reduce_scatter_v", "all_to_all_v", "all_to_all", "gather", "scatter",
    "send_recv",
)  # fmt: skip


@pytest.mark.parametrize("windows", [True, False])
@on_each_rank(FakeRanks(3).run)
def test_messages_from_and_to_any_memory(gpu, /, fake, windows, seed):
    """In windows, of cuMemCreate, or other memory; captured, in batches and in place.

    NCCL hangs or loses data if only one end of a message is registered. The stand-in refuses such messages.
    """
    comm, me, n = gpu.comm, gpu.rank, gpu.size
    rng, own = np.random.default_rng(seed), np.random.default_rng(seed + 1 + me)
    places = [comm.allocate(4000, np.int32) if windows else Array.zeros(4000, np.int32, 0)]
    places += [Array.zeros(4000, np.int32, 0) for _ in range(2)]
    virtual = range(places[1].pointer, places[1].pointer + places[1].nbytes)
    fake.virtual.update(virtual)

    def make(name, at):
        step = Step(name, int(rng.integers(40)), np.int32, root=int(rng.integers(n)), in_place=rng.random() < 0.5)
        kinds, in_place = rng.integers(3, size=2), step.in_place and name in GATHERING + SCATTERING
        xs = contributions(seed + at, step, n)
        expected = result(step, xs, me)
        source, target = (places[kind][at:] for kind in (own.integers(3, size=2) if name == "send_recv" else kinds))
        x, out = source[: xs[me].size], target[2000:][: 0 if expected is None else expected.size]
        if in_place and expected is not None:
            counts = uneven(step, n) if name.endswith("_v") else [step.count] * n
            part = slice(sum(counts[:me]), sum(counts[: me + 1]))
            if name in GATHERING:
                x = out[part]
            elif name.startswith("reduce") or me == step.root:
                out = x[part]
        x.copy_from(xs[me])
        call(comm, step, x, out, stream=5)
        return step, out, expected

    for turn in range(60):
        names = BY_MESSAGES if turn == 0 else rng.choice(BY_MESSAGES, rng.integers(1, 4)).tolist()
        captured, at_once = turn > 0 and rng.random() < 0.5, rng.random() < 0.5  # the first calls connect
        with captures() if captured else nullcontext(), comm.batch() if at_once else nullcontext():
            made = [make(name, 200 * number) for number, name in enumerate(names)]
        for step, out, expected in made:
            assert expected is None or out.numpy().tolist() == expected.tolist(), f"{step}, captured {captured}"
    fake.virtual.difference_update(virtual)  # it is freed as other memory


@needs_core
@pytest.mark.parametrize("deterministic", [False, True])
@on_each_rank(FakeRanks(2).run)
def test_windows_on_some_ranks_are_refused(gpu, /, fake, deterministic):
    """NCCL would start different kernels on the ranks, and hang.

    A sum in rank order uses NCCL's function to gather.
    """
    fake.all_reduce = fake.all_gather = lambda *arguments: None  # it would wait for the other rank, on the host
    comm, arrays = gpu.comm, [gpu.comm.allocate(4, np.float32), Array.zeros(4, np.float32, 0)]
    assert comm.all_reduce(arrays[0], out=arrays[1]) is arrays[1]
    comm.send_recv(arrays[gpu.rank], arrays[1 - gpu.rank], 1 - gpu.rank, 1 - gpu.rank)  # of any memory

    def reduce():
        for _ in range(1000):  # the earlier of the two finds it at a later call
            comm.all_reduce(arrays[gpu.rank], deterministic=deterministic)
            time.sleep(0.001)

    with pytest.raises(CollectiveMismatch, match=r"they differ in kernel for x and out in windows against None"):
        reduce()


@on_each_rank(FakeRanks(2).run)
def test_waits_for_the_first_of_several(gpu, /, fake):
    """Operations on GPUs and a message to nobody, by each way to wait for them."""
    x, y = Array.from_numpy(np.arange(4.0), 0), Array.from_numpy(np.arange(4.0), 0)

    async def both():
        return await gpu.comm.all_reduce(x, async_op=True), await gpu.comm.all_reduce(y, async_op=True)

    assert asyncio.run(both()) == (x, y)
    works, called = [gpu.comm.all_reduce(each, async_op=True) for each in (x, y)], threading.Event()
    works[0].add_done_callback(lambda work: called.set())
    assert called.wait(10.0) and kos.wait_any(works, timeout=5.0) in works
    works.append(gpu.comm.send(x, kos.NOBODY, async_op=True))
    assert {*kos.as_completed(works)} == {*works}
    gpu.comm.synchronize()
    assert x.numpy().tolist() == [0, 4, 8, 12]


@on_each_rank(FakeRanks(2).run)
def test_messages_to_nobody(gpu, /, fake):
    x, y = Array.from_numpy(np.arange(4.0), 0), Array.zeros(4, np.float64, 0)
    left, right = gpu.comm.grid(2).shift(0)
    assert gpu.comm.send_recv(x, y, right, left) is y
    assert y.numpy().tolist() == ([0, 0, 0, 0] if gpu.comm.rank == 0 else [0, 1, 2, 3])
    with gpu.comm.batch(async_op=True) as batch:
        gpu.comm.send(x, left)
        gpu.comm.recv(y, right)
    batch.works[gpu.comm.rank].synchronize(5.0)
    assert gpu.comm.recv(y, kos.NOBODY) is y and gpu.comm.send(x, kos.NOBODY, async_op=True).done()
    batch.wait()
    gpu.comm.synchronize()
    assert y.numpy().tolist() == [0, 1, 2, 3]


@on_each_rank(FakeRanks(2).run)
def test_shared_memory_stays_while_the_watchdog_looks_at_it(gpu, /, fake):
    """A backend that becomes part of another closes its shared memory.

    A check in progress must not fail because of that.
    """
    shared = gpu.comm.backend.shared
    closing = threading.Thread(target=shared.close)
    with shared.lock:  # as a look
        calls = shared.calls
        closing.start()
        closing.join(0.1)
        assert closing.is_alive() and shared.calls is calls
    closing.join(10.0)
    assert not closing.is_alive() and shared.calls is None


@on_each_rank("ranks.run")
def test_calls_without_counts_are_refused_in_a_graph(gpu, /):
    """A call without counts is refused before anything is sent.

    Outside of a capture, the rendezvous exchanges the sizes.
    """
    comm, n = gpu.comm, gpu.comm.size
    x = Array.from_numpy(np.full(comm.rank, comm.rank, np.float32), 0)
    with captures(), pytest.raises(InvalidArgument, match="^counts: expected numbers while a CUDA graph is capt"):
        comm.all_gather_v(x, stream=5)
    assert comm.all_gather_v(x).numpy().tolist() == [rank for rank in range(n) for _ in range(rank)]
    work = comm.gather_v(x, root=1, async_op=True)
    assert (work.wait(10.0) is None) == (comm.rank != 1)


@on_each_rank("ranks.run")
def test_a_window_outlives_the_graphs_that_captured_it(gpu, /):
    """On one rank or on all.  Calls of other ranks access the window as long as any graph is replayed."""
    comm = gpu.comm
    x, y, other = (comm.allocate(1 << 12, np.float32) for _ in range(3))
    x.stream = y.stream = 5
    prepared = Prepared(comm)
    for _ in range(3):
        comm.all_reduce(other)  # the first connects, on another thread
        comm.all_reduce(x, out=y)
    assert prepared == ["all_reduce"] * (3 if "nccl" in comm.backend_name else 2)  # one more that connects
    with captures() as graph:
        comm.all_reduce(x, out=y)
    comm.all_reduce(other)  # or the last operation keeps its array
    windows, pointers = windows_of(comm), {x.pointer, y.pointer}
    del x, y
    for ends in ([], [1], [0, 2]):
        alive = {window.pointer for window in windows.values()}
        assert pointers <= alive, "a graph on some rank uses them"
        if comm.rank in ends:
            graph.destroy()
        comm.rendezvous.barrier()
        comm.allocate(1, np.float32)
    assert pointers.isdisjoint(window.pointer for window in windows.values())


def test_addresses_of_a_freed_window_never_come_back(fake):
    log, cu = list[Any](), fake.cu
    cu.cuMemRetainAllocationHandle = lambda pointer: (0, "handle")
    cu.cuMemGetAddressRange = lambda pointer: (0, pointer, 64)
    cu.cuMemUnmap = lambda *what: log.append(what) or (0,)
    cu.cuMemRelease = lambda what: log.append(what) or (0,)
    fake.mem_free = log.append
    nccl_binding.free(4096)
    assert log == [(4096, 64), "handle", "handle"]
    cu.cuMemRetainAllocationHandle = lambda pointer: (1, None)
    nccl_binding.free(4096)
    assert log[3:] == [4096], "NCCL had it from cudaMalloc"


def test_a_window_that_is_collected_while_others_are_freed(fake):
    """Its release frees all unused windows, also those that are about to be freed."""
    freed = []

    def free(memory):
        freed.append(memory.pointer)
        if len(freed) == 1:
            windows.release(3)

    rendezvous = ThreadControlPlane(ThreadGroup(1), 0, 20.0)
    windows = Windows(rendezvous, 0, free, lambda: len(freed) > 0)
    windows.memories = {number: WindowMemory(number, 1, "window") for number in (1, 2, 3)}
    windows.release(1)
    windows.release(2)
    windows.free(windows.unused())
    assert sorted(freed) == [1, 2, 3] and not windows.memories and not windows.unused()


def test_library_is_asked_for_what_it_has(fake):
    fake.get_version = lambda: 22605
    with pytest.raises(kos.errors.BackendUnavailable, match=r"windows: expected NCCL 2.27 or newer, got 2.26.5"):
        nccl_binding.register(None, 4096, 4096)


@on_each_rank(FakeRanks(1).run)
def test_nothing_keeps_the_arrays_of_a_call(gpu, /, fake):
    """Memory of a GPU must not wait for the garbage collector, not even that of the first call of its kind."""
    comm, gone = gpu.comm, []
    gc.collect()
    gc.disable()
    try:
        for count in (5, 5, 700):
            x = Array.zeros(count, np.float32, 0)
            comm.all_reduce(x)
            gone.append(weakref.ref(x))
        for _ in range(2):
            with comm.batch():
                for count in (6, 800):
                    x = Array.zeros(count, np.float32, 0)
                    comm.broadcast(x, 0)
                    gone.append(weakref.ref(x))
        x = None
        comm.barrier()
        assert [array() for array in gone] == [None] * 7
    finally:
        gc.enable()


@on_each_rank(FakeRanks(1).run)
def test_arrays_of_a_batch_live_until_it_is_over(gpu, /, fake):
    """The batch runs beside the caller's stream, so memory freed in the order of that stream may still be in use."""
    over = [0]
    driver.cu.cuEventQuery = lambda event: (over[0],)
    comm, x = gpu.comm, Array.zeros(4, np.float32, 0)
    for _ in range(2):  # the first calls of a kind are kept longer
        comm.all_reduce(x)
    over[0] = driver.cu.CUresult.CUDA_ERROR_NOT_READY
    arrays = [Array.zeros(4, np.float32, 0) for _ in range(3)]
    left = [weakref.ref(array) for array in arrays]
    with comm.batch(async_op=True) as batch:
        for array in arrays:
            comm.all_reduce(array)
    del batch, arrays, array
    comm.all_reduce(x)
    gc.collect()
    assert None not in [array() for array in left]
    over[0] = 0
    for _ in range(2):
        comm.all_reduce(x, async_op=True).wait()
    gc.collect()
    assert [array() for array in left] == [None] * 3


@pytest.mark.parametrize(("number", "setting", "may"), [(23007, "1", True), (22809, "1", False), (23007, "0", False)])
def test_ranks_share_a_gpu_where_nccl_lets_them(number, setting, may, fake, monkeypatch):
    """The probe claims the GPU for its rank, unless NCCL 2.30 or newer is configured to share GPUs."""
    fake.get_version = lambda: number
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", setting)
    probe = NCCLBackend.probe(ThreadControlPlane(ThreadGroup(1), 0))
    assert probe.usable and (probe.claim == "") is may, probe


def test_an_operation_whose_exchange_is_unknown_is_refused():
    """Otherwise it would move nothing and raise no error."""
    with pytest.raises(NotImplementedError, match="expected an operation that exchanges pieces .*, got unknown"):
        exchange_of(Operation("unknown", 0), 0, 2)


def test_a_plan_ends_its_group_if_a_step_raises():
    called: list[object] = []
    start, last, copy = (Launch(partial(called.append, name), 0, (), OSError) for name in ("start", "last", "copy"))
    end = Launch(partial(called.append, "end"), 0, (), OSError, closes=2)
    refused = Launch(lambda at: called.append(at) or 1 / 0, 0, (Address(1, 4, 0),), OSError)
    with pytest.raises(ZeroDivisionError):
        Plan((Plan((start, refused)), last, end, copy))(0, 100, 200)
    assert called == ["start", 204, "end"]
