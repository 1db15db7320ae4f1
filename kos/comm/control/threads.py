"""Ranks that are threads of one process: their shared state, and their rendezvous."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

from kos.comm import timeouts
from kos.comm.control.base import ControlPlane
from kos.comm.control.grow import MembershipChange, misfit
from kos.comm.failures import FailureLog
from kos.comm.peer_status import PeerStatus
from kos.errors import BackendUnavailable, KosError, RendezvousError

T = TypeVar("T")
THREADS = "threads:"
"""The beginning of the address of a group of threads."""
_numbers = itertools.count()
_groups: weakref.WeakValueDictionary[str, ThreadGroup] = weakref.WeakValueDictionary()  # by address
Waits = list[tuple[str, list[int]]]
"""Operations in flight, and for each the world ranks that it waits for."""


RANK_THREAD = "kos-rank "
"""The beginning of the name of a rank's thread in ``kos.testing.spawn``."""


def rank_thread(run: Callable[[int], None], rank: int) -> threading.Thread:
    """The thread of a rank, which runs ``run(rank)``."""
    return threading.Thread(target=run, args=(rank,), name=f"{RANK_THREAD}{rank}", daemon=True)


class ThreadWorld:
    """The state shared by all threads of one ``spawn``: a lock, a condition per rank, and what is known of each."""

    def __init__(self, size: int, watch: Any = None, earlier: ThreadWorld | None = None) -> None:
        self.lock: threading.RLock = threading.RLock() if earlier is None else earlier.lock
        """Worlds that follow one another share it, because newcomers may wait for any of them."""
        self.single = False  # a process without a launcher, which no newcomer can reach
        self.watch = watch  # ``kos.testing.watch.Watch`` in tests
        self.failure: KosError | None = None  # a deadlock, which every rank raises in any group
        self.wakeup = [threading.Condition(self.lock) for _ in range(size)]
        self.events = [0] * size  # counts wake-ups, so that none is missed between a poll and a wait
        known = PeerStatus()
        self.ends = known.ends  # why a rank has ended
        self.successors: list[tuple[ThreadWorld, list[int]]] = []  # the worlds of groups that have grown; their ranks
        self.statuses = [PeerStatus(rank, known) for rank in range(size)]  # a rank's groups share its status

    def notify(self, ranks: list[int]) -> None:
        """Wake ranks that may be waiting; the caller holds the lock."""
        for rank in ranks:
            self.events[rank] += 1
            self.wakeup[rank].notify_all()

    def wake(self, rank: int) -> None:
        """Wake the threads of ``rank`` that wait."""
        with self.lock:
            self.notify([rank])

    def wait(self, rank: int, seconds: float | None, waits_for: Callable[[], Waits]) -> None:
        """Wait for an event of ``rank``, at most ``seconds``; the caller holds the lock."""
        if self.watch is not None:
            seconds = self.watch.begin_wait(self, rank, seconds, waits_for)
        try:
            self.wakeup[rank].wait(seconds)
        finally:
            if self.watch is not None:
                self.watch.end_wait()

    def fail(self, failure: KosError) -> None:
        """Make every rank that waits, in any group, raise a copy of the error; the caller holds the lock."""
        self.failure = self.failure or failure
        self.notify(list(range(len(self.wakeup))))

    def end(self, rank: int, why: str) -> None:
        """Record that rank ``rank`` has ended."""
        with self.lock:
            self.ends.setdefault(rank, why)
            self.notify(list(range(len(self.wakeup))))
        for world, members in self.successors:
            if rank in members:
                world.end(members.index(rank), why)


