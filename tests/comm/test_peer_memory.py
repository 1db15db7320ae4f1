"""Memory of the peer backend, without a GPU: windows, views, checks across ranks, cached calls, captures."""

import gc
from functools import partial
from typing import Any

import numpy as np
import pytest

from kos import ReduceOp, cuda
from kos.comm.gpu.peer import backend as peer_backend
from kos.comm.operation import Operation
from kos.comm.reduction import resolve
from kos.comm.tuning import KernelConfig, Launches
from kos.cuda import streams
from kos.errors import InvalidArgument
from kos.memory import as_buffer
from kos.memory.array import Array
from tests.comm.fake_gpu import Memory
from tests.comm.fake_nccl import launching_alone
from tests.comm.fake_peer import ThreadRanks
from tests.comm.gpu_ranks import Prepared, engine_of, prepared_of, windows_of
from tests.comm.host_kernel import HostKernel
from tests.comm.ranks import on_each_rank
from tests.comm.test_nccl_logic import test_a_window_outlives_the_graphs_that_captured_it  # noqa: F401
from tests.comm.test_peer import test_windows_are_freed_once_no_rank_uses_them  # noqa: F401 -- collected here
from tests.comm.test_peer_logic import SIZE, copy_directly, no_gpu, pytestmark, ranks
from tests.comm.test_streams import Device
from tests.comm.test_streams import Stream as OwnedStream
from tests.fake_cuda import Contexts, Stream

__all__ = ["no_gpu", "pytestmark", "ranks"]


@on_each_rank("ranks.run")
def test_calls_on_memory_that_is_no_longer_registered(gpu, /):
    memory = Memory(4 * 400_000 + 8192)
    start = memory.pointer + -memory.pointer % 4096
    comm, x = gpu.comm, Array(start, (400_000,), np.float32, 0, owner=memory)
    window, made = comm.register(x), Prepared(comm)

    def reduce():
        x.copy_from(np.full(x.shape, comm.rank, np.float32))
        comm.all_reduce(x)
        assert (x.numpy() == sum(range(SIZE))).all()

    for _ in range(3):
        reduce()
    assert not made.by(reduce)
    del window
    gc.collect()
    comm.barrier()
    comm.allocate(4, np.float32)  # frees windows without arrays on any rank
    assert made.by(reduce)


def test_views_put_and_get(ranks):
    """Each rank can access the symmetric arrays of all ranks, and slices of them, until the group is closed."""
    views = [[] for _ in range(SIZE)]

    def body(gpu):
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
            with pytest.raises(InvalidArgument, match=r"^x: expected an array of .* float32\[6\] in other memory"):
                comm.views(other)
        for empty in (comm.allocate((0, 2), np.float32), x[:0], x[SIZE:]):
            assert [view.shape for view in comm.views(empty)] == [(0, 2)] * SIZE
        del empty
        comm.allocate(2, np.float32)  # frees windows that no rank uses
        windows = len(windows_of(comm))
        del x, ends
        comm.barrier()
        comm.allocate(2, np.float32)
        assert len(windows_of(comm)) == windows, "freed, although there are views of it"

    ranks.run(body)
    while views:
        several = views.pop()
        while several:
            with pytest.raises(InvalidArgument, match="expected an array with memory, got one that was freed"):
                as_buffer(several.pop(), "x", writable=False)


