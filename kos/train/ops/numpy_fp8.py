"""Products in 8 bits for the numpy dialect: an emulation of what ``kos.train.ops.cuda.fp8`` computes on a GPU.

Formats, rounding and scales are the GPU's, bit by bit. Products of 8-bit numbers are exact in float32, and are added up
in float32; a GPU adds them in another order.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kos.memory.arena import Arena
from kos.train.ops import SCALE_BLOCK as BLOCK
from kos.train.ops import Scaled, scales_shape

Array = np.ndarray
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
    blocks = [-(-size // BLOCK) for size in shape]
    of_each = np.full(blocks, largest.max()) if made.scales.shape == (1,) else largest.reshape(blocks)
    return scales_of(of_each, LARGEST_EXPONENT[made.values.dtype])


def _divide(x: Array, scales: Array) -> None:
    for band, of_band in _bands(x):
        band *= np.repeat(np.float32(1) / scales[of_band], BLOCK)[: band.shape[1]]


def largest_of_blocks(x: Array) -> Array:
    """The largest magnitude of each block of ``x``; not finite if one in it is not."""
    at = [np.arange(0, size, BLOCK) for size in x.shape]
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
    return [(x[start : start + BLOCK], start // BLOCK) for start in range(0, len(x), BLOCK)]


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
    by_row = np.repeat(of_blocks, BLOCK, axis=0)[:n].T
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
        band *= x.scales[of_band] if first else np.repeat(x.scales[of_band], BLOCK)[: band.shape[1]]


def scaled_product(
    a: Scaled, b: Scaled, out: Array, residual: Array | None, bias: Array | None, arena: Arena, rounded: bool = True
) -> None:
    with arena.scope():
        wide = [arena.take(x.values.shape, np.dtype(np.float32)) for x in (a, b)]
        for x, copy in zip((a, b), wide, strict=True):
            widen(x, copy)
        sums = arena.take(out.shape, np.dtype(np.float32))
        np.matmul(wide[0], wide[1].T, out=sums)
        for more in (bias, residual):
            if more is not None:
                np.add(sums, more, out=sums, casting="unsafe")
        if rounded:
            narrow = arena.take(out.shape, BFLOAT16)
            np.copyto(narrow, sums, casting="unsafe")
            np.copyto(sums, narrow)
        np.copyto(out, sums)