class ThreadGroup:
    """A group of ranks that are threads of this process.

    Failures of its ranks, and the reasons of those that aborted or closed it, are in their failure logs, as on other
    backends; a report goes to the log of each.  The ends of threads are in ``world.ends``.
    """

    def __init__(self, size: int, world: ThreadWorld | None = None, members: list[int] | None = None) -> None:
        self.size = size
        self.world = world or ThreadWorld(size)
        self.members = members if members is not None else list(range(size))  # world ranks
        self.logs = [FailureLog(self.members, r, self.world.statuses[m]) for r, m in enumerate(self.members)]
        self._shared: dict[Any, Any] = {}
        self.left_out: set[int] = set()  # ranks that the others have continued without
        self.joining: dict[int, dict[str, Any]] = {}  # the hello of each newcomer that waits; the answer is added to it
        self.answered = threading.Condition(self.world.lock)  # of newcomers
        self.address = f"{THREADS}{next(_numbers)}"
        _groups[self.address] = self

    def shared(self, key: Any, make: Callable[[], T]) -> T:
        """The object of that key, the same on all ranks; the first call makes it."""
        with self.world.lock:
            if key not in self._shared:
                self._shared[key] = make()
            return cast(T, self._shared[key])

    def forget(self, key: Any, known: object) -> None:
        """Let ``shared`` make another object of that key than ``known``; the caller holds the lock of the world."""
        if self._shared.get(key) is known:
            del self._shared[key]

    def answer(self, newcomer: int, **answer: Any) -> None:
        """Send a newcomer its answer, which ends its wait; the caller holds the lock of the world."""
        self.joining.pop(newcomer).update(answer)
        self.answered.notify_all()

    def succeed(self, earlier: ThreadGroup) -> None:
        """Take over the address and the newcomers of an earlier group; the caller holds the lock of both worlds."""
        self.address, self.joining, self.answered = earlier.address, earlier.joining, earlier.answered
        _groups[self.address] = self

    def for_each_log(self, call: Callable[[FailureLog], None]) -> None:
        """Call ``call`` with the failure log of each rank, and wake all ranks."""
        with self.world.lock:
            for log in self.logs:
                call(log)
            self.notify_all()

    def fail(self, failure: KosError) -> None:
        """Make every rank raise the failure in its current exchange and in later ones.  Only the first is kept."""

        def record(log: FailureLog) -> None:
            log.over = log.over or failure.copy()

        self.for_each_log(record)

    def notify_all(self) -> None:
        self.world.notify(self.members)

    def raise_reported(self, failures: FailureLog, sequence: int | None) -> None:
        """Raise if all groups have failed, or this one in collective ``sequence`` (None: in any) or earlier."""
        if self.world.failure is not None:
            raise self.world.failure.copy()
        if failures.earliest is not None and (sequence is None or failures.earliest[0] <= sequence):
            failures.raise_reported(None)  # with ``sequence`` also for a rank that is gone, for which only some wait

    def wait(self, rank: int, deadline: float, what: str, missing: list[int]) -> bool:
        """Wait for an event in ``what``, in which group ranks ``missing`` have not arrived; False at the deadline.

        The caller holds the lock of the world.
        """
        if (remaining := deadline - time.monotonic()) <= 0:
            return False
        waits = [(what, [self.members[r] for r in missing])]
        self.world.wait(self.members[rank], remaining, lambda: waits)
        return True

    def raise_end(self, rank: int, failures: FailureLog, what: object = None) -> None:
        """Raise, for ``what``, if group rank ``rank`` has aborted or closed this group, or its thread has ended.

        If the rank aborted or closed the group, it gave a reason, which the error has.  Its thread ends at some later
        time.  So the reason why the thread ended is used only if the rank gave none, because it crashed.
        """
        _, why, cause = failures.left.get(rank, (0, "", None))
        if why := why or self.world.ends.get(self.members[rank], ""):
            raise failures.lost(rank, why, what, cause)


