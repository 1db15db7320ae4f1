"""What each rank of a host calls, published before it goes on: mismatches, absences and deaths are seen.

A rank that begins collective s writes the fingerprint of its call, plus s, to its ring and then counts itself
in.  Whoever waits for a rank compares the fingerprints once it has come.  What went wrong first is
written once for all ranks of the host, so that all of them raise the same error.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from kos.comm.failures import ABRUPT_SECONDS, Ledger, from_record, to_record
from kos.comm.host.fingerprints import TEXT_BYTES, TEXTS, Fingerprints, described
from kos.comm.host.shared.board import SharedBoard, fitting
from kos.comm.host.shared.segment import ARRIVED, CLOSED, PID, RING, STARTED, Segment, started
from kos.comm.operation import Call
from kos.errors import KosError

CLOSED_WELL, LEFT = 1, 2
LOOK_EVERY = 0.01
"""Seconds of waiting between two looks at whether the rank waited for still lives."""


class Calls(Fingerprints):
    """The collectives of the ranks of one host, as each of them publishes its own."""

    def __init__(self, segment: Segment, ledger: Ledger) -> None:
        super().__init__()
        self.segment, self.ledger = segment, ledger
        if not isinstance(ledger.board, SharedBoard):  # of the first group, the world
            ledger.board = SharedBoard(segment, ledger.world)
        ledger.board.hold()
        words, layout = segment.words, segment.layout
        self._words, self._failure = words, layout.failure
        self._line, self._ring = layout.line(segment.rank), layout.ring(segment.rank)
        self._peers = [
            (local, layout.line(local), layout.ring(local)) for local in range(segment.size) if local != segment.rank
        ]
        self._late: Wait | None = None  # what ``compare`` waits for
        pid = os.getpid()
        words[self._line + STARTED] = started(pid)
        words[self._line + PID] = pid

    def announce(self, o: Call) -> None:
        """Publish that this rank begins ``o``."""
        words, sequence = self._words, o.sequence
        words[self._ring + sequence % RING] = (o.mark or self.mark(o)) + sequence
        words[self._line + ARRIVED] = sequence + 1

    def publish(self, o: Call) -> Wait:
        """Publish that this rank begins ``o``; returns a poll whether every rank of the host has begun it too.

        The poll raises CollectiveMismatch if one of them began something else instead, RankLost if one is
        gone, and what another rank of the host failed of.
        """
        self.announce(o)
        return Wait(self, o)

    def check(self, o: Call) -> int | None:
        """Compare ``o`` with the calls of the ranks that have begun it; returns the last that has not, if any.

        Raises as the poll of ``publish``.
        """
        words, sequence, absent = self._words, o.sequence, None
        slot, same = sequence % RING, (o.mark or self.mark(o)) + sequence
        for local, line, ring in self._peers:
            if words[ring + slot] != same:
                if words[line + ARRIVED] <= sequence:
                    absent = local
                # Again: it may have come just now, or gone on until this one was overwritten.
                elif words[ring + slot] != same and words[line + ARRIVED] < sequence + RING:
                    self._mismatch(o.group, sequence, local)
        if words[self._failure]:
            self.raise_failure(sequence)
        return absent

    def compare(self, o: Call, first: int) -> int:
        """Compare the calls from the ``first``-th on, ``o`` being the last, with those of the other ranks so far.

        Returns the first call that not every rank of the host has begun.  Raises as the poll of ``publish``.
        """
        words, absent = self._words, None
        end = min(o.sequence + 1, self.begun)  # the watchdog may see ``o`` numbered anew, and not yet announced
        through = end
        for local, line, ring in self._peers:
            came = words[line + ARRIVED]
            at = max(first, came - RING + 1, self.begun - RING)  # older ones are overwritten, theirs or ours
            until = min(came, end)
            while at < until:
                a = at % RING
                b = min(a + until - at, RING)
                mine, theirs = words[self._ring + a : self._ring + b], words[ring + a : ring + b]
                if mine != theirs:
                    at += next(k for k, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
                    if words[line + ARRIVED] < at + RING:
                        self._mismatch(o.group, at, local)
                    at = max(at, words[line + ARRIVED] - RING) + 1  # it went on until these were overwritten
                else:
                    at += b - a
            if came < end:
                absent, through = local, min(through, came)
        if absent is None:
            self._late = None
        else:
            late = self._late = self._late or Wait(self, o)  # which the watchdog's thread may replace meanwhile
            late.operation = o
            late.look(absent)
        if words[self._failure]:
            self.raise_failure(o.sequence)
        return max(first, through)

    @property
    def begun(self) -> int:
        """Collectives that this rank has begun: the sequence number of its next one."""
        return self._words[self._line + ARRIVED]

    def missing(self, o: Call) -> list[int]:
        """The ranks of the host that have not begun ``o``."""
        ranks, words = self.segment.ranks, self._words
        return [ranks[local] for local, line, _ in self._peers if words[line + ARRIVED] <= o.sequence]

    def gone(self) -> Iterator[tuple[int, str]]:
        """The ranks of the host whose process has ended, and how that is known."""
        for local, _, _ in self._peers:
            if (why := self._ended(local)) is not None:
                yield self.segment.ranks[local], why

    def killed(self) -> int | None:
        """A rank of the host whose process has ended without closing its communicator, or None."""
        lines = {self.segment.ranks[local]: line for local, line, _ in self._peers}
        return next((rank for rank, _ in self.gone() if not self._words[lines[rank] + CLOSED]), None)

    def fail(self, error: KosError, sequence: int) -> None:
        """Make the other ranks that wait in collective ``sequence`` or a later one raise the same error.

        The first failure stays.  This one is lost if a rank was stopped while it wrote its own.
        """
        kind, *rest = to_record(error)
        data = fitting([kind, *rest, sequence])
        at = self.segment.layout.failure_text
        with contextlib.suppress(TimeoutError), self.segment.locked():
            if not self._words[self._failure]:
                self.segment.bytes[at : at + len(data)] = data
                self._words[self._failure] = len(data)

    def raise_failure(self, sequence: int) -> None:
        """Raise what a rank of the host failed of, if that concerns collective ``sequence``."""
        if length := self._words[self._failure]:
            at = self.segment.layout.failure_text
            *record, failed = json.loads(bytes(self.segment.bytes[at : at + length]))
            if failed <= sequence:
                raise from_record(record)

    def leave(self, how: int) -> None:
        """This rank begins no more collectives: it is CLOSED_WELL, or LEFT because of a failure."""
        self._words[self._line + CLOSED] = how

    def close(self) -> None:
        """Leave the segment."""
        if not self._words[self._line + CLOSED]:
            self.leave(CLOSED_WELL)
        self.segment.close()
        self.ledger.board.release()
        self._words = self.segment.words  # an old view would keep the memory and its descriptor

    def raise_everywhere(self, error: KosError, sequence: int) -> NoReturn:
        """Fail with ``error`` on all ranks of the host; raises it, or what another rank failed of before."""
        self.fail(error, sequence)
        self.raise_failure(sequence)
        raise error

    def departed(self, local: int) -> tuple[str, float | None] | None:
        """Why that rank of the host begins nothing more, and the window of a failure that may be the cause; or None."""
        closed, ended = self._words[self.segment.layout.line(local) + CLOSED], self._ended(local)
        if closed:
            return ("it closed its communicator", 0.0) if closed == CLOSED_WELL else ("its process ended", None)
        return None if ended is None else (ended, ABRUPT_SECONDS)

    def _ended(self, local: int) -> str | None:
        line = self.segment.layout.line(local)
        pid, began = self._words[line + PID], self._words[line + STARTED]
        try:
            return f"its process {pid} ended" if pid and started(pid) != began else None
        except OSError:  # which says nothing of that process
            return None

    def _publish(self, index: int, text: bytes) -> None:
        at = self.segment.layout.text(self.segment.rank, index)
        self.segment.bytes[at : at + TEXT_BYTES] = text.ljust(TEXT_BYTES)

    def _describe(self, local: int, sequence: int) -> tuple[str, dict[str, Any]]:
        """The call that a rank made as its ``sequence``-th collective, as text and as what must be equal."""
        fingerprint = self._words[self.segment.layout.ring(local) + sequence % RING] - sequence
        for index in range(TEXTS):
            at = self.segment.layout.text(local, index)
            text = bytes(self.segment.bytes[at : at + TEXT_BYTES]).rstrip(b"\0 ")
            with contextlib.suppress(KeyError, ValueError):  # its rank may be just writing it
                return described(text, sequence, fingerprint)
        return f"collective #{sequence}", {}

    def _mismatch(self, group: str, sequence: int, local: int) -> NoReturn:
        """Make all ranks raise what differs between this rank's call and that of ``local``."""
        ranks = self.segment.ranks
        calls = ((ranks[each], *self._describe(each, sequence)) for each in (self.segment.rank, local))
        self.raise_everywhere(self.ledger.mismatch(group, *calls), sequence)


