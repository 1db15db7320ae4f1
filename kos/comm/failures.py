"""The ledger of failures: which failure a rank raises, which ranks its error names, and which ranks wait for others.

Two rules decide which failure a rank raises.  Of several failures of a group, that of the earliest collective counts.
A cause counts before its consequences: a rank that is closed, late or waiting because of another rank is not named.
So every rank of a job names the ranks that failed first.

Callers pass ranks of the group; errors name ranks of the world.  ``KosError.ranks`` holds them for programs.

The ledger uses no transport: backends record received failures here, and send records (``to_record``) to others.
Through a ``Board`` the threads of one process read each other's state directly; through a ``SharedBoard``
(``host/shared/board.py``) the processes of one host do.  Between hosts the hub of the world carries
failures and ends.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kos.comm import timeouts
from kos.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CudaError,
    Interrupted,
    KosError,
    RankLost,
    RendezvousError,
)

Error = TypeVar("Error", bound=KosError)
_CLASSES = {kind.__name__: kind for kind in (CollectiveMismatch, CollectiveTimeout, RankLost, RendezvousError)}

RECENT_SECONDS = 10.0
"""An older failure of a rank is not the reason why its process ended.  Added to the timeout of a wait, it is the same
for a rank that is closed or late.
"""


SHOWN_CALLS = 4
"""The most late ranks whose last call an error shows."""

LOOK_SECONDS = 0.2
"""Seconds between two checks for stopped ranks."""

_END_SECONDS = 0.2  # in which the hub reports a rank whose process has ended

WHY_CLOSED = "it closed its communicator"
"""The reason for the loss of a rank that has called ``close``: a failure only for a rank that waits for that rank."""


class EndedEarly(RankLost):
    """Work on a GPU ended because of a failure that another rank, or another thread, reports."""

    unexplained: type[KosError] = RankLost
    """What is raised where nobody does."""


def again(error: Error, text: object = None) -> Error:
    """A copy of the error without its traceback, whose frames hold arrays."""
    new = type(error)(str(error) if text is None else str(text))
    new.ranks = error.ranks
    return new


def blaming(error: Error, ranks: Iterable[int]) -> Error:
    """``error`` with these ranks of the world."""
    error.ranks = tuple(ranks)
    return error


def to_record(error: KosError, length: int | None = None) -> list[Any]:
    """A failure in the form in which ranks send it to each other, with at most ``length`` characters of its text."""
    return [type(error).__name__, str(error)[:length], list(error.ranks)]


def from_record(record: Sequence[Any]) -> KosError:
    """The failure of another rank; an unknown class becomes CollectiveError."""
    kind, text, ranks = record
    return blaming(_CLASSES.get(kind, CollectiveError)(text), ranks)


class Tables:
    """What ranks know of each other, by world rank."""

    def __init__(self) -> None:
        self.failures: dict[int, tuple[KosError, float]] = {}  # the last failure of a rank, and when
        self.waits: dict[int, tuple[int, ...]] = {}  # the ranks that a rank waits for
        self.ends: dict[int, str] = {}  # why a rank has ended
        self.last_calls: dict[int, Callable[[], str]] = {}  # functions that return a rank's last call


class Board:
    """The failures and awaited ranks of this rank, and those that are known of other ranks, in world ranks.

    Ranks that are threads share ``tables``.  A subclass shares them with other processes.
    """

    def __init__(self, rank: int = -1, tables: Tables | None = None) -> None:
        self._rank, self._tables = rank, tables or Tables()
        self.last: KosError | None = None
        self._queued: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()  # the watchdog's thread posts what is queued
        self._users = 0
        self._plane: Callable[[], Any] = lambda: None

    @property
    def queued(self) -> dict[Any, tuple[int, ...]]:
        """By communicator, for which ranks waits what it has queued on a GPU, whatever the program does.  A copy."""
        with self._lock:
            return dict(self._queued)

    def connect(self, plane: Any) -> None:
        """Share failures and ends with other hosts by ``plane``, the rendezvous of the world, as long as it lasts.

        Its ``send_failure`` sends this rank's last failure to all others, or None once the program has handled it.
        Its ``receive_failures`` adds what has arrived to Tables, and does not wait.
        """
        self._plane = weakref.ref(plane)

    def _receive(self) -> Tables:
        if (plane := self._plane()) is not None:
            plane.receive_failures(self._tables)
        return self._tables

    def hold(self) -> None:
        """Add a reference of a communicator."""
        self._users += 1

    def release(self) -> None:
        """Remove a reference of a communicator; the last one frees the board."""
        self._users -= 1
        if not self._users:
            self.free()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold a reference while one communicator replaces another."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def free(self) -> None:
        """Free the memory; waits and failures are no longer shared."""

    def post_failure(self, error: KosError) -> None:
        """Post that this rank failed because of ``error.ranks``; an error without ranks is not posted."""
        if error.ranks:
            self.last = again(error)  # it lasts until the next call, and frames hold what could not be made
            self._tables.failures[self._rank] = self.last, time.monotonic()
            self._send(self.last)

    def clear_failure(self) -> None:
        """Remove this rank's last failure: the program has handled it, since it makes another call."""
        self.last = None
        self._tables.failures.pop(self._rank, None)
        self._send(None)

    def _send(self, error: KosError | None) -> None:
        if (plane := self._plane()) is not None:
            plane.send_failure(error)

    def post_wait(self, ranks: Iterable[int] | None) -> None:
        """Post the ranks that this rank waits for; None if it no longer waits."""
        if ranks is None:
            self._tables.waits.pop(self._rank, None)
        else:
            self._tables.waits[self._rank] = tuple(ranks)

    def post_queued(self, key: Any, ranks: Sequence[int]) -> None:
        """What communicator ``key`` has queued on a GPU waits for those ranks; none: for nobody, as far as known."""
        with self._lock:
            if ranks:
                self._queued[key] = tuple(ranks)
            else:
                self._queued.pop(key, None)

    def publish_last_call(self, last_call: Callable[[], str]) -> None:
        """Publish the last call of this rank, which ``last_call()`` returns; "" for none."""
        self._tables.last_calls[self._rank] = last_call

    def last_call(self, rank: int) -> str:
        """The last call of that rank and its line in the program; "" if it is not known."""
        known = self._tables.last_calls.get(rank)
        return "" if known is None else known()

    def failure(self, rank: int) -> tuple[KosError, float] | None:
        """The last failure of that rank, and its age in seconds."""
        known = self._receive().failures.get(rank)
        return None if known is None else (known[0], time.monotonic() - known[1])

    def awaited(self, rank: int) -> tuple[int, ...] | None:
        """The ranks that rank ``rank`` waits for, itself or on its GPU; None if it is not known to wait."""
        return None if self.ended(rank) else self._tables.waits.get(rank)

    def ended(self, rank: int) -> bool:
        """Whether that rank is known to have ended."""
        return rank in self._receive().ends

    def await_end(self, rank: int) -> None:
        """Wait for a moment until other hosts also know that the rank has ended: they learn of its failure first."""
        deadline = time.monotonic() + _END_SECONDS
        while self._plane() is not None and not self.ended(rank) and time.monotonic() < deadline:
            time.sleep(0.001)

    def runs(self, rank: int) -> bool:
        """Whether that rank is known to run: neither ended nor stopped."""
        return False

    def halted(self, rank: int) -> bool:
        """Whether that rank is known to be gone or stopped."""
        return self.ended(rank)


