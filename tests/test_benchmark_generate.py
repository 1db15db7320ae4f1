"""``benchmarks.generate``: what it prints and writes, on a CPU."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from benchmarks import generate

FLAGS = """
--seq-len 64 --hidden-size 16 --intermediate-size 24 --num-hidden-layers 2 --num-attention-heads 2
--num-key-value-heads 2 --device cpu --prompt 40 --tokens 6 --batches 1 3 --peers uncached
"""


def test_times_of_prefill_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate.main([*shlex.split(FLAGS), "--json", str(tmp_path / "rows.json")])
    shown = capsys.readouterr().out.splitlines()
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["source"], row["batch"]) for row in rows] == [(x, n) for n in (1, 3) for x in ("kos", "uncached")]
    for row, line in zip(rows, shown[1:], strict=True):
        assert row["prefill_s"] > 0 and row["step_ms"] > 0 and row["bound_ms"] == 0
        assert line.startswith(row["source"]) and f"{row['step_ms']:.3f}" in line
