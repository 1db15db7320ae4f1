"""Norms on a GPU: of rows (RMSNorm, LayerNorm), of the heads of q and k, and the sums over rows that they share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kos.dtypes import DTYPES
from kos.errors import InvalidArgument
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops import Normalize
from kos.train.ops.cuda.cublaslt import row_of

BLOCK = 256  # threads of an elementwise block
WARP_HEAD = 512  # elements of a row of which a warp has 16 a lane
FLOAT32 = DTYPES["float32"]


class NormOps:
    """The norms of ``CudaOps``, which launches their kernels."""

    multiprocessors: int
    launch: Any

    def sum_rows(self, x: Array, out: Array, accumulate: bool, arena: Arena) -> None:
        rows, columns = x.shape
        row = row_of(x)
        width = access_width(math.gcd(columns, row), x)
        across = -(-columns // (32 * width))
        blocks = max(1, min(-(-rows // 8), 4 * self.multiprocessors // across))
        with arena.scope():
            partial = arena.take((blocks, columns), FLOAT32)
            self.launch(
                "sums.cu", "sum_rows", (across, blocks), 256, x, row, partial, rows,
                DTYPE=x.dtype.name, WIDTH=width, COLUMNS=columns, GRADIENT="float32", ACCUMULATE=0,
            )  # fmt: skip
            self._add_partials(partial, 0, out, x, accumulate)

    def normalize(self, x: Array, norm: Normalize, out: Array | None, statistics: Array) -> None:
        """``Ops.normalize``. Without ``out`` it writes the statistics alone."""
        (rows, columns), weight = x.shape, norm.weight
        bias = weight if norm.bias is None else norm.bias
        width = access_width(columns, x, weight, bias, x if out is None else out)
        threads = _row_threads(columns, width, 32)
        together = max(1, BLOCK // threads)
        self._norms(
            "norm_forward", x, -(-rows // together), threads * together,
            x, weight, bias, np.float32(norm.eps), 0 if out is None else out, statistics, rows,
            WIDTH=width, THREADS=threads, ROWS=together, CENTERED=int(norm.bias is not None),
        )  # fmt: skip

    def normalize_backward(
        self, d_out: Array, x: Array, norm: Normalize, statistics: Array, dx: Array, d_weight: Array, accumulate: bool,
        arena: Arena, d_bias: Array | None = None,
    ) -> None:  # fmt: skip
        (rows, columns), gradients = x.shape, [d_weight, *([] if d_bias is None else [d_bias])]
        width = access_width(columns, x, d_out, norm.weight, dx)
        threads = _row_threads(columns, width, 16)
        # One block on each multiprocessor, of at most 15 barriers and 48 KiB of shared memory.
        most = 768 if threads * width >= columns else 512  # a thread with one access needs few registers
        together = max(1, min(most // threads, 12_288 // columns, 15))
        blocks = min(-(-rows // together), self.multiprocessors)
        with arena.scope():
            partial = arena.take((blocks, len(gradients) * columns), FLOAT32)
            self._norms(
                "norm_backward", x, blocks, threads * together, d_out, x, norm.weight, statistics, dx, partial, rows,
                WIDTH=width, THREADS=threads, ROWS=together, CENTERED=len(gradients) - 1,
            )  # fmt: skip
            for index, gradient in enumerate(gradients):
                self._add_partials(partial, index, gradient, x, accumulate)

    def _add_partials(self, partial: Array, index: int, out: Array, x: Array, accumulate: bool) -> None:
        """out (D,) = or += the sum of the rows of part ``index`` of ``partial`` (blocks, parts D)."""
        blocks, stride = partial.shape
        at = partial.pointer + 4 * index * out.size
        self.launch(
            "sums.cu", "sum_partials", -(-out.size // 32), 256, at, stride, blocks, out,
            DTYPE=x.dtype.name, WIDTH=1, COLUMNS=out.size, GRADIENT=out.dtype.name, ACCUMULATE=int(accumulate),
        )  # fmt: skip

    def _norms(self, name: str, x: Array, grid: Any, block: int, *arguments: Any, **defines: int) -> None:
        columns = x.shape[1]
        self.launch("norms.cu", name, grid, block, *arguments, DTYPE=x.dtype.name, COLUMNS=columns, **defines)

    def head_norm(self, x: Array, norm: Normalize, heads: slice, raw: Array) -> None:
        d, itemsize = len(norm.weight), x.dtype.itemsize
        first, count = heads.start * d * itemsize, len(x) * (heads.stop - heads.start)
        together = BLOCK // _head_threads(d)
        if count:
            self.launch(
                "head_norm.cu", "head_norm", -(-count // together), BLOCK, x.pointer + first, norm.weight,
                np.float32(norm.eps), raw.pointer + first, heads.stop - heads.start, count,
                **self._of_heads(x, norm, raw),
            )  # fmt: skip

    def head_norm_backward(
        self, raw: Array, norm: Normalize, heads: slice, dx: Array, d_weight: Array, accumulate: bool, arena: Arena
    ) -> None:
        d, itemsize = len(norm.weight), raw.dtype.itemsize
        first, count = heads.start * d * itemsize, len(raw) * (heads.stop - heads.start)
        blocks = max(1, min(-(-count // (BLOCK // _head_threads(d))), 4 * self.multiprocessors))
        with arena.scope():
            partial = arena.take((blocks, d), FLOAT32)
            self.launch(
                "head_norm.cu", "head_norm_backward", blocks, BLOCK, raw.pointer + first, norm.weight,
                np.float32(norm.eps), dx.pointer + first, partial, heads.stop - heads.start, count,
                **self._of_heads(dx, norm, raw),
            )  # fmt: skip
            self._add_partials(partial, 0, d_weight, raw, accumulate)

    def _of_heads(self, x: Array, norm: Normalize, raw: Array) -> dict[str, Any]:
        threads = _head_threads(head_dim := len(norm.weight))
        return {
            "DTYPE": x.dtype.name, "COLUMNS": head_dim, "ROW": x.shape[1], "RAW": raw.shape[1], "THREADS": threads,
            "HEADS": BLOCK // threads,
        }  # fmt: skip


def access_width(columns: int, first: Array, *others: Array) -> int:
    """Elements of one access: 16 bytes of the dtype of ``first``, or 1 where rows or addresses do not allow it."""
    for array in (first, *others):
        if array.device != first.device:
            raise InvalidArgument(f"expected arrays on cuda:{first.device}, got {array}")
    wide = 16 // first.dtype.itemsize
    aligned = columns % wide == 0 and all(array.pointer % 16 == 0 for array in (first, *others))
    return wide if aligned else 1


def _head_threads(head_dim: int) -> int:
    """Those of a head of ``head_norm.cu``: a warp, as long as that keeps it in registers, or a block."""
    return 32 if head_dim <= WARP_HEAD else BLOCK


def _row_threads(columns: int, width: int, most: int) -> int:
    """Threads that share a row: whole warps, at most a block, with the fewest idle.

    None holds over ``most`` elements, if a block can do it; of equals, the one with more elements a thread.
    """
    accesses = -(-columns // width)

    def threads(each: int) -> int:
        return min(1024, -(-accesses // (32 * each)) * 32)

    choices = range(max(1, most // width), 0, -1)
    return threads(min(choices, key=lambda each: threads(each) * each - accesses))
