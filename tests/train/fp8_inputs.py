"""Matrices for operations in 8 bits: random and hostile ones, and what is nearest to them in a format."""

import ml_dtypes
import numpy as np

FORMATS = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The largest number of each."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KINDS = (
    "normal", "outliers", "zeros", "one sign", "denormals", "spread", "huge", "edge", "above the edge", "one", "ties",
)  # fmt: skip


def matrix(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Numbers of bfloat16, as float32."""
    x = rng.normal(size=shape)
    if kind == "outliers":
        x.flat[rng.integers(0, x.size, 7)] = 1e4 * rng.choice([-1, 1], 7)
    elif kind == "zeros":
        x[:] = rng.choice([-0.0, 0.0], shape)
    elif kind == "one sign":
        x[:] = -np.abs(x)
    elif kind == "denormals":
        x *= 1e-39
    elif kind == "spread":
        x *= 10.0 ** rng.integers(-30, 8, shape)
    elif kind == "huge":
        x *= 1e37
    elif kind in ("edge", "above the edge"):  # the largest is 1.75 times a power of two, or the next number after that
        x[:] = rng.uniform(-1.7, 1.7, shape)
        x[-1, -1] = -1.75 if kind == "edge" else -1.7578125
    elif kind == "one":
        x[:] = 0
        x[shape[0] // 2, shape[1] // 3] = 3.0
    elif kind == "ties":  # between two numbers of both formats
        x[:] = rng.integers(-64, 64, shape) / 32 + 1 / 64
    return x.astype(BFLOAT16).astype(np.float32)


def nearest(x: np.ndarray, form: str) -> np.ndarray:
    """Of the finite numbers of a format the nearest to each of ``x``; of two, the one whose last bit is 0."""
    codes = np.arange(128, dtype=np.uint8)
    values = codes.view(np.dtype(getattr(ml_dtypes, form))).astype(np.float64)
    codes, values = codes[np.isfinite(values)], values[np.isfinite(values)]
    size = np.abs(x.astype(np.float64))
    above = np.minimum(np.searchsorted(values, size), len(values) - 1)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - size, size - values[below]
    chosen = np.where((up < down) | ((up == down) & (codes[above] % 2 == 0)), above, below)
    return np.copysign(values[chosen], x)
