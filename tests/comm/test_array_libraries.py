"""Arrays of torch, CuPy and JAX, without a GPU: their current stream, new arrays of their type, memory that is held."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kos.comm.gpu.gpu_work import free_finished
from kos.cuda import driver, streams
from kos.memory import as_buffer
from kos.memory.array import Array
from tests.comm.fake_nccl import alone
from tests.comm.test_streams import Device, Stream


class Tensor:
    """A torch tensor on a GPU, with the attributes that kos uses."""

    __module__ = "torch"
    is_cuda = True
    device = "cuda:0"

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.asked: list[Any] = []

    def get_device(self) -> int:
        return 0

    def is_neg(self) -> bool:
        return False

    def new_empty(self, shape: tuple[int, ...]) -> Tensor:
        return type(self)(Array.empty(shape, self.memory.dtype, 0))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.memory.__dlpack_device__()

    def __dlpack__(self, *, stream: Any, max_version: Any = None) -> Any:
        self.asked.append(stream)
        return self.memory.__dlpack__(stream=-1, max_version=max_version)


class Plain(Tensor):
    """A tensor whose address kos reads by ``data_ptr``, not by DLPack."""

    layout, dtype, requires_grad, contiguous = "strided", "torch.float32", False, True

    def __init__(self, memory: Array) -> None:
        super().__init__(memory)
        self.shape = memory.shape

    def data_ptr(self) -> int:
        return self.memory.pointer

    def is_contiguous(self) -> bool:
        return self.contiguous


class Torch:
    """torch's current stream: from its pool, the legacy default stream, or an external stream."""

    Tensor, strided = None, "strided"

    def __init__(self) -> None:
        self.handle = self.stream_id = 0
        self._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: self.handle)
        self.cuda = SimpleNamespace(
            current_stream=lambda device: SimpleNamespace(stream_id=self.stream_id),
            stream=self._inside, ExternalStream=lambda handle, device: handle,
        )  # fmt: skip

    @contextmanager
    def _inside(self, handle: int) -> Iterator[None]:
        former, self.handle = self.handle, handle
        yield
        self.handle = former


@pytest.fixture
def torch(fake, monkeypatch):
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def tensor(count: int = 6) -> Tensor:
    return Tensor(Array.zeros(count, np.float32, 0))


def test_torchs_current_stream_is_followed(torch):
    x = tensor()
    buffer = as_buffer(x, "x", True)
    assert (buffer.stream, buffer.stream_owner, buffer.array) == (streams.LEGACY, None, x)
    torch.handle, torch.stream_id = 5000, 35  # from its pool, which keeps it alive
    for _ in range(2):
        buffer = as_buffer(x, "x", True)
        assert buffer.stream == 5000 and not isinstance(buffer.stream_owner, int)
    torch.handle = torch.stream_id = 6000  # an external stream
    buffer = as_buffer(x, "x", True)
    assert (buffer.stream, buffer.stream_owner) == (6000, 6000)
    assert as_buffer(x, "x", True, 7).stream == 7, "stream= wins"
    assert set(x.asked) == {-1}, "nothing has to wait: it is the stream on which torch works"


def test_results_for_a_tensor_are_tensors(torch):
    comm, torch.handle, torch.stream_id = alone(), 5000, 35
    x = tensor()
    for call in (comm.reduce_scatter, comm.all_gather, comm.all_to_all, comm.gather):
        out = call(x)
        assert type(out) is Tensor and out.memory.size == 6
    assert comm.all_reduce(x) is x
    made = list[int]()
    torch.cuda.stream = lambda handle: (made.append(handle), torch._inside(handle))[1]
    assert type(comm.all_gather(x, stream=8)) is Tensor and made == [8], "of its allocator's memory for that stream"
    comm.close()


def test_a_plain_tensor_is_taken_without_dlpack(torch):
    """DLPack refuses tensors with lazy conjugation, strides or gradients."""
    torch.Tensor, torch.handle, torch.stream_id = Plain, 5000, 35
    x = Plain(Array.zeros((2, 3), np.float32, 0))
    buffer = as_buffer(x, "x", True)
    assert (buffer.pointer, buffer.shape, buffer.dtype.name) == (x.memory.pointer, (2, 3), "float32")
    assert (buffer.stream, buffer.array, x.asked) == (5000, x, [])
    odd = {"dtype": "torch.complex64", "contiguous": False, "requires_grad": True, "layout": "csr"}
    for name, value in odd.items():
        other = Plain(Array.zeros(6, np.float32, 0))
        setattr(other, name, value)
        as_buffer(other, "x", True)
        assert other.asked == [-1], name


