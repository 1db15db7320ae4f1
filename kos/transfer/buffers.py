"""The memory in which a publisher rank keeps versions, and which subscribers on the same host map.

It is an anonymous file (memfd_create), as the segment of ``kos.comm.host.shared``: it has no name that another user
could open, and it is freed when the last process has unmapped it.  Other processes of the same user map it through
``/proc/<pid>/fd``.  A process that has mapped it can read it after the publisher was killed.

    head     magic, a random number (token), one sequence number for each buffer (8 bytes each)
    buffers  each holds a copy of all arrays, and begins and aligns every array at a multiple of 64 bytes

The buffers of arrays on a GPU are in memory of that GPU (``kos.memory.ipc``), in the same order.

The n-th ``publish`` writes buffer n modulo the number of buffers.  The sequence number of the buffer is 2 n + 1 while
it is written, and 2 n when it is complete.  A reader checks it before and after it reads.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kos.cuda import driver
from kos.cuda.driver import call, cu
from kos.dtypes import DType
from kos.errors import OutOfMemory, TransferError
from kos.memory.array import Array
from kos.memory.buffer import address_of
from kos.memory.ipc import DeviceMemory, Mapping, OwnMemory
from kos.transfer.placement import Flat, aligned
from kos.transfer.plan import Layout

GpuMemory = DeviceMemory | Mapping | OwnMemory

_SEQUENCES = 64  # where the sequence numbers begin


class Buffers:
    """The memory of a publisher rank: ``count`` buffers for the arrays of ``layout``.

    Raises OutOfMemory if there is too little memory, TransferError if ``path`` is another publisher's memory, and
    PeerMemoryError if memory of a GPU cannot be mapped.
    """

    def __init__(
        self, layout: Layout, count: int, token: str, gpus: Iterable[int],
        on_gpu: Callable[[int, int], GpuMemory], path: str = "",
    ) -> None:  # fmt: skip
        """Allocate the memory, or map the memory of a publisher at ``path``, to read it.

        ``on_gpu(n, nbytes)`` allocates or maps the memory on the n-th GPU, for each n in ``gpus``.
        """
        self.count, self.token, self._path = count, token, path
        self._places = dict[str, tuple[int, int, int, DType]]()
        ends = Counter[int]()
        for name, (dtype, placement, gpu) in layout.items():
            self._places[name] = gpu, ends[gpu], placement.count, dtype
            ends[gpu] += aligned(max(1, placement.count * dtype.itemsize))
        self._ends, self._first, self.gpus = ends, aligned(_SEQUENCES + 8 * count), dict[int, GpuMemory]()
        self.nbytes = self._first + count * ends[0]
        self._pinned_by: int | None = None
        head = b"kosxfer1" + bytes.fromhex(token)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # it may be another file by now, such as a pipe
        self.file = os.open(path, flags) if path else os.memfd_create("kos-transfer", 3)
        self._close_file = weakref.finalize(self, os.close, self.file)  # also if nobody calls ``close``
        self._close_file.atexit = False
        try:
            if path:
                fcntl.fcntl(self.file, fcntl.F_GET_SEALS)  # raises for a file of another kind
            else:  # flags 3: MFD_CLOEXEC and MFD_ALLOW_SEALING
                os.posix_fallocate(self.file, 0, self.nbytes)
                fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # else a reader could die of SIGBUS
            access = mmap.PROT_READ if path else mmap.PROT_READ | mmap.PROT_WRITE
            self._memory: Any = mmap.mmap(self.file, self.nbytes, prot=access)
        except (OSError, ValueError) as error:
            self._close_file()
            raise OutOfMemory(f"transfer: expected {self.nbytes:,} bytes of shared memory, got: {error}") from error
        self._sequences: np.ndarray[Any, Any] = np.frombuffer(self._memory, np.uint64, count, _SEQUENCES)
        self._address = address_of(self._sequences) - _SEQUENCES
        try:
            if not path:
                self._memory[: len(head)] = head
            elif self._memory[: len(head)] != head:
                raise TransferError(f"{path}: expected the publisher's memory, got another file")
            for gpu in gpus:
                self.gpus[gpu] = on_gpu(gpu, count * ends[gpu])
        except BaseException:
            self.close()
            raise

    def pin(self, device: int) -> None:
        """Page-lock the memory on the host, for copies from GPUs.  Raises CudaError."""
        with driver.on_device(device):
            call(cu.cuMemHostRegister, self._address, self.nbytes, cu.CU_MEMHOSTREGISTER_PORTABLE)
        self._pinned_by = device

    def array(self, name: str, serial: int) -> Flat:
        """The flattened array ``name`` in the buffer of the version ``serial``."""
        gpu, offset, count, dtype = self._places[name]
        at = serial % self.count * self._ends[gpu] + offset
        if gpu:
            memory = self.gpus[gpu]
            return Array(memory.pointer + at, (count,), dtype, memory.device, owner=memory)
        return np.frombuffer(self._memory, dtype.numpy, count, self._first + at)

    def write(self, serial: int, copy: Callable[[], None]) -> None:
        """Call ``copy``, which writes the buffer of the version ``serial``.  Readers may use the version afterwards."""
        index = serial % self.count
        self._sequences[index] = 2 * serial + 1
        _fence()
        copy()
        _fence()
        self._sequences[index] = 2 * serial

    def holds(self, serial: int) -> bool:
        """Whether the version ``serial`` is in its buffer, complete.

        Raises TransferError if GPU memory is mapped and the publisher's process has ended: the memory may then belong
        to another process.
        """
        _fence()
        found = int(self._sequences[serial % self.count])
        _fence()
        if self._path and self.gpus and not self._is_open():
            raise TransferError("expected a running publisher, whose GPU memory is mapped, got the end of its process")
        return found == 2 * serial

    def _is_open(self) -> bool:
        """Whether the publisher's process still has its file open.

        When a process ends, its files disappear from /proc before they are closed, so before its GPU memory is freed.
        """
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self.file))
        except OSError:
            return False

    def close(self) -> None:
        """Close the file.  The memory is freed or unmapped once no array uses it; no version is in it from now on."""
        if self.gpus and not self._path:
            self._sequences[:] = 1  # readers that map the GPU memory, which is freed now, see that no version is in it
        self._close_file()
        if self._pinned_by is not None:
            with driver.on_device(self._pinned_by):
                call(cu.cuMemHostUnregister, self._address)
            self._pinned_by = None
        self._memory, self._sequences, self.gpus = b"", np.full(self.count, 1, np.uint64), {}


def _fence() -> None:
    """Order memory accesses: to free a lock and take it again is a barrier, also on processors that reorder them.

    The lock is one of its own: one that another thread held at a fork would never be free in the child.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
