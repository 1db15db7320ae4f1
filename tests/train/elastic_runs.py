"""Elastic runs whose ranks are threads, and the one in which nothing happens."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.comm.communicator import Communicator
from kos.testing import Fault, spawn
from kos.train.config.options import TrainConfig
from kos.train.parallel.failures import Left
from kos.train.tools import read_metrics
from kos.train.trainer import Trainer
from tests.train.sharded import tensors_of_run

RANKS, STEPS = 4, 6
SHAPE = {
    "vocab_size": 257, "hidden_size": 22, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 6,
}  # fmt: skip
"""Its 14,212 parameters are no multiple of 3: the layouts of 3 and of 4 ranks end at different places."""

Before = Callable[[Trainer], None]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "letters.txt"
    path.write_bytes(np.random.default_rng(7).integers(97, 110, 4000, np.uint8).tobytes())
    return path


def config_of(text: Path, out: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "steps": STEPS, "batch_size": 8, "seq_len": 8, "lr": 3e-3, "warmup_steps": 0, "eval_every": 3,
        "eval_batches": 2, "sample_tokens": 0, "save_every": 2, "device": "cpu", "deterministic": True, "model": SHAPE,
        "timeout": 100.0,
    }  # fmt: skip
    return TrainConfig.from_preset("tiny", data=str(text), out=out, **{**values, **changes})


def result(out: Path) -> tuple[Any, Any]:
    """What must not depend on what happened to ranks: the numbers of each step, weights and state."""
    rows = [[row.get(name) for name in ("step", "loss", "grad_norm", "lr", "val_loss")] for row in read_metrics(out)]
    return rows, tensors_of_run(out.parent)


def train(
    text: Path, out: Path, faults: Sequence[Fault] = (), before: Before = lambda trainer: None, ranks: int = RANKS,
    **changes: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """A run; ``before`` gets each rank's trainer before its first step. A rank that leaves just ends."""
    config = config_of(text, out, **{"elastic": "1", **changes})

    def run(comm: Communicator) -> None:
        trainer = Trainer(config, comm)
        before(trainer)
        try:
            trainer.run()
        except Left:
            pass

    spawn(run, ranks, timeout=200, faults=faults)
    return result(out / "metrics.jsonl")


@pytest.fixture(scope="module")
def unhurt(text, tmp_path_factory):
    return train(text, tmp_path_factory.mktemp("unhurt"), elastic=None)


def until(true: Callable[[], Any]) -> None:
    """Wait until it is ``true``. The test's timeout limits it."""
    while not true():
        time.sleep(0.001)


def ranks_of(out: Path) -> list[tuple[int, int]]:
    return [(row["ranks"], row["epoch"]) for row in read_metrics(out / "metrics.jsonl")]
