"""The numpy dialect of ``kos.train.ops``: the reference, and the implementation for training on CPUs.

Three habits make it fast.  Arrays that are split by columns (heads, gate and up) have contiguous tokens
(``empty_columns``).  So the halves of a rotation, the statistics of a softmax and every operand of a matrix
product are long contiguous rows, and BLAS copies nothing.  Elementwise chains run over blocks that stay in
the cache.  Nothing is allocated: outputs are given, and scratch memory comes from the arena.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kos.errors import InvalidArgument
from kos.memory.arena import Arena
from kos.train.ops import LEAST_NORM, NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, Mask, Scaled
from kos.train.ops.numpy_attention import attend, attend_backward, ones
from kos.train.ops.numpy_fp8 import largest_of_part as largest_of_part
from kos.train.ops.numpy_fp8 import quantize as quantize
from kos.train.ops.numpy_fp8 import quantize_part as quantize_part
from kos.train.ops.numpy_fp8 import quantize_rest as quantize_rest
from kos.train.ops.numpy_fp8 import scaled_product as scaled_product

Array = np.ndarray
IGNORE = -1  # the target that is left out of the loss
BLOCK = 32_768  # elements of a cache-sized block: three of them in fp32 are 384 KiB, within an L2
one_scale = False
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


def statistics_dtype(dtype: Any) -> Any:
    return dtype


def indices(source: Array, arena: Arena) -> Array:
    return source


def empty_columns(arena: Arena, rows: int, columns: int, dtype: Any) -> Array:
    return arena.take((columns, rows), dtype).T


def copy(source: Array, out: Array) -> None:
    np.copyto(out, source)


def to_host(array: Array) -> np.ndarray:
    return array.copy()


def zero(out: Array) -> None:
    out.fill(0)


def add(a: Array, b: Array, out: Array) -> None:
    np.add(a, b, out=out)


def product(a: Array, b: Array, out: Array) -> None:
    """out = a b: matrices, or stacks of them."""
    np.matmul(a, b, out=out)


def add_tree(terms: Array, out: Array) -> None:
    """out = ((t0 + t1) + (t2 + t3)) + …, of as many ``terms`` as a power of two, which are overwritten."""
    while len(terms) > 2:
        np.add(terms[0::2], terms[1::2], out=terms[0::2])
        terms = terms[0::2]
    if len(terms) == 2:
        np.add(terms[0], terms[1], out=out)
    else:
        np.copyto(out, terms[0])


def _blocks(size: int, width: int = 1) -> Iterator[slice]:
    """Slices of ``size`` rows of ``width`` elements, each of about ``BLOCK`` elements."""
    step = max(1, BLOCK // width)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _columns(x: Array) -> Array:
    """An array of ``empty_columns`` as it lies in memory: (columns, rows), contiguous."""
    memory = x.T
    if not memory.flags.c_contiguous:
        raise InvalidArgument(f"expected an array of empty_columns, got strides {x.strides} of shape {x.shape}")
    return memory


def _product(a: Array, b: Array, out: Array, accumulate: bool, arena: Arena) -> None:
    """out = a b, or added to it."""
    with arena.scope():
        fresh = arena.take(out.shape, out.dtype) if accumulate else out
        np.matmul(a, b, out=fresh)
        if accumulate:
            np.add(out, fresh, out=out)


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
    d_out: Array, tokens: Array, d_table: Array, accumulate: bool, arena: Arena, first: int | None = None
) -> None:
    """Sorts the rows by token and sums each run: 5 times faster than ``np.add.at``."""
    if not accumulate:
        d_table.fill(0)
    if first is not None:
        here = np.flatnonzero((first <= tokens) & (tokens < first + len(d_table)))
        tokens, d_out = tokens[here] - first, d_out[here]
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
    np.matmul(x, weight.T, out=out)
    for more in (bias, residual):
        if more is not None:
            np.add(out, more, out=out)


def linear_input_gradient(d_out: Array, weight: Array, dx: Array) -> None:
    np.matmul(d_out, weight, out=dx)


def linear_weight_gradient(d_out: Array, x: Array, d_weight: Array, accumulate: bool, arena: Arena) -> None:
    _product(d_out.T, x, d_weight, accumulate, arena)


def sum_rows(x: Array, out: Array, accumulate: bool, arena: Arena) -> None:
    _product(ones(len(x), x.dtype), x, out[None], accumulate, arena)  # a sum, at BLAS's speed


# --- norms -------------------------------------------------------------------------------------------


def _reciprocal_rms(x: Array, eps: float, out: Array) -> None:
    np.vecdot(x, x, out=out)
    out *= 1 / x.shape[-1]
    out += eps
    np.sqrt(out, out=out)
    np.reciprocal(out, out=out)


def rms_norm(x: Array, weight: Array, eps: float, out: Array, rstd: Array) -> None:
    _reciprocal_rms(x, eps, rstd)
    for rows in _blocks(*x.shape):
        np.multiply(x[rows], weight, out=out[rows])
        out[rows] *= rstd[rows, None]


def rms_norm_backward(
    d_out: Array, x: Array, weight: Array, rstd: Array, dx: Array, d_weight: Array, accumulate: bool, arena: Arena,
    parts: int = 1,
) -> None:  # fmt: skip
    """With p = d_out x: d_weight = rstd^T p, and mean(d_out weight x rstd) = rstd (p weight) / D.

    The rows are summed in so many equal ``parts``, of which d_weight is ``add_tree``.
    """
    rows_count, width = x.shape
    with arena.scope():
        product = arena.take(x.shape, x.dtype)
        slope = arena.take((rows_count,), x.dtype)
        np.multiply(d_out, x, out=product)
        by_part = product.reshape(parts, -1, width)
        np.matmul(by_part, weight, out=slope.reshape(parts, -1))
        slope *= rstd
        slope *= rstd
        slope *= -1 / width
        if parts == 1:
            _product(rstd, product, d_weight, accumulate, arena)
        else:
            sums = arena.take((parts, 1, width), x.dtype)
            np.matmul(rstd.reshape(parts, 1, -1), by_part, out=sums)
            add_tree(sums[:, 0], d_weight)
        for rows in _blocks(rows_count, width):  # dx += rstd (d_out weight + slope x)
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
    for rows in _blocks(*x.shape):
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
        for rows in _blocks(*x.shape):  # dx += rstd (d_out weight - mean(…) - normed mean(… normed))
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


# --- rope --------------------------------------------------------------------------------------------


def rope_tables(
    frequencies: Sequence[float], positions: Sequence[int], dtype: Any, length: float = 1.0
) -> tuple[Array, Array]:
    """In memory (d / 2, T), as ``_by_head`` has the heads."""
    angles = np.multiply.outer(np.asarray(frequencies, np.float64), np.asarray(positions, np.float64))
    return (length * np.cos(angles)).astype(dtype).T, (length * np.sin(angles)).astype(dtype).T


def rope(qkv: Array, tables: tuple[Array, Array], head_dim: int, heads: int, arena: Arena) -> None:
    """(a, b) -> (a cos - b sin, b cos + a sin), head by head; cos and sin become (d / 2, 1, T)."""
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
    rope(d_qkv, (cos, -sin), head_dim, heads, arena)


def _by_head(x: Array, head_dim: int, length: int) -> Array:
    """(N, n d) of ``empty_columns`` seen as (n, d, B, T)."""
    return _columns(x).reshape(-1, head_dim, len(x) // length, length)


# --- attention ---------------------------------------------------------------------------------------
# ``numpy_attention.py`` computes attention; these methods give it views of the arrays in its layout.


def attention_mask(
    document_starts: Array | None, window: int | None, mask: Mask, positions: Array | None = None,
    key_positions: Array | None = None,
) -> None:  # fmt: skip
    mask.check_sources(document_starts, window, positions, key_positions)
    samples, queries = mask.first_key.shape
    at = np.arange(queries) if positions is None else positions
    keys = at if key_positions is None else key_positions
    first = np.zeros((samples, queries), np.int32) if document_starts is None else document_starts
    for b in range(samples):
        seen_from = first[b] if window is None else np.maximum(first[b], at - window + 1)
        mask.first_key[b] = np.searchsorted(keys, seen_from)
        mask.last_query[b] = np.searchsorted(seen_from, keys, side="right") - 1


def attention(
    qkv: Array, heads: int, kv_heads: int, out: Array, log_sum_exp: Array, arena: Arena, mask: Mask | None = None
) -> None:
    kv, every = keys_and_values(qkv, heads, kv_heads, arena), slice(0, len(log_sum_exp))
    queries = slice(0, log_sum_exp.shape[-1])
    attention_after(qkv, kv, heads, kv_heads, every, queries, 0, out, log_sum_exp, arena, mask)


def attention_backward(
    d_out: Array, qkv: Array, out: Array, log_sum_exp: Array, heads: int, kv_heads: int, d_qkv: Array, arena: Arena,
    mask: Mask | None = None,
) -> None:  # fmt: skip
    kv, d_kv = (keys_and_values(x, heads, kv_heads, arena) for x in (qkv, d_qkv))
    every, queries = slice(0, len(log_sum_exp)), slice(0, log_sum_exp.shape[-1])
    attention_after_backward(
        d_out, qkv, kv, out, log_sum_exp, heads, kv_heads, every, queries, 0, d_qkv, d_kv, False, arena, mask
    )


def keys_and_values(qkv: Array, heads: int, kv_heads: int, arena: Arena) -> Array:
    """A view: (2 K d, N)."""
    columns = qkv.T
    return columns[len(columns) // (heads + 2 * kv_heads) * heads :]


def add_keys_and_values(d_kv: Array, d_qkv: Array) -> None:
    _columns(d_qkv)[-len(d_kv) :] += d_kv


def attention_to(
    qkv: Array, kv: Array, heads: int, kv_heads: int, queries: slice, keys: slice, out: Array, log_sum_exp: Array,
    arena: Arena, mask: Mask | None = None,
) -> None:  # fmt: skip
    every = slice(0, len(log_sum_exp))
    attention_after(qkv, kv, heads, kv_heads, every, queries, None, out, log_sum_exp, arena, mask, keys)


def attention_to_backward(
    d_out: Array, qkv: Array, kv: Array, out: Array, log_sum_exp: Array, heads: int, kv_heads: int, queries: slice,
    keys: slice, d_qkv: Array, d_kv: Array, arena: Arena, mask: Mask | None = None,
) -> None:  # fmt: skip
    d_kv.fill(0)
    operands = d_out, qkv, kv, out, log_sum_exp, heads, kv_heads, slice(0, len(log_sum_exp)), queries
    attention_after_backward(*operands, None, d_qkv, d_kv, False, arena, mask, keys)


def attention_after(
    qkv: Array, kv: Array, heads: int, kv_heads: int, samples: slice, queries: slice, before: int | None, out: Array,
    log_sum_exp: Array, arena: Arena, mask: Mask | None = None, keys: slice = slice(0, None),
) -> None:  # fmt: skip
    """Causal attention of tokens ``queries`` of ``samples`` of ``qkv``, which come after ``before`` keys of ``kv``.

    ``kv`` (2 K d, N) has as many samples as are named, of any length; ``mask`` says which of them all queries see.
    If ``before`` is None they see all ``keys``, as in ``attention_to``.
    """
    q, o, lse = _of_queries(qkv, out, log_sum_exp, heads, kv_heads, samples, queries)
    k, v = (x[..., keys] for x in _split_keys_and_values(kv, kv_heads, kv.shape[1] // len(q)))
    attend(q, k, v, o, lse, before, arena, _first_key(mask, log_sum_exp, samples, queries, keys.start))


def attention_after_backward(
    d_out: Array, qkv: Array, kv: Array, out: Array, log_sum_exp: Array, heads: int, kv_heads: int, samples: slice,
    queries: slice, before: int | None, d_qkv: Array, d_kv: Array, accumulate: bool, arena: Arena,
    mask: Mask | None = None, keys: slice = slice(0, None),
) -> None:  # fmt: skip
    """Writes the ``queries`` of ``d_qkv``, and ``d_kv`` up to the last key that they see, or adds to it."""
    q, o, lse = _of_queries(qkv, out, log_sum_exp, heads, kv_heads, samples, queries)
    dq, do, _ = _of_queries(d_qkv, d_out, log_sum_exp, heads, kv_heads, samples, queries)
    length, keys = kv.shape[1] // len(q), keys if before is None else slice(0, before + q.shape[-1])
    k, v, dk, dv = (x[..., keys] for both in (kv, d_kv) for x in _split_keys_and_values(both, kv_heads, length))
    first_key = _first_key(mask, log_sum_exp, samples, queries, keys.start)
    attend_backward(q, k, v, o, do, lse, before, dq, dk, dv, accumulate, arena, first_key)


def _first_key(mask: Mask | None, log_sum_exp: Array, samples: slice, queries: slice, start: int = 0) -> Array | None:
    """(B, queries): the first key of each query, counted from key ``start``."""
    if mask is None:
        return None
    mask.check(len(log_sum_exp), log_sum_exp.shape[-1])
    return np.maximum(mask.first_key[samples, queries] - start, 0)


def _of_queries(
    qkv: Array, out: Array, log_sum_exp: Array, heads: int, kv_heads: int, samples: slice, queries: slice
) -> tuple[Array, Array, Array]:
    """q and out as (B, K, d, G, queries), log_sum_exp as (B, K, 1, G, queries)."""
    length, d = log_sum_exp.shape[-1], out.shape[-1] // heads
    q, o = (_by_kv_head(x[:, : heads * d], kv_heads, d, length)[samples][..., queries] for x in (qkv, out))
    return q, o, log_sum_exp.reshape(len(log_sum_exp), kv_heads, 1, -1, length)[samples][..., queries]


def _by_kv_head(x: Array, kv_heads: int, d: int, length: int) -> Array:
    """(N, H d) of ``empty_columns`` seen as (B, K, d, G, T)."""
    return _columns(x).reshape(kv_heads, -1, d, len(x) // length, length).transpose(3, 0, 2, 1, 4)


def _split_keys_and_values(kv: Array, kv_heads: int, length: int) -> tuple[Array, Array]:
    """(2 K d, N) seen as k and v, each (B, K, d, T)."""
    both = kv.reshape(2, kv_heads, -1, kv.shape[1] // length, length).transpose(0, 3, 1, 2, 4)
    return both[0], both[1]


# --- swiglu ------------------------------------------------------------------------------------------
# sigmoid(g) = (1 + tanh(g / 2)) / 2: no overflow, and numpy's tanh is twice as fast as its exp.


def swiglu(gate_up: Array, out: Array, arena: Arena) -> None:
    gates, ups = _columns(gate_up).reshape(2, -1)
    hiddens = _columns(out).reshape(-1)
    with arena.scope():
        half_block = arena.take((BLOCK,), out.dtype)
        for block in _blocks(gates.size):
            gate, up, t = gates[block], ups[block], hiddens[block]
            half = half_block[: gate.size]
            np.multiply(gate, 0.5, out=half)
            np.tanh(half, out=t)
            t *= half
            t += half
            t *= up


def swiglu_backward(d_out: Array, gate_up: Array, out: Array | None, d_gate_up: Array, arena: Arena) -> None:
    """With s = sigmoid(gate): d_up = d_out gate s, d_gate = d_out (out + s (up - out))."""
    if out is None:
        with arena.scope():
            out = empty_columns(arena, len(d_out), d_out.shape[1], d_out.dtype)
            swiglu(gate_up, out, arena)
            swiglu_backward(d_out, gate_up, out, d_gate_up, arena)
        return
    gates, ups = _columns(gate_up).reshape(2, -1)
    d_gates, d_ups = _columns(d_gate_up).reshape(2, -1)
    hiddens, d_hiddens = _columns(out).reshape(-1), _columns(d_out).reshape(-1)
    with arena.scope():
        s_block = arena.take((BLOCK,), out.dtype)
        for block in _blocks(gates.size):
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
    x: Array, weight: Array, eps: float, rstd: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena
) -> None:
    with arena.scope():
        out = arena.take(x.shape, x.dtype)
        rms_norm(x, weight, eps, out, rstd)
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
    inputs, outputs = _columns(x).reshape(-1), _columns(out).reshape(-1)
    for block in _blocks(inputs.size):
        _gelu_sigmoid(inputs[block], outputs[block])
        outputs[block] *= inputs[block]


def gelu_backward(d_out: Array, x: Array, dx: Array, arena: Arena) -> None:
    """dx = d_out s (1 + x (1 - s) 2 u')."""
    inputs, d_outs, outputs = (_columns(y).reshape(-1) for y in (x, d_out, dx))
    with arena.scope():
        s_block = arena.take((BLOCK,), x.dtype)
        for block in _blocks(inputs.size):
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
    for rows in _blocks(*logits.shape):
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


def logit_statistics(logits: Array, targets: Array, first: int, out: Array, arena: Arena) -> None:
    top, total, at_target = out
    here = (first <= targets) & (targets < first + logits.shape[1])
    at_target[...] = np.where(here, logits[np.arange(len(targets)), np.where(here, targets - first, 0)], 0)
    np.max(logits, axis=1, out=top)
    for rows in _blocks(*logits.shape):
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
    a, b, c = NEWTON_SCHULZ
    with arena.scope():
        gram, poly = (arena.take((least, least), x.dtype) for _ in range(2))
        more = arena.take((rows, columns), x.dtype)
        for each in x:
            each /= max(float(np.linalg.norm(each)), LEAST_NORM)
            wide, out = (each.T, more.T) if tall else (each, more)
            for _ in range(NEWTON_SCHULZ_STEPS):
                np.matmul(wide, wide.T, out=gram)
                np.matmul(gram, gram, out=poly)
                poly *= c
                gram *= b
                poly += gram
                np.matmul(poly, wide, out=out)
                each *= a
                each += more
