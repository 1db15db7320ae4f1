"""Backend: the trait behind a Communicator.

A backend brings a point-to-point transport and, where it has them, native calls.  This base class carries
every operation: it stages the reduction (16-bit floats accumulate in fp32), asks ``native`` first, and runs
a schedule over the transport where there is no native call.  So every backend has every operation, and
every operation has one meaning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from kos.comm.cached import CallCache
from kos.comm.failures import again
from kos.comm.operation import AUTO, COLLECTIVE_TAGS, Call, Operation
from kos.comm.recorder import failed
from kos.comm.reduction import Reduction
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.schedules import runnable
from kos.comm.schedules.execute import Request, Transport, execute
from kos.comm.work import Engine, Idle, Steps, Work
from kos.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    Interrupted,
    InvalidArgument,
    KosError,
    RankLost,
)

Array = np.ndarray[Any, Any]
Key = TypeVar("Key")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend can carry a group; ``reason`` says why not (or with what)."""

    usable: bool
    reason: str
    claim: str = ""
    """What only one rank of the group may use, such as a GPU."""


_UNNAMED = (CollectiveMismatch, CollectiveTimeout, RankLost)  # raised where the call is not known, by a transport

SHRINKS = "it shrinks the communicator"  # how a rank that goes on without the lost ones is gone

# The schedule of each collective, and the one that adds in rank order.
_DEFAULTS = {
    "all_reduce": ("ring", "two_shot"),
    "reduce": ("tree", "one_shot"),
    "reduce_scatter": ("ring", "one_shot"),
    "broadcast": ("tree", "tree"),
    "all_gather": ("ring", "ring"),
    "all_to_all": ("pairwise", "pairwise"),
    "gather": ("direct", "direct"),
    "scatter": ("direct", "direct"),
}
_SMALL = 32 * 1024  # bytes under which latency, not bandwidth, decides between schedules

_SHOWN = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
_SHOWN_BYTES = {"1 KB": 1 << 10, "32 KB": 1 << 15, "1 MB": 1 << 20, "32 MB": 1 << 25, "1 GB": 1 << 30}
_BUFFERS = {"": (False, False), "symmetric": (True, False), "graph": (False, True), "symmetric, graph": (True, True)}


