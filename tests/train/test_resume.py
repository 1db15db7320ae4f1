"""Going on from a checkpoint: where it may be written, with which tokenizer, and as which command."""

import errno
import fcntl
import importlib.util
import io
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kos.errors import CheckpointError, ConfigError
from kos.testing import spawn
from kos.train import checkpoint, report
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.tools import read_metrics
from kos.train.trainer import Trainer
from tests.forked import python
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program
from tests.train.commands import ENVIRONMENT, _command
from tests.train.refusal import refused
from tests.train.runs import SMALL, _config, _train, run
from tests.train.tokenizer_files import letters

CONSTANT: dict[str, Any] = {"schedule": "constant", "save_every": 2, "keep": 9}


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("left", ["checkpoints", "metrics"])
def test_another_runs_folder_is_left_alone(text, tmp_path, left):
    _train(text, tmp_path / "a", steps=2, **CONSTANT)
    _train(text, tmp_path / "b", steps=6, seed=5, **CONSTANT)
    if left == "metrics":
        (tmp_path / "b" / "checkpoints").rename(tmp_path / "elsewhere")
    before = _files(tmp_path / "b")
    with pytest.raises(ConfigError, match=f"--out {tmp_path}/b: expected .* of another run"):
        _train(text, tmp_path / "b", 2, steps=4, resume=str(tmp_path / "a"), **CONSTANT)
    assert _files(tmp_path / "b") == before


def test_a_checkpoint_of_this_folder_by_another_path(text, tmp_path, monkeypatch):
    """Relative here and absolute there: it is the same run, and goes on."""
    _train(text, tmp_path / "run", steps=2, **CONSTANT)
    monkeypatch.chdir(tmp_path)
    rows = _train(text, tmp_path / "run", steps=4, resume="run", **CONSTANT)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_metrics_that_cannot_be_written_do_not_end_a_run(text, tmp_path, caplog):
    """It says so once, goes on and saves; rows are written as soon as they can be."""
    config = _config(text, tmp_path, steps=6, save_every=4)

    def run(comm):
        trainer = Trainer(config, comm)
        disk = Disk(tmp_path / "metrics.jsonl")
        if trainer.metrics is not None:
            trainer.metrics.close()
            trainer.metrics._file = disk  # as unwritable as a full disk, which takes root to make
        trainer.run()
        assert comm.rank or disk.refused > 1

    spawn(run, 2, timeout=100)
    said = [record.getMessage() for record in caplog.records if "metrics" in record.getMessage()]
    assert len(said) == 1 and "No space left" in said[0] and "the run goes on" in said[0]
    assert checkpoint.find(tmp_path).step == 6
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


