"""The mock transport: ranks are threads of one process.  Results are real, and every check of a backend is made.

The rank that arrives last in a collective computes the results of all ranks, in rank order (``compute``).  Messages are
copied into mailboxes.  There is one mailbox per (source, destination, tag), and it keeps the order of its messages.
Collectives that ``computes`` excludes run by a schedule of such messages.

The ranks of a group share their state, so every check is exact.  If two calls differ, the second one raises at once.  A
collective completes only after every rank has arrived.  A wait for a rank that has ended raises at once, without a
timeout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np

from kos.comm.contract import Backend, Probe, Request
from kos.comm.control.base import ControlPlane
from kos.comm.control.threads import ThreadGroup, Waits
from kos.comm.failures import WHY_CLOSED
from kos.comm.matching import Envelope
from kos.comm.operation import ANY, AUTO, COLLECTIVE_TAGS, COLLECTIVES, GROUP_CALLS, PARTS, Facts, Operation
from kos.comm.reduction import ReduceOp
from kos.comm.transport import remove, take, wrong_message
from kos.comm.work import Engine, Steps, Work, raising
from kos.errors import CollectiveMismatch, KosError, plural

Array = np.ndarray[Any, Any]
Key = tuple[int, int, int]  # source, destination, tag
_numbers = count()
_COMPUTED = {"barrier", *GROUP_CALLS} | {name for name, row in COLLECTIVES.items() if not row.varies}
"""The collectives that ``compute`` supports: the pieces of all ranks have the same length.

