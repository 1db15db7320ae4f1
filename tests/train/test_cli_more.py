"""The main job's settings from a file, and a loss that is lost, as a user meets them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kos.train import checkpoint, huggingface
from kos.train.metrics import read_metrics
from tests.train.test_cli import ENVIRONMENT, _errors, _run

SETTINGS = """
data = "{text}"
out = "{out}"
steps = 4
seed = 21
batch_size = 4
seq_len = 16
lr = 0.002
schedule = "constant"
eval_every = 0
eval_batches = 1
sample_tokens = 0
save_every = 3

[model]
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
intermediate_size = 24
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_lost_is_one_line_and_ends_the_job(text: Path, tmp_path: Path, ranks: int) -> None:
    flags: list[str | Path] = ["--data", text, "--out", tmp_path, "--steps", "50", "--save-every", "1"]
    began = time.monotonic()
    done = _run(*flags, "--lr", "1e30", "--warmup-steps", "0", "--weight-decay", "0", ranks=ranks)
    assert time.monotonic() - began < 15
    assert done.returncode == 1
    (error,) = _errors(done)
    said = re.search(r"step (\d+): expected a finite (loss|gradient norm), got (nan|inf) \(first in .*--lr", error)
    assert said and "Traceback" not in done.stderr, done.stderr
    step = int(said[1])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, step))
    assert checkpoint.find(tmp_path).step == step - 1


def _rows(out: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if "second" not in key}
        for row in read_metrics(out / "metrics.jsonl")
    ]


def _run_file(*flags: str | Path) -> str:
    """Train with no other settings than these; what was said on standard error."""
    command = [sys.executable, "-m", "kos.train", *map(str, flags)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_settings_from_a_file(text: Path, tmp_path: Path) -> None:
    """A TOML file's values are the run's; flags go over them; a run's own config.json repeats it."""
    first, second = tmp_path / "first", tmp_path / "second"
    toml = tmp_path / "settings.toml"
    toml.write_text(SETTINGS.format(text=text, out=first))

    assert _run_file("--config", toml, "--steps", "5", "--intermediate-size", "32") == ""
    resolved = json.loads((first / "config.json").read_text())["config"]
    told = {"steps": 5, "seed": 21, "batch_size": 4, "seq_len": 16, "lr": 0.002, "min_lr": 0.0002}
    assert {key: resolved[key] for key in told} == told and resolved["schedule"] == "constant"
    assert resolved["model"]["intermediate_size"] == 32 and resolved["model"]["hidden_size"] == 16
    assert sorted(path.name for path in (first / "checkpoints").iterdir()) == ["step-3", "step-5"]
    assert huggingface.read_config(checkpoint.find(first).path).intermediate_size == 32
    rows = _rows(first)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and [row["tokens"] for row in rows][-1] == 5 * 4 * 16

    assert _run_file("--out", second, "--config", first / "config.json") == ""
    assert _rows(second) == rows
