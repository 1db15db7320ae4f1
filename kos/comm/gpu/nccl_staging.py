"""Staging memory for ncclSend and ncclRecv, in place of memory that NCCL finds registered; and what lies in windows.

Between registered arrays of one host NCCL moves data directly.  It then requires that the arrays of both ends are
registered, which neither checks.  If one is not, the ranks wait for each other for ever, or the data is lost without an
error: seen with 2.28.9 at 16 MB, and with 2.32.3 at 128 KB.  Registered are windows (``allocate``, ``register``), and
while a graph is captured all memory of cuMemCreate, such as torch's expandable segments.  No rank knows what the other
end has.  So such pieces are copied to memory of cudaMalloc, which NCCL does not register, or from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kos.comm.gpu import nccl_binding as binding
from kos.comm.gpu.memory import Piece, ScratchPool, Windows
from kos.comm.operation import Operation
from kos.cuda import driver
from kos.cuda.driver import call, cu
from kos.cuda.streams import is_captured

_ALIGNMENT = 256

BOTH_IN_WINDOWS = "for x and out in windows"

Copy = tuple[int, int, int]
"""To which address, from which, and bytes."""


def windows_of(o: Operation, windows: Windows) -> str | None:
    """Which arrays of a collective lie in windows; None if none does.

    NCCL has other kernels for them, so that it must be the same on all ranks.  Arrays of the root alone do not count.
    """
    ends = {"x": o.send, "out": o.recv}
    if o.root is not None:
        ends = {"out": o.recv} if o.name == "broadcast" else {"x": o.send} if o.name == "reduce" else {}
    found = [name for name, each in ends.items() if each is not None and windows.has(each.pointer)]
    return f"for {' and '.join(found)} in windows" if found else None


def staged(
    sends: Sequence[Piece], recvs: Sequence[Piece], rank: int, windows: Windows, scratch: ScratchPool, part: int,
    stream: int,
) -> tuple[Sequence[Piece], Sequence[Piece], list[Copy], list[Copy]]:  # fmt: skip
    """The pieces with staging memory in place of registered memory, the copies before an exchange, and those after it.

    Staging memory is ``part`` of the scratch memory.  A piece of ``rank`` itself stays: NCCL copies it as any other.
    """
    captured = is_captured(stream)
    before, after = list[Copy](), list[Copy]()
    if not captured and not windows.memories:
        return sends, recvs, before, after
    sides, places, end = ([*sends], [*recvs]), list[tuple[int, int, int]](), 0
    for side, pieces in enumerate(sides):
        for other, (pointer, nbytes) in enumerate(pieces):
            registered = windows.has(pointer) or (captured and nbytes and binding.is_virtual(pointer))
            if nbytes and other != rank and registered:
                places.append((side, other, end))
                end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    start = scratch.address(end, stream, part) if places else 0
    for side, other, at in places:
        pointer, nbytes = sides[side][other]
        sides[side][other] = start + at, nbytes
        if side:
            after.append((pointer, start + at, nbytes))
        else:
            before.append((start + at, pointer, nbytes))
    return *sides, before, after


def copy(copies: Iterable[Copy], device: int, stream: int) -> None:
    for each in copies:
        with driver.on_device(device):
            call(cu.cuMemcpyDtoDAsync, *each, stream)
