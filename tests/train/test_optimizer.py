"""AdamW and the gradient norm against PyTorch's, and the schedules against plain formulas."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kos.train.ops import numpy as numpy_ops
from kos.train.ops.numpy_optimizer import LearningRate
from kos.train.ops.parameters import Parameters
from kos.train.optim import CHUNK, Group, Optimizer, decay_matrices
from kos.train.optim.adamw import AdamW
from tests.goldens import distance, sketch
from tests.train.of_transformers import torch
from tests.train.updates import check_skipped

SHAPES = {"b.weight": (7, 2 * CHUNK // 7 + 5), "norm.weight": (33,), "a.weight": (3, 5), "other_norm.weight": (1,)}


def _filled(rng: np.random.Generator) -> Parameters:
    parameters = Parameters(SHAPES)
    parameters.flat[:] = rng.standard_normal(parameters.flat.size)
    return parameters


GROUPS = {
    "no decay": decay_matrices(SHAPES, 0.0),
    "decay": decay_matrices(SHAPES, 0.1),
    "three": [
        Group(["b.weight"], 0.1, 0.5), Group(["norm.weight", "a.weight"], lr_scale=3.0), Group(["other_norm.weight"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_adamw_is_torchs(name, golden):
    groups, rng = GROUPS[name], np.random.default_rng(1)
    weights, gradients = _filled(rng), [_filled(rng) for _ in range(10)]
    expected = golden(name, lambda: torchs(groups, weights, gradients))
    optimizer = Optimizer(AdamW((0.9, 0.99), 1e-6), weights, groups=groups, grad_clip=1.0)
    for step, each in enumerate(gradients):
        optimizer.learning_rate = LearningRate("constant", 1e-2 / (step + 1), 0, 1, 0)
        optimizer.norm(each)
        optimizer.update(each, 2)
        assert optimizer.read()["norm"] == pytest.approx(expected["norms"][step], rel=1e-6)
    for name, value in expected["weights"].items():
        if weights[name].size == len(value):
            np.testing.assert_allclose(weights[name].ravel(), value, rtol=2e-5, atol=2e-6, err_msg=name)
        else:
            assert distance(weights[name], value) < 2e-6, name


def torchs(groups: list[Group], weights: Parameters, gradients: list[Parameters]) -> dict[str, Any]:
    """The norms of torch's steps, and the weights after them."""
    theirs = {name: torch.tensor(weights[name].copy(), dtype=torch.float64, requires_grad=True) for name in weights}
    of_torch = [{"params": [theirs[name] for name in group.names], "weight_decay": group.decay} for group in groups]
    reference = torch.optim.AdamW(of_torch, betas=(0.9, 0.99), eps=1e-6)
    norms = []
    for step, each in enumerate(gradients):
        for name, tensor in theirs.items():
            tensor.grad = torch.tensor(each[name] * 0.5, dtype=torch.float64)
        norms.append(float(torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)))
        for group, ours in zip(reference.param_groups, groups, strict=True):
            group["lr"] = ours.lr_scale * 1e-2 / (step + 1)
        reference.step()
    after = {name: tensor.detach().numpy() for name, tensor in theirs.items()}
    return {"norms": norms, "weights": {name: sketch(x) if x.size > 99 else x.ravel() for name, x in after.items()}}


@pytest.mark.parametrize(
    ("kind", "after_warmup"),
    [
        ("cosine", [0.55 + 0.45 * math.cos(math.pi * step / 53) for step in range(54)]), ("constant", [1.0] * 54),
        ("wsd", [1.0] * 33 + [1 - 0.9 * step / 20 for step in range(21)]),
    ],
)  # fmt: skip
def test_schedules(kind, after_warmup):
    """A linear warm-up, then half a cosine, the peak, or the peak and a straight line; the last rate stays."""
    schedule = LearningRate(kind, 1.0, 0.1, 60, 7, 20)
    expected = [*(step / 7 for step in range(1, 8)), *after_warmup]
    assert [schedule(step) for step in range(len(expected))] == pytest.approx(expected, rel=1e-12)
    assert schedule(1000) == pytest.approx(expected[-1])


def test_skipped_steps_are_no_updates():
    def make(rule, weights, schedule, groups, skip):
        return Optimizer(rule, weights, schedule, groups=groups, skip_outliers=skip)

    ops = SimpleNamespace(zeros=np.zeros, copy=numpy_ops.copy, to_host=numpy_ops.to_host)
    check_skipped(ops, Parameters({"a": (60, 5)}), make)
