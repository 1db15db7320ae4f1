"""Batch: operations that are launched together."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from threading import get_ident
from typing import Any

from kos.comm.call_guards import check_batch
from kos.comm.prepared import nothing
from kos.comm.work import Work
from kos.errors import InvalidArgument
from kos.memory.buffer import address_of


class Batch:
    """Operations that are launched together; see ``Communicator.batch``."""

    def __init__(self, comm: Any, async_op: bool) -> None:
        self._comm, self._async_op = comm, async_op
        self._owner = 0  # the thread that opened it
        self._added: list[Work[Any]] = []
        self.works: list[Work[Any]] = []  # once they are started

    def add(self, work: Work[Any]) -> Any:
        """Add ``work``; returns the array that will hold its result.

        Raises CollectiveError if another thread opened the batch.
        """
        check_batch(self._comm, self._owner, work)
        if not work.prepared.blocking:
            raise InvalidArgument("async_op: expected False in a batch, got True")
        self._added.append(work)
        return work.array

    def __enter__(self) -> Batch:
        if self._comm._batch is not None:
            raise InvalidArgument("batch: expected no other batch to be open, got one inside another")
        self._owner = get_ident()
        self._added, self.works = [], []
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
        self._comm._start_all([work for work in self._added if work.prepared.launch is not nothing], self._async_op)
        self.works = self._added
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
