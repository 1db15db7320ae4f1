"""Operations on CPUs over rows and blocks: norms, products in 8 bits, and what all operations share.

They share memory by columns, blocks that stay in the cache, and sums by matrix products.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from kos.errors import InvalidArgument
from kos.memory.arena import Arena
from kos.train.ops import SCALE_BLOCK, Normalize, Scaled, compiled, scales_shape
from kos.train.ops.threads import matmul

Array = np.ndarray
BLOCK = 32_768  # elements of a cache-sized block: three of them in fp32 are 384 KiB, within an L2


def empty_columns(arena: Arena, rows: int, columns: int, dtype: Any) -> Array:
    return arena.take((columns, rows), dtype).T


def blocks(size: int, width: int = 1) -> Iterator[slice]:
    """Slices of ``size`` rows of ``width`` elements, each of about ``BLOCK`` elements."""
    step = max(1, BLOCK // width)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def take_block(arena: Arena, dtype: Any) -> Array:
    """Scratch memory of one block."""
    return arena.take((BLOCK,), dtype)


def columns(x: Array) -> Array:
    """An array of ``empty_columns`` as it lies in memory: (columns, rows), contiguous."""
    memory = x.T
    if not memory.flags.c_contiguous:
        raise InvalidArgument(f"expected an array of empty_columns, got strides {x.strides} of shape {x.shape}")
    return memory


def of_rows(x: Array) -> Array:
    """An array of ``empty_columns``, or some of its rows, as it lies in memory: (columns, rows), each contiguous."""
    memory = x.T
    if len(x) > 1 and memory.strides[1] != x.itemsize:
        raise InvalidArgument(f"expected rows of an array of empty_columns, got strides {x.strides} of shape {x.shape}")
    return memory


def multiply(a: Array, b: Array, out: Array, accumulate: bool, arena: Arena) -> None:
    """out = a b, or added to it."""
    with arena.scope():
        fresh = arena.take(out.shape, out.dtype) if accumulate else out
        matmul(a, b, fresh)
        if accumulate:
            np.add(out, fresh, out=out)


def add_tree(terms: Array, out: Array) -> None:
    """out = ((t0 + t1) + (t2 + t3)) + …, of as many ``terms`` as a power of two, which are overwritten."""
    while len(terms) > 2:
        np.add(terms[0::2], terms[1::2], out=terms[0::2])
        terms = terms[0::2]
    if len(terms) == 2:
        np.add(terms[0], terms[1], out=out)
    else:
        np.copyto(out, terms[0])


def sum_rows(x: Array, out: Array, accumulate: bool, arena: Arena) -> None:
    multiply(ones(len(x), x.dtype), x, out[None], accumulate, arena)  # a sum, at BLAS's speed


@functools.lru_cache(maxsize=64)
def ones(size: int, dtype: np.dtype) -> Array:
    return np.ones((1, size), dtype)


# --- norms: of rows (RMSNorm, LayerNorm), and of the heads of q and k ----------------------------------


def _reciprocal_rms(x: Array, eps: float, out: Array) -> None:
    np.vecdot(x, x, out=out)
    out *= 1 / x.shape[-1]
    out += eps
    np.sqrt(out, out=out)
    np.reciprocal(out, out=out)


def normalize(x: Array, norm: Normalize, out: Array, statistics: Array) -> None:
    if norm.bias is not None or not compiled.normalize(x, norm, out, statistics):
        (_rms_norm if norm.bias is None else _layer_norm)(x, norm, out, statistics)


def normalize_backward(
    d_out: Array, x: Array, norm: Normalize, statistics: Array, dx: Array, d_weight: Array, accumulate: bool,
    arena: Arena, d_bias: Array | None = None,
) -> None:  # fmt: skip
    if d_bias is None:
        arguments = d_out, x, norm, statistics, dx, d_weight, accumulate, arena
        if not compiled.normalize_backward(*arguments):
            _rms_norm_backward(*arguments)
    else:
        _layer_norm_backward(d_out, x, norm, statistics, dx, d_weight, d_bias, accumulate, arena)


def _rms_norm(x: Array, norm: Normalize, out: Array, rstd: Array) -> None:
    _reciprocal_rms(x, norm.eps, rstd)
    scale = norm.weight
    for rows in blocks(*x.shape):
        np.multiply(x[rows], scale, out=out[rows])
        out[rows] *= rstd[rows, None]


def _rms_norm_backward(
    d_out: Array, x: Array, norm: Normalize, rstd: Array, dx: Array, d_weight: Array, accumulate: bool, arena: Arena
) -> None:
    """With p = d_out x: d_weight = rstd^T p, and mean(d_out scale x rstd) = rstd (p scale) / D."""
    (rows_count, width), scale = x.shape, norm.weight
    with arena.scope():
        product = arena.take(x.shape, x.dtype)
        slope = arena.take((rows_count,), x.dtype)
        np.multiply(d_out, x, out=product)
        np.matmul(product, scale, out=slope)
        slope *= rstd
        slope *= rstd
        slope *= -1 / width
        multiply(rstd, product, d_weight, accumulate, arena)
        for rows in blocks(rows_count, width):  # dx += rstd (d_out scale + slope x)
            g, t = d_out[rows], product[rows]
            g *= scale
            np.multiply(x[rows], slope[rows, None], out=t)
            g += t
            g *= rstd[rows, None]
            dx[rows] += g


def _layer_norm(x: Array, norm: Normalize, out: Array, statistics: Array) -> None:
    (rstd, mean), scale = statistics, norm.weight
    np.mean(x, axis=1, out=mean)
    np.subtract(x, mean[:, None], out=out)
    _reciprocal_rms(out, norm.eps, rstd)
    for rows in blocks(*x.shape):
        out[rows] *= rstd[rows, None]
        out[rows] *= scale
        out[rows] += norm.bias


def _layer_norm_backward(
    d_out: Array, x: Array, norm: Normalize, statistics: Array, dx: Array, d_weight: Array, d_bias: Array,
    accumulate: bool, arena: Arena,
) -> None:  # fmt: skip
    (rstd, mean), scale = statistics, norm.weight
    width = x.shape[-1]
    with arena.scope():
        normed = arena.take(x.shape, x.dtype)
        product = arena.take(x.shape, x.dtype)
        shift = arena.take(rstd.shape, x.dtype)
        slope = arena.take(rstd.shape, x.dtype)
        np.subtract(x, mean[:, None], out=normed)
        normed *= rstd[:, None]
        np.multiply(d_out, normed, out=product)
        sum_rows(product, d_weight, accumulate, arena)
        sum_rows(d_out, d_bias, accumulate, arena)
        np.matmul(product, scale, out=slope)
        np.matmul(d_out, scale, out=shift)
        for rows in blocks(*x.shape):  # dx += rstd (d_out scale - mean(…) - normed mean(… normed))
            g = d_out[rows]
            g *= scale
            g -= shift[rows, None] / width
            normed[rows] *= slope[rows, None] / width
            g -= normed[rows]
            g *= rstd[rows, None]
            dx[rows] += g


def head_norm(x: Array, norm: Normalize, heads: slice, raw: Array) -> None:
    scale = norm.weight[:, None]
    for head, kept in zip(*(_heads(each, len(scale), heads) for each in (x, raw)), strict=True):
        np.copyto(kept, head)
        head *= _head_rstd(kept, norm.eps)
        head *= scale


def head_norm_backward(
    raw: Array, norm: Normalize, heads: slice, dx: Array, d_weight: Array, accumulate: bool, arena: Arena
) -> None:
    """With n = raw rstd: dx = rstd (dx scale - n mean(dx scale n)), d_weight = the sum of dx n."""
    scale = norm.weight[:, None]
    if not accumulate:
        d_weight.fill(0)
    for d, kept in zip(*(_heads(each, len(scale), heads) for each in (dx, raw)), strict=True):
        rstd = _head_rstd(kept, norm.eps)
        normed = kept * rstd
        d_weight += (d * normed).sum(axis=1)
        d *= scale
        d -= normed * (d * normed).mean(axis=0)
        d *= rstd


def _heads(x: Array, size: int, heads: slice) -> Array:
    """These heads of (N, n d) of ``empty_columns``, or of some of its rows, seen as (heads, d, N)."""
    return x.T[heads.start * size : heads.stop * size].reshape(-1, size, len(x))


def _head_rstd(head: Array, eps: float) -> Array:
    return 1 / np.sqrt((head * head).mean(axis=0) + head.dtype.type(eps))


# --- products in 8 bits -------------------------------------------------------------------------------
# An emulation of what ``kos.train.ops.cuda.fp8`` computes on a GPU: formats, rounding and scales are the GPU's, bit by
# bit. Products of 8-bit numbers are exact in float32, and are added up in float32; a GPU adds them in another order.

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LARGEST_EXPONENT = {np.dtype(ml_dtypes.float8_e4m3fn): 8, np.dtype(ml_dtypes.float8_e5m2): 15}
"""Of a format whose largest number is 1.75 times two to this power."""

LEAST_SCALE = -100
"""The least exponent of a scale: that of a block of such small numbers that nothing is lost by rounding them to 0."""


def quantize(x: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena) -> None:
    made = next(made for made in (rows, columns) if made is not None)
    with arena.scope():
        wide = _rounded(x, arena)
        scales = _scales(largest_of_blocks(wide), x.shape, made)
        _divide(wide, scales)
        for out, values, of_blocks in ((rows, wide, scales), (columns, wide.T, scales.T)):
            if out is not None:
                np.copyto(out.values, values, casting="unsafe")
                _put(of_blocks, out)


def _rounded(x: Array, arena: Arena) -> Array:
    rounded, wide = arena.take(x.shape, BFLOAT16), arena.take(x.shape, np.dtype(np.float32))
    np.copyto(rounded, x, casting="unsafe")
    np.copyto(wide, rounded)
    return wide


def _scales(largest: Array, shape: tuple[int, ...], made: Scaled) -> Array:
    """The scales of a matrix's blocks by their ``largest``; of all the same, if that is how they are ``made``."""
    blocks = [-(-size // SCALE_BLOCK) for size in shape]
    of_each = np.full(blocks, largest.max()) if made.scales.shape == (1,) else largest.reshape(blocks)
    return scales_of(of_each, LARGEST_EXPONENT[made.values.dtype])


def _divide(x: Array, scales: Array) -> None:
    for band, of_band in _bands(x):
        band *= np.repeat(np.float32(1) / scales[of_band], SCALE_BLOCK)[: band.shape[1]]


def largest_of_blocks(x: Array) -> Array:
    """The largest magnitude of each block of ``x``; not finite if one in it is not."""
    at = [np.arange(0, size, SCALE_BLOCK) for size in x.shape]
    most, least = (
        of.reduceat(of.reduceat(x, at[0], axis=0), at[1], axis=1) for of in (np.maximum, np.minimum)
    )  # fmt: skip
    return np.maximum(most, -least)


def scales_of(largest: Array, exponent: int) -> Array:
    """The smallest powers of two that bring each of ``largest`` to at most 1.75 times two to the power ``exponent``."""
    bits = largest.astype(np.float32).view(np.int32)
    power = (bits >> 23) - 127 + ((bits & 0x7FFFFF) > 0x600000) - exponent
    scales = np.ldexp(np.float32(1), np.maximum(power, LEAST_SCALE))
    scales[largest == 0] = 1
    scales[~np.isfinite(largest)] = np.nan
    return scales


def _bands(x: Array) -> list[tuple[Array, int]]:
    """The rows of ``x`` of each row of blocks, and its number."""
    return [(x[start : start + SCALE_BLOCK], start // SCALE_BLOCK) for start in range(0, len(x), SCALE_BLOCK)]


def _put(of_blocks: Array, out: Scaled) -> None:
    """The scales of a matrix's blocks, as its operand has them."""
    (n, k), scales = out.values.shape, out.scales
    if scales.shape == (1,):
        scales[0] = of_blocks[0, 0]
        return
    if scales.shape == scales_shape(n, k, first=False):
        scales[...] = 1
        scales[:, : of_blocks.shape[1]] = of_blocks
        return
    by_row = np.repeat(of_blocks, SCALE_BLOCK, axis=0)[:n].T
    parts = scales.shape[0] if scales.ndim == 3 else 1
    scales[...] = by_row.reshape(len(by_row), parts, -1).swapaxes(0, 1).reshape(scales.shape)


def widen(x: Scaled, out: Array) -> None:
    """out (N, K), float32, = the numbers of a first operand, whose rows are of one part, or of a second."""
    np.copyto(out, x.values)
    if x.scales.shape == (1,):
        out *= x.scales
        return
    (n, k) = x.values.shape
    first = x.scales.shape == scales_shape(n, k, first=True)
    for band, of_band in _bands(out.T if first else out):
        band *= x.scales[of_band] if first else np.repeat(x.scales[of_band], SCALE_BLOCK)[: band.shape[1]]


def scaled_product(
    a: Scaled, b: Scaled, out: Array, residual: Array | None, bias: Array | None, arena: Arena, rounded: bool = True
) -> None:
    with arena.scope():
        wide = [arena.take(x.values.shape, np.dtype(np.float32)) for x in (a, b)]
        for x, copy in zip((a, b), wide, strict=True):
            widen(x, copy)
        sums = arena.take(out.shape, np.dtype(np.float32))
        matmul(wide[0], wide[1].T, sums)
        for more in (bias, residual):
            if more is not None:
                np.add(sums, more, out=sums, casting="unsafe")
        if rounded:
            narrow = arena.take(out.shape, BFLOAT16)
            np.copyto(narrow, sums, casting="unsafe")
            np.copyto(sums, narrow)
        np.copyto(out, sums)
