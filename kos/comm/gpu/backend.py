"""DeviceBackend: what backends that move GPU memory have in common: streams, waits, failures.

An operation is queued on one stream and the call returns: that of its arrays, or the one given.  With
``async_op=True`` it is queued on a stream of the communicator's own, after what the first one holds by now,
and ``Work.wait()`` lets the first one wait for it.  The host waits only where it is asked to
(``Work.wait(timeout)``, ``Work.synchronize``, ``Communicator.synchronize``, ``barrier``, ``close``).  Failures are
found there, at the next call, and by the watchdog (``kos.comm.watchdog``), which ends what is in flight.

Ranks that share a host compare their calls in shared memory.  A communicator has one such segment: that of the
backend for host memory where there is one, else the backend's own.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

from kos.comm import watchdog
from kos.comm.arguments import check_timeout
from kos.comm.backend import Backend
from kos.comm.failures import again
from kos.comm.gpu.order import Streams
from kos.comm.host.backend import HostBackend, at_exit, closed
from kos.comm.host.shared import LEFT, Calls, open_segment
from kos.comm.operation import NO_MESSAGE, POINT_TO_POINT, Call, Operation, Route
from kos.comm.recorder import completed
from kos.comm.recorder import failed as record_failure
from kos.comm.rendezvous import mpi_job
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.tuning import Table
from kos.comm.work import Idle, Work
from kos.cuda import create_stream, driver, streams
from kos.cuda.devices import DeviceInfo, assign_devices, visible_devices
from kos.cuda.driver import call, cu
from kos.cuda.graphs import relaxed_capture
from kos.cuda.streams import Event, capture_of, is_over
from kos.errors import (
    BackendUnavailable,
    CollectiveError,
    CollectiveTimeout,
    CudaError,
    InvalidArgument,
    KosError,
    RankLost,
)
from kos.memory.array import Array
from kos.memory.libraries import immutable

Launch = Callable[[int], None]
"""Queues an operation on the stream of that handle."""
KNOWN = 4096
"""Launches that are kept: of calls with the same addresses, which a program makes again and again."""
_IN_PIECES = POINT_TO_POINT | {"reduce_scatter_v", "all_gather_v", "all_to_all_v"}
_UNCONFIRMED = 64
"""Collectives that are queued before they are compared with the other ranks', as far as those have come."""
_DEAD_SECONDS = 0.5
"""What a GPU waits for may still end in so long after a rank's process was found to have."""
_LOOK_EVERY = 0.02
"""Seconds between two looks at the other ranks while a call of a library has not returned."""
_ENDED = "what was in flight was ended, and its results are undefined"


def device_of(rendezvous: Rendezvous) -> DeviceInfo:
    """The GPU of this rank: the one it was told to take, else by its place among the ranks of the machine.

    Ranks bound to a NUMA node take GPUs of that node first.  Raises BackendUnavailable without one.  Collective
    on first use.
    """
    place, nodes = rendezvous.local_rank, rendezvous.local_nodes
    driver.require()
    devices = visible_devices()
    wanted = rendezvous.device
    if wanted is None:
        wanted = assign_devices(nodes, [device.numa_node for device in devices])[place]
    if not 0 <= wanted < len(devices):
        raise BackendUnavailable(f"device: expected one of 0..{len(devices) - 1}, got {wanted}")
    return devices[wanted]


