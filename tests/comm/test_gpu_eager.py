"""Calls on GPUs that the compiled core makes: they are as those through Python, and Python makes all others.

The driver, NCCL and memory are stand-ins; kernels of peer run on the host.
"""

import numpy as np
import pytest

from tests.comm.fake_gpu import captures
from tests.comm.fake_nccl import FakeRanks
from tests.comm.gpu_eager import by, hits, known, on_gpu
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core
from tests.fake_cuda import Stream

pytestmark = [needs_core, pytest.mark.usefixtures("no_looks")]


@on_each_rank("gpu_run")
def test_the_recorder_has_them(comm, /):
    for _ in range(4):
        comm.all_reduce(on_gpu([1.0, 2.0]))  # this line
    entries = comm.recorder.entries()[-4:]
    assert [entry["collective_seq_id"] for entry in entries] == [0, 1, 2, 3]
    assert len({entry["frames"][0]["line"] for entry in entries}) == 1
    assert "test_gpu_eager.py" in entries[-1]["frames"][0]["filename"]
    assert "all_reduce #3 at" in comm.recorder.last_call() and hits(comm) >= 2
    last = comm.backend._last
    assert last is comm.backend.shared.last and last.sequence == 3 and last.record[4] == 3


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
