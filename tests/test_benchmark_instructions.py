"""Instructions of calls that the core knows: none takes 5% more than benchmarks/results/instructions.json has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import instructions
from benchmarks.plots.results import load
from kos.train.machine import versions_of
from tests.core.core_ranks import needs_core

MOST = 1.05


@needs_core
@pytest.mark.skipif(instructions.unavailable() is not None, reason=str(instructions.unavailable()))
def test_no_call_takes_more_instructions() -> None:
    recorded = load("instructions")
    if (here := instructions.toolchain()) != recorded["toolchain"]:
        pytest.skip(f"counted with {recorded['toolchain']}, here are {here}")
    counts = recorded["versions"]["torch"] == versions_of(["torch"]).get("torch")  # whose version changes the counts
    known = {case(row): row for row in recorded["rows"] if counts or not row["op"].endswith("torch")}
    rows = [row for row in instructions.count() if counts or not row["op"].endswith("torch")]
    assert {case(row) for row in rows} == set(known)
    for row in rows:
        for what in ("core", "python"):  # the C library's depend on the CPU
            most = known[case(row)][what]
            assert row[what] <= most * MOST, (
                f"{row['op']} of {row['bytes']} bytes ({row['cpu']}): expected at most {MOST} x {most} instructions, "
                f"got {row[what]} ({what}); python -m benchmarks.instructions --json FILE"
            )


def case(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["op"], row["bytes"], row["cpu"]


def test_every_operation_is_counted() -> None:
    """With the settings of the core for each vendor of CPUs."""
    counted = {(row["op"], row["cpu"]) for row in load("instructions")["rows"]}
    assert {op for op, _ in counted} == set(instructions.OPERATIONS)
    assert {("broadcast", "intel"), ("broadcast", "other")} <= counted


def test_costs_of_callees_count_once() -> None:
    text = """events: Ir
ob=(1) /lib/native.abi3.so
fn=(1) call
0 10
cob=(2) /lib/libc.so.6
cfn=(2) memcpy
calls=3 0
0 60
+0 5
ob=(2)
fn=(2)
0 60
"""
    assert instructions.counted(text) == {"core": 15, "python": 0, "libc": 60}
    assert json.loads(json.dumps(instructions.toolchain()))["machine"]
