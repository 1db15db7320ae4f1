"""Collectives in one copy: every rank reads its data directly from the memory of the other ranks.

Linux copies between processes (process_vm_readv, "cross memory attach") if one may debug the other.  A slot would need
two copies, and its cache lines would come from the core that has just written them.

A rank writes the addresses of its data into its slot, and waits at the end until the other ranks have read the data.
An all_reduce, a reduce and a scan use slots: there one rank copies while another adds.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from kos.comm.host.shared.plans import ALIGN, MARKED_BYTES, Plan, Plans, Step
from kos.comm.host.shared.segment import GOT, PUT, Segment
from kos.comm.operation import AUTO, Operation
from kos.comm.reduction import Reduction
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.scheduled import wrong_message

Array = np.ndarray[Any, Any]

DIRECT_BYTES = 256 << 10
"""The most bytes that a rank reads from another rank through a slot; more are read in one copy.

So are the parts of a scatter, an all_to_all or a reduce_scatter that are longer than a rank's part of a slot.
Measured with 2 ranks on 2 cores of an EPYC 9004, November 2026: an all_gather of 128 KB from each rank takes 29 us in
slots and 38 us in one copy, and one of 512 KB takes 210 us and 140 us.
"""
SPINS, CROWDED_SPINS = 300, 30
"""Polls of a flag (50 ns each) before a wait returns to the engine; the second number is for more ranks than cores.
There each poll also yields the core, since a spinning rank may keep the awaited rank from running."""
ONE_COPY_SPINS = 4000
"""Polls of a flag in an operation in one copy, unless there are more ranks than cores.