class ThreadControlPlane(ControlPlane):
    """Ranks are threads of one process (the mock backend, users' tests)."""

    def __init__(self, group: ThreadGroup, rank: int, timeout: float = 120.0, host: str | None = None) -> None:
        self.rank, self.size, self.timeout, self.host = rank, group.size, timeout, host
        self.threads: ThreadGroup = group
        self._slots: dict[int, dict[int, bytes]] = group.shared("exchanges", dict)
        self._failures, group.logs[rank].timeout = group.logs[rank], timeout

    def _exchange(self, message: bytes) -> list[bytes]:
        group, number, deadline = self.threads, self._exchanges, time.monotonic() + self.timeout
        with self.waiting(), group.world.lock:
            slots = self._slots.setdefault(number, {})
            slots[self.rank] = message
            group.notify_all()
            while missing := [rank for rank in range(self.size) if rank not in slots]:
                if (failure := group.world.failure or self.failures.over) is not None:
                    raise failure.copy()
                for rank in missing:
                    group.raise_end(rank, self.failures, "rendezvous")
                if not group.wait(self.rank, deadline, "rendezvous", missing):
                    group.fail(self.absent(missing))  # late ranks must not join another exchange
            # All ranks have completed the previous exchange, since they are in this one.
            self._slots.pop(number - 1, None)
            return [slots[rank] for rank in range(self.size)]

    def _report(self, failure: KosError) -> None:
        self.threads.fail(self.failures.lost(self.rank, "", None, failure))

    def split(self, color: int | None, key: int = 0) -> ControlPlane | None:
        ranks = self._alike(color, key)
        if not ranks:
            return None
        parent = self.threads
        members = [parent.members[r] for r in ranks]
        child = parent.shared(("split", self._exchanges, color), lambda: ThreadGroup(len(ranks), parent.world, members))
        return self._child(child, child.members.index(self.failures.world[self.rank]))

    def check_change(self, call: str) -> None:
        if self.threads.world.single and call != "shrink":
            wanted = "a launcher, or RANK=0 WORLD_SIZE=1, by which newcomers reach this process"
            raise BackendUnavailable(f"{call}: expected {wanted}, got a group of one without them")

    @property
    def address(self) -> str:
        return self.threads.address

    def newcomers(self) -> int:
        with self.threads.world.lock:
            return len(self.threads.joining)

    def change(
        self, call: str, newcomers: int | None = 0, whole: bool = False,
        terms: Mapping[str, Any] = MappingProxyType({}), began: float | None = None,
    ) -> ControlPlane:  # fmt: skip
        """The ranks that call share what each one calls; whichever rank finds the change complete makes the group."""
        group = self.threads
        mine = MembershipChange(self.failures, range(self.size), self.timeout, call, newcomers, whole, terms, began)
        with self.waiting(), group.world.lock:
            if self.rank in group.left_out:
                raise mine.out(self.rank)
            calls, outcome = attempt = group.shared("change", lambda: (dict[int, MembershipChange](), list[Any]()))
            calls[self.rank] = mine
            group.notify_all()
            while not outcome:
                try:
                    self._advance(calls, outcome)
                except KosError as error:
                    outcome.append(error.copy())
            group.forget("change", attempt)
            group.notify_all()
            if isinstance(result := outcome[0], KosError):
                raise result.copy()
            return self._child(result, sorted(calls).index(self.rank))

    def _advance(self, calls: dict[int, MembershipChange], outcome: list[Any]) -> None:
        """Add the new group to ``outcome`` if the change of the ranks that have called is complete; else wait."""
        group, leader = self.threads, min(calls)
        if group.world.failure is not None:
            raise group.world.failure.copy()
        change = calls[leader]
        for rank, theirs in calls.items():
            change.check_call(leader, rank, theirs.call)
        change.deadline = min(theirs.deadline for theirs in calls.values())
        absent = {*range(self.size)}.difference(calls, group.left_out, change.left_out)
        missing = [rank for rank in sorted(absent) if group.members[rank] not in group.world.ends]
        change.check_lost(absent.difference(missing), group.world.ends)  # a rank that calls later finds the same
        if not missing:
            for newcomer, hello in list(group.joining.items()):
                if problem := misfit(hello, change.terms):
                    group.answer(newcomer, refused=problem)
            if len(group.joining) >= (wanted := change.wanted(calls)):
                outcome.append(self._complete(change, sorted(calls), wanted))
                return
        if time.monotonic() <= (until := change.waits_until(missing)):
            group.wait(self.rank, until, change.call, missing)
        elif missing:
            change.leave_out(missing)
        else:
            raise change.too_few(len(group.joining), wanted, self.address)

    def _complete(self, change: MembershipChange, ranks: list[int], newcomers: int) -> ThreadGroup:
        """The group of these ranks and of the newcomers that have waited longest."""
        group = self.threads
        group.left_out |= change.left_out.difference(ranks)
        members = [group.members[rank] for rank in ranks]
        if change.call == "shrink":
            made = ThreadGroup(len(members), group.world, members)
        else:
            made = ThreadGroup(size := len(members) + newcomers, ThreadWorld(size, earlier=group.world))
            group.world.successors.append((made.world, members))
        made.succeed(group)
        for place, each in enumerate([*group.joining][:newcomers], len(members)):
            group.answer(each, group=made, rank=place, terms=change.terms, timeout=change.timeout, call=change.call)
        return made

    def _child(self, group: ThreadGroup, rank: int) -> ControlPlane:
        child = ThreadControlPlane(group, rank, self.timeout, self.host)
        child.call = self.call
        if group.world is self.threads.world:
            child.failures.status = self.failures.status
        return child


def join_threads(address: str, hello: dict[str, Any], timeout: float) -> tuple[ThreadControlPlane, dict[str, Any]]:
    """The group of threads that admits this one, and the terms that it sends.  Raises RendezvousError."""
    if (group := _groups.get(address)) is None:
        raise RendezvousError(f"join: expected the address of a group of this process, got {address!r}")
    with group.world.lock:
        group.joining[me := next(_numbers)] = hello
        _groups.get(address, group).notify_all()  # the group that has followed it, if there is one
        try:
            if not group.answered.wait_for(lambda: me not in group.joining, timeout):
                waited = "its ranks have not called grow or replace"
                raise RendezvousError(timeouts.not_admitted(address, timeout, waited))
        finally:  # also if this thread is interrupted
            group.joining.pop(me, None)
    if "refused" in hello:
        raise RendezvousError(f"join: {hello['refused']}")
    rendezvous = ThreadControlPlane(hello["group"], hello["rank"], hello["timeout"])
    rendezvous.call = hello["call"]
    return rendezvous, dict(hello["terms"])


def single_rendezvous(timeout: float = 120.0) -> ThreadControlPlane:
    """A group of one."""
    group = ThreadGroup(1)
    group.world.single = True
    return ThreadControlPlane(group, 0, timeout)
