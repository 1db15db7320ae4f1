"""Operations launched otherwise than one call at a time: together (Batch) or again and again (Persistent)."""

from __future__ import annotations

import functools
import inspect
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise, zip_longest
from typing import Any, Concatenate, ParamSpec, TypeVar

from kos.comm.gpu.backend import DeviceWork
from kos.comm.operation import Operation
from kos.comm.work import Work
from kos.errors import InvalidArgument

P = ParamSpec("P")
Comm = TypeVar("Comm")


class Persistent:
    """An operation checked once and started many times, always on the same arrays."""

    __slots__ = ("__weakref__", "_comm", "_operation", "_queued", "_work")

    def __init__(self, comm: Any, operation: Operation) -> None:
        self._comm, self._operation = comm, operation
        self._work: Work | None = None  # of the last start, until the communicator was synchronized
        comm._persistents.add(self)
        # What starts on a GPU return: they queue up on one stream, so one will do for all.
        backend: Any = operation.via or comm.backend
        self._queued = None if operation.launch is None else DeviceWork(operation, backend)

    def start(self) -> Any:
        """Launch it once more; returns its Work.  Inside a batch it joins that, and returns the output array.

        Raises InvalidArgument unless the previous start was waited for: by ``Work.wait``, by ``Work.done`` that
        returned True, or by ``Communicator.synchronize``.  On a GPU starts queue up behind one another, on the
        stream of the arrays.
        """
        comm, o = self._comm, self._operation
        if comm._closed:
            comm._check_open()
        # Not whether it is over, which some ranks find and others do not.
        if self._work is not None and o.launch is None and not self._work.told:
            raise InvalidArgument(f"start: expected the previous start to be waited for, got {o}")
        o.overlap = False  # as a batch may have left it
        if not o.lasts:  # in a graph another backend may be faster
            comm.backend.prepare(o)
            self._queued = DeviceWork(o, o.via)
        if comm._batch is not None:
            return comm._batch.add(o, self)
        work = comm._group.launch(o, 2, comm.backend)
        if work is None:
            return self._queued
        self._work = work
        return work


def persistent(call: Callable[Concatenate[Comm, P], Any]) -> Callable[Concatenate[Comm, P], Persistent]:
    """The persistent form of an operation: its checks are made now, its launch at every ``start``."""

    @functools.wraps(call)
    def init(comm: Any, *args: P.args, **options: P.kwargs) -> Persistent:
        outer = comm._batch
        comm._batch = only = Batch(comm, False)
        try:
            call(comm, *args, **options)
        finally:
            comm._batch = outer
        return Persistent(comm, only.operations[0])

    name = call.__name__
    init.__name__, init.__qualname__ = f"{name}_init", f"{call.__qualname__}_init"
    init.__doc__ = f"A persistent ``{name}``: checked now, and launched by each ``start()`` of what is returned."
    signature = inspect.signature(call)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != "async_op"]
    init.__signature__ = signature.replace(parameters=kept, return_annotation=Persistent)  # type: ignore[attr-defined]
    return init


class Batch:
    """Operations that are launched together; see ``Communicator.batch``."""

    def __init__(self, comm: Any, async_op: bool) -> None:
        self._comm, self._async_op = comm, async_op
        self.operations: list[Operation] = []
        self.works: list[Work] = []
        self._starts: list[Persistent | None] = []  # whose each of ``operations`` is

    def add(self, operation: Operation, persistent: Persistent | None = None) -> Any:
        """Have it launched with the others; returns the array that will hold its result."""
        if persistent is not None and persistent in self._starts:
            raise InvalidArgument(f"start: expected one start of it in a batch, got another of {operation}")
        self._starts.append(persistent)
        self.operations.append(operation)
        return operation.recv.array if operation.recv is not None else None

    def __enter__(self) -> Batch:
        if self._comm._batch is not None:
            raise InvalidArgument("batch: expected no other batch to be open, got one inside another")
        self._comm._batch = self
        self.operations, self.works, self._starts = [], [], []
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        self._comm._batch = None
        if value is not None:
            return
        _refuse_clashes(self.operations)
        try:
            self._comm._launch_all(self.operations, self._async_op, self.works)
        finally:
            for persistent, work in zip_longest(self._starts, self.works):
                if persistent is not None:
                    persistent._work = work
        if not self._async_op:
            self.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every operation; ``timeout`` in seconds holds for each of them."""
        for work in self.works:
            work.wait(timeout)


def _refuse_clashes(operations: list[Operation]) -> None:
    """Operations of a batch run side by side: none may use memory that another one writes."""
    reads: list[tuple[int, int, int, int]] = []  # device, first byte, end, operation
    writes: list[tuple[int, int, int, int]] = []
    for number, o in enumerate(operations if len(operations) > 1 else ()):
        read, written = o.send, o.recv
        if read is written:  # in place: a broadcast's root only reads, what else is read is written
            read, written = (read, None) if o.name == "broadcast" and o.rank == o.root else (None, written)
        for buffer, spans in ((read, reads), (written, writes)):
            if buffer is not None and buffer.count:
                start, device = buffer.address, -1 if buffer.device is None else buffer.device
                spans.append((device, start, start + buffer.nbytes, number))
    writes.sort()
    clash = next(((one, other) for one, other in pairwise(writes) if other[:2] < (one[0], one[2])), None)
    for one in () if clash else reads:
        at = bisect_left(writes, (one[0], one[2]))  # from here on they begin behind it
        while at and clash is None and one[:2] < (writes[at - 1][0], writes[at - 1][2]):
            at -= 1
            clash = (one, writes[at]) if writes[at][3] != one[3] else None
    if clash is not None:
        names = [f"{o.name} of {o.send or o.recv}" for o in operations]
        first, second = (f"operation {number}, {names[number]}" for number in sorted(span[3] for span in clash))
        raise InvalidArgument(f"batch: expected memory apart from what another one writes, got {first}, and {second}")