class DeviceBackend(Backend):
    """Carries arrays on the GPU ``device``.  Subclasses ``resolve`` operations and end them (``halt``).

    ``host`` is the backend that carries the same communicator's host memory, if there is one.
    """

    on_gpu = True
    device: int
    table: Table | None = None
    """By what was measured, which operation goes how; where the backend knows one."""
    marks = 0
    """Calls in flight whose deadline the watchdog looks at; 0 where kernels have their own."""

    def __init__(self, rendezvous: Rendezvous, device: int | None = None, host: Backend | None = None) -> None:
        super().__init__(rendezvous)
        self.together: Sequence[DeviceBackend] = (self,)  # what fails together, in the order in which it is ended
        self.failing = threading.RLock()  # one for all of them: the user's thread or the watchdog reports a failure
        self.shared_memory, self._calls, self._shares = "a group of one", None, False
        if isinstance(host, HostBackend) and host.calls is not None:
            self._calls, self._shares, self.shared_memory = host.calls, True, host.shared_memory
        elif self.size > 1:
            segment, self.shared_memory = open_segment(rendezvous)
            if segment is not None:
                self._calls = Calls(segment, self.ledger)
                at_exit(self)
        self.device = device_of(rendezvous).index if device is None else device
        self._known: dict[tuple[Any, ...], Route] = {}
        self._last: Call | None = None
        self.streams = Streams(self.device)
        self._announced: Call | None = None  # the last collective
        self._confirmed = 0  # collectives that every rank of the host is known to have begun alike
        self._compare_at = _UNCONFIRMED
        self._flying: deque[list[DeviceWork]] = deque()  # whose arrays must live until the GPU is done with them
        self._events: list[Any] = []  # that nobody uses
        self._side: Any = None
        self._free_marks = [_Mark(self.device) for _ in range(self.marks)]
        self._marks: deque[_Mark] = deque()  # of what is in flight
        self._captures = False  # whether the last call that asked was captured
        self._seen: tuple[int, float] = -1, 0.0  # the last call that the watchdog saw, and when it saw it first
        self._gone: KosError | None = None  # why a rank will do nothing more, as far as the watchdog knows
        self._look_at = 0.0  # when it looks for such ranks again
        self._closing = False

    def join(self, others: Sequence[DeviceBackend]) -> None:
        """Carry one communicator's operations together with ``others`` of this GPU."""
        self.together, self.failing, self.streams = others, others[0].failing, others[0].streams
        if self._side is None and len(others) > 1:
            side = create_stream(self.device, urgent=True)
            for each in others:
                each._side = side  # one for all: what overlaps the caller's work does not overlap itself

    @property
    def shares_memory(self) -> bool:
        """Whether this rank compares its calls with others of its host; ``shared_memory`` says why not."""
        return self._calls is not None

    def is_symmetric(self, o: Operation) -> bool:
        """Whether the backend reaches all buffers of the operation where they lie, on every rank."""
        return False

    def beside(self, o: Operation) -> bool:
        """Whether the backend carries an overlapped operation without multiprocessors."""
        return False

    def has_algorithm(self, o: Operation) -> bool:
        """Whether the backend carries the operation by the algorithm that it names."""
        return True

    def details(self) -> list[tuple[str, str, str]]:
        shared = ("shared memory", "in use" if self.shares_memory else "no", self.shared_memory)
        return [shared] if self.table is None else [shared, ("tuning table", "in use", self.table.source)]

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        return self.name  # whose library chooses

    @abstractmethod
    def split(
        self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0, host: Backend | None = None
    ) -> DeviceBackend | None: ...

    def shrink(self, rendezvous: Rendezvous, host: Backend | None = None) -> DeviceBackend:
        backend = self.split(rendezvous, 0, rendezvous.rank, host)
        assert backend is not None
        return backend

    def let_go(self) -> None:
        """Let kernels of our own that wait for other ranks give up, without waiting for that."""

    def trim(self) -> None:
        """Free what only calls used that have run: the host has waited for all of them."""

    @abstractmethod
    def halt(self) -> None:
        """End what is in flight on the GPU, now, without the other ranks."""

    def async_error(self) -> str | None:
        """What the library found wrong behind our back, if anything."""
        return None

    def idle(self) -> Idle:
        return mpi_job.Backoff()

    def prepare(self, call: Call) -> None:
        """Refuse arrays that are elsewhere, arrays of two orders, and tags; find the route of the operation."""
        o = call.operation
        send, recv, reduction, message, options = o.send, o.recv, o.reduction, o.message, o.options
        stream, timeout, first = options.stream, options.timeout, send or recv
        if first is not None:
            if first.device != self.device:
                raise InvalidArgument(
                    f"x: expected memory of cuda:{self.device} (backend {self.name}), "
                    f"got {type(first.array).__name__} in memory of {first.place}"
                )
            if recv is not None and recv.stream != first.stream:
                raise InvalidArgument("out: expected an array of the stream of x, got another's: say stream=")
            call.stream, call.queue = first.stream, first.queue
        elif stream is None:
            call.stream, call.queue = 0, None
        else:
            call.stream, call.queue = streams.handle(stream), streams.keeper(stream)
        if message is not NO_MESSAGE and (tag := message.tag or message.recv_tag):
            raise InvalidArgument(f"tag: expected 0 ({self.name} matches messages by their order), got {tag}")
        key = (
            o.name, send and send.pointer, send and send.count, send and send.dtype,
            recv is not send and recv and (recv.pointer, recv.count, recv.dtype),
            reduction and reduction.op, reduction and reduction.factor, o.root, options.algorithm,
            options.deterministic, options.overlap, None if timeout == self.timeout else timeout,
            o.name in _IN_PIECES and (message.dst, message.src, tuple(o.send_counts or ()), tuple(o.recv_counts or ())),
        )  # fmt: skip
        route = self._known.get(key)
        if route is None:
            call.route = route = Route(self, overlap=options.overlap)
            shared = self.resolve(o, route)
            if self._calls is not None and o.collective:
                route.mark = self._calls.mark(call)
            if shared:
                if len(self._known) == KNOWN:
                    self._known.clear()
                self._known[key] = route
        call.route, call.mark = route, route.mark

    @abstractmethod
    def resolve(self, o: Operation, route: Route) -> bool:
        """Set ``route.launch``, and ``route.kernel`` where it matters; returns whether every such call may share it."""

    def start(self, call: Call) -> Work[Any] | None:
        if self.broken is not None:
            self.refuse(call)
        stream, calls, route = call.stream, self._calls, call.route
        try:
            if calls is not None and call.mark:  # messages have none
                calls.announce(call)
                self._announced = call
                if call.sequence >= self._compare_at:
                    self._confirm()
            if route.overlap:  # type: ignore[union-attr]
                return self._start_beside((call,))[0]
            keeper, held = call.queue, self.streams
            if held.keepers.get(stream, self) is not keeper:
                held.hold(stream, keeper)
            if self._free_marks:
                self._queue_marked((call,), stream)
            else:
                route.launch(stream)  # type: ignore[union-attr,misc]
            if type(keeper) is int:
                self._note_ends((call,))
        except Exception as error:
            self._give_up(call, error)
        self._last = call
        return None

    def _note_ends(self, calls: Sequence[Call]) -> None:
        """Record where calls end whose streams nothing keeps; hold arrays that are not freed in stream order."""
        for each in calls:
            self.streams.mark(each.stream)
            send = each.operation.send
            if send is None or type(send.array) is Array or not immutable(send.array):
                continue
            if not is_captured(each.stream):
                event = _Event(self._events)
                call(cu.cuEventRecord, event.handle, each.stream)
                self._flying.append([DeviceWork(each, self, event)])
                self._let_landed_go()

    def _let_landed_go(self) -> None:
        while self._flying and self._flying[0][-1].over():
            self._flying.popleft()

    def start_all(self, calls: Sequence[Call], overlap: bool) -> list[Work[Any]]:
        self.raise_failure(calls[0].name)
        first = calls[0]
        try:
            for each in calls:
                if self._calls is not None and each.mark:
                    self._calls.announce(each)
                    self._announced = each
                    if each.sequence >= self._compare_at:
                        self._confirm()
            self.check(first)
            if overlap:
                return self._start_beside(calls)
            for each in calls:
                self.streams.hold(each.stream, each.queue)
            if self._free_marks and all(each.stream == first.stream for each in calls):
                self._queue_marked(calls, first.stream)
            else:
                self.queue(calls, None)
            self._note_ends(calls)
        except Exception as error:
            self._give_up(first, error)
        self._last = calls[-1]
        return [DeviceWork(each, self) for each in calls]

    def queued(self, call: Call) -> Work[Any]:
        return DeviceWork(call, self)

    def queue(self, calls: Sequence[Call], stream: int | None) -> None:
        """Queue each on ``stream``, or on its own; a library that can makes one launch of them."""
        for each in calls:
            assert each.route is not None and each.route.launch is not None
            each.route.launch(each.stream if stream is None else stream)

    def _queue_marked(self, calls: Sequence[Call], stream: int) -> None:
        """Queue between two events, by which the watchdog knows when the GPU began and ended it."""
        with driver.on_device(self.device):
            self._captures = is_captured(stream)
            if self._captures:  # it runs when the graph is replayed
                return self.queue(calls, stream)
            mark = self._free_marks.pop()
            mark.begin(calls[-1], stream)
            self.queue(calls, stream)
            mark.end(stream)
            self._marks.append(mark)

    @cached_property
    def side(self) -> int:
        """Handle of the stream of what overlaps the caller's work."""
        if self._side is None:
            with relaxed_capture():
                self._side = create_stream(self.device, urgent=True)  # few blocks, for which other ranks wait
        return int(self._side.handle)

    def _start_beside(self, calls: Sequence[Call]) -> list[Work[Any]]:
        side = self.side
        first, last = calls[0], calls[-1]
        streams = (first.stream,) if first is last else {each.stream for each in calls}
        captured = any(map(is_captured, streams))
        if not captured:
            self._let_landed_go()
        self.streams.hold(side, self._side)
        with driver.on_device(self.device):
            event = _Event(self._events)
            for stream in streams:
                call(cu.cuEventRecord, event.handle, stream)
                call(cu.cuStreamWaitEvent, side, event.handle, 0)
            if self._free_marks and not captured:
                self._queue_marked(calls, side)
            else:
                self.queue(calls, side)
            call(cu.cuEventRecord, event.handle, side)
        self._last = last
        works = [DeviceWork(each, self, event) for each in calls]
        if not captured:  # what a graph uses is kept by the graph
            self._flying.append(works)
        return list(works)

    # What the host asks.

    def check(self, o: Call) -> None:
        """Raise for what is known to have gone wrong: calls that differ, ranks that are gone, the library's errors."""
        for each in self.together:
            each._confirm()
        for each in self.together:
            each.inspect(o)

    def lost(self, error: KosError) -> bool:
        if not isinstance(error, CudaError):
            return False
        try:
            with driver.on_device(self.device):
                return driver.broken() is not None
        except CudaError:  # it cannot even be made current
            return True

    def inspect(self, o: Call) -> None:
        """Raise for what the library, or a kernel, has found wrong."""
        problem = self.async_error()
        if problem is not None:
            raise CollectiveError(f"{o}: {problem}")

    def confirm(self, o: Call) -> None:
        """Compare the calls so far with those of the other ranks, before ``o`` that another backend carries."""
        try:
            if self._announced is not None and self.broken is None:
                self._confirm()
        except Exception as error:
            self._give_up(o, error)

    def _confirm(self) -> None:
        """Compare the calls of the ranks of this host since this was done last: many at a time costs little."""
        if self._calls is not None and self._announced is not None:
            self._compare_at = self._announced.sequence + _UNCONFIRMED
            self._confirmed = self._calls.compare(self._announced, self._confirmed)

    def wait_on_host(self, o: Call, over: Callable[[], bool], timeout: float | None) -> None:
        """Wait until ``over()``, at most ``timeout`` seconds; a failure ends what is in flight."""
        deadline = None if timeout is None else time.monotonic() + timeout
        idle, look_at, killed = self.idle(), time.monotonic() + _DEAD_SECONDS, None
        try:
            while not over():
                self.check(o)
                if self.broken is not None:  # the watchdog was first
                    raise again(self.broken)
                if self._calls is not None and time.monotonic() > look_at:
                    if killed is not None:  # before it died it began all that this rank has, but it has not ended
                        raise self.ledger.lost(killed, "its process ended", o, None, 0.0)
                    look_at, killed = time.monotonic() + _DEAD_SECONDS, self._calls.killed()
                if deadline is not None and time.monotonic() > deadline:
                    raise CollectiveTimeout(f"{o}: not complete after {timeout:g} s; {self.missing(o)}")
                idle.pause(0, None)
            self.check(o)  # what is over was begun by all ranks: they are known to have agreed, or not
            if self.broken is not None:
                raise again(self.broken)
        except Exception as error:
            self._give_up(o, error)

    def synchronize(
        self, timeout: float | None = None, stream: int | None = None, until: Callable[[], bool] | None = None
    ) -> None:
        """Wait on the host for what this communicator has queued, for all on ``stream``, or ``until`` that is true."""
        self.raise_failure("synchronize")
        last = self._last or Call(Operation("synchronize", self.rank))
        if until is not None:
            return self.wait_on_host(last, until, timeout or self.timeout)
        several = self.streams.keepers.copy() if stream is None else {stream: None}
        for each, keeper in several.items():
            self.wait_on_host(last, partial(self.is_idle, each, keeper), timeout or self.timeout)
        completed(last, time.time_ns())
        for each in several:
            self.streams.forget(each)
        if stream is None:
            self._flying.clear()
            self.trim()

    def is_idle(self, stream: int, keeper: Any) -> bool:
        """Whether everything that was queued on the stream has run."""
        with driver.on_device(self.device):
            return self.streams.over(stream, keeper)

    def bounded(self, function: Callable[[], Any], timeout: float | None, what: str) -> Any:
        """What ``function()`` returns: a call of a library that may wait for other ranks without a limit.

        It runs on a thread of its own; raises CollectiveTimeout, or what is learned of other ranks meanwhile.
        """
        return self.begin(function, what)(timeout)

    def begin(self, function: Callable[[], Any], what: str) -> Callable[[float | None], Any]:
        """``bounded`` in two halves: ``function`` runs from now on, what this returns waits for it."""
        outcome: list[Any] = []

        def run() -> None:
            try:
                with driver.on_device(self.device), relaxed_capture():  # another thread may be capturing a graph
                    outcome.extend((function(), None))
            except BaseException as error:
                outcome.extend((None, error))

        thread = threading.Thread(target=run, name=what, daemon=True)
        thread.start()

        def finish(timeout: float | None) -> Any:
            deadline = None if timeout is None else time.monotonic() + timeout
            while True:
                thread.join(_LOOK_EVERY)
                if not thread.is_alive():
                    break
                if self.broken is None:  # else it is how that ends
                    self._confirm()
                if deadline is not None and time.monotonic() > deadline:
                    raise CollectiveTimeout(f"{what}: not begun by all ranks after {timeout:g} s")
            result, error = outcome
            if error is not None:
                raise error
            return result

        return finish

    # Failures.

    def watch(self) -> None:
        """Look at the other ranks, at the library's errors, and at the deadlines of what is queued."""
        with self.failing:  # what is closed or aborted meanwhile must not be touched
            if self.broken is not None or self._closing:
                return
            announced = [each._announced for each in self.together if each._announced is not None]
            latest = max(announced, key=lambda o: o.sequence, default=None) or Call(Operation("watchdog", self.rank))
            try:
                if self.together[0] is self and self._calls is not None:
                    self._look_for_the_lost(self._calls, latest)
                with driver.on_device(self.device), relaxed_capture():
                    self.inspect(latest)
                    self._look_at_deadlines(time.monotonic())
            except Exception as error:
                self.failed(latest, again(error, f"{error}; {_ENDED}") if isinstance(error, KosError) else error)

    def _look_for_the_lost(self, calls: Calls, latest: Call) -> None:
        """Raise what concerns this rank: calls that differ, another rank's failure, RankLost for a rank that is gone.

        Of a rank that is gone whatever this one has queued may wait, replays of graphs too, which are no calls.  Half a
        second is left for what may still end.
        """
        for each in self.together:
            each._confirm()
        calls.raise_failure(calls.begun - 1)
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at, known = now + _DEAD_SECONDS, self._gone
        try:
            killed = calls.killed()
            self._gone = None if killed is None else self.ledger.lost(killed, "its process ended", None, None, 0.0)
            calls.raise_failure(sys.maxsize)
        except RankLost as error:
            self._gone = error
        except KosError:  # of a collective that this rank has not come to
            pass
        if known is not None and self._gone is not None:
            raise again(self._gone, f"{latest}: {self._gone}")

    def _look_at_deadlines(self, now: float) -> None:
        """Raise CollectiveTimeout for what the GPU began longer ago than its timeout, or a rank did not begin."""
        for mark in list(self._marks):
            if mark.ended():
                self._marks.remove(mark)
                self._free_marks.append(mark)
            elif (limit := mark.overdue(now)) is not None:
                late = mark.call() or self._last or Call(Operation("watchdog", self.rank))
                raise CollectiveTimeout(f"{late}: not complete after {limit:g} s; {self.missing(late)}")
        o, calls = self._announced, self._calls
        if o is None or calls is None or not self.marks or self._marks or self._captures:
            return
        if o.operation.root is not None:  # which may end before all have come
            return
        timeout = o.operation.options.timeout
        if self._seen[0] != o.sequence:
            self._seen = o.sequence, now
        elif timeout is not None and now - self._seen[1] > timeout and (absent := calls.missing(o)):
            words = f"{self.ledger.names(absent)} did not arrive"
            arrived = [rank for rank in range(self.size) if rank not in absent]
            raise self.ledger.overdue(absent, o, timeout, words, arrived=arrived)

    def _give_up(self, o: Call, error: Exception) -> NoReturn:
        raise self.failed(o, error)

    def missing(self, call: Call) -> str:
        if call.collective and self._calls is not None and (late := self._calls.missing(call)):
            return f"{self.ledger.names(late)} did not arrive"
        return super().missing(call)

    def failed(self, call: Call, error: Exception) -> KosError:
        """Also ends what is in flight, here and in what fails together, and reports the failure to the other ranks."""
        with self.failing:
            if self.broken is not None:
                if not isinstance(error, KosError):  # a launch amid which the watchdog ended the communicator
                    error = again(self.broken, f"{call}: the communicator failed before: {self.broken}")
                return super().failed(call, error)
            failure = super().failed(call, self._cause(call, error))
            record_failure(call, failure)
            self._report(call, failure)
            for each in self.together:
                each.broken = each.broken or again(failure)
                each.let_go()  # of all before any is ended: that may wait for the whole GPU
            for each in self.together:
                each.halt()
            return failure

    def _cause(self, o: Call, error: Exception) -> Exception:
        """What the other ranks of the host know better: another failure, calls that differ, a rank that died."""
        calls = self._calls
        if calls is None or not isinstance(error, KosError) or self.lost(error):
            return error
        try:
            if o.collective and o.sequence >= 0:  # else a wait, which was no call
                calls.check(o)
        except KosError as known:
            known.__context__ = None  # which says the same, less well
            return known.with_traceback(None)
        if isinstance(error, CollectiveTimeout) and (killed := calls.killed()) is not None:
            return self.ledger.lost(killed, "its process ended", o, None, 0.0)
        return error

    def _report(self, o: Call, failure: KosError) -> None:
        """Have the other ranks of the host raise it, too."""
        reported = self.ledger.shared(failure, self.lost(failure))
        if self._calls is not None:
            self._calls.fail(reported, o.sequence if o.collective and o.sequence >= 0 else self._calls.begun)

    def report_end(self, reason: str) -> None:
        """Report to the other ranks that this one begins nothing more, and why."""
        if self._calls is not None and not self._shares:  # else the backend for host memory reports it
            in_flight = self.streams.keepers or self._flying
            self._calls.fail(self._departure(reason), 0 if in_flight else self._calls.begun)
            self._calls.leave(LEFT)

    def _departure(self, reason: str) -> KosError:
        assert self._calls is not None
        return self.ledger.end(reason, self.ledger.cause(self.broken, self._calls.killed()))

    def unwatch(self) -> None:
        """The watchdog looks no more; waits for a look that has begun."""
        with self.failing:
            self._closing = True
        watchdog.remove(self)

    def abort(self, reason: str) -> None:
        self.unwatch()
        self.report_end(reason)
        with self.failing:
            self.broken = self.broken or CollectiveError(reason)  # of what is given up next nobody is told
            self._close_calls()
            self.halt()

    def leave(self, reason: str) -> None:
        """Tell the ranks of this host before an abort: they may wait for any of what this one has queued."""
        self.unwatch()
        if self._calls is not None and (self.streams.keepers or self._flying):
            self._calls.fail(self._departure(reason), 0)

    def close(self) -> None:
        self.unwatch()
        self._close_calls()

    def _close_calls(self) -> None:
        closed(self)
        calls, self._calls = self._calls, None
        if calls is not None and not self._shares:
            calls.close()


