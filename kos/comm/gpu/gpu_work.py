"""What is in flight on a GPU: the Work of an operation, events, marks for the watchdog, calls that may not return."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kos.comm.arguments import check_timeout
from kos.comm.operation import Operation
from kos.comm.prepared import Prepared
from kos.comm.work import Work
from kos.cuda import driver
from kos.cuda.driver import call, cu
from kos.cuda.kernels import NOTHING
from kos.cuda.streams import Event, is_captured, is_over
from kos.errors import KosError


class DeviceWork(Work[Any]):
    """An operation queued on a GPU.

    ``wait()`` without a timeout does not block: work queued from then on, on the stream of the arrays, comes
    after the operation.  ``wait(timeout)`` and ``synchronize(timeout)`` wait on the host, in seconds.
    """

    event: PooledEvent | None = None
    """Recorded after an operation on the communicator's own stream."""

    @property
    def state(self) -> str:
        return f"queued on cuda:{self.backend.device}"  # an event's query could disturb the capture of a graph

    def over(self) -> bool:
        """Whether the GPU is done with it (and, without an event, with everything on its stream)."""
        if self.event is None:
            idle: bool = self.backend.is_idle(self.stream, self.stream_owner)
            return idle
        (status,) = cu.cuEventQuery(self.event.handle)
        return is_over("cuEventQuery", status)

    def done(self) -> bool:
        try:
            self.backend.failures.refuse(self)
            over = self.over()
            self.backend.check(self)
            return over
        except BaseException as error:
            self._interrupted(error)
            raise

    def wait(self, timeout: float | None = None) -> Any:
        if timeout is not None:
            return self.synchronize(timeout)
        try:
            backend = self.backend
            if backend.failures.first is not None:
                backend.failures.refuse(self)
            if self.event is not None:
                with driver.on_device(backend.device):
                    call(cu.cuStreamWaitEvent, self.stream, self.event.handle, 0)
            return self.result
        except BaseException as error:
            self._interrupted(error)
            raise

    def synchronize(self, timeout: float | None = None) -> Any:
        try:
            self.backend.failures.refuse(self)
            timeout = self.operation.options.timeout if timeout is None else check_timeout(timeout)
            self.backend.wait_on_host(self, self.over, timeout)
            self.record_end(time.time_ns())
            return self.wait()
        except BaseException as error:
            self._interrupted(error)
            raise

    def cancel(self, error: KosError) -> None:
        """Nothing: what is queued ends with its backend."""


def unstarted(name: str, backend: Any) -> Work[Any]:
    """What an error names where no call is at fault."""
    return DeviceWork(Prepared(Operation(name, backend.rank), backend, NOTHING))


def free_finished(in_flight: deque[list[Any]]) -> None:
    """Free the Works that have ended, the oldest first; other threads, and finalizers, may do so at the same time."""
    with suppress(IndexError):
        while (works := in_flight[0])[-1].over():
            with suppress(ValueError):  # others have removed it meanwhile
                in_flight.remove(works)


class PooledEvent:
    """An event from the pool ``free``, which gets it back from the last work that holds it, and ends with the pool."""

    __slots__ = ("_event", "_free", "handle")

    def __init__(self, free: list[Event], device: int) -> None:
        try:
            self._event = free.pop()
        except IndexError:
            self._event = Event(device)
        self._free, self.handle = free, self._event._handle

    def __del__(self) -> None:
        if hasattr(self, "handle"):  # one was made
            self._free.append(self._event)


class Marks:
    """Pairs of events around some of the launches, by which the watchdog knows when the GPU began and ended them."""

    def __init__(self, device: int, count: int) -> None:
        self.free = [Mark(Event(device), Event(device)) for _ in range(count)]
        self._in_flight: deque[Mark] = deque()
        self._sequence = -1  # of the last call with a mark
        self.captured = False  # whether the last call that needed a mark was captured

    @property
    def running(self) -> bool:
        """Whether what the GPU runs, as far as known, is no collective without a mark."""
        first = self._in_flight[0] if self._in_flight else None
        return first is not None and (first.begun is not None or not first.follows_unmarked)

    def queue(self, works: Sequence[Work[Any]], stream: int, queue: Callable[[Sequence[Work[Any]], int], None]) -> None:
        """Queue ``works`` on ``stream`` by ``queue``, between the two events of a mark if one is free."""
        if not self.free:
            return queue(works, stream)
        self.captured = is_captured(stream)
        if self.captured:  # it runs when the graph is replayed
            return queue(works, stream)
        mark, last = self.free.pop(), works[-1]
        mark.begun, mark.follows_unmarked, self._sequence = None, last.sequence > self._sequence + 1, last.sequence
        mark.call, mark.timeout = weakref.ref(last), last.operation.options.timeout  # not ``last``, which holds arrays
        mark.begin.record(stream)
        queue(works, stream)
        mark.end.record(stream)
        self._in_flight.append(mark)

    def timeout_error(self, now: float) -> tuple[Work[Any] | None, float] | None:
        """A call that the GPU began longer ago than its timeout, and that; frees the marks that it has passed."""
        for mark in list(self._in_flight):
            if mark.ended():
                self._in_flight.remove(mark)
                self.free.append(mark)
                continue
            if mark.begun is None and mark.begin.done():
                mark.begun = now
            if mark.begun is not None and mark.timeout is not None and now - mark.begun > mark.timeout:
                return mark.call(), mark.timeout
        return None


@dataclass(slots=True, eq=False)
class Mark:
    """Two events around one launch."""

    begin: Event
    end: Event
    follows_unmarked: bool = False
    call: Any = None
    timeout: float | None = None
    begun: float | None = None
    """When the GPU was first seen to have begun it."""

    def ended(self) -> bool:
        """Whether the GPU has ended it."""
        return self.end.done()
