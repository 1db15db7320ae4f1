"""The model and its optimizer on the trainer's CUDA kernels, on machines without a GPU: their threads run as fibers."""

import math

import numpy as np
import pytest

from kos.dtypes import DTYPES
from kos.train.ops.numpy_optimizer import CHUNKS, LearningRate, reproducible_squares
from kos.train.ops.parameters import Parameters
from kos.train.optim import Optimizer
from kos.train.optim.adamw import AdamW
from tests.train import test_model_cuda as on_models
from tests.train.host_kernels.ops import needs_compiler, ops
from tests.train.models import queue

__all__ = ["ops"]
pytestmark = needs_compiler


@pytest.mark.parametrize(("shape", "dtype"), [
    ("odd", "bfloat16"),
    pytest.param("odd gpt2", "float32", marks=pytest.mark.slow),
    pytest.param("gpt2", "bfloat16", marks=pytest.mark.slow),
])  # fmt: skip
def test_model(ops, shape, dtype):
    """The model's file on the cuda dialect: loss and every gradient, twice with the same bits in a fixed arena."""
    config = (on_models.SHAPES | on_models.GPT2)[shape].replace(num_hidden_layers=2 if shape == "odd" else 1)
    pair = on_models.Pair(ops, config, dtype)
    loss, expected = pair.run(), pair.run64()
    tolerance = 1e-5 if dtype == "float32" else 0.1
    assert loss == pytest.approx(expected, rel=tolerance / 4)
    for name in pair.gradients:
        got, want = pair.gradients[name].numpy().astype(np.float64), pair.gradients64[name]
        assert np.linalg.norm(got - want) < tolerance * np.linalg.norm(want), name
    kept = pair.gradients.flat.numpy()
    pair.model.arena.fix()
    pair.gradients.flat.fill_bytes(255)
    assert pair.run() == loss
    assert np.array_equal(pair.gradients.flat.numpy(), kept)


def test_bfloat16_gradients_are_rounded_once(ops):
    on_models.test_bfloat16_gradients_are_rounded_once(ops, "wide")


@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16"])
def test_the_exact_norm_does_not_depend_on_cuts(ops, rng, gradient_dtype):
    """Numbers of very different magnitudes give the CPU's two sums, whole and in three stages, in every layout."""
    sizes = {"a": (7,), "b": (3, 6001), "c": (1, 1), "d": (5, 13), "e": (131, 130)}
    dtype = DTYPES[gradient_dtype].numpy
    spread = {name: (rng.normal(size=x) * 10.0 ** rng.integers(-9, 3, x)).astype(dtype) for name, x in sizes.items()}
    total = sum(x.size for x in spread.values())

    def stage(names, largest):
        gradients = Parameters({name: sizes[name] for name in names}, gradient_dtype, None, ops.zeros)
        for name in names:
            gradients[name].copy_from(spread[name])
        schedule = LearningRate("constant", 1, 0, 9, 0)
        optimizer = Optimizer(AdamW(), gradients.like("float32"), schedule, ops=ops, exact=total)
        optimizer.norm(gradients, find_largest=largest)
        state = optimizer.read()
        return np.array([state["sum_of_squares"], state["rest"]]), optimizer

    magnitude = []
    sums, _ = stage(sizes, lambda bits: magnitude.append(bits.numpy()))
    values = np.concatenate([x.ravel() for x in spread.values()]).astype(np.float32)
    assert magnitude[0].view(np.float32) == abs(values).max()
    chunk, expected = np.zeros(1, CHUNKS), np.zeros((2, 1))
    chunk["length"], most = total, abs(values).max(keepdims=True).view(np.int32)
    reproducible_squares(values, chunk, expected, 1, most, total.bit_length())
    assert sums.tolist() == expected[:, 0].tolist()
    assert sums.sum() == pytest.approx(math.fsum(values.astype(np.float64) ** 2), rel=1e-14)
    of_all = [stage(x, lambda bits: bits.copy_from(magnitude[0]))[0] for x in (("d", "c", "a"), ("b",), ("e",))]
    assert sum(of_all).tolist() == sums.tolist()
    for value in (np.nan, np.inf, 0.0):
        spread = {name: np.full(x, value if name == "d" or not value else 1, dtype) for name, x in sizes.items()}
        sums, optimizer = stage(sizes, lambda bits: None)
        np.testing.assert_equal(sums.sum(), value)
        assert optimizer.not_finite() == (None if value == 0 else "d")


