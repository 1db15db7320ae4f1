"""SymmetricMemory: one slab on each rank of a machine, mapped by all of them.

Each rank maps a slab at its own address: ``pointers[peer] + offset`` is ``offset`` in the slab of ``peer``.  Ranks are
processes (CUDA IPC) or threads of one process (plain pointers), with a GPU each or sharing one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from kos.cuda import driver
from kos.cuda.driver import call, cu
from kos.errors import InvalidArgument, PeerMemoryError
from kos.memory import ipc
from kos.memory.array import Array

ALIGNMENT = 256
"""Bytes; the size is a multiple of it."""
_TOKEN_BYTES = 16


class Exchange(Protocol):
    """The ranks of a group, and one exchange of bytes between them.  A rendezvous is one."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def allgather(self, data: bytes, /) -> list[bytes]:
        """Every rank's bytes, in rank order; returns once all ranks have called it."""


def on_all(exchange: Exchange, what: str, step: Callable[[], bytes | None]) -> list[bytes]:
    """Run a step that succeeds on all ranks or raises on all of them.  Returns the result of each rank.

    A rank whose step fails raises its own error.  The others raise PeerMemoryError, which names the ranks that failed.
    """
    try:
        mine = b"+" + (step() or b"")
    except Exception as error:
        exchange.allgather(b"-" + str(error).encode())
        raise
    reports = exchange.allgather(mine)
    failed = [f"rank {rank}: {data[1:].decode()}" for rank, data in enumerate(reports) if data[:1] == b"-"]
    if failed:
        raise PeerMemoryError(f"a rank could not {what}: {'; '.join(failed)}")
    return [data[1:] for data in reports]


class SymmetricMemory:
    """``nbytes`` on ``device`` of each rank, zero-initialised. Creating and closing are collective.

    ``pointers[r]`` is rank r's slab as this rank's kernels see it; ``peer_pointers`` is the same table in
    device memory (uint64).  Creation moves real bytes between every two ranks and raises PeerMemoryError on
    all of them if any pair fails.  ``pointer`` is existing memory of this rank, which is mapped and not changed, and
    belongs to the caller; then no bytes are moved.
    """

    def __init__(self, exchange: Exchange, nbytes: int, device: int, pointer: int = 0) -> None:
        self.exchange = exchange
        self.device = device
        self.nbytes = nbytes if pointer else -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._given = pointer
        self._mappings: list[ipc.Mapping | ipc.OwnMemory] = []
        self._slab: ipc.DeviceMemory | None = None
        self.pointers: tuple[int, ...] = ()
        try:
            self._create(nbytes)
        except BaseException:
            self.abort()
            raise

    def _create(self, asked: int) -> None:
        """Create the slabs in few exchanges, since each waits for the slowest rank."""
        rank, size = self.exchange.rank, self.exchange.size
        token, slot = os.urandom(_TOKEN_BYTES), bytearray(size * _TOKEN_BYTES)

        def allocate() -> bytes:
            if self._given:
                return token + ipc.export(self._given, self.nbytes, self.device).to_bytes()
            if self.nbytes < len(slot):
                raise InvalidArgument(f"SymmetricMemory: expected {len(slot)} bytes or more, got {asked}")
            self._slab = ipc.DeviceMemory(self.nbytes, self.device)
            return token + ipc.export(self._slab.pointer, self.nbytes, self.device).to_bytes()

        def write() -> None:
            self.pointers = tuple(self._map(peer, other) for peer, other in enumerate(handles))
            if self._given:
                return
            for base in self.pointers:
                call(cu.cuMemcpyHtoD, base + rank * _TOKEN_BYTES, token, _TOKEN_BYTES)
            call(cu.cuCtxSynchronize)

        def check() -> None:
            for peer, base in enumerate(self.pointers):
                call(cu.cuMemcpyDtoH, slot, base, len(slot))
                for writer in range(size):
                    if bytes(slot[writer * _TOKEN_BYTES : (writer + 1) * _TOKEN_BYTES]) != tokens[writer]:
                        raise PeerMemoryError(f"the bytes that rank {writer} wrote to rank {peer} differ here")

        def finish() -> None:
            if not self._given:
                call(cu.cuMemsetD8, self.pointer, 0, len(slot))
                call(cu.cuCtxSynchronize)
            table = np.array(self.pointers, np.uint64)
            self.peer_pointers = Array.from_numpy(table, self.device, label="peer pointers")
            driver.synchronize(self.device)

        reports = on_all(self.exchange, "share its memory" if self._given else "allocate its slab", allocate)
        tokens = [data[:_TOKEN_BYTES] for data in reports]
        handles = [ipc.IpcHandle.from_bytes(data[_TOKEN_BYTES:]) for data in reports]
        sizes = [other.nbytes for other in handles]
        if len(set(sizes)) > 1:
            raise InvalidArgument(f"SymmetricMemory: expected one size on all ranks, got {sizes} bytes")
        with driver.on_device(self.device):
            on_all(self.exchange, "map the slabs of its peers and write to them", write)
            if not self._given:
                on_all(self.exchange, "read what its peers wrote", check)
            on_all(self.exchange, "keep the addresses of the slabs", finish)

    @property
    def pointer(self) -> int:
        """Address of this rank's own slab."""
        return self.pointers[self.exchange.rank]

    def _map(self, peer: int, handle: ipc.IpcHandle) -> int:
        try:
            self._mappings.append(ipc.attach(handle, self.device))
        except PeerMemoryError as error:
            raise PeerMemoryError(f"the slab of rank {peer}: {error}") from error
        return self._mappings[-1].pointer

    def offset_of(self, pointer: int, nbytes: int) -> int | None:
        """Offset of memory that lies in this rank's slab, or None for memory elsewhere."""
        offset = pointer - self.pointer if self.pointers else -1
        return offset if 0 <= offset <= self.nbytes - nbytes else None

    def close(self) -> None:
        """Unmap and free, after all ranks' devices are done.  Collective."""
        if self._slab is not None or self.pointers:
            self.unmap()
            self.abort()

    def unmap(self) -> None:
        """Unmap the slabs of the other ranks, but keep this rank's own.  Collective."""
        driver.synchronize(self.device)
        self.exchange.allgather(b"")
        self._unmap()
        self.exchange.allgather(b"")  # the exporting rank frees last

    def abort(self) -> None:
        """Unmap and free without the other ranks, if one of them is lost."""
        self._unmap()
        slab, self._slab = self._slab, None
        if slab is not None:
            slab.close()

    def _unmap(self) -> None:
        self.pointers = ()
        while self._mappings:
            self._mappings.pop().close()

    def __enter__(self) -> SymmetricMemory:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        (self.close if kind is None else self.abort)()


class MappedPart:
    """The owner of an array in a rank's slab: keeps ``array``, this rank's own part, in use."""

    __slots__ = ("_memory", "array")

    def __init__(self, memory: SymmetricMemory, array: Any) -> None:
        self._memory, self.array = memory, array

    @property
    def closed(self) -> bool:
        """Whether the slab is no longer mapped."""
        return not self._memory.pointers
