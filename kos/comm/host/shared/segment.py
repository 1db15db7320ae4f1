"""A memory segment mapped by the ranks of a communicator that run on one host.

It is an anonymous file (memfd_create): it has no name that another user could open, and it is freed however its
processes end.  Rank 0 of the host creates it; the others map it through ``/proc/<pid>/fd``, which the kernel allows
to the same user.

Every flag has one writer.  Payload is written before its flag and read after it.  x86-64 keeps that order for plain
loads and stores (Intel SDM volume 3, 9.2; streaming stores of a large memmove end in a fence), so no barriers are
needed.  Other machines are refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import platform
import select
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kos.comm.host.fingerprints import TEXT_BYTES, TEXTS
from kos.comm.rendezvous.base import Rendezvous, host_id

Array = np.ndarray[Any, Any]
T = TypeVar("T")

_LINE = 16
"""Words of one rank's line: two cache lines, because the prefetcher fetches them in pairs."""
PID, STARTED, ARRIVED, PUT, REDUCED, GOT, CLOSED, WAITS, FAILED_AT, FAILED, QUEUED = range(11)
"""The flags of a line: process and its start, collectives begun, stages put, reduced and got, closed, awaited ranks,
time of the last failure (microseconds), bytes of its description, and ranks awaited by its GPU."""

RING = 1024
"""Fingerprints kept per rank: calls of a rank that is further ahead are not compared."""
FAILURE_BYTES = 4096

DEPTH = 2
"""Slots of a rank: one is filled while the other is read."""
TURNS = 2 * DEPTH
"""Stages after which a rank uses a slot again: meanwhile the next rank has used it.

A core writes lines that it has read in a fifth of the time that it takes to write its own, which others have read.
"""
BLOCK_BYTES = 512 * 1024
"""Bytes of a slot: large enough to amortise the waits, small enough to stay in the reader's cache."""
SLOTS_BYTES = 16 << 20
"""Bytes of all slots of a segment: with many ranks, slots are smaller."""
APART = 2048
"""Bytes from a page's start to the start of a slot; the room of a mailbox begins slightly later.

An EPYC 7003 copies at a fifth of its speed (``rep movsb``, in the C library and in Linux; glibc bug 30994) to addresses
that lie 1 to 31 bytes above the source's, modulo 4096.  Large arrays of NumPy lie 16 bytes above a page's start.
"""
MAX_RANKS = 256
HEADERS, ANSWERS = 128, 1024
"""The messages of a mailbox that the receiver has not taken, and those that it has not read in place, at most."""
MAIL_HEAD = 8 * (32 + ANSWERS + 8 * HEADERS)
"""Bytes of a mailbox before its room for data: flags, answers, and headers of a cache line each."""
ROOM_BYTES, ROOMS_BYTES = 1 << 20, 256 << 20
"""Bytes of data in a mailbox, and in all of a segment.  The system gives memory only to pages that are used."""
LOCK_SECONDS = 1.0


