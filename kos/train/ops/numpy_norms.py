"""Norms on CPUs: of rows (RMSNorm, LayerNorm), and of the heads of q and k."""

from __future__ import annotations

import numpy as np

from kos.memory.arena import Arena
from kos.train.ops.numpy_blocks import Array, blocks, multiply, sum_rows


def _reciprocal_rms(x: Array, eps: float, out: Array) -> None:
    np.vecdot(x, x, out=out)
    out *= 1 / x.shape[-1]
    out += eps
    np.sqrt(out, out=out)
    np.reciprocal(out, out=out)


def rms_norm(x: Array, weight: Array, eps: float, out: Array, rstd: Array) -> None:
    _reciprocal_rms(x, eps, rstd)
    for rows in blocks(*x.shape):
        np.multiply(x[rows], weight, out=out[rows])
        out[rows] *= rstd[rows, None]


def rms_norm_backward(
    d_out: Array, x: Array, weight: Array, rstd: Array, dx: Array, d_weight: Array, accumulate: bool, arena: Arena
) -> None:
    """With p = d_out x: d_weight = rstd^T p, and mean(d_out weight x rstd) = rstd (p weight) / D."""
    rows_count, width = x.shape
    with arena.scope():
        product = arena.take(x.shape, x.dtype)
        slope = arena.take((rows_count,), x.dtype)
        np.multiply(d_out, x, out=product)
        np.matmul(product, weight, out=slope)
        slope *= rstd
        slope *= rstd
        slope *= -1 / width
        multiply(rstd, product, d_weight, accumulate, arena)
        for rows in blocks(rows_count, width):  # dx += rstd (d_out weight + slope x)
            g, t = d_out[rows], product[rows]
            g *= weight
            np.multiply(x[rows], slope[rows, None], out=t)
            g += t
            g *= rstd[rows, None]
            dx[rows] += g


def layer_norm(x: Array, weight: Array, bias: Array, eps: float, out: Array, statistics: Array) -> None:
    rstd, mean = statistics
    np.mean(x, axis=1, out=mean)
    np.subtract(x, mean[:, None], out=out)
    _reciprocal_rms(out, eps, rstd)
    for rows in blocks(*x.shape):
        out[rows] *= rstd[rows, None]
        out[rows] *= weight
        out[rows] += bias


def layer_norm_backward(
    d_out: Array, x: Array, weight: Array, statistics: Array, dx: Array, d_weight: Array, d_bias: Array,
    accumulate: bool, arena: Arena,
) -> None:  # fmt: skip
    rstd, mean = statistics
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
        np.matmul(product, weight, out=slope)
        np.matmul(d_out, weight, out=shift)
        for rows in blocks(*x.shape):  # dx += rstd (d_out weight - mean(…) - normed mean(… normed))
            g = d_out[rows]
            g *= weight
            g -= shift[rows, None] / width
            normed[rows] *= slope[rows, None] / width
            g -= normed[rows]
            g *= rstd[rows, None]
            dx[rows] += g


def head_norm(x: Array, weight: Array, eps: float, heads: slice, raw: Array) -> None:
    for head, kept in zip(*(_heads(each, len(weight), heads) for each in (x, raw)), strict=True):
        np.copyto(kept, head)
        head *= _head_rstd(kept, eps)
        head *= weight[:, None]


def head_norm_backward(
    raw: Array, weight: Array, eps: float, heads: slice, dx: Array, d_weight: Array, accumulate: bool, arena: Arena
) -> None:
    """With n = raw rstd: dx = rstd (dx weight - n mean(dx weight n)), d_weight = the sum of dx n."""
    if not accumulate:
        d_weight.fill(0)
    for d, kept in zip(*(_heads(each, len(weight), heads) for each in (dx, raw)), strict=True):
        rstd = _head_rstd(kept, eps)
        normed = kept * rstd
        d_weight += (d * normed).sum(axis=1)
        d *= weight[:, None]
        d -= normed * (d * normed).mean(axis=0)
        d *= rstd


def _heads(x: Array, size: int, heads: slice) -> Array:
    """These heads of (N, n d) of ``empty_columns``, or of some of its rows, seen as (heads, d, N)."""
    return x.T[heads.start * size : heads.stop * size].reshape(-1, size, len(x))


def _head_rstd(head: Array, eps: float) -> Array:
    return 1 / np.sqrt((head * head).mean(axis=0) + head.dtype.type(eps))
