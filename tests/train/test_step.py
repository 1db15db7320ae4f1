"""One optimizer step against float64, for any cut of the batch; and when a run evaluates, prints and saves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.comm.communicator import Communicator
from kos.testing import spawn
from kos.train import checkpoint, huggingface
from kos.train.config import TrainConfig
from kos.train.data import load_data
from kos.train.loop import Trainer
from kos.train.metrics import read_metrics
from kos.train.model import Llama
from kos.train.ops import numpy as numpy_ops
from kos.train.optimizer import AdamW
from kos.train.parameters import Parameters

BATCH, SEQ_LEN = 8, 16
SMALL: dict[str, Any] = {
    "steps": 7,
    "batch_size": BATCH,
    "seq_len": SEQ_LEN,
    "lr": 1e-3,
    "warmup_steps": 0,
    "schedule": "constant",
    "eval_batches": 1,
    "sample_tokens": 0,
    "keep": 99,
    "model": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
    },
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "letters.txt"
    path.write_bytes(np.random.default_rng(7).integers(97, 123, 4000, np.uint8).tobytes())
    return path


def _config(text: Path, out: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.from_preset("tiny", data=str(text), out=out, **{**SMALL, **changes})


def _train(text: Path, out: Path, ranks: int = 1, **changes: Any) -> list[dict[str, Any]]:
    config = _config(text, out, **changes)

    def run(comm: Communicator) -> None:
        Trainer(config, comm).run()

    spawn(run, ranks, timeout=60)
    return read_metrics(out / "metrics.jsonl")


def _first_batch(config: TrainConfig) -> tuple[float, np.ndarray]:
    """The mean loss and the mean gradient of step 1: one sequence at a time, averaged in float64."""
    data = load_data(config)
    shape = config.model_config_for(data.tokenizer.vocab_size)
    weights = Parameters(shape.parameter_shapes(), groups=shape.fused_groups())
    shape.init_weights(weights, config.seed)
    model, gradients, losses = Llama(shape, numpy_ops), weights.like(), []
    total = np.zeros(weights.flat.size)
    for row in range(BATCH):
        gradients.flat[:] = np.nan
        losses.append(model.loss_and_gradients(weights, *data.rows(0, [row]), gradients, accumulate=False))
        total += gradients.flat
    return math.fsum(losses) / BATCH, total / BATCH


def _moments(out: Path, config: TrainConfig) -> AdamW:
    found = checkpoint.find(out)
    optimizer = AdamW(Parameters(huggingface.read_config(found.path).parameter_shapes()))
    found.load_optimizer(optimizer)
    return optimizer


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("ranks", "micro_batch_size"), [(1, 2), (2, 2), (2, 4)])
@pytest.mark.parametrize("grad_clip", [0.0, 0.1, 100.0])
def test_the_gradient_is_the_mean_and_clipped(
    text: Path, tmp_path: Path, ranks: int, micro_batch_size: int, grad_clip: float, deterministic: bool
) -> None:
    """AdamW hides the scale of its gradients in the weights, but its first moments tell it: (1 - beta) g."""
    changes: dict[str, Any] = {"steps": 1, "micro_batch_size": micro_batch_size, "grad_clip": grad_clip}
    config = _config(text, tmp_path, deterministic=deterministic, **changes)
    (row,) = _train(text, tmp_path, ranks, deterministic=deterministic, **changes)
    loss, gradient = _first_batch(config)
    norm = np.linalg.norm(gradient)
    assert 0.2 < norm < 100  # 0.1 clips, 100 does not
    assert row["loss"] == pytest.approx(loss, rel=1e-6)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)
    if grad_clip:
        gradient *= min(1.0, grad_clip / norm)
    optimizer = _moments(tmp_path, config)
    exact = np.abs(gradient).max()
    np.testing.assert_allclose(
        optimizer.exp_avg.flat / (1 - config.beta1), gradient, rtol=2e-5, atol=2e-5 * exact
    )
    np.testing.assert_allclose(
        optimizer.exp_avg_sq.flat / (1 - config.beta2), gradient**2, rtol=4e-5, atol=4e-5 * exact**2
    )


@pytest.mark.parametrize("grad_clip", [0.0, 0.1])
def test_the_norm_is_the_same_for_any_number_of_ranks(text: Path, tmp_path: Path, grad_clip: float) -> None:
    runs = {
        ranks: _train(text, tmp_path / str(ranks), ranks, micro_batch_size=2, grad_clip=grad_clip)
        for ranks in (1, 2, 4)
    }
    for key in ("grad_norm", "loss"):
        one = [row[key] for row in runs[1]]
        assert len(set(one)) == len(one) == 7
        for ranks in (2, 4):
            np.testing.assert_allclose([row[key] for row in runs[ranks]], one, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize(("every", "expected"), [(0, [7]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (9, [7])])
def test_eval_every(text: Path, tmp_path: Path, every: int, expected: list[int]) -> None:
    rows = _train(text, tmp_path, eval_every=every)
    assert [row["step"] for row in rows if "val_loss" in row] == expected


@pytest.mark.parametrize(("every", "expected"), [(0, [7]), (2, [2, 4, 6, 7]), (7, [7]), (9, [7])])
def test_save_every(text: Path, tmp_path: Path, every: int, expected: list[int]) -> None:
    _train(text, tmp_path, save_every=every)
    steps = [checkpoint.verify(path).step for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(steps) == expected


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 4, 6, 7]), (9, [4, 7])])
def test_log_every(text: Path, tmp_path: Path, capsys: Any, every: int, expected: list[int]) -> None:
    """Every so many steps, the last, and those with a validation loss; the metrics have them all."""
    rows = _train(text, tmp_path, log_every=every, eval_every=4)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [int(line.split()[1].partition("/")[0]) for line in lines] == expected
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_counted_over_a_resume(text: Path, tmp_path: Path, ranks: int) -> None:
    _train(text, tmp_path, ranks, steps=3)
    rows = _train(text, tmp_path, ranks, steps=5, resume="auto")
    assert [row["tokens"] for row in rows] == [step * BATCH * SEQ_LEN for step in (1, 2, 3, 4, 5)]
