"""Calls on GPUs that the compiled core makes: they are as those through Python, and Python makes all others.

The driver, NCCL and memory are stand-ins; kernels of peer run on the host.
"""

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.communicator import Communicator
from kos.comm.failures import EndedEarly
from kos.comm.recorder import SLOTS
from kos.cuda import driver
from kos.errors import CollectiveTimeout, CudaError
from tests.comm.fake_gpu import Status, captures
from tests.comm.fake_nccl import FakeRanks
from tests.comm.gpu_eager import by, call_during_start, known, on_gpu
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core
from tests.fake_cuda import Stream

pytestmark = [needs_core, pytest.mark.usefixtures("no_looks")]


@on_each_rank("gpu_run")
def test_a_stream_that_its_owner_closes(comm, /):
    """Its handle is then that of the legacy stream, as Python reads it."""
    stream = Stream(40)
    x, y = on_gpu(np.ones(4, np.float32), stream), on_gpu(np.ones(4, np.float32))
    known(comm, x)
    known(comm, y, stream=stream)
    known(comm, x)
    comm.rendezvous.barrier()
    stream.handle = 0
    with by(comm, 0):
        comm.all_reduce(x)
    with by(comm, 0):
        comm.all_reduce(y, stream=stream)


@on_each_rank(FakeRanks(2).run)
def test_graphs_keep_windows(gpu, /, fake):
    """A captured call goes through Python, which keeps the memory of windows for the graph."""
    comm = gpu.comm
    x, y = comm.allocate(4, np.float32), comm.allocate(4, np.float32)
    stream = Stream(40)
    known(comm, x, stream=stream)
    with captures() as graph, by(comm, 0):
        comm.all_reduce(x, stream=stream)
    with by(comm, 1):
        comm.all_reduce(x, stream=stream)
    with by(comm, 0):  # in another window
        comm.all_reduce(y, stream=stream)
    graph.destroy()


@on_each_rank(FakeRanks(2).run)
def test_a_captured_call_says_nothing_of_eager_ones(gpu, /, fake):
    """Whose route may be another one."""
    comm, x, stream = gpu.comm, on_gpu([1.0]), Stream(40)
    known(comm, x)
    with captures(), by(comm, 0):
        for _ in range(3):
            comm.all_reduce(x, stream=stream)
    with by(comm, 0):
        comm.all_reduce(x, stream=stream)
    with by(comm, 1):
        comm.all_reduce(x, stream=stream)


@on_each_rank(FakeRanks(2).run)
def test_objects_that_are_new_each_time_are_not_kept(gpu, /, fake):
    """They would push out calls that the core knows."""
    comm, x = gpu.comm, on_gpu([1.0])
    known(comm, x)
    fresh = type("ExternalStream", (Stream,), {"__module__": "torch.cuda"})
    for number in range(40):
        comm.all_reduce(x, timeout=10.0 + number)
        comm.all_reduce(x, stream=fresh(40))
    comm.all_reduce(x)
    with by(comm, 1):
        comm.all_reduce(x)


@on_each_rank("gpu_run")
def test_works_of_persistent_starts(comm, /):
    """A start returns a Work that the program has let go; if it has none, Python makes another one."""
    x = on_gpu(np.ones(4, np.float32))
    start = comm.all_reduce_init(x).start
    for _ in range(3):
        work = start()
    with by(comm, 6):
        for _ in range(6):
            work = start()  # the last one is still there
    kept = [start() for _ in range(5)]
    assert len({id(each) for each in [work, *kept]}) == 6
    assert [each.sequence for each in kept] == list(range(work.sequence + 1, work.sequence + 6))
    del work, kept
    with by(comm, 0), comm.batch():
        start()
    comm.timeout = 19.0
    with by(comm, 0):
        start()
    with by(comm, 1):
        start()
    assert x.numpy().tolist() == [2.0**17] * 4


@on_each_rank(FakeRanks(2).run)
def test_a_persistent_start_in_a_capture(gpu, /, fake):
    """Of memory in a window, which is kept for the graph."""
    comm, stream = gpu.comm, Stream(40)
    start = comm.all_reduce_init(comm.allocate(4, np.float32), stream=stream).start
    for _ in range(3):
        start()
    with captures() as graph, by(comm, 0):
        start()
    with by(comm, 1):
        start()
    graph.destroy()


# A communicator of one rank, whose calls are copies.


@on_each_rank("gpu_alone")
def test_in_place_nothing_is_queued(comm, fake, /):
    """A call may be in place, and the next one not."""
    x, y = on_gpu([1.0, 2.0]), on_gpu([0.0, 0.0])
    known(comm, x)
    comm.all_reduce(x, out=x)
    known(comm, x, out=y)
    before = fake.launches
    with by(comm, 4):
        for out in (x, y, x, y):
            comm.all_reduce(x, out=out)
    assert fake.launches - before == 2


@on_each_rank("gpu_alone")
def test_no_output_and_no_data(comm, fake, /):
    x, y = on_gpu([1.0]), on_gpu([9.0])
    comm.exscan(x, out=y)
    comm.exscan(x, out=y)
    with by(comm, 2):
        comm.exscan(x, out=y)
        comm.exscan(x, out=y)
    for _ in range(4):
        comm.barrier(stream=Stream(40))
    assert x.numpy().tolist() == [1.0] and y.numpy().tolist() == [9.0]
    known(comm, x)
    fake.current = 0  # nothing is launched, so no context is needed
    with by(comm, 1):
        comm.all_reduce(x)


