"""All-reduce by our own kernels over memory that all ranks of a machine map (``kos/comm/kernels``).

The engine owns the slab in which the kernels meet, chooses a kernel and its launch for a message, and tells
what a kernel that gave up was waiting for.  It checks no arguments that ranks must agree on and stamps no
sequence numbers: that is the communicator's business.

Algorithms: ``one_shot`` and ``two_shot`` (packets, small and middle sizes), ``direct`` and ``bulk`` (buffer to
buffer, large), all of them adding in rank order; ``ring`` and ``tree``, which follow the schedules of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from kos.comm.reduction import ReduceOp
from kos.comm.rendezvous import Rendezvous
from kos.cuda import driver, load_kernel
from kos.cuda.devices import device_info
from kos.cuda.driver import call, cu
from kos.dtypes import DType
from kos.errors import BackendUnavailable, CollectiveError, CollectiveTimeout, InvalidArgument, RankLost
from kos.memory.array import Array
from kos.memory.pool import pinned_empty
from kos.memory.symmetric import SymmetricMemory

KERNELS = Path(__file__).with_name("kernels")
MAX_RANKS = 16
CHANNELS = 128
STAGING = 32 << 20
"""Bytes, twice: through these go large messages whose buffers are not symmetric."""

# As in kernels/channel.cuh and packets.cuh.
_LINE_BYTES = 256
_FAILED = CHANNELS * _LINE_BYTES
_INBOX = _FAILED + 256
_CAPACITY = 512
_PACKETS = ("one_shot", "two_shot", "ring", "tree")


class _Word(IntEnum):
    """The record through which host and kernels talk: 64-bit words of host memory."""

    ABORT, TIMEOUT, FAILED, CAUSE, PEER, CHANNEL, WANTED, SEEN, PHASE = range(9)


_TIMEOUT, _ABORTED, _TOLD = 1, 2, 3


@dataclass(frozen=True)
class Launch:
    """An algorithm and how it is launched; 0 blocks: as many as the packets need."""

    algorithm: str
    blocks: int = 0
    threads: int = 512
    lines: bool = False  # 128-byte lines instead of 16-byte packets: NVLink only
    unroll: int = 1  # of direct
    tile: int = 8192  # bytes; of bulk
    stages: int = 3  # of bulk


# (bytes up to which, launch): measured on 8 H200, see benchmarks/peer_kernels.py.
_LAUNCHES: tuple[tuple[float, Launch], ...] = (
    (48 << 10, Launch("one_shot", threads=256)),
    (2 << 20, Launch("two_shot", threads=256)),
    (float("inf"), Launch("bulk", blocks=32, threads=256)),
)


class PeerEngine:
    """The kernels of one group of ranks, one of them on ``device``.

    Creation and ``close`` are collective.  ``timeout`` (seconds) bounds every wait inside a kernel and may be
    changed at any time.  Ranks may share a GPU if they are threads of one process (all ranks' kernels then run
    at once); as processes they take turns, a millisecond each.
    """

    def __init__(
        self, rendezvous: Rendezvous, device: int, *, timeout: float = 30.0, staging: int = STAGING, **macros: Any
    ) -> None:
        """``macros`` reach every kernel: STALL (nanoseconds) and BROKEN are for tests of races."""
        self.rank, self.size, self.device = rendezvous.rank, rendezvous.size, device
        if self.size > MAX_RANKS:
            raise BackendUnavailable(f"peer: expected at most {MAX_RANKS} ranks, got {self.size}")
        info = device_info(device)
        fact = f"{info.uuid} {info.multiprocessors} {info.arch}"
        facts = [data.decode().split() for data in rendezvous.allgather(fact.encode())]
        sharing = max(sum(uuid == other for other, *_ in facts) for uuid, *_ in facts)
        self.blocks = min(CHANNELS, min(int(count) for _, count, _ in facts) // sharing)
        self.has_bulk = all(int("".join(filter(str.isdigit, arch))) >= 90 for *_, arch in facts)
        self.staging = staging // 16 * 16
        self._macros = dict(macros, RANKS=self.size)
        self._memories: list[SymmetricMemory] = []
        self._record = pinned_empty(16, np.uint64, device)
        self._record[:] = 0
        self.timeout = timeout
        inboxes = 2 * CHANNELS * 2 * 2 * self.size * _CAPACITY * 16
        self._in = _INBOX + inboxes
        self._out = self._in + staging
        self.memory = SymmetricMemory(rendezvous, self._out + staging, device)
        words = [*self.memory.pointers, self._record.__array_interface__["data"][0], self.rank]
        self._context = Array.from_numpy(np.array(words, np.uint64), device, label="peer context")
        driver.synchronize(device)
        rendezvous.barrier()

    @property
    def timeout(self) -> float:
        """Seconds that a kernel waits for another rank."""
        return float(self._record[_Word.TIMEOUT]) / 1e9

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._record[_Word.TIMEOUT] = int(min(seconds, 1e9) * 1e9)

    def register(self, memory: SymmetricMemory) -> None:
        """Let buffers in ``memory`` be used where they are.  Collective, and so is every use of such a buffer:
        all ranks pass buffers at the same offset of it."""
        self._memories.append(memory)

    def unregister(self, memory: SymmetricMemory) -> None:
        self._memories.remove(memory)

    def launch_for(self, nbytes: int) -> Launch:
        """What ``auto`` takes for a message of that size."""
        return next(launch for limit, launch in _LAUNCHES if nbytes <= limit)

    def bind_all_reduce(
        self,
        send: int,
        recv: int,
        count: int,
        dtype: DType,
        op: ReduceOp,
        *,
        factor: float = 1.0,
        launch: Launch | None = None,
        stream: Any = None,
    ) -> Callable[[], None]:
        """A function that queues this all-reduce on ``stream``: ``count`` elements from address ``send`` to
        ``recv`` (which may be the same).  Everything is resolved here; a call costs one launch.

        Collective in what it queues: all ranks use the same count, dtype, op and launch.  ``factor`` is this
        rank's, for PREMUL_SUM.
        """
        if count <= 0 or send % dtype.itemsize or recv % dtype.itemsize:
            raise InvalidArgument(
                f"all_reduce: expected elements at multiples of {dtype.itemsize} bytes, "
                f"got {count} at 0x{send:x} and 0x{recv:x}"
            )
        launch = self._possible(launch or self.launch_for(count * dtype.itemsize), op)
        if launch.algorithm in _PACKETS:
            return self._bind_packets(launch, send, recv, count, dtype, op, factor, stream)
        return self._bind_direct(launch, send, recv, count, dtype, op, stream)

    def _possible(self, launch: Launch, op: ReduceOp) -> Launch:
        if launch.algorithm in ("direct", "bulk") and (op is ReduceOp.PREMUL_SUM or self.size == 1):
            return Launch("two_shot" if self.size > 1 else "one_shot")
        if launch.algorithm == "bulk" and not self.has_bulk:
            return replace(launch, algorithm="direct", threads=512)
        if self.size == 1:
            return replace(launch, algorithm="one_shot")
        return launch

    def _kernel(self, file: str, launch: Launch, dtype: DType, op: ReduceOp, **macros: Any) -> Any:
        name = "uint8" if dtype.name == "bool" else dtype.name
        kernel = load_kernel(
            KERNELS / file, launch.algorithm, self.device,
            DTYPE=name, OP=op.name, THREADS=launch.threads, ONLY=launch.algorithm.upper(), **macros, **self._macros,
        )  # fmt: skip
        return _loaded(kernel)

    def _bind_packets(
        self, launch: Launch, send: int, recv: int, count: int, dtype: DType, op: ReduceOp, factor: float, stream: Any
    ) -> Callable[[], None]:
        partials = launch.algorithm in ("ring", "tree")
        widened = partials or op is ReduceOp.PREMUL_SUM
        lines = launch.lines and not widened
        # Small integers are added in 32 bits: the width of a partial sum on the wire.
        itemsize = max(dtype.accumulate.itemsize, 4) if widened else dtype.itemsize
        if lines:
            packets = -(-count // (120 // itemsize)) * 8
        else:
            packets = -(-count // ((8 if itemsize == 8 else 12) // itemsize))
        chunks = 1 if launch.algorithm in ("one_shot", "tree") else self.size
        packets = -(-packets // chunks)
        blocks = min(launch.blocks or -(-packets // launch.threads), self.blocks)
        per_channel = -(-packets // blocks)
        if lines:
            per_channel = -(-per_channel // 8) * 8
        kernel = self._kernel("all_reduce_packets.cu", launch, dtype, op, LINES=lines, PARTIALS=partials)
        threads = min(launch.threads, -(-per_channel // 32) * 32)
        return kernel.bind(
            stream, blocks, threads,
            self._context.pointer, self.memory.pointer, self.rank, send, recv, count, per_channel, np.float64(factor),
        )  # fmt: skip

    def _bind_direct(
        self, launch: Launch, send: int, recv: int, count: int, dtype: DType, op: ReduceOp, stream: Any
    ) -> Callable[[], None]:
        nbytes, itemsize, table = count * dtype.itemsize, dtype.itemsize, self.memory.peer_pointers.pointer
        source, target = self._symmetric(send, nbytes), self._symmetric(recv, nbytes)
        zero_copy = source is not None and target is not None
        pieces = 1 if zero_copy else -(-nbytes // self.staging)
        vector = 16 // itemsize
        piece = count if zero_copy else -(-count // pieces // vector) * vector
        shared = 0
        if launch.algorithm == "bulk":
            shared = (launch.stages * self.size + 2) * launch.tile + 8 * launch.stages
        kernel = self._kernel(
            "all_reduce_direct.cu", launch, dtype, op, UNROLL=launch.unroll, TILE=launch.tile, STAGES=launch.stages
        )
        blocks = min(launch.blocks or self.blocks, self.blocks)
        return kernel.bind(
            stream, blocks, launch.threads,
            self._context.pointer, self.memory.pointer, self.rank,
            *(source if zero_copy else (table, self._in)), *(target if zero_copy else (table, self._out)),
            0 if zero_copy else send, 0 if zero_copy else recv, count, piece, shared=shared,
        )  # fmt: skip

    def _symmetric(self, pointer: int, nbytes: int) -> tuple[int, int] | None:
        """Table of addresses and offset of a buffer that all ranks map, if vectors can move it."""
        for memory in self._memories:
            offset = memory.offset_of(pointer, nbytes)
            if offset is not None and offset % 16 == 0:
                return memory.peer_pointers.pointer, offset
        return None

    def bind_barrier(self, *, stream: Any = None) -> Callable[[], None]:
        """A function that queues a barrier of all ranks' streams."""
        kernel = _loaded(load_kernel(KERNELS / "barrier.cu", "barrier", self.device, **self._macros))
        return kernel.bind(stream, 1, 32, self._context.pointer, self.memory.pointer, self.rank)

    @property
    def failed(self) -> bool:
        """Whether a kernel has given up; the engine is then of no more use.  Reads host memory only."""
        return bool(self._record[_Word.FAILED])

    def check(self, what: str) -> None:
        """Raise for a kernel that gave up, naming the rank it waited for; ``what`` names the operation."""
        if not self.failed:
            return
        word = {name: int(self._record[name]) for name in _Word}
        peer = word[_Word.PEER]
        if word[_Word.CAUSE] == _ABORTED:
            raise CollectiveError(f"{what}: aborted while it waited for rank {peer}")
        if word[_Word.CAUSE] == _TOLD:
            raise RankLost(f"{what}: rank {peer} has given up")
        raise CollectiveTimeout(
            f"{what}: rank {peer} did not arrive within {self.timeout:g} s "
            f"(channel {word[_Word.CHANNEL]}, phase {word[_Word.PHASE]}: "
            f"expected flag {word[_Word.WANTED]}, got {word[_Word.SEEN]})"
        )

    def abort(self) -> None:
        """Let every kernel that waits, now or later, end within a moment.  Its result is undefined."""
        self._record[_Word.ABORT] = 1

    def close(self) -> None:
        """Free the slab once all ranks' devices are done; without the others after ``abort`` or a failure."""
        if self.failed or self._record[_Word.ABORT]:
            driver.synchronize(self.device)
            self.memory.abort()
        else:
            self.memory.close()
        self._memories.clear()


def _loaded(kernel: Any) -> Any:
    """The kernel, on its device now: CUDA would load it at its first launch, and wait for kernels that run,
    which may be another rank's that waits for this one."""
    with driver.on_device(kernel.device):
        call(cu.cuFuncLoad, call(cu.cuKernelGetFunction, int(kernel.handle.handle)))
    return kernel
