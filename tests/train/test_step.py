"""One optimizer step against float64, for any cut of the batch; and when a run evaluates, prints and saves."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.train import checkpoint
from kos.train.config.options import TrainConfig
from kos.train.data.batches import load_data
from kos.train.model import huggingface
from kos.train.model.initial import init_weights
from kos.train.model.model import Model
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import Parameters
from kos.train.optim.adamw import AdamW
from tests.train import runs
from tests.train.models import loss_and_gradients

SHORT: dict[str, Any] = {"steps": 7, "schedule": "constant", "eval_batches": 1, "sample_tokens": 0, "keep": 99}


def _train(text: Path, out: Path, ranks: int = 1, **changes: Any) -> list[dict[str, Any]]:
    return runs._train(text, out, ranks, **{**SHORT, **changes})


def _first_batch(config: TrainConfig) -> tuple[float, np.ndarray]:
    """The mean loss and the mean gradient of step 1: one sequence at a time, averaged in float64."""
    data = load_data(config)
    shape = config.model_config_for(data.tokenizer.vocab_size)
    weights = Parameters(shape.parameter_shapes(), groups=shape.fused_groups())
    init_weights(shape, weights, config.seed)
    model, gradients, losses = Model(shape, numpy_ops), weights.like(), []
    total = np.zeros(weights.flat.size)
    for row in range(config.batch_size):
        gradients.flat[:] = np.nan
        losses.append(loss_and_gradients(model, weights, *data.rows(0, [row])[:2], gradients, accumulate=False))
        total += gradients.flat
    return math.fsum(losses) / config.batch_size, total / config.batch_size


def _moments(out: Path) -> list[np.ndarray]:
    """Both, flat, in the order of the layout."""
    path = checkpoint.find(out).path
    shapes = huggingface.read_config(path).parameter_shapes()
    files = checkpoint.state_files(path, shapes, dict.fromkeys(AdamW.state, shapes))
    return [np.concatenate([files.read(f"{moment}.{name}").ravel() for name in shapes]) for moment in AdamW.state]


@pytest.mark.parametrize(
    ("grad_clip", "ranks", "micro_batch_size", "deterministic"),
    [(0.1, 1, 2, False), (0.1, 2, 2, True), (0.0, 2, 4, False), (100.0, 2, 2, False), (0.0, 1, 2, True)],
)
def test_the_gradient_is_the_mean_and_clipped(text, tmp_path, ranks, micro_batch_size, grad_clip, deterministic):
    """AdamW hides the scale of its gradients in the weights, but its first moments show it: (1 - beta) g."""
    changes = {"micro_batch_size": micro_batch_size, "grad_clip": grad_clip}
    (row,) = _train(text, tmp_path, ranks, steps=1, deterministic=deterministic, **changes)
    config = runs._config(text, tmp_path, **changes)
    loss, gradient = _first_batch(config)
    norm = np.linalg.norm(gradient)
    assert 0.2 < norm < 100  # 0.1 clips, 100 does not
    assert row["loss"] == pytest.approx(loss, rel=1e-6)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)
    if grad_clip:
        gradient *= min(1.0, grad_clip / norm)
    exp_avg, exp_avg_sq = _moments(tmp_path)
    exact = np.abs(gradient).max()
    np.testing.assert_allclose(exp_avg / (1 - config.beta1), gradient, rtol=2e-5, atol=2e-5 * exact)
    np.testing.assert_allclose(exp_avg_sq / (1 - config.beta2), gradient**2, rtol=4e-5, atol=4e-5 * exact**2)


ALL = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("every", "evaluated", "saved", "logged"),
    [((0, 0, 1), [7], [7], ALL), ((1, 2, 9), ALL, [2, 4, 6, 7], ALL), ((3, 7, 2), [3, 6, 7], [7], [2, 3, 4, 6, 7]),
     ((4, 9, 3), [4, 7], [7], [3, 4, 6, 7])],
    ids=str,
)  # fmt: skip
def test_every_so_many_steps_and_the_last(text, tmp_path, capsys, every, evaluated, saved, logged):
    """Then a run evaluates, saves, or prints a line; each validation prints one, too. The metrics have all steps."""
    rows = _train(text, tmp_path, eval_every=every[0], save_every=every[1], log_every=every[2])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [int(line.split()[1].partition("/")[0]) for line in lines] == logged
    assert [row["step"] for row in rows] == ALL and [row["step"] for row in rows if "val_loss" in row] == evaluated
    assert sorted(checkpoint.verify(path).step for path in (tmp_path / "checkpoints").iterdir()) == saved