@on_each_rank("gpu_alone")
def test_a_timeout_names_the_last_call(comm, driver, /):
    x, y = on_gpu([1.0]), on_gpu([0.0])
    comm.all_reduce(x, out=y)
    comm.all_gather(x, y, algorithm="auto")
    comm.all_reduce(x, out=y, deterministic=True)
    driver.bindings.cuStreamQuery = lambda stream: (Status.CUDA_ERROR_NOT_READY,)
    with pytest.raises(CollectiveTimeout, match="all_reduce #2 "):
        comm.synchronize(timeout=0.2)


@on_each_rank("gpu_alone")
def test_a_failure_of_one_rank_waits_for_no_report(comm, fake, /):
    x = on_gpu([1.0])
    work = comm.all_reduce(x, out=on_gpu([0.0]), async_op=True)
    shared = getattr(comm.backend, "gpus", [comm.backend])[0].shared
    began = time.monotonic()
    shared.cause(work, EndedEarly("ended early"))
    assert time.monotonic() - began < 0.5


@on_each_rank("gpu_alone")
def test_groups_of_one_hold_no_descriptors(comm, fake, /):
    before = len(os.listdir("/proc/self/fd"))
    groups = [comm.duplicate() for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) - before < 20
    for each in groups:
        assert each.all_reduce(on_gpu([1.0])).numpy().tolist() == [1.0]
        each.close()


@on_each_rank("gpu_alone")
def test_a_thread_without_the_context(comm, fake, /):
    """Python makes it current."""
    x, y = on_gpu([1.0], Stream(40)), on_gpu([0.0], Stream(40))
    known(comm, x, out=y)
    fake.current = 0
    with by(comm, 0):
        comm.all_reduce(x, out=y)
    fake.current = driver.primary_context(0)
    with by(comm, 1):
        comm.all_reduce(x, out=y)


@on_each_rank("gpu_alone")
def test_graphs_of_one_rank_keep_windows(comm, fake, /):
    stream = Stream(40)
    x, y = (comm.allocate(4, np.float32) for _ in range(2))
    known(comm, x, out=y, stream=stream)
    with captures() as graph, by(comm, 0):
        comm.all_reduce(x, out=y, stream=stream)
    graph.destroy()


@on_each_rank("gpu_alone")
def test_a_copy_that_is_refused(comm, fake, /):
    x, y = on_gpu([1.0]), on_gpu([0.0])
    known(comm, x, out=y)
    fake.instead["cuMemcpyDtoDAsync_v2"] = lambda *words: 1
    with pytest.raises(CudaError, match="cuMemcpyDtoDAsync failed: status 1"):
        comm.all_reduce(x, out=y)
    with pytest.raises(CudaError, match="failed before"):
        comm.all_reduce(x, out=y)


# What Python runs within a call.


class Asked(Stream):
    """One that runs a function when it is next asked for its handle."""

    at_ask: Callable[[], Any] | None = None

    def __cuda_stream__(self) -> tuple[int, int]:
        at_ask, self.at_ask = self.at_ask, None
        if at_ask is not None:
            at_ask()
        handle: tuple[int, int] = super().__cuda_stream__()
        return handle


@on_each_rank("gpu_run")
def test_a_stream_that_is_asked_may_have_the_call_forgotten(comm, /):
    stream = Asked(40)
    x = on_gpu(np.ones(4, np.float32), stream)
    known(comm, x)
    stream.at_ask = lambda: setattr(comm, "timeout", 19.0)
    with by(comm, 0):
        comm.all_reduce(x)
    assert stream.at_ask is None


@on_each_rank("gpu_run")
def test_a_call_within_the_record_of_another_is_the_next_one(comm, /):
    """An entry of the recorder is overwritten, and what it has kept ends."""
    x, y, z = (on_gpu(np.zeros(n, np.float32)) for n in (4, 4, 8))
    known(comm, x)
    known(comm, z)
    said = list[str]()
    code = compile("call(y)", "a line", "exec")
    exec(code, {"call": comm.all_reduce, "y": y})

    def at_end(_):
        try:
            comm.all_reduce(z)
            said.append("made")
        except Exception as error:
            said.append(str(error))

    watcher = weakref.ref(code, at_end)
    del code
    for _ in range(SLOTS - 1):
        comm.all_reduce(x)
    assert watcher() is not None
    comm.all_reduce(x)
    assert watcher() is None and said == ["made"]
    last = [entry["collective_seq_id"] for entry in comm.recorder.entries()[-3:]]
    assert last == sorted(last) and len({*last}) == 3


@on_each_rank("gpu_run")
def test_a_call_within_the_first_one_of_a_signature_is_not_taken_for_it(comm, /):
    """As of a profile function, through the method of the class, on the same array."""
    x = on_gpu(np.ones(4, np.int32))
    known(comm, on_gpu(np.ones(8, np.int32)), op=kos.ReduceOp.MAX)

    call_during_start(comm, x, "call", lambda: Communicator.all_reduce(comm, x, kos.ReduceOp.MAX))
    for count in range(3):
        assert x.numpy().tolist() == [2 * 2**count] * 4
        comm.all_reduce(x)
