"""The peer backend: GPU memory by our own kernels, over memory that all ranks of the machine map.

``bind.py`` chooses the kernel of an operation, ``PeerEngine`` launches it.  All-reduce, reduce-scatter
and small scans have kernels of their own.  So have all-gather and all-to-all between symmetric buffers.  Broadcast and
every other operation that only moves data use ``exchange``.  The other reductions exchange and add in rank order
(``composed``).  So every result has the same bits on every rank and from run to run, ``deterministic`` or not.
16-bit floats are added in fp32.  Any dtype, count and alignment is allowed.

Buffers may lie anywhere on the rank's GPU; between those of ``Communicator.allocate`` large all-reduces take no
detour, and a call of 4 MiB or more that overlaps other work (``async_op=True``, on all ranks) goes by copy engines.
Several ranks may share a GPU as processes, which take turns on it.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from kos.comm.contract import Backend, Message, Piece, Probe
from kos.comm.control.base import ControlPlane
from kos.comm.gpu.devices import device_of
from kos.comm.gpu.gpu_work import unstarted
from kos.comm.gpu.memory import NONE, Windows
from kos.comm.gpu.order import Streams
from kos.comm.gpu.peer.bind import bind, bind_messages, by_copies
from kos.comm.gpu.peer.concurrent import NO_OCCUPANCY, ConcurrentKernels, Occupancy
from kos.comm.gpu.peer.engine import PeerEngine
from kos.comm.gpu.peer.exchange import MAX_RANKS
from kos.comm.operation import AUTO, NO_MESSAGE, Operation
from kos.comm.reduction import ReduceOp
from kos.comm.tuning import PACKETS, Launches, for_group
from kos.comm.work import Engine, Work
from kos.cuda import Kernel, driver
from kos.cuda.kernels import Plan
from kos.errors import BackendUnavailable, InvalidArgument, KosError
from kos.memory import Buffer
from kos.memory.array import Array, Shape, as_dtype
from kos.memory.libraries import expandable
from kos.memory.symmetric import MappedPart, SymmetricMemory
from kos.memory.windows import Run, WindowMemory

log = logging.getLogger(__name__)

_VECTOR = 16
"""Bytes that a kernel moves at once."""
_IDLE_SECONDS = 1.0
"""Seconds that a rank waits for other communicators of its GPU to be idle before it loads a kernel."""


class _Entry(NamedTuple):
    """How a plan begins among the kernels of other communicators of the GPU."""

    exclusive: bool
    """Whether there are none."""
    occupancy: Occupancy
    deadline: float | None
    """That of kernels which are bound at their launch, if it is not the communicator's."""
    loaded: set[bool]
    """Not empty once all ranks have loaded its kernels."""


