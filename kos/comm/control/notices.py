"""Notices: short messages of a rank to all others of a group through its hub, for which no rank waits."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from kos.comm.control.hub import NOTICE
from kos.comm.control.inbox import Inbox
from kos.comm.failures import FailureLog
from kos.errors import KosError, from_record, to_record

FORWARD_SECONDS = 2.0  # limit for the hub's answer that a notice has been forwarded
_CHARACTERS = 2000  # of a reason or an error
_tokens = itertools.count()


class Channel:
    """Notices of one backend of a group.  It is a reporter of the failure log of the group.

    ``number`` is the same on all ranks.  ``post`` sends a message to the hub, ``deaths`` is that of the rendezvous,
    and reads into ``inbox``.
    """

    def __init__(
        self, number: int, post: Callable[[bytes], None], deaths: Callable[[], dict[int, str]], inbox: Inbox,
        failures: FailureLog,
    ) -> None:  # fmt: skip
        self._number, self._post, self.deaths, self._inbox, self._failures = number, post, deaths, inbox, failures
        self.holds: Callable[[], bool] = lambda: False
        """Whether another rank may still read memory of this one: a report is then forwarded before it goes on."""

    def send(
        self, notice: list[Any], soon: bool = True, wait: bool = False, timeout: float = FORWARD_SECONDS
    ) -> bool:
        """Send a notice, of JSON's types; unless ``soon``, ranks that close the group at once do not get it.

        With ``wait``, return once the hub has forwarded it to the other ranks, or is closed or lost; False if neither
        happens within ``timeout`` seconds.
        """
        token = next(_tokens) if wait else None
        self._post(NOTICE + json.dumps([soon, token, self._number, notice]).encode())
        deadline = time.monotonic() + timeout
        while token is not None and token not in self._inbox.forwarded:
            if 0 in self.deaths() or self._inbox.closed:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0002)
        self._inbox.forwarded.discard(token)
        return True

    def receive(self) -> list[list[Any]]:
        """The notices that have arrived; those of one rank are in its order."""
        self.deaths()
        arrived = list[list[Any]]()
        with contextlib.suppress(IndexError):
            while True:
                arrived.append(self._inbox.notices[self._number].popleft())
        return arrived

    # Methods that the failure log calls, because this is one of its reporters.

    def notify(self, kind: str, sequence: int, *what: Any) -> None:
        """Send a notice about a collective."""
        self.send([self._failures.rank, kind, sequence, *what])

    def read_reports(self) -> Iterator[tuple[int, str, int, list[Any]]]:
        """Record the reports and deaths that have arrived.  Yields (rank, kind, collective, rest) of other notices."""
        for rank, kind, sequence, *what in self.receive():
            if kind == "failed":
                self._failures.record(sequence, from_record(what))
            elif kind == "gone":
                why, cause = what
                self._failures.record_left(rank, sequence, why, None if cause is None else from_record(cause))
            else:
                yield rank, kind, sequence, what
        for rank, why in self.deaths().items():
            self._failures.record_left(rank, 0, why)

    def report_failure(self, failure: KosError, sequence: int) -> None:
        """Make the other ranks raise the failure from collective ``sequence`` on."""
        notice = [self._failures.rank, "failed", sequence, *to_record(failure, _CHARACTERS)]
        self.send(notice, wait=self.holds())

    def report_end(self, sequence: int, why: str, cause: KosError | None, soon: bool = True) -> None:
        """Report that this rank begins no collective from ``sequence`` on; ``soon`` is as in ``send``."""
        record = None if cause is None else to_record(cause)
        self.send([self._failures.rank, "gone", sequence, why[:_CHARACTERS], record], soon, self.holds())

    def find_failure(self) -> KosError | None:
        """The loss of a rank whose process has ended.  Any thread may ask."""
        gone = self.deaths().items()
        return next((self._failures.lost(rank, why, None, None, 0.0) for rank, why in gone), None)
