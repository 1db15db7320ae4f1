"""Sizes at which collectives of another library are faster, and how many times as long kos takes."""

from __future__ import annotations

from benchmarks.plots import measured
from benchmarks.plots.measured import Series
from benchmarks.plots.results import select, table
from kos.bench.report import size

FROM = 1.02
"""The smallest ratio of times that is listed: smaller ones may be noise."""


def gpus() -> str:
    rows = []
    for ranks in (2, 4, 8):
        for op in ("all_reduce", *measured.others(ranks)):
            for mode, words in (("graph", "in a graph"), ("eager", "eager")):
                ours, window, nccl, theirs = (measured.on_gpus(ranks, name, op, mode) for name in measured.COMPARED)
                found = [spans(fastest(ours, window), fastest(nccl, theirs)), spans(ours, nccl)]
                if any(found):
                    rows.append([str(ranks), op, words, *found])
    return table(["H200", "operation", "calls", "faster buffers of each", "ordinary buffers"], rows)


def hosts() -> str:
    """Calls back to back beside Open MPI.  all_reduce and broadcast are in place, the others out of place."""
    rows = []
    for machine, title in (("xeon", "Xeon"), ("epyc", "EPYC")):
        for ranks in (2, 4):
            kos, mpi = (measured.all_reduce_host(machine, ranks, name) for name in ("kos", "Open MPI"))
            rows.append([f"{ranks} on {title}", "all_reduce", spans(kos, mpi)])
    file = "collectives-others-epyc-2"
    for op in dict.fromkeys(row["op"] for row in select(file)):
        wanted = {"op": op, "mode": "eager", "call": "function", "in_place": op == "broadcast"}
        kos, mpi = (
            {row["bytes"]: row["time_us"] for row in select(file, **wanted, backend=name)}
            for name in ("mpi", "mpi-native")
        )
        rows.append(["2 on EPYC", op, spans(kos, mpi)])
    return table(["ranks", "operation", "times as long as Open MPI"], [row for row in rows if row[-1]])


def fastest(*lines: Series) -> Series:
    """By size the shortest time."""
    sizes = sorted({nbytes for line in lines for nbytes in line})
    return {nbytes: min(line[nbytes] for line in lines if nbytes in line) for nbytes in sizes}


def spans(kos: Series, peer: Series) -> str:
    """Ranges of sizes at which kos takes longer, and how many times as long."""
    found: list[list[tuple[int, float]]] = [[]]
    for nbytes in sorted(set(kos) & set(peer)):
        ratio = kos[nbytes] / peer[nbytes]
        if ratio >= FROM:
            found[-1].append((nbytes, ratio))
        elif found[-1]:
            found.append([])
    return "; ".join(
        f"{_range(size(span[0][0]), size(span[-1][0]))}: "
        + _range(*(f"{pick(ratio for _, ratio in span):.2f}" for pick in (min, max)))
        for span in found
        if span
    )


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"
