"""The failure log of a group.  It decides which failure a rank raises, and which ranks an error names.

Two rules decide which failure a rank raises.  If a group has several failures, the one in the earliest collective
counts.  A cause takes precedence over its consequences: an error does not name a rank that is closed, late or waiting
because of another rank.  So every rank of a job names the ranks that failed first.

Backends, transports, the watchdog and the control plane **report** failures to the log.  Code that may have to raise
calls ``raise_reported``; on threads, it calls ``raise_reported`` and ``raise_end`` of ``ThreadGroup``.  The *reporters*
of the log carry reports to the other ranks, and receive theirs.  A reporter is the shared memory of a host, a
transport, or the hub.  ``peer_status.py`` has the ranks that each rank waits for, and the last failure of each rank in
any group.

Callers pass ranks of the group; errors name ranks of the world.  ``KosError.ranks`` holds them for programs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kos.comm import timeouts
from kos.comm.peer_status import PeerStatus
from kos.comm.waits import wait
from kos.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CudaError,
    KosError,
    OutOfMemory,
    RankLost,
    in_words,
    sentence,
)

RECENT_SECONDS = 10.0
"""A failure of a rank that is older than this, in seconds, is not the reason why its process ended.

For a rank that is closed or late, the limit is the timeout of the wait plus this number.
"""


_UNNAMED = (CollectiveMismatch, CollectiveTimeout, RankLost)  # transports raise these without the name of the call

SHOWN_CALLS = 4
"""An error shows the last call of at most this many late ranks."""

HOST_SECONDS = 0.05
"""When a rank is lost: how long to wait for the ends of the other ranks of its host, in seconds."""

DEATHS = ("its connection was closed", "its process ended")
"""The reasons for the loss of a rank whose process ended without a report."""

WHY_CLOSED = "it closed its communicator"
"""The reason for the loss of a rank that called ``close``.  It is a failure only for a rank that waits for it."""


class EndedEarly(RankLost):
    """Work on a GPU ended early because of a failure that another rank or another thread reports."""

    unexplained: type[KosError] = RankLost
    """The error to raise if no such report arrives."""


class PendingRanks(NamedTuple):
    """What a backend knows of the ranks that delay a call."""

    ranks: Sequence[int] = ()
    words: str | None = None
    """A text of ``timeouts.py`` that says how they are late, or that they are not known."""
    arrived: Sequence[int] = ()
    """Ranks that have begun the call.  They may wait for a CUDA stream, and no rank reports such a wait."""
    elsewhere: Sequence[int] = ()
    """World ranks for which this rank waits in other groups."""
    others: Sequence[int] = ()
    """If nothing else is known: the ranks of which some are late."""
    all_wait: bool = False
    """Whether every rank that has begun the call waits in it, so that a rank that does not wait is late."""
    may_be_complete: bool = False
    """Whether ranks of ``others`` may have completed the call, so that a rank that does not wait need not be late."""
    absent: bool = False
    """Whether ``ranks`` are known not to have begun the call."""


class FailureLog:
    """The failures of one group, whose rank r is rank ``world[r]`` of the world.

    If the two numbers differ, an error calls a rank that failed ``rank 2 of world``, and a rank in the arguments of a
    call ``rank 1 of the group``.
    """

    __slots__ = ("__dict__", "__weakref__", "first")  # the core reads it

    def __init__(
        self, world: Sequence[int], rank: int, status: PeerStatus | None = None, timeout: float = 120.0
    ) -> None:
        self.world, self.rank, self.timeout = list(world), rank, timeout
        self.status = status or PeerStatus(self.world[rank])
        self.first: KosError | None = None
        """The error that further calls of this rank raise, because a call failed and the ranks are out of step."""
        self.over: KosError | None = None
        """The error that further exchanges of the control plane raise, because one failed or the group is closed."""
        self.earliest: tuple[int, KosError] | None = None
        """The earliest collective in which a rank is known to have failed, and its error."""
        self.left: dict[int, tuple[int, str, KosError | None]] = {}
        """The ranks that have left the group: the first collective that each does not begin, why, and the cause."""
        self.ring: Any = None
        """The calls and reports in the shared memory of this rank's host (``FingerprintRing``), if there is one."""
        self.owner: Callable[[], Any] = lambda: None
        """A weak reference to the communicator."""
        self.reporters: list[Any] = []
        """Objects that carry reports to other ranks, with ``report_failure``, ``report_end`` and ``find_failure``."""
        self._sent: int | None = None  # the earliest collective whose failure the reporters have carried
        self._lock = threading.RLock()  # the watchdog reports too; reentrant for the garbage collector
        self._alone: set[int] = set()  # lost ranks of hosts that have other ranks

    @property
    def group_suffix(self) -> str:
        """The text after a rank of this group in the arguments of a call."""
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
        """Record that a rank failed in collective ``sequence``.  Only the earliest collective is kept."""
        with self._lock:
            if self.earliest is None or sequence < self.earliest[0]:
                self.earliest = sequence, error

    def record_left(self, rank: int, sequence: int, why: str, cause: KosError | None = None) -> None:
        """Record that the rank begins neither collective ``sequence`` nor a later one."""
        self.left.setdefault(rank, (sequence, why, cause))

    def report(self, work: Any, error: KosError, begun: int, lost: bool = False) -> None:
        """Report to the other ranks that ``work`` failed, which ends the group; None: a call that is no Work yet.

        ``begun`` is the number of collectives that this rank has begun.  ``lost`` is True if its device is unusable.
        """
        sequence = work.sequence if work is not None and work.collective and work.sequence >= 0 else begun
        self.first = self.first or error.copy()
        shared = self._shared(error, lost, work)
        self.record(sequence, shared)
        with self._lock:
            earlier, self._sent = self._sent, sequence if self._sent is None else min(self._sent, sequence)
        if earlier is None or sequence < earlier:  # other ranks may wait in an earlier collective
            for reporter in self.reporters.copy():
                reporter.report_failure(shared, sequence)

    def report_end(self, reason: str, sequence: int) -> None:
        """Report to the other ranks that this one begins neither collective ``sequence`` nor a later one."""
        cause = self.cause()
        for reporter in self.reporters.copy():
            reporter.report_end(sequence, reason, cause)

    def add_reporter(self, reporter: Any) -> None:
        if reporter not in self.reporters:
            self.reporters.append(reporter)

    def cut_short(self) -> None:
        """Record that a signal handler has ended a step of this group half-way.  Its communicator is aborted next."""
        self.status.cut_short.append(self)

    # Questions.

    def raise_reported(self, sequence: int | None, what: object = None, begun: bool = False) -> None:
        """Raise the reported failure, if any, that ends collective ``sequence`` (None: any message) of this group.

        ``begun``: all ranks have begun it.  Then the end of a process raises nothing, because that rank may have
        completed it.
        """
        if self.earliest is not None and (sequence is None or self.earliest[0] <= sequence):
            raise self.earliest[1].copy()
        if sequence is not None:
            for rank, (first, why, cause) in self.left.copy().items():
                if first <= sequence and not (begun and first == 0 and why in DEATHS):
                    raise self.lost(rank, why, what, cause) if self.earliest is None else self.earliest[1].copy()

    def refuse(self, what: object) -> None:
        """Raise the first failure, if there is one, in a later call, ``what``."""
        if self.first is not None:
            raise self.first.copy(sentence(what, f"{self.first}", "the communicator failed before: "))

    def find(self) -> KosError | None:
        """The failure of this group, if it can be found without a call.  The watchdog's thread uses this."""
        return self.first or next(filter(None, (each.find_failure() for each in self.reporters.copy())), None)

    def cause(self) -> KosError | None:
        """The failure because of which this rank closes the group: in this group, in any group, or a killed rank."""
        for known in (self.first, self.status.last):
            if known is not None and known.ranks:
                return known
        killed = None if (ring := self.ring) is None else ring.killed()
        return None if killed is None else self.ended(killed)

    def closing(self) -> KosError | None:
        """The last failure of this rank in any group.  It is the cause if the rank now closes a group."""
        last = self.status.last
        return last if last is not None and last.ranks else None

    def show_wait(self, late: PendingRanks | None) -> None:
        """Show the other ranks of this host which ranks this one waits for; None: it waits for no rank."""
        if late is None:
            return self.status.post_wait(None)
        known, others = self.in_world(late.ranks) or late.elsewhere, self.in_world(late.others)
        # Few ranks are shown, so those that wait for no other rank come first.
        sees, awaited = self.status.sees, self.status.awaited
        self.status.post_wait(known or sorted(others, key=lambda rank: sees(rank) and awaited(rank) is not None))
        self.status.receive_notices()

    # Errors and their causes.

    def as_own(self, error: Exception, what: object = None) -> KosError:
        """An error of this rank alone, as all ranks raise it in the call ``what``: it names this rank."""
        if isinstance(error, KosError) and error.ranks:
            return error
        me, lacks = [self.world[self.rank]], isinstance(error, MemoryError)
        kind = OutOfMemory if lacks else type(error) if isinstance(error, KosError) else CollectiveError
        words = (str(error) or "out of host memory") if lacks else in_words(error)
        own = kind(f"{self._names(me)}: {words}", ranks=me, call=what)
        own.__cause__ = error
        return own

    def named(self, work: Any, error: Exception) -> KosError:
        """``error`` as an error of kos that names ``work``."""
        if isinstance(error, MemoryError):
            return self.as_own(error, work)
        if not isinstance(error, KosError):
            named = CollectiveError(f"{type(error).__name__}: {error}".removesuffix(": "), call=work)
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
        """The error of the call ``what``, which waits for a lost rank.  It names the cause of the loss, if known.

        The cause is ``cause``, or else a failure of that rank within the last ``window`` seconds.  If the rank closed
        its communicator in order, only ``cause`` counts.
        """
        world = self.world[rank]
        cause = cause or self._failure_of(world, 0.0 if why == WHY_CLOSED else window)
        if isinstance(cause, RankLost) and cause.ranks == (world,):  # its own report
            return cause.copy(None, what, cause)
        if cause is not None:
            return cause.copy(f"{cause}; {self._names([world])} aborted because of it", what, cause)
        ranks = self.ended_with(rank) if why in DEATHS else [world]
        lost = RankLost(f"{self._names(ranks)} is gone: {why}{self._where(ranks)}", ranks=ranks, call=what)
        lost.orderly = why == WHY_CLOSED
        return lost

    def ended_with(self, rank: int, progress: Callable[[], None] = lambda: None) -> Sequence[int]:
        """The world ranks that were lost together with that rank.

        If the rank is on another host and all ranks of that host ended, these are all of them.  Otherwise it is that
        rank only.  Waits for the ends of the others for at most HOST_SECONDS, and calls ``progress`` meanwhile.
        """
        world, status = self.world[rank], self.status
        _, ranks = status.hosts.get(world, ("", (world,)))
        if len(ranks) == 1 or self.world[self.rank] in ranks:
            return [world]

        def decided() -> bool:
            if all(map(status.ended, ranks)) or rank in self._alone or not status.is_connected:
                return True
            progress()
            return False

        wait(decided, time.monotonic() + HOST_SECONDS)
        if not all(map(status.ended, ranks)):
            self._alone.add(rank)
            return [world]
        first = all(self._failure_of(each) is None for each in ranks)  # no rank ended because of another one
        return ranks if first else [world]

    def timeout_error(
        self, late: PendingRanks, what: object, seconds: float | None = None, kind: type[KosError] = CollectiveTimeout
    ) -> KosError:
        """The error of the call ``what`` at its timeout.  It names the ranks that block those that are ``late``.

        Its ``unasked`` has the ranks that this one could not ask for which ranks they wait.
        """
        self.status.announce_wait()
        if late.others and not late.ranks and not late.elsewhere:
            error = self.timeout_error(PendingRanks(late.others), what, seconds, kind)
            halted, awaited = self.status.halted, self.status.awaited
            certain = all(halted(rank) or (late.all_wait and awaited(rank) is None) for rank in error.ranks)
            runs = [] if error.cause is not None else [rank for rank in error.ranks if not halted(rank)]
            clear = len(runs) <= 1  # if several running ranks do not wait, some of them may have completed the call
            # A running rank that has failed since this call began may have ended the call at its own timeout.
            since = (self.timeout if seconds is None else seconds) + RECENT_SECONDS
            left = any(self.status.failed_within(rank, since) for rank in runs)
            known = (certain or len(error.ranks) < len(late.others)) and (clear or not late.may_be_complete)
            if error.ranks and not left and known:
                return error
        world = [*self.in_world(late.ranks), *late.elsewhere]
        for rank in world:
            if (cause := self._failure_of(rank)) is not None:
                return cause.copy(f"{cause}; {self._names([rank])} failed because of it", what, cause)
        culprits, cycle, unasked, hub = self._root_causes(world, self.in_world(late.arrived))
        waiting = [rank for rank in world if rank not in culprits and rank not in unasked]
        if culprits == world and late.words is not None:
            text = late.words
        else:
            verb = timeouts.ARRIVE if late.absent and set(culprits) <= set(world) else timeouts.GO_ON
            text = timeouts.late(self._names(culprits, True), verb)
            text += timeouts.awaited_by(self._ranks(waiting, True)) if waiting else ""
        text += self._where(culprits)
        if unasked:
            text += f"; {timeouts.unasked(self._ranks(unasked, True), self._names(hub))}"
        calls = [self.status.last_call(rank) for rank in cycle if rank != self.world[self.rank]]
        if cycle and (late.words is None or any(calls)):  # otherwise the words say what is known
            one_group = all(f"{what}".startswith(call.partition(" ")[0] + " ") for call in calls if call)
            text += f"; {timeouts.cycle(self._ranks(cycle, True), one_group)}"
        for rank in culprits[:SHOWN_CALLS]:
            call = self.status.last_call(rank)
            if call and not f"{what} ".startswith(call.partition(" at ")[0] + " "):  # it has not begun ``what``
                text += f"; {timeouts.last_called(self._names([rank]), call)}"
        over = "" if seconds is None else f"{timeouts.incomplete(seconds)}; "
        error = kind(over + text, ranks=culprits, call=what)
        error.unasked = tuple(unasked)
        return error

    def mismatch(self, group: str, *calls: tuple[int, str, dict[str, Any]]) -> CollectiveMismatch:
        """The error of two calls that differ.  A call is given as its rank, text and fingerprint."""
        (first, text, call), (second, other_text, other_call) = sorted(calls, key=lambda call: call[0])
        keys = [key for key in {**call, **other_call} if call.get(key) != other_call.get(key)]
        keys = keys[:1] if "operation" in keys else keys  # other differences follow from it
        what = ", ".join(f"{key} {call.get(key)} against {other_call.get(key)}" for key in keys)
        differ = f": they differ in {what or 'calls that are no longer recorded'}"
        return self.other_calls((first, text), (second, other_text), differ, group)

    def other_calls(
        self, first: tuple[int, str], second: tuple[int, str], differ: str = "", group: str | None = None
    ) -> CollectiveMismatch:
        """The error of two ranks that made different calls.  A call is given as its rank and text."""
        (one, call), (other, other_call) = first, second
        both = f"{self.names([one], False)} called {call} but {self.names([other], False)} called {other_call}{differ}"
        return CollectiveMismatch(both, ranks=self.in_world([one, other]), call=group, expected=call, got=other_call)

    def _shared(self, failure: KosError, lost: bool, work: Any) -> KosError:
        """The failure of ``work`` as the other ranks raise it.  ``lost`` is True if this rank's device is unusable.

        The text of a send or receive names only the peer, so the name of this rank is put in front.
        """
        shared, mine = failure, [self.world[self.rank]]
        me, known = self._names(mine), self._reported()
        if known is not None and str(failure) == sentence(work, f"{known}"):  # another rank's failure keeps its text
            shared = known.copy()
        elif lost:
            shared = RankLost(f"{me} is gone: {failure}", ranks=mine)
        elif isinstance(failure, CudaError) or (type(failure) is CollectiveError and failure.__cause__):
            # Others must not mistake it for an error of their own.
            shared = CollectiveError(f"{me}: {failure}", ranks=mine)
        elif work is not None and not work.collective and str(failure).startswith(str(work)):
            shared = failure.copy(f"{me}: {failure}")
        self.status.post_failure(shared)
        return shared

    def _reported(self) -> KosError | None:
        """The failure that a rank of the group has reported; None if this rank knows of none."""
        if self.earliest is not None:
            return self.earliest[1]
        known = None if (ring := self.ring) is None else ring.failure()
        return None if known is None else known[0]

    def end(self, reason: str, cause: KosError | None) -> KosError:
        """The failure that the other ranks raise if this one closes now, because of ``cause`` if there is one."""
        return self.lost(self.rank, reason, None, cause, 0.0)

    def suspects(self) -> list[int]:
        """The ranks of this group that are known to have ended or failed; ended ones first."""
        others = [rank for rank in range(len(self.world)) if rank != self.rank]
        gone = [rank for rank in others if rank in self.left or self.status.ended(self.world[rank])]
        return gone + [rank for rank in others if rank not in gone and self._failure_of(self.world[rank]) is not None]

    def names(self, ranks: Sequence[int], several: bool = True) -> str:
        """These ranks of the group in words, as ranks of the world: ``ranks [1, 3]``, or ``rank 1``.

        With ``several``, one rank is ``ranks [1]``.  If these are all ranks of a host that has more than one, the text
        is ``host b (ranks [1, 3])``.
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
        """A text such as ``; rank 2 is on host b``; "" if the text already names the hosts, or the job has one host."""
        on = dict[str, list[int]]()
        for rank in () if self._whole_hosts(world) else world:
            if rank in self.status.hosts:
                on.setdefault(self.status.hosts[rank][0], []).append(rank)
        return "".join(f"; {self._ranks(r)} {'is' if len(r) == 1 else 'are'} on {host}" for host, r in on.items())

    def _failure_of(self, rank: int, window: float | None = None) -> KosError | None:
        """The last failure of that rank, if it names ranks and is less than ``window`` seconds old; else None."""
        known = self._recent(rank, window)
        return known if known is not None and known.ranks else None

    def _recent(self, rank: int, window: float | None = None) -> KosError | None:
        """As ``_failure_of``, but also a timeout that names no ranks, if the rank has made no other call since."""
        known = self.status.failure(rank)
        window = self.timeout + RECENT_SECONDS if window is None else window
        return None if known is None or known[1] >= window else known[0]

    def _root_causes(self, late: list[int], arrived: Sequence[int]) -> tuple[list[int], ...]:
        """The ranks, among the ``late`` ones and those they wait for, transitively, that do not wait themselves.

        The second list is empty unless all of them wait, and one of them for this rank.  Then the first list is
        ``late``, and the second has all ranks of that cycle.

        If the hub does not forward queries, the fourth list has the ranks to name for that (``PeerStatus.query``).  The
        first list then has these ranks, and those that are known to be gone or stopped.  The third list has the ranks
        of other hosts that could not be asked: they may be late, or wait.
        """
        me = self.world[self.rank]
        seen, todo, culprits, cycle, silent = {me}, list(late), list[int](), False, list[int]()
        while todo:
            rank = todo.pop(0)
            if rank in seen:
                continue
            seen.add(rank)
            if not self.status.sees(rank):
                silent = self.status.query()
            awaited: Iterable[int] | None = self.status.awaited(rank)
            if awaited is None and (failure := self._recent(rank)) is not None:
                awaited = None if rank in failure.ranks else failure.ranks  # it failed because of those
            if awaited is None and not (rank in arrived and self.status.runs(rank)):
                culprits.append(rank)
            elif awaited is None:
                todo += late
            else:
                cycle = cycle or me in awaited
                todo += awaited
        halted = [rank for rank in culprits if self.status.halted(rank)]  # for which others may wait unseen
        hidden = [rank for rank in culprits if not self.status.sees(rank)]
        if silent and hidden:
            known = {*silent, *halted}
            return sorted(known), [], sorted({*hidden} - known), silent
        if found := sorted(halted or culprits):
            return found, [], [], []
        return list(late), sorted(seen) if cycle else [], [], []
