"""Sizes at which collectives of another library are faster, and how many times as long kos takes."""

from __future__ import annotations

from benchmarks.plots import measured, tables_hosts
from benchmarks.plots.results import load, table
from benchmarks.plots.tables_collectives import fastest
from kos.bench.report import size

FROM = 1.02
"""The smallest ratio of times that is listed: smaller ones may be noise."""
NEAR = 1.05
"""Below this ratio of times, large calls of both libraries are near the rate of the link."""

GPU_REASONS = {
    "copy": "both copy through the driver, the limit",
    "call": "CPU time of a call. Limit: a kernel launch",
    "rate": "both are near NVLink's rate, the limit",
    "kernel": "NCCL comes nearer to NVLink's rate, the limit",
}
"""Why calls on GPUs are slower than NCCL's."""


def gpus() -> str:
    """The worse of two comparisons: of ordinary buffers, and of the faster kind of buffers of each library."""
    rows = []
    for ranks in (1, 2, 4, 8):
        found: dict[str, list[tuple[str, int, float]]] = {}
        modes: dict[str, dict[str, None]] = {}
        for op in ("all_reduce", *measured.others(ranks)):
            for mode in ("graph", "eager"):
                lines = {name: measured.on_gpus(ranks, name, op, mode) for name in measured.COMPARED}
                pairs = (
                    (fastest(lines, "kos"), fastest(lines, "NCCL")),
                    (lines["kos, any buffers"], lines["NCCL"]),
                )
                for nbytes in sorted(set(pairs[0][0]) & set(pairs[0][1])):
                    slowest = max(kos[nbytes] / peer[nbytes] for kos, peer in pairs if nbytes in kos and nbytes in peer)
                    if slowest >= FROM:
                        by_cpu = nbytes <= 1 << 20 and mode == "eager"
                        why = "call" if by_cpu else "rate" if slowest < NEAR else "kernel"
                        why = "copy" if ranks == 1 else why
                        found.setdefault(why, []).append((op, nbytes, slowest))
                        modes.setdefault(why, {})[mode] = None
        rows += [
            [measured.on(ranks), ", ".join(modes[why]), *summary(cells), GPU_REASONS[why]]
            for why, cells in found.items()
        ]
    return table(["GPUs", "calls", "operations", "sizes", "times as long as NCCL", "reason and limit"], rows)


REASONS = {
    "counts": "kos compares the counts",
    "waits": "kos compares and records each call; in Open MPI a rank that only sends does not wait. "
    "Limit: a flag's way to another rank and back, {round_trip:.2f} µs",
    "slots": "reductions copy through slots; Open MPI's messages are in one copy, and its exscan of 2 ranks is one "
    "message. Limit: memory",
    "copies": "Open MPI copies once; kos too, or twice within the caches. Limit: memory",
}
"""Why calls on a host are slower than Open MPI's, by kind of call."""
REDUCE = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v", "scan", "exscan")
SMALL = 16 << 10
"""Up to so many bytes the cost of a call decides."""


def kind(op: str, nbytes: int) -> str:
    """The key of ``REASONS``."""
    if nbytes <= SMALL:
        return "counts" if op.endswith("_v") else "waits"
    return "slots" if op in REDUCE else "copies"


def hosts(recorded: dict[int, tables_hosts.Ratios] | None = None) -> str:
    """Calls back to back that take longer than Open MPI's, by more than two measurements of Open MPI differ.

    ``recorded``: the calls by the number of ranks, default those of the files.
    """
    if recorded is None:
        recorded = {ranks: tables_hosts.recorded(ranks) for ranks in measured.HOST_RANKS}
    found: dict[tuple[int, str], list[tuple[str, int, float]]] = {}
    for ranks, calls in recorded.items():
        for op, nbytes, values in calls:
            noise = values["noise"] or 1.0
            slowest = max(values[column] or 0.0 for column in ("same array", "arrays in rotation"))
            if slowest >= max(FROM, noise, 1 / noise):
                why = kind(op, nbytes)
                found.setdefault((ranks, why), []).append((op, nbytes, slowest))
    rows = []
    for (ranks, why), cells in found.items():
        round_trip = load(f"host-calls-{ranks}")["limits"]["flag_round_trip_us"]
        rows.append([str(ranks), *summary(cells), REASONS[why].format(round_trip=round_trip)])
    return table(["ranks", "operations", "sizes", "times as long as Open MPI", "reason and limit"], rows)


def summary(cells: list[tuple[str, int, float]]) -> list[str]:
    """Of operations, sizes and ratios: the operations, the range of sizes, the range of ratios."""
    ops, sizes, ratios = zip(*cells, strict=True)
    return [
        ", ".join(dict.fromkeys(ops)), _range(size(min(sizes)), size(max(sizes))),
        _range(f"{min(ratios):.2f}", f"{max(ratios):.2f}"),
    ]  # fmt: skip


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"
