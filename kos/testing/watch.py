"""The checks of ``spawn`` while ranks run: deadlocks, arrays written in flight, messages and Works left over."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from kos.comm import watchdog
from kos.comm.control.threads import ThreadGroup, ThreadWorld, Waits
from kos.comm.host.host_backend import HostBackend
from kos.comm.recorder import call_site
from kos.comm.work import Steps, Work
from kos.errors import CollectiveError, CollectiveTimeout
from kos.testing.faults import FaultPlan

_POLL_SECONDS = 0.05  # seconds between two checks for threads that may still help waiting ranks
_SHOWN = 16  # ranks in a message


class Deadlock(CollectiveTimeout):
    """Every rank waits for another one.  Raised on all ranks at once; names the ranks that each waits for.

    ``ranks`` are those that the test's faults have stalled, or whose messages these have dropped.
    """


class Watch:
    """The state of the ranks of one ``spawn``; ``world.watch`` of the mock backend.

    A rank is stuck if its thread waits in kos, no event has occurred since the wait began, and its timeout is not
    before the end of ``spawn``.  It is a deadlock if all ranks are stuck, unless a thread that started after ``spawn``
    is alive: it may compute, sleep, or serve a communicator.  So may the watchdog's thread while it has a callback of
    ``on_failure`` to call for a communicator that has failed.
    """

    def __init__(
        self, size: int, plan: FaultPlan, buffer_bytes: float, deadlock: bool, arrays: bool, strict: bool
    ) -> None:
        self.plan, self.buffer_bytes = plan, buffer_bytes
        self._deadlock, self._arrays, self.strict = deadlock, arrays, strict
        self.launched: list[list[tuple[Work[Any], Any, int]]] = [[] for _ in range(size)]
        """The Works of each rank for which it must still wait; the code and the instruction of each call."""
        self.threads: list[threading.Thread] = []  # of the ranks
        self.deadline = float("inf")
        self._others = set(threading.enumerate())
        self._waiting: dict[threading.Thread, tuple[int, int, float, Callable[[], Waits]]] = {}
        self._backends: list[tuple[ThreadGroup, Any]] = []
        self._size = size

    def begin_wait(
        self, world: ThreadWorld, rank: int, seconds: float | None, waits_for: Callable[[], Waits]
    ) -> float | None:
        """Record that the calling thread, of ``rank``, waits; returns the seconds until it must call this again."""
        until = float("inf") if seconds is None else time.monotonic() + seconds
        self._waiting[threading.current_thread()] = rank, world.events[rank], until, waits_for
        if not self._deadlock or len(self._waiting) + len(world.ends) < self._size:
            return seconds
        stuck = {
            thread for thread, (waiter, seen, end, _) in self._waiting.items()
            if world.events[waiter] == seen and end >= self.deadline
        }  # fmt: skip
        ranks = [thread for rank, thread in enumerate(self.threads) if rank not in world.ends]
        if not stuck.issuperset(ranks):
            return seconds
        idle = stuck | self._others | set(self.threads)
        others = (thread for thread in threading.enumerate() if thread.name != "kos-watchdog")
        if idle.issuperset(others) and not self._awaits_callback():
            world.fail(Deadlock(self._describe(world), ranks=self.plan.culprits()))
            return 0.0
        return _POLL_SECONDS if seconds is None else min(seconds, _POLL_SECONDS)

    def _awaits_callback(self) -> bool:
        """Whether a callback of ``on_failure`` has yet to return for a failure: it may abort a communicator."""
        return any(watchdog.has_callbacks(each) and each.find_failure() is not None for _, each in self._backends)

    def end_wait(self) -> None:
        """Record that the calling thread no longer waits."""
        self._waiting.pop(threading.current_thread(), None)

    def _describe(self, world: ThreadWorld) -> str:
        waits = {rank: waits_for() for rank, _, _, waits_for in self._waiting.values()}
        lines = []
        for rank in sorted({*waits, *world.ends})[:_SHOWN]:
            if rank in world.ends:
                lines.append(f"rank {rank} has ended: {world.ends[rank]}")
            for what, peers in waits.get(rank, []):
                named = f" waits for rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))} in" if peers else ":"
                lines.append(f"rank {rank}{named} {what}")
        for rank, operation in self.plan.lost:
            lines.append(f"the messages of rank {rank}'s {operation} were lost, as the test's plan says")
        if cycle := _cycle(waits):
            lines.append("the cycle: " + " -> ".join(f"rank {rank}" for rank in cycle))
        return "deadlock: every rank waits, and none can continue:\n  " + "\n  ".join(lines)

    def guard(self, work: Work[Any], run: Callable[[Work[Any]], Steps | None]) -> Steps:
        """Run ``work`` on copies of its arrays, and fail if the rank writes to the arrays before it is complete."""
        if not self._arrays:
            yield from run(work) or ()
            return
        send, recv = work.send, work.recv
        before, at_launch, carried = _checksums(work), True, work.unstarted_copy()
        carried.sequence = work.sequence
        carried.send = None if send is None else send.copy()
        carried.recv = carried.send if recv is send else None if recv is None else recv.copy()
        for _ in run(carried) or ():
            at_launch = False
            yield
        if at_launch:
            yield  # the program may write now
        if _checksums(work) != before:
            rank = work.operation.rank
            raise CollectiveError(
                f"rank {rank} wrote to its array while the operation was in flight, or another operation did", call=work
            )
        if work.operation.recv is not None and recv.flags.writeable:  # unlike a root's array
            np.copyto(recv, carried.recv)
        work.array = carried.array  # of a message from any rank, with that rank

    def record_synchronize(self, backend: HostBackend, rank: int) -> None:
        """Record that the rank has waited for all operations of ``backend``."""
        works = self.launched[rank]
        works[:] = [each for each in works if each[0].backend is not backend]

    def unwaited(self, rank: int) -> list[str]:
        """The operations, in groups that have not failed, for which that rank never waited, with their lines."""
        works = self.launched[rank] if self.strict else ()
        return [
            f"rank {rank} never waited for {work}, at {call_site(code, at)}"
            for work, code, at in works if not work.reported and work.backend.failures.first is None
        ]  # fmt: skip

    def opened(self, backend: HostBackend, group: ThreadGroup) -> None:
        """Record that a rank has joined a group."""
        self._backends.append((group, backend))

    def unreceived(self) -> list[str]:
        """Messages that were never received, in groups without a failure."""
        groups: dict[ThreadGroup, Any] = {}
        failed = {group for group, backend in self._backends if backend.failures.first or backend.failures.earliest}
        for group, backend in self._backends:
            if group not in failed:
                groups.setdefault(group, backend)
        return [message for backend in groups.values() for message in backend.transport.unreceived()]


def _cycle(waits: dict[int, Waits]) -> list[int]:
    """A cycle of ranks, each waiting for the next, with the first repeated at the end; empty if there is none."""
    peers = {rank: [peer for _, ranks in works for peer in ranks] for rank, works in sorted(waits.items())}
    try:
        TopologicalSorter(peers).prepare()
    except CycleError as error:
        cycle: list[int] = error.args[1]  # each rank waits for the one before it
        return cycle[::-1]
    return []


def _checksums(work: Work[Any]) -> list[int]:
    return [zlib.crc32(x.view(np.uint8).data) for x in (work.send, work.recv) if x is not None]
