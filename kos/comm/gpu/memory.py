"""Memory of a communicator on its GPU: pieces of arrays, scratch memory, windows of ``allocate``, staging memory.

*Staging memory* replaces registered memory in ncclSend and ncclRecv.  Within a host NCCL copies directly between
registered buffers.  Both ends must then be registered, but NCCL does not check this.  If only one end is, the ranks
hang or the data is lost without an error (seen with NCCL 2.28.9 at 16 MB and 2.32.3 at 128 KB).  Windows (``allocate``,
``register``) are registered.  During graph capture NCCL also registers all memory of cuMemCreate, such as torch's
expandable segments.  A rank does not know what memory its peer passes.  So registered memory is always sent from, and
received into, memory of cudaMalloc, which NCCL does not register.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from mmap import PAGESIZE
from typing import Any

from kos.comm.contract import Backend, Message, Piece
from kos.comm.control.base import ControlPlane
from kos.comm.gpu import nccl_binding as binding
from kos.comm.operation import OPERATIONS, PARTS, Operation
from kos.cuda import driver
from kos.cuda.driver import call, cu, relaxed_capture
from kos.cuda.kernels import Plan
from kos.cuda.streams import capture_of, is_captured
from kos.dtypes import DType
from kos.errors import InvalidArgument
from kos.memory.array import Array
from kos.memory.buffer import Buffer
from kos.memory.windows import Run, Window, WindowMemory

_LEAST_BYTES = 1 << 20
_BOUND = 16
"""The largest number of pieces of scratch memory, one per stream, whose launches are cached."""
NONE: Piece = (0, 0)


def whole(buffer: Buffer | None) -> Piece:
    return NONE if buffer is None else (buffer.pointer, buffer.nbytes)


def exchange_of(o: Operation, rank: int, size: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces that an operation without a reduction sends to each rank, and receives from each."""
    row, root, message, everyone = OPERATIONS.get(o.name), o.root or 0, o.message, range(size)
    if row is None or row.reduces or o.name == "barrier":
        raise NotImplementedError(f"expected an operation that exchanges pieces between GPUs, got {o.name}")
    sends = _parts(o.send, o.send_counts, size) if row.input == PARTS else [whole(o.send)] * size
    recvs = _parts(o.recv, o.recv_counts, size) if row.output == PARTS else [whole(o.recv)] * size
    if row.message:
        targets, sources = [peer == message.dst for peer in everyone], [peer == message.src for peer in everyone]
    else:
        targets = [row.pairs(rank, peer, root, size) for peer in everyone]
        sources = [row.pairs(peer, rank, root, size) for peer in everyone]
    return (
        [piece if sent else NONE for piece, sent in zip(sends, targets, strict=True)],
        [piece if got else NONE for piece, got in zip(recvs, sources, strict=True)],
    )