class PeerBackend(Backend):
    """Carries a group of at most 8 ranks of one machine.

    Creation is collective and moves real bytes between every two ranks; raises BackendUnavailable on all of them
    if any pair cannot.
    """

    name = "peer"
    on_host, on_gpu = False, True
    watched, serial, sets_device = False, True, True
    device: int

    def __init__(self, rendezvous: ControlPlane, engine: Engine, device: int | None = None) -> None:
        super().__init__(rendezvous, engine, device)
        self._rendezvous = rendezvous
        self._unmapped = False  # whether no rank maps another's windows any more
        self._windows = Windows(
            rendezvous, self.device, self._free_window, lambda: self._unmapped or self.failures.first is not None
        )
        self._recorded = False  # whether ``concurrent_kernels`` knows the stream of the next launch
        self._room = array("Q", NO_OCCUPANCY)  # up to this, a launch needs no ``order``; the core reads it
        self._concurrent = concurrent_kernels.setdefault(self.device, ConcurrentKernels())
        try:
            self.table = for_group(rendezvous, self.device)
            launches = self.table.launches
            self._engine = PeerEngine(rendezvous, self.device, timeout=rendezvous.timeout, launches=launches)
        except KosError as error:
            if rendezvous.failures.over is not None:
                raise
            raise BackendUnavailable(f"peer: {error}") from error  # on all ranks: see on_all
        self.failed, self.failed_word = self._engine.record.failure, self._engine.record.failed_address
        self._engine.before_load = self._wait_for_idle

    def open(self, backend: Any) -> None:
        self._concurrent.add(self)

    @classmethod
    def probe(cls, rendezvous: ControlPlane) -> Probe:
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

    def set_timeout(self, seconds: float) -> None:
        self._engine.record.timeout = seconds

    @property
    def streams(self) -> Streams:
        """The streams of the communicator's callers."""
        streams: Streams = self.backend.streams
        return streams

    # Memory that all ranks map.

    def allocate(self, shape: Shape, dtype: Any) -> Array:
        """A symmetric array.  Collective, with one size.

        First frees the windows that no rank has arrays of or graphs on.
        """
        shape, dtype = (shape,) if isinstance(shape, int) else tuple(shape), as_dtype(dtype)
        self._windows.free(self._windows.unused_everywhere(self.backend))
        self.backend.store.clear()
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
        self._windows.free(self._windows.unused_everywhere(self.backend))
        self.backend.store.clear()

        def make() -> SymmetricMemory:
            memory = SymmetricMemory(self._rendezvous, buffer.nbytes, self.device, buffer.pointer)
            self._engine.register(memory)
            return memory

        return self._windows.register(buffer, obstacle, make)

    def _free_window(self, window: WindowMemory) -> None:
        memory: SymmetricMemory = window.handle
        if self._unmapped or self.failures.first is not None:  # this rank's part: no rank maps it, or none can be asked
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
        return by_copies(self._engine, o)

    def route_of(self, name: str, nbytes: int, symmetric: bool, graph: bool) -> str:
        if name != "all_reduce":
            return self.name
        launch = self._engine.pick(nbytes, symmetric)
        return f"peer {self._engine.possible(launch, ReduceOp.SUM, nbytes, symmetric).algorithm}"

    def use(self, launches: Launches) -> None:
        """Launch the all-reduces that are prepared from now on so.  Collective, with the same."""
        self._engine.launches = launches
        self.backend.store.clear()

    def close(self, begun: int) -> None:
        with ExitStack() as rest:  # where one step fails, the others are taken all the same
            rest.callback(self._concurrent.remove, self)
            rest.callback(self._engine.close)
            rest.callback(lambda: self._windows.free(self._windows.unused()))
            rest.callback(setattr, self, "_unmapped", True)
            for number in sorted(self._windows.memories, reverse=True):  # arrays keep this rank's part
                rest.callback(self._windows.memories[number].handle.unmap)

    # How it is aborted.

    @property
    def abort_flags(self) -> list[int]:
        record = self._engine.record
        return [record.abort_address, record.failed_address]

    def abort(self, reason: str) -> str:
        """The slab lives as long as this object: graphs that are replayed find the abort flag in it."""
        self._engine.record.abort()
        return reason

    def drained(self, final: bool) -> None:
        if final:
            self._concurrent.remove(self)

    def inspect(self, work: Work[Any], ranks: Sequence[int] = ()) -> None:
        """``ranks``: this backend's ranks by their numbers in the group of ``work``, if that is another group."""
        if self._engine.record.has_failed:
            others = sorted({each.group for each in self._concurrent.others(self)} - {self.group})
            beside = f"; other communicators of this GPU: {', '.join(others)}" if others else ""
            arrived = self.backend.late(work).arrived
            arrived = [ranks.index(rank) for rank in arrived if rank in ranks] if ranks else arrived
            self._engine.record.check(str(work), arrived, beside)

    def kernel_waits(self) -> list[int]:
        return self._engine.record.waits_for()

    def end_waits(self) -> str:
        """End the wait on the GPU, so that the kernel reports what it waited for."""
        self._engine.record.abort()
        return self._engine.record.last_wait(1.0)

    # How operations are carried.

    def resolve(self, o: Operation) -> Plan:
        named = o.options.algorithm
        if named != AUTO and (o.name != "all_reduce" or named not in PACKETS):
            own = ", ".join(("'auto'", *PACKETS)) if o.name == "all_reduce" else "'auto'"
            raise InvalidArgument(f"algorithm: expected {own} for {o.name} on peer, got {named!r}")
        deadline = None if o.options.timeout == self.backend.timeout else o.options.timeout
        with self._engine.within(deadline):
            plan, occupancy = bind(self, self._engine, o), self._engine.occupancy
        if plan.kernels:  # whose steps are bound at their launch
            occupancy = Occupancy(self._engine.blocks, 1)
            self._engine.record_kernel(o.name, plan.kernels)
        loaded = set[bool]() if self._engine.first_use() and not self._engine.exclusive else {True}
        if o.options.overlap and o.message is not NO_MESSAGE:
            # A message that overlaps may wait for what its other rank computes, which may take kernels of other
            # communicators on this GPU: it goes beside them.  It holds few multiprocessors (``OVERLAPPED_BLOCKS``).
            return plan
        return replace(plan, about=_Entry(self._engine.exclusive, occupancy, deadline, loaded))

    def entered(self, stream: int) -> None:
        self._recorded = False
        self._room[0], self._room[1] = NO_OCCUPANCY

    def start(self, plan: Plan, stream: int, send: int = 0, recv: int = 0) -> None:
        """Queue a plan.  If it does not fit beside the kernels of other communicators, order it behind them."""
        entry: _Entry | None = plan.about
        if entry is None:
            return plan(stream, send, recv)
        if not entry.loaded:
            self._await_loading(entry)
        blocks, blocks_per_sm = self._room
        if entry.exclusive:
            if not self._recorded:
                self._concurrent.record(self, stream)
                self._recorded = True
        elif entry.occupancy[0] > blocks or entry.occupancy[1] < blocks_per_sm:
            with driver.on_device(self.device):  # the legacy stream belongs to the current device
                with _lock:
                    total, lasts = self._concurrent.order(self, stream, entry.occupancy, self._engine.multiprocessors)
                    self._room[0], self._room[1] = total if lasts else NO_OCCUPANCY
                try:
                    return self._queue(plan, entry, stream, send, recv)
                finally:
                    self._concurrent.launched(self)
        self._queue(plan, entry, stream, send, recv)

    def _queue(self, plan: Plan, entry: _Entry, stream: int, send: int, recv: int) -> None:
        with nullcontext() if entry.deadline is None else self._engine.within(entry.deadline):
            plan(stream, send, recv)

    def room(self, plan: Plan) -> tuple[int, int, int] | None:
        entry: _Entry | None = plan.about
        if entry is None:
            return 0, 0, 0
        if not entry.loaded or (plan.kernels and entry.deadline is not None):  # the core binds nothing
            return None
        return (0, 0, 0) if entry.exclusive else (self._room.buffer_info()[0], *entry.occupancy)

    def _await_loading(self, entry: _Entry) -> None:
        """Before the first launch of a kernel, wait on the host until all ranks have begun the call, and so loaded it.

        CUDA loads no kernel while another kernel runs.  Without this wait, the kernel could wait for a rank that cannot
        load it: there the kernel of another communicator runs, which may wait for this rank.
        """
        backend = self.backend
        if (last := backend._last) is not None:
            backend.wait_on_host(last, lambda: not backend.shared.missing(last), last.operation.options.timeout)
            entry.loaded.add(True)

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
                mine = waited > self.backend.timeout / 2 or self._concurrent.is_idle(self)
                return mine and (waited > _IDLE_SECONDS or self._concurrent.is_idle())

        self.backend.wait_on_host(self.backend._last or unstarted("load", self.backend), is_idle, None)

    def invalidate_order(self) -> None:
        """Make the next launch check its order among the launches of other communicators."""
        self.backend.order.stream, self.streams.current = -1, self.streams.NONE
        self.entered(-1)

    def set_exclusive(self, exclusive: bool) -> bool:
        """Set whether this is the only communicator of this process on the GPU; returns whether that has changed.

        If not, a kernel occupies no multiprocessor before the kernel before it has completed, and all ranks load a
        kernel before any of them launches it.
        """
        changed, self._engine.exclusive = self._engine.exclusive != exclusive, exclusive
        if changed:
            self.backend.store.clear()
            self.invalidate_order()
        return changed

    def load_copy_kernels(self) -> None:
        """Load what the engine needs if it is not exclusive, unless this communicator has failed."""
        if self.failures.first is None:
            self._wait_for_idle()
            self._engine.load_copy_kernels()

    @property
    def group(self) -> str:
        """The name of the communicator, from its last call."""
        last = self.backend._last
        return "a communicator without calls" if last is None else str(last.group)

    def queue(self, works: Sequence[Work[Any]], stream: int | None) -> None:
        """Messages in a row go together: none waits for another one of the batch."""
        for (kind, at), several in groupby(works, lambda work: (work.collective, stream or work.stream)):
            together = list(several)
            if kind or len(together) == 1:
                self.backend.queue_each(together, stream)
                continue
            with self._engine.within(None):
                steps = bind_messages(self._engine, together)
            entry = _Entry(self._engine.exclusive, self._engine.occupancy, None, {True})
            self.backend.queue_plan(self, Plan(steps, about=entry), at)

    def load(self, path: Path, name: str, **macros: Any) -> Kernel:
        self._engine.wait_before_load(path, name, **macros)
        return super().load(path, name, **macros)

    def bind_exchange(self, sends: Sequence[Piece], recvs: Sequence[Piece]) -> Run:
        return self._engine.bind_exchange(sends, recvs)

    def bind_collect(self, send: Any, recv: Any, nbytes: int) -> Run:
        recvs = [(recv + rank * nbytes, nbytes) for rank in range(self.size)]
        return self.bind_exchange([(send, nbytes)] * self.size, recvs)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], stream: int) -> None:
        pieces = [[NONE] * self.size, [NONE] * self.size]
        for side, messages in zip(pieces, (sends, recvs), strict=True):
            for rank, address, nbytes in messages:
                side[rank] = address, nbytes
        self.bind_exchange(*pieces)(stream)


_lock = threading.Lock()
concurrent_kernels: dict[int, ConcurrentKernels] = {}
"""The communicators of this process, by GPU."""
