"""The mpi transport: host memory by mpi4py's upper-case calls.

Every call is non-blocking and polled, so that every wait can time out and all operations in flight progress
together.  MPI reduces the dtypes that it has types for.  Data movement uses bytes and supports every dtype.  Schedules
run where MPI's reduction would differ from other backends or between ranks: MPI_MAX of a NaN depends on the order of
its arguments.  Ranks of several hosts report failures and ends to each other through the hub (``Channel``).
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count, islice, repeat
from operator import itemgetter
from typing import Any

import numpy as np

from kos.comm.contract import CHANGES, Backend, Probe, Request
from kos.comm.control import mpi_job
from kos.comm.control.base import ControlPlane
from kos.comm.control.mpi import NAMING_SECONDS, await_request
from kos.comm.control.notices import Channel
from kos.comm.failures import WHY_CLOSED
from kos.comm.host.shared.calls import CHECK_SECONDS
from kos.comm.host.tcp import TCPTransport
from kos.comm.matching import Envelope, envelope
from kos.comm.operation import ANY, AUTO, COLLECTIVE_TAGS, Operation
from kos.comm.prepared import described
from kos.comm.reduction import ReduceOp, Reduction, resolve
from kos.comm.transport import remove, take, wrong_message
from kos.comm.work import Engine, Steps, Work
from kos.dtypes import DTYPE_CODES, DTYPES, DType, dtype_of, dtype_of_code
from kos.errors import BackendUnavailable, CollectiveError, CollectiveMismatch, KosError, RankLost
from kos.launcher import under_mpirun

Array = np.ndarray[Any, Any]
_BYTES = np.dtype(np.uint8)
DTYPE_SHIFT = (2 * COLLECTIVE_TAGS).bit_length() - 1  # an MPI tag holds kos's tag and, above it, a dtype's code
TAG = (1 << DTYPE_SHIFT) - 1
LAST_CHECKS = 100  # checks for the last messages of a rank that has ended; together, they take a second or more
REFUSED_SECONDS = 1.0  # how long a mismatched message is still received, so that its sender does not wait
LARGEST = 2**31 - 1  # the largest count; Open MPI 5 has no large counts
_BLOCK = 1 << 16
log = logging.getLogger(__name__)

# Above this size kos's ring, whose additions overlap its messages, beats MPI_Iallreduce.  2 ranks on one host, Open MPI
# 5.0.11, November 2026: 256 KB 43 against 58 us, 4 MB 0.37 against 0.64 ms, 64 MB 18 against 90 ms (best of 40).
_NATIVE_BYTES = 128 * 1024

UNSENT = "its last messages are lost: "
"""Prefix of a rank's reason to abort while MPI may still read the memory of its messages."""

_TAGS = 1 << 26
"""MPI tags in use by messages."""
_cancelled: list[Array] = []
"""The numbers of failed comparisons.  Open MPI 5.0.11 writes to such memory even after the request is over: the next
comparison, in a new array at the same address, got other ranks' numbers of the failed one (4 ranks on 2 cores)."""

_SUMS = (ReduceOp.AVG, ReduceOp.PREMUL_SUM)  # kos scales before or after; other operations have the same name in MPI