def test_cupys_current_stream_is_kept_alive(monkeypatch, torch):
    device = Device()
    device.install(driver.cu)

    class Owned(Stream):
        @property
        def ptr(self):
            return self.handle

    class CuPyArray(Tensor):
        __module__ = "cupy"
        device = SimpleNamespace(id=0)

    current = [Owned(device, 1000)]
    cupy = SimpleNamespace(ndarray=None, cuda=SimpleNamespace(get_current_stream=lambda index: current[0]))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    comm, x = alone(), CuPyArray(Array.zeros(6, np.float32, 0))
    comm.all_reduce(x)
    current[0] = Owned(device, 1001)
    gc.collect()
    assert 1000 in device.alive
    comm.all_reduce(x)
    comm.synchronize()
    comm.close()


def test_results_for_a_jax_array_are_jax_arrays(fake, torch, monkeypatch):
    """Its memory is held until the GPU has finished, because JAX does not know the stream."""
    over = [0]
    fake.cu.cuEventQuery = lambda event: (over[0],)

    class ArrayImpl(Tensor):
        __module__ = "jaxlib"

    def of(memory):
        return "jax", memory

    jax = SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=of), numpy=SimpleNamespace(asarray=of))
    monkeypatch.setitem(sys.modules, "jax", jax)
    comm = alone()
    over[0] = driver.cu.CUresult.CUDA_ERROR_NOT_READY

    def call(make):
        x = ArrayImpl(Array.zeros(6, np.float32, 0))
        kind, out = make(x)
        assert kind == "jax" and type(out) is Array and x.asked == [streams.LEGACY], "the stream waits for JAX's work"
        return weakref.ref(x)

    def batched(x):
        with comm.batch():
            out = comm.all_gather(x)
        return "jax", out  # the batch returned it before it started, not yet as JAX's

    left = [call(make) for make in (comm.all_gather, batched) * 2]
    gc.collect()
    assert all(each() is not None for each in left)
    over[0] = 0
    for _ in range(2):
        call(comm.all_gather)
    gc.collect()
    assert not any(each() for each in left)
    comm.close()


def test_a_jax_array_is_held_whatever_another_thread_sends(fake, torch):
    """While one call records its event, a message of another thread looks for events that have completed."""
    busy = driver.cu.CUresult.CUDA_ERROR_NOT_READY
    kind, recorded, comm = type("ArrayImpl", (Tensor,), {"__module__": "jaxlib"}), list[int](), alone()
    fake.cu.cuEventQuery = lambda event: (busy if recorded else 0,)

    def record(event, stream):
        recorded.clear()
        free_finished(comm.backend._in_flight)
        recorded.append(stream)
        return (0,)

    fake.cu.cuEventRecord = record
    x = kind(Array.zeros(6, np.float32, 0))
    comm.all_gather(x, Array.zeros(6, np.float32, 0))
    left = weakref.ref(x)
    del x
    gc.collect()
    assert left() is not None
    recorded.clear()
    comm.close()


def test_threads_free_no_call_that_is_not_over():
    """Another thread frees the first call while this thread examines it."""

    class Call:
        def __init__(self, number):
            self.number, self.looks = number, 0

        def over(self):
            self.looks += 1
            if self.number == 0 and self.looks == 1:
                free_finished(in_flight)
            return self.number == 0

    in_flight = deque([Call(number)] for number in range(3))
    free_finished(in_flight)
    assert [each.number for (each,) in in_flight] == [1, 2]


def test_managed_memory_is_gpu_memory(torch):
    """In ``from_dlpack`` and in calls."""

    class Managed(Tensor):
        def __dlpack_device__(self):
            return 13, 0

    x = Managed(Array.zeros(6, np.float32, 0))
    assert as_buffer(x, "x", True).device == Array.from_dlpack(x).device == 0
