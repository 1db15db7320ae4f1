"""The checks of ``spawn`` while ranks run: deadlocks, arrays written in flight, messages never received."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from kos.comm.failures import blaming
from kos.comm.host.mock import MockBackend
from kos.comm.operation import Call, Operation
from kos.comm.rendezvous.threads import ThreadGroup, ThreadWorld, Waits
from kos.comm.work import Steps
from kos.errors import CollectiveError, CollectiveTimeout
from kos.memory import Buffer
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
    is alive: it may compute, sleep, or serve a communicator.
    """

    def __init__(self, size: int, plan: FaultPlan, buffer_bytes: float, deadlock: bool, arrays: bool) -> None:
        self.plan, self.buffer_bytes = plan, buffer_bytes
        self._deadlock, self._arrays = deadlock, arrays
        self.threads: list[threading.Thread] = []  # of the ranks
        self.deadline = float("inf")
        self._others = set(threading.enumerate())
        self._waiting: dict[threading.Thread, tuple[int, int, float, Callable[[], Waits]]] = {}
        self._backends: list[tuple[ThreadGroup, MockBackend]] = []
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
        if all(thread in idle or thread.name == "kos-watchdog" for thread in threading.enumerate()):
            world.fail(blaming(Deadlock(self._describe(world)), self.plan.culprits()))
            return 0.0
        return _POLL_SECONDS if seconds is None else min(seconds, _POLL_SECONDS)

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

    def guard(self, call: Call, run: Callable[[Call], Steps]) -> Steps:
        """Run ``call`` on copies of its arrays, and fail if the rank writes to the arrays before it is complete."""
        o = call.operation
        if not self._arrays:
            yield from run(call)
            return
        send = _copy(o.send)
        recv = send if o.recv is o.send else _copy(o.recv)
        before, at_launch, carried = _checksums(o), True, copy(call)
        carried.operation = replace(o, send=send, recv=recv)
        for _ in run(carried):
            at_launch = False
            yield
        if at_launch:
            yield  # the program may write now
        if _checksums(o) != before:
            raise CollectiveError(
                f"{call}: rank {o.rank} wrote to its array while the operation was in flight, or another operation did"
            )
        if o.recv is not None and recv is not None and o.recv.flat.flags.writeable:  # unlike a root's array
            np.copyto(o.recv.flat, recv.flat)

    def opened(self, backend: MockBackend, group: ThreadGroup) -> None:
        """Record that a rank has joined a group."""
        self._backends.append((group, backend))

    def unreceived(self) -> list[str]:
        """Messages that were never received, in groups without a failure."""
        groups: dict[ThreadGroup, MockBackend] = {}
        failed = {group for group, backend in self._backends if backend.broken is not None or group.failure is not None}
        for group, backend in self._backends:
            if group not in failed:
                groups.setdefault(group, backend)
        return [message for backend in groups.values() for message in backend.unreceived()]


def _cycle(waits: dict[int, Waits]) -> list[int]:
    """A cycle of ranks, each waiting for the next, with the first repeated at the end; empty if there is none."""
    peers = {rank: [peer for _, ranks in works for peer in ranks] for rank, works in sorted(waits.items())}
    try:
        TopologicalSorter(peers).prepare()
    except CycleError as error:
        cycle: list[int] = error.args[1]  # each rank waits for the one before it
        return cycle[::-1]
    return []


def _copy(buffer: Buffer | None) -> Buffer | None:
    if buffer is None:
        return None
    flat = buffer.flat.copy()
    array: Any = flat.reshape(buffer.shape)
    return Buffer(array, flat, buffer.dtype, buffer.count, buffer.shape)


def _checksums(o: Operation) -> list[int]:
    return [zlib.crc32(buffer.flat.view(np.uint8).data) for buffer in (o.send, o.recv) if buffer is not None]
