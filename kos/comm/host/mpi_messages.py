"""Messages of the mpi backend: bytes with their dtype, and notices of failures between hosts."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kos.comm.failures import Ledger, again, from_record, to_record
from kos.comm.host.fingerprints import DTYPE_CODES, described, dtype_of_code
from kos.comm.host.shared.calls import CHECK_SECONDS, Calls
from kos.comm.operation import COLLECTIVE_TAGS, Call
from kos.comm.rendezvous import mpi_job
from kos.comm.rendezvous.mpi import SharedComm
from kos.comm.rendezvous.notices import Notices
from kos.comm.scheduled import remove, take, wrong_message
from kos.comm.schedules.execute import Request
from kos.errors import CollectiveMismatch, KosError, RankLost

Array = np.ndarray[Any, Any]

_BYTES = np.dtype(np.uint8)
_DTYPE_SHIFT = (2 * COLLECTIVE_TAGS).bit_length() - 1  # an MPI tag holds kos's tag and, above it, a dtype's code
_TAG = (1 << _DTYPE_SHIFT) - 1
_LAST_POLLS = 100  # polls in which MPI delivers the last messages of a rank that has ended
LARGEST = 2**31 - 1  # the largest count; Open MPI 5 has no large counts
_BLOCK = 1 << 16
_REASON_LENGTH = 2000  # characters
UNSENT = "its last messages are lost: "
"""Prefix of a rank's reason to abort while MPI may still read the memory of its messages."""


class Messages:
    """The transport: sends bytes, and keeps the messages in flight so that they can be named and cancelled.

    A receive is matched with an arrived message (MPI_Improbe) before MPI gets its memory: if their lengths differ,
    Open MPI 5.0.11 writes past the end of the buffer (within a host, from 4 KiB on).  So MPI never holds a receive that
    is cancelled before its match.  A message's dtype is in its tag, above the user's.

    In a group that spans hosts, ranks report failures and ends to each other by ``notices``; on one host, by ``calls``.
    On one host, groups share a communicator, in which this group has the ranks ``ranks``.  There the shared segment
    announces each message and its tag, which is unique (``tag_of``).  So that a number is used again only once its
    message is received, the send is synchronous (MPI_Issend).  A message that is given up keeps its number.
    """

    def __init__(
        self, MPI: Any, shared: SharedComm, ranks: Sequence[int], calls: Calls | None, notices: Notices | None,
        ledger: Ledger,
    ) -> None:  # fmt: skip
        self._MPI, self._shared, self._comm, self._ranks = MPI, shared, shared.comm, ranks
        self._calls, self._status = calls, MPI.Status()
        self._notices, self._any_tag = notices, MPI.ANY_TAG if notices is not None else None
        self.active: set[_Message] = set()
        self._posted: dict[tuple[int, int], deque[_Message]] = {}  # unmatched receives, by peer and tag
        self._arrived: dict[tuple[int, int], deque[tuple[Any, int, int]]] = {}  # messages without a receive
        self.checks, self.next_check = 1, 0.0
        self.ledger = ledger
        self.calls: dict[tuple[int, int], bytes] = {}  # descriptions of mismatched calls, by collective and rank

    def tag_of(self, array: Array, tag: int) -> int:
        """A tag for a message that the segment announces; no other message in flight between the ranks has it."""
        while (number := next(self._shared.numbers) % COLLECTIVE_TAGS) in self._shared.unreceived:
            pass
        self._shared.unreceived.add(number)
        return tag & COLLECTIVE_TAGS | number | DTYPE_CODES[array.dtype] << _DTYPE_SHIFT

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        message = _Message(self, array, peer, tag)
        send = self._comm.Issend if self._any_tag is None else self._comm.Isend
        message.post(send(as_bytes(array, self._MPI), self._ranks[peer], message.wire_tag))
        return message

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        message = _Message(self, array, peer, tag)
        message.receives = True
        message.probe_tag = tag if self._any_tag is None else self._any_tag
        self._posted.setdefault((peer, message.tag), deque()).append(message)
        return message

    def match(self, message: _Message) -> None:
        """Give a receive to MPI if its message has arrived."""
        key = peer, tag = message.peer, message.tag
        posted = self._posted.get(key)
        if posted is None or posted[0] is not message:
            return
        arrival = take(self._arrived, key) if self._arrived else None
        while arrival is None:
            probed = self._comm.Improbe(self._ranks[peer], message.probe_tag, self._status)
            if probed is None:
                return
            wire_tag = self._status.Get_tag()
            arrival = probed, self._status.Get_elements(self._MPI.BYTE), wire_tag
            if wire_tag & _TAG != tag:
                self._arrived.setdefault((peer, wire_tag & _TAG), deque()).append(arrival)
                arrival = None
        take(self._posted, key)
        probed, nbytes, wire_tag = arrival
        array = message.array
        if wire_tag == message.wire_tag and nbytes == array.nbytes:
            message.post(probed.Irecv(as_bytes(array, self._MPI)))
        else:
            mpi_job.keep_unfinished(probed.Irecv(as_bytes(np.empty(nbytes, np.uint8), self._MPI)))
            expected, got = (array.nbytes, array.dtype), (nbytes, dtype_of_code(wire_tag >> _DTYPE_SHIFT))
            message.error = wrong_message(self.ledger, self.ledger.rank, expected, peer, got)

    def send_notice(self, kind: str, sequence: int, *what: Any) -> None:
        """Send all ranks a notice; they read it while they wait."""
        if self._notices is not None and not self._MPI.Is_finalized():
            self._notices.send([self.ledger.rank, kind, sequence, *what])

    def send_failure(self, sequence: int, failure: KosError) -> None:
        self.send_notice("failed", sequence, *to_record(failure, _REASON_LENGTH))

    def send_end(self, sequence: int, why: str, cause: KosError | None) -> None:
        """Report that this rank begins no collective from ``sequence`` on."""
        self.send_notice("gone", sequence, why[:_REASON_LENGTH], None if cause is None else to_record(cause))

    def receive_notices(self) -> None:
        """Read the notices of other ranks; due after ``next_check``."""
        self.next_check, self.checks = time.monotonic() + CHECK_SECONDS, self.checks + 1
        for notice in self._notices.receive() if self._notices is not None else ():
            self._read(*notice)

    def _read(self, peer: int, kind: str, sequence: int, *what: Any) -> None:
        """Handle a notice of another rank."""
        if kind == "gone":
            why, cause = what
            self.ledger.record_end(peer, sequence, why, None if cause is None else from_record(cause))
        elif kind == "call":
            self.calls[sequence, peer] = what[0].encode()
        else:
            self.ledger.record(sequence, from_record(what))

    def compare(self, o: Call, text: bytes) -> None:
        """Raise CollectiveMismatch if another rank's call is known to differ from this one."""
        for (sequence, peer), other in self.calls.items():
            mine, theirs = described(text, o.sequence), described(other, o.sequence)
            if sequence == o.sequence and theirs[1] != mine[1]:
                raise self.ledger.mismatch(o.group, (self.ledger.rank, *mine), (peer, *theirs))

    def end_of(self, peer: int, processes: bool = True) -> KosError | None:
        """The error of a message that cannot complete: the group has failed, or that rank is lost; else None.

        Without ``processes`` it does not check whether a process has ended, which takes as long as a message.
        """
        ledger, calls = self.ledger, self._calls
        if ledger.failure is not None:
            return again(ledger.failure[1])
        _, why, cause = ledger.ends.get(peer, (0, None, None))
        if calls is not None and peer in calls.segment.ranks:
            try:
                calls.raise_failure(sys.maxsize)
            except KosError as error:
                return error
            end = calls.end_of(calls.segment.ranks.index(peer)) if processes else None
            if why is None and end is not None:
                return end
        return None if why is None else ledger.lost(peer, why, None, cause)

    def check_sender(self, peer: int) -> None:
        """Raise if the sender may have changed the message in flight: it aborted while MPI still read its memory."""
        self.receive_notices()
        error = self.end_of(peer, processes=False)
        if error is not None and (not isinstance(error, RankLost) or UNSENT in str(error)):
            raise error

    def sending(self) -> bool:
        """Whether MPI still holds a send of this rank."""
        return any(not each.receives and not mpi_job.is_over(each.request) for each in self.active)

    def in_flight(self, rank: int, tag: int, receives: bool) -> bool:
        active = any((m.peer, m.tag, m.receives) == (rank, tag, receives) for m in self.active)
        return active or (receives and (rank, tag) in self._posted)

    def awaited(self, tag: int) -> list[int]:
        active = {message.peer for message in self.active if message.tag == tag}
        return sorted(active | {peer for peer, posted in self._posted if posted == tag})

    def cancel(self, cancelled: Callable[[_Message], bool]) -> None:
        """Cancel messages; MPI keeps the memory of those that it holds."""
        remove(self._posted, cancelled)
        for message in [message for message in self.active if cancelled(message)]:
            mpi_job.keep_unfinished(message.request)
            self.active.discard(message)


