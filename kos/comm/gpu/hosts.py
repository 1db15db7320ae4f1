"""The comparison of calls on GPUs between hosts: the first ranks of the hosts send each other notices.

A notice holds the calls that the first rank of a host began since its last one, and the first failure of that host.
Each rank compares the calls that both have begun: no rank waits, and a rank that is behind is no mismatch.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable
from typing import Any

from kos.comm.failures import from_record, to_record
from kos.comm.host.fingerprints import TEXTS, described
from kos.comm.host.shared import RING, Calls
from kos.comm.rendezvous.notices import Notices
from kos.errors import KosError

_KEPT = 1 << 16
"""Own calls that are kept, 8 bytes each: those of ranks that are further behind are not compared."""
_CLOSE_SECONDS = 0.5
"""In which the last calls of other hosts may arrive when a communicator is closed."""


class _Run:
    """Calls in a row, as in the ring of a rank: fingerprint plus number."""

    def __init__(self) -> None:
        self.first, self.entries = 0, array("Q")

    @property
    def end(self) -> int:
        return self.first + len(self.entries)

    def add(self, first: int, entries: bytes) -> None:
        """Add the calls from ``first`` on; what came before a gap is dropped."""
        if first != self.end:
            self.first, self.entries = first, array("Q")
        self.entries.frombytes(entries)

    def drop(self, end: int) -> None:
        """Drop the calls before ``end``."""
        if end > self.first:
            self.first, self.entries = end, self.entries[end - self.first :]


class HostCalls:
    """The calls of one communicator on ``rank``, the first rank of its host, and ``notices`` to and from ``others``."""

    def __init__(self, calls: Calls, rank: int, others: Iterable[int], notices: Notices) -> None:
        self._calls, self._rank, self._notices = calls, rank, notices
        self._lock = threading.RLock()  # of the program's thread and the watchdog's
        self._mine, self._theirs = _Run(), {other: _Run() for other in others}  # sent, and not compared yet
        self._failed = False  # whether the failure of this host was sent
        self._sent: set[int] = set()  # the fingerprints whose descriptions were sent
        self._texts: dict[int, str] = {}  # descriptions by fingerprint

    @property
    def urgent(self) -> bool:
        """Whether calls that were not sent may soon be overwritten."""
        return self._calls.begun - self._mine.end > RING // 2

    def send(self) -> None:
        """Send the calls begun since the last notice, and the first failure of this host."""
        with self._lock:
            calls, mine = self._calls, self._mine
            known = None if self._failed else calls.failure()
            if known is None and calls.begun == mine.end:
                return
            first, entries = calls.since(mine.end)
            mine.add(first, entries)
            mine.drop(mine.end - _KEPT)
            if len(self._sent) > TEXTS:
                self._sent.clear()
            texts = {mark: text.decode() for mark, text in list(calls.texts.items()) if mark not in self._sent}
            self._sent.update(texts)
            self._texts |= texts
            failure = None if known is None else [to_record(known[0]), known[1]]
            self._failed = self._failed or known is not None
            self._notices.send([self._rank, first, entries.hex(), texts, failure])

    def receive(self, group: str) -> None:
        """Record failures of other hosts.  Raises CollectiveMismatch, on all ranks of this host, if calls differ."""
        with self._lock:
            for rank, first, entries, texts, failure in self._notices.receive():
                if len(self._texts) > 16 * TEXTS:
                    self._texts.clear()
                self._texts |= {int(mark): text for mark, text in texts.items()}
                self._theirs[rank].add(first, bytes.fromhex(entries))
                if failure is not None:
                    self._record(from_record(failure[0]), failure[1])
            for rank, theirs in self._theirs.items():
                self._compare(group, rank, theirs)

    def _compare(self, group: str, rank: int, theirs: _Run) -> None:
        mine = self._mine
        first, end = max(mine.first, theirs.first), min(mine.end, theirs.end)
        pairs = [run.entries[first - run.first : end - run.first] for run in (mine, theirs)] if first < end else []
        if pairs and pairs[0] != pairs[1]:
            at, differ = next((k, pair) for k, pair in enumerate(zip(*pairs, strict=True)) if pair[0] != pair[1])
            texts = (self._describe(entry - first - at, first + at) for entry in differ)
            both = ((each, *text) for each, text in zip((self._rank, rank), texts, strict=True))
            error = self._calls.ledger.mismatch(group, *both)
            self._record(error, first + at)
            raise error
        theirs.drop(end)

    def _record(self, failure: KosError, sequence: int) -> None:
        """Record a failure for the waits of this rank on host memory, and for the other ranks of this host."""
        self._calls.ledger.record(sequence, failure)
        self._calls.fail(failure, sequence)

    def _describe(self, mark: int, sequence: int) -> tuple[str, dict[str, Any]]:
        text = self._texts.get(mark)
        return (f"collective #{sequence}", {}) if text is None else described(text.encode(), sequence)

    def close(self, group: str) -> None:
        """Compare the last calls, unless ``group`` is empty, and close the notices."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        try:
            while group:
                self.send()
                self.receive(group)
                if all(run.end >= self._mine.end for run in self._theirs.values()) or time.monotonic() > deadline:
                    break
                time.sleep(0.001)
        finally:
            self._notices.close()