class MPITransport(Backend):
    """Messages of ranks that are processes of an MPI communicator: bytes, which can be named and cancelled in flight.

    A receive is matched with an arrived message (MPI_Improbe) before MPI gets its memory: if their lengths differ,
    Open MPI 5.0.11 writes past the end of the buffer (within a host, from 4 KiB on).  So MPI never holds a receive that
    is cancelled before its match.  A message's dtype is in its tag, above the user's.
    """

    name = "mpi"
    processes = True
    finds_any_tag = True
    check_seconds, last_checks = CHECK_SECONDS, LAST_CHECKS

    def __init__(self, rendezvous: ControlPlane, engine: Engine) -> None:
        super().__init__(rendezvous, engine)
        self._MPI = mpi_job.load_mpi()
        self._status = self._MPI.Status()
        self._rendezvous = rendezvous
        self._channel: Channel | None = None  # if there are several hosts
        self._comms: list[Any] = []  # private communicators: for native collectives, and for the comparison of calls
        self.active: set[MPIMessage] = set()
        self._given_up: list[Any] = []  # the requests of cancelled sends, which MPI may still hold
        self._posted: dict[tuple[int, int], deque[MPIMessage]] = {}  # unmatched receives, by peer and tag
        self._arrived: dict[tuple[int, int], deque[tuple[Any, int, int, int]]] = {}  # messages without a receive
        self._arrivals = count()
        self.checks, self.next_check = 1, 0.0
        self._described: dict[tuple[int, int], bytes] = {}  # descriptions of mismatched calls, by collective and rank
        self._compared = self._agreed = 0  # collectives that are compared, and those known to be alike
        self._requests: dict[int, Any] = {}  # native requests in flight, by sequence number
        self._ends: dict[int, Array] = {}  # the numbers that are compared in them

    @classmethod
    def probe(cls, rendezvous: ControlPlane) -> Probe:
        if rendezvous.mpi is None:
            return Probe(False, "the ranks are not processes of an MPI job (start with mpirun)")
        MPI = mpi_job.load_mpi()
        if MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) < _TAGS:
            return Probe(False, f"the MPI library has fewer than {_TAGS} tags")
        alone = "" if under_mpirun() else "; a group of one, as it was not started by mpirun"
        return Probe(True, MPI.Get_library_version().split(",")[0].strip() + alone)

    def check_threads(self) -> None:
        if (level := self._MPI.Query_thread()) < self._MPI.THREAD_MULTIPLE:
            got = {getattr(self._MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED")}[level]
            what = "progress_thread, await, add_done_callback: expected MPI_THREAD_MULTIPLE"
            raise BackendUnavailable(f"mpi: {what}, got MPI_THREAD_{got}")

    def open(self, backend: Any) -> None:
        if not backend.one_host:
            self._comms = [self._dup(self._rendezvous), self._dup(self._rendezvous)]
            self._channel = self._rendezvous.channel
        if self._channel is not None:
            self._channel.holds = self.sending
            self.failures.add_reporter(self._channel)

    def _dup(self, rendezvous: ControlPlane) -> Any:
        comm, request = rendezvous.mpi_comm.Idup()
        await_request(rendezvous, "duplicate", request)
        comm.Set_errhandler(self._MPI.ERRORS_RETURN)
        return comm

    def successor(self, rendezvous: ControlPlane) -> Callable[[ControlPlane, Engine], Backend]:
        """After a loss, the survivors use TCP instead of MPI."""
        return TCPTransport if rendezvous.mpi is None else MPITransport

    # Messages.

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        message = MPIMessage(self, array, peer, tag)
        message.post(self._comms[0].Isend(as_bytes(array, self._MPI), peer, message.wire_tag))
        return message

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        message = MPIMessage(self, array, peer, tag)
        message.receives = True
        self._posted.setdefault((peer, message.tag), deque()).append(message)
        return message

    def match(self, message: MPIMessage) -> None:
        """Give a receive to MPI if its message has arrived."""
        peer, key = message.peer, (message.peer, message.tag)
        posted = self._posted.get(key)
        if posted is None or posted[0] is not message:
            return
        while (arrival := take(self._arrived, key)) is None:
            if not self._probe(peer):
                return
        take(self._posted, key)
        (probed, nbytes, wire_tag, _), array = arrival, message.array
        if wire_tag == message.wire_tag and nbytes == array.nbytes:
            message.post(probed.Irecv(as_bytes(array, self._MPI)))
        else:
            expected, got = (array.nbytes, array.dtype), (nbytes, dtype_of_code(wire_tag >> DTYPE_SHIFT))
            error = wrong_message(self.failures, self.failures.rank, expected, peer, got)
            message.refuse(probed.Irecv(as_bytes(np.empty(nbytes, np.uint8), self._MPI)), error)

    def _probe(self, peer: int) -> bool:
        """Add the next message of a rank, or of any, to ``_arrived``; whether MPI has shown one."""
        probed, status = self._comms[0].Improbe(peer, self._MPI.ANY_TAG, self._status), self._status
        if probed is None:
            return False
        key, wire_tag = (status.Get_source(), status.Get_tag() & TAG), status.Get_tag()
        what = probed, status.Get_elements(self._MPI.BYTE), wire_tag, next(self._arrivals)
        self._arrived.setdefault(key, deque()).append(what)
        return True

    def arrived(self, ranks: Sequence[int], tag: int) -> Envelope | None:
        if time.monotonic() >= self.next_check:
            self.receive_notices()
        while (first := next(filter(None, (self._first(rank, tag) for rank in ranks)), None)) is None:
            if not self._probe(ranks[0] if len(ranks) == 1 else self._MPI.ANY_SOURCE):
                break
        return first  # the rest stays with MPI: it may be much

    def _first(self, rank: int, tag: int) -> Envelope | None:
        """The envelope of that rank's first message with ``tag``, or ANY, that no posted receive takes."""
        tags = [tag] if tag != ANY else [t for source, t in self._arrived if source == rank and t < COLLECTIVE_TAGS]
        heads = list[tuple[Any, int, int, int]]()
        for key in zip(repeat(rank), tags):
            heads += islice(self._arrived.get(key, ()), taken := len(self._posted.get(key, ())), taken + 1)
        if not heads:
            return None
        _, nbytes, wire_tag, _ = min(heads, key=itemgetter(-1))
        return envelope(rank, nbytes, wire_tag >> DTYPE_SHIFT, wire_tag & TAG)

    def in_flight(self, rank: int, tag: int, receives: bool) -> bool:
        active = any((m.peer, m.tag, m.receives) == (rank, tag, receives) for m in self.active)
        return active or (receives and (rank, tag) in self._posted)

    def awaited(self, tag: int) -> list[int]:
        active = {message.peer for message in self.active if message.tag == tag}
        return sorted(active | {peer for peer, posted in self._posted if posted == tag})

    def cancel(self, cancelled: Callable[[MPIMessage], bool]) -> None:
        """Cancel messages; MPI keeps the memory of those that it holds."""
        remove(self._posted, cancelled)
        for message in [message for message in self.active if cancelled(message)]:
            mpi_job.keep_unfinished(message.request)
            self.active.discard(message)
            if not message.receives and message.request is not None:
                self._given_up = [*(each for each in self._given_up if not mpi_job.is_over(each)), message.request]

    # Whether calls match.

    def agree(self, work: Work[Any], local: Callable[[], bool] | None) -> Callable[[], bool] | None:
        """An MPI_Iallreduce compares the fingerprints, and ends when all ranks have arrived."""
        number, self._compared = self._compared, self._compared + 1
        MPI, agreed, described = self._MPI, False, False
        mark, text = work.prepared.fingerprint, work.prepared.text
        ends = np.array([mark, ~mark], np.int64)  # reduced to the maximum and the complement of the minimum
        request = self._comms[-1].Iallreduce(MPI.IN_PLACE, [ends, MPI.INT64_T], MPI.MAX)
        self._requests[work.sequence], self._ends[work.sequence] = request, ends

        def all_arrived() -> bool:
            nonlocal agreed, described
            if local is not None:
                local()
            if time.monotonic() >= self.next_check:
                self.receive_notices()
            self.failures.raise_reported(work.sequence, work, agreed)
            if agreed or not request.Test():
                return agreed
            if ends[0] == ~ends[1]:
                if self._agreed == number:  # in the order of the calls, as MPI's collectives follow
                    agreed, self._agreed = True, number + 1
                    del self._requests[work.sequence], self._ends[work.sequence]
                return agreed
            if not described:
                described = True
                if self._channel is not None:
                    self._channel.send("call", work.sequence, text.decode())
            self._compare(work, text)
            return False

        return all_arrived

    def _compare(self, o: Work[Any], text: bytes) -> None:
        """Raise CollectiveMismatch if another rank's call is known to differ from this one."""
        for (sequence, peer), other in self._described.items():
            mine, theirs = described(text, o.sequence), described(other, o.sequence)
            if sequence == o.sequence and theirs[1] != mine[1]:
                raise self.failures.mismatch(o.group, (self.failures.rank, *mine), (peer, *theirs))

    # Native calls.

    def native(self, work: Work[Any], spaces: Mapping[str, Array], collective: str) -> Steps | None:
        if collective == "barrier":
            return (None for _ in ())  # ``agree`` was the barrier
        if not self._comms:
            return None
        operation = work.operation
        if operation.options.deterministic or operation.options.algorithm != AUTO:
            return None
        if not _is_native(collective, operation.reduction, max(x.nbytes for x in spaces.values())):
            return None
        return self._poll_native(work, self._native_request(operation, spaces, collective))

    def is_native(self, collective: str, nbytes: int) -> bool:
        reduction = resolve(ReduceOp.SUM, DTYPES["float32"], self.size) if "reduce" in collective else None
        return _is_native(collective, reduction, nbytes * (self.size if collective == "all_gather" else 1))

    def _native_request(self, o: Operation, spaces: Mapping[str, Array], collective: str) -> Any:
        """Post the MPI call."""
        MPI, comm = self._MPI, self._comms[0]
        if collective == "broadcast":
            return comm.Ibcast(as_bytes(spaces["data"], MPI), o.root)
        if collective == "all_gather":
            return comm.Iallgather(as_bytes(spaces["input"], MPI), as_bytes(spaces["output"], MPI))
        if collective == "all_to_all":
            return comm.Ialltoall(as_bytes(spaces["input"], MPI), as_bytes(spaces["output"], MPI))
        assert o.reduction is not None
        mpi_type = getattr(MPI, dtype_of(o.reduction.carrier).mpi)
        op = MPI.SUM if o.reduction.op in _SUMS else getattr(MPI, o.reduction.op.name)
        if collective == "all_reduce":
            return comm.Iallreduce(MPI.IN_PLACE, [spaces["data"], mpi_type], op)
        if collective == "reduce":
            data = [spaces["data"], mpi_type]
            return comm.Ireduce(*((MPI.IN_PLACE, data) if self.rank == o.root else (data, None)), op, o.root)
        return comm.Ireduce_scatter_block([spaces["input"], mpi_type], [spaces["output"], mpi_type], op)

    def _poll_native(self, work: Work[Any], request: Any) -> Steps:
        self._requests[work.sequence] = request
        checked, checks_left = self.checks, LAST_CHECKS
        try:
            while not request.Test():
                left = self.failures.left.copy().values() if checked != self.checks else ()
                if any(first <= work.sequence for first, *_ in left):
                    checked, checks_left = self.checks, checks_left - 1
                    if checks_left < 0:  # MPI may not report that a process has ended
                        self.failures.raise_reported(work.sequence, work)
                yield
        except GeneratorExit:
            log.warning("%s: MPI may still use the arrays of this call, so they are kept", work)
            raise
        del self._requests[work.sequence]

    # Failures.

    def receive_notices(self) -> None:
        """Read the notices of other ranks; due after ``next_check``."""
        self.next_check, self.checks = time.monotonic() + CHECK_SECONDS, self.checks + 1
        self._read_notices()

    def _read_notices(self) -> None:
        if self._channel is not None:
            self._channel.record_deaths()
            for peer, sequence, text in self._channel.receive("call"):
                self._described[sequence, peer] = text.encode()

    def end_of(self, peer: int, processes: bool = True) -> KosError | None:
        """The error of a message that cannot complete: the group has failed, or that rank is lost; else None.

        Without ``processes`` it does not check whether a process has ended, which takes as long as a message.
        """
        failures, calls = self.failures, self.failures.ring
        if failures.earliest is not None:
            return failures.earliest[1].copy()
        _, why, cause = failures.left.get(peer, (0, None, None))
        deaths = {} if self._channel is None else self._rendezvous.deaths()
        if why is None and 0 in deaths:
            return failures.lost(0, deaths[0])  # whatever happens to the peer, nobody reports it
        if calls is not None and peer in calls.segment.ranks:
            try:
                calls.raise_failure(sys.maxsize)
            except KosError as error:
                return error
            end = calls.end_of(calls.segment.ranks.index(peer)) if processes else None
            if why is None and end is not None:
                return end
        return None if why is None else failures.lost(peer, why, None, cause)

    def may_complete(self, peer: int, tag: int) -> bool:
        """Whether a collective of that tag may complete although the peer has ended, or a later one has failed."""
        if tag < COLLECTIVE_TAGS:
            return False
        if (end := self.failures.left.get(peer)) is None:
            return self.failures.earliest is not None  # ``agree`` raises it if it concerns this collective
        return end[0] > 0 and 0 < (self.tag(end[0]) - tag) % COLLECTIVE_TAGS < COLLECTIVE_TAGS // 2

    def check_sender(self, peer: int) -> None:
        """Raise if the sender may have changed the message in flight: it aborted while MPI still read its memory."""
        self._read_notices()
        error = self.end_of(peer, processes=False)
        if error is not None and (not isinstance(error, RankLost) or UNSENT in str(error)):
            raise error

    def sending(self) -> bool:
        """Whether MPI still holds a send of this rank."""
        sends = [*self._given_up, *(each.request for each in self.active if not each.receives)]
        return not all(map(mpi_job.is_over, sends))

    def gone(self) -> Iterator[tuple[int, str]]:
        """The ranks known to be lost, and why: by shared memory, and by notices that may follow the error."""
        if self.failures.ring is not None:
            yield from self.failures.ring.gone()
        deadline, late = time.monotonic() + NAMING_SECONDS, False
        while not late:
            late = time.monotonic() > deadline
            self.receive_notices()  # a rank that shrinks is not the lost one: wait for another name
            left = self.failures.left.copy().items()
            yield from ((rank, why) for rank, (_, why, _) in left if late or why != CHANGES)
            time.sleep(0.001)

    def explain(self, work: Work[Any], error: Exception) -> Exception:
        MPI = self._MPI
        if work.collective and (request := self._requests.pop(work.sequence, None)) is not None:
            mpi_job.keep_unfinished(request)
            if (ends := self._ends.pop(work.sequence, None)) is not None:
                _cancelled.append(ends)
        if isinstance(error, MPI.Exception):
            kind = CollectiveMismatch if error.Get_error_class() == MPI.ERR_TRUNCATE else CollectiveError
            named: KosError = kind(f"MPI: {error.Get_error_string()}", call=work)
            if kind is CollectiveError and (lost := next(self.gone(), None)) is not None:  # MPI may not report it
                named = self.failures.lost(*lost, work)
            named.__cause__ = error
            error = named
        if isinstance(error, RankLost) and any(map(self.failures.status.ended, error.ranks)):
            mpi_job.record_loss()
        return error

    def abort(self, reason: str) -> str:
        return (UNSENT if self.sending() else "") + reason

    def close(self, begun: int) -> None:
        if not self._MPI.Is_finalized():
            cause = self.failures.closing()
            if self._channel is not None:
                self._channel.report_end(begun, WHY_CLOSED, cause, soon=cause is not None)
            for comm in self._comms if cause is None and self.failures.first is None else ():
                mpi_job.free_after_all(comm)


def _is_native(collective: str, reduction: Reduction | None, nbytes: int) -> bool:
    """Whether MPI supports this dtype and reduce operation and is not slower than kos's schedule."""
    if nbytes > (_NATIVE_BYTES if collective == "all_reduce" else LARGEST):
        return False
    if collective in ("scan", "exscan"):
        return False  # MPI does not promise an order
    if reduction is None:
        return collective in ("broadcast", "all_gather", "all_to_all")
    return _same_everywhere(dtype_of(reduction.carrier), reduction.op)


def _same_everywhere(dtype: DType, op: ReduceOp) -> bool:
    """Whether MPI's own reduction equals that of every other backend, with the same bits on all ranks."""
    if not dtype.mpi:
        return False
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return not dtype.is_float
    # Open MPI's vector code adds 8-bit and 16-bit integers with saturation; elsewhere they wrap.
    return dtype.itemsize >= 4 or op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


class MPIMessage:
    """One end of a message; ``transport`` is its MPITransport."""

    __slots__ = (
        "_checked", "_checks_left", "_error", "_refused_until", "_transport", "array", "complete", "peer", "receives",
        "request", "tag", "wire_tag",
    )  # fmt: skip

    def __init__(self, transport: Any, array: Array, peer: int, tag: int) -> None:
        self._transport, self.array, self.peer, self.tag = transport, array, peer, tag & TAG
        self.wire_tag = self.tag | DTYPE_CODES[array.dtype] << DTYPE_SHIFT
        self.request: Any = None  # while MPI holds the message
        self.complete = self.receives = False
        self._error: CollectiveMismatch | None = None  # of a mismatched message, which is received and discarded
        self._refused_until = 0.0
        self._checked, self._checks_left = transport.checks, LAST_CHECKS

    def post(self, request: Any) -> None:
        self.request = request
        self._transport.active.add(self)

    def refuse(self, request: Any, error: CollectiveMismatch) -> None:
        """Receive and discard the message that arrived instead, for at most ``REFUSED_SECONDS``; then ``done`` raises.

        Between processes that may not read each other's memory, Open MPI completes a send of more than 4 KiB only while
        the receiver calls MPI.  After the error, the receiver's program may never call it again.
        """
        self._error, self._refused_until = error, time.monotonic() + REFUSED_SECONDS
        self.post(request)

    def done(self) -> bool:
        transport = self._transport
        if self.request is None and not self.complete:
            transport.match(self)
        if self._error is not None:
            if self.request is not None:
                if not mpi_job.is_over(self.request) and time.monotonic() < self._refused_until:
                    return False
                mpi_job.keep_unfinished(self.request)
                self.request = None
                transport.active.discard(self)
            raise self._error
        if self.request is not None:
            try:
                self.complete = self.request.Test()
            except Exception:
                transport.active.discard(self)  # MPI has ended and freed it
                raise
            if self.complete:
                self.request = None
                transport.active.discard(self)
                if self.receives and self.tag < COLLECTIVE_TAGS:
                    transport.check_sender(self.peer)
        if not self.complete:
            if time.monotonic() >= transport.next_check:
                transport.receive_notices()
            if self._checked != transport.checks:
                self._check()
        return self.complete

    def _check(self) -> None:
        """Raise if the message cannot complete."""
        self._checked, error = self._transport.checks, self._transport.end_of(self.peer)
        if error is None or self._transport.may_complete(self.peer, self.tag):
            return
        if not self._checks_left:
            raise error
        self._checks_left -= 1


def as_bytes(array: Array, MPI: Any) -> list[Any]:
    memory = array.view(_BYTES)
    return [memory, MPI.BYTE] if memory.nbytes <= LARGEST else [memory, 1, _long_type(memory.nbytes, MPI)]


@lru_cache
def _long_type(nbytes: int, MPI: Any) -> Any:
    """The type of a message of more bytes than MPI can count."""
    blocks, rest = divmod(nbytes, _BLOCK)
    block = MPI.BYTE.Create_contiguous(_BLOCK)
    return MPI.Datatype.Create_struct([blocks, rest], [0, blocks * _BLOCK], [block, MPI.BYTE]).Commit()
