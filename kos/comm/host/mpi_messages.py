"""Messages of the mpi backend: bytes with their dtype, and notices of failures between hosts."""

from __future__ import annotations

import json
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from kos.comm.failures import Ledger, again, from_record, to_record
from kos.comm.host.fingerprints import DTYPE_CODES, described, dtype_of_code
from kos.comm.host.shared.calls import LOOK_EVERY, Calls
from kos.comm.operation import COLLECTIVE_TAGS, Call
from kos.comm.rendezvous import mpi_job
from kos.comm.scheduled import drop, take, wrong_message
from kos.comm.schedules.execute import Request
from kos.errors import CollectiveMismatch, KosError, RankLost

Array = np.ndarray[Any, Any]

_BYTES = np.dtype(np.uint8)
_DTYPE_SHIFT = (2 * COLLECTIVE_TAGS).bit_length() - 1  # a tag of MPI is a tag of ours and, above it, a dtype's code
_TAG, TAGS = (1 << _DTYPE_SHIFT) - 1, 32 << _DTYPE_SHIFT
_LAST_POLLS = 100  # in which MPI sees what came from a rank before it went
LARGEST = 2**31 - 1  # bytes that MPI counts; Open MPI 5 has no large counts
_BLOCK = 1 << 16
_REASON_LENGTH = 2000  # characters
UNSENT = "its last messages are lost: "
"""In the reason of a rank that aborts while MPI may still read the memory of its messages."""


class Notices:
    """Control messages between hosts, of one group and of all that are split from it.

    On a communicator that is never freed: to Open MPI what comes for one that was is the first message of the next.
    """

    def __init__(self, MPI: Any, comm: Any) -> None:
        self._MPI, self.comm, self._status = MPI, comm, MPI.Status()
        self.readers: weakref.WeakValueDictionary[str, Messages] = weakref.WeakValueDictionary()  # by group

    def send(self, ranks: list[int], notice: list[Any]) -> None:
        data = np.frombuffer(json.dumps(notice).encode(), np.uint8)
        for rank in ranks:
            mpi_job.keep_unfinished(self.comm.Isend(as_bytes(data, self._MPI), rank))

    def receive(self) -> None:
        while came := self.comm.Improbe(self._MPI.ANY_SOURCE, self._MPI.ANY_TAG, self._status):
            notice = bytearray(self._status.Get_count())
            came.Recv([notice, self._MPI.BYTE])
            group, *rest = json.loads(notice)
            if (reader := self.readers.get(group)) is not None:
                reader.read(*rest)


