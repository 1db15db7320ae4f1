"""The tables of calls on a host: their times beside Open MPI's, and their instructions."""

from __future__ import annotations

from benchmarks.plots.results import RESULTS, load, ratio, select, table
from kos.bench.ratios import COLUMNS, ratios
from kos.bench.report import size

RECORDED = {f"hosts-ratios-{ranks}": f"host-calls-{ranks}" for ranks in (2, 4)}
"""Tables by name, and their files, which ``kos bench --arrays`` writes: of 2 and of 4 ranks on 2 cores."""


def recorded() -> dict[str, str]:
    """Those of which there is a file."""
    return {name: file for name, file in RECORDED.items() if (RESULTS / f"{file}.json").exists()}


def host_ratios(file: str) -> str:
    """Every operation and size: time of kos / Open MPI."""
    rows = [
        [op, size(nbytes), *("" if value is None else ratio(value) for value in values)]
        for op, nbytes, values in ratios(load(file)["rows"])
    ]
    return table(["operation", "size", *COLUMNS], rows)


def instructions() -> str:
    """Instructions of a known call: of the core, and with Python's functions and the copies."""
    rows = select("instructions")
    sizes = sorted({row["bytes"] for row in rows})
    lines = []
    for op in dict.fromkeys(row["op"] for row in rows):
        found = {row["bytes"]: row for row in rows if row["op"] == op}
        lines.append([op, *(f"{found[n]['core']:,} / {found[n]['all']:,}" if n in found else "" for n in sizes)])
    return table(["core / all", *map(size, sizes)], lines)
