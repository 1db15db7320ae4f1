"""Runs in pairs, whose losses are compared: by optimizer, in 8 bits, with compressed gradients; and their corpus."""

import hashlib
import json
import lzma
import shlex
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import fp8_losses, optimizer_losses, paired_losses, wheel_corpus
from benchmarks.optimizer_losses import Wanted
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.wheel_corpus import unpack
from kos.errors import ConfigError, DataError
from kos.testing import spawn
from kos.train.config.flags import parse
from kos.train.data.batches import load_data
from tests.host_compiler import needs_compiler
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program
from tests.train.host_kernels.communicator import DeviceComm
from tests.train.host_kernels.engine import host_engine
from tests.train.refusal import refused

ROOT = Path(__file__).resolve().parents[1]
FLAGS = shlex.split("""
--seq-len 16 --batch-size 4 --hidden-size 16 --intermediate-size 24 --num-hidden-layers 2 --num-attention-heads 2
--num-key-value-heads 2 --device cpu
""")
TUNED = shlex.split("--tokens 1280 --tune-tokens 320 --rates 1e-2 3e-2 --seeds 2 --evaluations 5")
PAIRS = shlex.split("--tokens 640 --micro-batch-size 2 --lr 1e-2 --seeds 2")
KEYS = ("optimizer", "lr", "muon_lr", "seed", "steps")
Losses = Callable[..., Any]


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


@needs_compiler
def test_losses_on_an_emulated_gpu(corpus, monkeypatch):
    """The runs of a GPU are those of a CPU, one after another in one process."""
    flags = [*FLAGS[:-2], "--data", str(unpack(corpus)), "--epochs", "1", "--eval-batches", "2"]
    config = parse([*flags, "--dtype", "float32"])
    data, config = load_data(config), config.model_copy(update={"epochs": None})
    host_engine(monkeypatch)

    def curve(comm, kind, name):
        comm = DeviceComm(comm) if kind == "cuda" else comm
        return paired_losses.run(config.for_world(1, kind), data, comm, Wanted(name, 1e-2, None, 1, 4), 2)["curve"]

    for name in OPTIMIZERS:
        (gpu,), (cpu,) = (spawn(lambda comm, k=kind, n=name: curve(comm, k, n), 1) for kind in ("cuda", "cpu"))
        np.testing.assert_allclose(gpu, cpu, rtol=2e-5)


def test_a_corpus_of_wheels(tmp_path, capsys):
    """Each source once, none that is short or no text; in an order of their text alone."""
    (wheels := tmp_path / "wheels").mkdir()
    sources = {"one-1.whl": {"b.py": "é" * 300, "a.py": "a" * 300, "c.txt": "c" * 300}, "two-2.whl": {
        "again.py": "a" * 300, "short.py": "x", "last.py": "z" * 300, "latin.py": b"\xe9" * 300}}  # fmt: skip
    for name, members in sources.items():
        with zipfile.ZipFile(wheels / name, "w") as wheel:
            for member, content in members.items():
                wheel.writestr(member, content)
    known = {name: hashlib.sha256((wheels / name).read_bytes()).hexdigest() for name in sources}
    lines = [json.dumps({"text": text * 300}, ensure_ascii=False).encode() + b"\n" for text in "aéz"]
    digest = hashlib.sha256(b"".join(lines)).hexdigest()
    out = tmp_path / "made" / "corpus.jsonl.xz"
    words = ["--out", str(out), "--wheels", str(wheels)]
    wheel_corpus.main(words, known, digest)
    assert f"3 documents, 1,200 bytes of text, SHA-256 {digest}" in capsys.readouterr().out
    assert lzma.decompress(out.read_bytes()) == b"".join(lines)
    ordered = sorted(lines, key=lambda line: hashlib.sha256(line).digest())
    assert unpack(out).read_bytes() == b"".join(ordered) and unpack(unpack(out)) == out.with_suffix("")
    with refused(DataError, f"--corpus: expected a file, got {tmp_path}/no.xz"):
        unpack(tmp_path / "no.xz")
    with zipfile.ZipFile(wheels / "two-2.whl", "a") as wheel:
        wheel.writestr("more.py", "more")
    with refused(DataError, f"--wheels {wheels}: expected two-2.whl of SHA-256 {known['two-2.whl']}, got "):
        wheel_corpus.main(words, known, digest)
    del known["two-2.whl"]
    with pytest.raises(SystemExit, match=f"expected a corpus of SHA-256 {digest}, got "):
        wheel_corpus.main(words, known, digest)
