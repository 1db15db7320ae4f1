"""The mock backend: ranks are threads of one process, with real results and the checks of every backend.

Messages are copied into mailboxes, one per (source, destination, tag), in order.  The ranks of a group hold
their state in common, so here every check is exact: calls that do not belong together are found when the
second of them starts, a collective ends only when every rank has come, and a rank that is gone is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kos.comm.backend import Backend, Probe, drop, ends_group, take, wrong_message
from kos.comm.operation import Call
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.rendezvous.threads import ThreadGroup
from kos.comm.schedules.execute import Request
from kos.comm.work import Engine, Idle, Work
from kos.errors import CollectiveError, CollectiveMismatch, KosError, RankLost

Array = np.ndarray[Any, Any]
Key = tuple[int, int, int]  # source, destination, tag


class _Room:
    """What the ranks of one group share; guarded by the lock of their world."""

    def __init__(self) -> None:
        self.sent: dict[Key, deque[Array]] = {}
        self.posted: dict[Key, deque[_Receive]] = {}
        self.calls: dict[int, dict[int, tuple[str, dict[str, Any]]]] = {}


class MockBackend(Backend):
    """Carries a group whose ranks are threads of this process, or a group of one."""

    name = "mock"

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None) -> None:
        super().__init__(rendezvous, engine)
        assert rendezvous.threads is not None
        self._group = rendezvous.threads
        self._room = self._group.shared("mock", _Room)
        self._mailboxes = _Mailboxes(self._group, self._room, self.rank)
        plan = self._group.world.faults
        self._faults = plan and plan.transport(self._group, self.rank, self._mailboxes)
        self.transport = self._faults or self._mailboxes
        self._idle = _WakeUp(self._group, self.rank)

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        if rendezvous.threads is None:
            return Probe(False, "the ranks are not threads of one process")
        return Probe(True, f"{rendezvous.size} rank{'s' * (rendezvous.size > 1)} in this process")

    def idle(self) -> Idle:
        return self._idle

    def start(self, call: Call) -> Work[Any] | None:
        if self._faults is not None and self.broken is None and call.name not in ("split", "duplicate"):
            self._faults.start(call, self._tag(call) if call.collective else call.operation.message.tag)
        return super().start(call)

    def close(self) -> None:
        if self._faults is not None:
            self._faults.close()
        self._group.leave(self.rank, "it closed its communicator")

    def abort(self, reason: str) -> None:
        self.broken = self.broken or CollectiveError(reason)  # of what is given up next nobody is told
        self._group.leave(self.rank, reason)

    def agree(self, call: Call) -> Callable[[], bool] | None:
        if self.size == 1:
            return None
        group, rank = self._group, self.rank
        mine = call.text, call.fingerprint()
        with group.world.lock:
            group.raise_failure()
            calls = self._room.calls.setdefault(call.sequence, {})
            if calls:
                peer, theirs = next(iter(calls.items()))
                if theirs[1] != mine[1]:
                    group.fail(self.ledger.mismatch(call.group, (peer, *theirs), (rank, *mine)))
                    group.raise_failure()
            calls[rank] = mine
            if len(calls) == self.size:
                del self._room.calls[call.sequence]
                group.notify_all()

        def everybody_came() -> bool:
            with group.world.lock:
                if len(calls) == self.size:
                    return True
                group.raise_failure()
                for peer in set(range(self.size)) - set(calls):
                    if (why := group.departed(peer)) is not None:
                        raise RankLost(f"{call}: rank {peer} is gone: {why}")
            return False

        return everybody_came

    def missing(self, call: Call) -> str:
        if not call.collective:
            return super().missing(call)
        with self._group.world.lock:
            calls = self._room.calls.get(call.sequence, {})
            late = [rank for rank in range(self.size) if rank not in calls]
        if calls and late:
            return f"ranks {late} did not arrive"
        return f"all ranks arrived; no message from ranks {self._mailboxes.awaited(self._tag(call))}"

    def failed(self, call: Call, error: Exception) -> KosError:
        first, failure = self.broken is None, super().failed(call, error)
        if first and ends_group(call, error):
            self._group.fail(failure)
        return failure


SENT: Any = SimpleNamespace(done=lambda: True)
"""The request of a send whose data is copied already."""


class _Mailboxes:
    """The transport: a send is complete at once, its data copied; sends and receives meet in their order."""

    def __init__(self, group: ThreadGroup, room: _Room, rank: int) -> None:
        self._group, self._room, self._rank = group, room, rank

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        group, key = self._group, (self._rank, peer, tag)
        with group.world.lock:
            group.raise_failure()
            receive = take(self._room.posted, key)
            if receive is not None:
                receive.deliver(array)
            else:
                self._room.sent.setdefault(key, deque()).append(array.copy())
            group.world.notify([group.members[peer]])
        return SENT

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        key = (peer, self._rank, tag)
        receive = _Receive(self._group, key, array)
        with self._group.world.lock:
            message = take(self._room.sent, key)
            if message is not None:
                receive.deliver(message)
            else:
                self._room.posted.setdefault(key, deque()).append(receive)
        return receive

    def awaited(self, tag: int) -> list[int]:
        """The ranks from which this one waits for a message with that tag."""
        with self._group.world.lock:
            return sorted({src for src, dst, t in self._room.posted if (dst, t) == (self._rank, tag)})

    def forget(self, given_up: Callable[[_Receive], bool]) -> None:
        with self._group.world.lock:
            drop(self._room.posted, lambda receive: receive.dst == self._rank and given_up(receive))


class _Receive:
    __slots__ = ("_array", "_done", "_error", "_group", "dst", "src", "tag")

    def __init__(self, group: ThreadGroup, key: Key, array: Array) -> None:
        self._group, self._array = group, array
        self.src, self.dst, self.tag = key
        self._done, self._error = False, ""

    def deliver(self, message: Array) -> None:
        """Take the message; the caller holds the lock of the world."""
        array = self._array
        if message.dtype != array.dtype or message.size != array.size:
            expected, got = ((each.nbytes, each.dtype) for each in (array, message))
            self._error = str(wrong_message(self.dst, expected, self.src, got))
            return  # the receiver raises: the sender is done with its message
        np.copyto(array, message)
        self._done = True

    def done(self) -> bool:
        if self._done:
            return True
        group = self._group
        with group.world.lock:
            if self._done:
                return True
            if self._error:
                raise CollectiveMismatch(self._error)
            group.raise_failure()
            if (why := group.departed(self.src)) is not None:
                raise RankLost(f"rank {self.src} is gone: {why}")
        return False


class _WakeUp:
    """Waits on the condition of this rank, which every message and every change of the group notifies."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._world, self._me = group.world, group.members[rank]

    def mark(self) -> int:
        return self._world.events[self._me]

    def pause(self, mark: int, seconds: float | None) -> None:
        world = self._world
        with world.lock:
            if world.events[self._me] == mark:
                world.wakeup[self._me].wait(seconds)
