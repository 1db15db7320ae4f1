"""The tables of calls on a host: their times beside Open MPI's, and their instructions."""

from __future__ import annotations

from math import exp, log

from benchmarks.plots import measured
from benchmarks.plots.results import load, ratio, select, table
from kos.bench.ratios import COLUMNS, ratios
from kos.bench.report import size

COUNTED = ("all_reduce", "all_reduce, async_op", "broadcast", "all_gather", "send", "barrier")
"""Operations in the table of instructions; the file has all."""
Ratios = list[tuple[str, int, dict[str, float | None]]]
"""Operation, bytes, and by column of ``kos.bench.ratios`` the time of kos / Open MPI."""


def recorded(ranks: int) -> Ratios:
    return [
        (op, nbytes, dict(zip(COLUMNS, values, strict=True)))
        for op, nbytes, values in ratios(load(f"host-calls-{ranks}")["rows"])
    ]


def every_operation(ranks: int, columns: tuple[str, ...] = ("same array", "arrays in rotation")) -> str:
    """Operations by size: the ratio in the first column, in brackets that in the second."""
    cells: dict[tuple[str, int], str] = {}
    for op, nbytes, values in recorded(ranks):
        first, *others = (ratio(value) for column in columns if (value := values[column]))
        cells[op, nbytes] = first + "".join(f" ({other})" for other in others)
    sizes = sorted({nbytes for op, nbytes in cells if op != "barrier"})
    operations = dict.fromkeys(op for op, _ in cells if op != "barrier")
    rows = [[op, *(cells.get((op, nbytes), "") for nbytes in sizes)] for op in operations]
    rows += [["barrier", cell, *[""] * (len(sizes) - 1)] for (op, _), cell in cells.items() if op == "barrier"]
    return table(["operation", *map(size, sizes)], rows)


def means() -> str:
    """Of each column the geometric mean over all operations and sizes, and its largest value."""
    rows = []
    for ranks in measured.HOST_RANKS:
        found = recorded(ranks)
        line = [str(ranks)]
        for column in COLUMNS:
            values = [value for *_, each in found if (value := each[column])]
            line.append(f"{ratio(exp(sum(map(log, values)) / len(values)))} ({ratio(max(values))})")
        rows.append(line)
    return table(["ranks", *COLUMNS], rows)


def instructions() -> str:
    """Instructions of a known call in the core: without Python's functions and the C library's."""
    rows = select("instructions")
    columns = sorted({(row["bytes"], row["cpu"]) for row in rows if row["cpu"] != "any"})
    lines = []
    for op in COUNTED:
        found = {(row["bytes"], row["cpu"]): row for row in rows if row["op"] == op}
        lines.append([op, *(f"{found[each]['core']:,}" if each in found else "" for each in columns)])
    large = columns[-1][0]
    names = {"intel": ", Intel's CPUs", "other": ", other CPUs"}
    return table(["operation", *(size(n) + (names[cpu] if n == large else "") for n, cpu in columns)], lines)