class Backend(ABC):
    """One way to carry collectives.  Subclasses give ``name``, ``probe``, ``transport`` and ``idle``."""

    name: str
    on_gpu: ClassVar[bool] = False
    """Whether it carries arrays on GPUs, and no others.  Of those, ``auto`` uses kos's own alone."""
    device: int | None = None
    """The GPU whose memory it moves, by its number in this process; None for memory of the host."""

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None) -> None:
        self.rank, self.size, self.ledger = rendezvous.rank, rendezvous.size, rendezvous.ledger
        self.timeout = rendezvous.timeout  # seconds that it waits where no operation says; follows the communicator's
        self.engine = engine or Engine()
        self.transport: Transport
        self.cache = CallCache()
        self.broken: KosError | None = None  # the first failure of a collective: the ranks are out of step

    @classmethod
    @abstractmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        """Can this backend carry this group, as far as this rank can see?  Never raises."""

    @abstractmethod
    def idle(self) -> Idle:
        """How one wait of this backend waits."""

    def split(self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0) -> Backend | None:
        """The same kind of backend for a part of the group; its operations progress with this one's.

        Called on every rank, as ``Communicator.split`` was; ``rendezvous`` is None where ``color`` is.
        """
        return None if rendezvous is None else type(self)(rendezvous, self.engine)

    def revoke(self, reason: str) -> None:
        """``abort`` before ``shrink``, which may build upon what this leaves."""
        self.abort(reason)

    def shrink(self, rendezvous: Rendezvous) -> Backend:
        """The backend of the ranks of ``rendezvous``, which are left of this one's.  Collective, after ``revoke``."""
        backend = self.split(rendezvous, 0, rendezvous.rank)
        assert backend is not None
        return backend

    def close(self) -> None:  # noqa: B027 -- nothing to do unless a backend holds something
        """Give back what the backend holds.  Collective; nothing may be in flight."""

    def abort(self, reason: str) -> None:  # noqa: B027
        """Give up on everything in flight without waiting for anybody; ranks that can be told hear why."""

    def synchronize(  # noqa: B027
        self, timeout: float | None = None, stream: int | None = None, until: Callable[[], bool] | None = None
    ) -> None:
        """Wait on the host for what is queued on a GPU."""

    def allocate(self, shape: Any, dtype: Any) -> Any:
        """An array in the memory that this backend moves best.  Collective."""
        return np.empty(shape, dtype)

    def prepare(self, call: Call) -> None:
        """Refuse, before anything is sent, what this backend cannot carry; find what can be found beforehand.

        Raises InvalidArgument, for memory of a GPU for one.
        """
        o, options = call.operation, call.operation.options
        buffer = o.send or o.recv
        if buffer is not None and buffer.device is not None:
            raise InvalidArgument(
                f"x: expected memory of the host (backend {self.name}), got {type(buffer.array).__name__} in memory of "
                f"{buffer.place}; nccl, peer and auto carry it"
            )
        if options.algorithm != AUTO and self.size > 1:
            runnable(o.name, options.algorithm, self.size, root=o.root or 0)

    @property
    def carries_host(self) -> bool:
        """Whether it carries operations on memory of the host, those of ``split`` and ``all_gather_bytes`` included."""
        return not self.on_gpu

    def details(self) -> list[tuple[str, str, str]]:
        """Rows for ``Communicator.explain``: what it uses, whether, and why."""
        return []

    def owns(self, work: Work[Any]) -> bool:
        """Whether it started ``work``; splits share an engine."""
        return work.backend is self

    def raise_failure(self, what: object) -> None:
        """Raise the first failure of this communicator, if there was one, from ``what``, which is called now."""
        if self.broken is not None:
            raise again(self.broken, f"{what}: the communicator failed before: {self.broken}")

    def refuse(self, call: Call) -> NoReturn:
        """Raise the first failure of this communicator from ``call``, which is on record already."""
        try:
            self.raise_failure(call.name)
        except KosError as error:
            failed(call, error)
            raise
        raise AssertionError(f"{call}: refused without a reason")

    def start(self, call: Call) -> Work[Any] | None:
        """Launch a prepared call; None where it is queued in the order of its stream, so that nobody waits."""
        if self.broken is not None:
            self.refuse(call)
        if self.ledger.board.last is not None:
            self.ledger.board.clear_failure()
        work: Work[Any] = Work(call, self._steps(call), self)
        self.engine.launch(work)
        return work

    def in_order(self, calls: Sequence[Call]) -> Sequence[Call]:
        """The calls of a batch in the order in which ``start_all`` begins them, the same on all ranks."""
        return calls

    def start_all(self, calls: Sequence[Call], overlap: bool) -> list[Work[Any]]:
        """Launch the calls of a batch together; with ``overlap`` beside the streams of their arrays."""
        return [work for work in map(self.start, calls) if work is not None]

    def queued(self, call: Call) -> Work[Any] | None:
        """What waits for a prepared call where ``start`` returns None; None where ``start`` returns a Work."""
        return None

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        """By which backend and algorithm an operation on float32 goes; ``nbytes`` are those that a rank brings."""
        return f"{self.name} {self.choose(Operation(name, self.rank), name, nbytes)}"

    def routes(self, place: str = "") -> list[tuple[str, ...]]:
        """``route_of`` the usual operations as the rows of a table, for ``Communicator.explain``."""
        rows: list[tuple[str, ...]] = [(f"float32{place}", *_SHOWN_BYTES)]
        for name in _SHOWN if self.size > 1 else ():
            alike: dict[tuple[str, ...], list[str]] = {}
            for kind, how in _BUFFERS.items():
                cells = tuple(self.route_of(name, nbytes, *how) for nbytes in _SHOWN_BYTES.values())
                alike.setdefault(cells, []).append(kind)
            labels = (name if "" in kinds else f"{name} ({'; '.join(kinds)})" for kinds in alike.values())
            rows += [(label, *cells) for label, cells in zip(labels, alike, strict=True)]
        return rows if rows[1:] else []

    # What a subclass may add.

    def agree(self, call: Call) -> Callable[[], bool] | None:
        """Compare this call with the other ranks' calls of the same sequence number.

        Returns a poll that says whether every rank has come (None if this backend cannot see), and raises
        CollectiveMismatch where the calls do not belong together.
        """
        return None

    def native(self, call: Call, spaces: Mapping[str, Array], collective: str) -> Steps | None:
        """The backend's own call for one staged collective, or None to have it run as a schedule."""
        return None

    def missing(self, call: Call) -> str:
        """At a timeout: which ranks did not arrive, as far as known."""
        if call.collective:
            return "which ranks did not arrive is not known"
        message = call.operation.message
        if message.src is None:
            return f"rank {message.dst} did not receive"
        return f"rank {message.src} sent nothing with tag {message.recv_tag}"

    def timed_out(self, call: Call, seconds: float | None) -> KosError:
        """The error of an operation that took too long."""
        return CollectiveTimeout(f"{call}: not complete after {seconds} s; {self.missing(call)}")

    def report_wait(self, call: Call | None) -> None:  # noqa: B027
        """This rank has waited for ``call`` for a while, and still does; None: no longer."""

    def failed(self, call: Call, error: Exception) -> KosError:
        """What to raise for an error in an operation; also leaves its memory safe to give back."""
        if not isinstance(error, KosError):
            cause, error = error, CollectiveError(f"{call}: {type(error).__name__}: {error}")
            error.__cause__ = cause
        elif isinstance(error, _UNNAMED) and f"{call.name} #" not in str(error):
            error = again(error, f"{call}: {error}")
        if ends_group(call, error) and self.broken is None:
            self.broken = again(error)
        return error

    # How operations are carried.

    def _steps(self, call: Call) -> Steps:
        carry: Callable[[Call], Steps] = getattr(self, f"_{call.name}" if call.collective else "_message")
        everybody_came = self.agree(call) if call.collective else None
        if everybody_came is None:
            yield from carry(call)
            return
        try:
            while not everybody_came():  # before a byte moves: lengths that differ are not MPI's to meet
                yield
            for _ in carry(call):
                everybody_came()  # raises where waiting would not end
                yield
        except BaseException:
            tag = self._tag(call)
            self.transport.cancel(lambda message: message.tag == tag)
            raise

    def _carry(self, call: Call, collective: str, **spaces: Array) -> Steps:
        """Run one staged collective, natively or as a schedule."""
        o = call.operation
        if self.size == 1:
            if "input" in spaces:
                np.copyto(spaces["output"], spaces["input"])
            return
        native = self.native(call, spaces, collective)
        if native is not None:
            yield from native
            return
        nbytes = max(space.nbytes for space in spaces.values())
        if nbytes == 0:
            return
        algorithm = self.choose(o, collective, nbytes)
        schedule = runnable(collective, algorithm, self.size, root=o.root or 0)
        combine: Any = o.reduction and o.reduction.combine  # a schedule that only moves asks for none
        yield from execute(schedule, self.rank, self.transport, spaces, combine, self._tag(call))

    def choose(self, o: Operation, collective: str, nbytes: int) -> str:
        """The schedule for a call that leaves the choice to us."""
        if o.options.algorithm != AUTO:
            return o.options.algorithm
        if collective == "all_reduce" and nbytes <= _SMALL and not o.options.deterministic:
            return "halving_doubling"
        return _DEFAULTS[collective][o.options.deterministic]

    def _tag(self, call: Call) -> int:
        return COLLECTIVE_TAGS + call.sequence % COLLECTIVE_TAGS

    def _all_reduce(self, call: Call) -> Steps:
        """Also reduce, where ranks other than the root keep their input: partial sums live in a copy."""
        o = call.operation
        x, out, reduction = _reducing(o)
        gets = o.root is None or o.root == self.rank
        staged = reduction.stage(x, out if gets else None)
        yield from self._carry(call, o.name, data=staged)
        if gets:
            reduction.finish(staged, out)

    _reduce = _all_reduce

    def _reduce_scatter(self, call: Call) -> Steps:
        o = call.operation
        x, out, reduction = _reducing(o)
        staged = x if reduction.is_plain and not np.may_share_memory(x, out) else reduction.stage(x, None)
        part = out if out.dtype == reduction.carrier else np.empty(out.shape, reduction.carrier)
        yield from self._carry(call, "reduce_scatter", input=staged, output=part)
        reduction.finish(part, out)

    def _broadcast(self, call: Call) -> Steps:
        o = call.operation
        assert o.send is not None and o.recv is not None
        if self.rank == o.root and o.send is not o.recv:
            np.copyto(o.recv.flat, o.send.flat)
        yield from self._carry(call, "broadcast", data=o.recv.flat)

    def _all_gather(self, call: Call) -> Steps:
        """Also gather, scatter and all_to_all: what this rank has goes in, what it gets comes out."""
        o = call.operation
        spaces = {"input": o.send, "output": o.recv}
        flat = {space: buffer.flat for space, buffer in spaces.items() if buffer is not None}
        if len(flat) == 2 and np.may_share_memory(flat["input"], flat["output"]):
            flat["input"] = flat["input"].copy()
        yield from self._carry(call, o.name, **flat)

    _gather = _scatter = _all_to_all = _all_gather

    def _all_gather_v(self, call: Call) -> Steps:
        o = call.operation
        assert o.send is not None and o.recv is not None
        yield from self._exchange(call, [o.send.flat] * self.size, _pieces(o.recv.flat, o.recv_counts))

    def _all_to_all_v(self, call: Call) -> Steps:
        o = call.operation
        assert o.send is not None and o.recv is not None
        yield from self._exchange(call, _pieces(o.send.flat, o.send_counts), _pieces(o.recv.flat, o.recv_counts))

    def _reduce_scatter_v(self, call: Call) -> Steps:
        o = call.operation
        x, out, reduction = _reducing(o)
        staged = x if reduction.is_plain else reduction.stage(x, None)
        parts = np.empty((self.size, out.size), staged.dtype)
        yield from self._exchange(call, _pieces(staged, o.send_counts), list(parts))
        for part in parts[1:]:
            reduction.combine(parts[0], part)
        reduction.finish(parts[0], out)

    def _barrier(self, call: Call) -> Steps:
        native = self.native(call, {}, "barrier") if self.size > 1 else None
        yield from self._meet(self._tag(call)) if native is None else native

    _split = _duplicate = _barrier  # the rendezvous, which makes the groups, compares no calls

    def _meet(self, tag: int) -> Steps:
        """Dissemination barrier (Hensgen, Finkel and Manber 1988): log2(size) rounds of empty messages."""
        empty, distance = np.empty(0, np.uint8), 1
        while distance < self.size:
            send = self.transport.isend(empty, (self.rank + distance) % self.size, tag)
            recv = self.transport.irecv(empty, (self.rank - distance) % self.size, tag)
            yield from self._wait_for(send, recv)
            distance *= 2

    def _message(self, call: Call) -> Steps:
        """send, recv and send_recv: the receive is posted first, so that two ranks may swap."""
        o, message = call.operation, call.operation.message
        requests: list[Request] = []
        try:
            if message.src is not None:
                assert o.recv is not None
                requests.append(self.transport.irecv(o.recv.flat, message.src, message.recv_tag))
            if message.dst is not None:
                assert o.send is not None
                requests.append(self.transport.isend(o.send.flat, message.dst, message.tag))
            wrong: CollectiveMismatch | None = None
            for request in requests:
                try:
                    yield from self._wait_for(request)
                except CollectiveMismatch as error:  # of one that came; a send beside it is under way
                    wrong = wrong or error
            if wrong is not None:
                raise wrong
        except BaseException:  # given up, by a timeout for one: these alone, whatever else has their tag
            self.transport.cancel(lambda each: each in requests)
            raise

    def _exchange(self, call: Call, send: list[Array], recv: list[Array]) -> Steps:
        """Send piece j to rank j and receive piece j from rank j, all at once.

        Empty pieces travel too: the other side may expect something.
        """
        tag, transport = self._tag(call), self.transport
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]  # from the right on: they spread
        requests = [transport.irecv(recv[peer], peer, tag) for peer in peers]
        requests += [transport.isend(send[peer], peer, tag) for peer in peers]
        np.copyto(recv[self.rank], send[self.rank].copy())
        yield from self._wait_for(*requests)
        if call.name == "all_to_all_v":
            # Two ranks alone know whether their counts agree: nobody goes on before all have found that they do.
            yield from self._meet(tag)

    @staticmethod
    def _wait_for(*requests: Request) -> Steps:
        for request in requests:
            while not request.done():
                yield


