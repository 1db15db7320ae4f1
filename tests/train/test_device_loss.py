"""The loss on GPUs, also emulated, against NumPy's in float64: of the whole vocabulary, and of parts of it."""

import math
from itertools import pairwise

import numpy as np
import pytest

from kos.memory.arena import Arena
from kos.train.ops import numpy as reference
from tests.train.ops_cases import UNIT, arena, ops, side, sides

__all__ = ["arena", "ops", "side"]


@sides("n vocabulary", [(13, 17), (5, 65), (70, 1000), (33, 50_304), (7, 128_256)], turns=[(5, 65), (9, 20_008)],
       slow=[(5, 67), (5, 1000), (7, 60_008)])
def test_cross_entropy(ops, side, rng, arena, monkeypatch, n, vocabulary):
    monkeypatch.setattr(ops, "multiprocessors", 2)  # so that a block has several rows
    logits, logits64 = side.put(rng.normal(size=(n, vocabulary)) * 5)
    targets = rng.integers(0, vocabulary, n).astype(np.int32)
    targets[[2, n - 1]] = -1
    on_device = side.ints(targets)
    losses, alone, count, mean = (
        side.nan(size, dtype=dtype) for size, dtype in ((n, "float32"), (n, "float32"), (1, "float32"), (1, "float64"))
    )
    losses64, count64, mean64 = np.empty(n), np.empty(1), np.empty(1)
    scratch, _ = side.put(logits64)
    ops.cross_entropy(scratch, on_device, None, alone, arena)
    ops.count_targets(on_device, count)
    assert side.get(count) == [n - 2]
    ops.cross_entropy(logits, on_device, count, losses, arena)
    reference.count_targets(targets, count64)
    reference.cross_entropy(logits64, targets, count64, losses64, Arena())
    side.close(losses, losses64, 20, "float32")
    assert np.array_equal(side.get(losses), side.get(alone))
    side.close(logits, logits64, 20 if side.dtype == "float32" else 3)
    assert not side.get(logits)[[2, n - 1]].any()
    ops.mean_loss(losses, count, mean)
    reference.mean_loss(losses64, count64, mean64)
    assert side.get(mean)[0] == pytest.approx(mean64[0], rel=1e-6)


@sides()
def test_cross_entropy_stands_large_logits(ops, side, arena):
    logits, _ = side.put([[8192.0, 0.0], [-8192.0, 0.0], [-math.inf, 1.0]])
    count, _ = side.put([2.0], "float32")
    losses = side.nan(3, dtype="float32")
    ops.cross_entropy(logits, side.ints([1, 1, 1]), count, losses, arena)
    assert np.array_equal(side.get(losses), [8192, 0, 0])
    assert np.array_equal(side.get(logits), [[0.5, -0.5], [0, 0], [0, 0]])