class Wait:
    """A wait in a collective: checks for failures at every poll, compares calls and looks for dead ranks at times."""

    __slots__ = ("_calls", "_departed", "_look_at", "operation")

    def __init__(self, calls: Calls, o: Call) -> None:
        self._calls, self.operation = calls, o
        self._look_at = time.monotonic() + LOOK_EVERY
        self._departed: int | None = None

    def __call__(self) -> bool:
        """Whether every rank of the host has begun the operation."""
        absent = self._calls.check(self.operation)
        if absent is not None:
            self.look(absent)
        return absent is None

    def look(self, local: int) -> None:
        """Called at each poll that finds rank ``local`` of the host still awaited."""
        calls = self._calls
        if calls._words[calls._failure]:
            calls.raise_failure(self.operation.sequence)
        now = time.monotonic()
        if now < self._look_at:
            return
        calls.check(self.operation)  # it may have come before another that is still awaited
        end = calls.departed(local)
        if end is None:
            self._look_at = now + LOOK_EVERY
        elif self._departed != local:
            self._departed = local  # what it did last may have come after this poll: the next one decides
        else:
            rank, o = calls.segment.ranks[local], self.operation
            calls.raise_everywhere(calls.ledger.lost(rank, end[0], o, None, end[1]), o.sequence)
