"""Arrays of torch, CuPy and JAX on the streams on which their libraries work, in and out of captures.

mpirun -n 2 python -m pytest --with-mpi -m "mpi and gpu" tests/comm/test_client_arrays_gpu.py
"""

import gc
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos import cuda
from kos.memory.array import Array
from tests.comm.ranks import on_each_rank

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

CYCLES = 20_000_000  # about 10 ms
ROUNDS = 10
SMALL, LARGE = 40, 3_000_000
_sizes = itertools.count(100_003, 50_021)  # NCCL connects anew for some of these


@pytest.fixture
def comm(world):
    """A communicator in which nothing has been called yet."""
    comm = world.duplicate()
    yield comm
    if comm.failure is None:
        comm.close()
    else:
        comm.abort()


class Torch:
    def __init__(self, device: int) -> None:
        self.module = pytest.importorskip("torch")
        self.module.cuda.set_device(device)
        self.array, self.stream = self.module.Tensor, self.module.cuda.Stream
        self.on = self.module.cuda.stream
        self.slow = lambda: self.module.cuda._sleep(CYCLES)

    def full(self, count: int, value: float) -> Any:
        return self.module.full((count,), value, device="cuda")

    def copy(self, x: Any) -> Any:
        return x.clone()

    def values(self, x: Any) -> np.ndarray:
        return x.cpu().numpy()

    def handle(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def capture(self, body: Callable[[], Any]) -> Callable[[], None]:
        graph = self.module.cuda.CUDAGraph()
        with self.module.cuda.graph(graph):  # in the default mode, which is global
            body()
        return graph.replay


class CuPy:
    def __init__(self, device: int) -> None:
        self.module = pytest.importorskip("cupy")
        self.module.cuda.Device(device).use()
        self.array = self.module.ndarray
        self.stream = lambda: self.module.cuda.Stream(non_blocking=True)
        self.on = lambda stream: stream
        code = 'extern "C" __global__ void slow(long long n) { long long t = clock64(); while (clock64() - t < n); }'
        kernel = self.module.RawKernel(code, "slow")
        self.slow = lambda: kernel((1,), (1,), (CYCLES,))

    def full(self, count: int, value: float) -> Any:
        return self.module.full(count, value, np.float32)

    def copy(self, x: Any) -> Any:
        return x.copy()

    def values(self, x: Any) -> np.ndarray:
        return self.module.asnumpy(x)

    def handle(self, stream: Any) -> int:
        return int(stream.ptr)

    def capture(self, body: Callable[[], Any]) -> Callable[[], None]:
        stream = self.stream()
        with stream:
            stream.begin_capture()
            body()
            graph = stream.end_capture()

        def replay() -> None:
            graph.launch()

        replay.stream = stream
        return replay


@pytest.fixture(params=[Torch, CuPy], ids=["torch", "cupy"])
def library(request, world):
    return request.param(world.device)


def total(comm: kos.Communicator) -> int:
    return comm.size * (comm.size + 1) // 2


def check(library: Any, x: Any, expected: float) -> None:
    values = library.values(x)
    assert (values == expected).all(), f"expected {expected}, got {(values != expected).sum()} others: {values[:4]}"


@on_each_rank("on_all")
def test_the_current_stream_is_followed(comm, library):
    """A slow kernel and a fill come before the call, and a copy after it.

    Streams are created and destroyed meanwhile.
    """
    for turn, count in itertools.product(range(ROUNDS), (SMALL, LARGE)):
        with library.on(library.stream()):
            library.slow()
            x = library.full(count, turn + comm.rank + 1)
            assert comm.all_reduce(x) is x
            check(library, library.copy(x), turn * comm.size + total(comm))
            library.slow()
            x = library.full(count, turn + comm.rank + 1)
            work = comm.all_reduce(x, async_op=True)
            assert work.wait() is x
            check(library, library.copy(x), turn * comm.size + total(comm))
        gc.collect()


@on_each_rank("on_all")
def test_a_stream_that_is_given_wins(comm, library):
    stream, other = library.stream(), library.stream()
    for given in (stream, library.handle(stream)):
        with library.on(stream):
            library.slow()
            x = library.full(LARGE, comm.rank + 1)
        with library.on(other):
            comm.all_reduce(x, stream=given)
            out = comm.all_gather(x, stream=given)
        with library.on(stream):
            check(library, library.copy(x), total(comm))
            check(library, library.copy(out), total(comm))


@on_each_rank("on_all")
def test_streams_that_are_gone_are_not_asked(comm, library):
    for given in ("current", "handle"):
        for end in (comm.barrier, comm.synchronize, lambda: comm.all_reduce(library.full(LARGE, 1.0))):
            stream = library.stream()
            with library.on(stream):
                library.slow()
                x = library.full(LARGE, comm.rank + 1)
                comm.all_reduce(x, stream=library.handle(stream) if given == "handle" else None)
                check(library, library.copy(x), total(comm))
            del stream
            gc.collect()
            end()
    for _ in range(50):
        with library.on(library.stream()):
            comm.all_reduce(x)
        gc.collect()
    comm.synchronize()


def test_captured_as_the_first_call_of_its_kind(comm, library, on_all):
    """In the default mode of torch.cuda.graph, no thread may do anything that could disturb the capture."""
    count = next(_sizes)

    def body():
        x = library.full(count, 1.0)
        outs = []

        def calls():
            comm.all_reduce(x)
            outs.append(comm.all_gather(x))
            outs.append(comm.reduce_scatter(library.copy(outs[0])))
            work = comm.broadcast(outs[1], 0, async_op=True)
            work.wait()
            outs.append(library.copy(outs[1]))

        replay = library.capture(calls)
        stream = getattr(replay, "stream", None) or library.stream()
        for turn in range(4):
            with library.on(stream):
                library.slow()
                x[:] = turn + comm.rank + 1
                replay()
                summed = turn * comm.size + total(comm)
                check(library, library.copy(x), summed)
                check(library, library.copy(outs[0]), summed)
                check(library, library.copy(outs[2]), summed * comm.size)
        comm.synchronize()
        outs.clear()

    on_all(body)


def test_order_is_kept_across_a_capture(comm, library, on_all):
    """Calls run eagerly on one stream behind a slow kernel, are captured on a second, and run eagerly on a third."""

    def body():
        comm.all_reduce(library.full(SMALL, 0.0))
        comm.all_reduce(captured)
        comm.synchronize()
        for _ in range(ROUNDS):
            first, third = library.stream(), library.stream()
            xs = [library.full(count, comm.rank + 1) for count in (SMALL, LARGE, SMALL, LARGE)]
            comm.barrier()
            cuda.synchronize(comm.device)
            with library.on(first):
                for _ in range(1 + comm.rank):
                    library.slow()
                for x in xs[:2]:
                    comm.all_reduce(x)
            stream = cuda.create_stream(comm.device)  # torch.cuda.graph would wait for the whole GPU first
            with cuda.capture(stream, keep=[captured]) as graph:
                comm.all_reduce(captured, stream=stream)
            with library.on(third):
                for x in xs[2:]:
                    comm.all_reduce(x)
                for x in xs[2:]:
                    check(library, library.copy(x), total(comm))
            with library.on(first):
                for x in xs[:2]:
                    check(library, library.copy(x), total(comm))
            comm.synchronize()
            graph.close()

    captured = Array.zeros(SMALL, np.float32, comm.device)
    on_all(body)


def test_jax(comm, on_all):
    """Calls wait until JAX has made their input.  Results are arrays of JAX, and are kept until JAX has read them."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    device = jax.devices("gpu")[comm.device]

    def body():
        def slowly(x):
            return jax.lax.fori_loop(0, 300, lambda i, y: y * 1.0 + 0.0, x)

        make, double = jax.jit(lambda x, k: slowly(x) + k), jax.jit(lambda x, zeros: x * (2 + slowly(zeros)[0]))
        with jax.default_device(device):
            zeros = jax.device_put(np.zeros(LARGE, np.float32), device)
            for turn in range(ROUNDS):
                out = comm.all_gather(make(zeros, turn + comm.rank))  # whose memory JAX may use again at once
                again = [make(zeros, 1e6) for _ in range(3)]
                assert isinstance(out, jax.Array)
                doubled = double(out, zeros)
                del out
                again += [comm.all_gather(again[0]) for _ in range(3)]
                got = np.asarray(doubled)
                assert (got == 2 * (turn + np.arange(comm.size))[:, None]).all(), got[:, :3]
                del again
            mine = comm.reduce_scatter(jax.numpy.ones(comm.size * 8))
            assert isinstance(mine, jax.Array) and (np.asarray(mine) == comm.size).all()

    on_all(body)
