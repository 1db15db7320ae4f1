"""``benchmarks.optimizers``: what it prints and writes, on a CPU."""

from __future__ import annotations

import hashlib
import json
import lzma
import shlex
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import optimizer_losses, paired_losses, wheel_corpus
from benchmarks.optimizer_losses import Wanted
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.wheel_corpus import unpack
from kos.errors import ConfigError, DataError
from kos.testing import spawn
from kos.train.config.flags import parse
from kos.train.data.batches import load_data
from tests.train.host_kernels.engine import DeviceComm, host_engine
from tests.train.refusal import refused
from tests.train.test_muon_on_host import needs_compiler

FLAGS = shlex.split("""
--seq-len 16 --batch-size 4 --hidden-size 16 --intermediate-size 24 --num-hidden-layers 2 --num-attention-heads 2
--num-key-value-heads 2 --device cpu
""")


# --- losses ------------------------------------------------------------------------------------------------

SMALL = shlex.split("--tokens 1280 --tune-tokens 320 --rates 1e-2 3e-2 --seeds 2 --evaluations 5")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": f"the {number} ranks of a ring\n" * (number % 7 + 3)}) + "\n" for number in range(99)]
    with lzma.open(path := tmp_path / "corpus.jsonl.xz", "wt") as file:
        file.writelines(lines)
    return path


def losses(corpus: Path, *more: str) -> dict[str, Any]:
    """What the file has after a run."""
    file = corpus.with_name("losses.json")
    optimizer_losses.main(["--corpus", str(corpus), "--json", str(file), *SMALL, *FLAGS, *more])
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_losses_beside_each_other(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tuning, and pairs; a file that lacks some is completed with the same numbers."""
    whole = losses(corpus)
    shown, rows = capsys.readouterr().out, whole["rows"]
    keys = [tuple(row[name] for name in Wanted._fields) for row in rows]
    rates = 0.01, 0.03
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
    file = corpus.with_name("losses.json")
    file.write_text(json.dumps({**whole, "rows": [rows[0], *rows[3:5]]}))
    again = losses(corpus)["rows"]
    assert len(again) == len(rows)
    for row in rows:
        other = next(each for each in again if all(each[name] == row[name] for name in Wanted._fields))
        assert other["curve"] == row["curve"]
    with refused(ConfigError, f"--json {file}: expected runs of seq_len 8, got those of 16"):
        losses(corpus, "--seq-len", "8")
    with refused(ConfigError, "--tokens: expected at most", "which are seen once, got 1,000,000"):
        losses(corpus, "--tokens", "1e6")


def test_runs_for_which_there_is_no_time_are_left(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By those that there are: a run of five steps took a day."""
    found = losses(corpus, "--seeds", "0")
    rows = [{**row, "seconds": 86_400} for row in found["rows"][:1]]
    corpus.with_name("losses.json").write_text(json.dumps({**found, "rows": rows}))
    capsys.readouterr()
    assert losses(corpus, "--minutes", "1400")["rows"] == rows
    assert "more runs are missing: the same command goes on" in capsys.readouterr().out
    assert len(losses(corpus, "--minutes", "1500")["rows"]) > 1


def test_a_rate_at_which_a_run_ends_is_not_the_best(corpus: Path) -> None:
    arguments = ["--rates", "1e-2", "1e9", "--seeds", "0", "--grad-clip", "0"]
    with np.errstate(all="ignore"):
        rows = losses(corpus, *arguments)["rows"]
    assert [row["val_loss"] is None for row in rows] == [False, True, False, True]


@needs_compiler
def test_losses_on_an_emulated_gpu(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a GPU are those of a CPU, one after another in one process."""
    flags = [*FLAGS[:-2], "--data", str(unpack(corpus)), "--epochs", "1", "--eval-batches", "2"]
    config = parse([*flags, "--dtype", "float32"])
    data, found = load_data(config), {}
    config = config.model_copy(update={"epochs": None})
    host_engine(monkeypatch)
    for kind, of in (("cuda", DeviceComm), ("cpu", lambda comm: comm)):
        for name in OPTIMIZERS:
            wanted, own = Wanted(name, 1e-2, None, 1, 4), config.for_world(1, kind)
            (found[kind, name],) = spawn(
                lambda comm, of=of, own=own, wanted=wanted: paired_losses.run(own, data, of(comm), wanted, 2), 1
            )
    for name in OPTIMIZERS:
        gpu, cpu = (np.array(found[kind, name]["curve"]) for kind in ("cuda", "cpu"))
        np.testing.assert_allclose(gpu, cpu, rtol=2e-5)


# --- the corpus --------------------------------------------------------------------------------------------


def test_a_corpus_of_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each source once, none that is short or no text; in an order of their text alone."""
    (wheels := tmp_path / "wheels").mkdir()
    sources = {"one-1.whl": {"b.py": "é" * 300, "a.py": "a" * 300, "c.txt": "c" * 300}, "two-2.whl": {
        "again.py": "a" * 300, "short.py": "x", "last.py": "z" * 300, "latin.py": b"\xe9" * 300}}  # fmt: skip
    for name, members in sources.items():
        with zipfile.ZipFile(wheels / name, "w") as wheel:
            for member, content in members.items():
                wheel.writestr(member, content)
    known = {name: hashlib.sha256((wheels / name).read_bytes()).hexdigest() for name in sources}
    monkeypatch.setattr(wheel_corpus, "WHEELS", known)
    lines = [json.dumps({"text": text * 300}, ensure_ascii=False).encode() + b"\n" for text in "aéz"]
    digest = hashlib.sha256(b"".join(lines)).hexdigest()
    monkeypatch.setattr(wheel_corpus, "SHA256", digest)
    out = tmp_path / "made" / "corpus.jsonl.xz"
    wheel_corpus.main(["--out", str(out), "--wheels", str(wheels)])
    assert f"3 documents, 1,200 bytes of text, SHA-256 {digest}" in capsys.readouterr().out
    assert lzma.decompress(out.read_bytes()) == b"".join(lines)
    ordered = sorted(lines, key=lambda line: hashlib.sha256(line).digest())
    assert unpack(out).read_bytes() == b"".join(ordered) and unpack(unpack(out)) == out.with_suffix("")
    with refused(DataError, f"--corpus: expected a file, got {tmp_path}/no.xz"):
        unpack(tmp_path / "no.xz")
    with zipfile.ZipFile(wheels / "two-2.whl", "a") as wheel:
        wheel.writestr("more.py", "more")
    with refused(DataError, f"--wheels {wheels}: expected two-2.whl of SHA-256 {known['two-2.whl']}, got "):
        wheel_corpus.main(["--out", str(out), "--wheels", str(wheels)])
    monkeypatch.setattr(wheel_corpus, "WHEELS", {"one-1.whl": known["one-1.whl"]})
    with pytest.raises(SystemExit, match=f"expected a corpus of SHA-256 {digest}, got "):
        wheel_corpus.main(["--out", str(out), "--wheels", str(wheels)])