class DeviceWork(Work[Any]):
    """An operation queued on a GPU.

    ``wait()`` without a timeout does not block: work queued from then on, on the stream of the arrays, comes
    after the operation.  ``wait(timeout)`` and ``synchronize(timeout)`` wait on the host, in seconds.
    """

    __slots__ = ("event",)

    backend: DeviceBackend

    def __init__(self, call: Call, backend: DeviceBackend, event: _Event | None = None) -> None:
        self.call = call
        self.backend = backend
        self.event = event  # what ends an operation on the communicator's own stream

    def over(self) -> bool:
        """Whether the GPU is done with it (and, without an event, with what its stream holds)."""
        if self.event is None:
            return self.backend.is_idle(self.call.stream, self.call.queue)
        (status,) = cu.cuEventQuery(self.event.handle)
        return is_over("cuEventQuery", status)

    def done(self) -> bool:
        self.backend.raise_failure(self.call)
        over = self.over()
        self.backend.check(self.call)
        return over

    def wait(self, timeout: float | None = None) -> Any:
        if timeout is not None:
            return self.synchronize(timeout)
        backend, recv = self.backend, self.call.operation.recv
        if backend.broken is not None:
            backend.raise_failure(self.call)
        if self.event is not None:
            with driver.on_device(backend.device):
                call(cu.cuStreamWaitEvent, self.call.stream, self.event.handle, 0)
        return recv.result if recv is not None else None

    def synchronize(self, timeout: float | None = None) -> Any:
        self.backend.raise_failure(self.call)
        timeout = self.call.operation.options.timeout if timeout is None else check_timeout(timeout)
        self.backend.wait_on_host(self.call, self.over, timeout)
        completed(self.call, time.time_ns())
        return self.wait()

    def cancel(self, error: KosError) -> None:
        """Nothing: what is queued ends with its backend."""


