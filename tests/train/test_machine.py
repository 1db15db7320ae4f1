"""What a run decides by looking at the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from kos.testing import spawn
from kos.train.engine.machine import git_commit, limit_threads


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("kos.train.engine.machine.thread_pools", MagicMock())
    assert spawn(limit_threads, 1) == [8]
    assert spawn(limit_threads, 3) == [2, 2, 2]
    assert spawn(limit_threads, 16) == [1] * 16
    assert spawn(lambda comm: limit_threads(comm, 1), 2) == [1, 1]


def test_the_commit_says_where_files_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are only newer do not, and the index is the user's."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    file, index = tmp_path / "kos" / "train" / "engine" / "machine.py", tmp_path / ".git" / "index"
    monkeypatch.setattr("kos.train.engine.machine.__file__", str(file))

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(("git", *who, *words), cwd=tmp_path, capture_output=True, check=True, text=True).stdout

    assert git_commit() is None
    git("init")
    assert git_commit() is None
    file.parent.mkdir(parents=True)
    file.write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    os.utime(file, (1e9, 1e9))
    before = index.stat().st_mtime_ns, index.read_bytes()
    (tmp_path / "new.txt").write_text("not git's")
    assert git_commit() == commit
    assert (index.stat().st_mtime_ns, index.read_bytes()) == before
    file.write_text("2")
    assert git_commit() == f"{commit}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None
