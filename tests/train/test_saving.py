"""Saving by all ranks: beside the steps that follow, after failures, kills and power cuts, in folders not all see."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.errors import CheckpointError, TrainingError
from kos.files import replace_file
from kos.testing import spawn
from kos.train import checkpoint
from kos.train.checkpoint import saving
from kos.train.device.cpu import CpuDevice
from kos.train.parallel.mesh import Layout
from kos.train.tools import MetricsLog, read_metrics
from kos.train.trainer import Trainer
from tests.forked import python
from tests.launcher import MPIRUN, needs_mpirun, run_program
from tests.train.commands import ENVIRONMENT
from tests.train.runs import _config, _train
from tests.train.sharded import save_in, tensors_of_run, whole_state
from tests.train.test_checkpoint import MODEL

SHORT: dict[str, Any] = {"steps": 6, "eval_batches": 0, "sample_tokens": 0, "save_every": 2, "keep": 9}


@pytest.mark.parametrize(("ranks", "zero"), [(1, 0), (2, 1)])
def test_the_checkpoints_are_the_same(text, tmp_path, ranks, zero):
    for name, beside in (("at once", False), ("beside", True)):
        _train(text, tmp_path / name, ranks, save_async=beside, zero=zero, **SHORT)
    for step in (2, 4, 6):
        folders = [tmp_path / name / "checkpoints" / f"step-{step}" for name in ("at once", "beside")]
        files = [sorted(path.name for path in folder.iterdir()) for folder in folders]
        assert files[0] == files[1] and tensors_of_run(folders[0]) == tensors_of_run(folders[1])


def test_steps_go_on_while_files_are_written(text, tmp_path, before_call):
    """No file of step 2 is written before step 4 begins; the save of step 4 waits for them."""
    begun = threading.Event()

    def late(*_):
        assert begun.wait(60), "the steps waited for the files"

    before_call(CpuDevice, "start_step", lambda device, step, stop: step == 3 and begun.set())
    before_call(saving, "write_tensors", late)
    _train(text, tmp_path, 2, save_async=True, **SHORT)
    steps = [checkpoint.verify(path).step for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(steps) == [2, 4, 6]


@pytest.mark.parametrize(("beside", "failing"), [(False, 4), (True, 6)])
def test_a_file_that_cannot_be_written_is_an_error_on_all(text, tmp_path, failing, beside, before_call):
    """At the next save or at the end. The checkpoints before are good, and the error says so."""
    written, errors = [], []

    def full(path, *_):
        written.append(path.name)
        if written.count(path.name) == failing // 2 and path.name == "optimizer-00002-of-00002.safetensors":
            raise OSError(28, "No space left on device", str(path))

    before_call(saving, "write_tensors", full)
    config = _config(text, tmp_path, **SHORT, save_async=beside)

    def run(comm):
        with pytest.raises(CheckpointError) as caught:
            Trainer(config, comm).run()
        errors.append(str(caught.value))

    spawn(run, 2, timeout=100)
    assert len(errors) == 2 and len(set(errors)) == 1
    at = min(failing + 2 * beside, 6)
    assert f"after step {at}: " in errors[0] and "No space left" in errors[0]
    assert f"step-{failing}: expected to write a checkpoint on rank 1, got " in errors[0]
    assert f"the last checkpoint, of step {failing - 2}, is good" in errors[0]
    assert checkpoint.find(tmp_path).step == failing - 2
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {f"step-{n}" for n in range(2, failing, 2)}


def test_an_error_of_all_waits_for_the_checkpoint_before(text, tmp_path, before_call):
    """The weights break while those of the step before are on their way to the disk."""
    broken = threading.Event()

    def poisoned(device, step, stop):
        if step == 3:
            device.step.weights.flat[0] = np.nan
            broken.set()

    def late(*_):
        assert broken.wait(60)

    before_call(CpuDevice, "start_step", poisoned)
    before_call(saving, "write_tensors", late)
    with pytest.raises(TrainingError, match="step 4: expected a finite loss, .*; the checkpoints before it are of"):
        _train(text, tmp_path, 2, save_async=True, **{**SHORT, "save_every": 3})
    assert checkpoint.find(tmp_path).step == 3


CODE = """if True:
    import os, sys
    from kos.launcher import launched_rank
    from kos.train.__main__ import main
    if launched_rank() == 1:
        os.chdir(os.environ.get("RANK_1", "."))
    sys.exit(main())
