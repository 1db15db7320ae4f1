"""DeviceBackend: what backends that move GPU memory have in common.

An operation is queued on one stream and the call returns: that of its arrays, or the one given.  With
``async_op=True`` it is queued on a stream of the communicator's own, after what the first one holds by now,
and ``Work.wait()`` lets the first one wait for it.  The host waits only where the program asks for that
(``Work.wait(timeout)``, ``Work.synchronize``, ``Communicator.synchronize``, ``barrier``, ``close``).  Failures are
found there, at the next call, and by the watchdog (``kos.comm.watchdog``), which ends what is in flight.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from kos.comm import watchdog
from kos.comm.control.base import Rendezvous
from kos.comm.failures import Late
from kos.comm.gpu.aborts import ENDED, lost, raise_if_stuck, wait_for_idle
from kos.comm.gpu.compressed import feed_back
from kos.comm.gpu.devices import check_float8, device_of
from kos.comm.gpu.eager import Guard
from kos.comm.gpu.memory import Piece, ScratchPool
from kos.comm.gpu.order import Streams
from kos.comm.gpu.routes import Route, alone
from kos.comm.gpu.shared import CommState
from kos.comm.gpu.works import DeviceWork, Marks, PooledEvent, free_finished, unstarted
from kos.comm.group_backend import GroupBackend
from kos.comm.operation import NO_MESSAGE, Operation
from kos.comm.prepared import Prepared, without_memory
from kos.comm.records import again
from kos.comm.tuning import Table
from kos.comm.waits import Backoff
from kos.comm.work import Work
from kos.cuda import Kernel, create_stream, driver, load_kernel
from kos.cuda.driver import call, cu, relaxed_capture
from kos.cuda.streams import Event, capture_of
from kos.errors import CollectiveError, CudaError, InvalidArgument, KosError
from kos.memory import Buffer, windows
from kos.memory.array import Array
from kos.memory.libraries import immutable
from kos.memory.windows import Run

_SHOW_EVERY = 0.02
"""Seconds of waiting on the host after which a rank shows the others for whom it waits."""


class DeviceBackend(GroupBackend):
    """Carries arrays on the GPU ``device``.  Subclasses ``resolve`` operations and end them (``abort_device``).

    ``host`` is the backend that carries the same communicator's host memory, if there is one.
    """

    __slots__ = ("_last",)  # the core writes it
    on_gpu, on_host = True, False
    work: ClassVar[type[Work[Any]]] = DeviceWork
    device: int
    table: Table | None = None
    """By what was measured, which operation goes by which route; where the backend knows one."""
    marks = 0  # calls in flight whose deadline the watchdog looks at; 0 where kernels have their own
    by_capture: tuple[str, ...] = ()  # operations that take another route in a graph
    _failure: Sequence[int] = (0,)  # its first word is not 0 once a kernel has ended early
    failed_word = 0  # the address of that word, if there is one

    def __init__(self, rendezvous: Rendezvous, device: int | None = None, host: GroupBackend | None = None) -> None:
        super().__init__(rendezvous)
        self.device = device_of(rendezvous).index if device is None else device
        self.shared = CommState(rendezvous, self.failures, self, host)
        self._last: Work[Any] | None = None
        self._in_flight: deque[list[Any]] = deque()  # whose arrays must live until the GPU is done with them
        self._events: list[Event] = []  # that nobody uses
        self._side: Any = None
        self._marks = Marks(self.device, self.marks)
        self._scratch = ScratchPool(self.device)
        self._closing = False
        self.awaited: list[int] = []  # by kernels, at the watchdog's last look
        self._seen = -1  # the last collective at that look

    def join(self, others: Sequence[DeviceBackend]) -> None:
        """Carry one communicator's operations together with ``others`` of this GPU."""
        if self is not others[0]:
            self.shared.close()
        self.shared = others[0].shared
        self.shared.backends = others
        if self._side is None and len(others) > 1:
            side = create_stream(self.device, urgent=True)
            for each in others:
                each._side = side  # one for all: what overlaps the caller's work does not overlap itself

    def is_symmetric(self, o: Operation) -> bool:
        """Whether the backend reaches all buffers of the operation where they lie, on every rank."""
        return False

    def overlapped(self, o: Operation) -> bool:
        """Whether the backend carries an overlapped operation without multiprocessors."""
        return False

    def details(self) -> list[tuple[str, str, str]]:
        calls = self.shared.calls
        shared = ("shared memory", "no" if calls is None or calls.segment.size == 1 else "in use", self.shared.segment)
        return [shared] if self.table is None else [shared, ("tuning table", "in use", self.table.source)]

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        return self.name  # whose library chooses

    @abstractmethod
    def split(
        self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0, host: GroupBackend | None = None
    ) -> DeviceBackend | None: ...

    def idle(self) -> Any:
        return Backoff()

    # Launching.

    def prepare(self, o: Operation) -> Prepared:
        """Refuses arrays that are elsewhere, and tags; finds the route of the operation."""
        first, message = o.send or o.recv, o.message
        if first is not None and first.device != self.device:
            raise InvalidArgument(
                f"x: expected memory of cuda:{self.device} (backend {self.name}), "
                f"got {type(first.array).__name__} in memory of {first.place}; a communicator uses one GPU: "
                "kos.init(device=...) creates one for another GPU"
            )
        if message is not NO_MESSAGE and (tag := message.tag or message.recv_tag):
            raise InvalidArgument(f"tag: expected 0 ({self.name} matches messages by their order), got {tag}")
        o = without_memory(o)
        route = alone(o, self.device) if self.size == 1 else None
        if route is None and o.reduction is not None and o.reduction.dtype.name.startswith("float8"):
            check_float8(o.reduction.dtype, self.device)
        prepared = Prepared(o, self, self.launch, *(route or self.resolve(o)))
        prepared.fixed = o.name not in self.by_capture
        return prepared if self.shared.calls is None else self.shared.calls.add(prepared)

    @abstractmethod
    def resolve(self, o: Operation) -> Route:
        """The route of a call that is like ``o``, whose buffers have no memory."""

    def in_windows(self, launch: Run, o: Operation) -> Run:
        """``launch``, so that the windows in which the arrays of ``o`` lie outlive the graphs that capture it."""
        return windows.in_windows(launch, [x.pointer for x in (o.send, o.recv) if x]) if windows.memories else launch

    def launch_words(self, prepared: Prepared) -> bytes | None:
        """A ``kos_launch`` of ``core.h`` if such a call queues nothing else, else None."""
        return None

    def guards(self, work: Work[Any]) -> list[Guard]:
        """What is equal while a call like ``work`` needs no new order."""
        return []

    def eager(self, comm: Any) -> Any:
        return self.shared.eager_calls(comm, self)

    def forget_routes(self) -> None:
        """An address may be another window's from now on, for every backend of the communicator."""
        for each in self.shared.backends:
            each.store.clear()

    def launch(self, work: Work[Any]) -> None:
        """Queue ``work`` on its stream, or beside it."""
        prepared, shared, self._last = work.prepared, self.shared, work
        eager = shared.eager
        if eager is not None and (eager.asked or eager.last):
            eager.note_last(work)
        try:
            if self._failure[0]:
                self.inspect(work)
            if prepared.fingerprint:  # messages have none
                core, sequence = shared.calls.core, work.sequence  # type: ignore[union-attr]
                core.publish(sequence, prepared.fingerprint)
                shared.last = work
                if sequence >= core.compare_at:
                    shared.confirm()
            if not prepared.waits:
                self._start_overlapped((work,))
            elif work.queue is shared.streams.current:
                prepared.route(work.stream, work.send, work.recv)
                self._hold_array(work)
            else:
                self._queue((work,))
        except Exception as error:
            self._raise(work, error)

    def start_all(self, works: Sequence[Work[Any]], overlap: bool) -> None:
        self.failures.refuse(works[0].name)
        self._last = works[-1]
        try:
            for each in works:
                if each.prepared.fingerprint:
                    self.shared.calls.announce(each)  # type: ignore[union-attr]
                    self.shared.last = each
            self.check(works[0])
            if overlap:
                self._start_overlapped(works)
            else:
                self._queue(works)
        except Exception as error:
            self._raise(works[0], error)

    def queue(self, works: Sequence[Work[Any]], stream: int | None) -> None:
        """Queue each on ``stream``, or on its own; a library that can makes one launch of them."""
        for each in works:
            self._last = each
            each.prepared.route(each.stream if stream is None else stream, each.send, each.recv)

    def _queue(self, works: Sequence[Work[Any]]) -> None:
        """Queue on the streams of the arrays, whatever was queued before, and mark it for the watchdog.

        What follows on the same stream is queued without any of this, until the watchdog has looked at it.
        """
        first, held = works[0], self.streams
        with driver.on_device(self.device):  # the legacy stream is that of the current device
            for each in works:
                held.hold(each.stream, each.queue)
            alone = all(each.stream == first.stream for each in works)
            if alone:
                self._marks.queue(works, first.stream, self.queue)
            else:
                self.queue(works, None)
            held.current = first.queue if alone and held.is_kept(first.stream) else held.NONE
            for each in works:
                if type(each.queue) is int:  # nothing keeps the stream: where the call ends is recorded
                    held.mark(each.stream)
                self._hold_array(each)

    def _hold_array(self, o: Work[Any]) -> None:
        """Hold an array until the call has ended, if its library does not free memory in stream order."""
        if o.held is not None and type(o.held) is not Array and immutable(o.held) and not capture_of(o.stream):
            with driver.on_device(self.device):
                held, held.event = o.again(), PooledEvent(self._events, self.device)
                call(cu.cuEventRecord, held.event.handle, o.stream)
            self._in_flight.append([held])  # once it is recorded: before, it is over, and other threads look
            free_finished(self._in_flight)

    @property
    def streams(self) -> Streams:
        """The streams of the communicator's callers, for all its backends."""
        return self.shared.streams

    @cached_property
    def side(self) -> int:
        """Handle of the stream of what overlaps the caller's work."""
        if self._side is None:
            with relaxed_capture():
                self._side = create_stream(self.device, urgent=True)  # few blocks, for which other ranks wait
        return int(self._side.handle)

    def _start_overlapped(self, works: Sequence[Any]) -> None:
        side, several = self.side, {each.stream for each in works}
        captured = any(map(capture_of, several))
        self.streams.hold(side, self._side)
        with driver.on_device(self.device):
            event = PooledEvent(self._events, self.device)
            for stream in several:
                call(cu.cuEventRecord, event.handle, stream)
                call(cu.cuStreamWaitEvent, side, event.handle, 0)
            self._marks.queue(works, side, self.queue)
            call(cu.cuEventRecord, event.handle, side)
        for each in works:
            each.event = event
        if not captured:  # what a graph uses is kept by the graph
            free_finished(self._in_flight)
            self._in_flight.append(list(works))

    def scratch(self, nbytes: int, stream: int) -> int:
        """Address of memory that operations on ``stream`` use one after another."""
        return self._scratch.address(nbytes, stream)

    def load(self, path: Path, name: str, **macros: Any) -> Kernel:
        """A kernel of kos for this GPU."""
        return load_kernel(path, name, self.device, **macros)

    def feed_back(self, x: Buffer, residual: Buffer, compress: str) -> None:
        feed_back(self, x, residual, compress)

    @abstractmethod
    def exchange(self, sends: Sequence[Piece], recvs: Sequence[Piece], stream: int, *arrays: int) -> None:
        """Send piece j to rank j while receiving piece j from it, this rank's own included; none where empty.

        Addresses are those of this rank's GPU, or refer to ``arrays``.
        """

    @abstractmethod
    def collect(self, send: Any, recv: Any, nbytes: int, stream: int, *arrays: int) -> None:
        """All-gather of ``nbytes`` from each rank; addresses as in ``exchange``."""

    # Waiting on the host.

    def check(self, o: Work[Any]) -> None:
        """Raise for what is known to have gone wrong: calls that differ, ranks that are gone, the library's errors."""
        self.shared.confirm()
        for each in self.shared.backends:
            each.inspect(o)

    @abstractmethod
    def inspect(self, o: Work[Any]) -> None:
        """Raise for what the library, or a kernel, has found wrong."""

    def confirm(self, o: Work[Any]) -> None:
        """Compare the calls so far with those of the other ranks, before ``o`` that another backend carries."""
        try:
            if self.failures.first is None:
                self.shared.confirm()
        except Exception as error:
            self._raise(o, error)

    def wait_on_host(self, o: Work[Any], over: Callable[[], bool], timeout: float | None) -> None:
        """Wait until ``over()``, at most ``timeout`` seconds; a failure ends what is in flight."""
        began, idle = time.monotonic(), self.idle()
        show_at = first = began + _SHOW_EVERY
        try:
            while not over():
                self.check(o)
                if self.failures.first is not None:  # the watchdog was first: of a rank that died it alone knows
                    raise again(self.failures.first)
                now = time.monotonic()
                if timeout is not None and now - began > timeout:
                    raise self._expired(o, timeout)
                if now > show_at:
                    self.failures.show_wait(self.late(o))
                    show_at = now + _SHOW_EVERY
                idle.pause(0, None)
            self.check(o)  # what is over was begun by all ranks: they are known to have agreed, or not
            if self.failures.first is not None:
                raise again(self.failures.first)
        except Exception as error:
            self._raise(o, error)
        finally:  # after its failure is posted: a rank that does neither is to blame
            if show_at > first:
                self.failures.show_wait(None)

    def _expired(self, o: Work[Any], timeout: float) -> KosError:
        """Fail ``o``, whose time is up: not while the watchdog does, which would take what ends here for the cause."""
        with self.shared.lock:
            known = self.failures.first
            return self.to_error(o, self.timed_out(o, timeout) if known is None else again(known))

    def synchronize(
        self, timeout: float | None = None, stream: int | None = None, until: Callable[[], bool] | None = None
    ) -> None:
        """Wait on the host for what this communicator has queued, for all on ``stream``, or ``until`` that is true."""
        self.failures.refuse("synchronize")
        last = self._last or unstarted("synchronize", self)
        if until is not None:
            return self.wait_on_host(last, until, timeout or self.timeout)
        several = self.streams.keepers.copy() if stream is None else {stream: None}
        for each, keeper in several.items():
            self.wait_on_host(last, partial(self.is_idle, each, keeper), timeout or self.timeout)
        last.record_end(time.time_ns())
        for each in several:
            self.streams.forget(each)
        if stream is None:
            self._in_flight.clear()
            self._scratch.trim()

    def is_idle(self, stream: int, keeper: Any) -> bool:
        """Whether everything that was queued on the stream has run."""
        with driver.on_device(self.device):
            return self.streams.over(stream, keeper)

    # Who is late.

    def kernel_waits(self) -> list[int]:
        """The ranks that a kernel has waited for since the last look, as far as known."""
        return []

    def late(self, work: Work[Any]) -> Late:
        return self.shared.late(work, super().late(work).words)

    def timed_out(self, work: Work[Any], seconds: float | None) -> KosError:
        """The error of a call whose time is up."""
        return self.failures.overdue(self.late(work), work, seconds)

    # Failures.

    def watch(self) -> None:
        """Look at the other ranks, at the library's errors, and at the deadlines of what is queued."""
        shared = self.shared
        if not shared.lock.acquire(blocking=False):  # another thread is ending it, which may wait until the GPU is idle
            return
        try:  # what is closed or aborted meanwhile must not be touched
            if shared.ended or self._closing:
                return
            latest = self._last or shared.last or unstarted("watchdog", self)
            try:
                if self.failures.first is not None:  # of calls on host memory, or of an exchange
                    raise again(self.failures.first)
                if self.shared.backends[0] is self:
                    shared.look_for_the_lost(latest)
                with driver.on_device(self.device), relaxed_capture():
                    self.inspect(latest)
                    if self.marks:
                        self._look_at_deadlines(time.monotonic())
                self._show_queue()
            except Exception as error:
                self.to_error(latest, again(error, f"{error}; {ENDED}") if isinstance(error, KosError) else error)
        finally:
            shared.lock.release()

    def _look_at_deadlines(self, now: float) -> None:
        """Raise CollectiveTimeout for a call that the GPU began too long ago, or that a rank did not begin."""
        if (overdue := self._marks.overdue(now)) is not None:
            late = overdue[0] or self._last or unstarted("watchdog", self)
            raise self.timed_out(late, overdue[1])
        if not self._marks.running and not self._marks.captured:
            self.shared.look_for_the_late(now, self)
        raise_if_stuck(self, now)
        self.streams.current = self.streams.NONE  # the next call is marked again

    def _show_queue(self) -> None:
        """Show the other ranks for whom the GPU waits: the program may wait for a stream, and not within kos."""
        late = self.awaited = self.kernel_waits()
        last = self.shared.last_of(self)
        if not late and last is not None:
            late = self.shared.missing(last) if last.sequence == self._seen else []
            self._seen = last.sequence
        if late or self in self.failures.status.queued:
            self.failures.status.post_queued(self, [self.failures.world[rank] for rank in late])

    def to_error(self, work: Work[Any], error: Exception) -> KosError:
        """Also ends what is in flight, here and in what fails together, and reports the failure to the other ranks."""
        shared, failures = self.shared, self.failures
        with shared.lock:
            if shared.ended:  # of which ``error`` is a consequence
                launching = not isinstance(error, KosError)  # during a launch the watchdog ended the communicator
                text = f"{work}: the communicator failed before: {failures.first}" if launching else None
                assert failures.first is not None
                return failures.named(work, again(failures.first, text))
            if isinstance(error, KosError) and not lost(self, error):  # the other ranks of the host may know it better
                error = shared.cause(work, error)
            failure = failures.named(work, error)
            work.record_failure(failure)
            begun = 0 if shared.calls is None else shared.calls.begun
            failures.report(work, failure, begun, lost(self, failure))
            shared.ended = True
            for each in shared.backends:
                failures.status.post_queued(each, ())
                each.signal_abort()  # of all before any is ended: that may wait for the whole GPU
            for each in shared.backends:
                each.abort_device()
            return failure

    def _raise(self, work: Work[Any], error: Exception) -> NoReturn:
        raise self.to_error(work, error)

    @property
    def abort_flags(self) -> list[int]:
        """As ``Communicator.abort_flags``; kernels that can end early set a flag of their own."""
        return [self.shared.abort_flag, *super().abort_flags]

    def signal_abort(self) -> None:
        """Let kernels that wait for other ranks end, without waiting for that."""
        self.shared.mark_ended()

    def abort_device(self) -> None:
        """Abort what is in flight on the GPU, without the other ranks, and wait until the GPU is idle."""
        self.signal_abort()
        wait_for_idle(self, self._drain)

    def _drain(self) -> None:
        with suppress(CudaError), relaxed_capture():  # a broken context runs nothing any more
            driver.synchronize(self.device)

    def unwatch(self) -> None:
        """End the watchdog's looks; waits for one that has begun."""
        with self.shared.lock:
            self._closing = True
            self.failures.status.post_queued(self, ())
        watchdog.remove(self)

    def signal_end(self, reason: str) -> None:
        self.unwatch()
        self.shared.report_end(reason)
        self.signal_abort()

    def abort(self, reason: str) -> None:
        self.unwatch()
        self.shared.report_end(reason)
        with self.shared.lock:
            self.failures.first = self.failures.first or CollectiveError(reason)
            self.shared.ended = True  # no rank hears of what fails next
            self.shared.close()
            self.abort_device()

    def close(self) -> None:
        self.unwatch()
        try:
            self.shared.close()
        finally:
            self._scratch.close()
