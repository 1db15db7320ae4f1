"""Messages of the mpi backend: bytes with their dtype, and notices of failures between hosts."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from kos.comm.control import mpi_job
from kos.comm.control.notices import Channel
from kos.comm.failures import Ledger, again, from_record, to_record
from kos.comm.host.fingerprints import DTYPE_CODES, described, dtype_of_code
from kos.comm.host.shared.calls import CHECK_SECONDS, CallRing
from kos.comm.operation import COLLECTIVE_TAGS
from kos.comm.scheduled import remove, take, wrong_message
from kos.comm.schedules.execute import Request
from kos.comm.work import Work
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

    Ranks report failures and ends to each other by ``channel``, those of one host also by ``calls``.
    """

    def __init__(
        self, MPI: Any, comm: Any, calls: CallRing | None, channel: Channel | None, ledger: Ledger
    ) -> None:
        self._MPI, self._comm, self._calls, self._status = MPI, comm, calls, MPI.Status()
        self._channel = channel
        self.active: set[MPIMessage] = set()
        self._given_up: list[Any] = []  # the requests of cancelled sends, which MPI may still hold
        self._posted: dict[tuple[int, int], deque[MPIMessage]] = {}  # unmatched receives, by peer and tag
        self._arrived: dict[tuple[int, int], deque[tuple[Any, int, int]]] = {}  # messages without a receive
        self.checks, self.next_check = 1, 0.0
        self._deaths: dict[int, str] = {}  # the ranks whose process has ended
        self.ledger = ledger
        self.calls: dict[tuple[int, int], bytes] = {}  # descriptions of mismatched calls, by collective and rank

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        message = MPIMessage(self, array, peer, tag)
        message.post(self._comm.Isend(as_bytes(array, self._MPI), peer, message.wire_tag))
        return message

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        message = MPIMessage(self, array, peer, tag)
        message.receives = True
        self._posted.setdefault((peer, message.tag), deque()).append(message)
        return message

    def match(self, message: MPIMessage) -> None:
        """Give a receive to MPI if its message has arrived."""
        key = peer, tag = message.peer, message.tag
        posted = self._posted.get(key)
        if posted is None or posted[0] is not message:
            return
        arrival = take(self._arrived, key) if self._arrived else None
        while arrival is None:
            probed = self._comm.Improbe(peer, self._MPI.ANY_TAG, self._status)
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

    def send_notice(self, kind: str, sequence: int, *what: Any, soon: bool = True) -> None:
        """Send all ranks a notice; they read it while they wait.

        If it says that a rank stops whose memory MPI may still read, it is sent before the rank goes on.
        """
        if self._channel is not None:
            wait = kind != "call" and self.sending()
            self._channel.send([self.ledger.rank, kind, sequence, *what], soon, wait)

    def send_failure(self, sequence: int, failure: KosError) -> None:
        self.send_notice("failed", sequence, *to_record(failure, _REASON_LENGTH))

    def send_end(self, sequence: int, why: str, cause: KosError | None, soon: bool = True) -> None:
        """Report that this rank begins no collective from ``sequence`` on; ``soon`` is as in ``Channel.send``."""
        record = None if cause is None else to_record(cause)
        self.send_notice("gone", sequence, why[:_REASON_LENGTH], record, soon=soon)

    def receive_notices(self) -> None:
        """Read the notices of other ranks; due after ``next_check``."""
        self.next_check, self.checks = time.monotonic() + CHECK_SECONDS, self.checks + 1
        if self._channel is None:
            return
        for notice in self._channel.receive():
            self._read(*notice)
        self._deaths = self.deaths()
        for rank, why in self._deaths.items():
            self.ledger.record_end(rank, 0, why)

    def deaths(self) -> dict[int, str]:
        """The ranks whose process has ended, as far as the hub knows; any thread may ask."""
        return {} if self._channel is None else self._channel.deaths()

    def _read(self, peer: int, kind: str, sequence: int, *what: Any) -> None:
        """Handle a notice of another rank."""
        if kind == "gone":
            why, cause = what
            self.ledger.record_end(peer, sequence, why, None if cause is None else from_record(cause))
        elif kind == "call":
            self.calls[sequence, peer] = what[0].encode()
        else:
            self.ledger.record(sequence, from_record(what))

    def compare(self, o: Work[Any], text: bytes) -> None:
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
        if why is None and (hub := self._deaths.get(0)) is not None:
            return ledger.lost(0, hub)  # whatever happens to the peer, nobody reports it
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
        sends = [*self._given_up, *(each.request for each in self.active if not each.receives)]
        return not all(map(mpi_job.is_over, sends))

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
            if not message.receives:
                self._given_up = [*(each for each in self._given_up if not mpi_job.is_over(each)), message.request]


class MPIMessage:
    __slots__ = (
        "_checks", "_transport", "array", "complete", "error", "peer", "receives", "request", "tag", "wire_tag",
    )  # fmt: skip

    def __init__(self, transport: Messages, array: Array, peer: int, tag: int) -> None:
        self._transport, self.array, self.peer, self.tag = transport, array, peer, tag & _TAG
        self.wire_tag = self.tag | DTYPE_CODES[array.dtype] << _DTYPE_SHIFT
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
                if self.receives and self.tag < COLLECTIVE_TAGS:
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