class Disk(io.FileIO):
    """Is full while rows 2 to 4 come, but for a few bytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a")
        self.calls = self.refused = 0

    def write(self, content: Any) -> int:
        self.calls += 1
        if self.calls == 2:
            return super().write(bytes(content)[:10])
        if self.calls in (3, 4):
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(content)


def test_a_resumed_run_holds_out_what_it_did(text, tmp_path, caplog):
    """``--eval-batches 0`` alone would train on all."""
    whole = _train(text, tmp_path / "a", steps=4, **CONSTANT)
    _train(text, tmp_path / "b", steps=2, **CONSTANT)
    rows = _train(text, tmp_path / "b", steps=4, resume="auto", eval_batches=0, **CONSTANT)
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole] and not caplog.records
    _train(text, tmp_path / "b", steps=5, resume="auto", hold_out=0.2, **CONSTANT)
    assert "resuming with another data" in caplog.text


def test_a_resumed_run_without_held_out_data_refuses_what_needs_it(text, tmp_path, capfd):
    """And other validation data has its loss alone."""
    _train(text, tmp_path / "a", steps=2, eval_batches=0, **CONSTANT)
    resumed = {**CONSTANT, "steps": 4, "resume": str(tmp_path / "a"), "eval_every": 1}
    for needing in ({"keep_best": "val_loss"}, {"patience": 1}):
        with refused(ConfigError, "--hold-out: expected above 0, or --val-data, for val_loss (--", "), got 0"):
            _train(text, tmp_path / "b", 2, **resumed, **needing)
    other = {"eval_data": [f"b={text}"], "keep_best": "val_loss/b", "eval_batches": 2}
    capfd.readouterr()
    rows = _train(text, tmp_path / "c", 2, **resumed, **other)
    assert all(row["val_loss/b"] > 0 and "val_loss" not in row for row in rows) and len(rows) == 2
    assert (tmp_path / "c" / "checkpoints" / "best").is_symlink()
    assert capfd.readouterr().out.count("  val_loss/b ") == 2
    rows = _train(text, tmp_path / "d", **resumed, eval_batches=2)
    assert not any("val_loss" in row for row in rows)
    assert "without effect: --eval-batches (--hold-out 0)" in capfd.readouterr().out


def test_a_schedule_that_starts_over_is_reported(text, tmp_path, caplog):
    """More steps stretch a cosine, so that the learning rate rises; with fewer steps, it falls to near its end. The
    advice printed at the end of a run continues with the learning rate of its last step."""
    rows = _train(text, tmp_path / "a", steps=8, save_every=7, eval_every=0)
    words = shlex.split(report.more_steps(tmp_path / "a", 1, _config(text, tmp_path / "a", steps=8)))
    rate = float(words[words.index("--lr") + 1])
    assert rate == pytest.approx(rows[-1]["lr"], rel=1e-5) and rate > 3e-4, "not yet its end"
    _train(text, tmp_path / "a", steps=9, resume="auto", schedule="constant", lr=rate, warmup_steps=0)
    assert not caplog.records
    _train(text, tmp_path / "a", steps=18, resume="auto", save_every=10)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("the learning rate rises from 9.75e-04 to 2.") and " at step 10:" in said
    assert said.endswith("--schedule constant --lr 0.000975 --warmup-steps 0 keeps it even")
    caplog.clear()
    _train(text, tmp_path / "b", steps=12, resume=str(tmp_path / "a/checkpoints/step-10"))
    said, other = (record.getMessage() for record in caplog.records)
    assert said.startswith("the learning rate falls from 2.") and " at step 11:" in said
    assert other.startswith("resuming with another steps: "), "of a run that had not ended"


def test_a_warm_up_that_is_not_over_goes_on():
    """The advice keeps no rate below the peak."""
    config = TrainConfig.from_preset("tiny", steps=10, warmup_steps=20)
    assert report.more_steps(Path("run"), 1, config).endswith("--resume auto --steps 20")
    assert report.more_steps(Path("run"), 1, config.model_copy(update={"epochs": 3})).endswith("--epochs 6")


def test_a_last_rate_of_many_digits():
    """The printed command rounds the rate, here to less than ``min_lr``, which a constant schedule does not use."""
    config = TrainConfig.from_preset("tiny", steps=10**9, warmup_steps=0, min_lr=1.23456123e-4)
    words = shlex.split(report.more_steps(Path("run"), 1, config))
    assert words[-6:] == ["--schedule", "constant", "--lr", "0.000123456", "--warmup-steps", "0"]
    assert parse(["--min-lr", str(config.min_lr), *words[-6:]]).learning_rate()(9) == 0.000123456


def test_a_command_that_would_fail_is_not_printed(monkeypatch):
    """mpirun where srun has started the ranks, and a plot without matplotlib."""
    monkeypatch.setenv("PMIX_RANK", "0")
    assert "mpirun" in report.resume(Path("run"), 2)
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert report.resume(Path("run"), 2).startswith("start the 2 ranks as before, with: ")
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert report.plot(Path("run")) is None


@needs_mpirun
@pytest.mark.parametrize("hosts", [1, 2])
def test_resume_does_not_print_mpirun_for_several_programs(hosts):
    """Each pretended host has its own environment, which the command of one program would lose."""
    code = "from pathlib import Path; from kos.train import report; print(report.resume(Path('run'), 2))"
    programs = [["-x", f"KOS_HOST={host}", "-n", str(2 // hosts), sys.executable, "-c", code] for host in range(hosts)]
    words = [word for program in programs for word in (":", *program)][1:]
    done = run_program(MPIRUN, *words, env=OUTSIDE)
    found = [line.startswith("start the 2 ranks as before, with: ") for line in done.stdout.splitlines()]
    assert found == [hosts > 1] * 2, done.stdout + done.stderr
    assert hosts > 1 or "KOS_HOST=0 -n 2" in done.stdout


def test_printed_commands_are_those_of_the_guides(monkeypatch, tmp_path):
    """``kos`` if its script is beside this Python, else the module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    config = TrainConfig.from_preset("tiny")
    assert report.sample(Path("run"), config) == ".venv/bin/python -m kos sample run"
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/kos").touch()
    assert report.sample(Path("run"), config) == ".venv/bin/kos sample run"
    if importlib.util.find_spec("matplotlib"):
        assert report.plot(Path("run")) == ".venv/bin/kos plot run"


