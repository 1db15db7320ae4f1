"""Ranks that are threads of one process: their shared state, and their rendezvous."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kos.comm.control.base import Rendezvous
from kos.comm.failures import WHY_CLOSED, FailureLog
from kos.comm.peer_status import PeerStatus
from kos.comm.records import again
from kos.errors import KosError

T = TypeVar("T")
Waits = list[tuple[str, list[int]]]
"""Operations in flight, and for each the world ranks that it waits for."""


RANK_THREAD = "kos-rank "
"""The beginning of the name of a rank's thread in ``kos.testing.spawn``."""


def rank_thread(run: Callable[[int], None], rank: int) -> threading.Thread:
    """The thread of a rank, which runs ``run(rank)``."""
    return threading.Thread(target=run, args=(rank,), name=f"{RANK_THREAD}{rank}", daemon=True)


class ThreadWorld:
    """The state shared by all threads of one ``spawn``: a lock, a condition per rank, and what is known of each."""

    def __init__(self, size: int, watch: Any = None) -> None:
        self.lock = threading.RLock()
        self.watch = watch  # ``kos.testing.watch.Watch`` in tests
        self.failure: KosError | None = None  # of all groups
        self.wakeup = [threading.Condition(self.lock) for _ in range(size)]
        self.events = [0] * size  # counts wake-ups, so that none is missed between a poll and a wait
        known = PeerStatus()
        self.ends = known.ends  # why a rank has ended
        self.statuses = [PeerStatus(rank, known) for rank in range(size)]  # a rank's groups share its status

    def notify(self, ranks: list[int]) -> None:
        """Wake ranks that may be waiting; the caller holds the lock."""
        for rank in ranks:
            self.events[rank] += 1
            self.wakeup[rank].notify_all()

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


class ThreadGroup:
    """A group of ranks that are threads of this process."""

    def __init__(self, size: int, world: ThreadWorld | None = None, members: list[int] | None = None) -> None:
        self.size = size
        self.world = world or ThreadWorld(size)
        self.members = members if members is not None else list(range(size))  # world ranks
        self.logs = [FailureLog(self.members, r, self.world.statuses[m]) for r, m in enumerate(self.members)]
        """The failure log of each rank; a report of one goes to all of them."""
        self.over: KosError | None = None  # why exchanges fail
        self._closed: dict[int, tuple[str, KosError | None, float | None]] = {}
        self._shared: dict[Any, Any] = {}

    def shared(self, key: Any, make: Callable[[], T]) -> T:
        """The object of that key, the same on all ranks; the first call makes it."""
        with self.world.lock:
            if key not in self._shared:
                self._shared[key] = make()
            return cast(T, self._shared[key])

    def fail(self, failure: KosError) -> None:
        """Make every rank raise the failure in its exchange, and in later ones; the first is kept."""
        with self.world.lock:
            self.over = self.over or again(failure)
            self.notify_all()

    def report_failure(self, failure: KosError, sequence: int) -> None:
        """Make every rank raise the failure in messages, and from collective ``sequence`` on."""
        with self.world.lock:
            for each in self.logs:
                each.record(sequence, again(failure))
            self.notify_all()

    def notify_all(self) -> None:
        self.world.notify(self.members)

    def raise_failure(self, rank: int, sequence: int | None = None) -> None:
        """Raise if every group failed, or this one in that collective or before; None: in any."""
        if self.world.failure is not None:
            raise again(self.world.failure)
        if self.logs[rank].reported is not None:
            self.logs[rank].ask(sequence)

    def raise_over(self) -> None:
        """Raise if exchanges of the group have failed; a copy, for the traceback of this thread."""
        if (failure := self.world.failure or self.over) is not None:
            raise again(failure)

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
        """Raise, for ``what``, if group rank ``rank`` has ended or closed this group."""
        why, end = self.world.ends.get(self.members[rank]), self._closed.get(rank)
        if why is not None and (end is None or end[0] == WHY_CLOSED):  # an earlier abort has given a better reason
            end = why, None, None
        if end is not None:
            why, cause, window = end
            raise failures.lost(rank, why, what, cause, window)

    def find_failure(self, failures: FailureLog) -> KosError | None:
        """The failure of this group, or the loss of a rank that has not closed its communicator."""
        with self.world.lock:
            try:
                self.raise_failure(failures.rank)
                for rank in range(self.size) if failures.rank not in self._closed else ():
                    if self._closed.get(rank, ("",))[0] != WHY_CLOSED:
                        self.raise_end(rank, failures)
            except KosError as error:
                return error.with_traceback(None)
        return None

    def close(self, rank: int, why: str, cause: KosError | None = None, window: float | None = None) -> None:
        """Record that rank ``rank`` has closed this group; its completed operations stay valid.

        The reason is ``cause``, else a failure of that rank within the last ``window`` seconds, if it had one.
        """
        with self.world.lock:
            self._closed.setdefault(rank, (why, cause, window))
            self.notify_all()


