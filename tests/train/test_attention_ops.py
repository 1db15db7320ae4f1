"""Attention of the CPU: its formula and gradients, keys of other ranks, masks; what families of models ask for."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos.errors import InvalidArgument
from kos.train.layers.attention import Attention
from kos.train.model.families import FAMILIES
from kos.train.model.llama import LlamaConfig
from kos.train.ops import Attend, Mask, numpy_attention
from kos.train.ops import numpy as ops
from kos.train.ops.cuda.attention import KERNEL_SETS, kernel_set, unsupported
from tests.train import masks
from tests.train.cpu_ops import arena, check_gradients, columns, nan, nan_columns

__all__ = ["arena"]  # a fixture


def attention_formula(own, other=None):
    """One query at a time, by the definition: out and log_sum_exp of an Attend, and of one to others besides."""
    (samples, heads, length), d, kv_heads = own.log_sum_exp.shape, own.head_dim, own.kv_heads
    q, own_kv = (x.reshape(samples, length, -1, d) for x in np.split(own.qkv, [heads * d], axis=1))
    out, lse = np.empty((samples, length, heads, d)), np.empty((samples, heads, length))

    def first_key(attend, b, t):
        return 0 if attend.mask is None else attend.mask.first_key[b, t]

    for b, h, t in np.ndindex(samples, heads, length):
        seen = [own_kv[b, first_key(own, b, t) : t + 1]]
        if other is not None and other.queries.start <= t < other.queries.stop:
            rows = slice(max(other.keys.start, first_key(other, b, t)), other.keys.stop)
            seen.append(other.kv.T.reshape(own_kv.shape)[b, rows])
        k, v = (np.concatenate(seen)[:, at + h // (heads // kv_heads)] for at in (0, kv_heads))
        scores = k @ q[b, t, h] * own.scale
        lse[b, h, t] = np.log(np.exp(scores).sum())
        out[b, t, h] = np.exp(scores - lse[b, h, t]) @ v
    return out.reshape(len(q) * length, -1), lse


@pytest.fixture
def blocks(monkeypatch, scores):
    """Attention has a block of few queries, and about so many scores, in memory at once."""
    for name, size in (("QUERY_BLOCK", 4), ("SCORES", scores)):
        monkeypatch.setattr(numpy_attention, name, size)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (4, 1)])
@pytest.mark.parametrize("scores", [1, 150, 10**6])
@pytest.mark.parametrize(
    ("length", "queries", "keys"),
    [(2, (0, 2), (0, 1)), (8, (0, 8), (0, 4)), (10, (5, 10), (0, 10)), (7, (1, 6), (2, 5)), (9, (8, 9), (8, 9))],
)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_to_keys_of_another_rank(rng, arena, heads, kv_heads, length, queries, keys, masked):
    samples, d, queries, keys = 3, 3, slice(*queries), slice(*keys)
    qkv, others = rng.normal(size=(2, samples * length, (heads + 2 * kv_heads) * d))
    own = other = None
    if masked:
        at, of_others = masks.random_positions(rng, length)
        starts, window = masks.random_starts(rng, samples, length, at), int(rng.integers(1, 3 * length))
        own, other = mask_arrays(samples, length), mask_arrays(samples, length)
        ops.attention_mask(starts, window, own, at)
        ops.attention_mask(starts, window, other, at, of_others)

    def formula(qkv, others):
        attend = Attend(qkv, heads, kv_heads, None, lse, own)
        return attention_formula(attend, attend.to(others.T[heads * d :], queries, keys, other))

    unseen = others.copy().reshape(samples, length, -1)
    unseen[:, : keys.start] = unseen[:, keys.stop :] = np.nan
    kv = ops.keys_and_values(Attend(columns(unseen.reshape(others.shape)), heads, kv_heads, None, None), arena)
    out, lse = nan_columns(len(qkv), heads * d), nan(samples, heads, length)
    attend = Attend(columns(qkv), heads, kv_heads, out, lse, own)
    ops.attention(attend, arena)
    with np.errstate(divide="ignore"):
        ops.attention(attend.to(kv, queries, keys, other), arena)
    for got, expected in zip((out, lse), formula(qkv, others), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)
    d_out, d_qkv, d_kv = columns(rng.normal(size=out.shape)), nan_columns(*qkv.shape), nan(*kv.shape)
    ops.attention_backward(attend, d_out, d_qkv, arena)
    kv = ops.keys_and_values(Attend(columns(others), heads, kv_heads, None, None), arena)
    ops.attention_backward(attend.to(kv, queries, keys, other), d_out, d_qkv, arena, d_kv)
    d_others = columns(np.zeros(qkv.shape))
    ops.add_keys_and_values(d_kv, d_others)
    ops.add_keys_and_values(d_kv, d_others)
    check_gradients(rng, lambda *x: formula(*x)[0], (qkv, others), (d_qkv, d_others / 2), d_out)


def test_attention_to_keys_stands_large_scores(rng, arena):
    """Of two parts whose scores differ by thousands, the larger counts alone."""
    for own, other in ((1, 1e3), (1e3, 1), (1e3, 1e3)):
        qkv, others = rng.normal(size=(2, 5, 6))
        qkv[:, 2:4] *= own
        others[:, 2:4] *= other
        out, lse = nan_columns(5, 2), nan(1, 1, 5)
        ops.attention(Attend(columns(qkv), 1, 1, out, lse), arena)
        kv = ops.keys_and_values(Attend(columns(others), 1, 1, None, None), arena)
        ops.attention(Attend(columns(qkv), 1, 1, out, lse, None, kv, slice(0, 5), slice(0, 5)), arena)
        for t in range(5):
            seen = np.concatenate([qkv[: t + 1], others])
            scores = seen[:, 2:4] @ qkv[t, :2] / math.sqrt(2)
            p = np.exp(scores - scores.max())
            np.testing.assert_allclose(out[t], p / p.sum() @ seen[:, 4:], rtol=1e-9, atol=1e-9)


def test_attention_stands_large_scores(rng, arena):
    """Scores in the thousands: the softmax is one-hot, nothing overflows, future keys do not count."""
    length, d = 9, 2
    qkv = rng.normal(size=(length, 3 * d)) * 100
    qkv[-1, d : 2 * d] = 1e4  # a key that only the last query may see
    out, lse = nan_columns(length, d), nan(1, 1, length)
    ops.attention(Attend(columns(qkv), 1, 1, out, lse), arena)
    d_qkv = nan_columns(*qkv.shape)
    ops.attention_backward(Attend(columns(qkv), 1, 1, out, lse), columns(np.ones((length, d))), d_qkv, arena)
    assert np.isfinite(d_qkv).all()
    for t in range(length):
        scores = qkv[: t + 1, d : 2 * d] @ qkv[t, :d] / math.sqrt(d)
        p = np.exp(scores - scores.max())
        np.testing.assert_allclose(out[t], p / p.sum() @ qkv[: t + 1, 2 * d :], rtol=1e-9, atol=1e-9)


def mask_arrays(samples, length, keys=None):
    return Mask(
        np.full((samples, length), -9, np.int32), np.full((samples, length if keys is None else keys), -9, np.int32)
    )


def check_mask(mask, seen):
    """``mask`` says of each query and of each key what ``seen`` (B, queries, keys) does."""
    first, last = mask.first_key, mask.last_query
    query, key = np.arange(first.shape[1])[:, None], np.arange(last.shape[1])
    np.testing.assert_array_equal(key >= first[:, :, None], seen)
    np.testing.assert_array_equal(query <= last[:, None], seen)


@pytest.mark.parametrize("window", [None, 1, 4, 999])
@pytest.mark.parametrize("documents", [True, False])
def test_mask_of_a_sequence_and_of_parts(rng, documents, window):
    length = int(rng.integers(1, 60))
    starts = masks.random_starts(rng, 3, length) if documents else None
    mask, every = mask_arrays(3, length), np.arange(length)
    ops.attention_mask(starts, window, mask)
    check_mask(mask, np.broadcast_to(masks.visible(starts, window, every, causal=False), (3, length, length)))
    queries, keys = (np.flatnonzero(rng.random(length) < 0.5) for _ in range(2))
    of_queries = None if starts is None else starts[:, queries]
    mask = mask_arrays(3, len(queries), len(keys))
    ops.attention_mask(of_queries, window, mask, queries, keys)
    seen = masks.visible(of_queries, window, queries, keys, causal=False)
    check_mask(mask, np.broadcast_to(seen, (3, len(queries), len(keys))))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("scores", [1, 150, 10**6])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 99])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "lengths"), [(3, 3, [1]), (4, 2, [3, 4, 5]), (4, 1, [1, 7]), (2, 2, [99])]
)
def test_attention_with_a_mask(rng, arena, heads, kv_heads, lengths, window):
    samples, length, d = 3, 13, 3
    qkv, d_out = (rng.normal(size=(samples * length, n * d)) for n in (heads + 2 * kv_heads, heads))
    starts, mask = masks.starts_of(lengths, samples, length), mask_arrays(samples, length)
    ops.attention_mask(starts, window, mask)
    out, lse, d_qkv = nan_columns(*d_out.shape), nan(samples, heads, length), nan_columns(*qkv.shape)
    ops.attention(Attend(columns(qkv), heads, kv_heads, out, lse, mask), arena)
    ops.attention_backward(Attend(columns(qkv), heads, kv_heads, out, lse, mask), columns(d_out), d_qkv, arena)
    seen = masks.visible(starts, window, np.arange(length))
    for got, want in zip(
        (out, lse, d_qkv), masks.dense_packed(qkv, d_out, samples, heads, kv_heads, seen), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_documents_of_a_sample_are_as_samples_of_their_own(rng, arena):
    """Nothing of another document is read, and the sums do not depend on what else is in the batch: equal bits."""
    size = numpy_attention.QUERY_BLOCK  # of a document
    samples, length, heads, kv_heads, d = 3, 3 * size, 4, 2, 3
    qkv, d_out = (rng.normal(size=(samples * length, n * d)) for n in (heads + 2 * kv_heads, heads))
    starts = np.tile(np.arange(length) // size * size, (samples, 1)).astype(np.int32)

    def run(qkv, d_out, samples, starts):
        length = len(qkv) // samples
        mask = mask_arrays(samples, length)
        ops.attention_mask(starts, None, mask)
        out, lse, d_qkv = nan_columns(*d_out.shape), nan(samples, heads, length), nan_columns(*qkv.shape)
        ops.attention(Attend(columns(qkv), heads, kv_heads, out, lse, mask), arena)
        ops.attention_backward(Attend(columns(qkv), heads, kv_heads, out, lse, mask), columns(d_out), d_qkv, arena)
        return out, lse.swapaxes(1, 2).reshape(len(qkv), heads), d_qkv

    qkv[size : 2 * size] = np.nan
    together = run(qkv, d_out, samples, starts)
    for document in range(samples * length // size):
        rows = slice(size * document, size * (document + 1))
        for part, whole in zip(run(qkv[rows], d_out[rows], 1, None), together, strict=True):
            np.testing.assert_array_equal(part, whole[rows])


SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_setting_of_attention_reaches_all_layers_of_every_family(family, monkeypatch):
    """A family that makes its attention elsewhere than in ``LlamaConfig.attention`` would leave the setting out."""
    make, asked = LlamaConfig.attention, slice(3, 5)
    monkeypatch.setattr(LlamaConfig, "attention", lambda *operands, **more: make(*operands, **more, queries=asked))
    found = [each for layer in family(**SHAPE).layers(range(4)) for each in layer if isinstance(each, Attention)]
    assert [each.attend((4, 4), *[np.zeros(1)] * 3).queries for each in found] == [asked] * 4


def attend(dtype: Any, head_dim: int) -> Attend:
    """Of 2 query heads and a kv head."""
    return Attend(np.zeros((1, 4 * head_dim), dtype), 2, 1, *[np.zeros(1)] * 2)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "chosen"),
    [
        (ml_dtypes.bfloat16, 64, {"hopper": "hopper", "mma": "mma", "simple": "simple"}),
        (np.float16, 128, {"hopper": "hopper", "mma": "mma", "simple": "simple"}),
        (ml_dtypes.bfloat16, 16, {"hopper": "hopper", "mma": "mma", "simple": "simple"}),
        (ml_dtypes.bfloat16, 80, {"hopper": "hopper", "mma": "mma", "simple": "simple"}),
        (ml_dtypes.bfloat16, 256, {"hopper": "mma", "mma": "mma", "simple": "simple"}),
        (ml_dtypes.bfloat16, 72, dict.fromkeys(KERNEL_SETS, "simple")),
        (np.float32, 64, dict.fromkeys(KERNEL_SETS, "simple")),
        (np.float32, 256, dict.fromkeys(KERNEL_SETS, "simple")),
    ],
)
def test_the_fastest_kernels_that_compute_an_attention(dtype, head_dim, chosen):
    """``chosen``: by the fastest kernels that the GPU has."""
    assert {fastest: kernel_set(attend(dtype, head_dim), fastest) for fastest in KERNEL_SETS} == chosen


def test_what_kernels_do_not_compute_is_named():
    for kernels in ("hopper", "mma"):
        assert unsupported(kernels, attend(np.float32, 64)) == "bfloat16 or float16, got float32"
        assert unsupported(kernels, attend(np.float16, 72)) == "a head size that is a multiple of 16, got 72"
    assert unsupported("hopper", attend(np.float16, 192)) == "a head size of at most 128, got 192"
    for fastest in KERNEL_SETS:
        with pytest.raises(InvalidArgument, match="attention: expected a head size of at most 256, got 258"):
            kernel_set(attend(np.float32, 258), fastest)
