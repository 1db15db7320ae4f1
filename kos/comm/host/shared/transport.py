"""The operations of the ranks of one host through their segment, which the compiled core runs (``kos/_core``).

Where a group has several hosts, the core carries the messages of its schedules within each.

This module prepares calls for the core and raises what the core has found.  While a call waits, it asks ``calls.py``
whether the ranks that it waits for are alive.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import time_ns
from typing import Any

import numpy as np

from kos._core import native
from kos.comm.contract import Request
from kos.comm.control.base import ControlPlane
from kos.comm.host.shared.calls import LONGEST_CHECK_SECONDS, Difference, FingerprintRing
from kos.comm.host.shared.segment import PID, read_memory
from kos.comm.matching import Envelope, envelope
from kos.comm.operation import ANY, AUTO, COLLECTIVE_TAGS, GROUP_CALLS, OPERATIONS, Message, Operation
from kos.comm.prepared import Prepared
from kos.comm.recorder import COMPLETED
from kos.comm.reduction import ReduceOp
from kos.comm.transport import wrong_message
from kos.comm.work import Engine, Steps, Work, raising
from kos.dtypes import DTYPE_CODES, dtype_of_code
from kos.environment import KOS_CPU_VENDOR
from kos.errors import CollectiveMismatch, InvalidArgument, KosError

Array = np.ndarray[Any, Any]


DIRECT_BYTES = {"intel": 100 << 10, "other": 512 << 10}
"""By vendor of the CPU: a part of more bytes is read from another rank's memory in one copy, not in two by a slot."""


def cpu_vendor() -> str:
    """``intel`` or ``other``: what KOS_CPU_VENDOR says, else the vendor of the first CPU of this host.

    On Xeons (Sapphire Rapids) writing a cache line that another core read last is not slow; on EPYCs (Zen 4) it is, so
    the reader marks such lines (``kos_mark`` in core.h).
    """
    if forced := KOS_CPU_VENDOR.get():
        return forced
    with suppress(OSError), open("/proc/cpuinfo") as cpus:
        if "GenuineIntel" in cpus.read(256):  # the start of the first one
            return "intel"
    return "other"


_OPERATIONS = {name: row.core for name, row in OPERATIONS.items() if row.core is not None}
"""By operation, its number in the core.  Operations that are not here run by messages (``transport.py``)."""
_OPERATIONS |= dict.fromkeys(GROUP_CALLS, 0)  # to the core barriers
_REDUCTIONS = {
    op: code for code, op in enumerate((
        ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG, ReduceOp.BAND, ReduceOp.BOR,
        ReduceOp.BXOR,
    ))
}  # fmt: skip
_REDUCTIONS[ReduceOp.PREMUL_SUM] = _REDUCTIONS[ReduceOp.SUM]


