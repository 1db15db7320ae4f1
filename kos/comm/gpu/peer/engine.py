"""PeerEngine: our own kernels over memory that all ranks of a machine map (``kos/comm/gpu/kernels``).

The engine owns the slab in which the kernels meet.  A ``bind_`` method chooses the launch of a message by its size:
blocks and threads, and the algorithm of an all-reduce by the tuning table.  ``record`` tells what a kernel that ended
early was waiting for.  The engine checks no arguments that ranks must agree on and stamps no sequence numbers: that is
the backend's business.

All-reduce adds in rank order:
``one_shot`` and ``two_shot`` (packets, small and middle sizes), ``direct`` (reads from buffer to buffer), ``push``
(only writes), ``specialized`` (only writes, each block has one role; symmetric buffers only), ``copies`` (copy
engines; symmetric buffers only).  ``ring`` and ``tree`` follow the schedules of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from kos.comm.contract import Piece
from kos.comm.control.base import ControlPlane
from kos.comm.gpu.peer.concurrent import NO_OCCUPANCY, Occupancy
from kos.comm.gpu.peer.copies import OVERLAPPED_REDUCE_SCATTER, Copies
from kos.comm.gpu.peer.exchange import BOX_PACKETS, MAX_RANKS, PACKET_BYTES, SHARE, broadcast_pieces, exchange_launch
from kos.comm.gpu.peer.record import TIMEOUT, KernelRecord, nanoseconds
from kos.comm.reduction import ReduceOp
from kos.comm.tuning import DEFAULT, PACKETS, KernelConfig, Launches
from kos.cuda import Kernel, create_stream, driver, load_kernel, streams
from kos.cuda.devices import device_info
from kos.cuda.driver import relaxed_capture
from kos.cuda.kernels import NOTHING, Address, is_loaded
from kos.dtypes import DType
from kos.errors import BackendUnavailable, InvalidArgument
from kos.memory.array import Array
from kos.memory.symmetric import SymmetricMemory, on_all
from kos.memory.windows import Run

KERNELS = Path(__file__).parent.parent / "kernels"
CHANNELS = 128
STAGING = 32 << 20
"""Bytes of each of four staging buffers, for data that kernels do not read and write in place.  ``specialized`` takes
twice as much.  It holds what the other ranks contribute to the chunk of this rank: 73 MB for 8 ranks."""

_PACKETS_UP_TO, _RELAYED_UP_TO = 2 << 20, 3 << 20
"""Bytes of one rank's pieces to all others, up to which they are sent as packets.  The second limit holds where ranks
forward what they receive, since packets then save a second wait for a batch.  Packets take twice the bytes.  Above
512 KB to one rank, measured between 2 ranks only."""
_SCANNED_UP_TO = 3 << 20
"""The same limit for a scan, which is one kernel by packets, otherwise three.  Not measured."""
_COPIES_FROM = 160 << 20
"""The same from which copy engines carry all-gather and all-to-all into symmetric outputs, with more than 2 ranks.
Between 2 H200 or 2 H100, ``bind_exchange`` is as fast, and copy engines sometimes took 1.2 times as long."""
_DIRECT_FROM = 600 << 10
"""The same from which all-gather and all-to-all write directly to symmetric outputs, between two barriers."""
# As in kernels/channel.cuh and packets.cuh.
_LINE_BYTES = 256
_FAILED = CHANNELS * _LINE_BYTES
_INBOX = _FAILED + 256 + CHANNELS * _LINE_BYTES
_CAPACITY = 512



class PeerEngine:
    """The kernels of one group of ranks, one of them on ``device``.

    Its operations run one after another: queue them on one stream, or order the streams.  Creation and ``close``
    are collective.  ``timeout`` (seconds) bounds every wait inside a kernel and may be
    changed at any time.  Ranks may share a GPU if they are threads of one process (all ranks' kernels then run
    at once); as processes they take turns, a millisecond each.
    """

    def __init__(
        self, rendezvous: ControlPlane, device: int, *, timeout: float = 30.0, staging: int = STAGING,
        launches: Launches = DEFAULT, **macros: Any,
    ) -> None:  # fmt: skip
        """``macros`` reach every kernel: STALL (nanoseconds) and BROKEN are for tests of races."""
        self.rank, self.size, self.device = rendezvous.rank, rendezvous.size, device
        if self.size > MAX_RANKS:
            raise BackendUnavailable(f"peer: expected at most {MAX_RANKS} ranks, got {self.size}")
        info = device_info(device)
        facts = [data.decode().split() for data in rendezvous.allgather(f"{info.uuid} {info.multiprocessors}".encode())]
        sharing = max(sum(uuid == other for other, _ in facts) for uuid, _ in facts)
        self.multiprocessors = min(int(count) for _, count in facts) // sharing
        self.blocks = min(CHANNELS, self.multiprocessors)
        self._copies = Copies(self.rank, self.size, device)
        self._overlap = sharing == 1
        self.exclusive = True  # whether no other communicator of this process uses the GPU
        self.before_load: Callable[[], None] = lambda: None  # called if not ``exclusive``
        self.occupancy = NO_OCCUPANCY  # of what was bound since ``within`` began
        self._bound: set[tuple[Any, ...]] = set()  # kernels bound since then
        self._used: set[tuple[Any, ...]] = set()  # kernels that all ranks have loaded
        self.launches = launches
        self.staging = staging // 16 * 16
        self._macros = dict(macros, RANKS=self.size)
        self._memories: dict[int, SymmetricMemory] = {}  # by number, the same on all ranks
        self._registered = 0
        self.memory = SymmetricMemory(rendezvous, self._lay_out(staging), device)
        self._contexts: dict[float | None, Array] = {}  # by the deadline of a launch
        self.deadline: float | None = None

        def prepare() -> None:
            self.record = KernelRecord(rendezvous.failures, device)
            self.record.timeout = timeout
            self._loading = create_stream(device)  # never captured by a graph
            self._context = self._context_of(None)
            driver.synchronize(device)

        try:
            on_all(rendezvous, "prepare what its kernels read", prepare)
        except BaseException:
            self.memory.abort()
            raise

    def _lay_out(self, staging: int) -> int:
        """Set the offsets of the parts of the slab; returns its bytes."""
        inboxes = CHANNELS * 2 * 2 * self.size * _CAPACITY * 16
        self._in = _INBOX + inboxes
        self._out = self._in + 2 * staging
        self._slots = self._out + staging
        slots = CHANNELS * 2 * self.size
        self._slot = max(staging // slots // 16 * 16, 512)
        self._posts = self._slots + slots * self._slot
        self._boxes = self._posts + CHANNELS * _LINE_BYTES
        others = max(self.size - 1, 1)
        most = self.blocks * BOX_PACKETS * PACKET_BYTES
        self.small, self.relayed = (min(most, limit // others) for limit in (_PACKETS_UP_TO, _RELAYED_UP_TO))
        return self._boxes + slots * BOX_PACKETS * 16

    @contextmanager
    def within(self, seconds: float | None) -> Iterator[None]:
        """Operations bound in the block wait this long for another rank; ``None``: the ``timeout`` at that time."""
        usual = self.deadline, self._context
        self.occupancy, self._bound = NO_OCCUPANCY, set()
        self.deadline, self._context = seconds, self._context_of(seconds)
        try:
            yield
        finally:
            self.deadline, self._context = usual

    def _context_of(self, seconds: float | None) -> Array:
        """The parameters of all kernels, kept for launches and graphs.  The last word is the deadline of a launch."""
        if seconds not in self._contexts:
            record = self.record.address
            words = [*self.memory.pointers, record, self.rank]
            shape = (len(words) + 2,)
            with relaxed_capture():
                context = Array.empty(shape, "uint64", self.device, stream=self._loading, label="peer context")
                if seconds is None:
                    words += [record + TIMEOUT * self.record.words.itemsize, 0]
                else:
                    last = context.pointer + context.nbytes - context.dtype.itemsize
                    words += [last, max(nanoseconds(seconds), 1)]
                context.copy_from(np.array(words, np.uint64), stream=self._loading)
                streams.synchronize(self._loading, self.device)
            self._contexts[seconds] = context
        return self._contexts[seconds]

    def register(self, memory: SymmetricMemory) -> None:
        """Let buffers in ``memory`` be used where they are.  Collective, and so is every use of such a buffer:
        all ranks pass buffers at the same offset of it."""
        self._memories[self._registered] = memory
        self._registered += 1

    def unregister(self, memory: SymmetricMemory) -> None:
        self._memories = {number: each for number, each in self._memories.items() if each is not memory}

    def memory_of(self, pointer: Any, nbytes: int) -> SymmetricMemory | None:
        """The registered memory in which the buffer lies, if any."""
        memories = () if type(pointer) is Address else self._memories.values()
        return next((memory for memory in memories if memory.offset_of(pointer, nbytes) is not None), None)

    def is_symmetric(self, pointer: Any, nbytes: int) -> bool:
        """Whether the buffer lies in registered memory, aligned for the kernels that use it there."""
        return self._symmetric(pointer, nbytes) is not None

    def route(self, launch: KernelConfig, nbytes: int, *pointers: Any) -> str:
        """What must be equal on all ranks: the launch, and the offsets of the buffers that other ranks access."""
        numbers = {memory.peer_pointers.pointer: number for number, memory in self._memories.items()}
        found = (self._symmetric(pointer, nbytes) for pointer in pointers)
        places = [place and (numbers[place[0]], place[1]) for place in found]
        return f"{launch} at {places}"

    def bind_all_reduce(
        self, send: Any, recv: Any, count: int, dtype: DType, op: ReduceOp, *, factor: float = 1.0,
        launch: KernelConfig | None = None,
    ) -> Run:  # fmt: skip
        """The all-reduce of ``count`` elements from address ``send`` to ``recv`` (which may be the same).

        The binding is local; the kernel that it launches is collective: all ranks use the same count, dtype, op and
        launch.  ``factor`` is this rank's, for PREMUL_SUM.
        """
        if count <= 0 or send % dtype.itemsize or recv % dtype.itemsize:
            raise InvalidArgument(
                f"all_reduce: expected elements at multiples of {dtype.itemsize} bytes, "
                f"got {count} at {send} and {recv}"
            )
        launch = self.choose(send, recv, count * dtype.itemsize, op, launch)
        if launch.algorithm in PACKETS:
            return self._bind_packets(launch, send, recv, count, dtype, op, factor)
        others = {"copies": self._bind_copies, "specialized": self._bind_specialized, "push": self._bind_push}
        return others.get(launch.algorithm, self._bind_direct)(launch, send, recv, count, dtype, op)

    def pick(self, nbytes: int, symmetric: bool = False) -> KernelConfig:
        """The launch in the table.  Packet algorithms do not depend on whether both buffers are symmetric."""
        kinds = (self.launches.symmetric, self.launches.ordinary) if symmetric else (self.launches.ordinary,)
        found = [next(launch for most, launch in rows if most is None or nbytes <= most) for rows in kinds]
        return found[-1] if found[0].algorithm in PACKETS else found[0]

    def choose(self, send: Any, recv: Any, nbytes: int, op: ReduceOp, launch: KernelConfig | None) -> KernelConfig:
        """The launch of an all-reduce: ``launch`` or that of the table, or what goes in its place."""
        symmetric = self.is_symmetric(send, nbytes) and self.is_symmetric(recv, nbytes)
        return self.possible(launch or self.pick(nbytes, symmetric), op, nbytes, symmetric)

    def possible(self, launch: KernelConfig, op: ReduceOp, nbytes: int, symmetric: bool) -> KernelConfig:
        """``launch``, or what goes in its place for what it does not take; ``symmetric``: both buffers are."""
        if launch.algorithm not in PACKETS and (op is ReduceOp.PREMUL_SUM or self.size == 1):
            return KernelConfig("two_shot" if self.size > 1 else "one_shot")
        if self.size == 1:
            return replace(launch, algorithm="one_shot")
        if launch.algorithm == "copies" and not symmetric:
            return KernelConfig("push")
        if launch.algorithm == "specialized" and not (symmetric and self._roles(nbytes)):
            return KernelConfig("push", self.blocks)
        return launch

    def _kernel(self, file: str, launch: KernelConfig, dtype: DType, op: ReduceOp, **macros: Any) -> Any:
        self.record_kernel(file, launch.algorithm, dtype.name, op, launch.threads)
        only = launch.algorithm.upper()
        return self.load(
            KERNELS / file, launch.algorithm, DTYPE=dtype.name, OP=op.name, THREADS=launch.threads, ONLY=only,
            **macros,
        )  # fmt: skip

    def load(self, path: Path, name: str, **macros: Any) -> Kernel:
        """A kernel for this group, loaded when no kernel of another communicator can wait for this rank."""
        macros = {**macros, **self._macros}
        self.wait_before_load(path, name, **macros)
        return load_kernel(path, name, self.device, **macros)

    def wait_before_load(self, path: Path, name: str, **macros: Any) -> None:
        """Wait until this kernel can be loaded, unless it has been."""
        if not self.exclusive and not is_loaded(path, name, self.device, **macros):
            with relaxed_capture():
                self.before_load()

    def _bind_packets(
        self, launch: KernelConfig, send: Any, recv: Any, count: int, dtype: DType, op: ReduceOp, factor: float,
        ends: Sequence[int] = (),
    ) -> Run:  # fmt: skip
        """A kernel of packets for ``count`` elements; without ``recv`` this rank gets no result.

        For ``reduce_scatter`` each part has ``count`` elements.  For ``reduce_scatter_v`` the largest part has, and
        ``ends`` are the ends of the parts.
        """
        partials = launch.algorithm in ("ring", "tree")
        widened = partials or op is ReduceOp.PREMUL_SUM
        # Small integers are added in 32 bits: the width of a partial sum on the wire.
        itemsize = max(dtype.accumulate.itemsize, 4) if widened else dtype.itemsize
        packets = -(-count // ((8 if itemsize == 8 else 12) // itemsize))
        chunks = self.size if launch.algorithm in ("two_shot", "ring") else 1
        packets = -(-packets // chunks)
        blocks = min(launch.blocks or -(-packets // launch.threads), self.blocks)
        per_channel = -(-packets // blocks)
        kernel = self._kernel("all_reduce_packets.cu", launch, dtype, op, PARTIALS=partials)
        threads = min(launch.threads, -(-per_channel // 32) * 32)
        counts = () if ends else (count,)
        return self._bind(kernel, blocks, threads, send, recv, *counts, per_channel, np.float64(factor), *ends)

    def _bind_direct(self, launch: KernelConfig, send: Any, recv: Any, count: int, dtype: DType, op: ReduceOp) -> Run:
        nbytes, table, vector = count * dtype.itemsize, self.memory.peer_pointers.pointer, 16 // dtype.itemsize
        source, target = self._symmetric(send, nbytes), self._symmetric(recv, nbytes)
        if source and target:
            places, outside, piece = (*source, *target), (0, 0), count
        else:
            places, outside = (table, self._in, table, self._out), (send, recv)
            piece = -(-count // -(-nbytes // self.staging) // vector) * vector
        kernel = self._kernel("all_reduce_direct.cu", launch, dtype, op)
        blocks = min(launch.blocks or self.blocks, self.blocks)
        return self._bind(kernel, blocks, launch.threads, *places, *outside, count, piece)

    def _bind_push(self, launch: KernelConfig, send: Any, recv: Any, count: int, dtype: DType, op: ReduceOp) -> Run:
        vector = 16 // dtype.itemsize
        place = self._symmetric(recv, count * dtype.itemsize)
        pieces = 1 if place else -(-count * dtype.itemsize // self.staging)
        piece = count if place else -(-count // pieces // vector) * vector
        kernel = self._kernel("all_reduce_push.cu", launch, dtype, op)
        blocks, batch = self._batches(launch, -(-piece // vector // self.size))
        target = place or (self.memory.peer_pointers.pointer, self._out)
        outside = send, 0 if place else recv
        return self._bind(kernel, blocks, launch.threads, self._in, batch, *target, *outside, count, piece)

    def _roles(self, nbytes: int) -> tuple[int, int, int] | None:
        """Pushers for each peer, adders, and a chunk's vectors, of ``specialized``; None for what it does not take.
        All blocks must find a place at once: 7 x 16 + 20 on the 132 multiprocessors where that was the fastest."""
        adders, peers = -(-self.multiprocessors * 5 // 33), self.size - 1
        pushers = min(self.multiprocessors - adders, CHANNELS) // peers
        chunk = -(-nbytes // 16 // self.size // 8) * 8
        if nbytes % 16 or not pushers or adders > CHANNELS or 16 * peers * chunk > 2 * self.staging:
            return None
        return pushers, adders, chunk

    def _bind_specialized(
        self, launch: KernelConfig, send: Any, recv: Any, count: int, dtype: DType, op: ReduceOp
    ) -> Run:
        nbytes = count * dtype.itemsize
        place, roles = self._symmetric(recv, nbytes), self._roles(nbytes)
        assert place and roles
        pushers, adders, chunk = roles
        rounds = -(-chunk // (launch.tile // 16 * pushers))
        tile = -(-chunk // (rounds * pushers) // 8) * 8
        kernel = self._kernel("all_reduce_specialized.cu", launch, dtype, op)
        blocks = pushers * (self.size - 1) + adders
        arguments = self._in, pushers, tile, chunk, nbytes // 16, *place, send
        return self._bind(kernel, blocks, launch.threads, *arguments, overlap=False, cooperative=True)

    def bind_reduce_scatter(
        self, send: Any, recv: Any, counts: Sequence[int], dtype: DType, op: ReduceOp, *, factor: float = 1.0,
        overlapped: bool = False,
    ) -> Run | None:  # fmt: skip
        """The reduce-scatter of ``counts[r]`` elements for each rank r, added in rank order.

        ``recv`` may be this rank's part of ``send``.  Packets are used if an all-reduce of ``size`` times the largest
        part would use them.  Returns None if no kernel fits: for complex numbers, for PREMUL_SUM without packets, on
        one rank and without elements.  ``overlapped``: by copy engines; ``send`` is symmetric then, and the parts are
        equal.
        """
        count = max(counts)
        nbytes, equal = count * dtype.itemsize, min(counts) == count
        usual = self.pick(nbytes * self.size)
        if dtype.kind == "complex" or self.size == 1 or not nbytes:
            return None
        if usual.algorithm in PACKETS and not overlapped:
            launch = replace(usual, algorithm="reduce_scatter" if equal else "reduce_scatter_v")
            return self._bind_packets(launch, send, recv, count, dtype, op, factor, () if equal else _ends(counts))
        if op is ReduceOp.PREMUL_SUM:
            return None
        if overlapped:
            launch, inputs = OVERLAPPED_REDUCE_SCATTER, self._everywhere(send)
            kernel, barrier = self._kernel("all_reduce_copies.cu", launch, dtype, op), self.bind_barrier(overlap=False)
            return self._copies.reduce_scatter(kernel, barrier, launch, dtype.itemsize, count, inputs, recv)
        threads = 512 if self.size <= 4 else 256  # of each half of a block; registers grow with the ranks
        whole = equal and nbytes % 16 == 0
        name = "reduce_scatter" if whole else "reduce_scatter_v"
        launch = KernelConfig(name, min(-(-nbytes // SHARE), self.blocks), threads)
        blocks, batch = self._batches(launch, -(-nbytes // 16))
        kernel = self._kernel("all_reduce_push.cu", launch, dtype, op)
        sizes = (count,) if whole else _ends(counts)
        return self._bind(kernel, blocks, 2 * launch.threads, self._in, batch, send, recv, *sizes)

    def bind_scan(
        self, name: str, send: Any, recv: Any, count: int, dtype: DType, op: ReduceOp, *, factor: float = 1.0
    ) -> Run | None:
        """The scan or exscan (``name``) of ``count`` elements by packets; ``recv`` is 0 on a rank without a result.

        Returns None if packets do not fit: for larger buffers, for complex numbers and on one rank.
        """
        nbytes = count * dtype.itemsize
        launch = self.pick(nbytes)
        few = launch.algorithm in PACKETS and nbytes * (self.size - 1) <= _SCANNED_UP_TO
        if dtype.kind == "complex" or self.size == 1 or not few:
            return None
        return self._bind_packets(replace(launch, algorithm=name), send, recv, count, dtype, op, factor)

    def write_algorithm(self, name: str, nbytes: int, overlapped: bool = False) -> str:
        """The algorithm that writes ``nbytes`` from each rank to symmetric memory of each: ``name``, or "copies"."""
        return "copies" if overlapped or nbytes * (self.size - 1) >= _COPIES_FROM else name

    def bind_writes(self, name: str, send: Any, recv: Any, nbytes: int, overlapped: bool = False) -> Run | None:
        """The all_gather or all_to_all (``name``) of ``nbytes`` from each rank, to each, into symmetric memory.

        By copy engines if large or ``overlapped``.  None for other memory and for parts that are not a multiple of 16
        bytes.  Without ``overlapped``, also None where ``bind_exchange`` is preferred: for small parts, and for large
        parts between 2 ranks.
        """
        place = self._symmetric(recv, nbytes * self.size)
        small = nbytes <= self.small and nbytes * (self.size - 1) < _DIRECT_FROM
        exchanged = small or (self.size == 2 and nbytes >= _COPIES_FROM)
        if place is None or nbytes % 16 or not nbytes or (exchanged and not overlapped):
            return None
        if self.write_algorithm(name, nbytes, overlapped) == "copies":
            stride, outputs = nbytes * (name == "all_to_all"), self._everywhere(recv)
            places = [(to + self.rank * nbytes, send + r * stride) for r, to in enumerate(outputs)]
            return self._copies.move(self.bind_barrier(overlap=False), nbytes, places)
        kernel = self.load(KERNELS / "all_gather.cu", name, THREADS=512)
        blocks = min(-(-nbytes // SHARE), self.blocks)
        return self._bind(kernel, blocks, 512, *place, send, nbytes)

    def _batches(self, launch: KernelConfig, chunk: int) -> tuple[int, int]:
        """Blocks, and vectors in a batch, with which chunks of so many vectors go through staging memory."""
        blocks = min(launch.blocks or 64, self.blocks, self.staging // 256 // self.size)
        share = -(-(chunk + 8) // blocks) + 8
        return blocks, min(self.staging // 16 // (2 * blocks * self.size), share) // 8 * 8

    def _bind_copies(self, launch: KernelConfig, send: Any, recv: Any, count: int, dtype: DType, op: ReduceOp) -> Run:
        kernel = self._kernel("all_reduce_copies.cu", launch, dtype, op)
        return self._copies.all_reduce(
            kernel, self.bind_barrier(overlap=False), launch, dtype.itemsize, count,
            self._everywhere(send), self._everywhere(recv),
        )  # fmt: skip

    def _everywhere(self, pointer: Any) -> list[int]:
        """Where a symmetric buffer lies on each rank, as this one sees it."""
        memory = self.memory_of(pointer, 1)
        assert memory is not None
        return [base + pointer - memory.pointer for base in memory.pointers]

    def bind_exchange(
        self, sends: Sequence[Piece], recvs: Sequence[Piece], *, messages: bool = False, overlapped: bool = False,
        relay: int = MAX_RANKS, small: int | None = None,
    ) -> Run:  # fmt: skip
        """Send ``sends[r]`` to rank r while receiving ``recvs[r]`` from it, this rank's own piece included.

        A piece has any number of bytes, 0 included, and any alignment.  Every rank that sends or receives something
        takes part.  Pieces from one rank to another arrive in the order in which they were sent.  ``check`` raises
        CollectiveMismatch if a piece has another size than expected, or another kind (``messages``).
        ``overlapped``: use few multiprocessors, because the kernel may wait long while others compute.  ``relay``: send
        to the others what comes from that rank, as it arrives.  ``small``: bytes of the largest piece that travels as
        packets, the same on all ranks.
        """
        small = self.small if small is None else small
        launch = exchange_launch(self.rank, self.blocks, small, sends, recvs, overlapped, relay)
        if launch is None:
            return NOTHING
        blocks, threads, macros, channels, pieces = launch
        kernel = self.load(KERNELS / "exchange.cu", "exchange", **macros)
        places = self._slots, self._slot, self._posts, self._boxes
        return self._bind(kernel, blocks, threads, *places, small, channels, int(messages), relay, *pieces)

    def bind_broadcast(self, send: Piece, recv: Piece, root: int) -> Run:
        """A broadcast in one exchange (``broadcast_pieces``); ``send`` is root's alone."""
        sends, recvs, relay = broadcast_pieces(self.rank, self.size, send, recv, root)
        return self.bind_exchange(sends, recvs, relay=relay, small=self.relayed)

    def _bind(
        self, kernel: Any, blocks: int, threads: int, *arguments: Any, overlap: bool = True, cooperative: bool = False
    ) -> Run:
        """A function that launches ``kernel``, whose first parameters are those of every kernel.

        ``overlap``: it may start while the kernel before it ends, if no other communicator uses the GPU.
        """
        everywhere = self._context.pointer, self.memory.pointer, self.rank
        overlap = overlap and self._overlap and self.exclusive
        most, per_sm = self.occupancy
        self.occupancy = Occupancy(max(most, blocks * (1 + overlap)), min(per_sm, kernel.max_active_blocks(threads)))
        run: Run = kernel.bind(blocks, threads, *everywhere, *arguments, overlap=overlap, cooperative=cooperative)
        return run

    def record_kernel(self, *kernel: Any) -> None:
        """Record that a kernel for reductions is bound; all ranks describe it by the same values."""
        self._bound.add(kernel)

    def first_use(self) -> bool:
        """Whether the last ``within`` bound a kernel for reductions that was never bound before; alike on all ranks."""
        new = not self._bound <= self._used
        self._used |= self._bound
        return new

    def load_copy_kernels(self) -> None:
        """Load all kernels that only move data: otherwise ranks would load them at different calls."""
        packets = ({"WHOLE": whole, "SEVERAL": several} for whole in (0, 1) for several in (0, 1))
        for macros in ({"LARGE": 1}, *packets):
            self.load(KERNELS / "exchange.cu", "exchange", **macros)
        for name in ("all_gather", "all_to_all"):
            self.load(KERNELS / "all_gather.cu", name, THREADS=512)
        self.load(KERNELS / "barrier.cu", "barrier")

    def _symmetric(self, pointer: Any, nbytes: int) -> tuple[int, int] | None:
        """Table of addresses and offset of a buffer that all ranks map, if vectors can move it."""
        for memory in () if type(pointer) is Address else self._memories.values():
            offset = memory.offset_of(pointer, nbytes)
            if offset is not None and offset % 16 == 0:
                return memory.peer_pointers.pointer, offset
        return None

    def bind_barrier(self, *, overlap: bool = True) -> Run:
        """A barrier of all ranks' streams; without ``overlap`` it begins when all before it is over, copies too."""
        kernel = self.load(KERNELS / "barrier.cu", "barrier")
        return self._bind(kernel, 1, 32, overlap=overlap)

    def close(self) -> None:
        """Free the slab once all ranks' devices are done; without the others after ``abort`` or a failure."""
        if self.record.has_failed or self.record.aborted:
            driver.synchronize(self.device)
            self.memory.abort()
        else:
            self.memory.close()
        self._memories.clear()
        self._copies.close()


def _ends(counts: Sequence[int]) -> tuple[int, ...]:
    """The end of each part in elements, and 0 for ranks that do not exist: the parameters of a kernel."""
    return (*accumulate(counts), *[0] * (MAX_RANKS - len(counts)))