def test_what_cannot_go_on_is_refused_before_the_data_is_read(text, tmp_path):
    _train(text, tmp_path / "a", steps=1)
    _train(text, tmp_path / "b", steps=1)
    missing, source = tmp_path / "missing.txt", str(tmp_path / "a")
    with pytest.raises(ConfigError, match="--resume: .*nowhere: expected a checkpoint .*, got no such folder"):
        _train(missing, tmp_path / "c", 2, resume=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="of another run"):
        _train(missing, tmp_path / "b", 2, resume=source)
    named = "the model of this run, tie_word_embeddings False, got True; to resume it as it was begun: --config "
    with pytest.raises(CheckpointError, match=f"{named}{tmp_path}/a/config.json"):
        _train(missing, tmp_path / "c", 2, resume=source, model=SMALL["model"] | {"tie_word_embeddings": False})
    windows = SMALL["model"] | {"model_type": "mistral", "sliding_window": 9}
    _train(text, tmp_path / "d", steps=1, model=windows)
    with pytest.raises(CheckpointError, match="expected the model of this run, sliding_window none, got 9"):
        _train(missing, tmp_path / "c", 2, resume=str(tmp_path / "d"), model=SMALL["model"] | {"model_type": "mistral"})
    with pytest.raises(ConfigError, match="no such file"):
        _train(missing, tmp_path / "c", 2, resume=source)
    (weights := tmp_path / "weights").mkdir()
    (weights / "pytorch_model.bin").touch()
    (weights / "config.json").write_bytes((tmp_path / "a/checkpoints/step-1/config.json").read_bytes())
    with pytest.raises(CheckpointError, match=f"{weights}: expected model.safetensors, got pytorch_model.bin; .*run: "):
        _train(missing, tmp_path / "c", 2, init_from=str(weights))


def test_a_gpt2_keeps_its_context(text, tmp_path):
    """Another ``--seq-len``, and so number of learned positions, is refused before the data is read."""
    how = {"model": {"model_type": "gpt2", "hidden_size": 16, "num_attention_heads": 2}}
    _train(text, tmp_path, steps=1, **how)
    with pytest.raises(CheckpointError, match="of this run, max_position_embeddings 16, got 32"):
        _train(tmp_path / "missing.txt", tmp_path, steps=2, seq_len=16, resume="auto", **how)
    how["model"]["max_position_embeddings"] = 32
    _train(text, tmp_path, steps=2, seq_len=16, resume="auto", **how)


def test_a_run_resumes_in_a_moved_folder(text, tmp_path):
    """With the printed command and the new path in it.  A copy of config.json alone is no run."""
    _train(text, tmp_path / "a", steps=2)
    (tmp_path / "a").rename(tmp_path / "b")
    config = parse(["--config", str(tmp_path / "b/config.json"), "--resume", "auto", "--steps", "3"])
    assert [row["step"] for row in run(config, 2)] == [1, 2, 3]
    assert not (tmp_path / "a").exists()
    shutil.copy(tmp_path / "b/config.json", tmp_path / "again.json")
    assert parse(["--config", str(tmp_path / "again.json")]).out == tmp_path / "b"


def test_relative_paths_are_those_of_the_folder_where_the_run_began(text, tmp_path, monkeypatch):
    """Also those of several sources and of --eval-data.  The run is resumed in a folder that has another file of that
    name.  A run may be moved with its data."""
    for name in ("home", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "words.txt").write_text(text.read_text() if name == "home" else "other words " * 999)
    monkeypatch.chdir(tmp_path / "home")
    _train(Path("words.txt"), Path("run"), steps=2, **CONSTANT)
    file = ["--config", str(tmp_path / "home/run/config.json")]
    assert parse(file).data == "words.txt", "typed where it was"
    monkeypatch.chdir(tmp_path / "other")
    config = parse([*file, "--resume", "auto"])
    assert config.data == str(tmp_path / "home/words.txt") and parse([*file, "--data", "words.txt"]).data == "words.txt"
    several = json.loads(Path(file[1]).read_text())
    several["config"] |= {"data": ["words.txt:.5", "stdlib:1"], "eval_data": ["words=words.txt", "other=stdlib"]}
    (tmp_path / "several.json").write_text(json.dumps(several))
    config = parse(["--config", str(tmp_path / "several.json")])
    assert config.data == (f"{tmp_path}/home/words.txt:.5", "stdlib:1")
    assert config.eval_data == (f"words={tmp_path}/home/words.txt", "other=stdlib")
    (tmp_path / "home").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert parse(["--config", "run/config.json"]).data == "words.txt"