class SharedMemoryTransport:
    """The calls of one rank of a group on one host; of a group on several, the messages of collectives within a host.

    For messages it has the methods of a Backend.
    """

    check_seconds, last_checks = LONGEST_CHECK_SECONDS, 0

    def __init__(self, calls: FingerprintRing, engine: Engine, rendezvous: ControlPlane) -> None:
        self.calls, self._core, self._engine, self._works = calls, calls.core, engine, engine.active
        self.ranks = calls.segment.ranks
        self.turns = calls.core  # for ``Matching``
        self._local = {rank: local for local, rank in enumerate(self.ranks)}
        self.batch = False  # whether other calls begin at once, which this one may need
        self.failures, self.size = calls.failures, calls.segment.size
        self._status = self.failures.status
        self.active: set[SegmentMessage] = set()
        self.waiting: dict[int, Any] = {}  # by tag, receives that the core does not know (``Matching``)
        self.one_copy = self._read_each_other(rendezvous)
        """Whether every rank can read the memory of every other one."""
        vendor = cpu_vendor()
        self._core.marks, self._core.direct = vendor == "other", DIRECT_BYTES[vendor] if self.one_copy else 0

    def _read_each_other(self, rendezvous: ControlPlane) -> bool:
        """In another PID namespace a number may be another process's: read a token.  Collective.

        Raises InvalidArgument on all ranks if those of a host have several vendors.
        """
        token = np.frombuffer(os.urandom(16), np.uint8)
        at, vendor = token.__array_interface__["data"][0], cpu_vendor()
        everyone = rendezvous.allgather(at.to_bytes(8, "little") + token.tobytes() + vendor.encode())
        words, segment = self.calls.words, self.calls.segment
        if os.getpid() in [words[segment.line(r) + PID] for r in range(self.size) if r != segment.rank]:
            self._core.spin_ns = 0
        reads = (
            read_memory(words[segment.line(r) + PID], int.from_bytes(each[:8], "little"), 16) == each[8:24]
            for r, each in enumerate(everyone[rank] for rank in self.ranks)
        )
        vendors = {rank: everyone[rank][24:].decode() for rank in self.ranks}
        expected = [first] if (first := vendors[self.ranks[0]]) in DIRECT_BYTES else [*DIRECT_BYTES]
        wrong = (f"KOS_CPU_VENDOR of rank {rank}: expected {' or '.join(expected)}, got {vendor!r}"
                 for rank, vendor in vendors.items() if vendor not in expected)  # fmt: skip
        answers = rendezvous.allgather(next(wrong, "1" if all(reads) else "").encode())
        if len(refusal := max(answers, key=len)) > 1:
            raise InvalidArgument(refusal.decode())
        return all(answers[rank] for rank in self.ranks)

    def bind(self, prepared: Prepared) -> None:
        """Have the core run such calls, unless it cannot: by a schedule, compressed, or of arrays of two dtypes."""
        o = prepared.operation
        send, recv = o.send, o.recv
        dtypes = {end.dtype.numpy for end in (send, recv) if end is not None}
        if o.options.algorithm != AUTO or o.options.compress or len(dtypes) > 1:
            return
        if o.message.recv_tag == ANY:
            return
        if o.name == "recv_bytes" or o.message.src == ANY:
            self._bind_receive(prepared)
        if o.name not in _OPERATIONS or o.message.src == ANY:
            return
        dtype, op = next(iter(dtypes), np.dtype(np.uint8)), 0
        prepared.launch = self.start
        if o.reduction is not None:
            op, dtype = _REDUCTIONS[o.reduction.op], o.reduction.dtype.numpy
            if o.reduction.op is ReduceOp.PREMUL_SUM:
                dtype, prepared.launch = o.reduction.carrier, self._start_scaled
        message, counts = o.message, [o.send_counts, o.recv_counts]
        if o.name == "send_recv" and recv is not None:
            counts[1] = (recv.count,) * self.size
        call = self._core.prepare(
            _OPERATIONS[o.name], DTYPE_CODES[dtype], op, o.root or 0, _count(o, self.size),
            o.name.endswith("_v"), *map(_packed, counts), message.dst or 0, message.src or 0, message.tag,
            message.recv_tag, prepared.fingerprint, prepared.sizeless,
        )  # fmt: skip
        if call is None:  # more bytes than it counts
            prepared.launch = prepared.backend.scheduled.start
            return
        broadcasts = o.name == "broadcast"
        puts = send is not None and (not broadcasts or o.root == o.rank)
        gets = recv is not None and (not broadcasts or o.root != o.rank or send is not recv)
        prepared.plan, prepared.in_core = (call, puts, gets), prepared.launch == self.start

    def _bind_receive(self, prepared: Prepared) -> None:
        """Have the core look for the message of a receive first, before ``kos.comm.matching`` runs it."""
        o, message = prepared.operation, prepared.operation.message
        dtype, count = (np.dtype(np.uint8), 0) if o.recv is None else (o.recv.dtype.numpy, o.recv.count)
        if o.name in ("recv", "recv_bytes"):
            prepared.plan = self._core.prepare(
                _OPERATIONS["recv"], DTYPE_CODES[dtype], 0, 0, count, o.recv is None, None, None, 0, message.src,
                0, message.recv_tag, 0,
            ), False, o.recv is not None  # fmt: skip
            prepared.in_core = prepared.plan[0] is not None

    def start(self, work: Work[Any], left: Any = None) -> Steps | None:
        """Begin a call, or continue ``left``, which the core has begun.  Returns its steps; None if it is complete."""
        try:
            if left is None:
                prepared = work.prepared
                if self.waiting and self._waits(prepared.operation.message):
                    steps: Steps | None = prepared.backend.scheduled.start(work)
                    return steps
                call, puts, gets = prepared.plan
                if self._status.last is not None:
                    self._status.clear_failure()
                waits = prepared.blocking and not self.batch and not self._works
                number = work.sequence if prepared.collective else native.WORD_SEQUENCE
                left = self._core.start(call, number, waits, work.send if puts else None, work.recv if gets else None)
            else:
                left = left.wait()
        except Difference as found:
            return self._failing(work, found)
        except BaseException as error:
            return raising(error)
        if left is not None:
            return self.steps(work, left)
        work.record[COMPLETED] = time_ns()  # type: ignore[index]
        return None

    def _waits(self, message: Message) -> bool:
        """Whether a message has a receive, which comes after those that wait with its tag."""
        return message.src is not None and (message.recv_tag in self.waiting or ANY in self.waiting)

    def _start_scaled(self, work: Work[Any]) -> Steps | None:
        """``start`` of a sum of inputs that are multiplied first."""
        reduction, out, scaled = work.operation.reduction, work.recv, None
        assert reduction is not None
        try:
            if work.operation.recv is not None:
                scaled = np.empty(out.size, reduction.carrier)
            work.send, work.recv = reduction.stage(work.send, None), scaled
        except MemoryError as error:
            return raising(error)
        steps = self.start(work)

        def finish() -> Steps:
            yield from steps or ()
            if scaled is not None:
                reduction.finish(scaled, out)

        return finish()

    def steps(self, work: Work[Any], left: Any) -> Steps:
        """The steps of a call that the core has begun."""
        work.core_work = left
        liveness, what = self.calls.liveness(), work if work.collective else None
        try:
            while not left.done():
                if (end := liveness(filter(left.missing, range(self.size)), what)) is not None:
                    if work.collective:
                        self.calls.raise_everywhere(end, work.sequence)
                    raise end
                yield
        except Difference as found:
            raise self._error(work, found) from None
        finally:
            left.cancel()
            work.core_work = None

    def _failing(self, work: Work[Any], found: Difference) -> Steps:
        raise self._error(work, found) from None
        yield

    def _error(self, work: Work[Any], found: Difference) -> KosError:
        """What the core has found in ``work``; a collective fails on all ranks."""
        o = work.operation
        try:
            if found.code == native.MISMATCH:
                self.calls.raise_mismatch(work.group, found.word, found.rank)
            if found.code == native.COUNTS and found.word != work.sequence:  # of an earlier call, which ends this one
                self.calls.raise_failure(work.sequence)
                return CollectiveMismatch("the counts of an earlier call differ between ranks")
            if found.code == native.COUNTS:
                receiver, *counts = found.counts
                buffer: Any = o.send or o.recv
                expected, sent = ((nbytes, buffer.dtype.numpy) for nbytes in counts)
                return wrong_message(self.failures, receiver, expected, found.rank, sent)
        except KosError as error:
            return error
        array = work.recv if found.code == native.MESSAGE else work.send
        return self.refusal(found, np.frombuffer(array, np.uint8) if type(array) is bytes else array)

    def refusal(self, found: Difference, array: Array) -> KosError:
        """The error of a message of this rank, or to it, whose other end has other bytes or another dtype."""
        mine, theirs = (array.nbytes, array.dtype), (found.word >> 8, dtype_of_code(found.word & 0xFF))
        if found.code == native.MESSAGE:
            return wrong_message(self.failures, self.failures.rank, mine, self.ranks[found.rank], theirs)
        return wrong_message(self.failures, self.ranks[found.rank], theirs, self.failures.rank, mine)

    # Messages: see ``Backend``.

    def arrived(self, ranks: Sequence[int], tag: int) -> Envelope | None:
        for rank in ranks:
            if (found := self._core.arrived(self._local[rank], tag % (1 << 64))) is not None:
                return envelope(rank, *found)
        return None

    def end_of(self, rank: int) -> KosError | None:
        known = self.calls.failure()
        return self.calls.end_of(self._local[rank]) if known is None else known[0]

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        return SegmentMessage(self, array, peer, tag, receives=False)

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        return SegmentMessage(self, array, peer, tag, receives=True)

    def cancel(self, cancelled: Callable[[Any], bool]) -> None:
        for message in [each for each in self.active if cancelled(each)]:
            message.end()

    def in_flight(self, rank: int, tag: int, receives: bool) -> bool:
        return any((each.peer, each.tag, each.receives) == (rank, tag, receives) for each in self.active)

    def awaited(self, tag: int) -> list[int]:
        return [each.peer for each in self.active if each.tag == tag]

    def begin(self, array: Array, peer: int, tag: int, receives: bool) -> Any:
        """Begin a message.  Returns the Work of the core; None if it is complete."""
        code, sequence = DTYPE_CODES[array.dtype], native.WORD_SEQUENCE
        if tag >= COLLECTIVE_TAGS:
            sequence = tag - COLLECTIVE_TAGS
        operation, local = _OPERATIONS["recv" if receives else "send"], self._local[peer]
        call = self._core.prepare(operation, code, 0, 0, array.size, False, None, None, local, local, tag, tag, 0)
        return self._core.start(call, sequence, False, None if receives else array, array if receives else None)


