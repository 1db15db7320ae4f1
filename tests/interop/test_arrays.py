"""Arrays of NumPy, torch, JAX and of any library with DLPack, on the host, go into every operation."""

import os
from typing import Any

import numpy as np
import pytest

from kos.errors import InvalidArgument
from kos.memory.array import Array
from kos.testing import spawn
from tests.comm.fake_nccl import FakeRanks, no_gpu
from tests.interop.every_operation import OnlyDLPack, check, operations


class NumPy:
    immutable = False

    def make(self, values: np.ndarray) -> Any:
        return values.copy()

    def out(self, shape: tuple[int, ...]) -> Any:
        return self.make(np.full(shape, np.nan, np.float32))

    def values(self, x: Any) -> np.ndarray:
        assert isinstance(x, np.ndarray)
        return x


class Torch(NumPy):
    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")

    def make(self, values: np.ndarray) -> Any:
        return self.torch.from_numpy(values.copy())

    def values(self, x: Any) -> np.ndarray:
        assert isinstance(x, self.torch.Tensor)
        return x.numpy()


class DLPack(NumPy):
    def make(self, values: np.ndarray) -> Any:
        return OnlyDLPack(values.copy())

    def values(self, x: Any) -> np.ndarray:
        return x.x if isinstance(x, OnlyDLPack) else x


class JAX(NumPy):
    immutable = True

    def __init__(self) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        self.jax = pytest.importorskip("jax")

    def make(self, values: np.ndarray) -> Any:
        return self.jax.numpy.asarray(values)

    def out(self, shape: tuple[int, ...]) -> Any:
        return np.full(shape, np.nan, np.float32)

    def values(self, x: Any) -> np.ndarray:
        return np.asarray(x)


class OnGPU(NumPy):
    """Arrays of kos; here their memory is the host's."""

    def make(self, values: np.ndarray) -> Any:
        return Array.from_numpy(values, 0)

    def values(self, x: Any) -> np.ndarray:
        assert isinstance(x, Array)
        return x.numpy()


@pytest.mark.parametrize("kind", [NumPy, Torch, DLPack, JAX])
@pytest.mark.parametrize("size", [1, 3])
def test_every_operation_takes(kind, size):
    library = kind()

    def body(comm):
        for name, call in operations(comm, library).items():
            check(library, name, call())

    spawn(body, size)


def test_the_table_that_gpus_run(monkeypatch):
    """Over a stand-in for NCCL: the entries of ``test_arrays_gpu``, which needs two GPUs."""
    library = OnGPU()

    def body(gpu):
        for name, call in operations(gpu.comm, library).items():
            check(library, name, call())

    with no_gpu(monkeypatch):
        FakeRanks(2).run(body)


def test_allocate_takes_dtypes_of_torch():
    torch = pytest.importorskip("torch")

    def body(comm):
        arrays = [comm.allocate(3, dtype) for dtype in (torch.float32, torch.bfloat16, torch.bool)]
        with pytest.raises(InvalidArgument, match="dtype: expected one of .*; got .*complex32"):
            comm.allocate(3, torch.complex32)
        return [str(array.dtype) for array in arrays]

    assert spawn(body, 2, timeout=20) == [["float32", "bfloat16", "bool"]] * 2


def test_views_of_a_tensor_are_ndarrays():
    torch = pytest.importorskip("torch")

    def body(comm):
        x = torch.from_numpy(comm.allocate(2, np.float32))
        views = comm.views(x)
        assert all(type(view) is np.ndarray for view in views)
        views[1 - comm.rank][:] = comm.rank
        comm.barrier()
        return x.tolist()

    assert spawn(body, 2) == [[1, 1], [0, 0]]
