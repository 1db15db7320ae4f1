"""Ranks that are threads of one process: what they hold in common, and their rendezvous."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kos.comm.failures import again
from kos.comm.rendezvous.base import Rendezvous
from kos.errors import KosError, RankLost, RendezvousError

T = TypeVar("T")
Waits = list[tuple[str, list[int]]]
"""Operations in flight, and for each the world ranks that it waits for."""


class ThreadWorld:
    """What all threads of one ``spawn`` share: one lock, a wake-up call per rank, and who is gone."""

    def __init__(self, size: int, watch: Any = None) -> None:
        self.lock = threading.RLock()
        self.watch = watch  # a test's: ``kos.testing.watch.Watch``
        self.failure: tuple[type[KosError], str] | None = None  # of all groups
        self.wakeup = [threading.Condition(self.lock) for _ in range(size)]
        self.events = [0] * size  # counts wake-ups, so that none is missed between a look and a wait
        self.departed: dict[int, str] = {}  # world rank -> why

    def notify(self, ranks: list[int]) -> None:
        """Wake ranks that may be waiting; the caller holds the lock."""
        for rank in ranks:
            self.events[rank] += 1
            self.wakeup[rank].notify_all()

    def wait(self, rank: int, seconds: float | None, waits_for: Callable[[], Waits]) -> None:
        """Wait until something happens that concerns ``rank``, at most ``seconds``; the caller holds the lock."""
        if self.watch is not None:
            seconds = self.watch.begin_wait(self, rank, seconds, waits_for)
        try:
            self.wakeup[rank].wait(seconds)
        finally:
            if self.watch is not None:
                self.watch.end_wait()

    def fail(self, kind: type[KosError], message: str) -> None:
        """Make every rank that waits, in any group, raise ``kind(message)``; the caller holds the lock."""
        self.failure = self.failure or (kind, message)
        self.notify(list(range(len(self.wakeup))))

    def raise_failure(self) -> None:
        """Raise if all groups have failed."""
        if self.failure is not None:
            kind, message = self.failure
            raise kind(message)

    def depart(self, rank: int, why: str) -> None:
        """Rank ``rank`` will not communicate again."""
        with self.lock:
            self.departed.setdefault(rank, why)
            self.notify(list(range(len(self.wakeup))))


class ThreadGroup:
    """A group of ranks that are threads of this process."""

    def __init__(self, size: int, world: ThreadWorld | None = None, members: list[int] | None = None) -> None:
        self.size = size
        self.world = world or ThreadWorld(size)
        self.members = members if members is not None else list(range(size))  # world ranks
        self.failure: KosError | None = None
        self._left: dict[int, str] = {}
        self._shared: dict[Any, Any] = {}
        self._slots: dict[int, dict[int, bytes]] = {}

    def shared(self, key: Any, make: Callable[[], T]) -> T:
        """The object of that key, the same on all ranks; the first to ask makes it."""
        with self.world.lock:
            if key not in self._shared:
                self._shared[key] = make()
            return cast(T, self._shared[key])

    def fail(self, failure: KosError) -> None:
        """Make every rank that waits in this group, now or later, raise the same error; the first stays."""
        with self.world.lock:
            if self.failure is None:
                self.failure = again(failure)
                self.notify_all()

    def notify_all(self) -> None:
        self.world.notify(self.members)

    def survivors(self, rank: int, timeout: float) -> ThreadGroup:
        """The group of the ranks that are not gone, once all of them have called this."""
        world, deadline = self.world, time.monotonic() + timeout
        callers: list[int] = self.shared("survivors", list)
        with world.lock:
            callers.append(rank)
            self.notify_all()
            while missing := [
                r for r, member in enumerate(self.members) if r not in callers and member not in world.departed
            ]:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise RendezvousError(f"shrink: ranks {missing} did not come within {timeout:g} s")
                self._wait(rank, remaining, "shrink", missing)
                world.raise_failure()
            # The first to see that all have come says for all who they are.
            members = [self.members[r] for r in sorted(callers)]
            return self.shared("shrunk", lambda: ThreadGroup(len(members), world, members))

    def raise_failure(self) -> None:
        """Raise if the group failed; every raise is a new exception, for its own thread's traceback."""
        self.world.raise_failure()
        if self.failure is not None:
            raise again(self.failure)

    def _wait(self, rank: int, seconds: float, what: str, missing: list[int]) -> None:
        self.world.wait(self.members[rank], seconds, lambda: [(what, [self.members[r] for r in missing])])

    def departed(self, rank: int) -> str | None:
        """Why group rank ``rank`` is gone, or None."""
        return self.world.departed.get(self.members[rank]) or self._left.get(rank)

    def leave(self, rank: int, why: str) -> None:
        """Rank ``rank`` does nothing more in this group; what it has done so far stays."""
        with self.world.lock:
            self._left.setdefault(rank, why)
            self.notify_all()

    def exchange(self, rank: int, turn: int, data: bytes, timeout: float) -> list[bytes]:
        """All ranks' bytes of one turn."""
        world, deadline = self.world, time.monotonic() + timeout
        with world.lock:
            self.raise_failure()
            slots = self._slots.setdefault(turn, {})
            slots[rank] = data
            self.notify_all()
            while len(slots) < self.size:
                self.raise_failure()
                missing = [r for r in range(self.size) if r not in slots]
                for r in missing:
                    if self.departed(r) is not None:
                        raise RankLost(f"rendezvous: rank {r} is gone: {self.departed(r)}")
                remaining = deadline - time.monotonic()
                if remaining <= 0:  # for the late ranks too: they must not take this for their exchange
                    self.fail(RendezvousError(f"rendezvous: ranks {missing} did not come within {timeout:g} s"))
                    self.raise_failure()
                self._wait(rank, remaining, "rendezvous", missing)
            # Everybody of the previous turn has left it, or they could not be in this one.
            self._slots.pop(turn - 1, None)
            return [slots[r] for r in range(self.size)]


class ThreadRendezvous(Rendezvous):
    """Ranks are threads of one process (the mock backend, users' tests)."""

    def __init__(self, group: ThreadGroup, rank: int, timeout: float = 120.0) -> None:
        self.rank, self.size, self.timeout = rank, group.size, timeout
        self.threads: ThreadGroup = group

    def _exchange(self, message: bytes) -> list[bytes]:
        return self.threads.exchange(self.rank, self._exchanges, message, self.timeout)

    def split(self, color: int | None, key: int = 0) -> Rendezvous | None:
        ranks = self._alike(color, key)
        if not ranks:
            return None
        parent = self.threads
        members = [parent.members[r] for r in ranks]
        child = parent.shared(("split", self._exchanges, color), lambda: ThreadGroup(len(ranks), parent.world, members))
        return self._child(child)

    def shrink(self) -> Rendezvous:
        return self._child(self.threads.survivors(self.rank, self.timeout))

    def _child(self, group: ThreadGroup) -> Rendezvous:
        members = self.threads.members
        child = ThreadRendezvous(group, group.members.index(members[self.rank]), self.timeout)
        child._ledger = self.ledger.of([members.index(member) for member in group.members], child.rank)
        return child


class SingleRendezvous(ThreadRendezvous):
    """A group of one."""

    def __init__(self, timeout: float = 120.0) -> None:
        super().__init__(ThreadGroup(1), 0, timeout)
