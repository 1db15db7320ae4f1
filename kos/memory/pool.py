"""MemoryPool: stream-ordered device memory with statistics.

Allocating and freeing are queued on a stream like any other work (cuMemAllocFromPoolAsync) and cost
microseconds; freed memory stays with the pool.  Memory for CUDA IPC cannot come from here: see symmetric.py.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import threading
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from kos.cuda import driver, streams
from kos.cuda.devices import device_info
from kos.cuda.driver import call, cu, relaxed_capture
from kos.errors import InvalidArgument, OutOfMemory


@dataclass(frozen=True)
class PoolStatistics:
    """In bytes, except ``live``."""

    current: int  # allocated and not freed
    peak: int  # the largest ``current`` so far, or since ``reset_peak``
    reserved: int  # taken from the device, including what is free in the pool
    live: int  # allocations not freed


class Allocation:
    """A piece of device memory, freed on its stream when closed or no longer referenced.

    Memory that is closed while that stream is captured is freed after the capture, unless a capture allocated it.
    """

    __slots__ = ("__weakref__", "_pool", "_serial", "closed", "nbytes", "pointer", "stream")

    def __init__(self, pool: MemoryPool, serial: int, pointer: int, nbytes: int, stream: Any) -> None:
        self._pool: MemoryPool | None = pool
        self._serial = serial
        self.closed = False  # whether the memory was freed
        self.pointer = pointer
        self.nbytes = nbytes
        self.stream = stream  # kept alive: the memory is freed in its order

    def close(self) -> None:
        """Free the memory in the order of its stream; a second call does nothing."""
        pool, self._pool, self.closed = self._pool, None, True
        if pool is not None:
            pool._free(self._serial, self.pointer, self.stream)

    def __del__(self) -> None:
        self.close()


class MemoryPool:
    """The stream-ordered memory of one device. Safe to use from any thread."""

    def __init__(self, device: int) -> None:
        self.device = device
        properties = cu.CUmemPoolProps()
        properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        self._pool = call(cu.cuMemPoolCreate, properties)
        kind = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        call(cu.cuMemPoolSetAttribute, self._pool, kind, cu.cuuint64_t(2**64 - 1))
        self._lock = threading.RLock()  # reentrant: the garbage collector may free while this thread allocates
        self._serials = itertools.count()
        self._live: dict[int, tuple[int, str, bool]] = {}  # bytes, label, whether a graph allocates it
        self._deferred: list[tuple[int, Any]] = []  # closed while their streams were captured
        self._current = self._peak = 0

    def allocate(self, nbytes: int, stream: Any = None, *, label: str = "") -> Allocation:
        """``nbytes`` of device memory, usable in the order of ``stream``.

        ``label`` names the holder in errors.  Raises OutOfMemory with the requested size, the free memory and the
        largest holders.
        """
        if nbytes < 0:
            raise InvalidArgument(f"allocate: expected a size of 0 or more bytes, got {nbytes}")
        pointer, of_graph = 0, False
        self._free_deferred()
        with driver.on_device(self.device):
            if nbytes:
                of_graph = _is_captured(stream)
                status, pointer = cu.cuMemAllocFromPoolAsync(nbytes, self._pool, streams.handle(stream))
                if status == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                    raise OutOfMemory(self._exhausted(nbytes, label))
                if status:
                    raise driver.error_of("cuMemAllocFromPoolAsync", status)
        with self._lock:
            serial = next(self._serials)
            self._live[serial] = nbytes, label, of_graph
            self._current += nbytes
            self._peak = max(self._peak, self._current)
        return Allocation(self, serial, int(pointer), nbytes, stream)

    def _free(self, serial: int, pointer: int, stream: Any) -> None:
        with self._lock:
            nbytes, _, of_graph = self._live.pop(serial)
            self._current -= nbytes
        if pointer and not sys.is_finalizing():
            self._give_back(pointer, stream, of_graph)

    def _give_back(self, pointer: int, stream: Any, of_graph: bool) -> None:
        with driver.on_device(self.device), relaxed_capture():
            if of_graph or not _is_captured(stream):
                call(cu.cuMemFreeAsync, pointer, streams.handle(stream))
            else:  # a graph may free only memory that graphs allocated
                with self._lock:
                    self._deferred.append((pointer, stream))

    def _free_deferred(self) -> None:
        with self._lock:
            waiting, self._deferred = self._deferred, []
        while waiting:
            try:
                self._give_back(*waiting.pop(), False)
            except BaseException:
                self._deferred += waiting
                raise

    def statistics(self) -> PoolStatistics:
        kind = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        reserved = int(call(cu.cuMemPoolGetAttribute, self._pool, kind))
        with self._lock:
            return PoolStatistics(self._current, self._peak, reserved, len(self._live))

    def reset_peak(self) -> int:
        """Begin another peak, with what is in use; returns the bytes of the last."""
        with self._lock:
            before, self._peak = self._peak, self._current
        return before

    def trim(self) -> None:
        """Return the free memory of the pool to the device."""
        self._free_deferred()
        driver.synchronize(self.device)
        call(cu.cuMemPoolTrimTo, self._pool, 0)

    def _exhausted(self, nbytes: int, label: str) -> str:
        free, total = call(cu.cuMemGetInfo)
        own = self.statistics()
        held: Counter[str] = Counter()
        with self._lock:
            for size, name, _ in self._live.values():
                held[name or "others"] += size
        largest = ", ".join(f"{size:,} bytes by {name}" for name, size in held.most_common(5)) or "none"
        return (
            f"out of memory on cuda:{self.device} ({device_info(self.device).name}): asked for {nbytes:,} bytes"
            f"{f' by {label}' if label else ''}, {free:,} of {total:,} free; "
            f"this pool holds {own.reserved:,}, {own.current:,} of them in {own.live} allocations; "
            f"the largest: {largest}"
        )


@functools.cache
def pool_of(device: int) -> MemoryPool:
    """The pool that arrays of this device come from."""
    device_info(device)
    return MemoryPool(device)


def pinned_empty(shape: int | tuple[int, ...], dtype: Any, device: int) -> np.ndarray[Any, Any]:
    """An uninitialised ndarray in page-locked memory: copies between it and a device run asynchronously.

    The memory is freed with the last view of the array.
    """
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    nbytes = max(count, 1) * dtype.itemsize
    with driver.on_device(device):
        pointer = int(call(cu.cuMemHostAlloc, nbytes, cu.CU_MEMHOSTALLOC_PORTABLE))
    storage = (ctypes.c_byte * nbytes).from_address(pointer)
    weakref.finalize(storage, _free_pinned, pointer, device).atexit = False
    return np.frombuffer(storage, dtype, count).reshape(shape)


def _free_pinned(pointer: int, device: int) -> None:
    with driver.on_device(device), relaxed_capture():
        call(cu.cuMemFreeHost, pointer)


def _is_captured(stream: Any) -> bool:
    """Whether the stream is captured, or is the legacy stream while another one is captured."""
    status, captured = cu.cuStreamIsCapturing(streams.handle(stream))
    if status == cu.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
        return True
    if status:
        raise driver.error_of("cuStreamIsCapturing", status)
    return bool(int(captured))

