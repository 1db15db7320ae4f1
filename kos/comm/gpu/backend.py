"""GPUBackend: runs the operations of a communicator on arrays of GPUs.

It has one or several routes (``routes.py``): ``nccl``, ``peer``, a backend of another package, and phases between
hosts.

A call queues its operation on one stream, and returns.  This is the stream of its arrays, or the stream that the
program passes.  With ``async_op=True``, the operation is queued on a stream of the communicator, behind the work that
is on the first stream by then, and ``Work.wait()`` makes the first stream wait for it.

The routes take turns on the GPU, in one ``Order``.  Kernels of two routes may each need the whole GPU while they wait
for other ranks.  Without an order, two GPUs might start different kernels first, and wait for each other forever.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

from kos.comm import watchdog
from kos.comm.contract import UNMADE, Backend, messages_of
from kos.comm.control.base import ControlPlane
from kos.comm.gpu.composed import CompressedOperation, OrderedReduction, bind_feed_back
from kos.comm.gpu.devices import check_float8
from kos.comm.gpu.eager import EagerCalls
from kos.comm.gpu.gpu_health import WatchedBackend
from kos.comm.gpu.gpu_work import DeviceWork, PooledEvent, free_finished
from kos.comm.gpu.memory import exchange_of
from kos.comm.gpu.order import Order
from kos.comm.gpu.routes import PHASES, Choices, single_rank_plan
from kos.comm.host.host_backend import HostBackend
from kos.comm.operation import NO_MESSAGE, Operation
from kos.comm.prepared import Prepared, without_memory
from kos.comm.tuning import Table, for_group
from kos.comm.work import Steps, Work
from kos.cuda import create_stream, driver
from kos.cuda.driver import call, cu, relaxed_capture
from kos.cuda.kernels import NOTHING, Plan
from kos.cuda.streams import PER_THREAD, Event, capture_of, is_captured
from kos.errors import CudaError, InvalidArgument, PeerMemoryError
from kos.memory import Array, Buffer, windows
from kos.memory.libraries import immutable


class GPUBackend(WatchedBackend):
    """Runs operations on arrays of one GPU by its ``routes``."""

    on_gpu: ClassVar[bool] = True
    has_envelopes: ClassVar[bool] = False
    finds_any_tag: ClassVar[bool] = False
    work: ClassVar[type[Work[Any]]] = DeviceWork

    def __init__(
        self, rendezvous: ControlPlane, routes: Sequence[Backend], host: HostBackend | None = None
    ) -> None:
        """``routes`` belong to this group and GPU.  If this raises, the caller aborts them.  Collective.

        ``host`` runs the communicator's operations on host memory, if it has any: its ring compares the calls of both.
        """
        routes = sorted(routes, key=lambda route: route.name)
        super().__init__(rendezvous, routes, host)
        self.name = "+".join(route.name for route in routes if route.name != PHASES)
        self.choices = Choices(routes, next((route.table for route in routes if route.table is not None), None))
        self.order = Order(self.streams) if len(routes) > 1 or routes[0].serial else None
        self._lock = threading.RLock()  # for ``order``; reentrant, because a finalizer may make a call
        self._events: list[Event] = []  # unused ones
        self._side: Any = None
        try:
            for route in routes:
                self.failures.reporters.append(route)
                route.backend, route.wait_until = self, self._wait_until  # type: ignore[method-assign]
                route.open(self)
        except BaseException:
            self.shared.report_end(UNMADE)
            self.shared.close()
            for route in [route for route in routes if route.backend is self]:
                route.abort(UNMADE)
                route.drained(True)  # nothing was queued
            raise
        watchdog.add(self)

    def set_timeout(self, seconds: float) -> None:
        """Follow the communicator's timeout."""
        self.timeout = seconds
        for route in self.routes:
            route.set_timeout(seconds)

    def split(
        self, rendezvous: ControlPlane | None, color: int | None, key: int, host: HostBackend | None
    ) -> GPUBackend | None:
        """The backend of a group of these ranks, beside its ``host``.  None without a ``rendezvous``.

        Every rank calls it.  After a loss, every surviving rank does so after ``abort``.
        """
        with ExitStack() as undo:
            routes, engine = list[Backend](), self.engine if host is None else host.engine
            for route in self.routes:
                make = route.split(rendezvous, color, key)
                if make is not None:
                    routes.append(make(rendezvous, engine, self.device))
                    undo.callback(routes[-1].abort, UNMADE)
            measured = any(route.table is not None for route in self.routes if route.name != PHASES)
            if measured and len(routes) > 1 and all(route.table is None for route in routes):
                assert rendezvous is not None
                routes[-1].table = for_group(rendezvous, self.device)  # ``peer`` and the phases load their own tables
            made = None if rendezvous is None else GPUBackend(rendezvous, routes, host)
            undo.pop_all()
        return made

    def use(self, table: Table) -> None:
        """Choose routes by this table from now on.  Collective: all ranks pass the same table."""
        self.choices.use(table)
        self.store.clear()

    def details(self) -> list[tuple[str, str, str]]:
        """Rows for ``Communicator.explain``: a resource, whether it is used, and why."""
        calls, table = self.shared.calls, self.choices.table
        used = "no" if calls is None or calls.segment.size == 1 else "in use"
        rows = [("shared memory", used, self.shared.segment)]
        rows += [] if table is None else [("tuning table", "in use", table.source)]
        return [*rows, *(row for route in self.routes for row in route.details())]

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        """The backend and algorithm of an operation on float32; ``nbytes`` is the size of each rank's input."""
        return self.choices.route_of(name, nbytes, symmetric, graph)

    # Preparing calls.

    def prepare(self, o: Operation) -> Prepared:
        """Choose the route of an operation.  Raises InvalidArgument for arrays on another device, and for tags.

        """
        first, message = o.send or o.recv, o.message
        route, fixed = self.choices.of(o) if len(self.routes) > 1 else (self.routes[0], True)
        if first is not None and first.device != self.device:
            raise InvalidArgument(
                f"x: expected memory of cuda:{self.device} (backend {route.name}), "
                f"got {type(first.array).__name__} in memory of {first.place}; a communicator uses one GPU: "
                "kos.init(device=...) creates one for another GPU"
            )
        if message is not NO_MESSAGE and (tag := message.tag or message.recv_tag):
            raise InvalidArgument(f"tag: expected 0 ({route.name} matches messages by their order), got {tag}")
        fixed = fixed and o.name not in route.by_capture
        uncaptured = not fixed and first is not None and not is_captured(first.stream)
        self.failures.refuse(o.name)  # otherwise this rank may wait to load a kernel
        # While NCCL connects, it may wait for a kernel of another route, and that kernel for another rank.
        for each in self.routes if self.size > 1 else ():
            each.connect()
        o = without_memory(o)
        plan = single_rank_plan(o, self.device) if self.size == 1 else None
        if plan is None and o.reduction is not None and o.reduction.dtype.name.startswith("float8"):
            check_float8("x", o.reduction.dtype, self.device)
        plan = plan or route.resolve(o) or self.by_exchanges(route, o)
        if o.residual is not None and o.send is not None and self.size > 1 and route.name != PHASES:
            feed_back = bind_feed_back(route, o.send, o.residual, o.options.compress)
            plan = replace(plan, steps=(feed_back, plan), kernels=(*plan.kernels, *feed_back.kernels))
        if not uncaptured and windows.memories:  # else it runs only outside of graphs
            plan = replace(plan, memories=windows.under([x.pointer for x in (o.send, o.recv) if x]))
        prepared = Prepared(o, self, self.launch, plan, route)
        prepared.capture_invariant = fixed
        return prepared if self.shared.calls is None else self.shared.calls.add(prepared)

    def compare_host_calls(self, prepared: Prepared) -> Prepared:
        """Have calls on host memory compared with those on the GPU."""
        prepared.launch = partial(self._launch_on_host, prepared.launch)  # of the core or the transport
        self.shared.compare_host_calls(prepared)
        return prepared

    def by_exchanges(self, route: Backend, o: Operation) -> Plan:
        """The plan of an operation that is built on exchanges of ``route`` and on kernels of kos."""
        if o.options.compress:
            return CompressedOperation(route, o).plan()
        if o.reduction is not None:
            return OrderedReduction(route, o).plan() if o.send is not None and o.send.count else NOTHING
        if o.name == "barrier":
            return Plan((partial(self._barrier, route),))
        pieces = exchange_of(o, route.rank, route.size)
        return Plan((route.bind_exchange(*pieces),), about=pieces)

    def _barrier(self, route: Backend, stream: int, send: int = 0, recv: int = 0) -> None:
        """Queue a barrier, in which each rank sends one byte to every rank."""
        token = self.scratch(1 + route.size, stream)
        route.collect(token, token + 1, 1, stream)

    def core_calls(self) -> tuple[Any, Any]:
        """The core's Group for the calls of a communicator, and what describes calls to it; None, None without one."""
        if self.shared.calls is None:
            return None, None
        calls = EagerCalls(self.shared.calls.core, self.shared, self)
        return (calls.core, calls) if calls.core_reads_arrays() else (None, None)

    def ordered_route(self, prepared: Prepared) -> Any:
        """The route of a call, if the call must be ordered among those of other routes; None if not, as for a copy."""
        return None if self.order is None or not prepared.plan.waits else prepared.route

    # Launching.

    def check_start(self, works: Sequence[Work[Any]]) -> None:
        """Raise InvalidArgument if a call would follow one whose stream is being captured.  The call gets no number."""
        for each in works if self.order is not None and self.failures.first is None else ():
            prepared, route = each.prepared, each.prepared.route
            if prepared.backend is not self or self.ordered_route(prepared) is None or self._may_follow(each):
                continue
            with suppress(CudaError):  # which ends the communicator when the call starts
                stream = each.stream if prepared.blocking else self.side
                self.order.check(route, stream, capture_of(each.stream), route.serial)

    def launch(self, work: Work[Any]) -> None:
        """Queue ``work`` on its stream or, if it overlaps, on the communicator's stream."""
        prepared, shared, self._last = work.prepared, self.shared, work
        try:
            if self._failed[0]:
                self.inspect(work)
            if prepared.fingerprint:  # messages have none
                core, sequence = shared.calls.core, work.sequence  # type: ignore[union-attr]
                core.publish(sequence, prepared.fingerprint)
                shared.last = work
                if sequence >= core.compare_at:
                    shared.confirm()
            elif not prepared.collective:
                self._message_streams.add(work.stream if prepared.blocking else self.side)
            if not prepared.blocking:
                self._start_overlapped((work,))
            elif self._may_follow(work):
                self._start(prepared.route, prepared.plan, work.stream, work.send, work.recv)
                self._hold_array(work)
            else:
                self._queue((work,))
        except Exception as error:
            self._raise(work, error)

    def _may_follow(self, work: Work[Any]) -> bool:
        """Whether the call is on the stream of the last call, and may follow that without a new order."""
        held = self.shared.streams
        if work.stream_owner is not held.current or (route := self.ordered_route(work.prepared)) is not held.route:
            return False
        # A kernel on a default stream goes to the current device.
        return route is None or work.stream > PER_THREAD or not route.serial or driver.is_current(self.device)

    def _launch_on_host(self, launch: Callable[[Work[Any]], Steps | None], work: Work[Any]) -> Steps | None:
        self.shared.announce_on_host(work)
        self.confirm(work)  # of two ranks whose calls differ, the later one notices it
        return launch(work)

    def in_order(self, works: Sequence[Work[Any]]) -> list[Work[Any]]:
        """The Works of a batch grouped by route.  Those on host memory come last."""
        return sorted(works, key=lambda work: [*self.routes, work.prepared.route].index(work.prepared.route))

    def start_all(self, works: Sequence[Work[Any]], overlap: bool) -> None:
        """Start the Works of a batch on the GPU, one route after another; with ``overlap``, on a separate stream."""
        self.failures.refuse(works[0].name)
        self._last = works[-1]
        try:
            for each in works:
                if each.prepared.fingerprint:
                    self.shared.calls.announce(each)  # type: ignore[union-attr]
                    self.shared.last = each
                elif not each.collective:
                    self._message_streams.add(self.side if overlap else each.stream)
            self.check(works[0])
            for _, several in itertools.groupby(works, lambda work: work.prepared.route):
                (self._start_overlapped if overlap else self._queue)(list(several))
        except Exception as error:
            self._raise(works[0], error)

    def queue(self, works: Sequence[Work[Any]], stream: int | None) -> None:
        """Queue Works of one route on ``stream``, or each on its own.  A route may combine them in one launch."""
        route = works[0].prepared.route
        self._last = works[-1]
        messages = [work for work in works if not work.collective and work.prepared.plan.about is not None]
        if len(works) == 1 or not messages or type(route).queue is not Backend.queue:
            return route.queue(works, stream)
        # Collectives first, then the messages in one exchange per stream.  A library matches the messages of two ranks
        # by their order, which is the same on all ranks.
        self.queue_each([work for work in works if work not in messages], stream)
        together = defaultdict[int, list[Work[Any]]](list)
        for work in messages:
            together[work.stream if stream is None else stream].append(work)
        for at, several in together.items():
            pieces = [(each.prepared.plan.about, (each.send, each.recv)) for each in several]
            sends, recvs = ([m for both, x in pieces for m in messages_of(both[side], x)] for side in range(2))
            self.queue_plan(route, Plan((lambda on, *_, both=(sends, recvs): route.exchange(*both, on),)), at)

    def queue_each(self, works: Sequence[Work[Any]], stream: int | None) -> None:
        """Queue Works of one route one after another, on ``stream`` or each on its own stream."""
        for each in works:
            self._last, prepared = each, each.prepared
            at = each.stream if stream is None else stream
            self.queue_plan(prepared.route, prepared.plan, at, each.send, each.recv)

    def queue_plan(self, route: Backend, plan: Plan, stream: int, send: int = 0, recv: int = 0) -> None:
        """Queue a plan of ``route``.  If the route is serial, order it behind all earlier work."""
        if not route.serial or not plan.waits:
            return self._start(route, plan, stream, send, recv)
        self._enter(route, (stream,))
        self._start(route, plan, stream, send, recv)
        self.streams.mark(stream)

    def _start(self, route: Backend, plan: Plan, stream: int, send: int, recv: int) -> None:
        if plan.memories:
            windows.keep_in_graph(plan.memories, stream)
        route.start(plan, stream, send, recv)

    def _enter(self, route: Backend, streams: Collection[int]) -> None:
        """Order the next work on these streams behind the work of other routes."""
        assert self.order is not None
        with self._lock:
            self.order.enter(route, streams, route.serial)
            for stream in streams:
                route.entered(stream)

    def _queue(self, works: Sequence[Work[Any]]) -> None:
        """Queue Works on the streams of their arrays, after any earlier work, and mark them for the watchdog.

        Later calls on the same stream skip these steps (``launch``), until the watchdog has checked the stream.
        """
        first, held = works[0], self.streams
        with driver.on_device(self.device):  # the legacy stream belongs to the current device
            several = {each.stream for each in works} if len(works) > 1 else ()
            for each in works:
                held.hold(each.stream, each.stream_owner, several)
            alone = all(each.stream == first.stream for each in works)
            self._queue_marked(works, first.stream if alone else None)
            order, route = self.order, self.ordered_route(first.prepared)
            kept = alone and held.owners.get(first.stream, 0) is first.stream_owner and held.is_kept(first.stream)
            held.current, held.route = held.NONE, route
            # Nothing is called from here on, since another thread or a finalizer could make a call meanwhile.
            if kept and (order is None or route is None or (order.route is route and order.stream == first.stream)):
                held.current = first.stream_owner
            for each in works:
                if type(each.stream_owner) is int:  # nothing keeps the stream alive: record the end of the call
                    held.mark(each.stream)
                self._hold_array(each)

    def _queue_marked(self, works: Sequence[Work[Any]], stream: int | None) -> None:
        """As ``queue``.  Marks the Works for the watchdog if they are on one stream and kos watches their deadlines."""
        route = works[0].prepared.route
        waits = any(work.prepared.plan.waits for work in works)  # for other ranks
        if self.order is not None and not route.serial and waits:  # before the mark: earlier work has its own time
            self._enter(route, {work.stream for work in works} if stream is None else (stream,))
        if stream is None or not route.watched:
            self.queue(works, stream)
        else:
            self._marks.queue(works, stream, self.queue)

    def _hold_array(self, o: Work[Any]) -> None:
        """Hold an array until the call has ended, if its library does not free memory in stream order."""
        if o.held is not None and type(o.held) is not Array and immutable(o.held) and not capture_of(o.stream):
            with driver.on_device(self.device):
                held, held.event = o.unstarted_copy(), PooledEvent(self._events, self.device)
                call(cu.cuEventRecord, held.event.handle, o.stream)
            self._in_flight.append([held])  # after the record: until then, the event counts as complete
            free_finished(self._in_flight)

    @cached_property
    def side(self) -> int:
        """The handle of the stream for calls that overlap the caller's work."""
        if self._side is None:
            with relaxed_capture():
                self._side = create_stream(self.device, urgent=True)  # few blocks, and other ranks wait for them
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
            self._queue_marked(works, side)
            call(cu.cuEventRecord, event.handle, side)
        for each in works:
            each.event = event
        if not captured:  # a graph keeps what it uses
            free_finished(self._in_flight)
            self._in_flight.append(list(works))

    def _wait_until(self, over: Callable[[], bool]) -> None:
        """``Backend.wait_until`` of the routes.  A call is in progress, because only calls use ``exchange``."""
        assert self._last is not None
        self.wait_on_host(self._last, over, self._last.operation.options.timeout)

    # Memory.

    def scratch(self, nbytes: int, stream: int, part: Any = 0) -> int:
        """The address of memory that operations on ``stream`` use one after another.  Parts do not overlap."""
        return self._scratch.address(nbytes, stream, part)

    def allocate(self, shape: Any, dtype: Any) -> Any:
        """An array in the memory that the routes move fastest.  Collective."""
        return self.choices.ordered.allocate(shape, dtype)

    def views(self, x: Buffer) -> list[Any]:
        """The memory of each rank that corresponds to ``x``, which is an array of ``allocate`` or a part of one."""
        return self.choices.ordered.views(x)

    def exact_group_size(self) -> int:
        """See ``Communicator.exact_group_size``."""
        return max(route.exact_group_size for route in self.routes)

    def register(self, buffer: Buffer) -> Array:
        """Register by the route of ``allocate``, or by another one if it refuses.  All ranks accept or refuse alike."""
        routes = [route for route in self.routes if route.name != PHASES]  # phases do not register memory
        if len(routes) == 1:
            return self._registered(routes[0], buffer)
        refusals = []
        for route in sorted(routes, key=lambda route: route is not self.choices.ordered):
            try:
                return self._registered(route, buffer)
            except (InvalidArgument, PeerMemoryError) as error:
                refusals.append(f"{route.name}: {error}")
        raise InvalidArgument("; ".join(refusals))

    def _registered(self, route: Backend, buffer: Buffer) -> Array:
        registered = route.register(buffer)
        self.store.clear()  # an address of a stored call may now be in a window
        return registered
