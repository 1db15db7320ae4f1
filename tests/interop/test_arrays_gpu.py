"""Arrays of CuPy, Numba, JAX, torch, DLPack and NumPy in every operation, where they live, on their library's stream.

mpirun -n 2 python -m pytest --with-mpi -m "mpi and gpu" -rA tests/interop/test_arrays_gpu.py

The last rank has GPU 0 and rank 0 the last GPU.  Each test runs with the rank's GPU as the thread's current device and
with another one; kos must leave the current device as it is.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

import kos
from kos import cuda
from kos.cuda import driver
from kos.errors import InvalidArgument
from kos.memory.array import Array
from tests.comm.conftest import mpi_world
from tests.comm.test_client_arrays_gpu import comm
from tests.interop.every_operation import OnlyDLPack, check, operations

__all__ = ["comm", "mpi_world"]
pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

LARGE = 1_000_003  # elements of a shard: a copy on another stream would overtake it
SMALL = 5
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def current_device() -> int | None:
    """The device that is current on this thread, by the driver; None if there is none."""
    context = driver.call(driver.cu.cuCtxGetCurrent)
    return int(driver.call(driver.cu.cuCtxGetDevice)) if int(context) else None


class Kos:
    """Arrays of kos on a stream of their own; also the base of the other libraries."""

    immutable = False

    def __init__(self, device: int) -> None:
        self.device = device
        self.stream: Any = cuda.create_stream(device)

    def streams(self) -> AbstractContextManager[Any]:
        """In it the library's current stream is a new one."""
        return nullcontext()

    def make(self, values: np.ndarray) -> Any:
        return Array.from_numpy(values, self.device, stream=self.stream)

    def out(self, shape: tuple[int, ...]) -> Any:
        return self.make(np.full(shape, np.nan, np.float32))

    def values(self, x: Any) -> np.ndarray:
        assert isinstance(x, Array), type(x)
        return x.numpy(x.stream)


class NumPy(Kos):
    """Host memory, which ``auto`` carries beside the GPUs'."""

    def make(self, values: np.ndarray) -> Any:
        return values.copy()

    def values(self, x: Any) -> np.ndarray:
        assert isinstance(x, np.ndarray)
        return x


class DLPack(Kos):
    """A library that kos does not know, which works on the legacy default stream."""

    def make(self, values: np.ndarray) -> Any:
        return OnlyDLPack(Array.from_numpy(values, self.device))

    def values(self, x: Any) -> np.ndarray:
        return super().values(x.x if isinstance(x, OnlyDLPack) else x)


class Torch(Kos):
    def __init__(self, device: int) -> None:
        super().__init__(device)
        self.torch = pytest.importorskip("torch")
        if not self.torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")

    def streams(self) -> AbstractContextManager[Any]:
        return self.torch.cuda.stream(self.torch.cuda.Stream(self.device))

    def make(self, values: np.ndarray) -> Any:
        return self.torch.from_numpy(values).to(f"cuda:{self.device}")

    def values(self, x: Any) -> np.ndarray:
        assert isinstance(x, self.torch.Tensor) and x.get_device() == self.device
        return x.cpu().numpy()


class CuPy(Kos):
    def __init__(self, device: int) -> None:
        super().__init__(device)
        self.cupy = pytest.importorskip("cupy")

    @contextmanager
    def streams(self) -> Iterator[None]:
        with self.cupy.cuda.Device(self.device), self.cupy.cuda.Stream(non_blocking=True):
            yield

    def make(self, values: np.ndarray) -> Any:
        with self.cupy.cuda.Device(self.device):
            return self.cupy.asarray(values)

    def values(self, x: Any) -> np.ndarray:
        assert isinstance(x, self.cupy.ndarray) and x.device.id == self.device
        with self.cupy.cuda.Device(self.device):
            return x.get()


class Numba(Kos):
    """Its arrays name their stream by ``__cuda_array_interface__``; kos makes arrays of its own for it.

    Numba allocates on the device that is current by the driver, and on GPU 0 if there is none.
    """

    def __init__(self, device: int) -> None:
        super().__init__(device)
        pytest.importorskip("numba")
        self.cuda: Any = pytest.importorskip("numba.cuda")
        self.numbas: list[Any] = [0]  # its streams, which must outlive the arrays on them; the last one is in use

    def streams(self) -> AbstractContextManager[Any]:
        with driver.on_device(self.device):
            self.numbas.append(self.cuda.stream())
        return nullcontext()

    def make(self, values: np.ndarray) -> Any:
        with driver.on_device(self.device):
            return self.cuda.to_device(values, stream=self.numbas[-1])

    def values(self, x: Any) -> np.ndarray:
        if isinstance(x, Array):
            return super().values(x)
        with driver.on_device(self.device):
            got = x.copy_to_host(stream=self.numbas[-1])
            if self.numbas[-1]:
                self.numbas[-1].synchronize()
        return got


class JAX(Kos):
    """Its arrays are read as soon as JAX has made them; kos writes to arrays of its own, or makes arrays of JAX."""

    immutable = True

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self.jax = pytest.importorskip("jax")
        try:
            self.place = self.jax.devices("gpu")[device]
        except RuntimeError as error:
            pytest.skip(f"this JAX has no CUDA: {error}")

    def make(self, values: np.ndarray) -> Any:
        return self.jax.device_put(values, self.place)

    def out(self, shape: tuple[int, ...]) -> Any:
        return Array.from_numpy(np.full(shape, np.nan, np.float32), self.device)

    def values(self, x: Any) -> np.ndarray:
        if isinstance(x, Array):
            return super().values(x)
        assert isinstance(x, self.jax.Array) and x.devices() == {self.place}
        return np.asarray(x)


