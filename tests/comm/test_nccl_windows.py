"""Windows of the nccl backend on GPUs.

mpirun -n 8 python -m pytest --with-mpi -m "mpi and gpu" tests/comm/test_nccl_windows.py
"""

import numpy as np
import pytest

from kos import ReduceOp, cuda
from kos.testing.conformance.model import Step, call, check, contributions, result
from tests.comm.ranks import assert_same_on_all_ranks, inputs, on_each_rank
from tests.comm.test_nccl import BACKEND, TIMEOUT, on_gpu, ranks

__all__ = ["BACKEND", "ranks"]
pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@on_each_rank("ranks.run")
def test_windows(gpu, /, seed):
    comm, n, me = gpu.comm, gpu.size, gpu.rank
    for count in (1, 1000, 1 << 20):
        x = comm.allocate(count, np.float32)
        xs = inputs(seed, n, count, np.float32)
        x.copy_from(xs[me])
        comm.all_reduce(x)
        check(x.numpy(), xs, ReduceOp.SUM, [])
        assert_same_on_all_ranks(gpu, x.numpy(), f"window of {count}")
        del x
    outs = [on_gpu(comm, np.zeros(count, np.float32)) for _ in range(4)]
    for out in outs:  # let go of behind calls that have not run
        x = comm.allocate(count, np.float32)
        x.copy_from(xs[me])
        for _ in range(3):
            comm.all_reduce(x, out=out)
        del x
    for out in outs:
        check(out.numpy(), xs, ReduceOp.SUM, [])


NAMES = (
    "send_recv", "all_to_all_v", "all_gather_v", "gather_v", "scatter_v", "all_to_all", "gather", "scatter",
    "reduce_scatter_v", "scan",
)  # fmt: skip


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", NAMES)
@on_each_rank("ranks.run")
def test_messages_between_windows_and_other_memory(gpu, /, seed, name, captured):
    """NCCL copies directly if one end is registered, even if the other end is not: it hangs or loses the data."""
    comm, n, me = gpu.comm, gpu.size, gpu.rank
    stream = cuda.create_stream(comm.device)
    for count in (16 << 10, 2 << 20):  # of 4 bytes
        count *= n if name in ("send_recv", "gather", "scan") else 1
        sizes = [count // 2 * (2 if rank == n - n % 2 else 1 + 2 * (rank % 2)) for rank in range(n)]
        step = Step(name, count, np.int32, counts=[sizes] * n if name == "all_to_all_v" else sizes)
        xs = contributions(seed, step, n)
        expected = result(step, xs, me)
        windows, others = ([make(2 * n * count, np.int32) for _ in range(2)] for make in (
            comm.allocate, lambda size, dtype: on_gpu(comm, np.zeros(size, dtype))
        ))  # fmt: skip
        by_rank = () if name == "all_to_all" else ((int(me == 0), int(me != 0)), (int(me == 0),) * 2)  # it is refused
        for mixed in ((0, 1), (1, 0), (0, 0), *by_rank):
            x, out = ((windows, others)[which][place] for place, which in enumerate(mixed))
            x, out = x[: xs[me].size], out[: 0 if expected is None else expected.size]
            x.copy_from(xs[me], stream)
            for mode in ("call", "capture")[: 1 + captured]:  # the call connects
                out.fill_bytes(0x7F, stream)
                if mode == "call":
                    call(comm, step, x, out, stream=stream)
                else:
                    with cuda.capture(stream, keep=[x, out]) as graph:
                        call(comm, step, x, out, stream=stream)
                    graph.replay(stream)
                comm.synchronize(TIMEOUT)
                if expected is not None:
                    assert (out.numpy(stream) == expected).all(), f"{mode} of {count}, memory {mixed}"
                if mode == "capture":
                    graph.close()


@on_each_rank("ranks.run")
def test_captured_calls_in_window_after_window(gpu, /, seed):
    """Each window and its graph are freed before the next one is created.  None may access the memory of another."""
    comm, count = gpu.comm, 4 << 20
    stream = cuda.create_stream(comm.device)
    for turn in range(4):
        x = comm.allocate(count, np.int32)
        x.stream = stream
        comm.broadcast(x, 0)  # not captured: it connects
        with cuda.capture(stream, keep=[x]) as graph:
            comm.broadcast(x, 0)
        for way in (lambda graph=graph: graph.replay(stream), lambda x=x: comm.broadcast(x, 0)):
            x.copy_from(np.full(count, seed % 1000 + turn if comm.rank == 0 else -1, np.int32), stream)
            comm.barrier()
            way()
            got = x.numpy(stream)
            assert (got == seed % 1000 + turn).all(), f"turn {turn}: {np.unique(got)}"
        graph.close()
        del x, graph, way


@on_each_rank("ranks.run")
def test_a_window_outlives_a_graph_that_keeps_nothing(gpu, /):
    """Replays must not write to memory that is allocated there next, neither on this rank nor on other ranks."""
    comm, count = gpu.comm, 1 << 20
    stream = cuda.create_stream(comm.device)
    x, small = (comm.allocate(n, np.float32) for n in (count, 4))
    x.stream = small.stream = stream
    x.fill_bytes(0, stream)
    comm.all_reduce(x)
    comm.all_reduce(small)
    with cuda.capture(stream) as graph:
        comm.all_reduce(x)
    comm.all_reduce(small)  # or the last operation keeps its array
    del x
    y = comm.allocate(count, np.float32)
    y.copy_from(np.full(count, 7, np.float32), stream)
    comm.barrier()
    graph.replay(stream)
    cuda.synchronize(comm.device)
    comm.barrier()
    assert (y.numpy(stream) == 7).all()
    graph.close()
