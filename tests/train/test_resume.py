"""Going on from a checkpoint: where it may be written, with which tokenizer, and as which command."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import pytest

from kos.comm.communicator import Communicator
from kos.errors import ConfigError
from kos.testing import spawn
from kos.train.checkpoint import checkpoint
from kos.train.run import Trainer
from kos.train.tools.metrics import read_metrics
from tests.train.test_loop import _config, _train, text

__all__ = ["text"]

CONSTANT: dict[str, Any] = {"schedule": "constant", "save_every": 2, "keep": 9}


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("left", ["checkpoints", "metrics"])
def test_another_runs_folder_is_left_alone(text: Path, tmp_path: Path, left: str) -> None:
    _train(text, tmp_path / "a", steps=2, **CONSTANT)
    _train(text, tmp_path / "b", steps=6, seed=5, **CONSTANT)
    if left == "metrics":
        (tmp_path / "b" / "checkpoints").rename(tmp_path / "elsewhere")
    before = _files(tmp_path / "b")
    with pytest.raises(ConfigError, match=f"--out {tmp_path}/b: expected .* of another run"):
        _train(text, tmp_path / "b", 2, steps=4, resume=str(tmp_path / "a"), **CONSTANT)
    assert _files(tmp_path / "b") == before


def test_a_checkpoint_of_this_folder_by_another_path(text: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Relative here and absolute there: it is the same run, and goes on."""
    _train(text, tmp_path / "run", steps=2, **CONSTANT)
    monkeypatch.chdir(tmp_path)
    rows = _train(text, tmp_path / "run", steps=4, resume="run", **CONSTANT)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_metrics_that_cannot_be_written_do_not_end_a_run(text: Path, tmp_path: Path, caplog: Any) -> None:
    """It says so once, goes on and saves; rows are written as soon as they can be."""
    config = _config(text, tmp_path, steps=6, save_every=4)

    def run(comm: Communicator) -> None:
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
