"""The mock transport: ranks are threads of one process, with real results and the checks of every backend.

Messages are copied into mailboxes, one per (source, destination, tag), in order.  The ranks of a group share their
state, so every check is exact: the second of two mismatched calls raises at once, a collective ends only when every
rank has arrived, and lost ranks are always known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kos.comm.contract import Backend, Probe, Request
from kos.comm.control.base import Rendezvous
from kos.comm.control.threads import ThreadGroup, Waits
from kos.comm.failures import WHY_CLOSED
from kos.comm.matching import Envelope
from kos.comm.operation import COLLECTIVE_TAGS
from kos.comm.records import again
from kos.comm.transport import remove, take, wrong_message
from kos.comm.work import Engine, Steps, Work
from kos.errors import CollectiveError, CollectiveMismatch, KosError, plural

Array = np.ndarray[Any, Any]
Key = tuple[int, int, int]  # source, destination, tag


class ThreadTransport(Backend):
    """Mailboxes of a group whose ranks are threads of this process, or of a group of one.

    A message is copied and complete at once.  A user's message larger than ``buffer_bytes`` of ``kos.testing.spawn``
    is complete when it is received, as on other backends.
    """

    name = "mock"

    def __init__(self, rendezvous: Rendezvous, engine: Engine) -> None:
        super().__init__(rendezvous, engine)
        assert rendezvous.threads is not None
        self.group: ThreadGroup = rendezvous.threads
        self._me = self.group.members[self.rank]
        # What the ranks share, guarded by the lock of their world.
        self._sent: dict[Key, deque[ThreadMessage]] = self.group.shared("mock sent", dict)
        self._posted: dict[Key, deque[ThreadMessage]] = self.group.shared("mock posted", dict)
        self._calls: dict[int, dict[int, Work[Any]]] = self.group.shared("mock calls", dict)
        self._watch = watch = self.group.world.watch
        self._buffer_bytes = float("inf") if watch is None else watch.buffer_bytes
        self._discarded: dict[int, Callable[[], None]] = {}  # tags whose messages are discarded -> callback

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        if rendezvous.threads is None:
            return Probe(False, "the ranks are not threads of one process")
        return Probe(True, f"{plural(rendezvous.size, 'rank')} in this process")

    def open(self, backend: Any) -> None:
        if self._watch is not None:
            self._watch.opened(backend, self.group)

    def tag(self, sequence: int) -> int:
        return COLLECTIVE_TAGS + sequence  # as on tcp: it says to which collective a message belongs

    def ask(self, tag: int) -> None:
        """Raise the failure that ends messages with that tag."""
        self.group.raise_failure(self.rank, tag - COLLECTIVE_TAGS if tag >= COLLECTIVE_TAGS else None)

    # Messages.

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        group, key = self.group, (self.rank, peer, tag)
        message = ThreadMessage(self, key, array, peer)
        with group.world.lock:
            self.ask(tag)
            if on_discard := self._discarded.get(tag):
                on_discard()
                message.complete = True
                return message
            receive = take(self._posted, key)
            if receive is not None:
                receive.take(message)
            else:
                if tag >= COLLECTIVE_TAGS or array.nbytes <= self._buffer_bytes:
                    message.array, message.complete = array.copy(), True
                self._sent.setdefault(key, deque()).append(message)
            group.world.notify([group.members[peer]])
        return message

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        key = (peer, self.rank, tag)
        receive = ThreadMessage(self, key, array, peer)
        with self.group.world.lock:
            message = take(self._sent, key)
            if message is not None:
                receive.take(message)
                self.group.world.notify([self.group.members[peer]])
            else:
                self._posted.setdefault(key, deque()).append(receive)
        return receive

    def arrived(self, ranks: Sequence[int], tag: int) -> Envelope | None:
        with self.group.world.lock:
            for rank in ranks:
                if sent := self._sent.get((rank, self.rank, tag)):
                    return Envelope(rank, sent[0].array.dtype, sent[0].array.size)
        return None

    def end_of(self, rank: int) -> KosError | None:
        with self.group.world.lock:
            try:
                self.ask(0)
                if (end := self.group.closed(rank, self.failures)) is not None:
                    return end
                self.group.raise_end(rank, self.failures)
            except KosError as error:
                return error.with_traceback(None)
        return None

    def awaited(self, tag: int) -> list[int]:
        with self.group.world.lock:
            return sorted({src for src, dst, t in self._posted if (dst, t) == (self.rank, tag)})

    def in_flight(self, rank: int, tag: int, receives: bool) -> bool:
        me = self.rank
        return (rank, me, tag) in self._posted if receives else (me, rank, tag) in self._sent

    def cancel(self, cancelled: Callable[[Any], bool]) -> None:
        with self.group.world.lock:
            remove(self._posted, lambda receive: receive.dst == self.rank and cancelled(receive))
            remove(self._sent, lambda m: m.src == self.rank and not m.complete and cancelled(m))

    # How a wait sleeps: on this rank's condition, which every message and every change of the group notifies.

    def idle(self) -> Any:
        return self

    def mark(self) -> int:
        """As in ``Backend.idle``."""
        return self.group.world.events[self._me]

    def pause(self, mark: int, seconds: float | None) -> None:
        """As in ``Backend.idle``."""
        world = self.group.world
        active = self.engine.outstanding() if world.watch is not None else []

        def waits() -> Waits:
            return [(str(work), work.backend.failures.in_world(work.backend.late(work).ranks)) for work in active]

        with world.lock:
            if world.events[self._me] == mark:
                world.wait(self._me, seconds, waits)

    # What a test watches and injects.

    def launch(self, work: Work[Any], run: Callable[[Work[Any]], Steps]) -> Steps:
        watch = self._watch
        if watch is None:
            return run(work)
        prepared = work.prepared
        if prepared.name not in ("split", "duplicate"):
            on_discard = watch.plan.inject(self.group.world, self._me, work) if watch.plan.faults else None
            tag = self.tag(work.sequence) if prepared.collective else prepared.operation.message.tag
            self._discard(tag, on_discard)
            if prepared.collective:
                watch.delay_collective()
        watch.record_launch(work, self._me)
        return run(work) if prepared.waits else watch.guard(work, run)

    def _discard(self, tag: int, on_discard: Callable[[], None] | None) -> None:
        """Discard messages with that tag from now on, and call ``on_discard`` for each; None: deliver them again."""
        self._discarded.pop(tag, None)
        if on_discard is not None:
            self._discarded[tag] = on_discard

    def report_two_threads(self, error: CollectiveError) -> bool:
        return self._watch is None or self._watch.report_two_threads(error)

    def synchronize(self, backend: Any) -> None:
        if self._watch is not None:
            self._watch.record_synchronize(backend, self._me)

    # Calls and failures.

    def agree(self, work: Work[Any], local: Callable[[], bool] | None) -> Callable[[], bool] | None:
        group, rank = self.group, self.rank
        with group.world.lock:
            group.raise_failure(rank, work.sequence)
            calls = self._calls.setdefault(work.sequence, {})
            if calls:
                peer, theirs = next(iter(calls.items()))
                if theirs.prepared.values != work.prepared.values:
                    both = ((each, call.text, call.fingerprint()) for each, call in ((peer, theirs), (rank, work)))
                    wrong = self.failures.mismatch(work.group, *both)
                    group.report_failure(wrong, work.sequence)
                    raise again(wrong)
            calls[rank] = work
            if len(calls) == self.size:
                del self._calls[work.sequence]
                group.notify_all()

        def all_arrived() -> bool:
            with group.world.lock:
                if len(calls) == self.size:
                    return True
                group.raise_failure(rank, work.sequence)
                for peer in set(range(self.size)) - set(calls):
                    group.raise_end(peer, self.failures, work)
            return False

        return all_arrived

    def absent(self, work: Work[Any]) -> list[int]:
        with self.group.world.lock:
            calls = self._calls.get(work.sequence)
            return [rank for rank in range(self.size) if rank not in calls] if calls else []

    def unreceived(self) -> list[str]:
        """The messages that were sent and not received."""
        return [
            f"rank {src} sent {message.array.dtype}[{message.array.size}] to rank {dst} with tag {tag}"
            for (src, dst, tag), messages in self._sent.items() if tag < COLLECTIVE_TAGS
            for message in messages
        ]  # fmt: skip

    def find_failure(self) -> KosError | None:
        return self.group.find_failure(self.failures)

    def report_failure(self, failure: KosError, sequence: int) -> None:
        self.group.report_failure(failure, sequence)

    def close(self, begun: int) -> None:
        self.group.close(self.rank, WHY_CLOSED, self.failures.closing(), 0.0)

    def abort(self, reason: str) -> str:
        self.group.close(self.rank, reason, self.failures.cause())
        return reason


class ThreadMessage:
    """One end of a message; ``other`` is the rank at the other end."""

    __slots__ = ("_transport", "array", "complete", "dst", "error", "other", "src", "tag")

    def __init__(self, transport: ThreadTransport, key: Key, array: Array, other: int) -> None:
        self._transport, self.array, self.other = transport, array, other
        self.src, self.dst, self.tag = key
        self.complete = False
        self.error: CollectiveMismatch | None = None

    def take(self, message: ThreadMessage) -> None:
        """Receive ``message``; the caller holds the lock of the world."""
        array, sent = self.array, message.array
        if sent.dtype == array.dtype and sent.size == array.size:
            np.copyto(array, sent)
            self.complete = True
        else:  # only the receiver raises
            expected, got = ((each.nbytes, each.dtype) for each in (array, sent))
            self.error = wrong_message(self._transport.failures, self.dst, expected, self.src, got)
        message.complete = True  # after the copy: the sender looks without the lock, and may then write to its array

    def done(self) -> bool:
        if self.complete:
            return True
        group = self._transport.group
        with group.world.lock:
            if self.complete:
                return True
            if self.error is not None:
                raise self.error
            self._transport.ask(self.tag)
            group.raise_end(self.other, self._transport.failures)
        return False
