"""What a run decides by looking at the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kos.testing import spawn
from kos.train import blas
from kos.train.machine import limit_threads

ZEN5 = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f avx512dq avx512bw avx512vl avx512cd\n"


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        (ZEN5, "SkylakeX"),
        (ZEN5.replace("AuthenticAMD", "GenuineIntel"), None),
        (ZEN5.replace("avx512vl ", ""), None),
        (None, None),
    ],
)
def test_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, chosen: str | None) -> None:
    monkeypatch.delenv(blas.VARIABLE, raising=False)
    monkeypatch.setattr(blas.platform, "machine", lambda: "x86_64")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    blas.choose_kernels(tmp_path / "cpuinfo")
    assert blas.os.environ.get(blas.VARIABLE) == chosen


def test_the_users_choice_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(ZEN5)
    monkeypatch.setenv(blas.VARIABLE, "Haswell")
    blas.choose_kernels(tmp_path / "cpuinfo")
    assert blas.os.environ[blas.VARIABLE] == "Haswell"


def test_numpy_is_not_loaded_before_the_choice() -> None:
    code = "import sys, kos.train.blas; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("kos.train.machine.threadpool_limits", lambda threads: None)
    assert spawn(limit_threads, 1) == [8]
    assert spawn(limit_threads, 3) == [2, 2, 2]
    assert spawn(limit_threads, 16) == [1] * 16
    assert spawn(lambda comm: limit_threads(comm, 1), 2) == [1, 1]
