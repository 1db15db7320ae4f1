"""Windows of the nccl backend on GPUs.

mpirun -n 8 python -m pytest --with-mpi -m "mpi and gpu" tests/comm/test_nccl_windows.py
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kos import ReduceOp, cuda
from kos.testing.conformance.model import check
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


MOVES: dict[str, Callable[..., Any]] = {
    "send_recv": lambda c, x, out, _, **at: c.send_recv(x, out, (c.rank + 1) % c.size, (c.rank - 1) % c.size, **at),
    "all_to_all_v": lambda c, x, out, sizes, **at: c.all_to_all_v(x, sizes, [sizes[c.rank]] * c.size, out, **at),
    "all_gather_v": lambda c, x, out, sizes, **at: c.all_gather_v(x[: sizes[c.rank]], sizes, out, **at),
    "gather_v": lambda c, x, out, sizes, **at: c.gather_v(x[: sizes[c.rank]], sizes, 0, at_root(c, out), **at),
    "scatter_v": lambda c, x, out, sizes, **at: c.scatter_v(at_root(c, x), sizes, out, 0, **at),
    "all_to_all": lambda c, x, out, _, **at: c.all_to_all(x, out, **at),
    "gather": lambda c, x, out, _, **at: c.gather(x, 0, at_root(c, out), **at),
    "scatter": lambda c, x, out, _, **at: c.scatter(at_root(c, x), out, 0, **at),
    "reduce_scatter_v": lambda c, x, out, sizes, **at: c.reduce_scatter_v(x, sizes, out, **at),
    "scan": lambda c, x, out, _, **at: c.scan(x, out=out, **at),
}


def at_root(comm: Any, x: Any) -> Any:
    return x if comm.rank == 0 else None


def moved(name: str, xs: list[np.ndarray], sizes: list[int], me: int) -> np.ndarray:
    """What ``me`` receives; of gather and gather_v all ranks would."""
    mine = slice(sum(sizes[:me]), sum(sizes[: me + 1]))
    match name:
        case "send_recv":
            return xs[me - 1]
        case "all_to_all_v":
            return np.concatenate([x[mine] for x in xs])
        case "all_gather_v" | "gather_v":
            return np.concatenate([x[:size] for x, size in zip(xs, sizes, strict=True)])
        case "scatter_v":
            return xs[0][mine]
        case "all_to_all":
            return np.concatenate([np.split(x, len(xs))[me] for x in xs])
        case "gather":
            return np.concatenate(xs)
        case "scatter":
            return np.split(xs[0], len(xs))[me]
        case "reduce_scatter_v":
            return np.sum(xs, 0, np.int32)[mine]
    return np.sum(xs[: me + 1], 0, np.int32)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", MOVES)
@on_each_rank("ranks.run")
def test_messages_between_windows_and_other_memory(gpu, /, seed, name, captured):
    """NCCL copies directly if one end is registered, even if the other end is not: it hangs or loses the data."""
    comm, n, me = gpu.comm, gpu.size, gpu.rank
    stream = cuda.create_stream(comm.device)
    for count in (n * 16 << 10, n * 2 << 20):  # of 4 bytes
        sizes = [count // n // 2 * (2 if rank == n - n % 2 else 1 + 2 * (rank % 2)) for rank in range(n)]
        xs = [np.arange(count, dtype=np.int32) + seed % 1000 + rank * count for rank in range(n)]
        kinds = [comm.allocate(count, np.int32), on_gpu(comm, xs[me])], [
            comm.allocate(n * count, np.int32), on_gpu(comm, np.zeros(n * count, np.int32))
        ]  # fmt: skip
        expected = moved(name, xs, sizes, me)
        by_rank = () if name == "all_to_all" else ((int(me == 0), int(me != 0)), (int(me == 0),) * 2)  # it is refused
        for mixed in ((0, 1), (1, 0), (0, 0), *by_rank):
            x, out = (kind[which] for kind, which in zip(kinds, mixed, strict=True))
            out = out[: expected.size]
            x.copy_from(xs[me], stream)
            for mode in ("call", "capture")[: 1 + captured]:  # the call connects
                out.fill_bytes(0x7F, stream)
                if mode == "call":
                    MOVES[name](comm, x, out, sizes, stream=stream)
                else:
                    with cuda.capture(stream, keep=[x, out]) as graph:
                        MOVES[name](comm, x, out, sizes, stream=stream)
                    graph.replay(stream)
                comm.synchronize(TIMEOUT)
                if me == 0 or not name.startswith("gather"):
                    assert (out.numpy(stream) == expected).all(), f"{mode} of {count}, memory {mixed}"
                if mode == "capture":
                    graph.close()


@on_each_rank("ranks.run")
def test_captured_calls_in_window_after_window(gpu, /, seed):
    """Each window and its graph are gone when the next one is made: none may reach the memory of another."""
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
    """Replays must not write to what lies there next: neither this rank's nor the others'."""
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