def test_where_a_run_began_is_no_setting_of_others(text, tmp_path):
    """A run that began with --init-from resumes from a path.  Runs that read its config.json ignore that path."""
    _train(text, tmp_path / "a", steps=2, **CONSTANT)
    whole = _train(text, tmp_path / "b", steps=4, init_from=str(tmp_path / "a/checkpoints/step-2"), **CONSTANT)
    file = ["--config", str(tmp_path / "b/config.json")]
    config = parse([*file, "--resume", str(tmp_path / "b/checkpoints/step-2")])
    assert [row["loss"] for row in run(config)] == [row["loss"] for row in whole]
    assert parse(file).resume is None


def test_a_run_resumes_after_its_initial_weights_were_deleted(text, tmp_path):
    """Its config.json has the model's shape, and its checkpoint has the tokenizer.  A new run needs the folder."""
    start, out, settings = tmp_path / "a/checkpoints/step-1", tmp_path / "b", {**CONSTANT, "tokenizer": "auto"}
    _train(text, tmp_path / "a", steps=1, **{**CONSTANT, "tokenizer": letters(tmp_path, text.read_text())})
    _train(text, out, steps=2, init_from=str(start), **settings)
    shutil.rmtree(tmp_path / "a")
    command = ["--config", str(out / "config.json"), "--steps", "3", "--resume"]
    run(parse([*command, "auto"]), 2)
    assert checkpoint.find(out).step == 3
    shutil.rmtree(out / "checkpoints")
    anew = parse([*command, "auto", "--out", str(tmp_path / "c")])
    with pytest.raises(CheckpointError, match=f"{start}: expected model.safetensors, got no such folder"):
        run(anew)
    with pytest.raises(ConfigError, match=f"--init-from: {start}/config.json: .* no such folder"):
        parse(["--init-from", str(start), "--resume", "auto"])


def test_what_a_killed_run_left_of_a_checkpoint_is_removed(text, tmp_path):
    """By the next run that goes on in the folder; one that is writing there keeps the others out."""
    _train(text, tmp_path, steps=1)
    left = tmp_path / "checkpoints" / ".saving-123"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    with open(tmp_path / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="a run is writing to"):
            _train(text, tmp_path, steps=1, resume="auto")
        assert left.exists()
    _train(text, tmp_path, steps=1, resume="auto")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def _pasted(said: str, what: str) -> str:
    """The command of the line that begins with ``what``; its Python need not import kos anew."""
    (line,) = (line for line in said.splitlines() if line.startswith(what))
    return line.removeprefix(what).strip().replace(sys.executable, shlex.join(python()))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=[needs_mpirun, pytest.mark.slow])])
def test_the_commands_that_it_prints_work(text, tmp_path, ranks):
    """From where they were printed, without any setting typed again."""
    command = _command(
        "--data", os.path.relpath(text, tmp_path), "--steps", "6", "--warmup-steps", "2", "--lr", "2e-3", "--seed", "7",
        "--sample-tokens", "20", "--temperature", "0.5", "--top-k", "3", "--prompt=-ring", ranks=ranks,
    )  # fmt: skip
    done = run_program(*command, env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    more = run_program("sh", "-c", _pasted(done.stdout, "more steps:"), env=ENVIRONMENT, cwd=tmp_path)
    assert (more.returncode, more.stderr) == (0, ""), more.stderr
    assert f"{ranks} rank" in more.stdout and "step 12/12" in more.stdout
    rows = read_metrics(tmp_path / "runs/tiny/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13)) and rows[6]["lr"] == pytest.approx(rows[5]["lr"], 1e-5)
    sample = run_program("sh", "-c", _pasted(more.stdout, "more text:"), env=ENVIRONMENT, cwd=tmp_path)
    assert sample.stdout.startswith("-ring"), sample.stderr
    assert "--top-k=3" in more.stdout and "--temperature=0.5" in more.stdout
