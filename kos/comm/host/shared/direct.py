"""Collectives in one copy: every rank reads its data directly from the memory of the other ranks.

Linux copies between processes (process_vm_readv, "cross memory attach") if one may debug the other.  A slot would need
two copies, and its cache lines would come from the core that has just written them.

A rank writes the addresses of its data into its slot, and waits at the end until the other ranks have read the data.
An all_reduce uses slots, since writing memory that another core has just read takes longer than the copy.  A reduce
uses slots too: there all ranks add, and here only the root would.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from kos.comm.host.shared.plans import Plan, Plans, Step
from kos.comm.host.shared.segment import GOT, PUT, Segment
from kos.comm.operation import AUTO, Operation
from kos.comm.reduction import Reduction
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.scheduled import wrong_message

Array = np.ndarray[Any, Any]

DIRECT_BYTES, NEAR_BYTES, CROWDED_BYTES = 32 << 10, 512 << 10, 128 << 10
"""The least bytes that a rank reads from another rank in one copy.

The second number is for ranks whose cores share a last-level cache, the third for more ranks than cores.  Below this
size slots are faster.  For a reduce_scatter the first and the last are twice as large.  Measured with 2 ranks on 2
cores of an EPYC 9005, November 2026: a broadcast of 64 KB takes 14 us in one copy and 6 us through slots, where the
cores share a cache.  Where they do not, on an EPYC 9004, it takes 12 us and 32 us.
"""
SPINS, CROWDED_SPINS = 300, 30
"""Polls of a flag (50 ns each) before a wait returns to the engine; the second number is for more ranks than cores.
There each poll also yields the core, since a spinning rank may keep the awaited rank from running."""
READ_SPINS = 4000
"""Polls that wait for other ranks to read this rank's memory, unless there are more ranks than cores."""
ENDING_SECONDS = 1.0
"""Time to detect that a process has ended, once its memory cannot be read."""
CHUNK_BYTES = 256 << 10
"""The bytes that are read at a time and then reduced."""

_FROM_ROOT = ("broadcast", "scatter")
_WHOLE = ("broadcast", "gather", "all_gather")
"""Operations in which a slot, which holds ``NEAR_BYTES``, is one rank's data for all others."""
_DIRECT = frozenset({*_FROM_ROOT, "gather", "all_gather", "all_to_all", "reduce_scatter"})


class Unreadable(OSError):
    """Linux cannot copy from the memory of an array, such as memory of a device.  All ranks raise it."""


