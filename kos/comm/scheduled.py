"""ScheduledCalls: runs every operation over messages between two ranks.

It stages the reduction (16-bit floats accumulate in fp32), tries a native call of the transport, and otherwise runs a
schedule over its messages.  So every transport has every operation, with the same semantics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from kos.comm.failures import Ledger, blaming
from kos.comm.reduction import Reduction
from kos.comm.schedules import runnable
from kos.comm.schedules.execute import execute
from kos.comm.transport import Request, Transport
from kos.comm.work import Steps, Work
from kos.errors import CollectiveMismatch

Array = np.ndarray[Any, Any]
Key = TypeVar("Key")
T = TypeVar("T")

class ScheduledCalls:
    """The operations of one rank over ``transport``, whose messages go through ``messages``.

    ``messages`` is the transport itself, or the shared memory of the group's host, which has the same methods.
    """

    def __init__(self, transport: Transport, messages: Any) -> None:
        self.rank, self.size, self.transport, self.messages = transport.rank, transport.size, transport, messages

    # The operations.

    def run(self, work: Work[Any], all_arrived: Callable[[], bool] | None) -> Steps:
        """The steps of ``work``; ``all_arrived`` is the poll of ``Transport.agree``."""
        carry: Callable[[Work[Any]], Steps] = getattr(self, f"_{work.name}" if work.collective else "_message")
        if all_arrived is None:
            yield from carry(work)
            return
        try:
            while not all_arrived():  # before data moves: MPI cannot receive a message that is too long
                yield
            for _ in carry(work):
                all_arrived()  # raises if the wait would never end
                yield
        except BaseException:
            tag = self.tag(work)
            self.messages.cancel(lambda message: message.tag == tag)
            raise

    def tag(self, work: Work[Any]) -> int:
        """The tag of the messages of a collective."""
        return self.transport.tag(work.sequence)

    def _carry(self, work: Work[Any], collective: str, **spaces: Array) -> Steps:
        """Run one staged collective, by a native call or a schedule."""
        if self.size == 1:
            if "input" in spaces:
                np.copyto(spaces["output"], spaces["input"])
            return
        native = self.transport.native(work, spaces, collective)
        if native is not None:
            yield from native
            return
        nbytes = max(space.nbytes for space in spaces.values())
        if nbytes == 0:
            return
        o = work.operation
        algorithm = self.transport.choose(o, collective, nbytes)
        schedule = runnable(collective, algorithm, self.size, root=o.root or 0)
        combine: Any = o.reduction and o.reduction.combine  # a schedule that only moves needs none
        yield from execute(schedule, self.rank, self.messages, spaces, combine, self.tag(work))

    def _all_reduce(self, work: Work[Any]) -> Steps:
        """Also reduce and scans; ranks without a result keep their input, and partial sums go to a copy."""
        x, out, reduction = _reducing(work)
        gets = work.operation.recv is not None
        staged = reduction.stage(x, out if gets else None)
        yield from self._carry(work, work.name, data=staged)
        if gets:
            reduction.finish(staged, out)

    _reduce = _scan = _exscan = _all_reduce

    def _reduce_scatter(self, work: Work[Any]) -> Steps:
        x, out, reduction = _reducing(work)
        staged = x if reduction.is_plain and not np.may_share_memory(x, out) else reduction.stage(x, None)
        part = out if out.dtype == reduction.carrier else np.empty(out.shape, reduction.carrier)
        yield from self._carry(work, "reduce_scatter", input=staged, output=part)
        reduction.finish(part, out)

    def _broadcast(self, work: Work[Any]) -> Steps:
        if self.rank == work.operation.root and work.send is not work.recv:
            np.copyto(work.recv, work.send)
        yield from self._carry(work, "broadcast", data=work.recv)

    def _all_gather(self, work: Work[Any]) -> Steps:
        """Also gather, scatter and all_to_all."""
        o = work.operation
        spaces = {"input": (o.send, work.send), "output": (o.recv, work.recv)}
        flat = {space: x for space, (end, x) in spaces.items() if end is not None}
        if len(flat) == 2 and np.may_share_memory(flat["input"], flat["output"]):
            flat["input"] = flat["input"].copy()
        yield from self._carry(work, o.name, **flat)

    _gather = _scatter = _all_to_all = _all_gather

    def _all_to_all_v(self, work: Work[Any]) -> Steps:
        """Also all_gather_v, gather_v and scatter_v."""
        o = work.operation
        send = self._pieces(work.send if o.send is not None else None, o.send_counts, o.root)
        recv = self._pieces(work.recv if o.recv is not None else None, o.recv_counts, o.root)
        yield from self._send_pieces(work, send, recv)

    _all_gather_v = _gather_v = _scatter_v = _all_to_all_v

    def _pieces(self, x: Array | None, counts: Sequence[int] | None, root: int | None) -> list[Array | None]:
        """The piece of ``x`` for or from each rank; without counts all of ``x``, for the root or for every rank."""
        if x is None:
            return [None] * self.size
        if counts is not None:
            return [*_split(x, counts)]
        return [x if root in (None, rank) else None for rank in range(self.size)]

    def _reduce_scatter_v(self, work: Work[Any]) -> Steps:
        x, out, reduction = _reducing(work)
        staged = x if reduction.is_plain else reduction.stage(x, None)
        parts = np.empty((self.size, out.size), staged.dtype)
        yield from self._send_pieces(work, _split(staged, work.operation.send_counts or ()), list(parts))
        for part in parts[1:]:
            reduction.combine(parts[0], part)
        reduction.finish(parts[0], out)

    def _barrier(self, work: Work[Any]) -> Steps:
        native = self.transport.native(work, {}, "barrier") if self.size > 1 else None
        yield from self._disseminate(self.tag(work)) if native is None else native

    _split = _duplicate = _barrier  # the rendezvous makes the groups, but does not compare these calls

    def _disseminate(self, tag: int) -> Steps:
        """Dissemination barrier (Hensgen, Finkel and Manber 1988): log2(size) rounds of empty messages."""
        empty, distance = np.empty(0, np.uint8), 1
        while distance < self.size:
            send = self.messages.isend(empty, (self.rank + distance) % self.size, tag)
            recv = self.messages.irecv(empty, (self.rank - distance) % self.size, tag)
            yield from _wait_for(recv, send)  # receive first: over MPI it is matched only when it is polled
            distance *= 2

    def _message(self, work: Work[Any]) -> Steps:
        """send, recv and send_recv; posts the receive first, so that two ranks may exchange."""
        message = work.operation.message

        def post() -> Iterator[Request]:
            if message.src is not None:
                yield self.messages.irecv(work.recv, message.src, message.recv_tag)
            if message.dst is not None:
                yield self.messages.isend(work.send, message.dst, message.tag)

        return self._finish(post())

    def _finish(self, post: Iterable[Request]) -> Steps:
        """Waits for the messages that ``post`` posts."""
        requests: list[Request] = []
        try:
            for request in post:
                requests.append(request)
            wrong: CollectiveMismatch | None = None
            for request in requests:
                try:
                    yield from _wait_for(request)
                except CollectiveMismatch as error:  # of the receive; the send continues
                    wrong = wrong or error
            if wrong is not None:
                raise wrong
        except BaseException:  # such as a timeout: cancel only these requests, not others with their tag
            self.messages.cancel(lambda each: each in requests)
            raise

    def _send_pieces(self, work: Work[Any], send: Sequence[Array | None], recv: Sequence[Array | None]) -> Steps:
        """Send piece j to rank j and receive piece j from rank j, all at once; None: no message.

        Empty pieces are sent too: the receiver may expect a longer one, which is a mismatch.
        """
        tag, messages = self.tag(work), self.messages
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]  # ranks start with different peers
        requests = [messages.irecv(x, peer, tag) for peer in peers if (x := recv[peer]) is not None]
        requests += [messages.isend(x, peer, tag) for peer in peers if (x := send[peer]) is not None]
        mine, own = send[self.rank], recv[self.rank]
        if mine is not None and own is not None:
            np.copyto(own, mine.copy())
        yield from _wait_for(*requests)
        if work.name == "all_to_all_v":
            # Only the two ranks of a pair know whether their counts agree: wait until all pairs have agreed.
            yield from self._disseminate(tag)


def _wait_for(*requests: Request) -> Steps:
    for request in requests:
        while not request.done():
            yield


def _reducing(work: Work[Any]) -> tuple[Array, Array, Reduction]:
    o = work.operation
    assert o.reduction is not None
    return work.send, work.send if o.recv is None else work.recv, o.reduction


def _split(x: Array, counts: Sequence[int]) -> list[Array]:
    return [x[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


# Queues of messages by key, for transports.


def take(queues: dict[Key, deque[T]], key: Key) -> T | None:
    """The first entry of that key's queue; an empty queue is removed."""
    queue = queues.get(key)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first


def remove(queues: dict[Key, deque[T]], cancelled: Callable[[T], bool]) -> None:
    """Remove the cancelled entries from the queues."""
    for key in list(queues):
        queues[key] = deque(entry for entry in queues[key] if not cancelled(entry))
        if not queues[key]:
            del queues[key]


def wrong_message(
    ledger: Ledger, receiver: int, expected: tuple[int, np.dtype[Any]], sender: int, got: tuple[int, np.dtype[Any]]
) -> CollectiveMismatch:
    """The error of a message whose bytes and dtype differ from those of its receive, for both ends."""
    to, source = (ledger.names([rank], False) for rank in (receiver, sender))
    what, more = (
        f"{nbytes // dtype.itemsize} elements of {dtype}" if nbytes % dtype.itemsize == 0 else f"{nbytes} bytes"
        for nbytes, dtype in (expected, got)
    )
    wrong = CollectiveMismatch(f"{to} expected {what} from {source}, got {more}")
    return blaming(wrong, sorted(ledger.world[rank] for rank in (receiver, sender)))
