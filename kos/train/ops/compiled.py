"""The operations of the compiled core: one pass over memory each, in float32, on several threads.

``kos.train.ops.numpy`` tries them first. Each returns False, and has done nothing, if there is no core, or if the core
does not take these arrays. Attention to others and LayerNorm are NumPy's alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kos import _core
from kos.memory.arena import Arena
from kos.train.ops import Attend, Normalize

Array = np.ndarray
native: Any = _core.native if hasattr(_core.native, "kernels") else None
KERNELS: tuple[str, ...] = native.kernels("") if native else ()
"""The instruction sets for which this CPU has kernels, the fastest last."""

NO_MASK = np.empty(0, np.int32)

if native:
    native.kernels(KERNELS[-1])


def use_threads(count: int) -> None:
    """How many threads an operation uses. Its bits do not depend on it."""
    if native:
        native.threads(count)


def normalize(x: Array, norm: Normalize, out: Array, rstd: Array) -> bool:
    return bool(native) and native.rms_norm(x, norm.weight, out, rstd, norm.eps)


def normalize_backward(
    d_out: Array, x: Array, norm: Normalize, rstd: Array, dx: Array, d_weight: Array, accumulate: bool, arena: Arena
) -> bool:
    if not native:
        return False
    count, width = x.shape
    with arena.scope():
        sums = arena.take((-(-count // native.ROWS_OF_TASK), width), x.dtype)
        if not native.rms_norm_backward(d_out, x, norm.weight, rstd, dx, sums):
            return False
        if accumulate:
            d_weight += sums.sum(axis=0)
        else:
            np.sum(sums, axis=0, out=d_weight)
    return True


def rope(qkv: Array, tables: tuple[Array, Array], heads: int, sign: float) -> bool:
    cos, sin = tables
    return bool(native) and native.rope(qkv.T, cos.T, sin.T, heads, sign)


def swiglu(gates: Array, ups: Array, out: Array) -> bool:
    return bool(native) and native.swiglu(gates, ups, out)


def swiglu_backward(gates: Array, ups: Array, d_out: Array, d_gates: Array, d_ups: Array) -> bool:
    return bool(native) and native.swiglu_backward(gates, ups, d_out, d_gates, d_ups)


def cross_entropy(logits: Array, targets: Array, count: Array | None, losses: Array) -> bool:
    share = 0.0 if count is None else 1 / float(count[0])
    return bool(native) and native.cross_entropy(logits, targets, losses, share, count is not None)


def attention(a: Attend) -> bool:
    return _taken(a) and native.attention(a.qkv.T, a.out.T, a.log_sum_exp, _first(a), *a.shape, a.scale)


def attention_backward(a: Attend, d_out: Array, d_qkv: Array) -> bool:
    return _taken(a) and native.attention_backward(
        a.qkv.T, a.out.T, a.log_sum_exp, _first(a), d_out.T, d_qkv.T, *a.shape, a.scale
    )


def _taken(a: Attend) -> bool:
    if a.mask is not None:
        a.mask.check(len(a.log_sum_exp), a.length)
    return bool(native) and a.kv is None


def _first(a: Attend) -> Array:
    return NO_MASK if a.mask is None else a.mask.first_key


def adamw(weights: Array, gradient: Array, moments: Any, factors: tuple[float, ...]) -> bool:
    return bool(native) and native.adamw(gradient, weights, *moments, *factors)
