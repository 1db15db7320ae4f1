"""The failure log of a group: its first failure, which failure a rank raises, and which ranks an error names.

Two rules decide which failure a rank raises.  Of several failures of a group, that of the earliest collective counts.
A cause counts before its consequences: a rank that is closed, late or waiting because of another rank is not named.
So every rank of a job names the ranks that failed first.

Whoever sees a failure **reports** it to the log: backends, transports, the watchdog, the control plane.  Whoever must
raise **asks** the log.  Its *links* carry reports to the other ranks and have theirs: the shared memory of a host, a
transport, the hub.  What ranks wait for, and their last failures in any group, are in ``peer_status.py``.

Callers pass ranks of the group; errors name ranks of the world.  ``KosError.ranks`` holds them for programs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kos.comm import timeouts
from kos.comm.peer_status import PeerStatus
from kos.comm.records import again
from kos.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CudaError,
    Interrupted,
    KosError,
    RankLost,
    RendezvousError,
    sentence,
)

RECENT_SECONDS = 10.0
"""An older failure of a rank is not the reason why its process ended.  Added to the timeout of a wait, it is the same
for a rank that is closed or late.
"""


_UNNAMED = (CollectiveMismatch, CollectiveTimeout, RankLost)  # transports raise these without knowing the call

SHOWN_CALLS = 4
"""The most late ranks whose last call an error shows."""

LOOK_SECONDS = 0.2
"""Seconds between two checks for stopped ranks."""

HOST_SECONDS = 0.05
"""The longest wait for the ends of the other ranks of a lost rank's host."""

DEATHS = ("its connection was closed", "its process ended")
"""The reasons for the loss of a rank whose process has ended without a word."""

WHY_CLOSED = "it closed its communicator"
"""The reason for the loss of a rank that has called ``close``: a failure only for a rank that waits for that rank."""


class EndedEarly(RankLost):
    """Work on a GPU ended because of a failure that another rank, or another thread, reports."""

    unexplained: type[KosError] = RankLost
    """What is raised where nobody does."""


class StoppedRanks:
    """Finds the ranks of this host that a signal or a debugger has stopped for longer than the usual timeout.

    A call whose own timeout is longer waits that long for a rank that computes, but not for a rank that is stopped.
    """

    def __init__(self, failures: FailureLog, usual: float) -> None:
        self._failures, self._usual = failures, usual
        self._since: dict[int, float] = {}  # when a rank was first seen stopped
        self._look_at = 0.0

    def find(self, awaited: Iterable[int]) -> list[int]:
        """The awaited ranks that are stopped, as world ranks.  Checks at most every ``LOOK_SECONDS``."""
        now, status = time.monotonic(), self._failures.status
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_SECONDS
        stopped = [rank for rank in awaited if status.halted(rank) and not status.ended(rank)]
        self._since = {rank: self._since.get(rank, now) for rank in stopped}
        return [rank for rank, since in self._since.items() if now - since > self._usual]

    def check(self, what: object) -> None:
        """Raise if a rank is stopped, in an exchange of all ranks."""
        if world := self.find(self._failures.world):
            late = [self._failures.world.index(rank) for rank in world]
            absent = timeouts.late(self._failures.names(late), within=self._usual)
            raise self._failures.overdue(Late(late, absent), what, None, RendezvousError)


class Late(NamedTuple):
    """The ranks that delay a call, as far as a backend knows."""

    ranks: Sequence[int] = ()
    words: str | None = None
    """How they are late, or that they are not known: a text of ``timeouts.py``."""
    arrived: Sequence[int] = ()
    """Ranks that have begun the call and may wait for a stream of a GPU, which no rank posts."""
    elsewhere: Sequence[int] = ()
    """Ranks of the world that this one waits for in other groups."""
    others: Sequence[int] = ()
    """The ranks of which any may be late if nothing else is known."""
    one_suffices: bool = False
    """Whether the call waits for one of ``ranks``, not for all."""


