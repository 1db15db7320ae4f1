"""Calls of a communicator of one rank on a GPU: the compiled core makes them, as copies.

The driver, NCCL and memory are stand-ins.
"""

import os
import time

import numpy as np
import pytest

from kos.comm.failures import EndedEarly
from kos.cuda import driver
from kos.errors import CollectiveTimeout, CudaError
from tests.comm.fake_gpu import Status, captures
from tests.comm.gpu_eager import by, known, on_gpu
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core
from tests.fake_cuda import Stream
from tests.host_compiler import needs_compiler

pytestmark = [needs_core, needs_compiler, pytest.mark.usefixtures("no_looks")]


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
def test_graphs_keep_windows(comm, fake, /):
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
