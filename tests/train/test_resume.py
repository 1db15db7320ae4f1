"""Going on from a checkpoint: where it may be written, with which tokenizer, and as which command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kos.errors import ConfigError
from tests.train.test_loop import _train, text

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