LIBRARIES = (Kos, NumPy, DLPack, Torch, CuPy, Numba, JAX)


@pytest.fixture(scope="module", params=["nccl", "peer", "auto"])
def world(request, mpi_world):
    probe = mpi_world.probes["nccl" if request.param == "auto" else request.param]
    gpus = len(kos.cuda.visible_devices())
    if not 2 <= mpi_world.size <= gpus or not probe.usable:
        pytest.skip(f"needs two ranks or more with a GPU each, got {mpi_world.size} and {gpus}: {probe.reason}")
    with kos.init(request.param, timeout=20.0, device=mpi_world.size - 1 - mpi_world.rank) as world:
        yield world


@pytest.fixture(params=["its own device is current", "another device is current"])
def current(request, comm):
    return comm.device if "own" in request.param else (comm.device + 1) % comm.size


class Watched:
    """A communicator each of whose calls must leave the thread's current device as it was."""

    def __init__(self, comm: kos.Communicator, current: int) -> None:
        self._comm, self._current = comm, current

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._comm, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            cuda.set_device(self._current)  # whatever the library has made of it
            result = value(*arguments, **options)
            assert current_device() == self._current, f"{name} left device {current_device()}, not {self._current}"
            return result

        return call


def usable(comm: kos.Communicator, kind: type[Kos]) -> Kos:
    if kind is NumPy and comm.host is None:
        pytest.skip(f"{comm.backend_name} carries no host memory")
    return kind(comm.device)


def test_the_current_device_from_the_start_of_a_communicator_to_its_end(world, on_all):
    def body():
        other = (world.device + 1) % world.size

        def step(act):
            cuda.set_device(other)
            result = act()
            assert current_device() == other
            return result

        comm = step(world.duplicate)
        group = step(lambda: comm.split(0))
        x = step(lambda: comm.allocate(1000, np.float32))
        x.fill_bytes(0)
        step(lambda: comm.all_reduce(x))
        step(lambda: comm.all_reduce(x, async_op=True).wait())
        for act in (comm.barrier, comm.synchronize, group.close, comm.close):
            step(act)

    on_all(body)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_every_operation_takes(comm, kind, current, on_all):
    def body():
        library = usable(comm, kind)
        for count in (SMALL, LARGE):
            with library.streams():
                for name, call in operations(Watched(comm, current), library, count).items():
                    check(library, name, call())
        comm.synchronize()

    on_all(body)


@pytest.mark.parametrize("kind", [kind for kind in LIBRARIES if kind is not NumPy])
def test_in_turns_without_waiting(comm, kind, current, on_all):
    """Each call takes the result of the one before, on a stream that is new each time; the host waits at the end."""

    def body():
        library = usable(comm, kind)
        watched, n = Watched(comm, current), comm.size
        values = np.full(n * LARGE, comm.rank + 1, np.float32)
        mean, kept = (n + 1) / 2, []
        for _ in range(5):
            with library.streams():
                x = library.make(values)
                rows = watched.all_gather(watched.reduce_scatter(x, op=kos.ReduceOp.AVG))
                again = watched.all_gather(watched.reduce_scatter(rows, op=kos.ReduceOp.AVG), async_op=True).wait()
                kept.append(library.values(again) if kind is not JAX else again)
        for got in kept:
            got = library.values(got) if kind is JAX else got
            assert (got == mean).all(), f"expected {mean}, got {(got != mean).sum()} others"
        comm.synchronize()

    on_all(body)


def test_the_functions_for_jax(comm, current, on_all):
    """Out of place, on the GPU, without copies to the host; within jit by the host's memory, if kos carries that."""
    from kos.interop import jax as collectives

    def body():
        library = JAX(comm.device)
        jax, n, r = library.jax, comm.size, comm.rank
        watched = Watched(comm, current)
        double = jax.jit(lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree))
        with jax.default_device(library.place):
            for count in (SMALL, LARGE):
                x = library.make(np.full((n, count), r + 1, np.float32))
                tree = collectives.all_reduce(watched, double({"a": x, "b": [x[0]]}))
                assert current_device() == current  # also after the arrays of JAX were made
                assert tree["a"].devices() == tree["b"][0].devices() == {library.place}
                for leaf in jax.tree.leaves(double(tree)):
                    assert (np.asarray(leaf) == 2 * n * (n + 1)).all()
                mine = collectives.reduce_scatter(watched, double(x), kos.ReduceOp.MAX)
                rows = collectives.all_gather(watched, double(mine))
                assert rows.shape == (n, 1, count) and (np.asarray(rows) == 4 * n).all()
            if comm.host is not None:
                within = jax.jit(lambda x: collectives.all_reduce(watched, 2 * x) + 1)
                assert (np.asarray(within(x)) == n * (n + 1) + 1).all()
            else:
                with pytest.raises(InvalidArgument, match="expected a backend that moves host memory in jit"):
                    jax.jit(lambda x: collectives.all_reduce(comm, x))(x)
        comm.synchronize()

    on_all(body)


def test_memory_of_another_gpu_is_refused_by_name(comm, on_all):
    def body():
        wrong = (comm.device + 1) % comm.size
        for kind in (Kos, Torch, CuPy, Numba, JAX):
            try:
                x = kind(wrong).make(np.ones(4, np.float32))
            except pytest.skip.Exception:
                continue
            message = rf"expected memory of cuda:{comm.device} .* memory of cuda:{wrong}"
            with pytest.raises(InvalidArgument, match=message):
                comm.all_gather(x)
        comm.barrier()

    on_all(body)
