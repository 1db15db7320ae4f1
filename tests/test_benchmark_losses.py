"""Runs in pairs, whose losses are compared: by optimizer, in 8 bits, and with compressed gradients."""

import json
import lzma
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fp8_losses, optimizer_losses
from kos.errors import ConfigError
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program
from tests.train.refusal import refused

ROOT = Path(__file__).resolve().parents[1]
FLAGS = shlex.split("""
--seq-len 16 --batch-size 4 --hidden-size 16 --intermediate-size 24 --num-hidden-layers 2 --num-attention-heads 2
--num-key-value-heads 2 --device cpu --eval-batches 2
""")
TUNED = shlex.split("--tokens 1280 --tune-tokens 320 --rates 1e-2 3e-2 --seeds 2 --evaluations 5")
PAIRS = shlex.split("--tokens 640 --micro-batch-size 2 --lr 1e-2 --seeds 2")
KEYS = ("optimizer", "lr", "muon_lr", "seed", "steps")
@pytest.fixture
def corpus(tmp_path):
    lines = [json.dumps({"text": f"the {number} ranks of a ring\n" * (number % 7 + 3)}) + "\n" for number in range(99)]
    with lzma.open(path := tmp_path / "corpus.jsonl.xz", "wt") as file:
        file.writelines(lines)
    return path


@pytest.fixture
def losses(corpus, capsys):
    """Runs a program on the corpus: returns the file, and what was printed. ``lack``: rows that are there before."""
    file = corpus.with_name("losses.json")

    def run(module, *flags, lack=None):
        if lack is not None:
            file.write_text(json.dumps({**json.loads(file.read_text()), "rows": lack}))
        capsys.readouterr()
        module.main(["--corpus", str(corpus), "--json", str(file), *FLAGS, *flags])
        return json.loads(file.read_text()), capsys.readouterr().out

    return run


def test_optimizers_beside_each_other(losses):
    """Tuning, and pairs; a file that lacks some is completed with the same numbers."""
    whole, shown = losses(optimizer_losses, *TUNED)
    rows, rates = whole["rows"], (0.01, 0.03)
    keys = [tuple(row[name] for name in KEYS) for row in rows]
    adamw = rates[int(rows[1]["val_loss"] < rows[0]["val_loss"])]
    tuned = [("adamw", lr, None, 0, 5) for lr in rates] + [("muon", adamw, rate, 0, 5) for rate in rates]
    assert keys[:4] == tuned and len(keys) == len(set(keys)) == 4 + 2 * 2
    muon = rates[int(rows[3]["val_loss"] < rows[2]["val_loss"])]
    assert keys[4:6] == [("adamw", adamw, None, 1, 20), ("muon", adamw, muon, 1, 16)]
    for row in rows:
        assert [tokens for tokens, _ in row["curve"]][-1] == row["tokens"] == 64 * row["steps"]
        assert len(row["curve"]) == {0: 1}.get(row["seed"], 5 + (row["steps"] == 16))
        assert row["curve"][-1][1] == row["val_loss"] < 5.5
    for number, each in enumerate(whole["summary"]):
        assert [each["adamw"], each["muon"]] == [row["val_loss"] for row in rows[4 + 2 * number : 6 + 2 * number]]
        assert each["share"] == 0.8 and f"{each['adamw']:.4f}" in shown and f"{each['muon']:.4f}" in shown
    again, _ = losses(optimizer_losses, *TUNED, lack=[rows[0], *rows[3:5]])
    curves = {tuple(row[name] for name in KEYS): row["curve"] for row in again["rows"]}
    assert len(again["rows"]) == len(rows) and curves == dict(zip(keys, [row["curve"] for row in rows], strict=True))
    with refused(ConfigError, "losses.json: expected runs of seq_len 8, got those of 16"):
        losses(optimizer_losses, *TUNED, "--seq-len", "8")
    with refused(ConfigError, "--tokens: expected at most", "which are seen once, got 1,000,000"):
        losses(optimizer_losses, *TUNED, "--tokens", "1e6")


def test_runs_for_which_there_is_no_time_are_left(losses):
    """By those that there are: a run of five steps took a day.  And a rate at which a run ends is not the best."""
    with np.errstate(all="ignore"):
        found, _ = losses(optimizer_losses, *TUNED, "--rates", "1e-2", "1e9", "--seeds", "0", "--grad-clip", "0")
    assert [row["val_loss"] is None for row in found["rows"]] == [False, True, False, True]
    rows = [{**row, "seconds": 86_400} for row in found["rows"][:1]]
    early, shown = losses(optimizer_losses, *TUNED, "--grad-clip", "0", "--minutes", "1400", lack=rows)
    assert early["rows"] == rows and "more runs are missing: the same command goes on" in shown
    late, _ = losses(optimizer_losses, *TUNED, "--grad-clip", "0", "--minutes", "1500")
    assert len(late["rows"]) > 1


def test_8_bits_beside_float32(losses):
    """And rounded otherwise; a file that lacks some runs is completed with the same numbers."""
    whole, said = losses(fp8_losses, *PAIRS, "--again")
    keys = [(row["dtype"], row["micro_batch_size"], row["seed"], row["steps"]) for row in whole["rows"]]
    assert keys == [(*kind, seed, 10) for seed in (1, 2) for kind in (("float32", 2), ("fp8", 2), ("float32", 1))]
    for number, row in enumerate(whole["summary"]):
        one, fp8, again = (each["val_loss"] for each in whole["rows"][3 * number : 3 * number + 3])
        assert row == {"seed": number + 1, "float32": one, "fp8": fp8, "again": again,
                       "fp8 differs": fp8 / one - 1, "again differs": again / one - 1}  # fmt: skip
        assert 1e-7 < abs(row["fp8 differs"]) < 0.02 and abs(row["again differs"]) < 1e-4
        assert f"{row['fp8 differs']:+.3%}" in said
    mean = sum(row["fp8 differs"] for row in whole["summary"]) / 2
    error = abs(whole["summary"][0]["fp8 differs"] - mean)  # of two values: half their distance
    assert f"fp8 differs by {mean:+.3%} +- {error:.3%}, 2 seeds" in said
    completed, _ = losses(fp8_losses, *PAIRS, "--again", lack=whole["rows"][2:5])
    assert all(row["curve"] in [each["curve"] for each in completed["rows"]] for row in whole["rows"])
    with pytest.raises(ConfigError, match="--again: expected a --micro-batch-size of at least 2, got 1"):
        losses(fp8_losses, *PAIRS, "--again", "--micro-batch-size", "1")


@needs_mpirun
def test_compressed_gradients(corpus):
    words = ["--corpus", str(corpus), "--json", str(corpus.with_name("losses.json")), *FLAGS, *PAIRS]
    command = [MPIRUN, "-n", "2", sys.executable, "-m", "benchmarks.compress_losses", *words]
    done = run_program(*command, cwd=ROOT, env=OUTSIDE)
    assert done.returncode == 0, done.stderr
    found = json.loads(corpus.with_name("losses.json").read_text())
    assert [(row["compress"], row["seed"]) for row in found["rows"]] == [
        (name, seed) for seed in (1, 2) for name in ("none", "fp8", "int8")
    ]
    assert all(1e-7 < abs(row[f"{name} differs"]) < 0.02 for row in found["summary"] for name in ("fp8", "int8"))
    assert "int8 differs by" in done.stdout and "2 seeds" in done.stdout
