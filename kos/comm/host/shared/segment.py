"""A memory segment mapped by the ranks of a communicator that run on one host.

It is an anonymous file (memfd_create): it has no name that another user could open, and it is freed however its
processes end.  Rank 0 of the host creates it; the others map it through ``/proc/<pid>/fd``, which the kernel allows
to the same user.

The compiled core (``kos/_core``) defines its first part: flags, rings of fingerprints, slots, mailboxes.  Without the
core the ranks of one host work as those of several do.  The second part holds texts: failures and last calls.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from kos._core import native, unavailable
from kos.comm.control.base import ControlPlane
from kos.comm.control.identity import process
from kos.comm.prepared import TEXT_BYTES, TEXTS
from kos.errors import BackendUnavailable, InvalidArgument
from kos.memory import Buffer
from kos.memory.ipc import namespace

T = TypeVar("T")

ARRIVED, _, CLOSED, PID, STARTED, WAITS, FAILED_AT, FAILED, QUEUED, CALLED = range(10)
"""The flags of a rank's line: collectives begun, the core's own, closed, process and its start, awaited ranks, time of
the last failure (microseconds), its description's length and checksum, ranks awaited by its GPU, the same of its last
call's text."""

RING: int = 0 if native is None else native.RING
"""Fingerprints kept per rank: calls of a rank that is further ahead are not compared."""
FAILURE_BYTES, CALL_BYTES = 4096, 512
_NAMES, _FLAGS = {"pid": "PID", "net": "network"}, {"pid": "--pid=host", "net": "--network=host"}


class Segment:
    """The mapped memory and its layout: flags, lines and rings in words, the rest in bytes.

    ``ranks`` are the communicator's ranks on this host.
    """

    failure = 0
    """The failure word, or 0."""

    def __init__(self, file: int, ranks: list[int], rank: int) -> None:
        """Map ``file``, a descriptor, and close it; -1: memory of this rank alone."""
        self.ranks, self.size, self.rank = ranks, len(ranks), rank
        try:
            self.bytes = memoryview(mmap.mmap(file, _total(self.size)))
        finally:
            if file >= 0:
                os.close(file)
        self._lines, self._rings, self._resized, self.texts, _, self.core = native.layout(self.size)
        self.words = self.bytes[: self.texts].cast("Q")

    def line(self, rank: int) -> int:
        return int(self._lines + native.LINE * rank) // 8

    def ring(self, rank: int) -> int:
        return int(self._rings) // 8 + RING * rank

    def resized(self, rank: int, sequence: int) -> int:
        """The entry of a call in the ring of resized calls: its stamp, the fingerprint that is described, the count."""
        return int(self._resized) // 8 + 4 * (RING * rank + sequence % RING)

    def text(self, rank: int, index: int) -> int:
        return int(self.texts) + TEXT_BYTES * (TEXTS * rank + index)

    def report_of(self, rank: int) -> int:
        """What a rank has reported of this group."""
        return int(self.core) + FAILURE_BYTES * rank

    def failure_of(self, rank: int) -> int:
        """The last failure of a rank, in any group."""
        return int(self.core) + FAILURE_BYTES * (self.size + rank)

    def call_of(self, rank: int) -> int:
        """The last call of a rank, in any group."""
        return self.failure_of(self.size) + CALL_BYTES * rank

    def close(self) -> None:
        """Unmap the memory, which is freed when the last rank has unmapped it."""
        self.words = self.bytes = memoryview(b"")


def _total(size: int) -> int:
    """Bytes of a segment."""
    return int(native.layout(size)[-1]) + (2 * FAILURE_BYTES + CALL_BYTES) * size


