"""Arrays of ``Communicator.allocate`` in host memory: all ranks of a host map the parts of all, for put and get.

The order of loads and stores is that of ``segment.py``: a barrier between a put and the read of it is enough.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import weakref
from typing import Any

import numpy as np

from kos.comm.control.base import Rendezvous
from kos.comm.host.shared.segment import share_file
from kos.errors import BackendUnavailable, InvalidArgument
from kos.memory import Buffer

Array = np.ndarray[Any, Any]


class SharedArrays:
    """The shared arrays of one group whose ranks are on one host; memory is freed with the last view of it."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._memories: list[weakref.ref[Array]] = []  # the bytes of all ranks' parts, one after another
        self._refusal = ""

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """This rank's part of a new shared array; a plain array where memory cannot be shared.  Collective."""
        rank, size = self._rendezvous.rank, self._rendezvous.size
        nbytes = math.prod(shape) * dtype.itemsize
        part = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if part * size > sys.maxsize:  # no file is so long
            raise MemoryError(f"expected at most 2**63 - 1 bytes on all ranks, got {part * size}")
        memory, self._refusal = share_file(self._rendezvous, list(range(size)), part * size, "", _map)
        if memory is None:
            return np.empty(shape, dtype)
        self._memories = [each for each in self._memories if each() is not None] + [weakref.ref(memory)]
        return _typed(memory, rank * part, nbytes, shape, dtype)

    def views(self, x: Buffer) -> list[Array]:
        """Each rank's memory at the place of ``x``, which lies in this rank's part of a shared array."""
        rank, size = self._rendezvous.rank, self._rendezvous.size
        for memory in [memory for each in self._memories if (memory := each()) is not None]:
            part = memory.size // size
            offset = x.address - memory.__array_interface__["data"][0] - rank * part
            if 0 <= offset <= part - x.nbytes:
                return [_typed(memory, r * part + offset, x.nbytes, x.shape, x.dtype.numpy) for r in range(size)]
        if self._refusal:
            raise BackendUnavailable(f"views: the ranks share no memory: {self._refusal}")
        raise InvalidArgument(f"x: expected an array of allocate, or a part of one, got {x} in other memory")


def _map(file: int) -> Array:
    try:
        return np.frombuffer(mmap.mmap(file, 0), np.uint8)
    finally:
        os.close(file)


def _typed(memory: Array, start: int, nbytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    # In two steps: in NumPy an empty slice begins where its base does, which is not at the rank's part.
    return memory[start:][:nbytes].view(dtype).reshape(shape)
