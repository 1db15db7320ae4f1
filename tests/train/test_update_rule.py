"""Runs, checkpoints, ZeRO-1 and plans with another update rule than AdamW: they know of its state what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.errors import CheckpointError
from kos.testing import spawn
from kos.train.checkpoint import checkpoint, huggingface
from kos.train.config.options import TrainConfig
from kos.train.optim.base import UpdateRule
from kos.train.parallel.data import DataParallel
from kos.train.run import Trainer
from tests.train.sharded import tensors_of_run
from tests.train.test_loop import _config, _train, text

__all__ = ["text"]


class Momentum(UpdateRule):
    """SGD with momentum."""

    state, about = {"momentum": "float32"}, "the momentum"

    def step(self, number: int, lr: float) -> Callable[..., None]:
        def delta(g: np.ndarray, state: Sequence[np.ndarray], out: np.ndarray) -> None:
            (m,) = state
            m *= 0.9
            m += g
            np.multiply(m, lr, out=out)

        return delta


HOW: dict[str, Any] = {
    "deterministic": True, "batch_size": 16, "schedule": "constant", "lr": 0.05, "save_every": 2, "eval_batches": 0,
    "keep": 9,
}  # fmt: skip


def test_its_state_is_saved_sharded_and_resumed(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adamw = TrainConfig.update_rule
    monkeypatch.setitem(DataParallel.__init__.__kwdefaults__, "bucket_bytes", 1 << 18)
    monkeypatch.setattr(TrainConfig, "update_rule", lambda self: Momentum())
    whole = _train(text, tmp_path / "whole", steps=4, **HOW)
    _train(text, tmp_path / "sharded", 2, steps=2, zero=1, **HOW)
    path = checkpoint.find(tmp_path / "sharded").path
    shapes = huggingface.read_config(path).parameter_shapes()
    names = {f"momentum.{name}" for name in shapes}
    assert {name for name in tensors_of_run(tmp_path / "sharded") if name not in shapes} == names
    momentum = checkpoint.state_files(path, shapes, {"momentum": shapes}).read("momentum.model.norm.weight")
    assert np.abs(momentum).max() > 0
    rows = _train(text, tmp_path / "sharded", 1, steps=4, resume="auto", **HOW)
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]
    assert whole[-1]["loss"] < whole[0]["loss"]
    assert tensors_of_run(tmp_path / "sharded") == tensors_of_run(tmp_path / "whole")
    monkeypatch.setattr(TrainConfig, "update_rule", adamw)
    with pytest.raises(CheckpointError, match="got an unknown 'momentum\\.model"):
        _train(text, tmp_path / "sharded", steps=6, resume="auto", **HOW)


def test_the_memory_plan_counts_it(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = []
    for rule in (TrainConfig.update_rule, lambda self: Momentum()):
        monkeypatch.setattr(TrainConfig, "update_rule", rule)

        def look(comm: Any) -> None:
            uses.append(Trainer(_config(text, tmp_path / str(len(uses)), **HOW), comm).device.plan.uses)

        spawn(look, 1)
    assert uses[0]["weights, gradients, both Adam moments"] * 3 == uses[1]["weights, gradients, the momentum"] * 4
    assert Momentum().state_bytes() == 4
