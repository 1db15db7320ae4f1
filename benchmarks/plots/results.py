"""The recorded results, and how their figures are written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30
PEAK_TFLOPS = 989.5
"""Dense bfloat16 of an H200's data sheet."""


@cache
def load(name: str) -> Row:
    """The JSON object of ``benchmarks/results/NAME.json``."""
    result: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return result


@cache
def result_files(subject: str, ranks: int) -> list[str]:
    """Names of a subject's files on ``ranks`` GPUs, newest first; LookupError if there are none."""
    named = re.compile(rf"{subject}-[a-z]+\d+-{ranks}\.json")
    found = [path.stem for path in RESULTS.iterdir() if named.fullmatch(path.name)]
    if not found:
        raise LookupError(f"benchmarks/results: expected a file {subject}-GPU-{ranks}.json")
    return sorted(found, key=lambda name: str(load(name)["date"]), reverse=True)


def exists(name: str) -> bool:
    """Whether there is a file of results of this name."""
    return (RESULTS / f"{name}.json").exists()


def newest(subject: str, ranks: int) -> str:
    """The newest of ``result_files``."""
    return result_files(subject, ranks)[0]


def gpus(name: str) -> str:
    """On what a file was measured: 2 H100."""
    words: list[str] = load(name)["hardware"].split()  # 2 x NVIDIA H100 80GB HBM3
    return f"{words[0]} {words[3]}"


def select(name: str, **wanted: Any) -> list[Row]:
    """The rows of a file that have these values."""
    return [row for row in load(name)["rows"] if all(row.get(key) == value for key, value in wanted.items())]


def one(name: str, **wanted: Any) -> Row:
    """The only row with these values; LookupError where there is none or more than one."""
    rows = select(name, **wanted)
    if len(rows) != 1:
        raise LookupError(f"{name}.json: expected one row with {wanted}, got {len(rows)}")
    return rows[0]


def us(value: float) -> str:
    """A time with three digits or more: 3.24, 24.9, 412, 5,353."""
    if value < 99.95:
        return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    return f"{value:.2f}"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heading, *rows]
    if wrong := next((line for line in lines if len(line) != len(heading)), None):
        raise ValueError(f"expected {len(heading)} columns, got {wrong}")
    top, *others = (f"| {' | '.join(line)} |\n" for line in lines)
    return "".join([top, "|---" * len(heading) + "|\n", *others])
