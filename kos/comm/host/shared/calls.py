"""The calls of each rank of a host, published at their start: finds mismatched calls, missing and dead ranks.

A rank that begins collective s writes the fingerprint of its call, plus s, to its ring, and then sets its ARRIVED flag
(``kos/_core/segment.c``).  A rank that waits for another compares the fingerprints once the other has arrived.  The
first failure is written once for all ranks of the host, so that all of them raise the same error: the failure word, and
for what Python has found a text.  So ranks of a host share what their failure logs know: a log (``kos.comm.failures``)
decides which of several failures a rank raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from kos._core import native
from kos.comm import watchdog
from kos.comm.failures import RECENT_SECONDS, WHY_CLOSED, FailureLog
from kos.comm.host.shared.segment import (
    ARRIVED,
    CLOSED,
    FAILURE_BYTES,
    PID,
    RING,
    STARTED,
    Segment,
    started,
)
from kos.comm.host.shared.status import SharedStatus, fitting
from kos.comm.prepared import TEXT_BYTES, TEXTS, Fingerprints, described, described_resized
from kos.comm.work import Work, forked_from
from kos.errors import CollectiveError, KosError, from_record, ignored, to_record

CLOSED_ORDERLY, ABORTED = 1, 2
_RANK_SHIFT = 44
"""Of the rank in the failure word, above the collective, as in ``core.h``."""
_READS = 100
"""Attempts, a millisecond apart, to read a failure whose rank is writing it."""
SPIN_NANOSECONDS = 20_000
"""Nanoseconds that a wait holds the GIL before it lets other threads run, unless ranks are threads."""
CHECK_SECONDS, LONGEST_CHECK_SECONDS = 0.01, 0.1
"""Seconds between two checks whether the awaited rank is alive, first and after 10 s; in between, 1% of the wait."""


Liveness = Callable[..., KosError | None]


class Difference(Exception):
    """Two ranks differ in a call, as the core has found: ``code``, ``rank``, ``word``, ``counts``: see ``core.h``."""

    def __init__(self, code: int, rank: int, word: int, counts: tuple[int, ...]) -> None:
        super().__init__(code, rank, word, counts)
        self.code, self.rank, self.word, self.counts = code, rank, word, counts


class FingerprintRing(Fingerprints):
    """The published collectives of the ranks of one host, and this rank's compiled core (``core``)."""

    def __init__(self, segment: Segment, failures: FailureLog) -> None:
        super().__init__(segment.bytes[segment.text(segment.rank, 0) : segment.text(segment.rank, TEXTS)])
        self.segment, self.failures = segment, failures
        if not isinstance(failures.status, SharedStatus):  # the first group is the world
            failures.status = SharedStatus(segment, failures.world, failures.status)
        words = segment.words
        self.words, self._failure = words, segment.failure
        self._line, self._ring = segment.line(segment.rank), segment.ring(segment.rank)
        self.core: Any = native.Group(segment.bytes[: segment.core], segment.rank, segment.size, self)
        self.core.spin_ns = SPIN_NANOSECONDS
        self.core.yields = segment.size > len(os.sched_getaffinity(0))
        self._peers = [
            (local, segment.line(local), segment.ring(local)) for local in range(segment.size) if local != segment.rank
        ]
        self._reporting = threading.Lock()  # the program's thread and the watchdog's report failures
        self._late: Liveness | None = None  # what ``confirm`` waits for
        pid = os.getpid()
        words[self._line + STARTED] = started(pid)
        words[self._line + PID] = pid
        failures.status.hold()
        failures.ring = self
        failures.reporters.insert(0, self)  # first: those who wait on this host raise at once

    def announce(self, o: Work[Any]) -> None:
        """Publish that this rank begins ``o``."""
        self.core.publish(o.sequence, o.prepared.fingerprint)

    def publish(self, o: Work[Any]) -> Callable[[], bool] | None:
        """Publish that this rank begins ``o``; returns a function that polls whether every rank of the host has.

        Returns None if it has no other rank.
        The poll raises CollectiveMismatch if a rank began another call, RankLost if a rank is lost, and the failure of
        another rank of the host.
        """
        self.core.publish(o.sequence, o.prepared.fingerprint)
        if not self._peers:
            return None
        liveness = self.liveness()
        return lambda: self.check(o, liveness)

    def check(self, o: Work[Any], liveness: Liveness | None = None) -> bool:
        """Compare ``o`` and the calls before it with those of the other ranks so far.

        Returns whether every rank of the host has begun ``o``.  Raises as the poll of ``publish``; without a
        ``liveness`` it does not look for dead ranks.
        """
        absent = self.missing(o)  # before the comparison: a rank that begins it meanwhile is compared the next time
        if (found := self.core.compare(o.sequence, o.prepared.fingerprint)) is not None:
            self.raise_mismatch(o.group, *found)
        if self.words[self._failure]:
            self.raise_failure(o.sequence)
        waits_for = map(self.segment.ranks.index, absent[-1:])
        if liveness is not None and (end := liveness(waits_for, o)) is not None:
            self.check(o)  # the calls of other ranks may differ already
            self.raise_everywhere(end, o.sequence)
        return not absent

    def confirm(self, o: Work[Any]) -> None:
        """As ``check``, for the last call of this rank; also raises the end of a rank that is long late."""
        late = self._late = self._late or self.liveness()  # the watchdog's thread may replace the attribute
        if self.check(o, late):
            self._late = None

    def since(self, first: int) -> tuple[int, list[int]]:
        """The fingerprints of this rank's calls from the ``first``-th on, and the first call that is still kept."""
        words, ring, end = self.words, self._ring, self.begun
        start = max(first, end - RING)
        marks = [words[ring + sequence % RING] - sequence for sequence in range(start, end)]
        kept = max(first, self.begun - RING + 1)  # the program may have overwritten some meanwhile
        return kept, marks[kept - start :]

    @property
    def begun(self) -> int:
        """The number of collectives begun on this rank, which is the sequence number of the next."""
        return self.words[self._line + ARRIVED]

    def missing(self, o: Work[Any]) -> list[int]:
        """The ranks of the host that have not begun ``o``."""
        ranks, words = self.segment.ranks, self.words
        return [ranks[local] for local, line, _ in self._peers if words[line + ARRIVED] <= o.sequence]

    def gone(self) -> Iterator[tuple[int, str]]:
        """The ranks of the host whose process has ended, with a text for the error."""
        for local, _, _ in self._peers:
            if (why := self._ended(local)) is not None:
                yield self.segment.ranks[local], why

    def killed(self) -> int | None:
        """A rank of the host whose process has ended without closing its communicator, or None."""
        lines = {self.segment.ranks[local]: line for local, line, _ in self._peers}
        return next((rank for rank, _ in self.gone() if not self.words[lines[rank] + CLOSED]), None)

    def find_failure(self) -> KosError | None:
        """The first failure of a rank of this host, or the loss of a killed rank.  Does not wait."""
        if (known := self.failure()) is not None:
            return known[0]
        killed = self.killed()
        return None if killed is None else self.failures.ended(killed)

    # Methods that the failure log calls, because this is one of its reporters.

    def report_end(self, sequence: int, reason: str, cause: KosError | None) -> None:
        """Report that this rank begins no collective from ``sequence`` on, why, and what caused that."""
        self.report_failure(self.failures.end(reason, cause), sequence)
        self.mark_closed(ABORTED)

    def report_failure(self, error: KosError, sequence: int) -> None:
        """Make the other ranks that wait in collective ``sequence`` or a later one raise the same error.

        The failure of the earliest collective is kept.
        """
        sequence = min(sequence, native.WORD_SEQUENCE)
        with self._reporting:
            if (word := self.core.failure()) and word & native.WORD_SEQUENCE <= sequence:
                return
            at = self.segment.report_of(self.segment.rank)
            self.segment.bytes[at : at + FAILURE_BYTES] = fitting(to_record(error)).ljust(FAILURE_BYTES)
            self.core.fail(sequence)

    def failure(self) -> tuple[KosError, int] | None:
        """The failure of the earliest collective that a rank of the host has reported, and that collective."""
        known: tuple[KosError, int] | None = None
        for _ in range(_READS):
            if not (word := self.core.failure()):
                return None
            at, sequence = self.segment.report_of(word >> _RANK_SHIFT & 0xFF), word & native.WORD_SEQUENCE
            known = CollectiveError(f"collective #{sequence} failed on a rank that was stopped meanwhile"), sequence
            with contextlib.suppress(ValueError):  # its rank is writing the failure of an earlier one
                return from_record(json.loads(bytes(self.segment.bytes[at : at + FAILURE_BYTES]))), sequence
            time.sleep(0.001)
        return known

    def raise_failure(self, sequence: int) -> None:
        """Raise the failure of a rank of the host, if it concerns collective ``sequence``."""
        if (known := self.failure()) is not None and known[1] <= sequence:
            raise known[0]

    def liveness(self) -> Liveness:
        """A function that checks, from time to time, whether ranks of the host that a call waits for have ended.

        The function is called at each poll.  It returns the error of the call ``what`` if two checks in a row have
        found that one of ``ranks`` has ended, else None.  One check is not enough: a value that the rank stored before
        its end may arrive after it.
        """
        began, suspects = time.monotonic(), set[int]()
        due = began + CHECK_SECONDS

        def check(ranks: Iterable[int], what: object = None) -> KosError | None:
            nonlocal due
            if (now := time.monotonic()) < due:
                return None
            due = now + min(max(CHECK_SECONDS, (now - began) / 100), LONGEST_CHECK_SECONDS)
            for local in ranks:
                if (end := self.end_of(local, what)) is not None:
                    if local in suspects:
                        return end
                    suspects.add(local)
                    due = now
            return None

        return check

    def mark_closed(self, how: int) -> None:
        """Publish that this rank begins no more collectives: CLOSED_ORDERLY, or ABORTED after a failure."""
        self.words[self._line + CLOSED] = how

    def close(self) -> None:
        """Unmap the segment, once the watchdog does not read from it."""
        self.failures.ring = None
        self.failures.reporters.remove(self)
        watchdog.wait_for_check()
        if not self.words[self._line + CLOSED]:
            if (cause := self.failures.closing()) is not None:
                self._causes().post_failure(cause)
            self.mark_closed(CLOSED_ORDERLY)
        self.core.close()
        self.segment.close()
        self.failures.status.release()
        # Releases the old views, which hold the memory and its descriptor.
        self.words, self._memory = self.segment.words, None

    def failed(self, code: int, rank: int, word: int, *counts: int) -> NoReturn:
        """Raise the error of a result that the core has found.  The core calls this method."""
        if code == native.REPORTED and (known := self.failure()) is not None:
            raise known[0]
        if code == native.FORKED:
            raise CollectiveError(forked_from(self.failures.rank))
        if code in (native.CLOSED, native.REPORTED):  # another thread has closed it
            raise CollectiveError("the communicator is closed")
        raise Difference(code, rank, word, counts)

    def raise_everywhere(self, error: KosError, sequence: int) -> NoReturn:
        """Raise ``error`` on all ranks of the host, or an earlier failure of another rank."""
        self.report_failure(error, sequence)
        self.raise_failure(sequence)
        raise error

    def end_of(self, local: int, what: object = None) -> KosError | None:
        """The error of ``what``, which waits for that rank, if it has ended; None if it has not."""
        closed, ended = self.words[self.segment.line(local) + CLOSED], self._ended(local)
        rank, failures = self.segment.ranks[local], self.failures
        if closed == CLOSED_ORDERLY:
            return failures.lost(rank, WHY_CLOSED, what, self._causes().cause(failures.world[rank]))
        if closed:
            return failures.lost(rank, "its process ended", what)
        return None if ended is None else failures.lost(rank, ended, what, None, RECENT_SECONDS)

    def _causes(self) -> SharedStatus:
        """The failures because of which ranks have closed this group.  In the world they are the last failures."""
        return SharedStatus(self.segment, self.failures.world)

    def _ended(self, local: int) -> str | None:
        line = self.segment.line(local)
        pid, began = self.words[line + PID], self.words[line + STARTED]
        with ignored(OSError):  # the state of the process is unknown
            return f"its process {pid} ended" if pid and started(pid) != began else None
        return None

    def _describe(self, local: int, sequence: int) -> tuple[str, dict[str, Any]]:
        """Collective ``sequence`` of a rank, as text and as fingerprint values."""
        words, at = self.words, self.segment.resized(local, sequence)
        stamp, of_resized, like, count = words[self.segment.ring(local) + sequence % RING], *words[at : at + 3]
        own = stamp - sequence
        if (found := self._described(local, own)) is not None:
            return described(found, sequence)
        if stamp == of_resized and (found := self._described(local, like)) is not None:
            return described_resized(found, sequence, count, own)
        return f"collective #{sequence}", {}

    def _described(self, local: int, fingerprint: int) -> bytes | None:
        """The description that a rank has published with a fingerprint."""
        for index in range(TEXTS):
            at = self.segment.text(local, index)
            text = bytes(self.segment.bytes[at : at + TEXT_BYTES]).rstrip(b"\0 ")
            with contextlib.suppress(KeyError, ValueError):  # its rank may be writing it
                described(text, 0, fingerprint)
                return text
        return None

    def raise_mismatch(self, group: str, sequence: int, local: int) -> NoReturn:
        """Make all ranks raise the difference between this rank's call and that of ``local``."""
        ranks = self.segment.ranks
        calls = ((ranks[each], *self._describe(each, sequence)) for each in (self.segment.rank, local))
        self.raise_everywhere(self.failures.mismatch(group, *calls), sequence)
