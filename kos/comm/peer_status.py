"""What ranks know of each other, in any group: their last failures, the ranks that they wait for, ends, last calls.

Threads of one process read each other's state directly; the processes of one host do through ``SharedStatus``
(``host/shared/status.py``).  Between hosts the hub of the world carries failures and ends, and at a timeout a question:
for whom the other ranks wait.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kos.comm.waits import wait
from kos.errors import CollectiveTimeout, KosError, from_record, to_record

_END_SECONDS = 0.2  # in which the hub reports a rank whose process has ended
ANSWER_SECONDS = 1.0  # in which a waiting rank answers a query, also on a busy machine
_FORWARD_SECONDS = 1.0  # in which the hub forwards a query
_MOST_ASKED = 128  # ranks: each answer goes to all


class PeerStatus:
    """The failures and awaited ranks of this rank, and those that are known of other ranks, in world ranks.

    Ranks that are threads share ``tables``.  A subclass shares what it knows with other processes.
    """

    __slots__ = ("__dict__", "__weakref__", "last")  # the core reads it

    def __init__(self, rank: int = -1, tables: PeerStatus | None = None) -> None:
        self._rank = rank
        known, self._shared = self if tables is None else tables, tables is not None
        self.failures: dict[int, tuple[KosError | None, float]] = {} if known is self else known.failures
        """The last failure of each rank (None: the rank has handled it), and the monotonic time of its post."""
        self.waits: dict[int, tuple[int, ...]] = {} if known is self else known.waits
        """The ranks that each rank waits for."""
        self.ends: dict[int, str] = {} if known is self else known.ends
        """Why a rank has ended."""
        self.last_calls: dict[int, Callable[[], str]] = {} if known is self else known.last_calls
        """Functions that return the last call of each rank."""
        self.hosts: dict[int, tuple[str, tuple[int, ...]]] = {}
        """The name of each rank's host, and the ranks on it; empty in a job of one host."""
        self.last: KosError | None = None
        self.cut_short: list[Any] = []
        """The failure logs of the groups of which a signal's handler has ended a step half-way (``FailureLog``)."""
        self._answers: dict[int, tuple[float, tuple[int, ...]]] = {}  # of queried ranks, and when they came
        self._asked = self._answered = self._queried = -ANSWER_SECONDS * 2  # when this rank sent, answered or got one
        self._silent = list[int]()  # the ranks to name because the hub did not forward the last query
        self._queued: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()  # the watchdog's thread posts what is queued
        self._users = 0
        self._plane: Callable[[], Any] = lambda: None

    @property
    def queued(self) -> dict[Any, tuple[int, ...]]:
        """For each communicator, the ranks for which its work on a GPU waits, whatever the program does.  A copy."""
        with self._lock:
            return dict(self._queued)

    def connect(self, plane: Any) -> None:
        """Share failures and ends with other hosts by ``plane``, the rendezvous of the world, as long as it lasts.

        Its ``send_notice`` sends a notice to all others.  With a timeout, it waits until the hub has forwarded it.  If
        the hub does not answer in time, it returns the ranks to name: that of the hub, or all of its host if this is
        cut off from the network.  Else it returns no ranks.
        Its ``receive_notices`` calls ``handle_notice`` with each that has arrived, adds to ``ends``, and does not wait.
        Earlier failures are removed, because all ranks that it connects have handled them.
        """
        self.failures.clear()
        self._plane = weakref.ref(plane)

    @property
    def is_connected(self) -> bool:
        """Whether failures and ends of other hosts arrive."""
        return self._plane() is not None

    def receive_notices(self) -> None:
        """Process the notices of other hosts, and answer their queries; does not wait."""
        if (plane := self._plane()) is not None:
            plane.receive_notices(self)

    def _send_notice(self, kind: str, what: Any = None) -> None:
        if (plane := self._plane()) is not None:
            plane.send_notice(kind, what)

    def handle_notice(self, rank: int, kind: str, what: Any) -> None:
        """Process a notice of that rank: its last failure, a query, or the ranks that it waits for."""
        now = time.monotonic()
        if kind == "query":
            self._queried = now
            self._answer()
        elif kind == "waits":
            self._answers[rank] = now, tuple(what)
        elif kind == "failed":
            self.failures[rank] = from_record(what), now
        elif kind == "handled":
            self._handled(rank)

    def announce_wait(self) -> None:
        """Send the ranks that this rank waits for to other hosts.  Called before it stops answering for a while."""
        plane = self._plane()
        if plane is not None and len(plane.failures.world) <= _MOST_ASKED:  # among more ranks, nobody asks
            self._queried = time.monotonic()
            self._answer()

    def _answer(self) -> None:
        """Answer the last query, unless it is answered or too old, or this rank waits for no rank."""
        now = time.monotonic()
        due = now < self._queried + ANSWER_SECONDS and now > self._answered + ANSWER_SECONDS
        if due and (waits := self._awaits()) is not None:
            self._answered = now
            self._send_notice("waits", waits)

    def hold(self) -> None:
        """Add a reference of a communicator."""
        self._users += 1

    def release(self) -> None:
        """Remove a reference of a communicator; the last one frees the status."""
        self._users -= 1
        if not self._users:
            self.free()

    def free(self) -> None:
        """Free the memory; waits and failures are no longer shared."""

    def post_failure(self, error: KosError) -> None:
        """Post that this rank failed because of ``error.ranks``.

        An error that names no ranks is posted only if it is a timeout, and this rank has posted no other failure.  It
        shows that this rank has waited in the call, so that it was not late itself.
        """
        if error.ranks or (isinstance(error, CollectiveTimeout) and self.last is None):
            self.last = error.copy()  # a copy, which is kept without the frames of the error
            self.failures[self._rank] = self.last, time.monotonic()
            self._send_notice("failed", to_record(self.last))

    def clear_failure(self) -> None:
        """Remove this rank's last failure: the program has handled it, since it makes another call."""
        self.last = None
        self._handled(self._rank)
        self._send_notice("handled")

    def _handled(self, rank: int) -> None:
        if rank in self.failures:
            self.failures[rank] = None, self.failures[rank][1]

    def post_wait(self, ranks: Iterable[int] | None) -> None:
        """Post the ranks that this rank waits for; None if it no longer waits."""
        if ranks is None:
            self.waits.pop(self._rank, None)
        else:
            self.waits[self._rank] = tuple(ranks)
            self._answer()  # a query may have come shortly before this wait

    def _awaits(self) -> tuple[int, ...] | None:
        """The ranks that this rank waits for, itself or on its GPU."""
        wait, queued = self.waits.get(self._rank), self.queued
        if wait is None and queued:
            return tuple(dict.fromkeys(rank for each in queued.values() for rank in each))
        return wait

    def query(self) -> list[int]:
        """Query all ranks for the ranks that they wait for; ``awaited`` then waits for the answers.

        Returns no ranks, or, if the hub does not forward the query so that no rank can answer, the ranks to name for
        that (see ``connect``).
        """
        plane, now = self._plane(), time.monotonic()
        if plane is None or len(plane.failures.world) > _MOST_ASKED:
            return []
        if now > self._asked + 2 * ANSWER_SECONDS:
            self._silent = plane.send_notice("query", None, _FORWARD_SECONDS)
            self._asked = time.monotonic()
        return [] if self.runs(plane.failures.world[0]) else self._silent

    def _reply_of(self, rank: int) -> tuple[int, ...] | None:
        """The ranks that a queried rank waits for, by its answer; None if it has ended, is stopped or is computing."""
        while not self.ended(rank) and self.failures.get(rank, (None, 0.0))[0] is None:
            now, (came, waits) = time.monotonic(), self._answers.get(rank, (0.0, None))
            if waits is not None and came > self._asked - ANSWER_SECONDS and now < self._asked + 2 * ANSWER_SECONDS:
                return waits
            if self._silent or now > self._asked + ANSWER_SECONDS:
                break
            time.sleep(0.001)
        return None

    def post_queued(self, key: Any, ranks: Sequence[int]) -> None:
        """Post the ranks for which the work of communicator ``key`` on a GPU waits; empty if none is known."""
        with self._lock:
            if ranks:
                self._queued[key] = tuple(ranks)
            else:
                self._queued.pop(key, None)

    def publish_last_call(self, last_call: Callable[[], str]) -> None:
        """Publish the last call of this rank, which ``last_call()`` returns; "" for none."""
        self.last_calls[self._rank] = last_call

    def last_call(self, rank: int) -> str:
        """The last call of that rank and its line in the program; "" if it is not known."""
        known = self.last_calls.get(rank)
        return "" if known is None else known()

    def failure(self, rank: int) -> tuple[KosError, float] | None:
        """The last failure of that rank, and its age in seconds."""
        self.receive_notices()
        error, at = self.failures.get(rank, (None, 0.0))
        return None if error is None else (error, time.monotonic() - at)

    def failed_within(self, rank: int, seconds: float) -> bool:
        """Whether that rank has posted a failure in the last ``seconds``, even if it has handled it since."""
        return rank in self.failures and time.monotonic() - self.failures[rank][1] < seconds

    def cause(self, rank: int) -> KosError | None:
        """The last failure of that rank, if it names ranks."""
        known = self.failure(rank)
        return known[0] if known is not None and known[0].ranks else None

    def awaited(self, rank: int) -> tuple[int, ...] | None:
        """The ranks that rank ``rank`` waits for, itself or on its GPU; None if it is not known to wait."""
        if self.ended(rank):
            return None
        waits = self.waits.get(rank)
        return self._reply_of(rank) if waits is None and not self.sees(rank) else waits

    def sees(self, rank: int) -> bool:
        """Whether this process sees the waits of that rank.  A rank of another host must be queried instead."""
        return self._shared

    def ended(self, rank: int) -> bool:
        """Whether that rank is known to have ended."""
        self.receive_notices()
        return rank in self.ends

    def gone(self) -> list[int]:
        """The ranks of the world that the hub knows to have ended."""
        self.receive_notices()
        return sorted(self.ends)

    def await_end(self, rank: int) -> None:
        """Wait for a moment, so that other hosts also know that the rank has ended.  They first receive its failure."""
        wait(lambda: self.ended(rank) or not self.is_connected, time.monotonic() + _END_SECONDS)

    def runs(self, rank: int) -> bool:
        """Whether that rank is known to run: neither ended nor stopped."""
        return False

    def halted(self, rank: int) -> bool:
        """Whether that rank is known to be gone or stopped."""
        return self.ended(rank)