All others run by messages, as ``transport.py`` says.
"""


class ThreadTransport(Backend):
    """The mailboxes of a group whose ranks are threads of this process, or that has one rank.

    A send copies its message and is complete at once.  If the program sends more than ``buffer_bytes`` (an argument of
    ``kos.testing.spawn``), the send is complete only when the message is received, as on other backends.
    """

    name = "mock"
    finds_any_tag = True

    def __init__(self, rendezvous: ControlPlane, engine: Engine) -> None:
        super().__init__(rendezvous, engine)
        assert rendezvous.threads is not None
        self.group: ThreadGroup = rendezvous.threads
        self._me = self.group.members[self.rank]
        engine.wake = partial(self.group.world.wake, self._me)
        # What the ranks share, guarded by the lock of their world.
        self._sent: dict[Key, deque[ThreadMessage]] = self.group.shared("mock sent", dict)
        self._posted: dict[Key, deque[ThreadMessage]] = self.group.shared("mock posted", dict)
        self._calls: dict[int, dict[int, Work[Any]]] = self.group.shared("mock calls", dict)
        self._watch = watch = self.group.world.watch
        self._buffer_bytes = float("inf") if watch is None else watch.buffer_bytes
        self._discarded: dict[int, Callable[[], None]] = {}  # tags whose messages are discarded -> callback

    @classmethod
    def probe(cls, rendezvous: ControlPlane) -> Probe:
        if rendezvous.threads is None:
            return Probe(False, "the ranks are not threads of one process")
        return Probe(True, f"{plural(rendezvous.size, 'rank')} in this process")

    def open(self, backend: Any) -> None:
        if self._watch is not None:
            self._watch.opened(backend, self.group)

    def tag(self, sequence: int) -> int:
        return COLLECTIVE_TAGS + sequence  # as on tcp, the tag identifies the collective

    def raise_reported(self, tag: int) -> None:
        """Raise the failure that ends messages with that tag."""
        self.group.raise_reported(self.failures, tag - COLLECTIVE_TAGS if tag >= COLLECTIVE_TAGS else None)

    # Messages.

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        group, key = self.group, (self.rank, peer, tag)
        message = ThreadMessage(self, key, array, peer)
        with group.world.lock:
            self.raise_reported(tag)
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
                tags = [tag] if tag != ANY else [t for *ends, t in self._sent if ends == [rank, self.rank]]
                queues = [self._sent.get((rank, self.rank, t)) for t in tags if t < COLLECTIVE_TAGS]
                if heads := [queue[0] for queue in queues if queue]:
                    first = min(heads, key=attrgetter("number"))
                    return Envelope(rank, first.array.dtype, first.array.size, first.tag)
        return None

    def end_of(self, rank: int) -> KosError | None:
        with self.group.world.lock:
            try:
                self.raise_reported(0)
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

    # A wait sleeps on this rank's condition.  Every message, every change of the group and every operation that another
    # thread of this rank ends notifies it.

    def waiter(self) -> Any:
        return self

    def mark(self) -> int:
        """See ``Backend.waiter``."""
        return self.group.world.events[self._me]

    def pause(self, mark: int, seconds: float | None) -> None:
        """See ``Backend.waiter``."""
        world = self.group.world
        active = self.engine.outstanding() if world.watch is not None else []

        def waits() -> Waits:
            return [(str(work), work.backend.failures.in_world(work.backend.late(work).ranks)) for work in active]

        with world.lock:
            if world.events[self._me] == mark:
                world.wait(self._me, seconds, waits)

    # Running collectives, and the hooks for tests that watch them or inject faults.

    def computes(self, o: Operation) -> bool:
        """Whether the last rank computes the collective.  If not, it runs as messages, which a test may drop."""
        plain = o.name in _COMPUTED and o.options.algorithm == AUTO and not o.options.compress and self.size > 1
        return plain and (self._watch is None or self._watch.plan.keeps_messages)

    def is_native(self, collective: str, nbytes: int) -> bool:
        return self.computes(Operation(collective, self.rank))

    def launch(self, work: Work[Any], run: Callable[[Work[Any]], Steps | None]) -> Steps | None:
        watch, prepared = self._watch, work.prepared
        if self.computes(prepared.operation):
            run = self._compute
        if watch is None:
            return run(work)
        if watch.plan.faults and prepared.name not in GROUP_CALLS:
            tag = self.tag(work.sequence) if prepared.collective else prepared.operation.message.tag
            self._discard(tag, watch.plan.inject(self.group.world, self._me, work))
        works = watch.launched[self._me]
        works[:] = [each for each in works if not each[0].reported]
        works.append((work, *work.record[2:4]))  # type: ignore[index]
        return run(work) if prepared.blocking else watch.guard(work, run)

    def _compute(self, work: Work[Any]) -> Steps | None:
        """Compute ``work`` in the ranks' memory.  Returns the steps that wait for other ranks; None on the last."""
        try:
            all_arrived = self._arrive(work, compute)
            return None if all_arrived() else self._await(work, all_arrived)
        except Exception as error:
            return raising(error)

    def _await(self, work: Work[Any], all_arrived: Callable[[], bool]) -> Steps:
        try:
            while not all_arrived():
                yield
        except BaseException:  # such as a timeout: no rank may write to its memory now
            with self.group.world.lock:
                self._calls.get(work.sequence, {}).pop(self.rank, None)
            raise

    def _discard(self, tag: int, on_discard: Callable[[], None] | None) -> None:
        """Discard later messages with that tag, and call ``on_discard`` for each one; None: deliver them again."""
        self._discarded.pop(tag, None)
        if on_discard is not None:
            self._discarded[tag] = on_discard

    def synchronize(self, backend: Any) -> None:
        if self._watch is not None:
            self._watch.record_synchronize(backend, self._me)

    # Calls and failures.

    def agree(self, work: Work[Any], local: Callable[[], bool] | None) -> Callable[[], bool] | None:
        return self._arrive(work, lambda works: None)

    def _arrive(self, work: Work[Any], compute: Callable[[Sequence[Work[Any]]], None]) -> Callable[[], bool]:
        """Compare the call with those of the other ranks.  The last rank computes.  Returns what ``agree`` returns."""
        group, rank = self.group, self.rank
        with group.world.lock:
            group.raise_reported(self.failures, work.sequence)
            calls = self._calls.setdefault(work.sequence, {})
            if calls:
                peer, theirs = next(iter(calls.items()))
                if theirs.prepared.values != work.prepared.values:
                    both = ((each, call.text, call.fingerprint()) for each, call in ((peer, theirs), (rank, work)))
                    wrong = self.failures.mismatch(work.group, *both)
                    self.report_failure(wrong, work.sequence)
                    raise wrong.copy()
            if len(calls) == self.size - 1:
                compute([work if each == rank else calls[each] for each in range(self.size)])
                del self._calls[work.sequence]
                group.notify_all()
            calls[rank] = work

        def all_arrived() -> bool:
            with group.world.lock:
                if len(calls) == self.size:
                    return True
                group.raise_reported(self.failures, work.sequence)
                for peer in set(range(self.size)) - set(calls):
                    group.raise_end(peer, self.failures, work)
            return False

        return all_arrived

    def absent(self, work: Work[Any]) -> list[int]:
        with self.group.world.lock:
            calls = self._calls.get(work.sequence)
            return [rank for rank in range(self.size) if rank not in calls] if calls else []

    def unreceived(self) -> list[str]:
        """Descriptions of the messages that were sent but not received."""
        return [
            f"rank {src} sent {message.array.dtype}[{message.array.size}] to rank {dst} with tag {tag}"
            for (src, dst, tag), messages in self._sent.items() if tag < COLLECTIVE_TAGS
            for message in messages
        ]  # fmt: skip

    def find_failure(self) -> KosError | None:
        """The failure of this group, or the loss of a rank that has not closed its communicator."""
        with self.group.world.lock:
            try:
                self.raise_reported(0)
                for rank in range(self.size) if self.rank not in self.failures.left else ():
                    if self.failures.left.get(rank, (0, ""))[1] != WHY_CLOSED:
                        self.group.raise_end(rank, self.failures)
            except KosError as error:
                return error.with_traceback(None)
        return None

    def report_failure(self, failure: KosError, sequence: int) -> None:
        self.group.for_each_log(lambda log: log.record(sequence, failure.copy()))

    def report_end(self, sequence: int, reason: str, cause: KosError | None) -> None:
        self.group.for_each_log(lambda log: log.record_left(self.rank, sequence, reason, cause))

    def close(self, begun: int) -> None:
        self.report_end(begun, WHY_CLOSED, self.failures.closing())


