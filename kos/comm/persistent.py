"""Operations launched together (Batch) or repeatedly (Persistent)."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from threading import get_ident
from typing import Any, Generic, TypeVar

from kos._core import native
from kos.comm.one_thread import check_batch
from kos.comm.operation import Operation
from kos.comm.prepared import APART, CoreCall
from kos.comm.work import Work
from kos.errors import InvalidArgument, ignored
from kos.memory.buffer import address_of

T = TypeVar("T")


class Persistent(Generic[T]):
    """A Prepared bound to arrays: an operation that is checked once and started many times."""

    # Attributes of the class: in the core they are fields, which must not be set to None.
    _last: Work[T] | None = None  # the last start
    _group: Any = None  # the native Group that may start it

    def __init__(self, comm: Any, operation: Operation, op: Any, stream: Any, work: Work[T]) -> None:
        self._comm, self._checked, self._generation = comm, (operation, op, stream), comm._store.generation
        self._work = work  # never started: each start is a copy of it
        comm._persistents.add(self)

    def __repr__(self) -> str:
        work = self._last
        if work is None:
            return f"<Persistent {self._work.group}: {self._work.name}{self._work.arguments}: not started>"
        return f"<Persistent {work}: {work.state}>"

    def start(self) -> Work[T]:
        """Launch the operation and return its Work.  Inside a batch it starts with the batch.

        Raises InvalidArgument unless the program has waited for the previous start: by ``Work.wait``, a ``Work.done``
        that returned True, or ``Communicator.synchronize``.  On a GPU starts queue in order on the stream of the
        arrays.
        """
        comm = self._comm
        try:
            return self._start(comm)
        except BaseException as error:
            comm._interrupted("start", error)
            raise

    def _start(self, comm: Any) -> Work[T]:
        if comm._closed:
            comm._check_open()
        # Does not test whether the operation is complete: ranks could disagree.
        last = self._last
        if last is not None and not last.reported and not last.backend.on_gpu:
            raise InvalidArgument(f"start: expected the previous start to be waited for, got {last}")
        prepared = self._work.prepared
        if self._generation != comm._store.generation or not (prepared.fixed and prepared.lasting):
            # It may use memory that is not registered any more, or be captured, where another backend may be faster.
            self._generation = comm._store.generation
            self._work = comm._prepare(*self._checked)
        work = self._work.unstarted_copy()
        if comm._batch is not None:
            return comm._batch.add(work, self)
        work.prepared.start(comm, work, False)
        self._last = work
        return work

    def _start_uncached(self, args: Any, options: Any, has_key: bool) -> tuple[Any, CoreCall | None]:
        """Start a call that the core has not cached.  Returns the Work, and the CoreCall of later starts."""
        work, core_call = Persistent.start(self, *args, **options), None
        if has_key and self._comm._batch is None:
            with ignored(Exception):  # the start itself has succeeded
                core_call = self._describe_to_core(work)
        return work, core_call

    def _describe_to_core(self, work: Work[T]) -> CoreCall | None:
        """As ``Operations._describe_to_core``."""
        prepared, arrays = work.prepared, (work.send, work.recv)
        if not prepared.lasting or work.convert is not None:
            return None
        on_gpu = prepared.backend.on_gpu
        x, out = (-1 if each is None or (on_gpu and not each) else i for i, each in enumerate(arrays))
        if on_gpu:
            examples: Any = work.unstarted_copy(), work.unstarted_copy()
            result = -1
            distance, input_bytes, output_bytes = self._comm._overlap(prepared.operation, *arrays)
        else:
            examples, result, distance, input_bytes, output_bytes = prepared.work(prepared), 2, APART, 0, 0
            out = x if work.recv is work.send else out
        core_call = CoreCall(
            None, prepared, prepared.description, examples, None, False, x, out, -1, result, distance,
            input_bytes, output_bytes, (*arrays, None if on_gpu else work.array), None,
        )  # fmt: skip
        described: CoreCall | None = self._comm._core_calls.describe(core_call, work)
        return described

    def _synchronized(self) -> None:
        """The communicator was synchronized."""
        if self._last is not None:
            self._last.reported = True


def persistent(comm: Any, *checked: Any) -> Persistent[Any]:
    """A Persistent of ``comm``, which the core starts if it can.  ``checked`` are the other arguments of Persistent."""
    if comm._core_group is None or (comm.device is not None and not checked[-1].backend.on_gpu):
        return Persistent(comm, *checked)
    made: Persistent[Any] = _InCore(comm, *checked)
    made._group = comm._core_group
    return made


if native is not None:
    _InCore: Any = type("Persistent", (native.Operation, Persistent), {})
    """One whose ``start`` needs no Python once the core knows the call: the method of the first base."""


class Batch:
    """Operations that are launched together; see ``Communicator.batch``."""

    def __init__(self, comm: Any, async_op: bool) -> None:
        self._comm, self._async_op = comm, async_op
        self._owner = 0  # the thread that opened it
        self._added: list[Work[Any]] = []
        self.works: list[Work[Any]] = []  # once they are started
        self._starts: list[Persistent[Any] | None] = []  # of each Work, its Persistent if it has one

    def add(self, work: Work[Any], persistent: Persistent[Any] | None = None) -> Any:
        """Add ``work``, of that ``persistent`` if it has one; returns the array that will hold its result.

        Raises InvalidArgument for a second start of one persistent operation.  Raises CollectiveError if another thread
        opened the batch.
        """
        check_batch(self._comm, self._owner, work)
        if not work.prepared.waits:
            raise InvalidArgument("async_op: expected False in a batch and for a persistent operation, got True")
        if persistent is not None and persistent in self._starts:
            what = f"{work.name}{work.arguments}"
            raise InvalidArgument(f"start: expected one start in a batch, got another of {what}")
        self._starts.append(persistent)
        self._added.append(work)
        return work.array

    def __enter__(self) -> Batch:
        if self._comm._batch is not None:
            raise InvalidArgument("batch: expected no other batch to be open, got one inside another")
        self._owner = get_ident()
        self._added, self.works, self._starts = [], [], []
        try:
            self._comm._open_batch(self)
        except BaseException as error:  # of a signal's handler
            self._comm._open_batch(None)
            self._comm._interrupted("batch", error)
            raise
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        try:
            self._comm._open_batch(None)
            if value is None:
                self._start()
        except BaseException as error:
            self._comm._interrupted("batch", error)
            raise

    def _start(self) -> None:
        _refuse_clashes(self._added)
        self._comm._start_all(self._added, self._async_op)
        self.works = self._added
        for persistent, work in zip(self._starts, self.works, strict=True):
            if persistent is not None:
                persistent._last = work
        if not self._async_op:
            self.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every operation, at most ``timeout`` seconds each.  Raises the error of the first that failed."""
        for work in self.works:
            work.wait(timeout)


