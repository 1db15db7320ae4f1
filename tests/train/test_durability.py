"""What a power cut finds: every byte is synced before the rename that shows it, the rename itself after.

A killed process cannot show a missing fsync, for the kernel writes what it was given. So the calls are
recorded: each fsync keeps what it made durable, and each rename is compared with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kos.train import checkpoint
from kos.train.checkpoint.saving import write_json
from kos.train.parallel.mesh import Layout
from kos.train.tools.metrics import MetricsLog, read_metrics
from tests.train.sharded import save_in, whole_state
from tests.train.test_checkpoint import MODEL


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


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    fsync = os.fsync

    def logged_fsync(handle: Any) -> None:
        fsync(handle)
        disk.synced(handle if isinstance(handle, int) else handle.fileno())

    def logged(move: Any) -> Any:
        return lambda *paths, **folders: (disk.about_to_rename(*paths), move(*paths, **folders))[1]

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged(os.rename))
    monkeypatch.setattr(os, "replace", logged(os.replace))
    yield disk
    monkeypatch.undo()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("there", ["nothing", "a whole one", "a damaged one"])
def test_a_checkpoint_is_on_disk_before_it_shows(tmp_path: Path, disk: Disk, there: str, ranks: int) -> None:
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


def test_a_file_is_on_disk_before_it_shows(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "config.json"
    for value in range(2):
        write_json(path, {"value": value})
        assert disk.too_early == []
        assert disk.is_durable(path) and disk.durable[tmp_path.stat().st_ino]["config.json"] == path.stat().st_ino
    assert disk.renamed == ["config.json"] * 2


def test_cut_metrics_are_on_disk_before_they_show(tmp_path: Path, disk: Disk) -> None:
    """The rows kept on resume are not lost to the cut."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    MetricsLog(path, after_step=2).close()
    assert disk.renamed == ["metrics.jsonl"] and disk.too_early == []
    assert disk.is_durable(path) and disk.durable[tmp_path.stat().st_ino]["metrics.jsonl"] == path.stat().st_ino
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