class _Message:
    __slots__ = (
        "_checks", "_transport", "array", "complete", "error", "peer", "probe_tag", "receives", "request", "tag",
        "wire_tag",
    )  # fmt: skip

    def __init__(self, transport: Messages, array: Array, peer: int, tag: int) -> None:
        self._transport, self.array, self.peer, self.tag = transport, array, peer, tag & _TAG
        self.wire_tag = self.tag | DTYPE_CODES[array.dtype] << _DTYPE_SHIFT
        self.probe_tag = -1  # of a receive: the tag to probe for
        self.request: Any = None  # while MPI holds the message
        self.complete = self.receives = False
        self.error: CollectiveMismatch | None = None
        self._checks = transport.checks  # once ``end_of`` returned an error: minus the polls left

    def post(self, request: Any) -> None:
        self.request = request
        self._transport.active.add(self)

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
                transport.active.discard(self)  # MPI has ended and freed it
                raise
            if self.complete:
                self.request = None
                transport.active.discard(self)
                if not self.receives:
                    transport._shared.unreceived.discard(self.tag % COLLECTIVE_TAGS)
                elif self.tag < COLLECTIVE_TAGS:
                    transport.check_sender(self.peer)
        if not self.complete:
            if time.monotonic() >= transport.next_check:
                transport.receive_notices()
            if self._checks != transport.checks:
                self._check()
        return self.complete

    def _check(self) -> None:
        """Raise if the message cannot complete."""
        self._checks += self._checks < 0
        if self._checks < 0:
            return
        error = self._transport.end_of(self.peer)
        if error is not None and self._checks == 0:
            raise error
        self._checks = self._transport.checks if error is None else -_LAST_POLLS


def as_bytes(array: Array, MPI: Any) -> list[Any]:
    memory = array.view(_BYTES)
    return [memory, MPI.BYTE] if memory.nbytes <= LARGEST else [memory, 1, _long_type(memory.nbytes, MPI)]


@lru_cache
def _long_type(nbytes: int, MPI: Any) -> Any:
    """The type of a message of more bytes than MPI can count."""
    blocks, rest = divmod(nbytes, _BLOCK)
    block = MPI.BYTE.Create_contiguous(_BLOCK)
    return MPI.Datatype.Create_struct([blocks, rest], [0, blocks * _BLOCK], [block, MPI.BYTE]).Commit()
