"""Each operation of a dialect: forward against a plain formula, backward against finite differences.

Everything runs in float64 on odd sizes.  Outputs and scratch start as NaN, so that reading what was not
written shows.  A gradient is checked along random directions: with a random d_out, d_out . (f(x + h u) -
f(x - h u)) / 2h must be dx . u.
"""

import math

import numpy as np
import pytest

from kos.errors import InvalidArgument
from kos.train.ops import Normalize
from kos.train.ops import numpy as ops
from tests.train.cpu_ops import arena, check_gradients, columns, nan, nan_columns

__all__ = ["arena"]  # a fixture


pytestmark = pytest.mark.usefixtures("small_blocks")


def both_ways(backward, shape, rng):
    """A weight's gradient, written over NaN; added to something, it must give the sum."""
    written = nan(*shape)
    backward(written, False)
    start = rng.normal(size=shape)
    added = start.copy()
    backward(added, True)
    np.testing.assert_allclose(added, start + written, rtol=1e-12, atol=1e-12)
    return written


def test_embedding(rng, arena):
    tokens = rng.integers(0, 11, 23).astype(np.int32)
    tokens[tokens == 4] = 5  # one row that no token asks for
    table, out = rng.normal(size=(11, 7)), nan(23, 7)
    ops.embedding(tokens, table, out)
    assert np.array_equal(out, np.array([table[t] for t in tokens]))
    d_out = rng.normal(size=out.shape)
    expected = np.zeros_like(table)
    for token, row in zip(tokens, d_out, strict=True):
        expected[token] += row
    got = both_ways(lambda d, add: ops.embedding_backward(d_out, tokens, d, add, arena), table.shape, rng)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
    for first, end in ((None, 11), (0, 6), (6, 11)):
        got = both_ways(
            lambda d, add, first=first: ops.embedding_backward(d_out, tokens, d, add, arena, first, 5),
            (end - (first or 0), 7), rng,
        )  # fmt: skip
        np.testing.assert_allclose(got, np.where(np.arange(11) == 5, 0, expected.T).T[first:end], rtol=1e-12)


@pytest.mark.parametrize("wrong", [-1, 11])
def test_embedding_refuses_a_token_outside(wrong):
    with pytest.raises(InvalidArgument, match="expected tokens from 0 to 10, got"):
        ops.embedding(np.array([3, wrong], np.int32), np.zeros((11, 2)), np.zeros((2, 2)))


@pytest.mark.parametrize("order", [np.ascontiguousarray, columns])
def test_linear(rng, arena, order):
    x, weight, out = rng.normal(size=(13, 5)), rng.normal(size=(9, 5)), order(nan(13, 9))

    def formula(x, weight):
        return np.array([[sum(a * b for a, b in zip(row, w, strict=True)) for w in weight] for row in x])

    ops.linear(x, weight, out)
    np.testing.assert_allclose(out, formula(x, weight), rtol=1e-12, atol=1e-12)
    residual, added = rng.normal(size=(13, 9)), order(nan(13, 9))
    ops.linear(x, weight, added, residual)
    np.testing.assert_allclose(added, out + residual, rtol=1e-12, atol=1e-12)
    ops.linear(x, weight, added, residual, bias := rng.normal(size=9))
    np.testing.assert_allclose(added, out + residual + bias, rtol=1e-12, atol=1e-12)
    d_out, dx = order(rng.normal(size=out.shape)), order(nan(13, 5))
    ops.linear_input_gradient(d_out, weight, dx)
    d_weight = both_ways(lambda d, add: ops.linear_weight_gradient(d_out, x, d, add, arena), (9, 5), rng)
    check_gradients(rng, formula, (x, weight), (dx, d_weight), d_out)