def _parts(buffer: Buffer | None, counts: Sequence[int] | None, size: int) -> list[Piece]:
    """A piece for each rank, of ``counts`` elements or of equal sizes."""
    if buffer is None:
        return [NONE] * size
    parts, at = [], buffer.pointer
    for count in counts or [buffer.count // size] * size:
        parts.append((at, count * buffer.dtype.itemsize))
        at += parts[-1][1]
    return parts


class Scratch:
    """Uninitialised GPU memory for a backend's own use; may be allocated while a graph is captured."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes, self._device = nbytes, device
        with driver.on_device(device), relaxed_capture():
            self.pointer = int(call(cu.cuMemAlloc, nbytes))

    def close(self) -> None:
        pointer, self.pointer = self.pointer, 0
        if pointer:
            with driver.on_device(self._device):
                call(cu.cuMemFree, pointer)


class ScratchPool:
    """Scratch memory that operations on one stream reuse in turn; parts with different numbers do not overlap.

    Outgrown pieces stay until ``trim``.  Sizes double, so outgrown pieces are together no larger than the last.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._pieces: dict[tuple[int, Any], list[Scratch]] = {}  # by stream and part; the last of each is in use
        self._captured: set[int] = set()  # addresses that graphs may use
        self._last = 0  # the stream of the last operation

    def address(self, nbytes: int, stream: int, part: Any = 0) -> int:
        """Address of at least ``nbytes`` for the next operation on ``stream``."""
        pieces = self._pieces.setdefault((stream, part), [])
        if not pieces or pieces[-1].nbytes < nbytes:
            size = max(nbytes, _LEAST_BYTES, 2 * pieces[-1].nbytes if pieces else 0)
            pieces.append(Scratch(size, self._device))
        if capture_of(stream):
            self._captured.add(pieces[-1].pointer)
        self._last = stream
        return pieces[-1].pointer

    def trim(self) -> list[Scratch]:
        """Remove the pieces that neither graphs nor the next operation on the same stream use, and return them.

        The caller frees them.  All other work that uses them must have completed.
        """
        removed = []
        for key, pieces in list(self._pieces.items()):
            kept = [piece for piece in pieces if piece.pointer in self._captured]
            if key[0] == self._last and pieces[-1] not in kept:
                kept.append(pieces[-1])
            removed += [piece for piece in pieces if piece not in kept]
            if kept:
                self._pieces[key] = kept
            else:
                del self._pieces[key]
        return removed

    def close(self) -> None:
        for pieces in self._pieces.values():
            for piece in pieces:
                piece.close()
        self._pieces.clear()


def in_scratch(
    route: Backend, sizes: Iterable[int], kernels: tuple[Any, ...], bind: Callable[[Sequence[int]], list[Run]]
) -> Plan:
    """The plan of steps that pass intermediate results in scratch memory, which has a part of each of these ``sizes``.

    ``bind`` returns the steps for parts at these addresses.  They are bound once for each piece of scratch memory.
    """
    *starts, nbytes = accumulate(map(up, sizes), initial=0)
    bound: dict[int, list[Run]] = {}  # by the address of the scratch memory

    def steps(stream: int, arrays: Sequence[Any]) -> list[Run]:
        scratch = route.backend.scratch(nbytes, stream)
        if scratch not in bound:
            if len(bound) == _BOUND:
                bound.clear()
            with relaxed_capture():
                bound[scratch] = bind([scratch + start for start in starts])
        return bound[scratch]

    return Plan(steps, kernels=kernels)


class Windows:
    """The windows of one communicator: memory registered by all its ranks, with the same numbers on all of them.

    A window is freed when no rank has an array in it, nor a graph that captured an operation on it.  ``free`` frees the
    memory of one.  ``ended`` returns whether the communicator has ended, so that ranks no longer agree on windows.
    """

    def __init__(
        self, rendezvous: ControlPlane, device: int, free: Callable[[WindowMemory], None], ended: Callable[[], bool]
    ) -> None:
        self._rendezvous, self._device, self._free, self._ended = rendezvous, device, free, ended
        self.memories: dict[int, WindowMemory] = {}
        self._dropped: list[int] = []  # windows without arrays on this rank
        self._count = 0

    def register(self, buffer: Buffer, obstacle: str, make: Callable[[], Any]) -> Array:
        """The array of the program's own memory, which ``make()`` registers; it returns the handle.  Collective.

        Raises InvalidArgument on all ranks if one of them has an ``obstacle``: a text of expected and got.
        """
        start, end = buffer.pointer, buffer.pointer + buffer.nbytes
        if buffer.nbytes == 0:
            obstacle = "expected at least one element, got none"
        elif any(start < m.pointer + m.nbytes and m.pointer < end for m in self.memories.values()):
            obstacle = "expected memory that is not registered yet, got some that is"
        obstacles = [data.decode() for data in self._rendezvous.allgather(obstacle.encode())]
        for rank, each in enumerate(obstacles):
            if each:
                raise InvalidArgument(f"register: x of rank {rank}: {each}")
        return self.add(start, buffer.nbytes, make(), buffer.shape, buffer.dtype, buffer.array)

    def add(
        self, pointer: int, nbytes: int, handle: Any, shape: tuple[int, ...], dtype: DType, owner: Any = None
    ) -> Array:
        """The array in a window that all ranks have registered; ``free`` uses ``handle``."""
        number, self._count = self._count, self._count + 1
        self.memories[number] = WindowMemory(pointer, nbytes, handle, owner)
        return Array(pointer, shape, dtype, self._device, owner=Window(pointer, partial(self.release, number)))

    def has(self, pointer: Any) -> bool:
        """Whether the address lies in a window of the library."""
        memories = [each for each in list(self.memories.values()) if each.handle] if isinstance(pointer, int) else ()
        return any(0 <= pointer - memory.pointer < memory.nbytes for memory in memories)

    def release(self, window: int) -> None:
        """Record that a window has no arrays left; calls on it may be queued, and graphs may be captured."""
        self._dropped.append(window)
        if self._ended():
            self.free(self.unused())

    def unused(self) -> list[int]:
        """The windows that have neither arrays nor graphs on this rank."""
        dropped = [(number, self.memories.get(number)) for number in list(self._dropped)]
        return [number for number, memory in dropped if memory is not None and not memory.in_graphs()]

    def unused_everywhere(self, backend: Any) -> list[int]:
        """The windows of ``backend`` that no array and no graph of any rank uses.  Collective.

        Empty if messages are queued on a rank, because CUDA would wait for them before it frees memory.
        """
        mine = self.unused()
        if mine and backend.settle(backend.timeout):
            mine = []
        unused = [json.loads(data) for data in self._rendezvous.allgather(json.dumps(mine).encode())]
        return sorted(set(unused[0]).intersection(*unused[1:]))

    def free(self, numbers: Iterable[int]) -> None:
        """Free windows in the order of their registration, the same on all ranks."""
        with driver.on_device(self._device), relaxed_capture():
            for number in sorted(numbers):
                try:
                    self._dropped.remove(number)
                except ValueError:  # ``release`` has freed it, which the collector may call meanwhile
                    continue
                memory = self.memories.pop(number)
                memory.forget()
                self._free(memory)


def up(nbytes: int) -> int:
    """Rounded up to where the next part of scratch memory begins."""
    return -(-nbytes // 256) * 256


MESSAGES = ("all_to_all", "gather", "scatter")
"""Collectives that NCCL may run as sends and receives."""
_BOTH = "for x and out in windows"

Copy = tuple[int, int, int]
"""Destination address, source address, number of bytes."""


def windows_of(o: Operation, windows: Windows, how: str = "native") -> str | None:
    """Which arrays of a collective lie in windows; None if none does, or if kos sends them as messages (``how``).

    NCCL chooses its kernel by this, so it must be the same on all ranks.  Not counted: arrays that only the root
    passes, and those of gather and scatter, which are sent as messages.
    """
    if how not in ("native", "premultiplied") and (how, o.name) != ("ordered", "all_reduce"):
        return None  # an ordered all_reduce gathers the program's arrays by NCCL's function
    ends = {"x": o.send, "out": o.recv}
    if o.root is not None:
        ends = {"out": o.recv} if o.name == "broadcast" else {"x": o.send} if o.name == "reduce" else {}
    found = [name for name, each in ends.items() if each is not None and windows.has(each.pointer)]
    return f"for {' and '.join(found)} in windows" if found else None


def as_messages(o: Operation, windows: Windows) -> bool:
    """Whether kos sends the data of a collective of ``MESSAGES`` itself: in a graph, or in a communicator with windows.

    NCCL's function runs an all_to_all whose arrays lie both in windows.
    """
    first = o.send or o.recv
    if first is None or o.name not in MESSAGES or windows_of(o, windows) == _BOTH:
        return False
    return bool(windows.memories) or is_captured(first.stream)


def stage(
    sends: Sequence[Message], recvs: Sequence[Message], rank: int, windows: Windows, scratch: Callable[..., int],
    part: int, stream: int,
) -> tuple[Sequence[Message], Sequence[Message], list[Copy], list[Copy]]:  # fmt: skip
    """Replace registered memory by staging memory: new sends and recvs, the copies before the exchange and after it.

    Staging memory is region ``part`` of what ``scratch`` returns; each graph has its own.  What ``rank`` sends to
    itself is not staged: NCCL copies it correctly.
    """
    capture = capture_of(stream)
    if not capture and not windows.memories:
        return sends, recvs, [], []
    registered = [  # whole pages
        (each.pointer // PAGESIZE * PAGESIZE, -(-(each.pointer + each.nbytes) // PAGESIZE) * PAGESIZE)
        for each in list(windows.memories.values()) if each.handle
    ]  # fmt: skip
    sides: tuple[list[Message], list[Message]] = [*sends], [*recvs]
    places, end = (dict[tuple[int, int], int](), dict[tuple[int, int], int]()), 0
    for messages, found in zip(sides, places, strict=True):
        for other, pointer, nbytes in messages:
            if other == rank or (pointer, nbytes) in found:
                continue
            # An Address stands for an array that is not known yet, so it lies in no window.
            in_window = type(pointer) is int and any(begin <= pointer < stop for begin, stop in registered)
            if in_window or (capture and binding.is_virtual(pointer)):
                found[pointer, nbytes] = end
                end += up(nbytes)
    if not end:
        return sends, recvs, [], []
    start = scratch(end, stream, (capture, part))
    for messages, found in zip(sides, places, strict=True):
        messages[:] = [
            (other, start + found[piece] if other != rank and (piece := (at, nbytes)) in found else at, nbytes)
            for other, at, nbytes in messages
        ]
    sent, received = places
    before = [(start + at, pointer, nbytes) for (pointer, nbytes), at in sent.items()]
    return *sides, before, [(pointer, start + at, nbytes) for (pointer, nbytes), at in received.items()]
