"""Short runs of the trainer on CPUs: settings, the run, and its losses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kos.testing import spawn
from kos.train.config.options import TrainConfig
from kos.train.tools import read_metrics
from kos.train.trainer import Trainer

SMALL: dict[str, Any] = {
    "steps": 50, "batch_size": 8, "seq_len": 32, "lr": 3e-3, "warmup_steps": 5, "eval_every": 25, "eval_batches": 3,
    "sample_tokens": 8, "save_every": 20,
    "model": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48,
    },
}  # fmt: skip


def _config(text: Path, out: Path | None, **changes: Any) -> TrainConfig:
    return TrainConfig.from_preset("tiny", data=str(text), out=out, **{**SMALL, **changes})


def run(config: TrainConfig, ranks: int = 1, hosts: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Train on ranks that are threads. Returns the rows of the metrics file; none if ``config`` has no folder."""
    spawn(lambda comm: Trainer(config, comm).run(), ranks, timeout=200, hosts=hosts)
    return read_metrics(config.out) if config.out else []


def _train(text: Path, out: Path, ranks: int = 1, hosts: Sequence[int] = (), **changes: Any) -> list[dict[str, Any]]:
    return run(_config(text, out, **changes), ranks, hosts)


def _losses(rows: list[dict[str, Any]], key: str = "loss") -> np.ndarray:
    return np.array([row[key] for row in rows])
