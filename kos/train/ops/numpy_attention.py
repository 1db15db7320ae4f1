"""Attention on CPUs: softmax(q k^T / sqrt(d)) v over blocks of queries, forward and backward.

Arrays are views (B, K, d, G, T) of q and out, (B, K, d, T) of k and v, with G = H / K.  Scores lie as
(keys, G * queries): the query heads that share a kv head are one matrix product, and the softmax runs over the first
of two axes, which NumPy reduces at full speed.  Keys after a block of queries are never read, nor are those before
the first key of its first query: ``first_key`` (B, queries) says from which key on a query sees keys.  Only the log of
the softmax's denominator is kept for the backward, as in FlashAttention-2 (Dao 2023, arXiv:2307.08691).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from kos.memory.arena import Arena
from kos.train.ops import Attend, Mask, compiled
from kos.train.ops.numpy_blocks import Array, of_rows, ones

SCORES = 262_144  # elements: scores that are in memory at once
QUERY_BLOCK = 64  # queries whose scores are computed at once


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


def attention(a: Attend, arena: Arena) -> None:
    """Causal attention, written to ``out``; or to all keys, merged with ``out``."""
    if compiled.attention(a):
        return
    q_all, k_all, v_all, out_all, lse_all = _views(a)
    d, group = q_all.shape[2:4]
    row, masked = ones(k_all.shape[-1], q_all.dtype), a.mask is not None
    for block in chain.from_iterable(_blocks(a, tile) for tile in _tiles(q_all, k_all, masked)):
        here, (k, v) = block.here, (x[block.tile][..., block.keys] for x in (k_all, v_all))
        (B, K, _, size), queries = k.shape, block.queries.stop - block.queries.start
        with arena.scope():
            q, o = (arena.take((B, K, d, group, queries), q_all.dtype) for _ in range(2))
            scores = arena.take((B, K, size, group, queries), q.dtype)
            top, total = (arena.take((B, K, 1, group, queries), q.dtype) for _ in range(2))
            np.multiply(q_all[here], a.scale, out=q)
            _scores(a, k, q, block, scores)
            np.max(_flat(scores), axis=2, keepdims=True, out=_flat(top))
            if masked:
                np.maximum(top, np.finfo(top.dtype).min, out=top)  # not -inf: a query may see none of the keys
            np.subtract(_flat(scores), _flat(top), out=_flat(scores))
            np.exp(scores, out=scores)
            np.matmul(row[:, :size], _flat(scores), out=_flat(total))  # a sum, at BLAS's speed
            np.matmul(v, _flat(scores), out=_flat(o))
            if a.kv is None:
                np.divide(o, total, out=out_all[here])
                np.log(total, out=total)
                np.add(top, total, out=lse_all[here])
                continue
            merged, lse = arena.take(top.shape, top.dtype), lse_all[here]
            np.log(total, out=total)
            total += top
            np.logaddexp(lse, total, out=merged)
            for part, weight in ((out_all[here], lse), (o, top)):
                np.subtract(weight, merged, out=total)
                np.exp(total, out=total)
                part *= total
            out_all[here] += o
            lse[...] = merged


def attention_backward(a: Attend, d_out: Array, d_qkv: Array, arena: Arena, d_kv: Array | None = None) -> None:
    """P = exp(S - lse), dV = d_out P^T, dS = P (V^T d_out - sum(d_out out)), dQ = K dS, dK = Q dS^T.

    Both subtractions are part of the matrix products, as one more row: ones in K and V, and the subtrahend in Q and
    d_out.  Attention to others adds to dQ.
    """
    if d_kv is None and compiled.attention_backward(a, d_out, d_qkv):
        return
    (q_all, k_all, v_all, out_all, lse_all), accumulate = _views(a), a.mask is not None
    do_all, dq_all = (_of_queries(x, a) for x in (d_out, d_qkv))
    if d_kv is None:
        d_kv = view_of_keys_and_values(d_qkv, a.heads, a.kv_heads)
    if accumulate or a.kv is not None:
        d_kv.fill(0)
    (dk_all, dv_all), (d, group, length) = _of_keys(d_kv, a), q_all.shape[2:]
    for tile in _tiles(q_all, k_all, accumulate):
        with arena.scope():
            k1, v1 = (_with_ones(x[tile], arena) for x in (k_all, v_all))
            B, K = k1.shape[:2]
            # Without a mask the last block reaches every key: it writes dk and dv, and the earlier blocks add.
            for block in _blocks(a, tile):
                here, seen, queries = block.here, block.keys, block.queries.stop - block.queries.start
                with arena.scope():
                    q1, do1 = (arena.take((B, K, d + 1, group, queries), k1.dtype) for _ in range(2))
                    dq = arena.take((B, K, d, group, queries), k1.dtype)
                    p, ds = (arena.take((B, K, seen.stop - seen.start, group, queries), k1.dtype) for _ in range(2))
                    q, do = q1[:, :, :d], do1[:, :, :d]
                    np.multiply(q_all[here], a.scale, out=q)
                    np.negative(lse_all[here][:, :, 0], out=q1[:, :, d])
                    np.copyto(do, do_all[here])
                    np.multiply(do, out_all[here], out=dq)
                    np.sum(dq, axis=2, out=do1[:, :, d])
                    np.negative(do1[:, :, d], out=do1[:, :, d])
                    _scores(a, k1[..., seen], q1, block, p)
                    np.exp(p, out=p)
                    np.matmul(v1[..., seen].swapaxes(2, 3), _flat(do1), out=_flat(ds))
                    ds *= p
                    np.matmul(k1[:, :, :d, seen], _flat(ds), out=_flat(dq))
                    if a.kv is None:
                        np.multiply(dq, a.scale, out=dq_all[here])
                    else:
                        dq *= a.scale
                        dq_all[here] += dq
                    for left, right, total in ((q, ds, dk_all[tile]), (do, p, dv_all[tile])):
                        if block.queries.stop == length and not accumulate:
                            np.matmul(_flat(left), _flat(right).swapaxes(2, 3), out=total)
                        else:
                            part = arena.take((B, K, d, seen.stop - seen.start), k1.dtype)
                            np.matmul(_flat(left), _flat(right).swapaxes(2, 3), out=part)
                            total[..., seen] += part


def keys_and_values(a: Attend, arena: Arena) -> Array:
    """(2 K d, N): a view, or of some rows of an array a copy."""
    kv = view_of_keys_and_values(a.qkv, a.heads, a.kv_heads)
    if kv.flags.c_contiguous:
        return kv
    copy = arena.take(kv.shape, kv.dtype)
    np.copyto(copy, kv)
    return copy


def view_of_keys_and_values(qkv: Array, heads: int, kv_heads: int) -> Array:
    """(2 K d, N)."""
    by_column = qkv.T
    return by_column[len(by_column) // (heads + 2 * kv_heads) * heads :]


def add_keys_and_values(d_kv: Array, d_qkv: Array) -> None:
    of_rows(d_qkv)[-len(d_kv) :] += d_kv


def empty_cache(sequences: int, kv_heads: int, head_dim: int, capacity: int, dtype: Any) -> Array:
    """(B, 2, K, d, capacity): products read long contiguous rows."""
    return np.empty((sequences, 2, kv_heads, head_dim, capacity), dtype)


def append_to_cache(a: Attend, cache: Array, positions: Array) -> None:
    sequences, length = len(cache), a.length
    kv = view_of_keys_and_values(a.qkv, a.heads, a.kv_heads).reshape(2, a.kv_heads, a.head_dim, sequences, length)
    for b, start in enumerate(positions):
        cache[b, ..., start : start + length] = kv[..., b, :]


def attention_to_cache(a: Attend, cache: Array, positions: Array, window: int | None, arena: Arena) -> None:
    for b, at in enumerate(positions.tolist()):
        k, v = cache[b, ..., max(0, at + 1 - (window or at + 1)) : at + 1]
        q = a.qkv[b, : a.heads * a.head_dim].reshape(a.kv_heads, -1, a.head_dim) * a.qkv.dtype.type(a.scale)
        scores = q @ k
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=2, keepdims=True)
        a.out[b] = (scores @ v.swapaxes(1, 2)).reshape(-1)


def _queries(a: Attend) -> slice:
    return slice(0, a.length) if a.kv is None else a.queries


def _views(a: Attend) -> tuple[Array, ...]:
    """q, k, v, out and log_sum_exp, in the shapes of this module."""
    if a.mask is not None:
        a.mask.check(len(a.log_sum_exp), a.length)
    k, v = _of_keys(view_of_keys_and_values(a.qkv, a.heads, a.kv_heads) if a.kv is None else a.kv, a)
    return _of_queries(a.qkv, a), k, v, _of_queries(a.out, a), _statistics(a)


def _of_queries(x: Array, a: Attend) -> Array:
    """The heads of q in (N, W) or (N, H d), as (B, K, d, G, queries)."""
    shape = a.kv_heads, -1, a.head_dim, len(x) // a.length, a.length
    return of_rows(x[:, : a.heads * a.head_dim]).reshape(shape).transpose(3, 0, 2, 1, 4)[..., _queries(a)]


def _statistics(a: Attend) -> Array:
    """``log_sum_exp`` as (B, K, 1, G, queries)."""
    samples, _, length = a.log_sum_exp.shape
    return a.log_sum_exp.reshape(samples, a.kv_heads, 1, -1, length)[..., _queries(a)]


def _of_keys(kv: Array, a: Attend) -> tuple[Array, Array]:
    """(2 K d, N) seen as k and v, each (B, K, d, keys)."""
    samples, _, length = a.log_sum_exp.shape
    both = kv.reshape(2, a.kv_heads, -1, samples, length).transpose(0, 3, 1, 2, 4)
    k, v = both if a.kv is None else both[..., a.keys]
    return k, v


class Block(NamedTuple):
    """A block of queries of some samples and kv heads, and the ``keys`` that it sees."""

    tile: tuple[slice, slice]
    queries: slice
    keys: slice
    first_key: Array | None
    """(queries,): the first key that each query sees, counted from the first of ``keys``; None: they have no mask."""

    @property
    def here(self) -> tuple[Any, ...]:
        return (*self.tile, ..., self.queries)


def _tiles(q: Array, k: Array, masked: bool) -> Iterator[tuple[slice, slice]]:
    """Slices of samples and kv heads whose scores for a block of queries have about ``SCORES`` elements.

    With a mask of one sample: then its keys, and so its sums, do not depend on what else is in the batch.
    """
    (samples, kv_heads, _, group, _), keys = q.shape, k.shape[-1]
    at_once = max(1, SCORES // (group * QUERY_BLOCK * keys))
    b_step, k_step = 1 if masked else max(1, at_once // kv_heads), min(at_once, kv_heads)
    for b in range(0, samples, b_step):
        for k_first in range(0, kv_heads, k_step):
            yield slice(b, b + b_step), slice(k_first, k_first + k_step)


def _blocks(a: Attend, tile: tuple[slice, slice]) -> Iterator[Block]:
    """Those that see a key, from the last to the first."""
    of_queries, of_keys = _queries(a), slice(0, a.length) if a.kv is None else a.keys
    length, count, first_key = of_queries.stop - of_queries.start, of_keys.stop - of_keys.start, None
    if a.mask is not None:
        first_key = np.maximum(a.mask.first_key[tile[0].start, of_queries] - of_keys.start, 0)
    for start in reversed(range(0, length, QUERY_BLOCK)):
        stop = min(start + QUERY_BLOCK, length)
        begin = 0 if first_key is None else int(first_key[start])
        keys = slice(begin, stop if a.kv is None else count)
        if keys.stop > begin:
            first = None if first_key is None else first_key[start:stop] - begin
            yield Block(tile, slice(start, stop), keys, first)


def _scores(a: Attend, k: Array, q: Array, block: Block, out: Array) -> None:
    """out = k^T q, masked.

    In the backward k and q have a row more, of ones and of -log_sum_exp, so that out becomes the logarithms of the
    probabilities.
    """
    np.matmul(k.swapaxes(2, 3), _flat(q), out=_flat(out))
    if a.kv is None:
        queries = out.shape[-1]
        out[:, :, -queries:] += _causal_mask(queries, out.dtype)
    if block.first_key is not None:
        _hide(out, block.first_key)


def _with_ones(x: Array, arena: Arena) -> Array:
    """(B, K, d, keys) with a row of ones more."""
    B, K, d, keys = x.shape
    more = arena.take((B, K, d + 1, keys), x.dtype)
    more[:, :, :d], more[:, :, d] = x, 1
    return more


def _hide(scores: Array, first_key: Array) -> None:
    """Make the scores of keys before a query's first one -inf; ``first_key`` (queries,) counts from the first score."""
    keys = np.arange(min(first_key[-1], scores.shape[2]))[:, None]
    scores[:, :, : len(keys)] += np.where(keys < first_key, -np.inf, 0).astype(scores.dtype)[:, None]


def _flat(x: Array) -> Array:
    """(B, K, n, G, queries) as (B, K, n, G * queries)."""
    return x.reshape(*x.shape[:3], -1)


@functools.lru_cache(maxsize=64)
def _causal_mask(size: int, dtype: np.dtype) -> Array:
    """(keys, 1, queries): -inf where the key comes after the query."""
    return np.where(np.tri(size, dtype=bool).T, 0, -np.inf).astype(dtype)[:, None]
