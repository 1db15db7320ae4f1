"""ScheduledCalls: runs every operation over a transport, which is a ``contract.Backend`` for host memory.

The transport of a ``HostBackend`` (``host/host_backend.py``) is ``tcp``, ``mpi``, ``mock``, or a class of another
package.
ScheduledCalls stages the reduction (16-bit floats accumulate in fp32).  It then makes a native call of the transport if
there is one, and otherwise runs a schedule of messages.  So every transport has every operation, with the same
semantics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import chain
from operator import attrgetter
from time import time_ns
from typing import Any, TypeVar

import numpy as np

from kos.comm import compression
from kos.comm.contract import Backend, Request
from kos.comm.failures import FailureLog
from kos.comm.matching import BYTES, Matching, Receive
from kos.comm.operation import ANY, AUTO, COLLECTIVES, PARTS, Operation
from kos.comm.recorder import COMPLETED
from kos.comm.reduction import Reduction
from kos.comm.schedules import runnable
from kos.comm.schedules.execute import execute
from kos.comm.work import Steps, Work
from kos.errors import CollectiveError, CollectiveMismatch

Array = np.ndarray[Any, Any]
Key = TypeVar("Key")
T = TypeVar("T")

_SMALL = 32 * 1024  # bytes up to which latency, not bandwidth, decides between schedules
_NBYTES = attrgetter("nbytes")


class ScheduledCalls:
    """The operations of one rank over ``transport``, or through ``shared``, the shared memory of its host.

    Messages of collectives go through shared memory to the ranks of this host.  Messages of the program go through it
    only if it has all ranks of the group, as their matching cannot be split.

    The method ``_NAME`` runs the collective NAME, for example ``_all_reduce``, as a generator of steps.  Collectives
    that only move data need none (``_move``).  The steps write the result into ``work.recv``.  If the call returns
    several objects, the steps replace ``work.array`` by a tuple, as for a ``recv`` from any rank.  In this case the
    method of ``Operations`` sets a ``Buffer.convert`` that takes this tuple before it makes the Work.
    """

    def __init__(self, transport: Backend, shared: Any = None) -> None:
        self.rank, self.size, self.transport = transport.rank, transport.size, transport
        self._shared, self._status = shared, transport.failures.status
        self.calls = None if shared is None else shared.calls
        """The ``FingerprintRing`` of this host, until the communicator is closed."""
        self.begun = 0
        """The number of the next collective."""
        near = () if shared is None else shared.ranks
        self._carriers = [shared if rank in near else transport for rank in range(self.size)]
        self.messages: Any = transport if transport in self._carriers else shared
        """What carries the messages of the program."""
        self._one_host = self.size == 1 or self.messages is not transport
        self._launch = None if type(transport).launch is Backend.launch else transport.launch
        if all(self._carriers[rank] is self.messages for rank in range(self.size) if rank != self.rank):
            self.isend, self.irecv = self.messages.isend, self.messages.irecv  # type: ignore
        self.matching = Matching(self.rank, self.size, self.messages, transport.failures)
        self.arriving = set[int]()  # the numbers of the collectives that wait for other ranks to begin them
        self.native = set[int]()  # the numbers of the collectives that run in a native call of the transport
        self.local = transport.ranks_per_host or 1
        """The number of ranks on each host, if there are several hosts with the same number of ranks; else 1."""
        self._inside, self._across = self._neighbours(transport.ranks_per_host or self.size)
        others = [(self.rank + step) % self.size for step in range(1, self.size)]  # ranks start with different peers
        self.peers = sorted(others, key=self._inside.__contains__)  # those of other hosts first

    def _neighbours(self, local: int) -> tuple[list[int], list[int]]:
        """The other ranks of this host, and the ranks with this local rank on other hosts; in ring order."""
        first = self.rank - self.rank % local
        inside = [first + (self.rank + step) % local for step in range(1, local)]
        return inside, [(self.rank + step) % self.size for step in range(local, self.size, local)]

    def phases(self) -> tuple[ScheduledCalls, ScheduledCalls]:
        """The calls among the ranks of this host, and those among the ranks with this local rank on all hosts."""
        first, place = self.rank - self.rank % self.local, self.rank % self.local
        return self._among(range(first, first + self.local)), self._among(range(place, self.size, self.local))

    def _among(self, ranks: range) -> ScheduledCalls:
        """The calls among these ranks, which are numbered from 0 on.  They use messages only."""
        part = copy(self)
        part.rank, part.size = ranks.index(self.rank), len(ranks)
        part.isend = lambda x, peer, tag: self.isend(x, ranks[peer], tag)  # type: ignore[method-assign]
        part.irecv = lambda x, peer, tag: self.irecv(x, ranks[peer], tag)  # type: ignore[method-assign]
        part.peers = [(part.rank + step) % part.size for step in range(1, part.size)]
        part._inside, part._across = [], part.peers
        return part

    # Messages of collectives.

    def isend(self, x: Array, peer: int, tag: int) -> Request:
        """As ``Backend.isend``."""
        request: Request = self._carriers[peer].isend(x, peer, tag)
        return request

    def irecv(self, x: Array, peer: int, tag: int) -> Request:
        """As ``Backend.irecv``."""
        request: Request = self._carriers[peer].irecv(x, peer, tag)
        return request

    def awaited(self, tag: int) -> list[int]:
        """As ``Backend.awaited``."""
        inside = [] if self._shared is None else self._shared.awaited(tag)
        return sorted({*inside, *self.transport.awaited(tag)})

    # The operations.

    def start(self, work: Work[Any]) -> Steps | None:
        """Begin ``work``; returns the steps that are left."""
        if self._status.last is not None:
            self._status.clear_failure()
        collective = work.prepared.collective
        if self._launch is None:
            return self._collective(work) if collective else self.message(work)
        try:
            steps = self._launch(work, self._collective if collective else self.message)
        except CollectiveError as error:  # a fault that a test injects
            raise work.backend.to_error(work, error) from None
        if collective and (steps is None or not self.transport.processes):  # else ``_collective`` does so
            self.begun = work.sequence + 1
        if steps is None:
            work.record[COMPLETED] = time_ns()  # type: ignore[index]
        return steps

    def _collective(self, work: Work[Any]) -> Steps:
        """The steps of a collective over messages."""
        prepared, sequence, calls = work.prepared, work.sequence, self.calls
        name = "compressed" if prepared.operation.options.compress and self.size > 1 else prepared.name
        carry: Callable[[Work[Any]], Steps] = getattr(self, f"_{name}", self._move)
        self.begun = sequence + 1  # the engine has it: if a signal's handler raises before, it has not begun
        all_arrived = None if calls is None else calls.publish(work)
        if not self._one_host:
            all_arrived = self.transport.agree(work, all_arrived)
        try:
            if all_arrived is not None and not all_arrived():  # MPI cannot receive a message that is too long
                self.arriving.add(sequence)
                while not all_arrived():
                    yield
                self.arriving.discard(sequence)
            for _ in carry(work):
                if all_arrived is not None:
                    all_arrived()  # raises if the wait would never end
                yield
        except BaseException:
            self.arriving.discard(sequence)
            tag = self.tag(work)
            for carrier in {*self._carriers}:
                carrier.cancel(lambda message: message.tag == tag)
            raise
        if not self._one_host:
            self.transport.complete(work)

    def tag(self, work: Work[Any]) -> int:
        """The tag of the messages of a collective."""
        return self.transport.tag(work.sequence)

    def _carry(self, work: Work[Any], collective: str, **spaces: Array) -> Iterable[None]:
        """The steps of one staged collective, by a native call or a schedule."""
        if self.size == 1:
            if "input" in spaces:
                np.copyto(spaces["output"], spaces["input"])
            return ()
        native = self.transport.native(work, spaces, collective)
        if native is not None:
            return self._in_native(work, native)
        nbytes = max(map(_NBYTES, spaces.values()))
        if nbytes == 0:
            return ()
        o = work.prepared.operation
        algorithm = self.schedule(o, collective, nbytes)
        schedule = runnable(collective, algorithm, self.size, o.root or 0, self.transport.ranks_per_host)
        combine: Any = o.reduction and o.reduction.combine  # a schedule that only moves needs none
        return execute(schedule, self.rank, self, spaces, combine, self.transport.tag(work.sequence))

    def _in_native(self, work: Work[Any], steps: Steps) -> Steps:
        self.native.add(work.sequence)
        try:
            yield from steps
        finally:
            self.native.discard(work.sequence)

    def schedule(self, o: Operation, collective: str, nbytes: int) -> str:
        """The schedule of a call: the choice of the program, or of the transport, or else the default."""
        if o.options.algorithm != AUTO:
            return o.options.algorithm
        if (chosen := self.transport.choose(o, collective, nbytes)) is not None:
            return chosen
        row = COLLECTIVES[collective]
        if o.options.deterministic:
            return row.ordered or row.schedule
        if collective == "all_reduce" and nbytes <= _SMALL:  # one round of messages, if these are few and short
            return "one_shot" if nbytes * (self.size - 1) <= _SMALL else "halving_doubling"
        several = (self.transport.ranks_per_host or 1) > 1
        return "hierarchical" if several and row.hierarchical else row.schedule

    def _all_reduce(self, work: Work[Any]) -> Steps:
        """all_reduce, reduce and scans.  Ranks without a result keep their input: partial sums are in a copy."""
        (x, out, reduction), o = _reducing(work), work.prepared.operation
        gets = o.recv is not None
        staged = reduction.stage(x, out if gets else None)
        yield from self._carry(work, o.name, data=staged)
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
        if self.rank == work.prepared.operation.root and work.send is not work.recv:
            np.copyto(work.recv, work.send)
        yield from self._carry(work, "broadcast", data=work.recv)

    def _move(self, work: Work[Any]) -> Steps:
        """A collective that only moves data: by its schedule, or each piece by a message of its own."""
        o, me, n, root = work.prepared.operation, self.rank, self.size, work.prepared.operation.root or 0
        row = COLLECTIVES[o.name]
        if row.schedule:
            spaces = {"input": (o.send, work.send), "output": (o.recv, work.recv)}
            flat = {space: x for space, (end, x) in spaces.items() if end is not None}
            if len(flat) == 2 and np.may_share_memory(flat["input"], flat["output"]):
                flat["input"] = flat["input"].copy()
            yield from self._carry(work, o.name, **flat)
            return
        targets = [row.pairs(me, rank, root, n) for rank in range(n)]
        send = self._pieces(work.send, o.send_counts, targets, row.input)
        sources = [row.pairs(rank, me, root, n) for rank in range(n)]
        recv = self._pieces(work.recv, o.recv_counts, sources, row.output)
        yield from self.send_pieces(work, send.__getitem__, recv)

    def _all_gather_v(self, work: Work[Any]) -> Steps:
        pieces = compression.split(work.recv, work.prepared.operation.recv_counts or ())
        yield from self.send_to_all(work, [work.send], [[piece] for piece in pieces])

    def _pieces(
        self, x: Any, counts: Sequence[int] | None, peers: Sequence[bool], kind: str
    ) -> list[Array | None]:  # fmt: skip
        """The piece of ``x`` for each rank, or from it; None for a rank that is none of ``peers``."""
        if not any(peers):
            return [None] * self.size
        pieces = compression.split(x, counts or [x.size // self.size] * self.size) if kind == PARTS else None
        return [(x if pieces is None else pieces[rank]) if peer else None for rank, peer in enumerate(peers)]

    def _reduce_scatter_v(self, work: Work[Any]) -> Steps:
        x, out, reduction = _reducing(work)
        staged = x if reduction.is_plain else reduction.stage(x, None)
        parts = np.empty((self.size, out.size), staged.dtype)
        pieces = compression.split(staged, work.prepared.operation.send_counts or ())
        yield from self.send_pieces(work, pieces.__getitem__, list(parts))
        for part in parts[1:]:
            reduction.combine(parts[0], part)
        reduction.finish(parts[0], out)

    def _compressed(self, work: Work[Any]) -> Steps:
        """Any operation that sends compressed data."""
        return compression.steps(work, self)

    def _barrier(self, work: Work[Any]) -> Steps:
        native = self.transport.native(work, {}, "barrier") if self.size > 1 else None
        yield from self._disseminate(self.tag(work)) if native is None else native

    _split = _group = _grid = _duplicate = _barrier  # the rendezvous makes the groups, but does not compare these calls

    def _disseminate(self, tag: int) -> Steps:
        """Dissemination barrier (Hensgen, Finkel and Manber 1988): log2(size) rounds of empty messages."""
        empty, distance = np.empty(0, np.uint8), 1
        while distance < self.size:
            send = self.isend(empty, (self.rank + distance) % self.size, tag)
            recv = self.irecv(empty, (self.rank - distance) % self.size, tag)
            yield from self.wait_for(recv, send)  # receive first: over MPI it is matched only when it is polled
            distance *= 2

    def message(self, work: Work[Any]) -> Steps:
        """The steps of a message or a probe; posts a receive first, so that two ranks may exchange."""
        name, message = work.prepared.name, work.prepared.operation.message

        def post() -> Iterator[Request]:
            if name == "probe":
                yield Receive(self.matching, message.src, message.recv_tag, probe=True)
            elif message.src is not None:
                yield self.matching.receive(work.recv if name != "recv_bytes" else None, message.src, message.recv_tag)
            if message.dst is not None:
                yield self.messages.isend(work.send, message.dst, message.tag)

        requests: list[Request] = []
        yield from self._finish(post(), requests)
        first: Any = requests[0]
        if name == "probe":
            work.array = first.envelope
        elif name == "recv_bytes":
            work.array = first.array.tobytes()
        if name != "probe" and message.recv_tag == ANY:
            work.array = work.array, first.envelope.src, first.envelope.tag
        elif name != "probe" and message.src == ANY:
            work.array = work.array, first.envelope.src

    def _finish(self, post: Iterable[Request], requests: list[Request]) -> Steps:
        """Waits for the messages that ``post`` posts, which it adds to ``requests``."""
        try:
            for request in post:
                requests.append(request)
            wrong: list[CollectiveMismatch] = []  # of the receive; the send continues
            yield from self.wait_for(*requests, mismatches=wrong)
            if wrong:
                raise wrong[0]
        except BaseException:  # such as a timeout: cancel only these requests, not others with their tag
            self.matching.cancel(requests)
            raise

    def send_pieces(
        self, work: Work[Any], send: Callable[[int], Array | None], recv: Sequence[Array | None],
        check: Callable[[], None] = lambda: None,
    ) -> Steps:  # fmt: skip
        """Send piece ``send(j)`` to rank j and receive piece j from rank j, all at once; None: no message.

        Empty pieces are sent too: the receiver may expect a longer one, which is a mismatch.  A piece is sent as soon
        as ``send`` returns it, pieces for other hosts first.
        """
        tag = self.tag(work)
        requests = [self.irecv(x, peer, tag) for peer in self.peers if (x := recv[peer]) is not None]
        requests += [self.isend(x, peer, tag) for peer in self.peers if (x := send(peer)) is not None]
        mine, own = send(self.rank), recv[self.rank]
        if mine is not None and own is not None:
            np.copyto(own, mine.copy())
        yield from self.wait_for(*requests)
        check()  # raises if what has arrived is wrong
        if work.prepared.name == "all_to_all_v":
            # Only the two ranks of a pair know whether their counts agree: wait until all pairs have agreed.
            yield from self._disseminate(tag)

    def send_to_all(
        self, work: Work[Any], mine: Iterable[Array | None], arrived: Sequence[Sequence[Any]]
    ) -> Steps:
        """Send all segments of ``mine`` to every rank, and receive those of rank j into ``arrived[j]``.

        One rank of each other host receives them, and forwards them within its host.  ``mine`` may yield None to wait.
        """
        tag, size, local = self.tag(work), self.size, len(self._inside) + 1
        first = [[(self.irecv(x, peer, tag), x) for x in arrived[peer]] for peer in self._across]
        requests = [
            self.irecv(x, peer, tag)
            for peer in self._inside for host in range(0, size, local) for x in arrived[(peer + host) % size]
        ]  # fmt: skip
        own = iter(arrived[self.rank])
        for x in mine:
            if x is None:
                yield
            else:
                np.copyto(next(own), x)
                requests += [self.isend(x, peer, tag) for peer in (*self._across, *self._inside)]
        for message, x in chain(*first):
            yield from self.wait_for(message)
            requests += [self.isend(x, peer, tag) for peer in self._inside]
        yield from self.wait_for(*requests)

    @staticmethod
    def wait_for(*requests: Request, mismatches: list[CollectiveMismatch] | None = None) -> Steps:
        """Wait for all ``requests``.  A CollectiveMismatch is appended to ``mismatches`` if that is given, else raised.

        Polling one message advances all messages of its transport.  A message within the host and one between hosts are
        polled alternately, because other ranks may wait until this rank advances a message of the other kind.
        """
        waiting: dict[bool, deque[Request]] = {}
        for request in requests:
            waiting.setdefault(getattr(request, "within_host", False), deque()).append(request)
        while waiting:
            for within_host, queue in list(waiting.items()):
                while queue:
                    try:
                        if not queue[0].done():
                            break
                    except CollectiveMismatch as error:
                        if mismatches is None:
                            raise
                        mismatches.append(error)
                    queue.popleft()
                else:
                    del waiting[within_host]
            if waiting:
                yield


def _reducing(work: Work[Any]) -> tuple[Array, Array, Reduction]:
    o = work.prepared.operation
    assert o.reduction is not None
    return work.send, work.send if o.recv is None else work.recv, o.reduction


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
    failures: FailureLog, receiver: int, expected: tuple[int, np.dtype[Any]], sender: int,
    got: tuple[int, np.dtype[Any]],
) -> CollectiveMismatch:  # fmt: skip
    """The error of a message whose bytes and dtype differ from those of its receive, for both ends."""
    to, source = (failures.names([rank], False) for rank in (receiver, sender))
    what, more = (
        f"{nbytes // dtype.itemsize} elements of {dtype}" if nbytes % dtype.itemsize == 0 else f"{nbytes} bytes"
        for nbytes, dtype in (expected, got)
    )
    if expected == (got[0], BYTES):  # also that of recv_bytes, which expects no length
        what = "elements of uint8"
    ranks = sorted(failures.world[rank] for rank in (receiver, sender))
    return CollectiveMismatch(f"{to} expected {what} from {source}, got {more}", ranks=ranks, expected=what, got=more)
