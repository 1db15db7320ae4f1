"""Staging memory for ncclSend and ncclRecv, in place of memory that NCCL finds registered.

Between registered arrays of one host NCCL moves data directly.  It then requires that the arrays of both ends are
registered, which neither checks.  If one is not, the ranks wait for each other for ever, or the data is lost without an
error: seen with 2.28.9 at 16 MB, and with 2.32.3 at 128 KB.  Registered are windows (``allocate``, ``register``), and
while a graph is captured all memory of cuMemCreate, such as torch's expandable segments.  No rank knows what the other
end has.  So such pieces are copied to memory of cudaMalloc, which NCCL does not register, or from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kos.comm.gpu import nccl_binding as binding
from kos.comm.gpu.memory import Piece, ScratchPool, Windows
from kos.cuda import driver
from kos.cuda.driver import call, cu
from kos.cuda.streams import is_captured

_ALIGNMENT = 256


class Staging:
    """The staging memory of one rank's communicator, in parts of its ``scratch`` memory that nothing else uses."""

    def __init__(self, scratch: ScratchPool, windows: Windows, rank: int, device: int) -> None:
        self._scratch, self._windows, self._rank, self._device = scratch, windows, rank, device
        self._grouped = False
        self._exchanges = 0  # of the group, those through staging memory
        self._received: list[tuple[int, int, int, int]] = []  # array, staging memory, bytes and stream

    @contextmanager
    def group(self) -> Iterator[None]:
        """Exchanges in the block begin together at its end, and what they receive is copied after it."""
        self._exchanges, self._received, self._grouped = 0, [], True
        try:
            yield
        finally:
            self._grouped = False
        self.copy_received()

    def replace(
        self, sends: Sequence[Piece], recvs: Sequence[Piece], stream: int
    ) -> tuple[Sequence[Piece], Sequence[Piece]]:
        """The pieces, with staging memory in place of registered memory; what is sent is copied there.

        A piece of this rank itself stays, which NCCL copies as any other memory.
        """
        if not self._grouped:
            self._exchanges, self._received = 0, []
        captured = is_captured(stream)
        if not captured and not self._windows.memories:
            return sends, recvs
        sides, places, end = ([*sends], [*recvs]), list[tuple[int, int, int]](), 0
        for side, pieces in enumerate(sides):
            for rank, (pointer, nbytes) in enumerate(pieces):
                if nbytes and rank != self._rank and self._is_registered(pointer, captured):
                    places.append((side, rank, end))
                    end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if places:
            self._exchanges += 1
            start = self._scratch.address(end, stream, part=self._exchanges)
            for side, rank, at in places:
                pointer, nbytes = sides[side][rank]
                sides[side][rank] = start + at, nbytes
                if side:
                    self._received.append((pointer, start + at, nbytes, stream))
                else:
                    self._copy(start + at, pointer, nbytes, stream)
        return sides

    def copy_received(self) -> None:
        """Copy what the exchanges have received to its arrays; in a group its end does it."""
        if not self._grouped:
            for copy in self._received:
                self._copy(*copy)

    def _is_registered(self, pointer: int, captured: bool) -> bool:
        return self._windows.has(pointer) or (captured and binding.is_virtual(pointer))

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        with driver.on_device(self._device):
            call(cu.cuMemcpyDtoDAsync, target, source, nbytes, stream)