@sides("n bounds", [
    (13, (0, 4, 17)), (5, (0, 1, 64, 65)), (70, (0, 256, 1000)), (9, (0, 16_032, 20_008)), (6, (0, 32_064, 128_256)),
], turns=[(13, (0, 4, 17)), (5, (0, 4008, 20_008))], slow=[(7, (0, 4, 17)), (5, (0, 256, 1000))])  # fmt: skip
def test_cross_entropy_of_parts(ops, side, rng, arena, n, bounds):
    """Parts of any size have the losses and the gradient of the whole vocabulary."""
    (_, whole64), count64, losses64 = side.put(rng.normal(size=(n, bounds[-1])) * 5), np.empty(1), np.empty(n)
    targets = rng.integers(0, bounds[-1], n).astype(np.int32)
    targets[:4] = [0, bounds[1] - 1, -1, bounds[1]]
    parts, on_device, count = list(pairwise(bounds)), side.ints(targets), side.nan(1, dtype="float32")
    statistics = side.nan(len(parts), 3, n, dtype="float32")
    for index, (first, end) in enumerate(parts):
        logits, logits64 = side.put(whole64[:, first:end])
        ops.logit_statistics(logits, on_device, first, statistics[index], arena)
        expected = np.empty((3, n))
        reference.logit_statistics(logits64, targets, first, expected, Arena())
        top, total, at_target = side.get(statistics[index])
        assert np.array_equal(side.get(logits), logits64)
        assert np.array_equal([top, at_target], expected[[0, 2]])
        np.testing.assert_allclose(total, expected[1], rtol=128 * UNIT["float32"])
    gradient64 = whole64.copy()
    reference.count_targets(targets, count64)
    reference.cross_entropy(gradient64, targets, count64, losses64, Arena())
    ops.count_targets(on_device, count)
    first_losses = None
    for first, end in parts:
        logits, logits64 = side.put(whole64[:, first:end])
        alone, losses = side.nan(n, dtype="float32"), side.nan(n, dtype="float32")
        ops.cross_entropy_of_parts(logits, on_device, first, statistics, None, alone, arena)
        ops.cross_entropy_of_parts(logits, on_device, first, statistics, count, losses, arena)
        side.close(losses, losses64, 20, "float32")
        first_losses = side.get(losses) if first_losses is None else first_losses
        assert np.array_equal(side.get(losses), first_losses) and np.array_equal(side.get(alone), first_losses)
        side.close(logits, gradient64[:, first:end], 20 if side.dtype == "float32" else 3)
        assert not side.get(logits)[2].any()


@sides()
def test_cross_entropy_of_parts_stands_large_logits(ops, side, arena):
    """And a part in which no token can come next."""
    whole = np.array([[8192.0, 0, 0], [-8192, 0, -8192], [-math.inf, -math.inf, 1], [-math.inf, -math.inf, 1]])
    targets, statistics = side.ints([2, 1, 2, -1]), side.nan(2, 3, 4, dtype="float32")
    parts, (count, _) = {0: whole[:, :2], 2: whole[:, 2:]}, side.put([2.0], "float32")
    for index, (first, part) in enumerate(parts.items()):
        ops.logit_statistics(side.put(part)[0], targets, first, statistics[index], arena)
    gradient = np.array([[0.5, 0, -0.5], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    for first, part in parts.items():
        logits, losses = side.put(part)[0], side.nan(4, dtype="float32")
        ops.cross_entropy_of_parts(logits, targets, first, statistics, count, losses, arena)
        assert np.array_equal(side.get(losses), [8192, 0, 0, 0])
        assert np.array_equal(side.get(logits), gradient[:, first : first + part.shape[1]])


@sides()
def test_cross_entropy_of_nothing_is_zero(ops, side, rng, arena):
    logits, _ = side.put(rng.normal(size=(3, 5)))
    targets, losses, count = side.ints([-1, -1, -1]), side.nan(3, dtype="float32"), side.nan(1, dtype="float32")
    mean = side.nan(1, dtype="float64")
    ops.count_targets(targets, count)
    ops.cross_entropy(logits, targets, count, losses, arena)
    ops.mean_loss(losses, count, mean)
    assert side.get(mean)[0] == 0 and not side.get(logits).any()


@sides("columns", [(1,), (17,), (1000,)], [(1,), (300,)])
def test_scale_rows(ops, side, rng, columns):
    x, x64 = side.put(rng.normal(size=(5, columns)))
    targets, (weights, weights64), (count, count64) = (
        np.array([3, -1, 0, 7, -1], np.int32), side.put(rng.normal(size=5), "float32"), side.put([4.0], "float32")
    )  # fmt: skip
    for of, divisor in ((None, None), (weights, None), (None, count), (weights, count)):
        ops.scale_rows(x, side.ints(targets), of, divisor)
        reference.scale_rows(x64, targets, None if of is None else weights64, None if divisor is None else count64)
    side.close(x, x64, 6)
    assert not side.get(x)[[1, 4]].any() and side.get(x)[0].any()
