"""The benchmark of products in 8 bits, on an emulated GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import fp8, fp8_losses
from kos.bench import report
from kos.errors import BackendUnavailable, ConfigError
from kos.train.config import PRESETS
from kos.train.ops.cuda.cublaslt import scale_mode
from tests.host_compiler import COMPILER
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program
from tests.train.host_kernels import emulator

ROOT = Path(__file__).resolve().parents[1]


class Ops(emulator.HostOps):
    """Without products of two operands of fine scales."""

    def __init__(self, device: int, search: bool) -> None:
        super().__init__()
        self.modes = set[int]()

    def matmul(self, a: Any, b: Any, out: Any, *, scales: Any = (), **options: Any) -> None:
        modes = [scale_mode(scale.shape, *x.shape) for x, scale in zip((a, b), scales, strict=False)]
        self.modes.update(modes)
        if modes == [4, 4]:
            raise BackendUnavailable("cuBLASLt has no algorithm")
        super().matmul(a, b, out, scales=scales if 5 in modes else (), **options)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++ or clang++")
def test_all_tables(monkeypatch, tmp_path, capsys):
    emulator.host_memory(monkeypatch)
    made: list[Ops] = []
    monkeypatch.setattr(fp8, "CudaOps", lambda *given, **options: made.append(Ops(*given, **options)) or made[-1])
    monkeypatch.setattr(fp8.cuda, "unavailable", lambda: None)
    monkeypatch.setattr(report, "provenance", lambda *about: {"command": "python -m benchmarks.fp8"})
    monkeypatch.setattr(fp8, "streams", SimpleNamespace(milliseconds=lambda run, stream: (run(), 1.0)[1]))
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setitem(PRESETS, "baby", SimpleNamespace(values={"model": shape}))
    path = tmp_path / "fp8.json"
    settings = ["--preset", "baby", "--tokens", "128", "--repeats", "1", "--settle", "1", "--measure", "1"]
    monkeypatch.setattr(sys, "argv", ["fp8", *settings, "--json", str(path)])
    assert fp8.main() == 0
    result = json.loads(path.read_text())
    tables = [row["table"] for row in result["rows"]]
    assert [tables.count(name) for name in ("products", "casts", "layers")] == [12, 9, 5]
    assert made[0].modes == {0, 3, 4, 5} and set(result["reasons"]) == {"1x128 1x128"}
    first, last = result["rows"][0], result["rows"][-1]
    assert (first["name"], first["shape"]) == ("qkv forward", [128, 256, 128])
    assert first["bf16"] == pytest.approx(2e-9 * 128 * 256 * 128) and first["1x128 1x128"] is None
    assert last["fp8_over_bf16"] == 1 and last["with_weight_cast"] == 0.5
    said = capsys.readouterr().out
    assert "products  down weight gradient" in said and "1x128 1x128 left out: cuBLASLt has no algorithm" in said


def test_training_beside_bfloat16(tmp_path):
    """Here beside float32: the same weights and tokens, a row each; it needs no torch."""
    path = tmp_path / "rows.json"
    shape = "--hidden-size 32 --intermediate-size 48 --num-hidden-layers 2 --num-attention-heads 4 --vocab-size 512"
    flags = "--num-key-value-heads 2 --seq-len 32 --per-rank 4 --steps 2 --repeats 1 --device cpu --ranks 1"
    arguments = [*shape.split(), *flags.split(), "--compare", "fp8", "--json", str(path)]
    done = run_program(sys.executable, "-m", "benchmarks.train", *arguments, env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [(row["implementation"], row["variant"]) for row in rows] == [("kos", "float32"), ("kos", "fp8")]
    assert 0 < rows[1]["loss_difference"] < 1e-2 and rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-2)


def small_runs(folder: Path, path: Path) -> list[str]:
    """Arguments of a loss benchmark: a text in ``folder``, a small model, ten steps, two seeds."""
    lines = [json.dumps({"text": f"the {number} ranks of a ring\n" * (number % 7 + 3)}) + "\n" for number in range(99)]
    (corpus := folder / "corpus.jsonl").write_text("".join(lines))
    shape = "--hidden-size 16 --intermediate-size 24 --num-hidden-layers 2 --num-attention-heads 2"
    flags = "--num-key-value-heads 2 --seq-len 16 --batch-size 4 --micro-batch-size 2 --lr 1e-2 --device cpu --seeds 2"
    return ["--corpus", str(corpus), "--json", str(path), "--tokens", "640", *shape.split(), *flags.split()]


def test_losses_in_pairs(tmp_path, capsys):
    """Here beside float32, and rounded otherwise; a file that lacks some runs is completed with the same numbers."""
    path = tmp_path / "losses.json"
    arguments = small_runs(tmp_path, path)
    fp8_losses.main([*arguments, "--again"])
    said, whole = capsys.readouterr().out, json.loads(path.read_text())
    keys = [(row["dtype"], row["micro_batch_size"], row["seed"], row["steps"]) for row in whole["rows"]]
    assert keys == [(dtype, micro, seed, 10) for seed in (1, 2) for dtype, micro in (
        ("float32", 2), ("fp8", 2), ("float32", 1))]  # fmt: skip
    for number, row in enumerate(whole["summary"]):
        one, fp8_, again = (each["val_loss"] for each in whole["rows"][3 * number : 3 * number + 3])
        assert row == {"seed": number + 1, "float32": one, "fp8": fp8_, "again": again,
                       "fp8 differs": fp8_ / one - 1, "again differs": again / one - 1}  # fmt: skip
        assert 1e-7 < abs(row["fp8 differs"]) < 0.02 and abs(row["again differs"]) < 1e-4
        assert f"{row['fp8 differs']:+.3%}" in said
    mean = sum(row["fp8 differs"] for row in whole["summary"]) / 2
    error = abs(whole["summary"][0]["fp8 differs"] - mean)  # of two values: half their distance
    assert f"fp8 differs by {mean:+.3%} +- {error:.3%}, 2 seeds" in said
    path.write_text(json.dumps({**whole, "rows": whole["rows"][2:5]}))
    fp8_losses.main([*arguments, "--again"])
    completed = json.loads(path.read_text())["rows"]
    for row in whole["rows"]:
        assert row["curve"] in [each["curve"] for each in completed]
    with pytest.raises(ConfigError, match="--again: expected a --micro-batch-size of at least 2, got 1"):
        fp8_losses.main([*arguments, "--again", "--micro-batch-size", "1"])


@needs_mpirun
def test_losses_with_compressed_gradients(tmp_path):
    path = tmp_path / "losses.json"
    command = [sys.executable, "-m", "benchmarks.compress_losses", *small_runs(tmp_path, path)]
    done = run_program(MPIRUN, "-n", "2", *command, cwd=ROOT, env=OUTSIDE)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert [(row["compress"], row["seed"]) for row in found["rows"]] == [
        (name, seed) for seed in (1, 2) for name in ("none", "fp8", "int8")
    ]
    for row in found["summary"]:
        assert 1e-7 < abs(row["fp8 differs"]) < 0.02 and 1e-7 < abs(row["int8 differs"]) < 0.02
    assert "int8 differs by" in done.stdout and "2 seeds" in done.stdout


def test_shapes_of_a_preset():
    assert fp8.layers_of("8b") == {
        "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
    }  # fmt: skip
    assert fp8.product_sizes(6144, 4096, 8192)["weight gradient"] == (6144, 4096, 8192)
