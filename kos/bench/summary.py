"""The summary of a run: the fastest library by size, and kos compared with each peer, worst rows first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kos.bench.implementations import OURS

Row = dict[str, Any]

MODES = ("graph", "eager", "single_shot")
"""The first of these that was measured is summed up: what a training step pays, if that was measured."""
BUSY = 10
"""The least p99 / median that only a busy machine shows."""
MOST_LINES = 12
"""Of one operation."""
ABOUT = {
    "mock": "threads of one process", "mpi-native": "the MPI library itself", "gloo": "PyTorch's",
    "nccl": "NCCL itself", "nccl-window": "NCCL in symmetric windows", "torch-nccl": "PyTorch's NCCL group",
    "torch-symm": "PyTorch's symmetric memory",
}  # fmt: skip
"""What the name of a backend does not say."""


def summary(rows: list[Row]) -> list[str]:
    """Some lines for each operation.  Rows of one rank, which moves nothing, count only where there are no others."""
    ranks = max(row["ranks"] for row in rows)
    mode = next(mode for mode in MODES if any(row["mode"] == mode for row in rows))
    rows = [row for row in rows if row["ranks"] == ranks and row["mode"] == mode]
    lines = [legend(rows)]
    for op in dict.fromkeys(row["op"] for row in rows):
        title = f"{op} on {ranks} rank{'s' * (ranks > 1)}, {mode}"
        lines += _operation([row for row in rows if row["op"] == op], title)
    return lines


def legend(rows: list[Row]) -> str:
    """Which of the backends are kos', and what the others are."""
    names: dict[bool, list[str]] = {True: [], False: []}
    for row in {row["backend"]: row for row in rows}.values():
        about = f" ({ABOUT[row['backend']]})" if row["backend"] in ABOUT else ""
        names[is_ours(row)].append(row["backend"] + about)
    parts = [f"{of}: {', '.join(names[ours])}" for ours, of in ((True, "kos"), (False, "others")) if names[ours]]
    return f"# {'; '.join(parts)}"


def busy(rows: list[Row]) -> list[str]:
    """A warning if the spread of the times shows that other programs used the cores; else no line."""
    wide = sum(row["p99_us"] > BUSY * row["time_us"] for row in rows)
    return [f"# the machine was busy: p99 over {BUSY} times the median in {wide} of {len(rows)} rows"] if wide else []


def name_of(row: Row) -> str:
    """The backend, with the algorithm and the kind of call if they are not the default."""
    return " ".join([row["backend"], *(each for each in (row["algorithm"], row["call"])
                                       if each not in ("auto", "function"))])  # fmt: skip


def is_ours(row: Row) -> bool:
    return row["backend"] in OURS or row["backend"] == "mock"


def fastest(rows: Iterable[Row]) -> Row:
    return min(rows, key=lambda row: row["time_us"])


class _Line:
    """One size and place."""

    def __init__(self, rows: list[Row]) -> None:
        self.nbytes, self.in_place, self.limit = rows[0]["bytes"], rows[0]["in_place"], rows[0]["limit_us"]
        self.best = fastest(rows)
        self.ours = fastest(ours) if (ours := [row for row in rows if is_ours(row)]) else None
        self.peers: dict[str, float] = {}
        for row in rows:
            if self.ours is not None and not is_ours(row):
                ratio = row["time_us"] / self.ours["time_us"]
                self.peers[row["backend"]] = min(ratio, self.peers.get(row["backend"], ratio))

    @property
    def worst(self) -> float:
        """The least ratio to a peer: below 1 kos is slower."""
        return min(self.peers.values(), default=float("inf"))

    def text(self, peers: list[str]) -> str:
        ours = f"{name_of(self.ours):<20} {self.ours['time_us']:10.2f}" if self.ours else f"{'none':<20} {'':>10}"
        ratios = "".join(f" {self.peers[name]:12.2f}" if name in self.peers else f" {'n/a':>12}" for name in peers)
        place = "in" if self.in_place else "out"
        best = f"{name_of(self.best):<20} {self.best['time_us']:10.2f}"
        return f"{self.nbytes:11} {place:<5} {best} {self.limit:10.2f}  {ours}{ratios}"


def _operation(rows: list[Row], title: str) -> list[str]:
    places: dict[tuple[int, bool], list[Row]] = {}
    for row in rows:
        places.setdefault((row["bytes"], row["in_place"]), []).append(row)
    found = sorted((_Line(places[key]) for key in sorted(places)), key=lambda line: line.worst)
    peers = list(dict.fromkeys(name for line in found for name in line.peers))
    heading = f"{'size':>11} {'place':<5} {'fastest':<20} {'us':>10} {'limit us':>10}"
    heading += f"  {'fastest of kos':<20} {'us':>10}"
    heading += "".join(f" {name:>12}" for name in peers)
    lines = [f"# summary: {title}", heading]
    if peers:
        lines[0] += "; a peer's column is its time / the time of kos; worst rows first"
    lines += [line.text(peers) for line in found[:MOST_LINES]]
    if rest := found[MOST_LINES:]:
        at_least = f", each at least {rest[0].worst:.2f} times as fast as every peer" if peers else ""
        lines.append(f"# {len(rest)} more row{'s' * (len(rest) > 1)}{at_least}")
    if peers:
        compared = [line.worst for line in found if line.peers]
        lines.append(f"# kos is the fastest in {sum(worst > 1 for worst in compared)} of {len(compared)} rows")
    return lines
