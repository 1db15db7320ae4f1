"""Operations of a dialect where values are large or none, what they refuse, and norms against a plain formula.

What each of them computes, ``test_families.py`` compares with transformers, in float64 and with every gradient.
Everything runs in float64 on odd sizes.  Outputs and scratch start as NaN, so that reading what was not
written shows.  A gradient is checked along random directions: with a random d_out, d_out . (f(x + h u) -
f(x - h u)) / 2h must be dx . u.
"""

import numpy as np
import pytest

from kos.errors import InvalidArgument
from kos.train.ops import numpy as ops
from kos.train.ops.norm import Normalize
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


@pytest.mark.parametrize("wrong", [-1, 11])
def test_embedding_refuses_a_token_outside(wrong):
    with pytest.raises(InvalidArgument, match="expected tokens from 0 to 10, got"):
        ops.embedding(np.array([3, wrong], np.int32), np.zeros((11, 2)), np.zeros((2, 2)))


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


def test_swiglu_stands_large_gates(arena):
    gate_up = np.array([[-1e4, 2.0], [1e4, 2.0]])
    out, d_gate_up = nan_columns(2, 1), nan_columns(2, 2)
    ops.swiglu(columns(gate_up), out, arena)
    ops.swiglu_backward(columns(np.ones((2, 1))), columns(gate_up), out, d_gate_up, arena)
    assert np.array_equal(out, [[0], [2e4]])
    assert np.array_equal(d_gate_up, [[0, 0], [2, 1e4]])


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
