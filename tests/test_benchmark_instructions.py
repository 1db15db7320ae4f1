"""Instructions of calls that the core knows: none takes 5% more than benchmarks/results/instructions.json has."""

from __future__ import annotations

import json

import pytest

from benchmarks import instructions
from benchmarks.plots.results import load
from kos.train.device.machine import versions_of
from tests.core.core_ranks import needs_core

MOST = 1.05


@needs_core
@pytest.mark.skipif(instructions.unavailable() is not None, reason=str(instructions.unavailable()))
def test_no_call_takes_more_instructions() -> None:
    recorded = load("instructions")
    if (here := instructions.toolchain()) != recorded["toolchain"]:
        pytest.skip(f"counted with {recorded['toolchain']}, here are {here}")
    counts = recorded["versions"]["torch"] == versions_of(["torch"]).get("torch")  # whose version changes the counts
    known = {(row["op"], row["bytes"]): row for row in recorded["rows"] if counts or not row["op"].endswith("torch")}
    rows = [row for row in instructions.count() if counts or not row["op"].endswith("torch")]
    assert {(row["op"], row["bytes"]) for row in rows} == set(known)
    for row in rows:
        for what in ("core", "all"):
            most = known[row["op"], row["bytes"]][what]
            assert row[what] <= most * MOST, (
                f"{row['op']} of {row['bytes']} bytes: expected at most {MOST} x {most} instructions ({what}), got "
                f"{row[what]}; python -m benchmarks.instructions --json benchmarks/results/instructions.json"
            )


def test_every_operation_is_counted() -> None:
    counted = {row["op"] for row in load("instructions")["rows"]}
    assert counted == set(instructions.OPERATIONS)


def test_costs_of_callees_count_once() -> None:
    text = """events: Ir
ob=(1) /lib/native.abi3.so
fn=(1) call
0 10
cob=(2) /lib/libc.so
cfn=(2) memcpy
calls=3 0
0 60
+0 5
ob=(2)
fn=(2)
0 60
"""
    assert instructions.counted(text) == (15, 75)
    assert json.loads(json.dumps(instructions.toolchain()))["machine"]
