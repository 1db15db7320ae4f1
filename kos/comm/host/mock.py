"""The mock backend: ranks are threads of one process, with real results and the checks of every backend.

Messages are copied into mailboxes, one per (source, destination, tag), in order.  The ranks of a group share their
state, so every check is exact: the second of two mismatched calls raises at once, a collective ends only when every
rank has arrived, and lost ranks are always known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kos.comm.backend import Probe, ends_group
from kos.comm.control.base import Rendezvous
from kos.comm.control.threads import ThreadGroup
from kos.comm.failures import WHY_CLOSED, Ledger
from kos.comm.host.backend import MessagingBackend
from kos.comm.host.shared import SharedArrays
from kos.comm.operation import COLLECTIVE_TAGS
from kos.comm.scheduled import remove, take, wrong_message
from kos.comm.schedules.execute import Request
from kos.comm.work import Engine, Idle, Steps, Work
from kos.errors import CollectiveError, CollectiveMismatch, KosError, plural

Array = np.ndarray[Any, Any]
Key = tuple[int, int, int]  # source, destination, tag


class _State:
    """The state that the ranks of one group share, guarded by the lock of their world."""

    def __init__(self) -> None:
        self.sent: dict[Key, deque[ThreadMessage]] = {}
        self.posted: dict[Key, deque[ThreadMessage]] = {}
        self.calls: dict[int, dict[int, tuple[str, dict[str, Any]]]] = {}


class MockBackend(MessagingBackend):
    """Serves a group whose ranks are threads of this process, or a group of one."""

    name = "mock"
    transport: _Mailboxes

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None) -> None:
        super().__init__(rendezvous, engine)
        assert rendezvous.threads is not None
        self._group = rendezvous.threads
        self._state = self._group.shared("mock", _State)
        self.transport = _Mailboxes(self._group, self._state, self.rank, self.ledger)
        self.arrays = SharedArrays(rendezvous) if rendezvous.local_size == self.size else None
        self._idle = _WakeUp(self._group, self.rank, self.engine)
        self._watch = self._group.world.watch
        if self._watch is not None:
            self._watch.opened(self, self._group)

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        if rendezvous.threads is None:
            return Probe(False, "the ranks are not threads of one process")
        return Probe(True, f"{plural(rendezvous.size, 'rank')} in this process")

    def idle(self) -> Idle:
        return self._idle

    def launch(self, work: Work[Any]) -> Steps | None:
        watch = self._watch
        if watch is None:
            return super().launch(work)
        if work.name not in ("split", "duplicate"):
            try:
                on_discard = watch.plan.inject(self._group.world, self._group.members[self.rank], work)
            except CollectiveError as error:
                raise self.failed(work, error) from None
            self.transport.discard(self._tag(work) if work.collective else work.operation.message.tag, on_discard)
            if work.collective:
                watch.delay_collective()
        watch.record_launch(work, self._group.members[self.rank])
        steps = super().launch(work)
        return watch.guard(work, self._run_over_transport) if work.operation.options.overlap else steps

    def report_two_threads(self, error: CollectiveError) -> bool:
        return self._watch is None or self._watch.report_two_threads(error)

    def synchronize(
        self, timeout: float | None = None, stream: int | None = None, until: Callable[[], bool] | None = None
    ) -> None:
        if self._watch is not None:
            self._watch.record_synchronize(self, self._group.members[self.rank])

    def absent(self, work: Work[Any]) -> list[int]:
        with self._group.world.lock:
            calls = self._state.calls.get(work.sequence)
            return [rank for rank in range(self.size) if rank not in calls] if calls else []

    def unreceived(self) -> list[str]:
        """The messages that were sent and not received."""
        return [
            f"rank {src} sent {message.array.dtype}[{message.array.size}] to rank {dst} with tag {tag}"
            for (src, dst, tag), messages in self._state.sent.items() if tag < COLLECTIVE_TAGS
            for message in messages
        ]  # fmt: skip

    def close(self) -> None:
        self._group.close(self.rank, WHY_CLOSED, self.ledger.closing(), 0.0)

    def abort(self, reason: str) -> None:
        self.broken = self.broken or CollectiveError(reason)  # operations cancelled from now on are not reported
        self._group.close(self.rank, reason)

    def agree(self, work: Work[Any]) -> Callable[[], bool] | None:
        if self.size == 1:
            return None
        group, rank = self._group, self.rank
        mine = work.text, work.fingerprint()
        with group.world.lock:
            group.raise_failure()
            calls = self._state.calls.setdefault(work.sequence, {})
            if calls:
                peer, theirs = next(iter(calls.items()))
                if theirs[1] != mine[1]:
                    group.fail(self.ledger.mismatch(work.group, (peer, *theirs), (rank, *mine)))
                    group.raise_failure()
            calls[rank] = mine
            if len(calls) == self.size:
                del self._state.calls[work.sequence]
                group.notify_all()

        def all_arrived() -> bool:
            with group.world.lock:
                if len(calls) == self.size:
                    return True
                group.raise_failure()
                for peer in set(range(self.size)) - set(calls):
                    group.raise_end(peer, self.ledger, work)
            return False

        return all_arrived

    def find_failure(self) -> KosError | None:
        return self.broken or self._group.find_failure(self.ledger)

    def failed(self, work: Work[Any], error: Exception) -> KosError:
        first, failure = self.broken is None, super().failed(work, error)
        if first and ends_group(work, error):
            self._group.fail(self.ledger.shared(failure, False, None if work.collective else work))
        return failure


class _Mailboxes:
    """The transport: messages of a pair and tag match their receives in order.

    A message is copied and complete at once.  A user's message larger than ``buffer_bytes`` of ``kos.testing.spawn``
    is complete when it is received, as on other backends.
    """

    def __init__(self, group: ThreadGroup, state: _State, rank: int, ledger: Ledger) -> None:
        self.group, self._state, self._rank, self.ledger = group, state, rank, ledger
        watch = group.world.watch
        self._buffer_bytes = float("inf") if watch is None else watch.buffer_bytes
        self._discarded: dict[int, Callable[[], None]] = {}  # tags whose messages are discarded -> callback

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        group, key = self.group, (self._rank, peer, tag)
        message = ThreadMessage(self, key, array, peer)
        with group.world.lock:
            group.raise_failure()
            if on_discard := self._discarded.get(tag):
                on_discard()
                message.complete = True
                return message
            receive = take(self._state.posted, key)
            if receive is not None:
                receive.take(message)
            else:
                if tag >= COLLECTIVE_TAGS or array.nbytes <= self._buffer_bytes:
                    message.array, message.complete = array.copy(), True
                self._state.sent.setdefault(key, deque()).append(message)
            group.world.notify([group.members[peer]])
        return message

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        key = (peer, self._rank, tag)
        receive = ThreadMessage(self, key, array, peer)
        with self.group.world.lock:
            message = take(self._state.sent, key)
            if message is not None:
                receive.take(message)
                self.group.world.notify([self.group.members[peer]])
            else:
                self._state.posted.setdefault(key, deque()).append(receive)
        return receive

    def awaited(self, tag: int) -> list[int]:
        with self.group.world.lock:
            return sorted({src for src, dst, t in self._state.posted if (dst, t) == (self._rank, tag)})

    def in_flight(self, rank: int, tag: int, receives: bool) -> bool:
        me = self._rank
        return (rank, me, tag) in self._state.posted if receives else (me, rank, tag) in self._state.sent

    def discard(self, tag: int, on_discard: Callable[[], None] | None) -> None:
        """Discard messages with that tag from now on, and call ``on_discard`` for each; None: deliver them again."""
        self._discarded.pop(tag, None)
        if on_discard is not None:
            self._discarded[tag] = on_discard

    def cancel(self, cancelled: Callable[[Any], bool]) -> None:
        with self.group.world.lock:
            remove(self._state.posted, lambda receive: receive.dst == self._rank and cancelled(receive))
            remove(self._state.sent, lambda m: m.src == self._rank and not m.complete and cancelled(m))


class ThreadMessage:
    """One end of a message; ``other`` is the rank at the other end."""

    __slots__ = ("_mailboxes", "array", "complete", "dst", "error", "other", "src", "tag")

    def __init__(self, mailboxes: _Mailboxes, key: Key, array: Array, other: int) -> None:
        self._mailboxes, self.array, self.other = mailboxes, array, other
        self.src, self.dst, self.tag = key
        self.complete = False
        self.error: CollectiveMismatch | None = None

    def take(self, message: ThreadMessage) -> None:
        """Receive ``message``; the caller holds the lock of the world."""
        array, sent = self.array, message.array
        message.complete = True
        if sent.dtype != array.dtype or sent.size != array.size:
            expected, got = ((each.nbytes, each.dtype) for each in (array, sent))
            self.error = wrong_message(self._mailboxes.ledger, self.dst, expected, self.src, got)
            return  # only the receiver raises
        np.copyto(array, sent)
        self.complete = True

    def done(self) -> bool:
        if self.complete:
            return True
        group = self._mailboxes.group
        with group.world.lock:
            if self.complete:
                return True
            if self.error is not None:
                raise self.error
            group.raise_failure()
            group.raise_end(self.other, self._mailboxes.ledger)
        return False


class _WakeUp:
    """Waits on this rank's condition, which every message and every change of the group notifies."""

    def __init__(self, group: ThreadGroup, rank: int, engine: Engine) -> None:
        self._world, self._me, self._engine = group.world, group.members[rank], engine

    def mark(self) -> int:
        return self._world.events[self._me]

    def pause(self, mark: int, seconds: float | None) -> None:
        world = self._world
        active = self._engine.outstanding() if world.watch is not None else []
        with world.lock:
            if world.events[self._me] == mark:
                world.wait(self._me, seconds, lambda: [_waits_for(work) for work in active])


def _waits_for(work: Work[Any]) -> tuple[str, list[int]]:
    backend: Any = work.backend
    return str(work), backend.waits_for(work) if isinstance(backend, MockBackend) else []
