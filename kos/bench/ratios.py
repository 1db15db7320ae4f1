"""Times of kos divided by those of Open MPI, from the rows of ``--arrays``."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log
from typing import Any

from kos.bench.report import size

Row = dict[str, Any]

COLUMNS = (
    "same array", "arrays in rotation", "async + wait / call", "single shot", "p99", "noise", "C loop",
)  # fmt: skip
"""Ratios of times to Open MPI's on the same arrays, through mpi4py, but two: ``async + wait`` is to the call of kos,
and ``noise`` is that of Open MPI to itself.  ``C loop``: Open MPI called from C."""


def ratios(rows: Iterable[Row]) -> list[tuple[str, int, list[float | None]]]:
    """Operation, bytes, and the columns; None where a row is missing."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["arrays"]:
            found[row["op"], row["bytes"], row["arrays"], row["mode"], row["backend"], row["call"]] = row
    cells = list(dict.fromkeys(key[:2] for key in found))
    few, many = (of(key[2] for key in found) for of in (min, max)) if found else (1, 1)

    def ratio(cell: Any, ours: Any, theirs: Any, arrays: int = few, mode: str = "eager", value: str = "time_us") -> Any:
        both = [found.get((*cell, arrays, mode, *key)) for key in (ours, theirs)]
        return None if None in both else both[0][value] / both[1][value]  # type: ignore[index]

    kos, mpi = ("mpi", "function"), ("mpi-native", "function")
    return [
        (*cell, [
            ratio(cell, kos, mpi), ratio(cell, kos, mpi, many) if many > few else None,
            ratio(cell, ("mpi", "async"), kos),
            ratio(cell, kos, mpi, mode="single_shot"), ratio(cell, kos, mpi, mode="single_shot", value="p99_us"),
            ratio(cell, ("mpi-again", "function"), mpi), ratio(cell, ("mpi-c", "function"), mpi),
        ])
        for cell in cells
    ]  # fmt: skip


def lines(rows: list[Row]) -> list[str]:
    """A table, and the geometric mean of each operation but all_reduce on the same array."""
    found = ratios(rows)
    if not found:
        return []
    widths = [max(len(name), 6) for name in COLUMNS]
    heading = "  ".join(name.rjust(width) for name, width in zip(COLUMNS, widths, strict=True))
    text = [f"# time of kos / Open MPI\n{'':<18} {'size':>7}  {heading}"]
    for op, nbytes, values in found:
        cells = ("" if value is None else f"{value:.2f}" for value in values)
        row = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        text.append(f"{op:<18} {size(nbytes):>7}  {row}")
    others = [values[0] for op, _, values in found if op != "all_reduce" and values[0]]
    if others:
        mean = exp(sum(map(log, others)) / len(others))
        text.append(f"# geometric mean of all but all_reduce, same array: {mean:.2f}")
    return text