def await_transports(rendezvous: ControlPlane) -> None:
    """Take part in the exchanges of the Nodes of other hosts, on a host that has none.  Collective."""
    for _ in range(2):
        rendezvous.barrier()


class SegmentMessage:
    """One end of a message of a schedule, between ranks of one host."""

    __slots__ = ("_left", "_liveness", "_transport", "array", "peer", "receives", "tag")
    within_host = True

    def __init__(self, transport: SharedMemoryTransport, array: Array, peer: int, tag: int, receives: bool) -> None:
        self._transport, self.array, self.peer, self.tag, self.receives = transport, array, peer, tag, receives
        try:
            self._left = transport.begin(array, peer, tag, receives)
        except Difference as found:
            raise transport.refusal(found, array) from None
        self._liveness = transport.calls.liveness()
        if self._left is not None:
            transport.active.add(self)

    def done(self) -> bool:
        if self._left is None:
            return True
        try:
            if not self._left.done():
                if (end := self._liveness(filter(self._left.missing, range(self._transport.size)))) is not None:
                    raise end
                return False
        except Difference as found:
            raise self._transport.refusal(found, self.array) from None
        self.end()
        return True

    def end(self) -> None:
        """Cancel it if it is not complete."""
        self._left.cancel()
        self._transport.active.discard(self)
        self._left = None


def _count(o: Operation, size: int) -> int:
    """The elements of one rank's part; of this rank's part if the counts differ."""
    if o.name == "all_to_all_v":
        return 0
    end = o.recv if "scatter" in o.name or o.send is None else o.send
    count = 0 if end is None else end.count
    return count // size if o.name == "all_to_all" else count


def _packed(counts: Sequence[int] | None) -> bytes | None:
    """Counts as the core reads them."""
    return None if counts is None else np.array(counts, np.uint64).tobytes()
