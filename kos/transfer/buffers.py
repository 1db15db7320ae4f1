"""The memory in which a publisher rank keeps versions, and which subscribers on the same host map.

It is an anonymous file (memfd_create), as the segment of ``kos.comm.host.shared``: it has no name that another user
could open, and it is freed when the last process has unmapped it.  Other processes of the same user map it through
``/proc/<pid>/fd``.  A process that has mapped it can read it after the publisher was killed.

    head     magic, incarnation, rank, one sequence number for each buffer (8 bytes each)
    buffers  each holds a copy of all arrays, and begins and aligns every array at a multiple of 64 bytes

The n-th ``publish`` writes buffer n modulo the number of buffers.  The sequence number of the buffer is 2 n + 1 while
it is written, and 2 n when it is complete.  A reader checks it before and after it reads.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from kos.errors import OutOfMemory, TransferError
from kos.transfer.plan import Layout

_MAGIC = b"kosxfer1"
_HEAD = struct.Struct("8s16sQ")
_SEQUENCES = 64  # where the sequence numbers begin
_LINE = 64


class Buffers:
    """The mapped memory: ``count`` buffers for the arrays of ``layout``.

    Raises OutOfMemory if the host has too little memory, TransferError if ``path`` is another publisher's memory.
    """

    def __init__(self, layout: Layout, count: int, incarnation: str, rank: int, path: str = "") -> None:
        """Allocate the memory, or map the memory of a publisher at ``path``, to read it."""
        self.count, self._places, end = count, dict[str, tuple[int, int, Any]](), 0
        for name, (dtype, placement) in layout.items():
            self._places[name] = end, placement.count, dtype.numpy
            end = _aligned(end + placement.count * dtype.itemsize)
        self._stride, self._first = end, _aligned(_SEQUENCES + 8 * count)
        self.nbytes = self._first + count * end
        head = _HEAD.pack(_MAGIC, bytes.fromhex(incarnation), rank)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # it may be another file by now, such as a pipe
        self.file = os.open(path, flags) if path else os.memfd_create("kos-transfer", 3)
        try:
            if path:
                fcntl.fcntl(self.file, fcntl.F_GET_SEALS)  # raises for a file of another kind
            else:  # flags 3: MFD_CLOEXEC and MFD_ALLOW_SEALING
                os.posix_fallocate(self.file, 0, self.nbytes)
                fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # else a reader could die of SIGBUS
            access = mmap.PROT_READ if path else mmap.PROT_READ | mmap.PROT_WRITE
            self._memory: Any = mmap.mmap(self.file, self.nbytes, prot=access)
        except (OSError, ValueError) as error:
            os.close(self.file)
            raise OutOfMemory(f"transfer: expected {self.nbytes:,} bytes of shared memory, got: {error}") from error
        self._sequences: np.ndarray[Any, Any] = np.frombuffer(self._memory, np.uint64, count, _SEQUENCES)
        if not path:
            self._memory[: _HEAD.size] = head
        elif self._memory[: _HEAD.size] != head:
            self.close()
            raise TransferError(f"{path}: expected the memory of incarnation {incarnation}, got another")

    def array(self, name: str, serial: int) -> np.ndarray[Any, Any]:
        """The flattened array ``name`` in the buffer of the version ``serial``."""
        offset, count, dtype = self._places[name]
        return np.frombuffer(self._memory, dtype, count, self._first + serial % self.count * self._stride + offset)

    def write(self, serial: int, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Copy ``arrays``, flattened, into the buffer of the version ``serial``, which readers may use then."""
        index = serial % self.count
        self._sequences[index] = 2 * serial + 1
        _fence()
        for name, source in arrays.items():
            np.copyto(self.array(name, serial), source)
        _fence()
        self._sequences[index] = 2 * serial

    def holds(self, serial: int) -> bool:
        """Whether the version ``serial`` is in its buffer, complete."""
        _fence()
        found = int(self._sequences[serial % self.count])
        _fence()
        return found == 2 * serial

    def close(self) -> None:
        """Close the file.  The memory is unmapped once no array uses it; no version is in it from now on."""
        os.close(self.file)
        self._memory, self._sequences = b"", np.full(self.count, 1, np.uint64)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


def _fence() -> None:
    """Order memory accesses: to free a lock and take it again is a barrier, also on processors that reorder them.

    The lock is one of its own: one that another thread held at a fork would never be free in the child.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