class StoppedRanks:
    """Finds the ranks of this host that a signal or a debugger has stopped for longer than the usual timeout.

    A call whose own timeout is longer waits that long for a rank that computes, but not for a rank that is stopped.
    """

    def __init__(self, ledger: Ledger, usual: float) -> None:
        self._ledger, self._usual = ledger, usual
        self._since: dict[int, float] = {}  # when a rank was first seen stopped
        self._look_at = 0.0

    def find(self, awaited: Iterable[int]) -> list[int]:
        """The awaited ranks that are stopped, as world ranks.  Checks at most every ``LOOK_SECONDS``."""
        now, board = time.monotonic(), self._ledger.board
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_SECONDS
        stopped = [rank for rank in awaited if board.halted(rank) and not board.ended(rank)]
        self._since = {rank: self._since.get(rank, now) for rank in stopped}
        return [rank for rank, since in self._since.items() if now - since > self._usual]

    def check(self, what: object) -> None:
        """Raise if a rank is stopped, in an exchange of all ranks."""
        if world := self.find(self._ledger.world):
            late = [self._ledger.world.index(rank) for rank in world]
            absent = timeouts.late(self._ledger.names(late), within=self._usual)
            raise self._ledger.overdue(late, what, None, absent, RendezvousError)


class Ledger:
    """The failures of one group, whose rank r is rank ``world[r]`` of the world.

    If the two numbers differ, errors name a rank that failed ``rank 2 of world``, and a rank in the arguments of a call
    ``rank 1 of the group``.
    """

    def __init__(self, world: Sequence[int], rank: int, board: Board | None = None, timeout: float = 120.0) -> None:
        self.world, self.rank, self.timeout = list(world), rank, timeout
        self.board = board or Board(self.world[rank])
        self.failure: tuple[int, KosError] | None = None  # sequence number and error of the earliest failed collective
        self.ends: dict[int, tuple[int, str, KosError | None]] = {}  # rank -> first collective not begun, reason, cause

    @property
    def group_suffix(self) -> str:
        """What follows a rank of this group in the arguments of a call."""
        return "" if self.world == list(range(len(self.world))) else " of the group"

    def of(self, ranks: Sequence[int], rank: int) -> Ledger:
        """The ledger of the group of these ranks; this process is its rank ``rank``."""
        return Ledger([self.world[each] for each in ranks], rank, self.board, self.timeout)

    # Records.

    def record(self, sequence: int, error: KosError) -> None:
        """Record that a rank failed in that collective; the earliest counts."""
        if self.failure is None or sequence < self.failure[0]:
            self.failure = sequence, error

    def record_end(self, rank: int, sequence: int, why: str, cause: KosError | None = None) -> None:
        """Record that the rank begins no collective from ``sequence`` on."""
        self.ends.setdefault(rank, (sequence, why, cause))

    def check(self, sequence: int | None, what: object = None) -> None:
        """Raise the known failure, if any, that ends collective ``sequence`` (None: any message) of this group."""
        if self.failure is not None and (sequence is None or self.failure[0] <= sequence):
            raise again(self.failure[1])
        if sequence is not None:
            for rank, (end, why, cause) in self.ends.items():
                if end <= sequence:
                    raise self.lost(rank, why, what, cause)

    # Errors and their causes.

    def lost(
        self, rank: int, why: str, what: object = None, cause: KosError | None = None, window: float | None = None
    ) -> KosError:
        """The error of ``what``, which waits for a lost rank: the failure that caused the loss, if known.

        The cause is ``cause``, else a failure of that rank within the last ``window`` seconds.
        """
        world = self.world[rank]
        cause = cause or self._failure_of(world, window)
        if cause is not None:
            return again(cause, _prefixed(what, f"{cause}; {self._names([world])} aborted because of it"))
        return blaming(RankLost(_prefixed(what, f"{self._names([world])} is gone: {why}")), [world])

    def overdue(
        self, late: Sequence[int], what: object, seconds: float | None, words: str | None = None,
        kind: type[KosError] = CollectiveTimeout, *, arrived: Sequence[int] = (), elsewhere: Sequence[int] = (),
    ) -> KosError:  # fmt: skip
        """The error of ``what``, in which the ``late`` ranks are missing: it names the ranks that block them.

        ``words``, a text of ``timeouts.py``, say how the ranks are late.  ``arrived`` ranks wait in ``what`` for a GPU
        stream, without posting it.  ``elsewhere`` are ranks of the world that this one waits for in other groups.
        """
        world = [*(self.world[rank] for rank in late), *elsewhere]
        for rank in world:
            if (cause := self._failure_of(rank)) is not None:
                return again(cause, _prefixed(what, f"{cause}; {self._names([rank])} failed because of it"))
        culprits, cycle = self._blocking(world, [self.world[rank] for rank in arrived])
        waiting = [rank for rank in world if rank not in culprits]
        if culprits == world and words is not None:
            absent = words
        else:
            names = self._names(culprits, True)
            absent = timeouts.late_for(names, self._names(waiting, True)) if waiting else timeouts.late(names)
        if cycle:
            absent += f"; {timeouts.cycle(self._names(cycle, True))}"
        for rank in culprits[:SHOWN_CALLS]:
            call = self.board.last_call(rank)
            if call and not f"{what} ".startswith(call.partition(" at ")[0] + " "):  # it has not begun ``what``
                absent += f"; {timeouts.last_called(self._names([rank]), call)}"
        if stopped := [rank for rank in culprits if self.board.halted(rank) and not self.board.ended(rank)]:
            absent += f"; {timeouts.stopped(self._names(stopped, True))}"
        over = "" if seconds is None else f"{timeouts.incomplete(seconds)}; "
        return blaming(kind(_prefixed(what, over + absent)), culprits)

    def mismatch(self, group: str, *calls: tuple[int, str, dict[str, Any]]) -> CollectiveMismatch:
        """The error of two different calls, each given as rank, text and fingerprint."""
        (first, text, call), (second, other_text, other_call) = sorted(calls, key=lambda call: call[0])
        keys = [key for key in {**call, **other_call} if call.get(key) != other_call.get(key)]
        keys = keys[:1] if "operation" in keys else keys  # other differences follow from it
        what = ", ".join(f"{key} {call.get(key)} against {other_call.get(key)}" for key in keys)
        ranks = [self.world[first], self.world[second]]
        return blaming(
            CollectiveMismatch(
                f"{group}: {self._names(ranks[:1])} called {text} but {self._names(ranks[1:])} called {other_text}: "
                f"they differ in {what or 'calls that are no longer recorded'}"
            ),
            ranks,
        )

    def shared(self, failure: KosError, lost: bool, message: object = None) -> KosError:
        """The failure of this rank as the other ranks raise it; ``lost``: its device is unusable.

        ``message`` is the failed call if it is a send or receive.  The text of such a call names only the peer, so
        this rank is put in front.
        """
        shared, mine = failure, [self.world[self.rank]]
        me = self._names(mine)
        if lost:
            shared = blaming(RankLost(f"{me} is gone: {failure}"), mine)
        elif isinstance(failure, CudaError | Interrupted) or (type(failure) is CollectiveError and failure.__cause__):
            # Others must not mistake it for an error of their own.
            shared = blaming(CollectiveError(f"{me}: {failure}"), mine)
        elif message is not None and str(failure).startswith(str(message)):  # not a failure of another rank
            shared = again(failure, f"{me}: {failure}")
        self.board.post_failure(shared)
        return shared

    def cause(self, broken: KosError | None, killed: int | None) -> KosError | None:
        """The failure because of which this rank closes a group: of this group, of any group, or a killed rank."""
        for failure in (broken, self.board.last):
            if failure is not None and failure.ranks:
                return failure
        return None if killed is None else self.lost(killed, "its process ended")

    def closing(self) -> KosError | None:
        """The failure of this rank in any group, if it now closes a group without having made another call."""
        return self.cause(None, None)

    def end(self, reason: str, cause: KosError | None) -> KosError:
        """The failure that the other ranks raise if this one closes now, because of ``cause`` if that is given."""
        return self.lost(self.rank, reason, None, cause, 0.0)

    def suspects(self) -> list[int]:
        """The ranks of this group that are known to have ended or failed; ended ones first."""
        others = [rank for rank in range(len(self.world)) if rank != self.rank]
        gone = [rank for rank in others if rank in self.ends or self.board.ended(self.world[rank])]
        return gone + [rank for rank in others if rank not in gone and self._failure_of(self.world[rank]) is not None]

    def names(self, ranks: Sequence[int], several: bool = True) -> str:
        """``ranks [1, 3]``, or ``rank 1`` if not ``several``: these ranks of the group, as ranks of the world."""
        return self._names([self.world[rank] for rank in ranks], several)

    def _names(self, world: Sequence[int], several: bool = False) -> str:
        text = f"ranks {list(world)}" if several or len(world) != 1 else f"rank {world[0]}"
        return f"{text} of world" if self.group_suffix else text

    def _failure_of(self, rank: int, window: float | None = None) -> KosError | None:
        known = self.board.failure(rank)
        window = self.timeout + RECENT_SECONDS if window is None else window
        return None if known is None or known[1] >= window else known[0]

    def _blocking(self, late: list[int], arrived: Sequence[int]) -> tuple[list[int], list[int]]:
        """The ranks, among the ``late`` ones and those they wait for, transitively, that do not wait themselves.

        The second list is empty unless all of them wait, and one of them for this rank.  Then the first list is
        ``late``, and the second has all ranks of that cycle.
        """
        me = self.world[self.rank]
        seen, todo, culprits, cycle = {me}, list(late), list[int](), False
        while todo:
            rank = todo.pop(0)
            if rank in seen:
                continue
            seen.add(rank)
            awaited: Iterable[int] | None = self.board.awaited(rank)
            if awaited is None and (failure := self._failure_of(rank)) is not None:
                awaited = None if rank in failure.ranks else failure.ranks  # it failed because of those
            if awaited is None and not (rank in arrived and self.board.runs(rank)):
                culprits.append(rank)
            elif awaited is None:
                todo += late
            else:
                cycle = cycle or me in awaited
                todo += awaited
        halted = [rank for rank in culprits if self.board.halted(rank)]  # for which others may wait unseen
        if found := sorted(halted or culprits):
            return found, []
        return list(late), sorted(seen) if cycle else []


def _prefixed(what: object, text: str) -> str:
    return text if what is None else f"{what}: {text}"