@pytest.mark.parametrize("centered", [False, True])
def test_norms(rng, arena, centered):
    """RMSNorm, and LayerNorm, which is centered and has a bias."""
    x, weight, eps = 2 * centered + rng.normal(size=(13, 11)), rng.normal(size=11), 0.1
    bias = [rng.normal(size=11)] * centered
    out, statistics = nan(13, 11), nan(2, 13) if centered else nan(13)

    def formula(x, weight, *bias):
        x = x - x.mean(axis=1, keepdims=True) if centered else x
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight + sum(bias)

    norm = Normalize(weight, eps, *bias)
    ops.normalize(x, norm, out, statistics)
    np.testing.assert_allclose(out, formula(x, weight, *bias), rtol=1e-12, atol=1e-12)
    d_out, residual = rng.normal(size=out.shape), rng.normal(size=x.shape)

    def backward(d_both, accumulate):
        backward.dx = residual.copy()
        d_weight, *d_bias = d_both
        ops.normalize_backward(d_out.copy(), x, norm, statistics, backward.dx, d_weight, accumulate, arena, *d_bias)

    d_both = both_ways(backward, (1 + centered, 11), rng)
    check_gradients(rng, formula, (x, weight, *bias), (backward.dx - residual, *d_both), d_out)


@pytest.mark.parametrize("rows", [slice(0, 13), slice(4, 9)])
def test_head_norm(rng, arena, rows):
    """Of some heads of some rows: nothing else is read or written."""
    heads, d, eps = slice(2, 5), 6, 0.1
    kept = rows, slice(heads.start * d, heads.stop * d)
    x, weight = rng.normal(size=(13, 7 * d)), rng.normal(size=d)
    out, raw = columns(x.copy()), nan_columns(13, 6 * d)

    def formula(x, weight):
        each = x[kept].reshape(-1, 3, d)
        return (each / np.sqrt((each * each).mean(axis=2, keepdims=True) + eps) * weight).reshape(-1, 3 * d)

    expected, of_raw = x.copy(), nan(13, 6 * d)
    expected[kept], of_raw[kept] = formula(x, weight), x[kept]
    norm = Normalize(weight, eps)
    ops.head_norm(out[rows], norm, heads, raw[rows])
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    np.testing.assert_array_equal(raw, of_raw)
    d_out = rng.normal(size=x.shape)

    def backward(d_weight, accumulate):
        backward.dx = columns(d_out.copy())
        ops.head_norm_backward(raw[rows], norm, heads, backward.dx[rows], d_weight, accumulate, arena)

    d_weight, dx = both_ways(backward, (d,), rng), np.zeros(x.shape)
    dx[kept], backward.dx[kept] = backward.dx[kept], d_out[kept]
    np.testing.assert_array_equal(backward.dx, d_out)
    check_gradients(rng, formula, (x, weight), (dx, d_weight), d_out[kept])


def test_sum_rows(rng, arena):
    x = rng.normal(size=(13, 5))
    for rows in (x, columns(x)):
        got = both_ways(lambda d, add, rows=rows: ops.sum_rows(rows, d, add, arena), (5,), rng)
        np.testing.assert_allclose(got, x.sum(axis=0), rtol=1e-12, atol=1e-12)


def rotated(x, frequencies, length, head_dim, heads):
    """Each pair (i, i + d/2) of the first ``heads`` heads, as a complex number, turned by its angle."""
    out, half = x.copy(), head_dim // 2
    for n in range(len(x)):
        for head in range(heads):
            at = head * head_dim
            z = x[n, at : at + half] + 1j * x[n, at + half : at + head_dim]
            z = z * np.exp(1j * (n % length) * np.asarray(frequencies))
            out[n, at : at + half], out[n, at + half : at + head_dim] = z.real, z.imag
    return out


def test_rope(rng, arena):
    head_dim, heads, length, frequencies = 6, 3, 5, [1.0, 0.3, 0.01]
    x = rng.normal(size=(2 * length, 4 * head_dim))  # the last head is not rotated
    tables = ops.rope_tables(frequencies, range(length), np.float64)
    out = columns(x.copy())
    ops.rope(out, tables, head_dim, heads, arena)
    np.testing.assert_allclose(out, rotated(x, frequencies, length, head_dim, heads), rtol=1e-12, atol=1e-12)
    d_out = rng.normal(size=x.shape)
    dx = columns(d_out.copy())
    ops.rope_backward(dx, tables, head_dim, heads, arena)
    check_gradients(rng, lambda x: rotated(x, frequencies, length, head_dim, heads), (x,), (dx,), d_out)


# --- masks -------------------------------------------------------------------------------------------