class _Vector(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Direct:
    """Makes the plans of one rank; collective."""

    def __init__(self, rendezvous: Rendezvous, segment: Segment, plans: Plans, crowded: bool) -> None:
        self.rank, self.size, self.peers, self._plans = plans.rank, plans.size, plans.peers, plans
        self._gots, puts = ([segment.layout.line(r) + word for r in range(self.size)] for word in (GOT, PUT))
        self._puts = [puts[r] for r in self.peers]
        self._readv: Any = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
        if self._readv is not None:
            self._readv.restype, vectors = ctypes.c_ssize_t, (ctypes.c_void_p, ctypes.c_ulong)
            self._readv.argtypes = ctypes.c_int, *vectors, *vectors, ctypes.c_ulong
        self._scratch = np.empty(min(CHUNK_BYTES, plans.block), np.uint8)
        self._byte = address_of(self._scratch)
        token = np.frombuffer(os.urandom(16), np.uint8)
        mine = np.array([os.getpid(), address_of(token)], np.int64)
        everyone = rendezvous.allgather(mine.tobytes() + token.tobytes())
        places = [np.frombuffer(each[: mine.nbytes], np.int64).tolist() for each in everyone]
        self._pids = [pid for pid, _ in places]
        able = self._readv is not None and all(
            self._read_token(rank, at, token.nbytes) == each[mine.nbytes :]
            for rank, ((_, at), each) in enumerate(zip(places, everyone, strict=True))
        )
        answers = rendezvous.allgather(b"1" + _cache() if able else b"")
        self.usable = all(answers)
        """Whether every rank can read the memory of every other one."""
        near = len(set(answers)) == 1 and len(answers[0]) > 1
        self.least = NEAR_BYTES if near else CROWDED_BYTES if crowded else DIRECT_BYTES
        self._tables = plans.typed(np.dtype(np.int64))
        self._offers = [[memoryview(table) for table in slot] for slot in zip(*self._tables, strict=True)]  # by slot

    def make(self, o: Operation) -> Plan | None:
        """The plan of ``o`` in one copy; None if there is none, or if slots are faster."""
        name, buffer, me = o.name.removesuffix("_v"), o.send or o.recv, self.rank
        if not self.usable or name not in _DIRECT or buffer is None or o.options.algorithm != AUTO:
            return None
        nbytes = (o.common_count() or 0) * buffer.dtype.itemsize // (self.size if name == "all_to_all" else 1)
        least = self.least if o.reduction is None else 2 * self.least
        if name == o.name and nbytes < least + (name in _WHOLE):
            return None
        sources, readers = range(self.size), self.peers
        if name in _FROM_ROOT:
            assert o.root is not None
            sources, readers = range(o.root, o.root + 1), self.peers if me == o.root else []
        elif name == "gather":
            readers = [r for r in self.peers if r == o.root]
        x, out = (None if each is None else each.flat for each in (o.send, o.recv))
        counts, starts = [0] * self.size, [0] * self.size  # the elements of this rank that each rank reads
        if x is not None and ("scatter" in name or name == "all_to_all"):
            counts = list(o.send_counts or [x.size // self.size] * self.size)
            starts = [0, *accumulate(counts)]
        elif x is not None:
            counts = [x.size] * self.size
        mine = None if x is None else x[starts[me] : starts[me] + counts[me]]
        if o.reduction is None:
            get = self._copy(mine, out, sources, o.recv_counts)
        elif o.reduction.is_plain:
            assert mine is not None and out is not None
            get = self._reduce(mine, out, o.reduction)
        else:
            return None
        gots = [self._gots[r] for r in readers]
        return Plan(1, 1, self.peers, self._offer(x if readers else None, starts, counts), get, self._puts, True, gots)

    def _offer(self, x: Array | None, starts: list[int], counts: list[int]) -> Step:
        """Writes into the slot whether ``x`` can be read, and for each rank the address and bytes of its part."""
        parts = [1]
        if x is not None:
            address, itemsize = address_of(x), x.itemsize
            parts[0] = not x.size or self.reads(self.rank, address)
            for start, count in zip(starts, counts, strict=False):
                parts += address + start * itemsize, count * itemsize
        values = np.array(parts, np.int64)
        slots = [slot[: len(parts)] for slot in self._tables[self.rank]]

        def put(slot: int, a: int, b: int) -> None:
            slots[slot][...] = values

        return put

    def _copy(
        self, mine: Array | None, out: Array | None, sources: Sequence[int], counts: Sequence[int] | None
    ) -> Step:
        """Copies ``mine`` and the data of the other sources to ``out``, in rank order."""
        reads, own, end, at = [], None, 0, 1 + 2 * self.rank
        if out is not None:
            address, itemsize = address_of(out), out.itemsize
            for source, count in zip(sources, counts or [out.size // len(sources)] * len(sources), strict=True):
                to = address + end * itemsize
                if source != self.rank:
                    reads.append((source, count * itemsize, self.reader(source, to)))
                elif mine is not None and address_of(mine) != to:
                    own = out[end : end + count]
                end += count
        offers = self._offers

        def get(slot: int, a: int, b: int) -> None:
            offered = offers[slot]
            for offer in offered:
                if not offer[0]:
                    raise Unreadable
            for source, nbytes, read in reads:
                offer = offered[source]
                if offer[at + 1] != nbytes:
                    assert out is not None
                    raise wrong_message(self.rank, (nbytes, out.dtype), source, (offer[at + 1], out.dtype))
                read(offer[at], nbytes)
            if own is not None:
                own[...] = mine

        return get

    def _reduce(self, x: Array, out: Array, reduction: Reduction) -> Step:
        """Reduces ``x`` and the data of the other ranks to ``out``, a chunk at a time."""
        step, offers, at = self._scratch.size // len(self.peers) // x.itemsize, self._offers, 1 + 2 * self.rank
        typed = self._scratch[: step * len(self.peers) * x.itemsize].view(x.dtype).reshape(len(self.peers), step)
        first, scratch = address_of(typed), list(typed)
        reads = [(source, self.reader(source, first + k * step * x.itemsize)) for k, source in enumerate(self.peers)]

        def get(slot: int, a: int, b: int) -> None:
            offered = offers[slot]
            for offer in offered:
                if not offer[0]:
                    raise Unreadable
            for start in range(0, x.size, step):
                mine = x[start : start + step]
                for source, read in reads:
                    read(offered[source][at] + start * x.itemsize, mine.nbytes)
                parts = [part[: mine.size] for part in scratch]
                parts.insert(self.rank, mine)
                self._plans.sum(reduction, parts, out[start : start + step])

        return get

    def reader(self, rank: int, to: int) -> Callable[[int, int], None]:
        """A function ``read(address, nbytes)`` that copies from that rank's memory to the address ``to``.

        It raises OSError if Linux refuses the call or the process has ended.
        """
        local, remote, readv = _Vector(to), _Vector(), self._readv
        arguments = self._pids[rank], ctypes.byref(local), 1, ctypes.byref(remote), 1, 0

        def read(address: int, nbytes: int) -> None:
            remote.address, local.nbytes, remote.nbytes = address, nbytes, nbytes
            count = readv(*arguments)
            if count == nbytes:
                return
            if count <= 0:
                raise OSError(ctypes.get_errno(), f"process_vm_readv of rank {rank}")
            self.reader(rank, to + count)(address + count, nbytes - count)  # Linux copies at most 2 GiB at a time

        return read

    def _read_token(self, rank: int, address: int, nbytes: int) -> bytes:
        """What is there; nothing if it cannot be read.  In another PID namespace a number may be another process's."""
        found = np.empty(nbytes, np.uint8)
        try:
            self.reader(rank, address_of(found))(address, nbytes)
        except OSError:
            return b""
        return found.tobytes()

    def reads(self, rank: int, address: int) -> bool:
        """Whether the byte at that address of that rank can be read."""
        try:
            self.reader(rank, self._byte)(address, 1)
        except OSError:
            return False
        return True


def address_of(x: Array) -> int:
    start: int = x.__array_interface__["data"][0]
    return start


def _cache() -> bytes:
    """The number of the last-level cache that all cores of this process share; empty if there is none."""
    number = b""
    with contextlib.suppress(OSError):
        for core in os.sched_getaffinity(0):
            other = Path(f"/sys/devices/system/cpu/cpu{core}/cache/index3/id").read_bytes()
            if number not in (b"", other):
                return b""
            number = other
    return number
