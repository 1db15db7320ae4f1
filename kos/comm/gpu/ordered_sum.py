"""Reductions that add in rank order: an exchange, a kernel of kos, and a second exchange that distributes the result.

The vector is split into a part for each rank.  Every rank sends part r of its contribution to rank r, which adds
the contributions in rank order (fp32 for floats of 16 and 8 bits) and rounds once.  The bytes sent are those of a
ring.  Small vectors are gathered whole on every rank, and every rank adds all of them.  In a scan rank r makes row r'
of its part for each rank r', the sum over the ranks up to r', and sends it there.  ``peer`` has kernels for most
reductions, and uses this for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kos.comm.contract import Backend, Piece
from kos.comm.gpu.memory import in_scratch
from kos.comm.operation import Operation
from kos.cuda import Kernel
from kos.cuda.driver import relaxed_capture
from kos.cuda.kernels import Plan
from kos.dtypes import DTYPES
from kos.memory.windows import Run

KERNELS = Path(__file__).with_name("kernels") / "reduce_ordered.cu"

_ONE_SHOT_BYTES = 1 << 20
"""The largest total of all ranks' vectors that is gathered on every rank: one exchange instead of two."""
THREADS = 256
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
            return self._route.load(KERNELS, kernel, RANKS=self._route.size, **macros)

    def _bind(self, parts: Sequence[int]) -> list[Run]:
        """Scale, exchange, add, distribute."""
        scaled, gathered, target = parts
        runs, source = list[Run](), self._send
        if self._scale is not None:
            factor = np.float64(self._factor)
            runs.append(self._scale.bind(blocks(self._count), THREADS, source, scaled, self._count, factor))
            source = scaled
        runs.append(self._exchange(source, gathered))
        if self._scans:
            exclusive = int(self._name == "exscan")
            if self._mine:
                arguments = gathered, self._mine, target, self._mine, exclusive
                runs.append(self._reduce.bind(blocks(self._mine), THREADS, *arguments))
            return [*runs, self._distribute_rows(target, exclusive)]
        if self._recv:
            target = self._recv
            if self._name in ("all_reduce", "reduce") and not self._whole:
                target += self._starts[self._route.rank] * self._result
        if self._mine:
            runs.append(self._reduce.bind(blocks(self._mine), THREADS, gathered, self._mine, target, self._mine))
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
    return min(-(-count // THREADS), 1024)
