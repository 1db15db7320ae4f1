"""Operations on GPUs that are composed of exchanges and kernels: reductions in rank order, and compressed operations.

The exchanges are those of the route.  ``peer`` has kernels of its own for most of these operations, and uses this for
the others.

*Reductions in rank order* are an exchange, a kernel of kos, and a second exchange that distributes the result.  The
vector is split into a part for each rank.  Every rank sends part r of its contribution to rank r, which adds the
contributions in rank order (fp32 for floats of 16 and 8 bits) and rounds once.  The bytes sent are those of a ring.
Small vectors are gathered whole on every rank, and every rank adds all of them.  In a scan rank r makes row r' of its
part for each rank r', the sum over the ranks up to r', and sends it there.

*Compressed operations* encode, add in rank order and decode around exchanges of bytes.  ``kos.comm.compression`` does
the same on host memory, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from kos.comm.compression import FORMATS, Format, parts
from kos.comm.contract import Backend, Piece
from kos.comm.gpu.devices import check_float8
from kos.comm.gpu.memory import in_scratch, up
from kos.comm.operation import Operation
from kos.cuda import Kernel
from kos.cuda.driver import relaxed_capture
from kos.cuda.kernels import NOTHING, Plan
from kos.dtypes import DTYPES
from kos.memory import Buffer
from kos.memory.windows import Run

_KERNELS = Path(__file__).with_name("kernels")
ORDERED, COMPRESSED = _KERNELS / "reduce_ordered.cu", _KERNELS / "compressed.cu"
_ORDERED_THREADS, _COMPRESSED_THREADS = 256, 128
_MOST_BLOCKS = 2048  # of a compressed operation

_ONE_SHOT_BYTES = 1 << 20
"""The largest total of all ranks' vectors that is gathered on every rank: one exchange instead of two."""
_ALIGNMENT = 16  # elements: parts begin at multiples of it


