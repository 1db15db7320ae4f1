"""Compressed collectives on GPUs: kernels encode, add in rank order and decode around exchanges of bytes.

The exchanges are those of the backend; ``kos.comm.host_compressed`` does the same on host memory, with the same bits.
``peer`` has one kernel for an all_reduce or a reduce_scatter (``kernels/all_reduce_compressed.cu``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from kos.comm.compression import FORMATS, Format
from kos.comm.contract import Backend
from kos.comm.gpu.devices import check_float8
from kos.comm.gpu.memory import in_scratch, up
from kos.comm.host_compressed import parts
from kos.comm.operation import Operation
from kos.cuda import Kernel
from kos.cuda.driver import relaxed_capture
from kos.cuda.kernels import NOTHING, Plan
from kos.memory import Buffer
from kos.memory.windows import Run

KERNELS = Path(__file__).with_name("kernels") / "compressed.cu"

THREADS = 128
_MOST_BLOCKS = 2048


def bind_feed_back(route: Backend, x: Buffer, residual: Buffer, compress: str) -> Plan:
    """The plan of ``host_compressed.feed_back`` on ``x``, which is an array of the launch or in scratch memory."""
    form, count = format_of(route, compress), x.count
    if not count:
        return NOTHING
    with relaxed_capture():
        kernel = route.load(KERNELS, "feed_back", RANKS=1, DTYPE=x.dtype.name, OP="SUM", **{form.name.upper(): 1})
        run = kernel.bind(_grid(count, 1), THREADS, x.pointer, residual.pointer, count)
    return Plan((run,), kernels=("feed_back",))


def format_of(route: Backend, compress: str) -> Format:
    """The format of that name; raises InvalidArgument if the GPU has no kernels for it."""
    if compress == "fp8":
        check_float8("compress", compress, route.backend.device)
    return FORMATS[compress]


def tile(size: int) -> int:
    """Elements that a warp handles at once; ``size``: contributions to a sum."""
    return 1024 if size <= 2 else 512


def _grid(count: int, size: int) -> int:
    return min(-(-count // (tile(size) * THREADS // 32)), _MOST_BLOCKS)


class CompressedOperation:
    """The plan of one operation that sends compressed data."""

    def __init__(self, route: Backend, o: Operation) -> None:
        assert o.send is not None
        self._route = route
        self._form, self._name = format_of(route, o.options.compress), o.name
        self._send: Any = o.send.pointer
        self._recv: Any = self._send if o.recv is None else o.recv.pointer
        self._itemsize = o.send.dtype.itemsize
        self._counts, self._last = parts(o, route.size)
        self._mine = self._counts[route.rank] if o.reduction is not None else 0
        macros = {
            "DTYPE": o.send.dtype.name, "OP": "SUM" if o.reduction is None else o.reduction.op.name,
            self._form.name.upper(): 1,
        }  # fmt: skip
        self._macros, self._reduces = macros, o.reduction is not None
        sums = ["add_encoded", "decode"] if o.name == "all_reduce" else ["add_encoded"]
        for name in ("encode", *(sums if self._reduces else ["decode"])):
            self._load(name)  # compiled and loaded before anything is sent
        # Two ranks send each other all pieces, as many bytes as in two exchanges, and both add all.
        self._adds_all = o.name == "all_reduce" and route.size == 2
        own = max(map(self._nbytes, self._last), default=0)
        out, arrived = sum(map(self._nbytes, self._counts)), route.size * self._nbytes(self._mine)
        if self._adds_all:
            out, arrived = 2 * own, 4 * own
        last = sum(map(self._nbytes, self._last)) + route.size * up(own)
        self._sizes = out, arrived, own, last

    def plan(self) -> Plan:
        return in_scratch(self._route, self._sizes, (self._form.name, *self._macros.items()), self._bind)

    def _load(self, kernel: str) -> Kernel:
        with relaxed_capture():
            return self._route.load(KERNELS, kernel, RANKS=self._route.size, **self._macros)

    def _nbytes(self, count: int) -> int:
        """Of an encoded piece in scratch memory, where pieces are aligned."""
        return -(-self._form.nbytes(count) // 16) * 16

    def _bind(self, parts: Sequence[int]) -> list[Run]:
        """Encode, exchange, add, exchange, decode; each leaves its results in a part of scratch memory."""
        out, arrived, own, last = parts
        route, rank, size = self._route, self._route.rank, self._route.size
        if not self._counts:  # an all_gather
            count = self._last[rank]
            return [*self._encode(self._send, [count], own), *self._spread(own, last)]
        runs = self._encode(self._send, self._counts, out)
        if not self._reduces:
            sends, recvs = self._pieces(out, self._counts), self._pieces(last, self._last)
            return [*runs, route.bind_exchange(sends, recvs), *self._decode(last, self._last)]
        if self._adds_all:
            stride = self._nbytes(max(self._counts))
            runs += [route.bind_collect(out, arrived, 2 * stride)] if stride else []
            for piece, count in enumerate(self._counts):
                place = piece * stride
                runs += self._launch("add_encoded", count, arrived + place, 2 * stride, last + place, count, 1)
            return [*runs, *self._decode(last, self._last)]
        stride = self._nbytes(self._mine)
        recvs = [(arrived + r * stride, stride) for r in range(size)]
        runs.append(route.bind_exchange(self._pieces(out, self._counts), recvs))
        if self._name != "all_reduce":
            return [*runs, *self._launch("add_encoded", self._mine, arrived, stride, self._recv, self._mine, 0)]
        runs += self._launch("add_encoded", self._mine, arrived, stride, own, self._mine, 1)
        return [*runs, *self._spread(own, last)]

    def _spread(self, own: int, last: int) -> list[Run]:
        """Send this rank's encoded piece to every rank, and decode all."""
        route, counts = self._route, self._last
        longest = self._nbytes(max(counts, default=0))
        if self._name != "all_gather_v":  # pieces of an all_reduce are equal but for the last ones
            runs: list[Run] = [route.bind_collect(own, last, longest)] if longest else []
            return [*runs, *self._decode(last, counts)]
        sends = [(own, self._nbytes(counts[route.rank]))] * route.size
        return [route.bind_exchange(sends, self._pieces(last, counts)), *self._decode(last, counts)]

    def _pieces(self, address: int, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Address and bytes of each encoded piece."""
        stride = 0 if self._name.endswith("_v") else self._nbytes(max(counts))
        sizes = [self._nbytes(count) for count in counts]
        starts = [stride * i for i in range(len(counts))] if stride else [0, *accumulate(sizes)]
        return [(address + start, nbytes) for start, nbytes in zip(starts, sizes, strict=False)]

    def _encode(self, x: Any, counts: Sequence[int], out: int) -> list[Run]:
        return self._each(counts, out, lambda start, count, part, pieces, at, stride: self._launch(
            "encode", part * pieces, x + start * self._itemsize, count, part, pieces, at, stride
        ))  # fmt: skip

    def _decode(self, data: int, counts: Sequence[int]) -> list[Run]:
        return self._each(counts, data, lambda start, count, part, pieces, at, stride: self._launch(
            "decode", part * pieces, at, stride, part, pieces, self._recv + start * self._itemsize, count
        ))  # fmt: skip

    def _each(self, counts: Sequence[int], data: int, launch: Callable[..., list[Run]]) -> list[Run]:
        """One launch for all pieces if they are equal but for the last ones, or one each."""
        if not self._name.endswith("_v"):
            part = max(counts, default=0)
            return launch(0, sum(counts), part, len(counts), data, self._nbytes(part))
        runs, starts = list[Run](), [0, *accumulate(counts)]
        for start, count, (at, stride) in zip(starts, counts, self._pieces(data, counts), strict=False):
            runs += launch(start, count, count, 1, at, stride)
        return runs

    def _launch(self, name: str, count: int, *arguments: Any) -> list[Run]:
        """A launch that handles ``count`` elements."""
        if not count:
            return []
        return [self._load(name).bind(_grid(count, self._route.size), THREADS, *arguments)]