def ends_group(call: Call, error: Exception) -> bool:
    """Whether its ranks are out of step after that: a message that is given up while it may still be received, too.

    And one that a Ctrl-C cut short anywhere, as nobody knows where its bytes are then.
    """
    if isinstance(error, Interrupted):
        return True
    sends = call.operation.message.dst is not None
    return call.collective or (sends and not isinstance(error, CollectiveMismatch | RankLost))


def _reducing(o: Operation) -> tuple[Array, Array, Reduction]:
    assert o.send is not None and o.reduction is not None
    return o.send.flat, (o.recv or o.send).flat, o.reduction


def _pieces(x: Array, counts: Sequence[int] | None) -> list[Array]:
    assert counts is not None
    ends = np.cumsum(counts)
    return [x[end - count : end] for end, count in zip(ends, counts, strict=True)]


def take(queues: dict[Key, deque[T]], key: Key) -> T | None:
    """The first entry of that key's queue; an empty queue is not kept."""
    queue = queues.get(key)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first


def drop(queues: dict[Key, deque[T]], given_up: Callable[[T], bool]) -> None:
    """Take those entries out of the queues."""
    for key in list(queues):
        kept = deque(entry for entry in queues[key] if not given_up(entry))
        if kept:
            queues[key] = kept
        else:
            del queues[key]


def wrong_message(
    receiver: int, expected: tuple[int, np.dtype[Any]], sender: int, got: tuple[int, np.dtype[Any]]
) -> CollectiveMismatch:
    """The error of both ends of a message that is not what was expected: bytes and dtypes."""
    what, more = (
        f"{nbytes // dtype.itemsize} elements of {dtype}" if nbytes % dtype.itemsize == 0 else f"{nbytes} bytes"
        for nbytes, dtype in (expected, got)
    )
    return CollectiveMismatch(f"rank {receiver} expected {what} from rank {sender}, got {more}")
