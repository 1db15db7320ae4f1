"""A stand-in for a GPU on the host: memory, streams, graphs, driver functions, and kernels built for the host."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kos.comm.reduction import ReduceOp
from kos.cuda.kernels import BoundKernel
from kos.dtypes import DTYPES
from kos.testing.conformance.model import in_rank_order
from tests.comm import fake_driver
from tests.comm.host_kernel import HostKernel


def at(pointer: int, count: int, dtype: np.dtype) -> np.ndarray:
    """An array that views the host memory at an address."""
    if count == 0:
        return np.empty(0, dtype)
    assert pointer % dtype.itemsize == 0, "misaligned"
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(pointer)
    return np.frombuffer(memory, np.uint8).view(dtype)


class FakeKernel:
    """What the kernels of ``reduce_ordered.cu`` compute, on the host."""

    def __init__(self, name: str, DTYPE: str, RESULT: str, OP: str, RANKS: int) -> None:
        self.name, self.ranks = name, RANKS
        self.dtype, self.result = DTYPES[DTYPE], DTYPES[RESULT]
        self.op, self._function = ReduceOp[OP], fake_driver.number(self)

    def bind(self, grid: int, block: int, *arguments: Any) -> BoundKernel:
        assert 0 < grid <= 1024
        self._count = len(arguments)
        return BoundKernel(self, fake_driver.Config(grid, block), arguments)

    def run(self, config: fake_driver.Config, parameters: int) -> None:
        """Run it; ``parameters`` is the address of the addresses of its parameters."""
        places = (ctypes.c_uint64 * self._count).from_address(parameters)
        words = [ctypes.c_uint64.from_address(place).value for place in places]
        factor = [struct.unpack("=d", struct.pack("=Q", words.pop()))[0]] if self.name == "scale" else []
        self._run(*words, *factor)

    def _run(self, source: int, *rest: Any) -> None:
        if self.name == "scale":
            target, count, factor = rest
            carrier = self.result.numpy
            with np.errstate(all="ignore"):
                x = at(source, count, self.dtype.numpy).astype(carrier) * carrier.type(factor)
            at(target, count, carrier)[:] = x
            return
        stride, target, count, *_ = rest
        xs = [at(source + r * stride * self.dtype.itemsize, count, self.dtype.numpy) for r in range(self.ranks)]
        first, last = (rest[-1], self.ranks) if self.name == "scan_ordered" else (0, 1)
        terms = [xs[: 1 + row - first] if self.name == "scan_ordered" else xs for row in range(first, last)]
        sums = [in_rank_order(each, self.op) for each in terms]  # before any is written
        with np.errstate(all="ignore"):
            for row, out in enumerate(sums, first):
                place = target + row * stride * self.result.itemsize
                at(place, count, self.result.numpy)[:] = out.astype(self.result.numpy)


class Memory:
    """Host memory that claims to be on a GPU.  It is filled with garbage, as new memory of a GPU may be."""

    __slots__ = ("__dict__", "__weakref__", "closed")

    def __init__(self, nbytes: int, device: int = 0) -> None:
        self.nbytes = nbytes
        self._bytes = np.full(nbytes + 256, 0xFF, np.uint8)
        start = self._bytes.__array_interface__["data"][0]
        self.pointer = start + -start % 256
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeGraph:
    """A captured graph.  It reports its destruction as the driver does."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._reports: list[tuple[int, int]] = []

    def retain(self, report: tuple[int, int]) -> None:
        self._reports.append(report)

    def destroy(self) -> None:
        for pointer, function in self._reports:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(pointer)


_numbers = itertools.count(1)
_capturing = threading.local()


def is_capturing() -> bool:
    """Whether this thread is capturing a graph."""
    return hasattr(_capturing, "graph")


@contextlib.contextmanager
def captures() -> Iterator[FakeGraph]:
    """In this block, the work that this thread queues is captured, and also runs at once."""
    _capturing.graph = FakeGraph()
    try:
        yield _capturing.graph
    finally:
        del _capturing.graph


