"""The engine of GPUs on machines without one: its kernels emulated, a step against the CPU's, its parts together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kos.cuda import unavailable
from kos.errors import ConfigError, TrainingError
from kos.testing import spawn
from kos.train import checkpoint, loop
from kos.train.config import TrainConfig
from kos.train.engines.cuda import CudaEngine
from kos.train.loop import Trainer
from kos.train.metrics import read_metrics
from tests.train.host_kernels import emulator
from tests.train.host_kernels.engine import host_engine

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs a C++ compiler: g++ or clang++")

SMALL: dict[str, Any] = {
    "steps": 4,
    "batch_size": 4,
    "micro_batch_size": 2,
    "seq_len": 8,
    "lr": 3e-3,
    "warmup_steps": 2,
    "eval_every": 2,
    "eval_batches": 2,
    "sample_tokens": 2,
    "save_every": 2,
    "tokenizer": "chars",
    "graph": False,
    "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "letters.txt"
    path.write_bytes(np.random.default_rng(7).integers(97, 110, 2000, np.uint8).tobytes())
    return path


@pytest.fixture
def emulated(monkeypatch):
    host_engine(monkeypatch)
    monkeypatch.setattr(loop, "choose_device", lambda asked, comm: asked.replace("auto", "cpu"))


def train(text, out, device="cuda", ranks=1, **changes):
    config = TrainConfig.from_preset("tiny", data=str(text), out=out, device=device, **{**SMALL, **changes})
    spawn(lambda comm: Trainer(config, comm).run(), ranks, timeout=100)
    return read_metrics(out / "metrics.jsonl")


def state(out):
    found = checkpoint.find(out)
    return b"".join((found.path / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors"))


def test_steps_are_those_of_the_cpu(emulated, text, tmp_path, capsys):
    cpu = train(text, tmp_path / "cpu", "cpu")
    fp32 = train(text, tmp_path / "fp32", dtype="float32")
    bf16 = train(text, tmp_path / "bf16")
    for key in ("loss", "grad_norm", "lr"):
        want = [row[key] for row in cpu]
        np.testing.assert_allclose([row[key] for row in fp32], want, rtol=1e-5)
        np.testing.assert_allclose([row[key] for row in bf16], want, rtol=2e-2)
    assert [row.get("val_loss", 0) for row in fp32] == pytest.approx([row.get("val_loss", 0) for row in cpu], rel=1e-5)
    said = capsys.readouterr().out
    for expected in ("activations, recompute none", "gradients, float32", "on host, bfloat16", "a sample"):
        assert expected in said, expected


def test_resume_and_the_way_back(emulated, text, tmp_path):
    """Bit for bit on the same device, and on the other from the same checkpoint."""
    whole = train(text, tmp_path / "whole")
    step2 = tmp_path / "whole" / "checkpoints" / "step-2"
    rest = train(text, tmp_path / "rest", resume=str(step2))
    assert [row["loss"] for row in rest] == [row["loss"] for row in whole[2:]]
    assert state(tmp_path / "rest") == state(tmp_path / "whole")
    back = train(text, tmp_path / "back", "cpu", resume=str(step2))
    assert back[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=2e-2)
    forth = train(text, tmp_path / "forth", dtype="float32", resume=str(tmp_path / "back"), steps=6)
    assert [row["step"] for row in forth] == [5, 6]


def test_what_is_not_finite_stops_or_is_skipped(emulated, text, tmp_path, monkeypatch):
    queue = CudaEngine._queue_gradients

    def poisoned(self):
        queue(self)
        if self.optimizer.step_count == 2:
            self.gradients["model.layers.1.mlp.up_proj.weight"].fill_bytes(255)

    monkeypatch.setattr(CudaEngine, "_queue_gradients", poisoned)
    with pytest.raises(TrainingError, match=r"step 3: .* gradient norm, got nan \(first in .*layers.1.mlp.up_proj"):
        train(text, tmp_path / "stops")
    assert checkpoint.find(tmp_path / "stops").step == 2
    rows = train(text, tmp_path / "skips", skip_outliers=1e6)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and np.isnan(rows[2]["grad_norm"])
    assert np.isfinite(rows[3]["loss"])


def test_too_large_is_refused_with_the_plan(emulated, text, tmp_path):
    with pytest.raises(ConfigError, match=r"expected at most 1.00 GiB.*free on cuda:0, got .* less takes a --micro"):
        train(text, tmp_path, model={**SMALL["model"], "intermediate_size": 1_000_000})


def test_a_gpu_that_is_not_there(text, tmp_path):
    if unavailable() is None:
        pytest.skip("needs a machine without a GPU")
    for ranks in (1, 2):
        with pytest.raises(ConfigError, match="--device cuda: expected a GPU for every rank, got none for rank 0: "):
            train(text, tmp_path, ranks=ranks)
    for changes, name in (({"zero": 1}, "--zero: expected 0"), ({"dtype": "bfloat16"}, "--dtype: expected float32")):
        with pytest.raises(ConfigError, match=f"{name} on the CPU"):
            train(text, tmp_path, device="auto", **changes)
