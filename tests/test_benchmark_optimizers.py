"""``benchmarks.optimizers``: what it prints and writes, on a CPU."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from benchmarks import optimizers

FLAGS = shlex.split("""
--seq-len 16 --batch-size 4 --hidden-size 16 --intermediate-size 24 --num-hidden-layers 2 --num-attention-heads 2
--num-key-value-heads 2 --device cpu --repeats 2
""")


def test_shares_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimizers.main([*FLAGS, "--json", str(tmp_path / "rows.json")])
    shown = capsys.readouterr().out
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["optimizer"] for row in rows] == ["adamw", "muon"]
    for row in rows:
        assert 0 < row["update_ms"] < row["step_ms"] and row["share"] == row["update_ms"] / row["step_ms"]
        assert row["optimizer"] in shown and f"{row['share']:.1%}" in shown
    assert rows[0]["state_bytes"] > rows[1]["state_bytes"] > rows[0]["state_bytes"] / 2
