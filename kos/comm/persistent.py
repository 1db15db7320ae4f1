"""Operations launched together (Batch) or repeatedly (Persistent)."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any, Generic, TypeVar

from kos.comm.operation import Call, Operation
from kos.comm.work import Work
from kos.cuda.streams import capture_of
from kos.errors import InvalidArgument

T = TypeVar("T")


class Persistent(Generic[T]):
    """An operation that is checked once and started many times, always on the same arrays."""

    __slots__ = ("__weakref__", "_call", "_captured", "_comm", "_complete", "_queued", "_windows", "_work")

    def __init__(self, comm: Any, operation: Operation) -> None:
        self._comm, self._call = comm, Call(operation, comm.name, of_group=comm._of_group)
        self._work: Work[T] | None = None  # of the last start, until the communicator is synchronized
        self._queued: Work[T] | None = None  # of every start on a GPU: all starts queue on one stream
        self._complete: Work[T] = Work(self._call, comm.backend, None)  # of starts that complete at once
        self._prepare()
        comm._persistents.add(self)

    def __repr__(self) -> str:
        call, work = self._call, self._queued or self._work
        if call.sequence < 0:
            return f"<Persistent {call.group}: {call.name}{call.arguments}: not started>"
        return f"<Persistent {call}: {'complete' if work is None else work.state}>"

    def _prepare(self) -> None:
        self._windows = self._comm._cache.windows
        self._comm.backend.prepare(self._call)
        self._queued = self._comm.backend.queued(self._call)
        fixed = self._call.route is None or self._call.route.fixed
        self._captured = None if fixed else capture_of(self._call.stream) != 0

    def start(self) -> Work[T]:
        """Launch the operation and return its Work.  Inside a batch it starts with the batch.

        Raises InvalidArgument unless the program has waited for the previous start: by ``Work.wait``, a ``Work.done``
        that returned True, or ``Communicator.synchronize``.  On a GPU starts queue in order on the stream of the
        arrays.
        """
        comm, call = self._comm, self._call
        if comm._closed:
            comm._check_open()
        # Does not test whether the operation is complete: ranks could disagree.
        if self._work is not None and not self._work.reported:
            raise InvalidArgument(f"start: expected the previous start to be waited for, got {call}")
        if self._windows != comm._cache.windows:
            self._prepare()  # it may be bound to memory that is not registered any more
        elif self._captured is not None and self._captured != (capture_of(call.stream) != 0):
            self._prepare()  # in a graph another backend may be faster
        if comm._batch is not None:
            return comm._batch.add(call, self)
        try:
            call.sequence = next(comm._collectives if call.collective else comm._messages)
            comm._group.note(call, 2)
            work = comm.backend.start(call)
        except BaseException as error:
            comm._fail_if_interrupted(error, call)
            raise
        if work is None:
            if self._queued is not None:
                return self._queued
            work = self._complete
            work.reported = False
        self._work = work
        return work


class Batch:
    """Operations that are launched together; see ``Communicator.batch``."""

    def __init__(self, comm: Any, async_op: bool) -> None:
        self._comm, self._async_op = comm, async_op
        self._calls: list[Call] = []
        self.works: list[Work[Any]] = []
        self._starts: list[Persistent[Any] | None] = []  # of each call, its Persistent if it has one

    def add(self, call: Call, persistent: Persistent[Any] | None = None) -> Any:
        """Add a call, of that ``persistent`` if it has one; returns the array that will hold its result.

        Raises InvalidArgument for a second start of one persistent operation.
        """
        if persistent is not None and persistent in self._starts:
            operation = call.operation
            raise InvalidArgument(f"start: expected one start in a batch, got another of {operation.name}{operation}")
        self._starts.append(persistent)
        self._calls.append(call)
        return call.operation.recv.array if call.operation.recv is not None else None

    def __enter__(self) -> Batch:
        if self._comm._batch is not None:
            raise InvalidArgument("batch: expected no other batch to be open, got one inside another")
        self._comm._batch = self
        self._calls, self.works, self._starts = [], [], []
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        self._comm._batch = None
        if value is not None:
            return
        _refuse_clashes([call.operation for call in self._calls])
        self.works = self._comm._launch_all(self._calls, self._async_op)
        for persistent, work in zip(self._starts, self.works, strict=True):
            if persistent is not None and persistent._queued is None:
                persistent._work = work
        if not self._async_op:
            self.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every operation, at most ``timeout`` seconds each.  Raises the error of the first that failed."""
        for work in self.works:
            work.wait(timeout)


def _refuse_clashes(operations: list[Operation]) -> None:
    """Refuse a batch in which an operation uses memory that another one writes: they run concurrently."""
    reads: list[tuple[int, int, int, int]] = []  # device, first byte, end, operation
    writes: list[tuple[int, int, int, int]] = []
    for number, o in enumerate(operations if len(operations) > 1 else ()):
        read, written = o.send, o.recv
        if read is written:  # in place: the root of a broadcast only reads, all others write
            read, written = (read, None) if o.name == "broadcast" and o.rank == o.root else (None, written)
        for buffer, spans in ((read, reads), (written, writes)):
            if buffer is not None and buffer.count:
                start, device = buffer.address, -1 if buffer.device is None else buffer.device
                spans.append((device, start, start + buffer.nbytes, number))
    writes.sort()
    clash = next(((one, other) for one, other in pairwise(writes) if other[:2] < (one[0], one[2])), None)
    for one in () if clash else reads:
        at = bisect_left(writes, (one[0], one[2]))  # writes from this one on begin after the read
        while at and clash is None and one[:2] < (writes[at - 1][0], writes[at - 1][2]):
            at -= 1
            clash = (one, writes[at]) if writes[at][3] != one[3] else None
    if clash is not None:
        names = [f"{o.name} of {o.send or o.recv}" for o in operations]
        first, second = (f"operation {number}, {names[number]}" for number in sorted(span[3] for span in clash))
        raise InvalidArgument(f"batch: expected no memory that another operation writes, got {first}, and {second}")