class _Event:
    """A CUDA event, taken from ``free`` and given back to it by the last work that holds it."""

    __slots__ = ("_free", "handle")

    def __init__(self, free: list[Any]) -> None:
        self._free = free
        self.handle = free.pop() if free else call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def __del__(self) -> None:
        if hasattr(self, "handle"):  # one was made
            self._free.append(self.handle)


class _Mark:
    """Two events around something queued, which may be used again when the GPU has passed both."""

    def __init__(self, device: int) -> None:
        self._begin, self._end = Event(device), Event(device)

    def begin(self, o: Call, stream: int) -> None:
        self.call, self._timeout = weakref.ref(o), o.operation.options.timeout  # not ``o`` itself, which holds arrays
        self._begun: float | None = None
        self._begin.record(stream)

    def end(self, stream: int) -> None:
        self._end.record(stream)

    def ended(self) -> bool:
        return self._end.done()

    def overdue(self, now: float) -> float | None:
        """Its timeout, if the GPU was seen to have begun it longer ago than that."""
        if self._begun is None and self._begin.done():
            self._begun = now
        late = self._begun is not None and self._timeout is not None and now - self._begun > self._timeout
        return self._timeout if late else None


def is_captured(stream: int) -> bool:
    """Whether what is queued on the stream goes into a graph."""
    return capture_of(stream) != 0


class Scratch:
    """Memory of a GPU for a backend's own use, uninitialised; may be taken while a graph is captured."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes, self._device = nbytes, device
        with driver.on_device(device), relaxed_capture():
            self.pointer = int(call(cu.cuMemAlloc, nbytes))

    def close(self) -> None:
        pointer, self.pointer = self.pointer, 0
        if pointer:
            with driver.on_device(self._device):
                call(cu.cuMemFree, pointer)