class Messages:
    """The transport: bytes; knows what is in flight, to name and to cancel it.

    A receive meets a message that has come (MPI_Improbe) before MPI gets its memory: where they differ in
    length, Open MPI 5.0.11 writes past the end of what it was given (within a host, from 4 KiB on).  So a
    receive that is cancelled before was never MPI's.  A message's dtype is in its tag, above the user's.

    Where a group spans hosts, its ranks report failures and ends to each other by ``notices``; on one host ``calls``
    does that.
    """

    def __init__(
        self, MPI: Any, comm: Any, calls: Calls | None, notices: Notices | None, name: str, ledger: Ledger
    ) -> None:
        self._MPI, self._comm, self._calls, self._status = MPI, comm, calls, MPI.Status()
        self._notices, self._name, self._any_tag = notices, name, MPI.ANY_TAG
        if notices is not None:
            notices.readers[name] = self
            ranks = MPI.Group.Translate_ranks(comm.Get_group(), list(range(comm.size)), notices.comm.Get_group())
            self._others = [rank for rank in ranks if rank != notices.comm.rank]
        self.flying: set[_Message] = set()
        self._posted: dict[tuple[int, int], deque[_Message]] = {}  # receives that nothing has met, by peer and tag
        self._arrived: dict[tuple[int, int], deque[tuple[Any, int, int]]] = {}  # messages without a receive
        self.looks, self.look_at = 1, 0.0
        self.ledger = ledger
        self.calls: dict[tuple[int, int], bytes] = {}  # of a collective and a rank, where ranks do not agree

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        message = _Message(self, array, peer, tag)
        message.fly(self._comm.Isend(as_bytes(array, self._MPI), peer, message.wire_tag))
        return message

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        message = _Message(self, array, peer, tag)
        message.receives = True
        self._posted.setdefault((peer, tag), deque()).append(message)
        return message

    def match(self, message: _Message) -> None:
        """Give a receive to MPI if what it is for has come."""
        key = peer, tag = message.peer, message.tag
        posted = self._posted.get(key)
        if posted is None or posted[0] is not message:
            return
        arrival = take(self._arrived, key) if self._arrived else None
        while arrival is None:
            came = self._comm.Improbe(peer, self._any_tag, self._status)
            if came is None:
                return
            wire_tag = self._status.Get_tag()
            arrival = came, self._status.Get_elements(self._MPI.BYTE), wire_tag
            if wire_tag & _TAG != tag:
                self._arrived.setdefault((peer, wire_tag & _TAG), deque()).append(arrival)
                arrival = None
        take(self._posted, key)
        came, nbytes, wire_tag = arrival
        array = message.array
        if wire_tag == message.wire_tag and nbytes == array.nbytes:
            message.fly(came.Irecv(as_bytes(array, self._MPI)))
        else:
            mpi_job.keep_unfinished(came.Irecv(as_bytes(np.empty(nbytes, np.uint8), self._MPI)))
            expected, got = (array.nbytes, array.dtype), (nbytes, dtype_of_code(wire_tag >> _DTYPE_SHIFT))
            message.error = wrong_message(self._comm.rank, expected, peer, got)

    def send_notice(self, kind: str, sequence: int, *what: Any) -> None:
        """Send all ranks a notice, which they read when they wait."""
        if self._notices is not None and not self._MPI.Is_finalized():
            self._notices.send(self._others, [self._name, self._comm.rank, kind, sequence, *what])

    def send_failure(self, sequence: int, failure: KosError) -> None:
        kind, text, ranks = to_record(failure)
        self.send_notice("failed", sequence, kind, text[:_REASON_LENGTH], ranks)

    def send_end(self, sequence: int, why: str, cause: KosError | None) -> None:
        """This rank begins no collective from ``sequence`` on."""
        self.send_notice("gone", sequence, why[:_REASON_LENGTH], None if cause is None else to_record(cause))

    def receive_notices(self) -> None:
        """Read the notices of other ranks; due after ``look_at``."""
        self.look_at, self.looks = time.monotonic() + LOOK_EVERY, self.looks + 1
        if self._notices is not None:
            self._notices.receive()

    def read(self, peer: int, kind: str, sequence: int, *what: Any) -> None:
        """A notice of another rank."""
        if kind == "gone":
            why, cause = what
            self.ledger.record_end(peer, sequence, why, None if cause is None else from_record(cause))
        elif kind == "call":
            self.calls[sequence, peer] = what[0].encode()
        else:
            self.ledger.record(sequence, from_record(what))

    def compare(self, o: Call, text: bytes) -> None:
        """Raise what differs between this call and that of another rank, if one with another is known."""
        for (sequence, peer), other in self.calls.items():
            mine, theirs = described(text, o.sequence), described(other, o.sequence)
            if sequence == o.sequence and theirs[1] != mine[1]:
                raise self.ledger.mismatch(o.group, (self._comm.rank, *mine), (peer, *theirs))

    def end_of(self, peer: int) -> KosError | None:
        """Why a message to or from that rank is waited for in vain, if it is: the group failed, or the rank is gone."""
        ledger, calls = self.ledger, self._calls
        if ledger.failure is not None:
            return again(ledger.failure[1])
        _, why, cause = ledger.departed.get(peer, (0, None, None))
        if calls is not None and peer in calls.segment.ranks:
            try:
                calls.raise_failure(sys.maxsize)
            except KosError as error:
                return error
            end = calls.departed(calls.segment.ranks.index(peer))
            if why is None and end is not None:
                return ledger.lost(peer, end[0], None, None, end[1])
        return None if why is None else ledger.lost(peer, why, None, cause)

    def check_sender(self, peer: int) -> None:
        """Raise if what came may have changed on its way: MPI still has a cancelled send, whose memory is free."""
        self.receive_notices()
        error = self.end_of(peer)
        if error is not None and (not isinstance(error, RankLost) or UNSENT in str(error)):
            raise error

    def sending(self) -> bool:
        """Whether MPI still has a message of this rank's."""
        return any(not each.receives and not mpi_job.is_over(each.request) for each in self.flying)

    def in_flight(self, rank: int, tag: int, receives: bool) -> bool:
        """Whether a message of that tag from or to that rank is under way or waited for."""
        flying = any((m.peer, m.tag, m.receives) == (rank, tag, receives) for m in self.flying)
        return flying or (receives and (rank, tag) in self._posted)

    def awaited(self, tag: int) -> list[int]:
        """Peers of the messages in flight with that tag."""
        flying = {message.peer for message in self.flying if message.tag == tag}
        return sorted(flying | {peer for peer, posted in self._posted if posted == tag})

    def cancel(self, cancelled: Callable[[_Message], bool]) -> None:
        """MPI keeps the memory that it has."""
        drop(self._posted, cancelled)
        for message in [message for message in self.flying if cancelled(message)]:
            mpi_job.keep_unfinished(message.request)
            self.flying.discard(message)