A rank may be late by the time of its own copy, and a return to the engine takes 20 to 40 us."""
ENDING_SECONDS = 1.0
"""Time to detect that a process has ended, once its memory cannot be read."""
CHUNK_BYTES = 256 << 10
"""The bytes that are read at a time and then reduced."""

OPERATIONS = frozenset({
    "broadcast", "scatter", "gather", "all_gather", "all_to_all", "reduce_scatter", "exscan"
})  # fmt: skip
_PARTED = frozenset({"scatter", "all_to_all", "reduce_scatter"})
"""Operations in which a slot has a part for each rank."""


class Unreadable(OSError):
    """Linux cannot copy from the memory of an array, such as memory of a device.  All ranks raise it."""


class Direct:
    """Makes the plans of one rank; collective."""

    def __init__(self, rendezvous: Rendezvous, segment: Segment, plans: Plans) -> None:
        self.rank, self.size, self.peers, self._plans = plans.rank, plans.size, plans.peers, plans
        self._ledger = rendezvous.ledger
        self._gots, puts = ([segment.layout.line(r) + word for r in range(self.size)] for word in (GOT, PUT))
        self._puts = [puts[r] for r in self.peers]
        self._readv: Any = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
        if self._readv is not None:
            self._readv.restype = ctypes.c_ssize_t
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
        answers = rendezvous.allgather(b"1" if able else b"")
        self.usable = all(answers)
        """Whether every rank can read the memory of every other one."""
        self.most = DIRECT_BYTES
        self._block = plans.block
        slots = zip(plans.typed(np.dtype(np.int64)), plans.typed(np.dtype(np.uint8)), strict=True)
        self._tables = [[(words.data, memory.data) for words, memory in zip(*each, strict=True)] for each in slots]
        self._by_slot = [list(slot) for slot in zip(*self._tables, strict=True)]
        """The slots, by rank and by stage % TURNS, and the other way round: as words, and as bytes."""

    def make(self, o: Operation) -> Plan | None:
        """The plan of ``o`` in one copy; None if there is none, or if slots are faster."""
        name, me, reduction = o.name.removesuffix("_v"), self.rank, o.reduction
        x, out = (None if each is None else each.flat for each in (o.send, o.recv))
        buffer = o.send or o.recv
        if not self.usable or name not in OPERATIONS or buffer is None or o.options.algorithm != AUTO:
            return None
        if reduction is not None and not reduction.is_plain:
            return None
        nbytes = (o.common_count() or 0) * buffer.dtype.itemsize // (self.size if name == "all_to_all" else 1)
        if name == o.name and nbytes <= min(self.most, self._block // self.size if name in _PARTED else self._block):
            return None
        sources, readers = _sources_and_readers(name, me, self.size, o.root)
        counts, starts = [0] * self.size, [0] * self.size  # the elements of this rank that each rank gets
        if x is not None and ("scatter" in name or name == "all_to_all"):
            counts = list(o.send_counts or [x.size // self.size] * self.size)
            starts = [0, *accumulate(counts)]
        elif x is not None:
            counts = [x.size] * self.size
        mine = None if x is None else x[starts[me] : starts[me] + counts[me]]
        offered = [(starts[r], counts[r] if r in readers else 0) for r in range(self.size)]
        put, gots = self._offer(x, offered, keep=name == "exscan" and x is out)
        if o.name == "all_to_all_v":  # two ranks may disagree about their counts, which all ranks report
            gots = [self._gots[r] for r in self.peers]
        if out is None:
            get, own = self._reads([]), None
        elif reduction is not None and len(sources) > 1:
            get, own = self._reduce(mine, out, reduction, sources), None
        else:
            get, own = self._copy(mine, out, sources, o.recv_counts, marks=o.root is not None)
        return Plan(1, 1, self.peers, put, get, self._puts, True, gots, own, one_copy=True)

    def _offer(self, x: Array | None, parts: list[tuple[int, int]], keep: bool) -> tuple[Step, list[int]]:
        """Offers each rank its part of ``x``, (start, elements); also returns the GOT flags of those that read ``x``.

        The slot holds whether ``x`` can be read, and for each rank the place and the bytes of its part.  The place is
        an address, or for a small part the negative offset of its copy in the slot.  ``keep``: offers a copy of ``x``,
        which the operation overwrites.
        """
        words, copies, gots, places, end = [1], [], [], dict[int, int](), -(-8 * (1 + 2 * self.size) // ALIGN) * ALIGN
        data = None if x is None else np.empty_like(x) if keep else x
        for rank, (start, count) in enumerate(parts):
            nbytes = 0 if x is None else count * x.itemsize
            where = -places.get(start, end)
            if not nbytes or x is None or data is None:
                where = 0
            elif nbytes > self.most or (start not in places and end + nbytes > self._block):
                where = address_of(data) + start * x.itemsize
                gots.append(self._gots[rank])
            elif start not in places:
                places[start] = end
                copies.append((end, end + nbytes, as_bytes(x[start : start + count])))
                end += -(-nbytes // ALIGN) * ALIGN
            words += where, nbytes
        if gots and data is not None:
            words[0] = int(self.reads(self.rank, address_of(data)))
        table = np.array(words, np.int64).data
        slots = [(words[: len(table)], slot) for words, slot in self._tables[self.rank]]
        if data is x or not gots:
            data = None

        def put(slot: int, a: int, b: int) -> None:
            words, memory = slots[slot]
            words[:] = table
            for at, end, part in copies:
                memory[at:end] = part
            if data is not None:
                data[...] = x

        return put, gots

    def _reads(
        self,
        reads: list[tuple[int, int, memoryview, Callable[[int, int], None]]],
        dtype: Any = None,
        marks: bool = False,
    ) -> Step:
        """Reads from each source as many bytes, to that memory.  ``marks``: as in ``Plans._moves``."""
        tables, at = self._by_slot, 1 + 2 * self.rank

        def get(slot: int, a: int, b: int) -> None:
            offers = tables[slot]
            for offer, _ in offers:
                if not offer[0]:
                    raise Unreadable
            for source, nbytes, to, read in reads:
                offer, memory = offers[source]
                where = offer[at]
                if offer[at + 1] != nbytes:
                    raise wrong_message(self._ledger, self.rank, (nbytes, dtype), source, (offer[at + 1], dtype))
                if where > 0:
                    read(where, nbytes)
                else:
                    part = memory[-where : nbytes - where]
                    to[:] = part
                    if marks and nbytes >= MARKED_BYTES:
                        np.frombuffer(part, np.uint8)[::ALIGN] = 0

        return get

    def _copy(
        self, mine: Array | None, out: Array, sources: Sequence[int], counts: Sequence[int] | None, marks: bool
    ) -> tuple[Step, Step | None]:
        """Copies the data of the other sources to ``out``, in rank order; and what copies ``mine``."""
        reads, own, end = [], None, 0
        for source, count in zip(sources, counts or [out.size // len(sources)] * len(sources), strict=True):
            part = out[end : end + count]
            end += count
            if source != self.rank:
                reads.append((source, part.nbytes, as_bytes(part), self.reader(source, address_of(part))))
            elif mine is not None and address_of(mine) != address_of(part):
                own = as_bytes(part), as_bytes(mine)
        if own is None:
            return self._reads(reads, out.dtype, marks), None
        to, x = own

        def copy(slot: int, a: int, b: int) -> None:
            to[:] = x

        return self._reads(reads, out.dtype, marks), copy

    def _reduce(self, mine: Array | None, out: Array, reduction: Reduction, sources: Sequence[int]) -> Step:
        """Reduces ``mine``, if this rank is a source, and the data of the others to ``out``, a chunk at a time."""
        tables, at, peers = self._by_slot, 1 + 2 * self.rank, [source for source in sources if source != self.rank]
        step = self._scratch.size // len(peers) // out.itemsize
        scratch = self._scratch[: step * len(peers) * out.itemsize].view(out.dtype).reshape(len(peers), step)
        reads = [
            (source, row, self.reader(source, address_of(row))) for source, row in zip(peers, scratch, strict=True)
        ]
        slots = self._plans.typed(np.dtype(np.uint8))
        place = sources.index(self.rank) if mine is not None and self.rank in sources else None

        def get(slot: int, a: int, b: int) -> None:
            offers = tables[slot]
            for offer, _ in offers:
                if not offer[0]:
                    raise Unreadable
            for start in range(0, out.size, step):
                to = out[start : start + step]
                parts = []
                for source, row, read in reads:
                    where = offers[source][0][at]
                    if where > 0:
                        read(where + start * to.itemsize, to.nbytes)
                        parts.append(row[: to.size])
                    else:
                        first = start * to.itemsize - where
                        parts.append(slots[source][slot][first : first + to.nbytes].view(to.dtype))
                if place is not None and mine is not None:
                    parts.insert(place, mine[start : start + step])
                self._plans.sum(reduction, parts, to)

        return get

    def reader(self, rank: int, to: int) -> Callable[[int, int], None]:
        """A function ``read(address, nbytes)`` that copies from that rank's memory to the address ``to``.

        It raises OSError if Linux refuses the call or the process has ended.
        """
        vectors, readv = (ctypes.c_uint64 * 4)(to), self._readv  # two ``struct iovec``, of this rank and of that one
        words = memoryview(vectors).cast("B").cast("Q")
        one, flags = ctypes.c_ulong.from_param(1), ctypes.c_ulong.from_param(0)
        # Converted to C once: conversions at each call take 1.3 us.
        arguments = (
            ctypes.c_int.from_param(self._pids[rank]), ctypes.byref(vectors), one, ctypes.byref(vectors, 16), one, flags
        )  # fmt: skip

        def read(address: int, nbytes: int) -> None:
            words[1] = words[3] = nbytes
            words[2] = address
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


def as_bytes(x: Array) -> memoryview:
    """The memory of a contiguous array: NumPy would take twice the time to copy a small one."""
    return x.view(np.uint8).data


def _sources_and_readers(name: str, me: int, size: int, root: int | None) -> tuple[Sequence[int], Sequence[int]]:
    """The ranks whose data rank ``me`` gets, maybe its own, and the other ranks that get its data."""
    others = [rank for rank in range(size) if rank != me]
    if root is not None and name in ("broadcast", "scatter"):
        return range(root, root + 1), others if me == root else []
    if root is not None:  # gather
        return range(size), [root] if me != root else []
    if name == "exscan":
        return range(me), others[me:]
    return range(size), others