class Segment:
    """The mapped memory and its layout.  ``ranks`` are the communicator's ranks on this host."""

    def __init__(self, file: int, ranks: list[int], rank: int) -> None:
        self._file = file  # opened by this rank, so that flock also excludes other ranks of this process
        self.ranks, self.size, self.rank = ranks, len(ranks), rank
        layout = _Layout(self.size)
        memory = mmap.mmap(file, layout.total)
        self.bytes = memoryview(memory)
        self.words = self.bytes[: layout.texts].cast("Q")
        self.layout = layout
        self.data: Array = np.frombuffer(memory, np.uint8, layout.mail - layout.data, layout.data)

    def close(self) -> None:
        """Unmap the memory, which is freed when the last rank has unmapped it."""
        self.__del__()
        self.data = np.empty(0, np.uint8)
        self.words = self.bytes = memoryview(b"")

    def __del__(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude the other ranks; the kernel unlocks for a rank that dies.

        Raises TimeoutError if a rank holds the lock for ``LOCK_SECONDS``, because it was stopped.
        """
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(0.001)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class _Layout:
    """Offsets of a segment for ``size`` ranks: ``lines``, ``rings`` in words, the rest in bytes."""

    def __init__(self, size: int) -> None:
        self.failure = 0  # in the first line: bytes of the failure's description, 0 for none
        self.lines = _LINE
        self.rings = _LINE * (1 + size)
        self.texts = 8 * (self.rings + RING * size)
        self.failure_text = self.texts + TEXTS * TEXT_BYTES * size
        self.failures = self.failure_text + FAILURE_BYTES  # the last failure of each rank, in any group
        self.data = -(-(self.failures + FAILURE_BYTES * size) // 4096) * 4096 + APART
        self.block = min(BLOCK_BYTES, SLOTS_BYTES // (DEPTH * size) // 4096 * 4096)
        self.mail, self._size = self.data + DEPTH * self.block * size, size
        self.room = max(4096, min(ROOM_BYTES, ROOMS_BYTES // size**2 // 4096 * 4096))
        self._pitch = -(-(MAIL_HEAD + self.room) // 4096) * 4096
        self.total = self.mail + self._pitch * size**2

    def line(self, rank: int) -> int:
        return self.lines + _LINE * rank

    def ring(self, rank: int) -> int:
        return self.rings + RING * rank

    def text(self, rank: int, index: int) -> int:
        return self.texts + TEXT_BYTES * (TEXTS * rank + index)

    def mailbox(self, sender: int, receiver: int) -> int:
        """In bytes from ``mail`` on."""
        return self._pitch * (self._size * sender + receiver)

    def failure_of(self, rank: int) -> int:
        return self.failures + FAILURE_BYTES * rank


def open_segment(rendezvous: Rendezvous) -> tuple[Segment | None, str]:
    """The segment of this rank's host, or None; and its description, or why none is shared.  Collective.

    A rank that is alone on its host has a segment too: ranks of other hosts compare its calls (``hosts.py``).
    """
    refusal = "" if platform.machine() in ("x86_64", "AMD64") else f"{platform.machine()} reorders stores"
    hosts = rendezvous.allgather(json.dumps([_host(), refusal]).encode())
    mine = json.loads(hosts[rendezvous.rank])[0]
    ranks = [rank for rank, host in enumerate(hosts) if json.loads(host)[0] == mine]
    refusal = next((reason for rank in ranks if (reason := json.loads(hosts[rank])[1])), "")
    if len(ranks) > MAX_RANKS:
        refusal = refusal or f"{len(ranks)} ranks on one host are more than {MAX_RANKS}"

    def use(file: int) -> Segment:
        return Segment(file, ranks, ranks.index(rendezvous.rank))

    segment, refusal = share_file(rendezvous, ranks, _Layout(len(ranks)).total, refusal, use)
    if segment is None:
        return None, refusal
    shared = f"{len(ranks)} ranks of this host share up to {segment.layout.total >> 10} KiB"
    return segment, shared if len(ranks) > 1 else "no other rank runs on this host"


def share_file(
    rendezvous: Rendezvous, ranks: list[int], nbytes: int, refusal: str, use: Callable[[int], T]
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
    offer = rendezvous.allgather(offer.encode())[ranks[0]].decode()
    if offer:
        try:
            used = use(os.open(offer, os.O_RDWR | os.O_CLOEXEC))
        except (OSError, ValueError) as error:
            refusal = f"rank {rendezvous.rank} cannot map the memory of rank {ranks[0]}: {error}"
    refusals = rendezvous.allgather(refusal.encode())
    if file >= 0:
        os.close(file)
    refusal = next((refusals[rank].decode() for rank in ranks if refusals[rank]), "")
    return (None if refusal else used), refusal


def started(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if it has ended or is a zombie.

    Raises OSError if that cannot be read, such as for lack of file descriptors.
    """
    return process(pid)[1]


class Processes:
    """Processes of this host.  One poll of their descriptors finds those that have ended (pidfd_open(2))."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._poll, self._unknown = select.poll(), False
        self._files: list[int] = []
        for pid in pids:
            try:
                self._files.append(os.pidfd_open(pid))
            except (OSError, AttributeError):  # it has ended, or the system or Python lacks the call, or a descriptor
                self._unknown = True
            else:
                self._poll.register(self._files[-1], select.POLLIN)

    def __del__(self) -> None:
        for file in self._files:
            os.close(file)

    def ended(self) -> bool:
        """Whether a process has ended since the last call.  Always True if one could not be opened."""
        found = [file for file, _ in self._poll.poll(0)]
        for file in found:
            self._poll.unregister(file)
        return self._unknown or bool(found)


def process(pid: int) -> tuple[str, int]:
    """The state of the process, as a letter of proc(5), and when it ``started``."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a process may have any bytes as its name
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    fields = stat[stat.rindex(")") + 2 :].split()
    return fields[0], 0 if fields[0] in "ZX" else int(fields[19])


def _host() -> str:
    """The identity that processes share if they can share memory and see each other in /proc.

    Network namespaces count as hosts: separating them is a request to use the network.
    """
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net") if Path("/proc/self/ns").exists()]
    return " ".join([host_id(), *spaces])