class _Message:
    __slots__ = ("_looks", "_transport", "array", "complete", "error", "peer", "receives", "request", "tag", "wire_tag")

    def __init__(self, transport: Messages, array: Array, peer: int, tag: int) -> None:
        self._transport, self.array, self.peer, self.tag = transport, array, peer, tag
        self.wire_tag = tag | DTYPE_CODES[array.dtype] << _DTYPE_SHIFT
        self.request: Any = None  # while MPI has it
        self.complete = self.receives = False
        self.error: CollectiveMismatch | None = None
        self._looks = transport.looks  # the polls left, as a negative number, once there was an ``end_of`` it

    def fly(self, request: Any) -> None:
        self.request = request
        self._transport.flying.add(self)

    def done(self) -> bool:
        transport = self._transport
        if self.request is None and not self.complete:
            transport.match(self)
        if self.error is not None:
            raise self.error
        if self.request is not None:
            try:
                self.complete = self.request.Test()
            except Exception:
                transport.flying.discard(self)  # MPI has ended and freed it
                raise
            if self.complete:
                self.request = None
                transport.flying.discard(self)
                if self.receives and self.tag < COLLECTIVE_TAGS:
                    transport.check_sender(self.peer)
        if not self.complete:
            if time.monotonic() >= transport.look_at:
                transport.receive_notices()
            if self._looks != transport.looks:
                self._look()
        return self.complete

    def _look(self) -> None:
        """Raise if this is waited for in vain."""
        self._looks += self._looks < 0
        if self._looks < 0:
            return
        error = self._transport.end_of(self.peer)
        if error is not None and self._looks == 0:
            raise error
        self._looks = self._transport.looks if error is None else -_LAST_POLLS


def as_bytes(array: Array, MPI: Any) -> list[Any]:
    memory = array.view(_BYTES)
    return [memory, MPI.BYTE] if memory.nbytes <= LARGEST else [memory, 1, _long_type(memory.nbytes, MPI)]


@lru_cache
def _long_type(nbytes: int, MPI: Any) -> Any:
    """The type of a message of more bytes than MPI can count."""
    blocks, rest = divmod(nbytes, _BLOCK)
    block = MPI.BYTE.Create_contiguous(_BLOCK)
    return MPI.Datatype.Create_struct([blocks, rest], [0, blocks * _BLOCK], [block, MPI.BYTE]).Commit()