def _refuse_clashes(works: list[Work[Any]]) -> None:
    """Refuse a batch in which an operation uses memory that another one writes: they run concurrently."""
    reads: list[tuple[int, int, int, int]] = []  # device, first byte, end, operation
    writes: list[tuple[int, int, int, int]] = []
    for number, work in enumerate(works if len(works) > 1 else ()):
        o = work.operation
        read, written = (o.send, work.send), (o.recv, work.recv)
        if o.send is o.recv:  # in place: the root of a broadcast only reads, all others write
            read, written = (read, (None, None)) if o.name == "broadcast" and o.rank == o.root else ((None, None), read)
        kept = o.residual, work.residual if o.residual is None or o.residual.device is None else o.residual.pointer
        changed: tuple[Any, Any] = None, None
        if o.residual is not None and o.send is not None and o.recv is not o.send:  # the input is overwritten
            is_within = 0 <= address_of(work.recv) - address_of(work.send) < o.send.nbytes
            read, written, changed = changed, changed if is_within else written, read
        for (buffer, memory), spans in ((read, reads), (written, writes), (changed, writes), (kept, writes)):
            if buffer is not None and buffer.count:
                start, device = address_of(memory), -1 if buffer.device is None else buffer.device
                spans.append((device, start, start + buffer.nbytes, number))
    writes.sort()
    clash = next(((one, other) for one, other in pairwise(writes) if other[:2] < (one[0], one[2])), None)
    for one in () if clash else reads:
        at = bisect_left(writes, (one[0], one[2]))  # writes from this one on begin after the read
        while at and clash is None and one[:2] < (writes[at - 1][0], writes[at - 1][2]):
            at -= 1
            clash = (one, writes[at]) if writes[at][3] != one[3] else None
    if clash is not None:
        names = [f"{o.name} of {o.send or o.recv}" for o in (work.operation for work in works)]
        first, second = (f"operation {number}, {names[number]}" for number in sorted(span[3] for span in clash))
        raise InvalidArgument(f"batch: expected no memory that another operation writes, got {first}, and {second}")
