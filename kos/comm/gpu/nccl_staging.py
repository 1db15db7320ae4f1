"""Staging memory for ncclSend and ncclRecv, used in place of registered memory.

Within a host NCCL copies directly between registered buffers.  Both ends must then be registered, but NCCL does not
check this.  If only one end is, the ranks hang or the data is lost without an error (seen with NCCL 2.28.9 at 16 MB and
2.32.3 at 128 KB).  Windows (``allocate``, ``register``) are registered.  During graph capture NCCL also registers all
memory of cuMemCreate, such as torch's expandable segments.  A rank does not know what memory its peer passes.  So
registered memory is always sent from, and received into, memory of cudaMalloc, which NCCL does not register.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from mmap import PAGESIZE

from kos.comm.contract import Message
from kos.comm.gpu import nccl_binding as binding
from kos.comm.gpu.memory import Windows, up
from kos.comm.operation import Operation
from kos.cuda.streams import capture_of, is_captured

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