def open_segment(rendezvous: ControlPlane) -> tuple[Segment | None, str]:
    """The segment of this rank's host, or None; and its description, or why none is shared.  Collective.

    A rank that is alone on its host has a segment too: at a timeout other hosts get its calls (``gpu/shared.py``).  So
    has a group of one, whose calls the core makes.
    """
    if rendezvous.size == 1 and not unavailable:
        return Segment(-1, [0], 0), "a group of one"
    mine = [rendezvous.host_identity, namespaces(), unavailable or ""]
    places = [json.loads(each) for each in rendezvous.allgather(json.dumps(mine).encode())]
    ranks = [rank for rank, place in enumerate(places) if place[:2] == mine[:2]]
    apart = _apart([spaces for host, spaces, _ in places if host == mine[0]])
    refusal = next((reason for rank in ranks if (reason := places[rank][2])), "")
    if not refusal and len(ranks) > native.MAX_RANKS:
        refusal = f"{len(ranks)} ranks on one host are more than {native.MAX_RANKS}"

    def use(file: int) -> Segment:
        return Segment(file, ranks, ranks.index(rendezvous.rank))

    nbytes = 0 if refusal else _total(len(ranks))
    segment, refusal = share_file(rendezvous, ranks, nbytes, refusal, use)
    if segment is None:
        return None, refusal
    if len(ranks) == 1:
        return segment, apart or "no other rank runs on this host"
    shared = f"{len(ranks)} ranks of this host share up to {len(segment.bytes) >> 10} KiB"
    return segment, f"{shared}; {apart}" if apart else shared


def share_file(
    rendezvous: ControlPlane, ranks: list[int], nbytes: int, refusal: str, use: Callable[[int], T]
) -> tuple[T | None, str]:
    """``use(descriptor)`` of a new anonymous file that ``ranks``, those of this host, share; or None, and why not.

    Collective.  ``refusal`` is why this rank cannot share memory, "" if it can.  ``use`` owns the descriptor.
    """
    offer, file, used = "", -1, None
    if not refusal and rendezvous.rank == ranks[0]:
        try:
            file = os.memfd_create("kos", os.MFD_CLOEXEC)
            os.ftruncate(file, nbytes)
            offer = f"/proc/{os.getpid()}/fd/{file}"
        except (OSError, AttributeError) as error:
            refusal = f"memfd_create: {error}"
    try:
        offers = [json.loads(each) for each in rendezvous.allgather(json.dumps([offer, namespaces()]).encode())]
        offer = offers[ranks[0]][0]
        if apart := _apart([offers[rank][1] for rank in ranks], ["pid"]):  # there the path may name another file
            refusal = apart
        elif offer:
            try:
                used = use(os.open(offer, os.O_RDWR | os.O_CLOEXEC))
            except (OSError, ValueError) as error:
                refusal = f"rank {rendezvous.rank} cannot map the memory of rank {ranks[0]}: {error}"
        refusals = rendezvous.allgather(refusal.encode())
    finally:
        if file >= 0:
            os.close(file)
    refusal = next((refusals[rank].decode() for rank in ranks if refusals[rank]), "")
    return (None if refusal else used), refusal


def started(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if it has ended or is a zombie.

    Raises OSError if that cannot be read, such as for lack of file descriptors.
    """
    return process(pid)[1]


def read_memory(pid: int, address: int, nbytes: int) -> bytes | None:
    """Memory of a process, by process_vm_readv(2); None if it may not be read."""
    data = ctypes.create_string_buffer(nbytes)
    to, at = ((ctypes.c_size_t * 2)(start, nbytes) for start in (ctypes.addressof(data), address))  # struct iovec
    return data.raw if ctypes.CDLL(None).process_vm_readv(pid, to, 1, at, 1, 0) == nbytes else None


def namespaces() -> dict[str, str]:
    """Those that processes of a host have in common if they can share memory and see each other in /proc.

    Network namespaces count as hosts: separating them is a request to use the network.
    """
    return {kind: namespace(kind) for kind in ("pid", "net")}


def _apart(spaces: list[dict[str, str]], kinds: Sequence[str] = ("pid", "net")) -> str:
    """Why processes of one host in these namespaces share no memory, judged by those ``kinds``; "" if they can."""
    found = [kind for kind in kinds if len({each.get(kind) for each in spaces}) > 1]
    names, flags = (" and ".join(texts[kind] for kind in found) for texts in (_NAMES, _FLAGS))
    share = f"(containers: share them, as with {flags})"
    return f"the ranks of this host are in different {names} namespaces {share}" if found else ""


Array = np.ndarray[Any, Any]


class SharedArrays:
    """The arrays of ``Communicator.allocate`` of a group on one host: all ranks map the parts of all, for put and get.

    Memory is freed with the last view of it.  A barrier between a put and the read of it is enough.
    """

    def __init__(self, rendezvous: ControlPlane) -> None:
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