"""
FLAGS = [
    "--hidden-size=32", "--num-hidden-layers=2", "--num-attention-heads=4", "--num-key-value-heads=2", "--seq-len=32",
    "--intermediate-size=48", "--batch-size=4", "--eval-batches=0", "--sample-tokens=0", "--device=cpu",
]  # fmt: skip


def test_a_checkpoint_is_hidden_before_it_is_deleted(text, tmp_path, before_call):
    """A kill during the deletion leaves no damaged one."""
    gone = list[Path]()
    before_call(shutil, "rmtree", lambda path, **_: gone.append(Path(path)))
    _train(text, tmp_path, **{**SHORT, "keep": 1})
    names = [path.name for path in gone if path.parent == tmp_path / "checkpoints"]
    assert names and all(name.startswith(".") for name in names)


@needs_mpirun
def test_a_folder_that_a_rank_does_not_see(text, tmp_path):
    """Where it writes and where it begins: named with the rank."""
    (tmp_path / "elsewhere").mkdir()
    environment = {**ENVIRONMENT, "RANK_1": str(tmp_path / "elsewhere")}
    command = [MPIRUN, "-n", "2", *python(), "-c", CODE, *FLAGS, "--data", str(text), "--steps=1"]
    done = run_program(*command, "--out=run", env=environment, cwd=tmp_path)
    error = "--out run: expected a folder that all ranks share: each writes its part of a checkpoint; on rank 1 got"
    assert f"kos: error: {error} [Errno 2]" in done.stderr and done.returncode == 2, done.stderr
    assert done.stderr.count("kos: error") == 1
    _train(text, tmp_path / "first", steps=1, eval_batches=0, sample_tokens=0)
    source = checkpoint.find(tmp_path / "first").path.relative_to(tmp_path)
    done = run_program(*command, f"--resume={source}", "--out=second", env=environment, cwd=tmp_path)
    assert f"{source}: expected a folder that all ranks see, got none on rank 1" in done.stderr, done.stderr
    assert done.returncode == 1 and done.stderr.count("kos: error") == 1


def test_a_folder_that_is_renamed_once_its_file_is_seen(tmp_path, monkeypatch):
    """As rank 0 renames that of a checkpoint, while another rank still writes its last file to the disk."""
    folder, replace = tmp_path / "folder", os.replace
    folder.mkdir()

    def seen(source, target):
        replace(source, target)
        folder.rename(tmp_path / "complete")

    monkeypatch.setattr(os, "replace", seen)
    replace_file(folder / "file", b"content")
    assert (tmp_path / "complete" / "file").read_bytes() == b"content"


def _content(path: Path | str) -> Any:
    """What an fsync of ``path`` keeps: a file's bytes; of a folder its names and the files behind them."""
    if not os.path.isdir(path):
        return Path(path).read_bytes()
    return {entry.name: entry.inode() for entry in os.scandir(path)}


class Disk:
    """What has reached the disk so far, by inode, and what was renamed to where before it had."""

    def __init__(self) -> None:
        self.durable: dict[int, Any] = {}
        self.renamed: list[str] = []
        self.too_early: list[str] = []

    def is_durable(self, path: Path | str) -> bool:
        return self.durable.get(os.stat(path).st_ino) == _content(path)

    def synced(self, handle: int) -> None:
        self.durable[os.fstat(handle).st_ino] = _content(f"/proc/self/fd/{handle}")

    def about_to_rename(self, source: Any, target: Any) -> None:
        source, target = Path(source), Path(target)
        self.renamed.append(target.name)
        if target.name.startswith(("replaced-", ".saving-")):  # out of the way: shows nothing
            return
        within = [source, *source.rglob("*")] if source.is_dir() else [source]
        self.too_early += [f"{path.name} of {target.name}" for path in within if not self.is_durable(path)]
        if target.name.startswith("step-"):
            checkpoint.verify(source)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    fsync = os.fsync

    def logged_fsync(handle):
        fsync(handle)
        disk.synced(handle if isinstance(handle, int) else handle.fileno())

    def logged(move):
        return lambda *paths, **folders: (disk.about_to_rename(*paths), move(*paths, **folders))[1]

    for name, call in {"fsync": logged_fsync, "rename": logged(os.rename), "replace": logged(os.replace)}.items():
        monkeypatch.setattr(os, name, call)
    yield disk
    monkeypatch.undo()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("there", ["nothing", "a whole one", "a damaged one"])
def test_a_checkpoint_is_on_disk_before_it_shows(tmp_path, disk, there, ranks):
    folder, whole = tmp_path / "checkpoints", whole_state(MODEL)
    if there != "nothing":
        old = save_in(Layout(dp=ranks), folder, 3, MODEL, whole)
    if there == "a damaged one":
        (old / "manifest.json").unlink()
    disk.renamed.clear()
    path = save_in(Layout(dp=ranks), folder, 3, MODEL, whole)
    assert len(disk.durable) >= 6 and "step-3" in disk.renamed
    assert disk.too_early == []
    assert all(disk.is_durable(file) for file in path.iterdir())
    assert disk.durable[folder.stat().st_ino]["step-3"] == path.stat().st_ino, "the rename was not synced"
    assert checkpoint.verify(path).step == 3


def test_cut_metrics_are_on_disk_before_they_show(tmp_path, disk):
    """The rows kept on resume are not lost to the cut."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    MetricsLog(path, after_step=2).close()
    assert disk.renamed == ["metrics.jsonl"] and disk.too_early == []
    assert disk.is_durable(path) and disk.durable[tmp_path.stat().st_ino]["metrics.jsonl"] == path.stat().st_ino
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