class OrderedReduction:
    """The plan of one all_reduce, reduce, reduce_scatter, reduce_scatter_v, scan or exscan."""

    def __init__(self, route: Backend, o: Operation) -> None:
        assert o.send is not None and o.reduction is not None
        self._route, size, rank = route, route.size, route.rank
        name, op, per = o.reduction.element.name, o.reduction.op.name, o.reduction.parts
        self._kernels = name, op  # the dtype and operation that select the kernels
        self._name, self._root, self._factor = o.name, o.root, o.reduction.factor
        self._send: Any = o.send.pointer
        self._recv: Any = o.recv.pointer if o.recv is not None else 0
        self._result = DTYPES[name].itemsize
        travels = name
        self._scale = None
        if op == "PREMUL_SUM":
            travels, op = DTYPES[name].accumulate.name, "SUM"
            self._scale = self._load("scale", DTYPE=name, RESULT=travels, OP=op)
        self._itemsize = DTYPES[travels].itemsize
        self._scans = o.name in ("scan", "exscan")
        self._reduce = self._load(
            "scan_ordered" if self._scans else "reduce_ordered", DTYPE=travels, RESULT=name, OP=op
        )
        self._count = o.send.count * per
        self._whole = o.name == "all_reduce" and self._count * self._itemsize * size <= _ONE_SHOT_BYTES
        if o.send_counts is not None:
            counts = [count * per for count in o.send_counts]
        elif o.name == "reduce_scatter" or self._count % size == 0:
            counts = [self._count // size] * size
        else:
            part = -(-self._count // (size * _ALIGNMENT)) * _ALIGNMENT
            counts = [max(0, min(part, self._count - r * part)) for r in range(size)]
        self._counts = counts
        self._starts = [sum(counts[:r]) for r in range(size)]
        self._mine = self._count if self._whole else counts[rank]
        self._sizes = (  # of the scaled input, the parts of all ranks, the result
            self._count * self._itemsize if self._scale is not None else 0,
            size * self._mine * self._itemsize,
            self._mine * self._result * (size if self._scans else 1),
        )

    def plan(self) -> Plan:
        return in_scratch(self._route, self._sizes, self._kernels, self._bind)

    def _load(self, kernel: str, **macros: Any) -> Kernel:
        with relaxed_capture():
            return self._route.load(ORDERED, kernel, RANKS=self._route.size, **macros)

    def _bind(self, parts: Sequence[int]) -> list[Run]:
        """Scale, exchange, add, distribute."""
        scaled, gathered, target = parts
        runs, source = list[Run](), self._send
        if self._scale is not None:
            factor = np.float64(self._factor)
            runs.append(self._scale.bind(blocks(self._count), _ORDERED_THREADS, source, scaled, self._count, factor))
            source = scaled
        runs.append(self._exchange(source, gathered))
        if self._scans:
            exclusive = int(self._name == "exscan")
            if self._mine:
                arguments = gathered, self._mine, target, self._mine, exclusive
                runs.append(self._reduce.bind(blocks(self._mine), _ORDERED_THREADS, *arguments))
            return [*runs, self._distribute_rows(target, exclusive)]
        if self._recv:
            target = self._recv
            if self._name in ("all_reduce", "reduce") and not self._whole:
                target += self._starts[self._route.rank] * self._result
        if self._mine:
            ends = gathered, self._mine, target, self._mine
            runs.append(self._reduce.bind(blocks(self._mine), _ORDERED_THREADS, *ends))
        if not self._whole and self._name in ("all_reduce", "reduce"):
            runs.append(self._distribute(target))
        return runs

    def _exchange(self, source: Any, gathered: int) -> Run:
        route, size = self._route, self._itemsize
        if self._whole:
            return route.bind_collect(source, gathered, self._count * size)
        parts = zip(self._starts, self._counts, strict=True)
        sends = [(source + start * size, count * size) for start, count in parts]
        nbytes = self._mine * size
        return route.bind_exchange(sends, [(gathered + r * nbytes, nbytes) for r in range(route.size)])

    def _distribute(self, target: Any) -> Run:
        """Send the parts of an all_reduce to all ranks, those of a reduce to the root."""
        route, size = self._route, self._result
        if self._name == "all_reduce" and self._count % route.size == 0:
            return route.bind_collect(target, self._recv, self._mine * size)
        mine, none = (target, self._mine * size), (0, 0)
        recvs = self._parts_of_result()
        sends = [mine if self._root in (None, r) else none for r in range(route.size)]
        sends[route.rank] = recvs[route.rank] = none  # already in place
        return route.bind_exchange(sends, recvs)

    def _distribute_rows(self, target: int, exclusive: int) -> Run:
        """Send row r of the part to rank r."""
        nbytes = self._mine * self._result
        sends = [(target + r * nbytes, nbytes if r >= exclusive else 0) for r in range(self._route.size)]
        return self._route.bind_exchange(sends, self._parts_of_result())

    def _parts_of_result(self) -> list[Piece]:
        """The places of the parts of the result on this rank; none if it has no part."""
        if not self._recv:
            return [(0, 0)] * self._route.size
        parts = zip(self._starts, self._counts, strict=True)
        return [(self._recv + start * self._result, count * self._result) for start, count in parts]


def blocks(count: int) -> int:
    return min(-(-count // _ORDERED_THREADS), 1024)


def bind_feed_back(route: Backend, x: Buffer, residual: Buffer, compress: str) -> Plan:
    """The plan of ``compression.feed_back`` on ``x``, which is an array of the launch or in scratch memory."""
    form, count = format_of(route, compress), x.count
    if not count:
        return NOTHING
    with relaxed_capture():
        kernel = route.load(COMPRESSED, "feed_back", RANKS=1, DTYPE=x.dtype.name, OP="SUM", **{form.name.upper(): 1})
        run = kernel.bind(_grid(count, 1), _COMPRESSED_THREADS, x.pointer, residual.pointer, count)
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
    return min(-(-count // (tile(size) * _COMPRESSED_THREADS // 32)), _MOST_BLOCKS)


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
            return self._route.load(COMPRESSED, kernel, RANKS=self._route.size, **self._macros)

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
        return [self._load(name).bind(_grid(count, self._route.size), _COMPRESSED_THREADS, *arguments)]
