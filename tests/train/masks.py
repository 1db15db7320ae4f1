"""Masks of documents and windows for tests of attention, and attention with any mask by its definition, in float64."""

import numpy as np


def starts_of(lengths, samples, length):
    """(samples, length) int32: where the document of each token begins; documents of ``lengths``, repeated to the end.

    Each further sample's documents are moved by one token.
    """
    begins = np.cumsum([0, *lengths * (length // sum(lengths) + 1)])
    at = np.arange(length)
    return np.array([np.maximum(_last(begins - b, at), 0) for b in range(samples)], np.int32)


def random_starts(rng, samples, length, positions=None):
    """Documents of random lengths, of which many have one token; of tokens at ``positions`` (length,)."""
    begins = rng.random((samples, length)) < rng.choice([0.01, 0.1, 0.6])
    at = np.arange(length) if positions is None else positions
    return np.maximum.accumulate(np.where(begins, at, 0), axis=1).astype(np.int32)


def random_positions(rng, length):
    """Of queries and of keys, in a sequence three times as long."""
    return [np.sort(rng.permutation(3 * length)[:length]).astype(np.int32) for _ in range(2)]


def visible(starts, window, positions, key_positions=None, causal=True):
    """(B, queries, keys): whether a query sees a key, by the definition; ``starts`` (B, queries) or None."""
    keys = positions if key_positions is None else key_positions
    q, k = np.asarray(positions)[:, None], np.asarray(keys)[None]
    seen = (k <= q) | (not causal)
    if window is not None:
        seen = seen & (k > q - window)  # transformers.masking_utils.sliding_window_overlay
    return seen[None] if starts is None else seen & (k >= starts[:, :, None])


def dense_attention(q, k, v, d_out, seen, out=None):
    """Of q and d_out (B, T, H, d), k and v (B, S, K, d), ``seen`` (B, T, S): out, log_sum_exp, dq, dk, dv.

    ``out``: what the backward is given instead, such as the forward's rounded.  All in float64.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v, d_out = (x.astype(np.float64) for x in (q, k, v, d_out))
    wide_k, wide_v = (x.repeat(group, axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, wide_k) / np.sqrt(q.shape[-1])
    scores = np.where(seen[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    log_sum_exp = (top + np.log(np.exp(scores - top).sum(-1, keepdims=True)))[..., 0]
    p = np.exp(scores - log_sum_exp[..., None])
    result = np.einsum("bhts,bshd->bthd", p, wide_v)
    delta = np.einsum("bthd,bthd->bht", d_out, result if out is None else out.astype(np.float64))
    ds = p * (np.einsum("bthd,bshd->bhts", d_out, wide_v) - delta[..., None]) / np.sqrt(q.shape[-1])
    dq = np.einsum("bhts,bshd->bthd", ds, wide_k)
    dk, dv = np.einsum("bhts,bthd->bshd", ds, q), np.einsum("bhts,bthd->bshd", p, d_out)
    dk, dv = (x.reshape(*k.shape[:3], group, -1).sum(3) for x in (dk, dv))
    return result, log_sum_exp, dq, dk, dv


def dense_packed(qkv, d_out, samples, heads, kv_heads, seen, out=None):
    """``dense_attention`` of qkv (N, W): out (N, H d), log_sum_exp (B, H, T), d_qkv (N, W)."""
    tokens, d = len(qkv), qkv.shape[1] // (heads + 2 * kv_heads)
    q, k, v = np.split(qkv.reshape(samples, -1, heads + 2 * kv_heads, d), [heads, heads + kv_heads], axis=2)
    d_out, out = (x if x is None else x.reshape(q.shape) for x in (d_out, out))
    result, log_sum_exp, *gradients = dense_attention(q, k, v, d_out, seen, out)
    return result.reshape(tokens, -1), log_sum_exp, np.concatenate(gradients, axis=2).reshape(tokens, -1)


def _last(begins, at):
    """The last of ``begins`` that is not after each of ``at``."""
    return begins[np.searchsorted(begins, at, side="right") - 1]