@on_each_rank("ranks.run")
def test_cached_routes_are_dropped_with_their_window(gpu, /, monkeypatch):
    """Also if the allocation that freed the window fails."""
    comm = gpu.comm
    x = comm.allocate(4, np.float32)
    comm.all_reduce(x)
    comm.barrier()
    assert len(comm.backend.store) == 2
    del x
    comm.rendezvous.barrier()
    monkeypatch.setattr(peer_backend, "SymmetricMemory", lambda *arguments: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        comm.allocate(4, np.float32)
    assert not windows_of(comm) and not len(comm.backend.store)


@on_each_rank("ranks.run")
def test_ranks_compare_where_large_buffers_lie(gpu, /):
    """The kernel of a large call depends on the memory that holds its buffers, so ranks compare this."""
    comm = gpu.comm
    # Packets are as for ordinary memory.
    symmetric = (1000, KernelConfig("one_shot", threads=64)), (None, KernelConfig("direct"))
    ordinary = (1000, KernelConfig("one_shot")), (None, KernelConfig("two_shot"))
    comm.backend.routes[0].use(Launches(symmetric, ordinary))
    ordinary, symmetric = Array.zeros(1 << 18, np.float32, 0), comm.allocate(1 << 18, np.float32)
    other = comm.allocate(1 << 18, np.float32)
    ways, names = {}, ("ordinary", "symmetric", "shifted", "another")
    for count in (100, 1 << 17):
        for name, x in zip(names, (ordinary, symmetric, symmetric[4:], other), strict=True):
            buffer = as_buffer(x[:count], "x", writable=True)
            reduction = resolve(ReduceOp.SUM, buffer.dtype, comm.size)
            o = Operation("all_reduce", comm.rank, send=buffer, recv=buffer, reduction=reduction)
            ways[name, count] = comm.backend.prepare(o).values["kernel"]
    assert len({ways[name, 100] for name in names}) == 1
    assert len({ways[name, 1 << 17] for name in names}) == 4
    prepared = Prepared(comm)
    for _ in range(2):
        comm.all_reduce(other)
    assert not prepared.by(lambda: comm.all_reduce(other))
    comm.backend.routes[0].use(engine_of(comm).launches)
    assert prepared.by(lambda: comm.all_reduce(other)), "as before, and perhaps not on all ranks"
    comm.barrier()  # else the last operation would hold its array, whose memory is freed
    assert len({tuple(data) for data in comm.rendezvous.allgather(str(sorted(ways.items())).encode())}) == 1


@on_each_rank("ranks.run")
def test_buffers_that_only_the_root_has_do_not_choose_the_route(gpu, /):
    """``auto`` chooses routes by the memory of buffers, and every rank must choose the same."""
    comm, root = gpu.comm, gpu.comm.rank == 0
    symmetric, ordinary = comm.allocate(300, np.float32), Array.zeros(300, np.float32, 0)
    part = symmetric[:100]
    for call in (
        lambda: comm.gather(part, 0, ordinary if root else None),
        lambda: comm.reduce(symmetric, out=ordinary if root else None),
        lambda: comm.broadcast(ordinary if root else symmetric, out=symmetric if root else None),
        lambda: comm.scatter(ordinary if root else None, part),
    ):
        assert comm.backend.routes[0].is_symmetric(prepared_of(comm, call).operation)
    call = partial(comm.all_reduce, symmetric, out=ordinary)
    assert not comm.backend.routes[0].is_symmetric(prepared_of(comm, call).operation)


@on_each_rank("ranks.run")
def test_windows_keep_their_numbers_when_others_are_freed(gpu, /):
    """One rank may prepare a call again, which another rank has cached."""
    comm = gpu.comm
    freed, x = (comm.allocate(1 << 17, np.float32) for _ in range(2))
    early = prepared_of(comm, lambda: comm.all_reduce(x))
    del freed
    comm.allocate(1, np.float32)
    assert len(windows_of(comm)) == 2
    assert prepared_of(comm, lambda: comm.all_reduce(x)).plan.name == early.plan.name


@pytest.mark.parametrize("stream", [Stream(5), Stream(streams.PER_THREAD), None], ids=["own", "per-thread", "legacy"])
def test_repeated_calls_of_a_thread_whose_current_device_is_another(no_gpu, monkeypatch, stream):
    """The device is made current for default streams and for copies.  Kernels on other streams need no query.

    A copy in a group of one needs the device to be current only on a default stream.
    """
    contexts, copies, group_of_one = Contexts(), list[Any](), [False]
    contexts.install(no_gpu.cu)
    contexts.stack[0] = no_gpu.driver.current = 1  # the communicator's is 0
    copy = no_gpu.cu.cuMemcpyDtoDAsync

    def current():
        return contexts.stack[-1] == 0

    class Checked(HostKernel):
        def bind(self, *arguments, **options):
            run = super().bind(*arguments, **options)

            def launch(stream, *arrays):
                assert streams.handle(stream) > streams.PER_THREAD or current(), "a default stream of another device"
                run(stream, *arrays)

            return launch

    def copied(*arguments):
        assert current() or (group_of_one[0] and arguments[-1] > streams.PER_THREAD), "a copy without a device"
        copies.append(arguments)
        return copy(*arguments)

    no_gpu.load_kernel = Checked
    no_gpu.cu.cuMemcpyDtoDAsync = copied
    copy_directly(monkeypatch)

    def body(gpu):
        comm = gpu.comm
        x, out = Array.zeros(400, np.float32, 0, stream=stream), comm.allocate(400, np.float32)
        out.stream = stream
        default = stream is None or stream.handle == streams.PER_THREAD

        def repeat(call, queries):
            for _ in range(2):
                call()
            prepared = Prepared(comm)
            copies.clear()
            before = contexts.queries
            assert not prepared.by(call)
            assert contexts.queries - before == queries

        with monkeypatch.context() as patch:
            launching_alone(patch)
            repeat(lambda: comm.all_reduce(x), 3 if default else 0)
            repeat(lambda: comm.all_gather(x, out), 4 if default else 1)
            assert copies
        group_of_one[0] = True
        repeat(lambda: comm.scan(x, out=out), int(default))
        assert copies

    ThreadRanks(1).run(body)


def test_copies_beside_the_capture_of_another_stream(no_gpu, monkeypatch):
    """Until a capture ends, eager copies and copies of other captures do not use its stream."""
    device = Device()
    device.install(no_gpu.cu)
    launching_alone(monkeypatch)
    copy_directly(monkeypatch)

    def body(gpu):
        def gather(handle, turn):
            x, out = Array.from_numpy(np.full(400, turn, np.float32), 0), comm.allocate(400, np.float32)
            x.stream = out.stream = several[handle]
            comm.all_gather(x, out)
            assert (out.numpy() == turn).all()

        comm, several = gpu.comm, {handle: OwnedStream(device, handle) for handle in (5, 6, 7)}
        with device.capturing(5), device.capturing(6):
            for turn, handle in enumerate((7, 5, 7, 6, 5, 7, 6)):
                gather(handle, turn)
            assert device.captures == {5: 1, 6: 2, 100: 1, 101: 2} and cuda.create_stream(0).handle == 103
        gather(7, 9)
        with device.capturing(6):
            gather(6, 10)
            gather(7, 11)
            assert device.captures == {6: 3, 100: 3}

    ThreadRanks(1).run(body)