class ThreadMessage:
    """The sending or receiving end of a message.  ``other`` is the rank at the other end."""

    __slots__ = ("_transport", "array", "complete", "dst", "error", "number", "other", "src", "tag")

    def __init__(self, transport: ThreadTransport, key: Key, array: Array, other: int) -> None:
        self._transport, self.array, self.other = transport, array, other
        self.src, self.dst, self.tag = key
        self.number = next(_numbers)  # in the order of the calls
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
        message.complete = True  # after the copy: the sender reads it without the lock, and may then write

    def done(self) -> bool:
        if self.complete:
            return True
        group = self._transport.group
        with group.world.lock:
            if self.complete:
                return True
            if self.error is not None:
                raise self.error
            self._transport.raise_reported(self.tag)
            group.raise_end(self.other, self._transport.failures)
        return False


def compute(works: Sequence[Work[Any]]) -> None:
    """Compute a collective for all ranks.  ``works[r]`` is the call of rank r, whose memory this thread can access."""
    o = works[0].prepared.operation
    if o.name in ("barrier", *GROUP_CALLS):
        return
    if o.reduction is not None:
        results = _reduced(o.name, works)
    else:
        results = [_moved(COLLECTIVES[o.name], works, rank) for rank in range(len(works))]
    for work, result in zip(works, results, strict=True):
        if (mine := work.prepared.operation).recv is not None:
            if mine.reduction is not None:
                mine.reduction.finish(result, work.recv)
            elif work.recv is not result:  # the root's array in a broadcast may be read-only
                np.copyto(work.recv, result)


def _moved(row: Facts, works: Sequence[Work[Any]], rank: int) -> Array:
    """The result of rank ``rank`` in a collective that moves data; empty if it has none."""
    n, root = len(works), works[0].prepared.operation.root or 0
    inputs = [works[source].send for source in row.sources(rank, root, n)]
    pieces = [np.split(x, n)[rank] for x in inputs] if row.input == PARTS else inputs
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0)])


def _reduced(name: str, works: Sequence[Work[Any]]) -> list[Array]:
    """The result of a reduction on each rank, before ``finish``, in memory that no array of a rank shares."""
    first = works[0].prepared.operation.reduction
    total, sums = first.stage(works[0].send, None), list[Array]()
    for each in works[1:]:
        mine = each.prepared.operation.reduction
        if name in ("scan", "exscan"):
            sums.append(total.copy())
        first.combine(total, each.send if mine.is_plain else mine.stage(each.send, None))
    if name == "scan":
        return [*sums, total]
    if name == "exscan":
        return [total, *sums]  # rank 0 has no result
    if name == "reduce_scatter":
        return np.split(total, len(works))
    return [total.copy() if first.op is ReduceOp.AVG else total for _ in works]  # ``finish`` of AVG divides in place
