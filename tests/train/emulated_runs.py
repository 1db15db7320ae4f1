"""Short runs of the trainer on an emulated GPU or on the CPU."""

from typing import Any

import numpy as np
import pytest

from kos.testing import spawn
from kos.train import evaluator
from kos.train import trainer as loop
from kos.train.config.options import TrainConfig
from kos.train.tools import read_metrics
from kos.train.trainer import Trainer
from tests.train.host_kernels.communicator import DeviceComm
from tests.train.host_kernels.engine import host_engine

SMALL: dict[str, Any] = {
    "steps": 4,
    "batch_size": 8,
    "micro_batch_size": 2,
    "seq_len": 8,
    "lr": 3e-3,
    "warmup_steps": 0,
    "schedule": "constant",
    "eval_every": 2,
    "eval_batches": 2,
    "sample_tokens": 0,
    "save_every": 2,
    "dtype": "float32",
    "model": {
        "vocab_size": 256, "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "letters.txt"
    path.write_bytes(np.random.default_rng(7).integers(97, 110, 2000, np.uint8).tobytes())
    return path


@pytest.fixture
def emulated(monkeypatch):
    host_engine(monkeypatch)
    for module in (loop, evaluator):
        monkeypatch.setattr(module, "choose_device", lambda asked, comm: asked.replace("auto", "cpu"))


def train(text, out, device="cuda", ranks=1, hosts=(), **changes):
    values = {**SMALL, "data": str(text), "out": out, "device": device, **changes}

    def run(comm):
        Trainer(TrainConfig.from_preset("tiny", **values), DeviceComm(comm) if device == "cuda" else comm).run()

    spawn(run, ranks, timeout=100, hosts=hosts)
    return read_metrics(out / "metrics.jsonl")


def column(rows, name="loss"):
    return [row[name] for row in rows if name in row]
