"""``--eval-data``, ``--keep-best`` and ``--patience``."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.errors import ConfigError, DataError
from kos.testing import spawn
from kos.train import checkpoint
from kos.train.data.batches import load_data
from kos.train.device.cpu import CpuDevice
from kos.train.tokenize import tokenize
from kos.train.tools import read_metrics
from kos.train.trainer import Trainer
from tests.train import emulated_runs
from tests.train.refusal import refused
from tests.train.runs import _config, _train
from tests.train.test_loss_masks import write_lines
from tests.train.tokenizer_files import letters


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Data to validate on: a text, and prompts with completions."""
    folder = tmp_path_factory.mktemp("others")
    (folder / "zig.txt").write_text("zig zag " * 99)
    pairs = [{"prompt": "zig ", "completion": "zag " * count} for count in (1, 2, 5, 3)]
    write_lines(folder / "pairs.jsonl", pairs * 9)
    return folder


def named(others: Path) -> list[str]:
    return [f"zig={others / 'zig.txt'}", f"pairs={others / 'pairs.jsonl'}"]


FOUR: dict[str, Any] = {"steps": 4, "eval_every": 2, "save_every": 0, "sample_tokens": 0}


@pytest.fixture(scope="module")
def plain(text, others, tmp_path_factory):
    """A run of one rank without others' data, and the losses after it with each of them as ``val_data``."""
    out, losses = tmp_path_factory.mktemp("plain"), {}
    rows = _train(text, out / "run", 1, **FOUR)
    step4 = str(out / "run" / "checkpoints" / "step-4")
    for each in named(others):
        name, _, path = each.partition("=")
        on = {"steps": 5, "eval_every": 1, "resume": step4, "lr": 1e-30, "fit": "whole" if name == "pairs" else "cut"}
        losses[name] = _train(text, out / name, 1, **FOUR | on, val_data=path)[-1]["val_loss"]
    return rows, losses


@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (4, {"tp": 2}), (4, {"pp": 2, "cp": 2})])
def test_the_losses_are_those_of_val_data(text, others, tmp_path, plain, ranks, layout):
    """Training does not change, and neither does val_loss."""
    without, losses = plain
    rows = _train(text, tmp_path, ranks, **FOUR, **layout, eval_data=named(others))
    for key in ("loss", "val_loss", "val_loss_before"):
        got, expected = ([row[key] for row in each if key in row] for each in (rows, without))
        np.testing.assert_allclose(got, expected, 1e-5)
    for name, loss in losses.items():
        assert [row["step"] for row in rows if f"val_loss/{name}" in row] == [2, 4]
        assert f"val_loss_before/{name}" in rows[0]
        assert rows[-1][f"val_loss/{name}"] == pytest.approx(loss, rel=1e-5)


def test_a_gpu_has_the_losses_of_a_cpu(emulated, text, others, tmp_path):
    runs = [
        emulated_runs.train(text, tmp_path / device, device, seq_len=16, eval_data=named(others))
        for device in ("cpu", "cuda")
    ]
    for key in ("val_loss/zig", "val_loss/pairs"):
        each = [[row[key] for row in rows if key in row] for rows in runs]
        assert each[0]
        np.testing.assert_allclose(*each, rtol=1e-5)


def test_all_of_a_file_is_validated_on_by_the_tokenizer_of_the_run(text, others):
    tokenizer = letters(others, text.read_text())
    config = _config(text, None, tokenizer=tokenizer, seq_len=8, eval_data=[f"a={others / 'a.txt'}"])
    (others / "a.txt").write_text("rank ring tree")
    data = load_data(config)
    assert data.others["a"].tokenizer is data.tokenizer and data.others["a"].val.size == 14
    assert data.tokenizer.decode(data.others["a"].val.window(0, 14)[0]) == "rank ring tree"
    (others / "a.txt").write_text("rank")
    with refused(DataError, f"--eval-data {others / 'a.txt'}: expected at least --seq-len + 1 = 9 tokens"):
        load_data(config)
    with refused(ConfigError, "--eval-data: expected stdlib, or the path", "got 'no'"):
        load_data(config.model_copy(update={"eval_data": ("a=no",)}))


def test_tokens_of_kos_tokenize(text, others, tmp_path):
    """What such a folder holds out, or else all of it, if its tokens are those of the run's tokenizer."""
    val = text.read_text()[:300]
    (tmp_path / "val.txt").write_text(val)
    write_lines(tmp_path / "one.jsonl", [{"prompt": "one ", "completion": "rank ring"}])
    tokenize(tmp_path / "both", [str(text)], val_data=str(tmp_path / "val.txt"))
    for name, folder in (("pairs", others), ("one", tmp_path)):
        tokenize(tmp_path / name, [str(folder / f"{name}.jsonl")])
    named = [f"{name}={tmp_path / name}" for name in ("both", "pairs", "one")]
    data = load_data(_config(text, None, seq_len=8, eval_data=named))
    both = data.others["both"].val
    assert data.tokenizer.decode(both.window(0, both.size)[0]).strip() == val.strip()
    assert data.others["one"].val.size == 13, "it holds nothing out"
    alone = load_data(_config(tmp_path / "pairs", None, seq_len=8))
    assert data.others["pairs"].val.size == alone.val.size and data.others["pairs"].val.masked
    with refused(DataError, f"--eval-data {tmp_path / 'both'}: expected tokens of the tokenizer ", "got bytes"):
        load_data(_config(text, None, tokenizer=letters(tmp_path, val), seq_len=8, eval_data=named[:1]))


