"""The doctor's report: text, JSON, and a picture of who reaches whom how fast."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import kos
from kos.doctor.checks import BAD, Check
from kos.doctor.ranks import Facts, Matrix
from kos.errors import BackendUnavailable


@dataclass
class Report:
    """What is known so far; a check belongs to the ranks that found the same."""

    size: int = 1
    checks: list[tuple[Check, list[int]]] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)
    backends: str = ""
    matrices: list[Matrix] = field(default_factory=list)

    def add(self, per_rank: Sequence[Sequence[Check]], first: int = 0) -> None:
        """Take the checks of every rank, from rank ``first`` on."""
        for rank, checks in enumerate(per_rank, first):
            for check in checks:
                known = next((ranks for other, ranks in self.checks if other == check), None)
                if known is None:
                    after = max((i for i, (other, _) in enumerate(self.checks) if other.name == check.name), default=-2)
                    self.checks.insert(after + 1 if after >= 0 else len(self.checks), (check, [rank]))
                elif rank not in known:
                    known.append(rank)

    @property
    def bad(self) -> list[Check]:
        return [check for check, _ in self.checks if check.verdict == BAD]

    def to_json(self) -> dict[str, Any]:
        return {
            "kos": kos.__version__,
            "ranks": self.size,
            "will_train": not self.bad,
            "checks": [{**asdict(check), "ranks": ranks} for check, ranks in self.checks],
            "backends": self.backends.splitlines(),
            "facts": self.facts,
            "matrices": [asdict(matrix) for matrix in self.matrices],
        }

    def to_text(self) -> str:
        width = max((len(check.name) for check, _ in self.checks), default=0)
        lines = []
        for check, ranks in self.checks:
            some = (
                f"  (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
                if len(ranks) < self.size
                else ""
            )
            lines.append(f"{check.verdict:<4} {check.name:<{width}}  {check.found}{some}")
            if check.remedy:
                lines.append(f"{'':<{width + 7}}-> {check.remedy}")
        if self.backends:
            lines += ["", self.backends]
        for matrix in self.matrices:
            lines += [
                "",
                f"{matrix.what} memory, GB/s: the row reads from the column",
                *_table(matrix.gigabytes_per_second),
            ]
            lines += ["", f"{matrix.what} memory, one-way latency in us", *_table(matrix.latency_us)]
        who = "This rank" if self.size == 1 else f"These {self.size} ranks"
        why = "; ".join(f"{check.name}: {check.found}" for check in self.bad)
        return "\n".join([*lines, "", f"{who} cannot train: {why}" if self.bad else f"{who} can train."])


def _table(rows: list[list[float | None]]) -> list[str]:
    cells = [["", *map(str, range(len(rows)))]]
    cells += [[str(i), *("-" if value is None else f"{value:.4g}" for value in row)] for i, row in enumerate(rows)]
    return ["".join(f"{cell:>8}" for cell in row) for row in cells]


def draw(matrix: Matrix, path: Path) -> None:
    """The bandwidth matrix as a picture; the kind of file is that of ``path``'s suffix."""
    try:
        import matplotlib
    except ImportError as error:
        raise BackendUnavailable("--plot: expected matplotlib (pip install 'kos[plot]'), got none") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [[float("nan") if value is None else value for value in row] for row in matrix.gigabytes_per_second]
    size, dark = max(4.0, 1.0 + 0.8 * len(rows)), 0.6 * max(filter(None, itertools.chain(*matrix.gigabytes_per_second)))
    figure, axes = pyplot.subplots(figsize=(size + 1, size), layout="constrained")
    image = axes.imshow(rows, vmin=0, cmap="Blues")
    figure.colorbar(image, label="GB/s", shrink=0.8)
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if value == value:
                axes.text(
                    j, i, f"{value:.3g}", ha="center", va="center", color="w" if value > dark else "k", fontsize=8
                )
    places = range(len(rows))
    axes.set_xticks(places, matrix.labels, rotation=45, ha="right")
    axes.set_yticks(places, matrix.labels)
    axes.set(xlabel="from", ylabel="reads", title=f"{matrix.what} memory: bandwidth between ranks")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
