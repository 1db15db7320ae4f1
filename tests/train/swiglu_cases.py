"""SwiGLU's backward within a product, on the GPU and on an emulated one: the bits of both apart."""

from typing import Any

import ml_dtypes
import numpy as np

from kos.memory.array import Array

SHAPES = [(128, 256, 64), (200, 320, 136), (64, 64, 8), (300, 192, 200)]  # tokens, features, columns of d_out


def operands(rng: np.random.Generator, ops: Any, n: int, f: int, d: int) -> tuple[list[Array], Array]:
    """d_out, weight and gate_up, and the product of the first two: of small integers, so that it is exact."""
    d_out, weight = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((n, d), (d, f)))
    arrays = d_out, weight, rng.standard_normal((n, 2 * f)), d_out @ weight
    *given, d_inner = (Array.from_numpy(x.astype(ml_dtypes.bfloat16), 0, stream=ops.stream) for x in arrays)
    return given, d_inner


def check(rng: np.random.Generator, ops: Any, shape: tuple[int, int, int]) -> None:
    (d_out, weight, gate_up), d_inner = operands(rng, ops, *shape)
    n, columns = gate_up.shape
    fused, apart = (
        Array.from_numpy(np.full((n + 1, columns), np.nan, ml_dtypes.bfloat16), 0, stream=ops.stream) for _ in range(2)
    )
    ops.linear_swiglu_backward(d_out, weight, gate_up, fused[:n], ops.make_arena())
    ops.swiglu_backward(d_inner, gate_up, None, apart[:n], ops.make_arena())
    got, expected = (np.asarray(x.numpy()).view(np.uint16) for x in (fused, apart))
    np.testing.assert_array_equal(got, expected)