def test_swiglu(rng, arena):
    gate_up = rng.normal(size=(13, 14)) * 3
    out = nan_columns(13, 7)

    def formula(gate_up):
        gate, up = gate_up[:, :7], gate_up[:, 7:]
        return gate / (1 + np.exp(-gate)) * up

    ops.swiglu(columns(gate_up), out, arena)
    np.testing.assert_allclose(out, formula(gate_up), rtol=1e-10, atol=1e-14)
    d_out, d_gate_up = rng.normal(size=out.shape), nan_columns(13, 14)
    ops.swiglu_backward(columns(d_out), columns(gate_up), out, d_gate_up, arena)
    check_gradients(rng, formula, (gate_up,), (d_gate_up,), d_out)


def test_gelu(rng, arena):
    x = rng.normal(size=(13, 7)) * 2

    def formula(x):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    out, dx = nan_columns(13, 7), nan_columns(13, 7)
    ops.gelu(columns(x), out, arena)
    np.testing.assert_allclose(out, formula(x), rtol=1e-10, atol=1e-14)
    d_out = rng.normal(size=x.shape)
    ops.gelu_backward(columns(d_out), columns(x), dx, arena)
    check_gradients(rng, formula, (x,), (dx,), d_out)


def test_swiglu_stands_large_gates(arena):
    gate_up = np.array([[-1e4, 2.0], [1e4, 2.0]])
    out, d_gate_up = nan_columns(2, 1), nan_columns(2, 2)
    ops.swiglu(columns(gate_up), out, arena)
    ops.swiglu_backward(columns(np.ones((2, 1))), columns(gate_up), out, d_gate_up, arena)
    assert np.array_equal(out, [[0], [2e4]])
    assert np.array_equal(d_gate_up, [[0, 0], [2, 1e4]])


def test_cross_entropy(rng, arena):
    logits, targets = rng.normal(size=(13, 17)) * 5, rng.integers(0, 17, 13).astype(np.int32)
    targets[[2, 12]] = -1

    def formula(logits):
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return np.array([0.0 if t < 0 else -row[t] for row, t in zip(log_p, targets, strict=True)])

    losses, count = nan(13), nan(1)
    ops.count_targets(targets, count)
    assert count[0] == 11
    ops.cross_entropy(logits.copy(), targets, None, losses, arena)
    rounding = 4 * np.finfo(float).eps * np.abs(logits).max()  # of the formula, which subtracts large terms
    np.testing.assert_allclose(losses, formula(logits), rtol=1e-10, atol=rounding)
    ops.mean_loss(losses, count, mean := nan(1))
    assert mean[0] == pytest.approx(formula(logits).sum() / 11)
    gradient, again = logits.copy(), nan(13)
    ops.cross_entropy(gradient, targets, count, again, arena)
    assert np.array_equal(again, losses)
    assert not gradient[[2, 12]].any()
    check_gradients(rng, formula, (logits,), (gradient,), np.full(13, 1 / 11))


def test_cross_entropy_stands_large_logits(arena):
    logits, losses = np.array([[1e4, 0.0], [-1e4, 0.0]]), nan(2)
    ops.cross_entropy(logits, np.array([1, 1], np.int32), np.array([2.0]), losses, arena)
    assert np.array_equal(losses, [1e4, 0])
    assert np.array_equal(logits, [[0.5, -0.5], [0, 0]])


def test_cross_entropy_of_nothing_is_zero(rng, arena):
    targets, losses, count = np.full(3, -1, np.int32), nan(3), nan(1)
    logits = rng.normal(size=(3, 5))
    ops.count_targets(targets, count)
    ops.cross_entropy(logits, targets, count, losses, arena)
    ops.mean_loss(losses, count, mean := nan(1))
    assert mean[0] == 0 and not logits.any()


def test_small_things(rng):
    a, b = rng.normal(size=(2, 5, 3))
    out = nan(5, 3)
    ops.add(a, b, out)
    assert np.array_equal(out, a + b)
    ops.copy(a, out)
    assert np.array_equal(out, a)
    ops.zero(out)
    assert not out.any()


def test_columns_are_asked_for_by_name(arena):
    with pytest.raises(InvalidArgument, match="expected an array of empty_columns, got strides"):
        ops.swiglu(np.zeros((4, 6)), np.zeros((4, 3)), arena)
    assert ops.empty_columns(arena, 4, 6, np.float32).shape == (4, 6)
