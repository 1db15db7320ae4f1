"""The benchmark between two hosts: its arithmetic, and a run of one size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.between_hosts import crossing
from benchmarks.two_hosts import Impossible, two_hosts
from tests.launcher import MPIRUN, OUTSIDE, SECONDS, needs_mpirun


@pytest.mark.parametrize(
    ("name", "expected"),
    [("all_reduce", 100), ("reduce_scatter", 50), ("all_gather", 200), ("broadcast", 100), ("all_to_all", 100)],
)
def test_bytes_that_leave_a_host(name: str, expected: float) -> None:
    """Two hosts of two ranks with 100 bytes each."""
    assert crossing(name, 100, 2, 2) == expected


@needs_mpirun
@pytest.mark.slow
def test_run(tmp_path: Path) -> None:
    try:
        with two_hosts(tmp_path, "1gbit"):
            pass
    except Impossible as why:
        pytest.skip(str(why))
    if "(Open MPI) 5" not in subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, timeout=60).stdout:
        pytest.skip("needs Open MPI 5")
    command = [sys.executable, "-m", "benchmarks.between_hosts", "--sizes", "64K", "--operations", "all_reduce"]
    root = Path(__file__).resolve().parents[1]
    env = OUTSIDE | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "rows.json")], env=env, cwd=root, capture_output=True, text=True,
        timeout=SECONDS, preexec_fn=os.setsid,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["bytes"] == 1 << 16 and row["limit_us"] == 524.3  # 64 KiB leave a host at 125 MB/s
    assert min(row["kos us"], row["kos fp8 us"] * 3, row["Open MPI us"]) >= row["limit_us"]
