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
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from kos.comm import watchdog
from kos.comm.backend import Backend, Probe
from kos.comm.control.base import Rendezvous
from kos.comm.failures import again
from kos.comm.gpu.backend import DeviceBackend, Route, device_of, unstarted
from kos.comm.gpu.memory import NONE, Piece, Windows, exchange_of, whole
from kos.comm.gpu.order import Order
from kos.comm.gpu.ordered_sum import OrderedReduction, kernel_types
from kos.comm.gpu.peer.concurrent import ConcurrentKernels, Occupancy
from kos.comm.gpu.peer.copies import BESIDE
from kos.comm.gpu.peer.engine import MAX_RANKS, PeerEngine, Run
from kos.comm.gpu.peer.launches import PACKETS, Launch, Launches
from kos.comm.operation import AUTO, Operation
from kos.comm.reduction import ReduceOp
from kos.comm.tuning import for_group
from kos.comm.work import Work
from kos.cuda import Kernel, driver
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
_MOST_EXCHANGES = 4096
"""Exchanges of ordered reductions whose launches are kept."""
_IDLE_SECONDS = 1.0
"""Seconds that a rank waits for other communicators of its GPU to be idle before it loads a kernel."""
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
        self._at = -1  # the stream of the last operation, if more may go there without a new order,
        self._occupancy = Occupancy(0, 0)  # up to this occupancy
        self._order = Order()
        self._concurrent = _concurrent.setdefault(self.device, ConcurrentKernels())
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
        self._engine.before_load = self._wait_for_idle
        self._concurrent.add(self)
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

    def overlapped(self, o: Operation) -> bool:
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
        self.store.clear()

    def close(self) -> None:
        self.unwatch()
        with ExitStack() as rest:  # where one step fails, the others are taken all the same
            rest.callback(self._concurrent.remove, self)
            rest.callback(super().close)
            rest.callback(self._engine.close)
            rest.callback(lambda: self._windows.free(self._windows.unused()))
            rest.callback(setattr, self, "_unmapped", True)
            for number in sorted(self._windows.memories, reverse=True):  # arrays keep this rank's part
                rest.callback(self._windows.memories[number].handle.unmap)

    # How it is aborted.

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._concurrent.remove(self)

    def signal_abort(self) -> None:
        """The slab lives as long as this object: graphs that are replayed find the abort flag in it."""
        self._engine.abort()

    def inspect(self, o: Work[Any]) -> None:
        if self._engine.failed:
            others = sorted({each.group for each in self._concurrent.others(self)} - {self.group})
            beside = f"; other communicators of this GPU: {', '.join(others)}" if others else ""
            self._engine.check(str(o), self.arrived(o), beside)

    def kernel_waits(self) -> list[int]:
        return self._engine.waits_for()

    def timed_out(self, work: Work[Any], seconds: float | None) -> KosError:
        """Ends the wait on the GPU, so that the kernel reports what it waited for."""
        error = super().timed_out(work, seconds)
        self._engine.abort()
        return again(error, f"{error}; {self._engine.last_wait(1.0)}")

    # How operations are carried.

    def resolve(self, o: Operation) -> Route:
        named = o.options.algorithm
        if named != AUTO and (o.name != "all_reduce" or named not in PACKETS):
            own = ", ".join(("'auto'", *PACKETS)) if o.name == "all_reduce" else "'auto'"
            raise InvalidArgument(f"algorithm: expected {own} for {o.name} on peer, got {named!r}")
        deadline = None if o.options.timeout == self._seconds else o.options.timeout
        with relaxed_capture(), self._engine.within(deadline):
            bind = _BINDERS.get(o.name, PeerBackend._bind_move)
            run, kernel, occupancy = self._engine.with_occupancy(lambda: bind(self, o))
        if type(run) is OrderedReduction:  # whose exchanges are bound at their launch
            occupancy = Occupancy(self._engine.blocks, 1)
            self._engine.record_kernel(o.name, run.kernels)
        run = run if deadline is None else partial(self._within, deadline, run)
        first, exclusive = self._engine.first_use(), self._engine.exclusive
        if _is_beside(o):
            launch = partial(self._launch_beside, run)
        elif exclusive:
            launch = partial(self._launch_exclusive, run)
        else:
            launch = partial(self._launch, run, occupancy)
            launch = partial(self._launch_when_loaded, launch, set()) if first else launch
        return Route(in_windows(launch, [end.pointer for end in (o.send, o.recv) if end is not None]), kernel)

    def _within(self, deadline: float, run: Run, stream: int, send: int, recv: int) -> None:
        """For what is bound at its launch only."""
        with self._engine.within(deadline):
            run(stream, send, recv)

    def _launch_exclusive(self, run: Run, stream: int, send: int = 0, recv: int = 0) -> None:
        """Queue it behind the last operation, wherever that was queued: the kernels share the slab.

        A launch on a default stream goes to the current device.  On another stream it goes to the device of the stream.
        """
        if stream == self._at and (stream > PER_THREAD or driver.is_current(self.device)):
            return run(stream, send, recv)
        with driver.on_device(self.device):
            with _lock:
                self._at = stream if self._order.enter(stream, (stream,), self.streams) else -1
                self._concurrent.record(self, stream)
            run(stream, send, recv)
            self.streams.mark(stream)

    def _launch(self, run: Run, occupancy: Occupancy, stream: int, send: int = 0, recv: int = 0) -> None:
        """As ``_launch_exclusive``, and behind the kernels of other communicators if it does not fit beside them."""
        if stream == self._at and (stream > PER_THREAD or driver.is_current(self.device)):
            blocks, blocks_per_sm = self._occupancy
            if occupancy[0] <= blocks and occupancy[1] >= blocks_per_sm:
                return run(stream, send, recv)
        with driver.on_device(self.device):
            with _lock:
                self._order.enter(stream, (stream,), self.streams)
                multiprocessors = self._engine.multiprocessors
                self._occupancy, is_ordered = self._concurrent.order(self, stream, occupancy, multiprocessors)
                self._at = stream if is_ordered else -1
            try:
                run(stream, send, recv)
            finally:
                self._concurrent.launched(self)
            self.streams.mark(stream)

    def _launch_beside(self, run: Run, stream: int, send: int = 0, recv: int = 0) -> None:
        """Queue a message behind the last operation of this communicator alone.

        It may wait for what its other rank computes, which may take kernels of other communicators on this GPU.  It
        holds few multiprocessors (``BESIDE_BLOCKS``), so that those find a place.
        """
        with driver.on_device(self.device):
            with _lock:
                self._order.enter(stream, (stream,), self.streams)
                self._at = -1
            run(stream, send, recv)
            self.streams.mark(stream)

    def _launch_when_loaded(self, launch: Run, loaded: set[bool], stream: int, send: int, recv: int) -> None:
        """Launch a kernel; the first time, wait on the host until all ranks have begun the call and so have loaded it.

        CUDA loads no kernel while another kernel runs.  Without this wait, the kernel could wait for a rank that cannot
        load it: there the kernel of another communicator runs, which may wait for this rank.
        """
        if not loaded and (last := self._last) is not None:
            self.wait_on_host(last, lambda: not self.shared.missing(last), last.operation.options.timeout)
            loaded.add(True)
        launch(stream, send, recv)

    def _wait_for_idle(self) -> None:
        """Wait on the host for this communicator's kernels, and ``_IDLE_SECONDS`` at most for those of others.

        While CUDA waits to load a kernel, no thread of this process can launch one.  A kernel that runs then must not
        wait for another rank's kernel, which in turn may wait for such a launch.  After half of the timeout this
        returns anyway and CUDA waits: the program's own work on the same stream may take longer.
        """
        began = time.monotonic()

        def is_idle() -> bool:
            waited = time.monotonic() - began
            with driver.on_device(self.device):
                mine = waited > self.timeout / 2 or self._concurrent.is_idle(self)
                return mine and (waited > _IDLE_SECONDS or self._concurrent.is_idle())

        self.wait_on_host(self._last or unstarted("load", self), is_idle, None)

    def invalidate_order(self) -> None:
        """Make the next launch ask for its order among those of other communicators."""
        self._at = -1

    def set_exclusive(self, exclusive: bool) -> bool:
        """Set whether this is the only communicator of this process on the GPU; returns whether that has changed.

        If not, a kernel occupies no multiprocessor before the kernel before it has completed, and all ranks load a
        kernel before any of them launches it.
        """
        changed, self._engine.exclusive = self._engine.exclusive != exclusive, exclusive
        if changed:
            self.forget_routes()
            self.invalidate_order()
        return changed

    def load_copy_kernels(self) -> None:
        """Load what the engine needs if it is not exclusive, unless this communicator has failed."""
        if self.broken is None:
            self._wait_for_idle()
            self._engine.load_copy_kernels()

    @property
    def group(self) -> str:
        """The name of the communicator, as its last call gave it."""
        return "a communicator without calls" if self._last is None else self._last.group

    def queue(self, works: Sequence[Work[Any]], stream: int | None) -> None:
        """Messages in a row go together: none waits for another one of the batch."""
        for (kind, at), several in groupby(works, lambda work: (work.collective, stream or work.stream)):
            together = list(several)
            if kind or len(together) == 1:
                super().queue(together, stream)
            else:
                with relaxed_capture():
                    run, _, occupancy = self._engine.with_occupancy(partial(self._messages, together))
                if self._engine.exclusive:
                    self._launch_exclusive(run, at)
                else:
                    self._launch(run, occupancy, at)

    def _messages(self, works: Sequence[Work[Any]]) -> tuple[Run, None]:
        """The k-th message of each pair in the k-th exchange, as on the other side."""
        sends: list[list[Piece]] = [[] for _ in range(self.size)]
        recvs: list[list[Piece]] = [[] for _ in range(self.size)]
        for work in works:
            o = work.operation
            dst, src, *_ = o.message
            if dst is not None and o.send is not None and o.send.count:
                sends[dst].append((work.send, o.send.nbytes))
            if src is not None and o.recv is not None and o.recv.count:
                recvs[src].append((work.recv, o.recv.nbytes))
        rounds = max(map(len, (*sends, *recvs)))
        exchanges = _in_turn(
            self._engine.bind_exchange(
                *([to[k] if k < len(to) else NONE for to in side] for side in (sends, recvs)), messages=True
            )
            for k in range(rounds)
        )
        return exchanges, None

    def _bind_all_reduce(self, o: Operation) -> tuple[Run, str | None]:
        assert o.send is not None and o.recv is not None and o.reduction is not None
        name, _, per = kernel_types(o.reduction, self.device)
        if not o.send.count or name.startswith("complex"):
            return self._bind_reduction(o)
        dtype, count = DTYPES[name], o.send.count * per
        ends = o.send.pointer, o.recv.pointer
        launch = Launch(o.options.algorithm, threads=128)
        if self.overlapped(o):
            launch = BESIDE
        elif o.options.algorithm == AUTO:
            launch = self._engine.launch_for(*ends, o.send.nbytes)
        symmetric = all(self._engine.is_symmetric(end, o.send.nbytes) for end in ends)
        launch = self._engine.possible(launch, o.reduction.op, o.send.nbytes, symmetric)
        reached = () if launch.algorithm in PACKETS else ends[launch.algorithm == "push" :]
        op, factor = o.reduction.op, o.reduction.factor
        run = self._engine.bind_all_reduce(*ends, count, dtype, op, factor=factor, launch=launch)
        return run, self._engine.route(launch, o.send.nbytes, *reached)

    def _bind_reduction(self, o: Operation) -> tuple[Run, str | None]:
        """reduce, reduce_scatter, reduce_scatter_v, scan and exscan."""
        assert o.reduction is not None and o.send is not None
        name, _, per = kernel_types(o.reduction, self.device)  # refused here, before anything is sent
        if not o.send.count:
            return _in_turn(()), None
        ends, dtype, op, factor = (o.send.pointer, whole(o.recv)[0]), DTYPES[name], o.reduction.op, o.reduction.factor
        count, run, kernel = o.send.count * per, None, None
        if o.name.startswith("reduce_scatter"):
            beside = self.overlapped(o)
            if beside:
                kernel = self._engine.route(Launch("copies"), o.send.nbytes, o.send.pointer)
            counts = [n * per for n in o.send_counts or [o.send.count // self.size] * self.size]
            run = self._engine.bind_reduce_scatter(*ends, counts, dtype, op, factor=factor, beside=beside)
        elif o.name.endswith("scan"):
            run = self._engine.bind_scan(o.name, *ends, count, dtype, op, factor=factor)
        elif o.name == "reduce" and not name.startswith("complex"):
            launch = self._engine.launches.pick(o.send.nbytes, False)
            if launch.algorithm in PACKETS:
                run = self._engine.bind_all_reduce(*ends, count, dtype, op, factor=factor, launch=launch)
        return run or OrderedReduction(self, o), kernel

    def _bind_move(self, o: Operation) -> tuple[Run, str | None]:
        """Everything that only moves bytes: one exchange, or what is faster."""
        send, recv = whole(o.send), whole(o.recv)
        if o.name == "broadcast" and recv[1] >= _BY_PARTS and self.size > 2:
            return self._engine.bind_broadcast(send, recv, o.root or 0), None
        if o.name == "all_gather":
            beside = self.overlapped(o)
            direct = self._engine.bind_all_gather(send[0], recv[0], send[1], beside=beside)
            if direct is not None:
                algorithm = self._engine.write_algorithm("all_gather", send[1], beside)
                return direct, self._engine.route(Launch(algorithm), recv[1], recv[0])
        if o.name == "all_to_all":
            part = send[1] // self.size
            direct = self._engine.bind_all_to_all(send[0], recv[0], part)
            if direct is not None:
                algorithm = self._engine.write_algorithm("all_to_all", part)
                return direct, self._engine.route(Launch(algorithm), recv[1], recv[0])
        pieces = exchange_of(o, self.rank, self.size)
        return self._engine.bind_exchange(*pieces, messages=not o.collective, beside=_is_beside(o)), None

    def _bind_barrier(self, o: Operation) -> tuple[Run, str | None]:
        return self._engine.bind_barrier(), None

    # What OrderedReduction requires.

    def load(self, path: Path, name: str, **macros: Any) -> Kernel:
        self._engine.wait_before_load(path, name, **macros)
        return super().load(path, name, **macros)

    def exchange(self, sends: Sequence[Piece], recvs: Sequence[Piece], stream: int, *arrays: int) -> None:
        """Send piece j to rank j while receiving piece j from it, this rank's own included; none where empty."""
        key = self._engine.deadline, *sends, *recvs
        if key not in self._exchanges:
            if len(self._exchanges) == _MOST_EXCHANGES:
                self._exchanges.clear()
            with relaxed_capture():
                self._exchanges[key] = self._engine.bind_exchange(sends, recvs)
        self._exchanges[key](stream, *arrays)

    def collect(self, send: Any, recv: Any, nbytes: int, stream: int, *arrays: int) -> None:
        """All-gather of ``nbytes`` from each rank."""
        pieces = [(send, nbytes)] * self.size, [(recv + r * nbytes, nbytes) for r in range(self.size)]
        self.exchange(*pieces, stream, *arrays)


_lock = threading.Lock()
_concurrent: dict[int, ConcurrentKernels] = {}
"""The communicators of this process, by GPU."""

_BINDERS: dict[str, Callable[[PeerBackend, Operation], tuple[Run, str | None]]] = {
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

    def run(stream: Any, send: int = 0, recv: int = 0) -> None:
        for each in several:
            each(stream, send, recv)

    return run
