"""What a MemoryPool does with memory that is let go of during a capture, on a stand-in for the driver."""

import gc
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kos.cuda.streams import LEGACY
from kos.errors import CudaError
from kos.memory.pool import MemoryPool
from tests.fake_cuda import installed

STREAM = 99


class Names:
    """Every name of an enumeration of the driver."""

    CUDA_SUCCESS = 0

    def __getattr__(self, name: str) -> str:
        return name


class Driver:
    """Stream-ordered memory: what CUDA refuses during a capture is refused, and leaves the memory allocated."""

    CUmemLocationType = CUmemAllocationType = CUmemPool_attribute = CUstreamCaptureMode = CUresult = Names()
    cuuint64_t = int

    def __init__(self) -> None:
        self.capturing: set[int] = set()
        self.held: dict[int, bool] = {}  # address: whether a graph allocates it
        self.refused: set[int] = set()  # addresses of memory that cannot be freed
        self._addresses = itertools.count(4096, 4096)

    def CUmemPoolProps(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def cuMemPoolCreate(self, properties: Any) -> tuple[int, int]:
        return 0, 7

    def cuMemPoolSetAttribute(self, *_: Any) -> tuple[int]:
        return (0,)

    cuMemPoolTrimTo = cuMemPoolSetAttribute

    def cuCtxSynchronize(self) -> tuple[int]:
        return (0,)

    def cuMemPoolGetAttribute(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[int, Any]:
        return 0, mode

    def cuGetErrorString(self, status: Any) -> tuple[int, bytes]:
        return 0, b"refused"

    def _blocked(self, stream: int) -> bool:
        """Whether a stream is captured that the legacy stream would have to wait for."""
        return stream == LEGACY and bool(self.capturing)

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, int]:
        status = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT" if self._blocked(stream) else 0
        return status, int(stream in self.capturing)

    def cuMemAllocFromPoolAsync(self, nbytes: int, pool: int, stream: int) -> tuple[int, int]:
        pointer = next(self._addresses)
        self.held[pointer] = stream in self.capturing
        return 0, pointer

    def cuMemFreeAsync(self, pointer: int, stream: int) -> tuple[Any]:
        refused = pointer in self.refused or (stream in self.capturing and not self.held[pointer])
        if refused or self._blocked(stream):
            return (SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"),)
        del self.held[pointer]
        return (0,)


@pytest.fixture
def fake(monkeypatch):
    gc.collect()  # what tests before this one had on a real GPU
    fake = Driver()
    with installed(monkeypatch, fake):
        yield fake


@pytest.mark.parametrize("stream", [STREAM, None])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_what_a_capture_lets_go_of_is_freed_after_it(fake, stream):
    """Memory of the captured stream; and of the legacy stream, which must not be used meanwhile."""
    pool = MemoryPool(0)
    first, second = (pool.allocate(1000, stream) for _ in range(2))
    fake.capturing.add(STREAM)
    first.close()
    del second
    gc.collect()
    assert len(fake.held) == 2 and pool.statistics().current == pool.statistics().live == 0
    other = pool.allocate(10, 5)  # the capture still goes on
    assert len(fake.held) == 3
    fake.capturing.clear()
    other.close()
    pool.allocate(0, stream)
    assert not fake.held
    third = pool.allocate(1000, stream)
    fake.capturing.add(STREAM)
    third.close()
    fake.capturing.clear()
    pool.trim()
    assert not fake.held


@pytest.mark.parametrize("free_waiting", [lambda pool: pool.allocate(0), MemoryPool.trim], ids=["allocate", "trim"])
def test_a_refused_free_after_a_capture_is_raised(fake, free_waiting):
    """The other memory that was closed during the capture is freed all the same, at the latest by the next call."""
    pool = MemoryPool(0)
    waiting = [pool.allocate(1000, STREAM) for _ in range(3)]
    fake.capturing.add(STREAM)
    for allocation in waiting:
        allocation.close()
    fake.capturing.clear()
    fake.refused = {waiting[1].pointer}
    with pytest.raises(CudaError, match="cuMemFreeAsync"):
        free_waiting(pool)
    fake.refused.clear()
    free_waiting(pool)
    assert {*fake.held} <= {waiting[1].pointer}


def test_what_a_capture_allocates_is_freed_in_it(fake):
    """The graph has a node that allocates, and one that frees."""
    pool = MemoryPool(0)
    fake.capturing.add(STREAM)
    inner, later = pool.allocate(1000, STREAM), pool.allocate(1000, STREAM)
    inner.close()
    assert fake.held == {later.pointer: True}
    fake.capturing.clear()
    later.close()
    assert not fake.held


def test_a_peak_can_begin_anew(fake):
    """With what is in use, so that the peaks of two times are not added up."""
    pool = MemoryPool(0)
    first, kept = pool.allocate(1000), pool.allocate(10)
    first.close()
    assert pool.reset_peak() == 1010
    assert pool.statistics().peak == pool.statistics().current == 10
    kept.close()
    pool.allocate(20).close()
    assert pool.statistics().peak == 20 and pool.reset_peak() == 20 and pool.statistics().peak == 0
