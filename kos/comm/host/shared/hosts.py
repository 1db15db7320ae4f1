"""The comparison of GPU backends' calls between hosts: the first ranks of the hosts send each other notices.

A notice holds the calls that its rank began since the last one, and the first failure of its host.  Each rank compares
the calls that both have begun: no rank waits for another, and a rank that is behind is no mismatch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from kos.comm.control.base import Rendezvous
from kos.comm.control.notices import Notices
from kos.comm.failures import from_record, to_record
from kos.comm.host.fingerprints import TEXTS, described
from kos.comm.host.shared.calls import CallRing

_CLOSE_SECONDS = 0.5
"""In which the last calls of other hosts may arrive when a communicator is closed."""


def between_hosts(rendezvous: Rendezvous, calls: CallRing | None) -> HostCalls | None:
    """The comparison with other hosts, on the first rank of each if there are several.  Collective.

    Each is connected with those 1, 2, 4, … hosts away, so that a failure reaches all of many hosts in few steps.
    """
    mine = -1 if calls is None else calls.segment.ranks[0]
    if calls is not None and calls.segment.size == rendezvous.size:
        return None
    first = sorted({int(rank) for rank in rendezvous.allgather(str(mine).encode())})
    if calls is None or first[0] < 0:
        return None
    steps = [step for k in range(len(first).bit_length()) for step in (1 << k, -1 << k)]
    others = {first[(first.index(mine) + step) % len(first)] for step in steps} - {mine}
    notices = rendezvous.open_notices(others if mine == rendezvous.rank else ())
    return None if notices is None or mine != rendezvous.rank else HostCalls(calls, others, notices)


class HostCalls:
    """The calls of one communicator on the first rank of a host, and ``notices`` to and from ``others``."""

    def __init__(self, calls: CallRing, others: Iterable[int], notices: Notices) -> None:
        self._calls, self._rank, self._notices = calls, calls.segment.ranks[0], notices
        self._sent, self._failed = 0, False  # the number of calls that were sent, and whether a failure was
        self._theirs: dict[int, tuple[int, list[int]]] = {other: (0, []) for other in others}  # not compared yet
        self._described: set[int] = set()  # the fingerprints whose descriptions were sent
        self._texts: dict[int, bytes] = {}  # descriptions of other ranks' calls, by fingerprint

    def send(self) -> None:
        """Send the calls begun since the last notice, and the first failure of this host."""
        calls = self._calls
        known = None if self._failed else calls.failure()
        first, marks = calls.since(self._sent)
        if not marks and known is None:
            return
        if len(self._described) > TEXTS:
            self._described.clear()
        texts = {mark: text.decode() for mark, text in calls.texts.copy().items() if mark not in self._described}
        self._described.update(texts)
        self._sent, self._failed = first + len(marks), self._failed or known is not None
        self._notices.send([self._rank, first, marks, texts, known and [to_record(known[0]), known[1]]])

    def receive(self, group: str) -> None:
        """Record failures of other hosts.  Raises CollectiveMismatch, on all ranks of this host, if calls differ."""
        for rank, first, marks, texts, failure in self._notices.receive():
            if len(self._texts) > 16 * TEXTS:
                self._texts.clear()
            self._texts |= {int(mark): text.encode() for mark, text in texts.items()}
            start, before = self._theirs[rank]
            self._theirs[rank] = (start, before + marks) if start + len(before) == first else (first, marks)
            if failure is not None:
                self._calls.fail(from_record(failure[0]), failure[1])
        for rank, (first, marks) in self._theirs.items():
            if marks:
                self._compare(group, rank, first, marks)

    def _compare(self, group: str, rank: int, first: int, theirs: list[int]) -> None:
        start, mine = self._calls.since(first)
        for sequence, pair in enumerate(zip(mine, theirs[start - first :], strict=False), start):
            if pair[0] != pair[1]:
                texts = [self._describe(mark, sequence) for mark in pair]
                both = (self._rank, *texts[0]), (rank, *texts[1])
                self._calls.raise_everywhere(self._calls.ledger.mismatch(group, *both), sequence)
        compared = min(first + len(theirs), start + len(mine))
        self._theirs[rank] = compared, theirs[compared - first :]

    def _describe(self, mark: int, sequence: int) -> tuple[str, dict[str, Any]]:
        text = self._calls.texts.get(mark) or self._texts.get(mark)
        return (f"collective #{sequence}", {}) if text is None else described(text, sequence)

    def close(self, group: str) -> None:
        """Compare the last calls, unless ``group`` is empty, and close the notices."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        try:
            while group:
                self.send()
                self.receive(group)
                behind = any(first + len(marks) < self._sent for first, marks in self._theirs.values())
                if not behind or time.monotonic() > deadline:
                    break
                time.sleep(0.001)
        finally:
            self._notices.close()