# --- the best checkpoint ----------------------------------------------------------------------------------------

LOSSES = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.0, 10: 2.5, 12: 2.75, 14: 2.6, 16: 2.55, 18: 2.0}
"""Validation losses by steps."""


def run(
    text: Path, out: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 1, steps: int = 18, **changes: Any
) -> tuple[list[int], str]:
    """A run with these ``LOSSES``: the steps that are saved at its end, and which of them is the best."""
    trainers: list[Trainer] = []

    def evaluate(device: CpuDevice) -> dict[str, float]:
        step = next(trainer for trainer in trainers if trainer.device is device).steps_done
        return {"val_loss": 1.0, "val_loss/zig": LOSSES.get(step, 9.0)}

    def train(comm: Any) -> None:
        trainers.append(Trainer(_config(text, out, steps=steps, **how), comm))
        trainers[-1].run()

    (text.parent / "zig.txt").write_text("zig zag " * 99)
    how = {"eval_every": 2, "save_every": 0, "keep": 1, "sample_tokens": 0, "keep_best": "val_loss/zig",
           "eval_data": [f"zig={text.parent / 'zig.txt'}"], **changes}  # fmt: skip
    monkeypatch.setattr(CpuDevice, "evaluate", evaluate)
    spawn(train, ranks, timeout=100)
    best = out / "checkpoints" / "best"
    steps = [step for step, _ in checkpoint.steps_in(out / "checkpoints")]
    return steps, best.readlink().name if best.is_symlink() else ""


@pytest.mark.parametrize(("ranks", "changes"), [(1, {}), (2, {"tp": 2, "save_async": True})])
def test_the_best_is_kept_besides_the_newest(text, tmp_path, monkeypatch, capsys, ranks, changes):
    assert run(text, tmp_path, monkeypatch, ranks, steps=17, **changes) == ([10, 17], "step-10")
    best = tmp_path / "checkpoints" / "best"
    assert f"best:       {best} (val_loss/zig 2.5000 at step 10)" in capsys.readouterr().out
    assert checkpoint.find(best).step == 10
    assert json.loads((best / "manifest.json").read_text())["best"] == {"val_loss/zig": 2.5}
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [*range(1, 18)]


@pytest.mark.parametrize(("patience", "ended"), [(1, 6), (3, 16), (4, 18)])
def test_patience(text, tmp_path, monkeypatch, capsys, patience, ended):
    """Patience counts from the best validation (of equal ones, the first). Both ranks end at the same, saved step."""
    steps, best = run(text, tmp_path, monkeypatch, ranks=2, patience=patience)
    assert steps[-1] == ended and best == f"step-{ {6: 4, 16: 10, 18: 18}[ended]}"
    without = "1 validation" if patience == 1 else f"{patience} validations"
    said = f"val_loss/zig has not fallen in {without} (--patience): stopped after step {ended}; resume with: "
    assert (said in capsys.readouterr().out) == (ended < 18)


def test_patience_alone_is_that_of_val_loss(text, tmp_path, monkeypatch):
    assert run(text, tmp_path, monkeypatch, keep_best=None, patience=3) == ([2, 8], "step-2")


def test_a_resumed_run_knows_the_best(text, tmp_path, monkeypatch):
    run(text, tmp_path, monkeypatch, steps=12)
    assert run(text, tmp_path, monkeypatch, steps=15, resume="auto") == ([10, 15], "step-10")
    assert run(text, tmp_path, monkeypatch, resume="auto", patience=3) == ([10, 16], "step-10")
    assert run(text, tmp_path, monkeypatch, resume="auto") == ([18], "step-18")


def test_a_best_after_the_step_that_a_run_resumes_from_is_gone(text, tmp_path, monkeypatch):
    """The run goes back before it. Until its next validation there is no best."""
    run(text, tmp_path, monkeypatch, steps=10, keep=9, save_every=3)
    before = tmp_path / "checkpoints" / "step-3"
    assert run(text, tmp_path, monkeypatch, steps=5, eval_every=9, resume=str(before), keep=9)[1] == "step-5"
    assert run(text, tmp_path, monkeypatch, steps=8, resume=str(before), keep=9)[1] == "step-4"
