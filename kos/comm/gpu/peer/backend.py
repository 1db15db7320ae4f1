"""The peer backend: GPU memory by our own kernels, over memory that all ranks of the machine map.

This class chooses the kernel of an operation (``_BINDERS``); ``PeerEngine`` launches it.  All-reduce, reduce-scatter
and small scans have kernels of their own.  So have all-gather and all-to-all between symmetric buffers.  Broadcast and
every other operation that only moves data use ``exchange``.  The other reductions exchange and add in rank order
(``ordered_sum``).  So every result has the same bits on every rank and from run to run, ``deterministic`` or not.
16-bit floats are added in fp32.  Any dtype, count and alignment is allowed.

Buffers may lie anywhere on the rank's GPU; between those of ``Communicator.allocate`` large all-reduces take no
detour, and a call of 4 MiB or more that overlaps other work (``async_op=True``, on all ranks) goes by copy engines.
Several ranks may share a GPU as processes, which take turns on it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

from kos.comm import watchdog
from kos.comm.backend import Backend, Probe
from kos.comm.failures import again
from kos.comm.gpu.backend import KNOWN, DeviceBackend, device_of
from kos.comm.gpu.memory import NONE, Piece, Windows, exchange_of, whole
from kos.comm.gpu.order import Order
from kos.comm.gpu.ordered_sum import OrderedReduction, kernel_types
from kos.comm.gpu.peer.copies import BESIDE
from kos.comm.gpu.peer.engine import MAX_RANKS, PeerEngine, Run
from kos.comm.gpu.peer.launches import PACKETS, Launch, Launches
from kos.comm.operation import AUTO, Call, Operation, Route
from kos.comm.reduction import ReduceOp
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.tuning import for_group
from kos.cuda import driver
from kos.cuda.graphs import relaxed_capture
from kos.cuda.streams import PER_THREAD
from kos.dtypes import DTYPES
from kos.errors import BackendUnavailable, InvalidArgument, KosError
from kos.memory import Buffer
from kos.memory.array import Array, Shape, as_dtype
from kos.memory.libraries import expandable
from kos.memory.symmetric import MappedPart, SymmetricMemory
from kos.memory.windows import WindowMemory, in_windows

log = logging.getLogger(__name__)

_BY_COPIES = ("all_reduce", "reduce_scatter", "all_gather")
_BY_PARTS = 128 << 10
"""Bytes from which a broadcast goes to every rank in parts, which go on to all."""
_VECTOR = 16
"""Bytes that a kernel moves at once."""
_BESIDE = 4 << 20
"""Bytes of an overlapped operation from which copy engines carry it: multiprocessors are left to what it overlaps."""


class PeerBackend(DeviceBackend):
    """Carries a group of at most 8 ranks of one machine.

    Creation is collective and moves real bytes between every two ranks; raises BackendUnavailable on all of them
    if any pair cannot.
    """

    name = "peer"
    _engine: PeerEngine

    def __init__(self, rendezvous: Rendezvous, device: int | None = None, host: Backend | None = None) -> None:
        super().__init__(rendezvous, device, host)
        self._rendezvous = rendezvous
        self._unmapped = False  # whether no rank maps another's windows any more
        self._windows = Windows(
            rendezvous, self.device, self._free_window, lambda: self._unmapped or self.broken is not None
        )
        self._at = -1  # the stream of the last operation, if more may go there as it is
        self._order = Order()
        self._exchanges: dict[tuple[Any, ...], Run] = {}
        try:
            self.table = for_group(rendezvous, self.device)
            launches = self.table.launches
            self._engine = PeerEngine(rendezvous, self.device, timeout=self.timeout, launches=launches)
        except BaseException as error:
            super().close()
            if not isinstance(error, KosError) or rendezvous.failure is not None:
                raise
            raise BackendUnavailable(f"peer: {error}") from error  # on all ranks: see on_all
        self._failure = self._engine.failure
        watchdog.add(self)

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        """Checks that cost nothing; ``__init__`` tests whether bytes move."""
        try:
            device = device_of(rendezvous)
        except KosError as error:
            return Probe(False, str(error).removeprefix("CUDA: "))
        if rendezvous.threads is not None and rendezvous.size > 1:
            return Probe(False, "the ranks are threads of one process, which share its GPU")
        if rendezvous.size > MAX_RANKS:
            return Probe(False, f"expected at most {MAX_RANKS} ranks, got {rendezvous.size}")
        if rendezvous.local_size < rendezvous.size:
            return Probe(False, f"the ranks are on several hosts: {rendezvous.local_size} of {rendezvous.size} here")
        return Probe(True, f"own kernels over peer memory on {device.name}")

    @property
    def timeout(self) -> float:
        """Seconds that a kernel waits for another rank, unless its operation has a timeout of its own."""
        return self._seconds

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._seconds = seconds
        if "_engine" in self.__dict__:
            self._engine.timeout = seconds

    def split(
        self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0, host: Backend | None = None
    ) -> PeerBackend | None:
        return None if rendezvous is None else PeerBackend(rendezvous, self.device, host)

    # Memory that all ranks map.

    def allocate(self, shape: Shape, dtype: Any) -> Array:
        """A symmetric array.  Collective, with one size.

        First frees the windows that no rank has arrays of or graphs on.
        """
        shape, dtype = (shape,) if isinstance(shape, int) else tuple(shape), as_dtype(dtype)
        self._windows.free(self._windows.unused_everywhere())
        self.forget_routes()
        nbytes = max(prod(shape) * dtype.itemsize, 1)
        memory = SymmetricMemory(self._rendezvous, nbytes, self.device)
        self._engine.register(memory)
        return self._windows.add(memory.pointer, nbytes, memory, shape, dtype)

    def views(self, x: Buffer) -> list[Any]:
        memory = self._engine.memory_of(x.pointer, x.nbytes) if x.device == self.device else None
        if memory is None:
            raise InvalidArgument(f"x: expected an array of allocate, or a part of one, got {x} in other memory")
        offset, owner = x.pointer - memory.pointer, MappedPart(memory, x.array)
        stream = getattr(x.array, "stream", None)
        parts = ((base + offset, x.shape, x.dtype, self.device) for base in memory.pointers)
        return [Array(*part, owner=owner, stream=stream) for part in parts]

    def register(self, buffer: Buffer) -> Array:
        """The program's memory, mapped by all ranks; CUDA's IPC requires it to be of cudaMalloc."""
        obstacle = ""
        if expandable(buffer.array):
            obstacle = "expected memory of cudaMalloc, got a tensor in an expandable segment of torch"
        elif buffer.pointer % _VECTOR:
            obstacle = f"expected an address that is a multiple of {_VECTOR}, got 0x{buffer.pointer:x}"
        self._windows.free(self._windows.unused_everywhere())
        self.forget_routes()

        def make() -> SymmetricMemory:
            memory = SymmetricMemory(self._rendezvous, buffer.nbytes, self.device, buffer.pointer)
            self._engine.register(memory)
            return memory

        return self._windows.register(buffer, obstacle, make)

    def _free_window(self, window: WindowMemory) -> None:
        memory: SymmetricMemory = window.handle
        if self._unmapped or self.broken is not None:  # this rank's part: no rank maps it, or none can be asked
            memory.abort()
        else:
            self._engine.unregister(memory)
            memory.close()

    def is_symmetric(self, o: Operation) -> bool:
        """Whether its buffers are in the memory of ``allocate``, so that kernels reach them where they lie.

        Those that the root alone has do not count: all ranks must find the same.
        """
        buffers = (o.send, o.recv)
        if o.root is not None:
            buffers = (o.recv, None) if o.name in ("broadcast", "scatter") else (o.send, None)
        return all(each is None or self._engine.is_symmetric(each.pointer, each.nbytes) for each in buffers)

    def beside(self, o: Operation) -> bool:
        """Whether copy engines carry it: it overlaps other work, is large, and its buffers are symmetric."""
        buffer = o.recv if o.name == "all_gather" else o.send
        large = buffer is not None and buffer.nbytes >= _BESIDE and self.size > 1
        if buffer is None or not large or not o.options.overlap or o.name not in _BY_COPIES:
            return False
        complex_or_scaled = buffer.dtype.kind == "complex" or (o.reduction and o.reduction.op is ReduceOp.PREMUL_SUM)
        odd = o.name != "all_reduce" and buffer.nbytes % (16 * self.size)
        if o.options.algorithm != AUTO or complex_or_scaled or odd:
            return False
        several = (o.send, o.recv) if o.name == "all_reduce" else (buffer,)
        return all(each is not None and self._engine.is_symmetric(each.pointer, each.nbytes) for each in several)

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        if name != "all_reduce":
            return self.name
        launch = self._engine.launches.pick(nbytes, symmetric)
        return f"peer {self._engine.possible(launch, ReduceOp.SUM, nbytes, symmetric).algorithm}"

    def use(self, launches: Launches) -> None:
        """Launch the all-reduces that are prepared from now on so.  Collective, with the same."""
        self._engine.launches = launches
        self._routes.clear()
        self.cache.clear()

    def close(self) -> None:
        self.unwatch()
        with ExitStack() as rest:  # where one step fails, the others are taken all the same
            rest.callback(super().close)
            rest.callback(self._engine.close)
            rest.callback(lambda: self._windows.free(self._windows.unused()))
            rest.callback(setattr, self, "_unmapped", True)
            for number in sorted(self._windows.memories, reverse=True):  # arrays keep this rank's part
                rest.callback(self._windows.memories[number].handle.unmap)

    # How it is aborted.

    def signal_abort(self) -> None:
        """The slab lives as long as this object: graphs that are replayed find the abort flag in it."""
        self._engine.abort()

    def inspect(self, o: Call) -> None:
        if self._engine.failed:
            self._engine.check(str(o), self.arrived(o))

    def kernel_waits(self) -> list[int]:
        return self._engine.waits_for()

    def timed_out(self, call: Call, seconds: float | None) -> KosError:
        """Ends the wait on the GPU, so that the kernel reports what it waited for."""
        error = super().timed_out(call, seconds)
        self._engine.abort()
        return again(error, f"{error}; {self._engine.last_wait(1.0)}")

    # How operations are carried.

    def resolve(self, o: Operation, route: Route) -> bool:
        named = o.options.algorithm
        if named != AUTO and (o.name != "all_reduce" or named not in PACKETS):
            own = ", ".join(("'auto'", *PACKETS)) if o.name == "all_reduce" else "'auto'"
            raise InvalidArgument(f"algorithm: expected {own} for {o.name} on peer, got {named!r}")
        deadline = None if o.options.timeout == self._seconds else o.options.timeout
        with relaxed_capture(), self._engine.within(deadline):
            run = _BINDERS.get(o.name, PeerBackend._bind_move)(self, o, route)
        run = run if deadline is None else partial(self._within, deadline, run)
        launch = partial(self._launch_beside if _is_beside(o) else self._launch, run)
        route.launch = in_windows(launch, [end.pointer for end in (o.send, o.recv) if end is not None])
        return True

    def _within(self, deadline: float, run: Run, stream: int) -> None:
        """For what is bound at its launch only."""
        with self._engine.within(deadline):
            run(stream)

    def _launch(self, run: Run, stream: int) -> None:
        """Queue it behind the last operation, wherever that was queued: the kernels share the slab.

        A launch on a default stream goes to the current device.  On another stream it goes to the device of the stream.
        """
        if stream == self._at and (stream > PER_THREAD or driver.is_current(self.device)):
            return run(stream)
        with driver.on_device(self.device):
            self._take_turn(stream)
            run(stream)
            self.streams.mark(stream)

    def _launch_beside(self, run: Run, stream: int) -> None:
        """Queue a message behind the last operation of this communicator alone.

        It may wait for what its other rank computes, which may take kernels of other communicators on this GPU.  It
        holds few multiprocessors (``BESIDE_BLOCKS``), so that those find a place.
        """
        with driver.on_device(self.device):
            with _turns:
                self._order.enter(stream, (stream,), self.streams)
                self._at = -1
            run(stream)
            self.streams.mark(stream)

    def _take_turn(self, stream: int) -> None:
        """Follow the last kernel of this communicator, and of any other on this GPU, but for messages beside them.

        Kernels of two communicators could each hold a part of the GPU, and wait for ranks whose GPU runs them the other
        way round.  So ranks launch the operations of communicators that share GPUs in one order.
        """
        with _turns:
            self._order.enter(stream, (stream,), self.streams)
            order, former = _orders.setdefault(self.device, Order()), _last_on.get(self.device)
            if former is not None and (other := former()) is not None and other is not self:
                other._at = -1  # it takes a new turn
            self._at = stream if order.enter(stream, (stream,), self.streams) else -1
            _last_on[self.device] = weakref.ref(self)

    def queue(self, calls: Sequence[Call], stream: int | None) -> None:
        """Messages in a row go together: none waits for another one of the batch."""
        for (kind, at), several in groupby(calls, lambda call: (call.collective, stream or call.stream)):
            together = list(several)
            if kind or len(together) == 1:
                super().queue(together, stream)
            else:
                with relaxed_capture():
                    run = self._messages(together)
                self._launch(run, at)

    def _messages(self, calls: Sequence[Call]) -> Run:
        """The k-th message of each pair in the k-th exchange, as on the other side."""
        sends: list[list[Piece]] = [[] for _ in range(self.size)]
        recvs: list[list[Piece]] = [[] for _ in range(self.size)]
        for o in (call.operation for call in calls):
            dst, src, *_ = o.message
            if dst is not None and o.send is not None and o.send.count:
                sends[dst].append((o.send.pointer, o.send.nbytes))
            if src is not None and o.recv is not None and o.recv.count:
                recvs[src].append((o.recv.pointer, o.recv.nbytes))
        rounds = max(map(len, (*sends, *recvs)))
        return _in_turn(
            self._engine.bind_exchange(
                *([to[k] if k < len(to) else NONE for to in side] for side in (sends, recvs)), messages=True
            )
            for k in range(rounds)
        )

    def _bind_all_reduce(self, o: Operation, route: Route) -> Run:
        assert o.send is not None and o.recv is not None and o.reduction is not None
        name, _, per = kernel_types(o.reduction, self.device)
        if not o.send.count or name.startswith("complex"):
            return self._bind_reduction(o, route)
        dtype, count = DTYPES[name], o.send.count * per
        ends = o.send.pointer, o.recv.pointer
        launch = Launch(o.options.algorithm, threads=128)
        if self.beside(o):
            launch = BESIDE
        elif o.options.algorithm == AUTO:
            launch = self._engine.launch_for(*ends, o.send.nbytes)
        symmetric = all(self._engine.is_symmetric(end, o.send.nbytes) for end in ends)
        launch = self._engine.possible(launch, o.reduction.op, o.send.nbytes, symmetric)
        reached = () if launch.algorithm in PACKETS else ends[launch.algorithm == "push" :]
        route.kernel = self._engine.route(launch, o.send.nbytes, *reached)
        return self._engine.bind_all_reduce(
            *ends, count, dtype, o.reduction.op, factor=o.reduction.factor, launch=launch
        )

    def _bind_reduction(self, o: Operation, route: Route) -> Run:
        """reduce, reduce_scatter, reduce_scatter_v, scan and exscan."""
        assert o.reduction is not None and o.send is not None
        name, _, per = kernel_types(o.reduction, self.device)  # refused here, before anything is sent
        if not o.send.count:
            return _in_turn(())
        ends, dtype, op, factor = (o.send.pointer, whole(o.recv)[0]), DTYPES[name], o.reduction.op, o.reduction.factor
        count, run = o.send.count * per, None
        if o.name.startswith("reduce_scatter"):
            beside = self.beside(o)
            if beside:
                route.kernel = self._engine.route(Launch("copies"), o.send.nbytes, o.send.pointer)
            counts = [n * per for n in o.send_counts or [o.send.count // self.size] * self.size]
            run = self._engine.bind_reduce_scatter(*ends, counts, dtype, op, factor=factor, beside=beside)
        elif o.name.endswith("scan"):
            run = self._engine.bind_scan(o.name, *ends, count, dtype, op, factor=factor)
        elif o.name == "reduce" and not name.startswith("complex"):
            launch = self._engine.launches.pick(o.send.nbytes, False)
            if launch.algorithm in PACKETS:
                run = self._engine.bind_all_reduce(*ends, count, dtype, op, factor=factor, launch=launch)
        return run or OrderedReduction(self, o)

    def _bind_move(self, o: Operation, route: Route) -> Run:
        """Everything that only moves bytes: one exchange, or what is faster."""
        send, recv = whole(o.send), whole(o.recv)
        if o.name == "broadcast" and recv[1] >= _BY_PARTS and self.size > 2:
            return self._engine.bind_broadcast(send, recv, o.root or 0)
        if o.name == "all_gather":
            beside = self.beside(o)
            direct = self._engine.bind_all_gather(send[0], recv[0], send[1], beside=beside)
            if direct is not None:
                algorithm = self._engine.write_algorithm("all_gather", send[1], beside)
                route.kernel = self._engine.route(Launch(algorithm), recv[1], recv[0])
                return direct
        if o.name == "all_to_all":
            part = send[1] // self.size
            direct = self._engine.bind_all_to_all(send[0], recv[0], part)
            if direct is not None:
                algorithm = self._engine.write_algorithm("all_to_all", part)
                route.kernel = self._engine.route(Launch(algorithm), recv[1], recv[0])
                return direct
        pieces = exchange_of(o, self.rank, self.size)
        return self._engine.bind_exchange(*pieces, messages=not o.collective, beside=_is_beside(o))

    def _bind_barrier(self, o: Operation, route: Route) -> Run:
        return self._engine.bind_barrier()

    # What OrderedReduction requires.

    def exchange(self, sends: Sequence[Piece], recvs: Sequence[Piece], stream: int) -> None:
        """Send piece j to rank j while receiving piece j from it, this rank's own included; none where empty."""
        key = self._engine.deadline, *sends, *recvs
        if key not in self._exchanges:
            if len(self._exchanges) == KNOWN:
                self._exchanges.clear()
            with relaxed_capture():
                self._exchanges[key] = self._engine.bind_exchange(sends, recvs)
        self._exchanges[key](stream)

    def collect(self, send: int, recv: int, nbytes: int, stream: int) -> None:
        """All-gather of ``nbytes`` from each rank."""
        self.exchange([(send, nbytes)] * self.size, [(recv + r * nbytes, nbytes) for r in range(self.size)], stream)


_turns = threading.Lock()
_orders: dict[int, Order] = {}
_last_on: dict[int, weakref.ref[PeerBackend]] = {}
"""Of each GPU the order of its kernels, and the communicator that has queued the last one."""

_BINDERS: dict[str, Callable[[PeerBackend, Operation, Route], Run]] = {
    "all_reduce": PeerBackend._bind_all_reduce,
    "reduce": PeerBackend._bind_reduction,
    "reduce_scatter": PeerBackend._bind_reduction,
    "reduce_scatter_v": PeerBackend._bind_reduction,
    "scan": PeerBackend._bind_reduction,
    "exscan": PeerBackend._bind_reduction,
    "barrier": PeerBackend._bind_barrier,
}


def _is_beside(o: Operation) -> bool:
    """Whether it is a message that overlaps other work."""
    return o.options.overlap and not o.collective


def _in_turn(runs: Iterable[Run]) -> Run:
    several = tuple(runs)

    def run(stream: Any) -> None:
        for each in several:
            each(stream)

    return run
