"""AdamW, the gradient norm and the schedules against PyTorch's, and against plain formulas."""

import math

import numpy as np
import pytest

from kos.errors import InvalidArgument
from kos.train.model.parameters import Parameters
from kos.train.optim import BLOCK, Group, LearningRate, Optimizer, clip_coefficient, decay_matrices
from kos.train.optim.adamw import AdamW

SHAPES = {"b.weight": (7, 2 * BLOCK // 7 + 5), "norm.weight": (33,), "a.weight": (3, 5), "other_norm.weight": (1,)}


def _filled(rng: np.random.Generator) -> Parameters:
    parameters = Parameters(SHAPES)
    parameters.flat[:] = rng.standard_normal(parameters.flat.size)
    return parameters


@pytest.mark.parametrize(
    "groups",
    [
        decay_matrices(SHAPES, 0.0), decay_matrices(SHAPES, 0.1),
        [Group(["b.weight"], 0.1, 0.5), Group(["norm.weight", "a.weight"], lr_scale=3.0), Group(["other_norm.weight"])],
    ],
)  # fmt: skip
def test_adamw_is_torchs(groups):
    torch = pytest.importorskip("torch", reason="needs torch to compare with")
    rng = np.random.default_rng(1)
    weights = _filled(rng)
    optimizer = Optimizer(AdamW((0.9, 0.99), 1e-6), weights, groups=groups)
    theirs = {name: torch.tensor(weights[name].copy(), dtype=torch.float64, requires_grad=True) for name in weights}
    of_torch = [{"params": [theirs[name] for name in group.names], "weight_decay": group.decay} for group in groups]
    reference = torch.optim.AdamW(of_torch, betas=(0.9, 0.99), eps=1e-6)
    for step in range(10):
        gradients = _filled(rng)
        for name, tensor in theirs.items():
            tensor.grad = torch.tensor(gradients[name] * 0.5, dtype=torch.float64)
        norm = float(torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0))
        for group, ours in zip(reference.param_groups, groups, strict=True):
            group["lr"] = ours.lr_scale * 1e-2 / (step + 1)
        reference.step()
        assert math.sqrt(optimizer.squares(gradients, weights.spans).sum()) * 0.5 == pytest.approx(norm, rel=1e-6)
        scale = 0.5 * clip_coefficient(norm, 1.0)
        optimizer.step(gradients, 1e-2 / (step + 1), scale)
    for name, tensor in theirs.items():
        np.testing.assert_allclose(weights[name], tensor.detach().numpy(), rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("names", [["b.weight"], [*SHAPES, "b.weight"], [*SHAPES, "c.weight"]])
def test_each_tensor_is_in_one_group(names):
    with pytest.raises(InvalidArgument, match=r"parameter groups: expected each of .* in one group, got"):
        Optimizer(AdamW(), Parameters(SHAPES), groups=[Group(names)])


def _torch_rates(kind: str, lr: float, min_lr: float, steps: int, warmup: int, decay: int) -> list[float]:
    torch = pytest.importorskip("torch", reason="needs torch to compare with")
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    parts = [schedulers.LinearLR(optimizer, 1 / warmup, 1.0, total_iters=warmup - 1)]
    milestones = [warmup]
    if kind == "cosine":
        parts.append(schedulers.CosineAnnealingLR(optimizer, steps - warmup, eta_min=min_lr))
    else:
        parts.append(schedulers.ConstantLR(optimizer, 1.0, total_iters=1))
        if kind == "wsd":
            parts.append(schedulers.LinearLR(optimizer, 1.0, min_lr / lr, total_iters=decay))
            milestones.append(steps - decay)
    chain = schedulers.SequentialLR(optimizer, parts, milestones)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        chain.step()
    return rates


@pytest.mark.parametrize("kind", ["cosine", "constant", "wsd"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_schedules_are_torchs(kind):
    lr, min_lr, steps, warmup, decay = 3e-3, 3e-4, 60, 7, 20
    schedule = LearningRate(kind, lr, min_lr, steps, warmup, decay)
    ours = [schedule(step) for step in range(steps)]
    np.testing.assert_allclose(ours, _torch_rates(kind, lr, min_lr, steps, warmup, decay), rtol=1e-9)


def test_schedule_ends():
    for kind in ("cosine", "wsd"):
        schedule = LearningRate(kind, 1.0, 0.1, 100, 10, 30)
        assert schedule(0) == 0.1
        assert schedule(9) == schedule(10) == 1.0
        assert schedule(100) == schedule(1000) == pytest.approx(0.1)
    assert LearningRate("cosine", 1.0, 0.0, 5, 0)(0) == 1.0
