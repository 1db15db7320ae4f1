"""Products in 8 bits for the numpy dialect: an emulation of what ``kos.train.ops.cuda.fp8`` computes on a GPU.

Formats, rounding and scales are the GPU's, bit by bit. Products of 8-bit numbers are exact in float32, and are added up
in float32; a GPU adds them in another order.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kos.memory.arena import Arena

Array = np.ndarray
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LARGEST_EXPONENT = {np.dtype(ml_dtypes.float8_e4m3fn): 8, np.dtype(ml_dtypes.float8_e5m2): 15}
"""Of a format whose largest number is 1.75 times two to this power."""

LEAST_SCALE = -100
"""The least exponent of a scale: that of a tensor of such small numbers that nothing is lost by rounding them to 0."""


def quantize(x: Array, rows: Array | None, columns: Array | None, scale: Array, arena: Arena) -> None:
    form = next(x.dtype for x in (rows, columns) if x is not None)
    with arena.scope():
        rounded, wide = arena.take(x.shape, BFLOAT16), arena.take(x.shape, np.dtype(np.float32))
        np.copyto(rounded, x, casting="unsafe")
        np.copyto(wide, rounded)
        largest = max(float(np.max(wide)), -float(np.min(wide)), 0.0) if np.isfinite(wide).all() else np.nan
        scale[0] = scale_of(largest, LARGEST_EXPONENT[form])
        wide *= np.float32(1) / scale[0]
        for out, values in ((rows, wide), (columns, wide.T)):
            if out is not None:
                np.copyto(out, values, casting="unsafe")


def scale_of(largest: float, exponent: int) -> np.float32:
    """The smallest power of two that brings ``largest`` to at most 1.75 times two to the power of ``exponent``."""
    if not np.isfinite(largest):
        return np.float32(np.nan)
    if largest == 0:
        return np.float32(1)
    bits = int(np.float32(largest).view(np.uint32))
    power = (bits >> 23) - 127 + ((bits & 0x7FFFFF) > 0x600000) - exponent
    return np.float32(2.0 ** max(power, LEAST_SCALE))


def scaled_product(
    a: Array, scale_a: Array, b: Array, scale_b: Array, out: Array, residual: Array | None, bias: Array | None,
    arena: Arena, rounded: bool = True,
) -> None:  # fmt: skip
    with arena.scope():
        wide = [arena.take(x.shape, np.dtype(np.float32)) for x in (a, b)]
        for x, copy in zip((a, b), wide, strict=True):
            np.copyto(copy, x)
        sums = arena.take(out.shape, np.dtype(np.float32))
        np.matmul(wide[0], wide[1].T, out=sums)
        sums *= scale_a[0] * scale_b[0]
        for more in (bias, residual):
            if more is not None:
                np.add(sums, more, out=sums, casting="unsafe")
        if rounded:
            narrow = arena.take(out.shape, BFLOAT16)
            np.copyto(narrow, sums, casting="unsafe")
            np.copyto(sums, narrow)
        np.copyto(out, sums)