class FailureLog:
    """The failures of one group, whose rank r is rank ``world[r]`` of the world.

    If the two numbers differ, errors name a rank that failed ``rank 2 of world``, and a rank in the arguments of a call
    ``rank 1 of the group``.
    """

    __slots__ = ("__dict__", "__weakref__", "first")  # the core reads it

    def __init__(
        self, world: Sequence[int], rank: int, status: PeerStatus | None = None, timeout: float = 120.0
    ) -> None:
        self.world, self.rank, self.timeout = list(world), rank, timeout
        self.status = status or PeerStatus(self.world[rank])
        self.first: KosError | None = None
        """What further calls of this rank raise: it has failed, and the ranks are out of step."""
        self.over: KosError | None = None
        """What further exchanges of the control plane raise: one has failed, or the group is closed."""
        self.reported: tuple[int, KosError] | None = None
        """The earliest collective in which a rank is known to have failed, and its error."""
        self.ends: dict[int, tuple[int, str, KosError | None]] = {}  # rank -> first collective not begun, reason, cause
        self.ring: Any = None
        """The calls and reports in the shared memory of this rank's host (``CallRing``), if there is one."""
        self.links: list[Any] = []
        """What carries reports to the other ranks: each has ``report_failure``, ``report_end`` and ``find_failure``."""
        self._told: int | None = None  # the earliest collective whose failure the links have carried
        self._lock = threading.RLock()  # the watchdog reports too; reentrant for the garbage collector
        self._alone: set[int] = set()  # lost ranks of hosts that have other ranks

    @property
    def group_suffix(self) -> str:
        """What follows a rank of this group in the arguments of a call."""
        return "" if self.world == list(range(len(self.world))) else " of the group"

    def in_world(self, ranks: Iterable[int]) -> list[int]:
        """The numbers of these ranks in the world."""
        return [self.world[rank] for rank in ranks]

    def on_hosts_of(self, ranks: Sequence[int]) -> list[int]:
        """The ranks of this group on the hosts of those ranks."""
        near = {*self.in_world(ranks)}
        near |= {each for rank in near if rank in self.status.hosts for each in self.status.hosts[rank][1]}
        return [rank for rank, world in enumerate(self.world) if world in near]

    def of(self, ranks: Sequence[int], rank: int) -> FailureLog:
        """The failures of the group of these ranks; this process is its rank ``rank``."""
        return FailureLog(self.in_world(ranks), rank, self.status, self.timeout)

    # Reports.

    def record(self, sequence: int, error: KosError) -> None:
        """Record that a rank failed in that collective; the earliest counts."""
        with self._lock:
            if self.reported is None or sequence < self.reported[0]:
                self.reported = sequence, error

    def record_end(self, rank: int, sequence: int, why: str, cause: KosError | None = None) -> None:
        """Record that the rank begins no collective from ``sequence`` on."""
        self.ends.setdefault(rank, (sequence, why, cause))

    def report(self, work: Any, error: KosError, begun: int, lost: bool = False) -> None:
        """Report to the other ranks that ``work`` failed, which ends the group; ``begun`` collectives were begun.

        ``lost``: the device of this rank is unusable.
        """
        sequence = work.sequence if work.collective and work.sequence >= 0 else begun
        self.first = self.first or again(error)
        shared = self._shared(error, lost, work)
        self.record(sequence, shared)
        with self._lock:
            told, self._told = self._told, sequence if self._told is None else min(self._told, sequence)
        if told is None or sequence < told:  # other ranks may wait in an earlier collective
            for link in self.links.copy():
                link.report_failure(shared, sequence)

    def report_end(self, reason: str, sequence: int) -> None:
        """Report to the other ranks that this one begins no collective from ``sequence`` on, and why."""
        cause = self.cause()
        for link in self.links.copy():
            link.report_end(sequence, reason, cause)

    # Questions.

    def ask(self, sequence: int | None, what: object = None) -> None:
        """Raise the reported failure, if any, that ends collective ``sequence`` (None: any message) of this group."""
        if self.reported is not None and (sequence is None or self.reported[0] <= sequence):
            raise again(self.reported[1])
        if sequence is not None:
            for rank, (end, why, cause) in self.ends.copy().items():
                if end <= sequence:
                    raise self.lost(rank, why, what, cause)

    def refuse(self, what: object) -> None:
        """Raise the first failure, if any, for the call ``what``, which comes after it."""
        if self.first is not None:
            raise again(self.first, sentence(what, f"{self.first}", "the communicator failed before: "))

    def find(self) -> KosError | None:
        """The failure of this group, if it can be found without a call.  Called by the watchdog's thread."""
        return self.first or next(filter(None, (link.find_failure() for link in self.links.copy())), None)

    def cause(self) -> KosError | None:
        """The failure because of which this rank closes the group: of this group, of any group, or a killed rank."""
        for known in (self.first, self.status.last):
            if known is not None and known.ranks:
                return known
        killed = None if (ring := self.ring) is None else ring.killed()
        return None if killed is None else self.ended(killed)

    def closing(self) -> KosError | None:
        """The failure of this rank in any group, if it now closes a group without having made another call."""
        last = self.status.last
        return last if last is not None and last.ranks else None

    def show_wait(self, late: Late | None) -> None:
        """Show the ranks of this host for whom this one waits; None: for nobody."""
        if late is None:
            return self.status.post_wait(None)
        known, others = self.in_world(late.ranks) or late.elsewhere, self.in_world(late.others)
        # Any may be late: first those that do not wait, for few are shown.
        self.status.post_wait(known or sorted(others, key=lambda rank: self.status.awaited(rank) is not None))
        self.status.receive_notices()

    # Errors and their causes.

    def named(self, work: Any, error: Exception) -> KosError:
        """The error of kos for ``error``, which names ``work``."""
        if not isinstance(error, KosError):
            named = CollectiveError(f"{work}: {type(error).__name__}: {error}")
            named.__cause__ = error
            return named
        if isinstance(error, _UNNAMED) and f"{work.name} #" not in str(error):
            return error.copy(call=work)
        return error

    def ended(self, rank: int) -> KosError:
        """The error of a rank whose process has ended."""
        return self.lost(rank, "its process ended", None, None, 0.0)

    def lost(
        self, rank: int, why: str, what: object = None, cause: KosError | None = None, window: float | None = None
    ) -> KosError:
        """The error of ``what``, which waits for a lost rank: the failure that caused the loss, if known.

        The cause is ``cause``, else a failure of that rank within the last ``window`` seconds.  An orderly close had no
        other cause.
        """
        world = self.world[rank]
        cause = cause or self._failure_of(world, 0.0 if why == WHY_CLOSED else window)
        if cause is not None:
            return cause.copy(f"{cause}; {self._names([world])} aborted because of it", what, cause)
        ranks = self.ended_with(rank) if why in DEATHS else [world]
        lost = RankLost(f"{self._names(ranks)} is gone: {why}{self._where(ranks)}", ranks=ranks, call=what)
        lost.orderly = why == WHY_CLOSED
        return lost

    def ended_with(self, rank: int, progress: Callable[[], None] = lambda: None) -> Sequence[int]:
        """The ranks of the world that were lost with that rank: all of another host if they ended, else it alone.

        Waits for the others' ends for at most HOST_SECONDS; ``progress`` looks for them meanwhile.
        """
        world, status = self.world[rank], self.status
        _, ranks = status.hosts.get(world, ("", (world,)))
        if len(ranks) == 1 or self.world[self.rank] in ranks:
            return [world]
        deadline = time.monotonic() + HOST_SECONDS
        while not all(map(status.ended, ranks)):
            if rank in self._alone or time.monotonic() > deadline or not status.is_connected:
                self._alone.add(rank)
                return [world]
            time.sleep(0.001)
            progress()
        first = all(self._failure_of(each) is None for each in ranks)  # none ended because of another one
        return ranks if first else [world]

    def overdue(
        self, late: Late, what: object, seconds: float | None = None, kind: type[KosError] = CollectiveTimeout
    ) -> KosError:
        """The error of ``what``, whose time is up: it names the ranks that block those that are ``late``."""
        if late.others and not late.ranks and not late.elsewhere:
            error = self.overdue(Late(late.others), what, seconds, kind)
            if error.ranks and (len(error.ranks) < len(late.others) or all(map(self.status.halted, error.ranks))):
                return error
        world = [*self.in_world(late.ranks), *late.elsewhere]
        for rank in world:
            if (cause := self._failure_of(rank)) is not None:
                return cause.copy(f"{cause}; {self._names([rank])} failed because of it", what, cause)
        culprits, cycle = self._blocking(world, self.in_world(late.arrived))
        waiting = [rank for rank in world if rank not in culprits]
        if culprits == world and late.words is not None:
            absent = late.words
        else:
            names = self._names(culprits, True)
            absent = timeouts.late_for(names, self._ranks(waiting, True)) if waiting else timeouts.late(names)
        absent += self._where(culprits)
        calls = [self.status.last_call(rank) for rank in cycle if rank != self.world[self.rank]]
        if cycle and (late.words is None or any(calls)):  # else the words say what is known
            one_group = all(call and f"{what}".startswith(call.partition(" ")[0] + " ") for call in calls)
            absent += f"; {timeouts.cycle(self._ranks(cycle, True), one_group)}"
        for rank in culprits[:SHOWN_CALLS]:
            call = self.status.last_call(rank)
            if call and not f"{what} ".startswith(call.partition(" at ")[0] + " "):  # it has not begun ``what``
                absent += f"; {timeouts.last_called(self._names([rank]), call)}"
        if stopped := [rank for rank in culprits if self.status.halted(rank) and not self.status.ended(rank)]:
            absent += f"; {timeouts.stopped(self._names(stopped, True))}"
        over = "" if seconds is None else f"{timeouts.incomplete(seconds)}; "
        return kind(over + absent, ranks=culprits, call=what)

    def mismatch(self, group: str, *calls: tuple[int, str, dict[str, Any]]) -> CollectiveMismatch:
        """The error of two different calls, each given as rank, text and fingerprint."""
        (first, text, call), (second, other_text, other_call) = sorted(calls, key=lambda call: call[0])
        keys = [key for key in {**call, **other_call} if call.get(key) != other_call.get(key)]
        keys = keys[:1] if "operation" in keys else keys  # other differences follow from it
        what = ", ".join(f"{key} {call.get(key)} against {other_call.get(key)}" for key in keys)
        ranks = [self.world[first], self.world[second]]
        both = f"{self._names(ranks[:1])} called {text} but {self._names(ranks[1:])} called {other_text}"
        differ = f"they differ in {what or 'calls that are no longer recorded'}"
        return CollectiveMismatch(f"{both}: {differ}", ranks=ranks, call=group, expected=text, got=other_text)

    def _shared(self, failure: KosError, lost: bool, work: Any) -> KosError:
        """The failure of ``work`` as the other ranks raise it; ``lost``: this rank's device is unusable.

        The text of a send or receive names only the peer, so the name of this rank is put in front.
        """
        shared, mine = failure, [self.world[self.rank]]
        me, known = self._names(mine), self._reported()
        if known is not None and str(failure) == sentence(work, f"{known}"):  # another rank's failure keeps its text
            shared = again(known)
        elif lost:
            shared = RankLost(f"{me} is gone: {failure}", ranks=mine)
        elif isinstance(failure, CudaError | Interrupted) or (type(failure) is CollectiveError and failure.__cause__):
            # Others must not mistake it for an error of their own.
            shared = CollectiveError(f"{me}: {failure}", ranks=mine)
        elif not work.collective and str(failure).startswith(str(work)):
            shared = again(failure, f"{me}: {failure}")
        self.status.post_failure(shared)
        return shared

    def _reported(self) -> KosError | None:
        """The failure that a rank of the group has reported; None if this rank knows of none."""
        if self.reported is not None:
            return self.reported[1]
        known = None if (ring := self.ring) is None else ring.failure()
        return None if known is None else known[0]

    def end(self, reason: str, cause: KosError | None) -> KosError:
        """The failure that the other ranks raise if this one closes now, because of ``cause`` if that is given."""
        return self.lost(self.rank, reason, None, cause, 0.0)

    def suspects(self) -> list[int]:
        """The ranks of this group that are known to have ended or failed; ended ones first."""
        others = [rank for rank in range(len(self.world)) if rank != self.rank]
        gone = [rank for rank in others if rank in self.ends or self.status.ended(self.world[rank])]
        return gone + [rank for rank in others if rank not in gone and self._failure_of(self.world[rank]) is not None]

    def names(self, ranks: Sequence[int], several: bool = True) -> str:
        """``ranks [1, 3]``, or ``rank 1`` if not ``several``: these ranks of the group, as ranks of the world.

        ``host b (ranks [1, 3])`` if these are all ranks of a host, and several.
        """
        return self._names(self.in_world(ranks), several)

    def _names(self, world: Sequence[int], several: bool = False) -> str:
        text, hosts = self._ranks(world, several), self._whole_hosts(world)
        return f"{' and '.join(hosts)} ({text})" if hosts else text

    def _ranks(self, world: Sequence[int], several: bool = False) -> str:
        text = f"ranks {list(world)}" if several or len(world) != 1 else f"rank {world[0]}"
        return f"{text} of world" if self.group_suffix else text

    def _whole_hosts(self, world: Sequence[int]) -> list[str]:
        """The names of the hosts, each with several ranks, that have these ranks and no others."""
        hosts = dict.fromkeys(self.status.hosts.get(rank, ("", ())) for rank in world)
        whole = all(len(ranks) > 1 for _, ranks in hosts) and sum(len(ranks) for _, ranks in hosts) == len(world)
        return [name for name, _ in hosts] if whole else []

    def _where(self, world: Sequence[int]) -> str:
        """``; rank 2 is on host b``: the hosts of ranks that are not named by their hosts; "" in a job of one host."""
        on = dict[str, list[int]]()
        for rank in () if self._whole_hosts(world) else world:
            if rank in self.status.hosts:
                on.setdefault(self.status.hosts[rank][0], []).append(rank)
        return "".join(f"; {self._ranks(r)} {'is' if len(r) == 1 else 'are'} on {host}" for host, r in on.items())

    def _failure_of(self, rank: int, window: float | None = None) -> KosError | None:
        known = self.status.failure(rank)
        window = self.timeout + RECENT_SECONDS if window is None else window
        return None if known is None or known[1] >= window else known[0]

    def _blocking(self, late: list[int], arrived: Sequence[int]) -> tuple[list[int], list[int]]:
        """The ranks, among the ``late`` ones and those they wait for, transitively, that do not wait themselves.

        The second list is empty unless all of them wait, and one of them for this rank.  Then the first list is
        ``late``, and the second has all ranks of that cycle.
        """
        me = self.world[self.rank]
        seen, todo, culprits, cycle, silent = {me}, list(late), list[int](), False, None
        while todo:
            rank = todo.pop(0)
            if rank in seen:
                continue
            seen.add(rank)
            if not self.status.sees(rank):
                silent = self.status.ask()
            awaited: Iterable[int] | None = self.status.awaited(rank)
            if awaited is None and (failure := self._failure_of(rank)) is not None:
                awaited = None if rank in failure.ranks else failure.ranks  # it failed because of those
            if awaited is None and not (rank in arrived and self.status.runs(rank)):
                culprits.append(rank)
            elif awaited is None:
                todo += late
            else:
                cycle = cycle or me in awaited
                todo += awaited
        if silent is not None and silent not in culprits and not all(map(self.status.sees, culprits)):
            return [silent], []  # it is stopped: its hub has not forwarded the query
        halted = [rank for rank in culprits if self.status.halted(rank)]  # for which others may wait unseen
        if found := sorted(halted or culprits):
            return found, []
        return list(late), sorted(seen) if cycle else []
