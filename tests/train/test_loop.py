"""Whole runs: the same losses for any number of ranks, and on after an interruption as if there were none."""

import contextlib
import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kos.errors import (
    CheckpointError,
    CollectiveTimeout,
    CompileError,
    ConfigError,
    DataError,
    RankLost,
    TrainingError,
)
from kos.testing import Fault, spawn
from kos.train import checkpoint, folder, source
from kos.train.checkpoint.huggingface import fingerprint
from kos.train.device.cpu import CpuDevice
from kos.train.tools import MetricsLog
from kos.train.trainer import Trainer
from tests.train.runs import SMALL, _config, _losses, _train
from tests.train.tokenizer_files import letters


def test_a_run_learns_and_leaves_what_it_promises(text, tmp_path, capsys):
    rows = _train(text, tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 51))
    assert rows[0]["loss"] == pytest.approx(np.log(256), rel=0.05)
    assert rows[-1]["val_loss"] < 0.5 * rows[0]["loss"]
    for key in ("grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds"):
        assert all(row[key] > 0 for row in rows), key
    assert rows[-1]["tokens"] == 50 * 8 * 32
    assert [row["step"] for row in rows if "val_loss" in row] == [25, 50]
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["config"]["steps"] == 50 and described["versions"]["numpy"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-40", "step-50"]
    said = capsys.readouterr().out
    for expected in ("step  1/50", "a sample", "checkpoints/step-50", "metrics.jsonl", "--resume auto"):
        assert expected in said, expected


def test_the_number_of_ranks_does_not_matter(text, tmp_path):
    one = _train(text, tmp_path / "one", steps=10)
    for ranks in (2, 4):
        many = _train(text, tmp_path / str(ranks), ranks, steps=10)
        np.testing.assert_allclose(_losses(many), _losses(one), rtol=1e-5)
        assert many[-1]["val_loss"] == pytest.approx(one[-1]["val_loss"], rel=1e-5)


def test_a_loss_that_is_not_finite_stops_all(text, tmp_path, before_call):
    def poisoned(self, step, stop):
        if step == 7 and self.comm.rank == self.comm.size - 1:
            self.step.weights.flat[0] = np.nan

    before_call(CpuDevice, "start_step", poisoned)
    finite = r"step 8: expected a finite loss, got nan \(first in the gradient of [\w.]+, but what the forward breaks "
    finite += r"is in all\); "
    with pytest.raises(TrainingError, match=finite + "the checkpoints before it are of finite weights, a lower --lr"):
        _train(text, tmp_path / "saved", 2, save_every=5)
    assert checkpoint.find(tmp_path / "saved").step == 5
    with pytest.raises(TrainingError, match=finite + "a lower --lr or --grad-clip may help, --skip-outliers X leaves"):
        _train(text, tmp_path / "none", 2, save_every=0)


def test_what_cannot_get_better_ends(text, tmp_path, before_call):
    """Weights that are not finite to begin with, and steps that are all left out because no gradient is finite."""
    _train(text, tmp_path / "begun", steps=2, lr=1e-3)
    begun = checkpoint.find(tmp_path / "begun").path
    weights = load_file(begun / "model.safetensors")
    weights["model.norm.weight"][3] = np.nan
    save_file(weights, begun / "model.safetensors")
    manifest = json.loads((begun / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = fingerprint(begun / "model.safetensors")
    (begun / "manifest.json").write_text(json.dumps(manifest))
    expected = rf"^expected a finite validation loss before training, got nan with the weights of {begun}"
    with pytest.raises(TrainingError, match=expected):
        _train(text, tmp_path / "nan", 2, init_from=str(begun), skip_outliers=10.0)

    def start(device, step, stop):  # a sound one in between counts anew
        device.step.weights.flat[0] = 0.01 if step == 5 else np.nan

    before_call(CpuDevice, "start_step", start)
    expected = "^step 26: expected a finite gradient norm in one of 20 steps, got nan; a lower --lr or "
    with pytest.raises(TrainingError, match=expected) as caught:
        _train(text, tmp_path / "run", 2, steps=30, eval_every=0, save_every=0, skip_outliers=1e9)
    assert "--skip-outliers" not in str(caught.value), "it is in use"


@pytest.mark.parametrize("skip", [{}, {"skip_outliers": 10.0}])
def test_weights_that_are_not_finite_are_not_saved(text, tmp_path, skip):
    """An update may break them after a sound gradient."""
    huge = {"lr": 1e300, "warmup_steps": 0, "schedule": "constant", **skip}
    with pytest.raises(TrainingError, match=r"step 2: expected a finite validation loss, got nan; a lower --lr"):
        _train(text, tmp_path / "run", 2, steps=2, eval_every=2, save_every=0, **{**huge, "skip_outliers": 10.0})
    with pytest.raises(CheckpointError, match="step-1: expected finite weights, got others in .*; nothing is saved"):
        _train(text, tmp_path / "run", 2, steps=3, eval_every=0, save_every=1, **huge)
    assert checkpoint.latest(tmp_path / "run" / "checkpoints") is None


def test_a_folder_with_checkpoints_is_refused(text, tmp_path):
    _train(text, tmp_path / "run", steps=2)
    with pytest.raises(ConfigError, match="expected an empty folder, or --resume auto .* got the checkpoints"):
        _train(text, tmp_path / "run", steps=2)


def _forbid(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """As without permission to write there, which root always has."""
    temporary = folder.tempfile.TemporaryFile

    def make(dir: Path) -> Any:
        if dir == place:
            raise PermissionError(errno.EACCES, "Permission denied")
        return temporary(dir=dir)

    monkeypatch.setattr(folder.tempfile, "TemporaryFile", make)


@pytest.mark.parametrize("which", ["file", "link", "permission", "proc"])
def test_a_folder_that_cannot_be_written_is_refused_before_there_are_data(
    text, tmp_path, which, monkeypatch, before_call
):  # fmt: skip
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    out = {"permission": tmp_path / "run", "proc": Path("/proc/run")}.get(which, tmp_path / which / "run")
    got = f"{tmp_path / which}, which is not a folder"
    if which == "permission":
        _forbid(monkeypatch, tmp_path)
        got = rf"no new file in {tmp_path} \(Permission denied\)"
        with pytest.raises(ConfigError, match=f"{got} on rank 1$"):
            folder.check_folder(out, 1)
        (tmp_path / "checkpoints").mkdir()  # which can be written
        with pytest.raises(ConfigError, match=f"expected a folder that .*, got {got}$"):
            folder.check_folder(tmp_path, 0)
    if which == "proc":  # where root may write, says ``os.access``
        got = r"no new file in /proc \(No such file or directory\)"
    before_call(source, "load_data", lambda *_: pytest.fail("data are read first"))
    with pytest.raises(ConfigError, match=f"(?m)^--out {out}: expected a folder that can be written, got {got}$"):
        _train(text, out, 2, steps=2)
    assert not out.exists()
    if which == "file":
        (tmp_path / "checkpoints").write_text("")
        got = f"{tmp_path}/checkpoints, which is not a folder"
        with pytest.raises(ConfigError, match=f"(?m)^--out {tmp_path}: expected .*, got {got}$"):
            _train(text, tmp_path, 2, steps=2)


def test_a_checkpoint_that_does_not_fit_is_reported_before_the_first_step(text, tmp_path, capsys, monkeypatch):
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=1000))
    _train(text, tmp_path / "run", 2, steps=2)
    said, size = capsys.readouterr().out, sum(path.stat().st_size for path in tmp_path.glob("run/*/*/*.safetensors"))
    said, rest = said.split(" bytes free of ")
    assert said.endswith(f"the first checkpoint does not fit: {tmp_path / 'run'} has 1,000") and "step 1" in rest
    assert int(rest.split("\n")[0].replace(",", "")) == pytest.approx(size, rel=0.1)


def test_ranks_with_other_data_or_settings_are_refused(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[1:])

    ours = _config(text, tmp_path / "run")
    for name, value in (("data", str(other)), ("seed", 3), ("lr", 0.1), ("tp", 2), ("device", "cpu")):
        configs = [ours, ours.model_copy(update={name: value})]
        with pytest.raises(ConfigError, match=f"{name}: expected the same on all ranks, got .* on rank 1"):
            spawn(lambda comm, configs=configs: Trainer(configs[comm.rank], comm), 2, timeout=60)


def test_init_from_hugging_face(text, tmp_path):
    trained = _train(text, tmp_path / "first", steps=30)
    source = checkpoint.find(tmp_path / "first").path
    rows = _train(text, tmp_path / "second", steps=2, init_from=str(source))
    assert rows[0]["loss"] < 0.7 * trained[0]["loss"]
    model = {**SMALL["model"], "rope_theta": 5000.0, "tie_word_embeddings": False}
    with pytest.raises(ConfigError, match=r"argument: model.rope_theta: expected 10000\.0, which the model in"):
        _train(text, tmp_path / "third", 2, steps=2, init_from=str(source), model=model)
    with (source / "tokenizer_config.json").open("a") as edited:
        edited.write("\n")
    whole = (weights := source / "model.safetensors").read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for damaged, told in ((flipped, "sha256 [0-9a-f]{64}"), (whole[:-1], f"bytes {len(whole)}"), (whole, "")):
        weights.write_bytes(damaged)
        damage = pytest.raises(CheckpointError, match=f"{weights}: expected {told}, got ")
        with damage if told else contextlib.nullcontext():
            _train(text, tmp_path / "fourth", 2, steps=1, init_from=str(source))


def test_init_from_refuses_another_tokenizer(text, tmp_path):
    """One of as many tokens would fit the weights; without the file it is the user's to know."""
    ours = letters(tmp_path, text.read_text())
    other = letters(tmp_path / "other", text.read_text().replace("b", "ß"))
    _train(text, tmp_path / "first", steps=1, tokenizer=ours)
    source = checkpoint.find(tmp_path / "first").path
    saved, how = source / "kos_tokenizer.json", {"init_from": str(source), "steps": 1}
    with pytest.raises(CheckpointError, match=f"{source}: .* of this run, {other}, got "):
        _train(text, tmp_path / "second", 2, tokenizer=other, **how)
    assert not (tmp_path / "second").exists()
    for content in ("{", "[]", "{}"):
        saved.write_text(content)
        with pytest.raises(CheckpointError, match=f"{saved}: expected a tokenizer that kos saved, got "):
            _train(text, tmp_path / "second", tokenizer=ours, **how)
    saved.write_text('{"kind": "bytes"}')
    with pytest.raises(CheckpointError, match=rf"{source}: .* of this run, {ours}, got bytes \(see --tokenizer\)"):
        _train(text, tmp_path / "second", tokenizer=ours, **how)
    saved.write_text('{"kind": "numbers", "vocab_size": 9}')  # which spell no text
    assert len(_train(text, tmp_path / "second", tokenizer=ours, **how)) == 1
    saved.unlink()
    theirs = source / "tokenizer.json"  # as a Hugging Face folder has one
    with pytest.raises(CheckpointError, match=rf"{source}: .* of this run, {other}, got {theirs} \(see --tokenizer\)"):
        _train(text, tmp_path / "third", 2, tokenizer=other, **how)
    theirs.unlink()
    assert len(_train(text, tmp_path / "third", tokenizer=other, **how)) == 1


AFTER = "^after step 2: too late; the last checkpoint, of step 2, is good; resume with: "


@pytest.mark.parametrize(("kind", "said"), [
    (CollectiveTimeout, AFTER), (DataError, AFTER), (CompileError, "^too late"),
])  # fmt: skip
def test_what_interrupts_a_run(text, tmp_path, kind, said, before_call):
    """Is reported with the step; a kernel with a mistake in it interrupts nothing."""

    def interrupt(self, step, stop):
        if step == 2:
            raise kind("too late")

    before_call(CpuDevice, "start_step", interrupt)
    with pytest.raises(kind, match=said):
        _train(text, tmp_path, save_every=2)


def test_the_lowest_of_the_survivors_says_how_to_go_on(text, tmp_path, before_call):
    """Ranks that something else than mpirun has started: the advice names it, and comes once."""

    def lost(self, step, stop):
        if step >= 1:
            error = RankLost("rank 0 is gone")
            error.ranks, error.unasked = (0,), (1,)
            raise error

    def run(comm):
        with pytest.raises(RankLost) as caught:
            Trainer(_config(text, tmp_path, dp=3, batch_size=6, steps=2, resume="auto"), comm).run()
        return str(caught.value)

    _train(text, tmp_path, steps=1, batch_size=6)
    before_call(CpuDevice, "start_step", lost)
    good = "after step 1: rank 0 is gone; the last checkpoint, of step 1, is good"
    said = spawn(run, 3, timeout=100)
    assert said[0] == said[1] == good
    advice = r"; resume with: start the 3 ranks as before, with: \S+ -m kos\.train .*"
    assert re.fullmatch(re.escape(good) + advice, said[2])


@pytest.mark.parametrize(
    ("schedule", "messages", "call"), [("1f1b", 16, "send"), ("1f1b", 16, "recv"), ("zero-bubble-v", 32, "recv")]
)
def test_a_rank_lost_in_a_pipeline_is_reported_with_step_and_advice(text, tmp_path, schedule, messages, call):
    """Also while messages go in the other direction: the first cause, the step, and once the command to resume."""
    shape = {"pp": 3, "micro_batch_size": 1, "pp_schedule": schedule, "sample_tokens": 0}
    shape["model"] = {**SMALL["model"], "num_hidden_layers": 5}
    said = {}

    def run(comm):
        config = _config(text, tmp_path, steps=2, save_every=1, eval_batches=0, **shape)
        try:
            Trainer(config, comm).run()
        except RankLost as error:
            said[comm.rank] = str(error)

    for fault in range(messages + 3, 2 * messages, messages // 2):  # in the second step
        shutil.rmtree(tmp_path, ignore_errors=True)
        said.clear()
        spawn(run, 3, timeout=100, faults=[Fault("crash", 1, fault, call=call)])
        assert said.keys() == {0, 2}
        for rank, line in said.items():
            lost = r"after step 1: .*rank 1.* is gone: it crashed before \w+(; .* because of it)?"
            good = "; the last checkpoint, of step 1, is good"
            advice = r"; resume with: start the 3 ranks as before, with: .*" if rank == 0 else ""
            assert re.fullmatch(lost + good + advice, line), line


def test_default_folder_is_one_that_is_free(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"

    def train(**changes):
        config = _config(text, None, **{"steps": 2, **changes})
        spawn(lambda comm: Trainer(config, comm).run(), 2, timeout=100)

    train(resume="auto")
    train()
    assert sorted(path.name for path in runs.iterdir()) == ["tiny", "tiny-2"]
    (runs / "tiny-3").mkdir()  # a start that failed
    train(resume="auto", steps=3)
    (weights := tmp_path / "weights").mkdir()  # without weights
    (weights / "config.json").write_bytes((runs / "tiny/checkpoints/step-2/config.json").read_bytes())
    with pytest.raises(CheckpointError):
        train(init_from=str(weights), tokenizer="bytes")
    assert not (runs / "tiny-4").exists()
    assert checkpoint.find(runs / "tiny").step == 2 and checkpoint.find(runs / "tiny-2").step == 3


def test_outliers(text, tmp_path, capsys):
    """Steps that are left out move nothing and count."""
    plain = _train(text, tmp_path / "plain", steps=5)
    norms = [row["grad_norm"] for row in plain]
    capsys.readouterr()
    rows = _train(text, tmp_path / "skipped", 2, steps=3, skip_outliers=0.5 * min(norms))
    said = capsys.readouterr().out
    assert f"before training: {rows[-1]['val_loss']:.4f}" in said
    assert said.count("  skipped  ") == 3 and "3 of 3 steps left out (--skip-outliers " in said
    assert [row.get("skipped") for row in rows] == [True] * 3 and not any("skipped" in row for row in plain)
    assert [row["val_loss_before"] for row in rows if "val_loss_before" in row] == [rows[-1]["val_loss"]]
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[0]["grad_norm"] == pytest.approx(norms[0], rel=1e-5)


def test_metrics_that_are_not_finite_are_null(tmp_path):
    """Also in the rows that are kept of a run that wrote them bare."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": NaN}\n' + "[" * 100_000 + "\n")
    metrics = MetricsLog(path, after_step=1)
    metrics.write({"step": 2, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5})
    metrics.close()
    assert path.read_text() == '{"step": 1, "loss": null}\n{"step": 2, "loss": null, "grad_norm": null, "lr": 0.5}\n'
