"""The numpy dialect of ``kos.train.ops``: the reference, and the implementation for training on CPUs.

Three habits make it fast.  Arrays that are split by columns (heads, gate and up) have contiguous tokens
(``empty_columns``).  So the halves of a rotation, the statistics of a softmax and every operand of a matrix
product are long contiguous rows, and BLAS copies nothing.  Elementwise chains run over blocks that stay in
the cache.  Nothing is allocated: outputs are given, and scratch memory comes from the arena.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kos.errors import InvalidArgument
from kos.memory.arena import Arena
from kos.train.ops import LEAST_NORM, NEWTON_SCHULZ, Batch, Normalize, Scaled, compiled, of_function
from kos.train.ops.numpy_attention import add_keys_and_values as add_keys_and_values
from kos.train.ops.numpy_attention import append_to_cache as append_to_cache
from kos.train.ops.numpy_attention import attention as attention
from kos.train.ops.numpy_attention import attention_backward as attention_backward
from kos.train.ops.numpy_attention import attention_mask as attention_mask
from kos.train.ops.numpy_attention import attention_to_cache as attention_to_cache
from kos.train.ops.numpy_attention import empty_cache as empty_cache
from kos.train.ops.numpy_attention import keys_and_values as keys_and_values
from kos.train.ops.numpy_blocks import Array, blocks, columns, multiply, take_block
from kos.train.ops.numpy_blocks import add_tree as add_tree
from kos.train.ops.numpy_blocks import empty_columns as empty_columns
from kos.train.ops.numpy_blocks import head_norm as head_norm
from kos.train.ops.numpy_blocks import head_norm_backward as head_norm_backward
from kos.train.ops.numpy_blocks import normalize as normalize
from kos.train.ops.numpy_blocks import normalize_backward as normalize_backward
from kos.train.ops.numpy_blocks import quantize as quantize
from kos.train.ops.numpy_blocks import scaled_product as scaled_product
from kos.train.ops.numpy_blocks import sum_rows as sum_rows
from kos.train.ops.numpy_optimizer import launch as launch
from kos.train.ops.numpy_optimizer import update as update
from kos.train.ops.threads import matmul

IGNORE = -1  # the target that is left out of the loss
few_rows = 1
one_scale = False
multiprocessors, matrix_batch = 1, 0
overlap_rows: int | None = None  # collectives of CPUs take the cores that compute


zeros = np.zeros


def make_arena() -> Arena:
    return Arena()


@contextmanager
def step(arena: Arena) -> Iterator[None]:
    with np.errstate(all="ignore"):
        try:
            yield
        finally:
            arena.release(0)


def replayable(work: Callable[[], None]) -> Callable[[], None]:
    work()
    return work


def statistics_dtype(dtype: Any) -> Any:
    return dtype


def indices(source: Array, arena: Arena) -> Array:
    return source


def copy(source: Array, out: Array) -> None:
    np.copyto(out, source)


def to_host(array: Array) -> np.ndarray:
    return array.copy()


def zero(out: Array) -> None:
    out.fill(0)


def add(a: Array, b: Array, out: Array) -> None:
    np.add(a, b, out=out)


# --- embedding ---------------------------------------------------------------------------------------


def embedding(tokens: Array, table: Array, out: Array, first: int | None = None) -> None:
    if first is not None:
        here = (first <= tokens) & (tokens < first + len(table))
        np.take(table, np.where(here, tokens - first, 0), axis=0, out=out, mode="clip")
        out[~here] = 0
        return
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < len(table):
        raise InvalidArgument(
            f"embedding: expected tokens from 0 to {len(table) - 1}, got {tokens.min()} to {tokens.max()}"
        )
    np.take(table, tokens, axis=0, out=out, mode="clip")  # "raise" would go through a copy


def embedding_backward(
    d_out: Array, tokens: Array, d_table: Array, accumulate: bool, arena: Arena, first: int | None = None,
    padding: int | None = None,
) -> None:  # fmt: skip
    """Sorts the rows by token and sums each run: 5 times faster than ``np.add.at``."""
    if not accumulate:
        d_table.fill(0)
    if first is not None or padding is not None:
        start = first or 0
        here = np.flatnonzero((start <= tokens) & (tokens < start + len(d_table)) & (tokens != padding))
        tokens, d_out = tokens[here] - start, d_out[here]
    if not tokens.size:
        return
    order = np.argsort(tokens, kind="stable")
    in_order = tokens[order]
    starts = np.flatnonzero(np.diff(in_order, prepend=-1))
    with arena.scope():
        rows = arena.take(d_out.shape, d_out.dtype)
        sums = arena.take(d_out.shape, d_out.dtype)[: len(starts)]
        np.take(d_out, order, axis=0, out=rows, mode="clip")
        np.add.reduceat(rows, starts, axis=0, out=sums)
        d_table[in_order[starts]] += sums


# --- linear ------------------------------------------------------------------------------------------


def linear(x: Array, weight: Array, out: Array, residual: Array | None = None, bias: Array | None = None) -> None:
    matmul(x, weight.T, out)
    for more in (bias, residual):
        if more is not None:
            np.add(out, more, out=out)


linear_few = linear  # of one row


def linear_input_gradient(d_out: Array, weight: Array, dx: Array) -> None:
    matmul(d_out, weight, dx)


def linear_weight_gradient(
    d_out: Array, x: Array, d_weight: Array, accumulate: bool, arena: Arena, outputs: int | None = None
) -> None:
    multiply(d_out.T, x, d_weight, accumulate, arena)


def bits_of_parts(dtype: Any) -> bool:
    return False


def product_of_parts(*arguments: Any) -> bool:
    return False


def columns_of(x: Array, columns: slice) -> Array:
    return x[:, columns]


def low_rank(
    x: Array, weight: Array, out: Array, transposed: bool, factor: float, accumulate: bool, arena: Arena
) -> None:
    weight = weight.T if transposed else weight
    with arena.scope():
        fresh = arena.take(out.shape, out.dtype) if accumulate else out
        if accumulate and out.strides[0] < out.strides[1]:  # of ``empty_columns``
            fresh = empty_columns(arena, len(out), out.shape[1], out.dtype)
        np.matmul(x, weight, out=fresh)
        if factor != 1:
            fresh *= factor
        if accumulate:
            np.add(out, fresh, out=out)


# --- rope --------------------------------------------------------------------------------------------


def rope_tables(
    frequencies: Sequence[float], positions: Sequence[int], dtype: Any, length: float = 1.0
) -> tuple[Array, Array]:
    """In memory (d / 2, T), as ``_by_head`` has the heads."""
    angles = np.multiply.outer(np.asarray(frequencies, np.float64), np.asarray(positions, np.float64))
    return (length * np.cos(angles)).astype(dtype).T, (length * np.sin(angles)).astype(dtype).T


def rope(qkv: Array, tables: tuple[Array, Array], head_dim: int, heads: int, arena: Arena) -> None:
    """(a, b) -> (a cos - b sin, b cos + a sin), head by head; cos and sin become (d / 2, 1, T)."""
    if compiled.rope(qkv, tables, heads, 1):
        return
    cos, sin = (table.T[:, None] for table in tables)
    half, length = head_dim // 2, cos.shape[-1]
    by_half = _by_head(qkv, half, length)
    with arena.scope():
        a_sin = arena.take(by_half.shape[1:], qkv.dtype)
        b_sin = arena.take(by_half.shape[1:], qkv.dtype)
        for head in range(heads):
            a, b = by_half[2 * head], by_half[2 * head + 1]
            np.multiply(a, sin, out=a_sin)
            np.multiply(b, sin, out=b_sin)
            a *= cos
            b *= cos
            a -= b_sin
            b += a_sin


def rope_backward(d_qkv: Array, tables: tuple[Array, Array], head_dim: int, heads: int, arena: Arena) -> None:
    cos, sin = tables
    if not compiled.rope(d_qkv, tables, heads, -1):
        rope(d_qkv, (cos, -sin), head_dim, heads, arena)


def _by_head(x: Array, head_dim: int, length: int) -> Array:
    """(N, n d) of ``empty_columns`` seen as (n, d, B, T)."""
    return columns(x).reshape(-1, head_dim, len(x) // length, length)


# --- swiglu ------------------------------------------------------------------------------------------
# sigmoid(g) = (1 + tanh(g / 2)) / 2: no overflow, and numpy's tanh is twice as fast as its exp.


def swiglu(gate_up: Array, out: Array, arena: Arena) -> None:
    gates, ups = columns(gate_up).reshape(2, -1)
    hiddens = columns(out).reshape(-1)
    if compiled.swiglu(gates, ups, hiddens):
        return
    with arena.scope():
        half_block = take_block(arena, out.dtype)
        for block in blocks(gates.size):
            gate, up, t = gates[block], ups[block], hiddens[block]
            half = half_block[: gate.size]
            np.multiply(gate, 0.5, out=half)
            np.tanh(half, out=t)
            t *= half
            t += half
            t *= up


def fuses_swiglu(d_out: Any, weight: Any, gate_up: Array, arena: Arena) -> bool:
    return False


def linear_swiglu_backward(d_out: Array, weight: Array, gate_up: Array, d_gate_up: Array, arena: Arena) -> None:
    with arena.scope():
        d_inner = empty_columns(arena, len(d_out), weight.shape[1], d_out.dtype)
        linear_input_gradient(d_out, weight, d_inner)
        swiglu_backward(d_inner, gate_up, None, d_gate_up, arena)


def swiglu_backward(d_out: Array, gate_up: Array, out: Array | None, d_gate_up: Array, arena: Arena) -> None:
    """With s = sigmoid(gate): d_up = d_out gate s, d_gate = d_out (out + s (up - out))."""
    (gates, ups), d_hiddens = columns(gate_up).reshape(2, -1), columns(d_out).reshape(-1)
    d_gates, d_ups = columns(d_gate_up).reshape(2, -1)
    if compiled.swiglu_backward(gates, ups, d_hiddens, d_gates, d_ups):
        return
    if out is None:
        with arena.scope():
            out = empty_columns(arena, len(d_out), d_out.shape[1], d_out.dtype)
            swiglu(gate_up, out, arena)
            swiglu_backward(d_out, gate_up, out, d_gate_up, arena)
        return
    hiddens = columns(out).reshape(-1)
    with arena.scope():
        s_block = take_block(arena, out.dtype)
        for block in blocks(gates.size):
            gate, up, h, dh = gates[block], ups[block], hiddens[block], d_hiddens[block]
            d_gate, d_up, s = d_gates[block], d_ups[block], s_block[: gate.size]
            np.multiply(gate, 0.5, out=s)
            np.tanh(s, out=s)
            s *= 0.5
            s += 0.5
            np.multiply(gate, s, out=d_up)
            d_up *= dh
            np.subtract(up, h, out=d_gate)
            d_gate *= s
            d_gate += h
            d_gate *= dh


def quantize_rms_norm(
    x: Array, norm: Normalize, rstd: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena
) -> None:
    with arena.scope():
        out = arena.take(x.shape, x.dtype)
        normalize(x, norm, out, rstd)
        quantize(out, rows, columns, arena)


def quantize_swiglu(gate_up: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena) -> None:
    with arena.scope():
        out = empty_columns(arena, len(gate_up), gate_up.shape[1] // 2, gate_up.dtype)
        swiglu(gate_up, out, arena)
        quantize(out, rows, columns, arena)


def quantize_swiglu_backward(
    d_out: Array, gate_up: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena
) -> None:
    with arena.scope():
        d_gate_up = empty_columns(arena, len(gate_up), gate_up.shape[1], gate_up.dtype)
        swiglu_backward(d_out, gate_up, None, d_gate_up, arena)
        quantize(d_gate_up, rows, columns, arena)


# --- gelu --------------------------------------------------------------------------------------------
# GPT-2's: x s with s = sigmoid(2 u) = (1 + tanh(u)) / 2, u = GELU_SCALE (x + GELU_CUBE x^3); Hendrycks & Gimpel 2016,
# arXiv:1606.08415.

GELU_SCALE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


def _gelu_sigmoid(x: Array, out: Array) -> None:
    np.multiply(x, x, out=out)
    out *= GELU_SCALE * GELU_CUBE
    out += GELU_SCALE
    out *= x
    np.tanh(out, out=out)
    out *= 0.5
    out += 0.5


def gelu(x: Array, out: Array, arena: Arena) -> None:
    inputs, outputs = columns(x).reshape(-1), columns(out).reshape(-1)
    for block in blocks(inputs.size):
        _gelu_sigmoid(inputs[block], outputs[block])
        outputs[block] *= inputs[block]


def gelu_backward(d_out: Array, x: Array, dx: Array, arena: Arena) -> None:
    """dx = d_out s (1 + x (1 - s) 2 u')."""
    inputs, d_outs, outputs = (columns(y).reshape(-1) for y in (x, d_out, dx))
    with arena.scope():
        s_block = take_block(arena, x.dtype)
        for block in blocks(inputs.size):
            v, d, out = inputs[block], d_outs[block], outputs[block]
            s = s_block[: v.size]
            _gelu_sigmoid(v, s)
            d *= s
            np.multiply(v, v, out=out)
            out *= 6 * GELU_SCALE * GELU_CUBE
            out += 2 * GELU_SCALE
            out *= v
            np.subtract(1, s, out=s)
            out *= s
            out += 1
            out *= d


# --- cross_entropy -----------------------------------------------------------------------------------


def count_targets(targets: Array, out: Array) -> None:
    out[0] = max(1, np.count_nonzero(targets != IGNORE))


def cross_entropy(logits: Array, targets: Array, count: Array | None, losses: Array, arena: Arena) -> None:
    if compiled.cross_entropy(logits, targets, count, losses):
        return
    for rows in blocks(*logits.shape):
        z, loss, kept = logits[rows], losses[rows], targets[rows] != IGNORE
        at_target = np.arange(len(z)), np.where(kept, targets[rows], 0)
        with arena.scope():
            top, total = (arena.take(loss.shape, z.dtype) for _ in range(2))
            np.max(z, axis=1, out=top)
            z -= top[:, None]
            loss[...] = z[at_target]
            np.exp(z, out=z)
            np.sum(z, axis=1, out=total)
            np.log(total, out=top)
            np.subtract(top, loss, out=loss)
            loss[~kept] = 0
            if count is not None:
                share = kept / count
                z *= (share / total).astype(z.dtype)[:, None]
                z[at_target] -= share.astype(z.dtype)


def scale_rows(x: Array, targets: Array, weights: Array | None, count: Array | None) -> None:
    kept = targets != IGNORE
    x[~kept] = 0
    if weights is not None:
        x *= weights[:, None].astype(x.dtype)
    if count is not None:
        x /= count.astype(x.dtype)


def custom_loss(loss: Any, logits: Array, batch: Batch, losses: Array, backward: bool) -> None:
    of_tokens, gradient = of_function(loss(logits, batch), losses, logits)
    losses[...] = of_tokens
    if backward and gradient is not logits:
        logits[...] = gradient


def logit_statistics(logits: Array, targets: Array, first: int, out: Array, arena: Arena) -> None:
    top, total, at_target = out
    here = (first <= targets) & (targets < first + logits.shape[1])
    at_target[...] = np.where(here, logits[np.arange(len(targets)), np.where(here, targets - first, 0)], 0)
    np.max(logits, axis=1, out=top)
    for rows in blocks(*logits.shape):
        with arena.scope():
            z = arena.take(logits[rows].shape, logits.dtype)
            np.subtract(logits[rows], top[rows, None], out=z)
            np.exp(z, out=z)
            np.sum(z, axis=1, out=total[rows])


def cross_entropy_of_parts(
    logits: Array, targets: Array, first: int, statistics: Array, count: Array | None, losses: Array, arena: Arena
) -> None:
    tops, totals, at_target = statistics.swapaxes(0, 1)
    kept, top = targets != IGNORE, tops.max(axis=0)
    total = (totals * np.exp(tops - top)).sum(axis=0)
    losses[...] = np.where(kept, np.log(total) + (top - at_target.sum(axis=0)), 0)
    if count is None:
        return
    share = (kept / count).astype(logits.dtype)
    logits -= top[:, None]
    np.exp(logits, out=logits)
    logits *= (share / total)[:, None]
    here = np.flatnonzero((first <= targets) & (targets < first + logits.shape[1]))
    logits[here, targets[here] - first] -= share[here]


def mean_loss(losses: Array, count: Array, out: Array) -> None:
    out[0] = losses.sum(dtype=np.float64) / count[0]


# --- of optimizers -----------------------------------------------------------------------------------


def orthogonalize(x: Array, arena: Arena) -> None:
    _, rows, columns = x.shape
    tall, least = rows > columns, min(rows, columns)
    with arena.scope():
        gram, poly = (arena.take((least, least), x.dtype) for _ in range(2))
        more = arena.take((rows, columns), x.dtype)
        for each in x:
            each /= max(float(np.linalg.norm(each)), LEAST_NORM)
            wide, out = (each.T, more.T) if tall else (each, more)
            for a, b, c in NEWTON_SCHULZ:
                matmul(wide, wide.T, gram)
                matmul(gram, gram, poly)
                poly *= c
                gram *= b
                poly += gram
                matmul(poly, wide, out)
                each *= a
                each += more