class Status(int):
    """A CUresult."""

    CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_NOT_READY = 0, 2, 600
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704

    @property
    def name(self) -> str:
        return f"status {int(self)}"


def driver_functions(virtual: set[int]) -> SimpleNamespace:
    """The functions of the driver.  ``virtual`` has the addresses of memory that cuMemCreate allocated."""

    def copy(target: int, source: int, nbytes: int, stream: int) -> tuple[int]:
        ctypes.memmove(target, source, nbytes)
        return (0,)

    def fill(target: int, value: int, nbytes: int, stream: int) -> tuple[int]:
        ctypes.memset(target, value, nbytes)
        return (0,)

    def read(target: bytearray, source: int, nbytes: int) -> tuple[int]:
        target[:] = ctypes.string_at(source, nbytes)
        return (0,)

    def nothing(*arguments: Any) -> tuple[int]:
        return (0,)

    allocated = dict[int, Memory]()

    def allocate(nbytes: int) -> tuple[int, int]:
        memory = Memory(nbytes)
        allocated[memory.pointer] = memory
        return 0, memory.pointer

    def free(address: int) -> tuple[int]:
        del allocated[address]
        return (0,)

    return SimpleNamespace(
        cuMemcpyAsync=copy, cuMemcpyDtoDAsync=copy, cuMemsetD8Async=fill, cuStreamSynchronize=nothing,
        cuCtxSynchronize=nothing, cuEventRecord=nothing, cuEventQuery=nothing, cuEventDestroy=nothing,
        cuStreamWaitEvent=nothing, cuStreamQuery=nothing, cuMemAlloc=allocate, cuMemFree=free,
        cuLaunchKernelEx=lambda config, *rest: (fake_driver.launch(config.getPtr(), *rest),),
        cuStreamIsCapturing=lambda stream: (0, int(is_capturing())),
        cuStreamGetCaptureInfo=lambda stream: (0, 1, _capturing.graph.number, _capturing.graph, [], [], 0),
        cuUserObjectCreate=lambda pointer, function, count, flags: (0, (pointer, function)),
        cuGraphRetainUserObject=lambda graph, report, count, flags: graph.retain(report) or (0,),
        CUuserObject_flags=SimpleNamespace(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC=1),
        CUuserObjectRetain_flags=SimpleNamespace(CU_GRAPH_USER_OBJECT_MOVE=1),
        CUstreamCaptureStatus=SimpleNamespace(CU_STREAM_CAPTURE_STATUS_ACTIVE=1),
        cuEventCreate=lambda flags: (0, object()), CUevent_flags=SimpleNamespace(CU_EVENT_DISABLE_TIMING=2),
        CUresult=Status, cuGetErrorString=lambda status: (0, b"refused"), cuMemGetInfo=lambda: (0, 0, 0),
        cuThreadExchangeStreamCaptureMode=lambda mode: (0, mode), cuCtxGetDevice=lambda: (0, 0),
        cuMemRetainAllocationHandle=lambda address: (int(address not in virtual), None),
        cuMemRelease=lambda handle: (0,),
        CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2),
        cuMemcpyHtoD=lambda target, data, nbytes: (ctypes.memmove(target, data, nbytes), (0,))[1],
        cuMemcpyDtoH=read, cuMemsetD8=lambda target, value, nbytes: fill(target, value, nbytes, 0),
        CUpointer_attribute=SimpleNamespace(
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=9, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE="IPC",
            CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE="pool",
        ),
    )  # fmt: skip


def load_kernel(path: Path, name: str, index: int, **defines: Any) -> Any:
    """A stand-in for the kernel, or the kernel itself, compiled for the host."""
    assert path.exists()
    return FakeKernel(name, **defines) if path.name == "reduce_ordered.cu" else HostKernel(path, name, index, **defines)