class ThreadRendezvous(Rendezvous):
    """Ranks are threads of one process (the mock backend, users' tests)."""

    def __init__(self, group: ThreadGroup, rank: int, timeout: float = 120.0, host: str | None = None) -> None:
        self.rank, self.size, self.timeout, self.host = rank, group.size, timeout, host
        self.threads: ThreadGroup = group
        self._slots: dict[int, dict[int, bytes]] = group.shared("exchanges", dict)
        self._failures, group.logs[rank].timeout = group.logs[rank], timeout

    def _exchange(self, message: bytes) -> list[bytes]:
        group, number, deadline = self.threads, self._exchanges, time.monotonic() + self.timeout
        with self.waiting(), group.world.lock:
            group.raise_over()
            slots = self._slots.setdefault(number, {})
            slots[self.rank] = message
            group.notify_all()
            while missing := [rank for rank in range(self.size) if rank not in slots]:
                group.raise_over()
                for rank in missing:
                    group.raise_end(rank, self.failures, "rendezvous")
                if not group.wait(self.rank, deadline, "rendezvous", missing):
                    group.fail(self.absent(missing))  # late ranks must not join another exchange
            # All ranks have completed the previous exchange, since they are in this one.
            self._slots.pop(number - 1, None)
            return [slots[rank] for rank in range(self.size)]

    def _report(self, failure: KosError) -> None:
        self.threads.fail(self.failures.lost(self.rank, "", None, failure))

    def split(self, color: int | None, key: int = 0) -> Rendezvous | None:
        ranks = self._alike(color, key)
        if not ranks:
            return None
        parent = self.threads
        members = [parent.members[r] for r in ranks]
        child = parent.shared(("split", self._exchanges, color), lambda: ThreadGroup(len(ranks), parent.world, members))
        return self._child(child)

    def shrink(self) -> Rendezvous:
        """The group of the surviving ranks, once all of them have called this."""
        group, deadline = self.threads, time.monotonic() + self.timeout
        world, callers = group.world, group.shared("survivors", set)
        with self.waiting(), world.lock:
            callers.add(self.rank)
            group.notify_all()
            while missing := [
                r for r, member in enumerate(group.members) if r not in callers and member not in world.ends
            ]:
                if not group.wait(self.rank, deadline, "shrink", missing):
                    raise self.absent(missing, "shrink")
                if world.failure is not None:
                    raise again(world.failure)
            # The first rank that finds all others here determines the members for all.
            members = [group.members[rank] for rank in sorted(callers)]
            return self._child(group.shared("shrunk", lambda: ThreadGroup(len(members), world, members)))

    def _child(self, group: ThreadGroup) -> Rendezvous:
        child = ThreadRendezvous(group, group.members.index(self.failures.world[self.rank]), self.timeout, self.host)
        child.failures.status = self.failures.status
        return child


def single_rendezvous(timeout: float = 120.0) -> ThreadRendezvous:
    """A group of one."""
    return ThreadRendezvous(ThreadGroup(1), 0, timeout)