def test_outliers_are_skipped_or_stop_all(ops, rng):
    shapes = {"norm": (5,), "a": (9, 11)}
    for skip in (0.0, 2.0):
        weights = Parameters(shapes, "float32", None, ops.zeros)
        gradients = weights.like()
        schedule = LearningRate("constant", 1e-2, 0, 9, 0)
        optimizer = Optimizer(AdamW(), weights, schedule, ops=ops, skip_outliers=skip)
        moved = []
        for value in (0.01, np.nan, 0.01, 5.0, 0.01):
            gradients["a"].copy_from(np.full((9, 11), value, np.float32))
            before = weights.flat.numpy()
            queue(optimizer, gradients)
            moved.append(not np.array_equal(before, weights.flat.numpy()))
            assert optimizer.not_finite() == ("a" if np.isnan(value) else None)
        assert moved == ([True, False, True, False, True] if skip else [True, False, False, False, False])
        assert (optimizer.step_count, optimizer.read()["halted"]) == ((5, 0) if skip else (1, 1))


def test_skipped_steps_are_no_updates(ops):
    on_models.test_skipped_steps_are_no_updates(ops, False)


def constant(ops):
    """A weight, its gradient, and an optimizer of a constant rate."""
    weights = Parameters({"a": (9, 11)}, "float32", None, ops.zeros)
    gradients = weights.like()
    gradients["a"].copy_from(np.full((9, 11), 0.5, np.float32))
    return weights, gradients, Optimizer(AdamW(), weights, LearningRate("constant", 1e-2, 0, 9, 0), ops=ops)


def test_an_update_needs_the_same_step_of_all_ranks(ops):
    """A rank whose collectives were ended has others' reports of an earlier step, or none; what it has counts later."""
    weights, gradients, optimizer = constant(ops)
    moved, report = [], np.array([0.0, 2.0, 7.0, 0.0, 1.5])
    for column, value in ((0, 1.0), (1, 1.0), (2, 6.0), (2, 0.0), (3, 2.0)):
        reports = np.stack([report, report, report])
        reports[2, column] = value
        own, all_of_them = (ops.zeros(each.shape, np.float64) for each in (report, reports))
        own.copy_from(report)
        all_of_them.copy_from(reports)
        before = weights.flat.numpy()
        optimizer.norm(gradients)
        optimizer.check_in_step(gradients, own, all_of_them)
        optimizer.update(gradients)
        moved.append(not np.array_equal(before, weights.flat.numpy()))
        if not moved[-1]:
            optimizer.resume()
            optimizer.update(gradients)
            assert not np.array_equal(before, weights.flat.numpy())
    assert moved == [True, False, False, False, True] and optimizer.step_count == 5


def test_a_rank_whose_collectives_were_ended_has_a_report_for_which_no_step_counts(ops):
    _, gradients, optimizer = constant(ops)
    words, report = np.zeros(2, np.uint64), ops.zeros(5, np.float64)
    addresses = ops.zeros(2, np.uint64)
    addresses.copy_from(np.array([words.ctypes.data, words.ctypes.data + 8], np.uint64))
    counted = []
    for words[0], words[1] in ((0, 0), (1, 0), (0, 1)):
        report.copy_from(np.array([0.0, 2.0, 7.0, 0.0, 1.5]))
        optimizer.invalidate_if_aborted(gradients, addresses, report)
        reports = ops.zeros((3, 5), np.float64)
        reports.copy_from(np.stack([report.numpy()] * 3))  # all ranks have the same: none may count
        optimizer.continue_after(0, 0)
        optimizer.norm(gradients)
        optimizer.check_in_step(gradients, report, reports)
        optimizer.update(gradients)
        counted.append(optimizer.step_count)
    assert counted == [1, 0, 0]


def test_weights_without_a_float32_copy(ops):
    on_models.test_weights_are_rounded_at_random(ops)
    on_models.test_weights_that_are_lost_stay_so(ops)
