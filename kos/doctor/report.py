"""The doctor's report: text, JSON, and a picture of who reaches whom how fast."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import kos
from kos.doctor.checks import BAD, Check, ranks_in_words
from kos.doctor.ranks import Facts, Matrix


@dataclass
class Report:
    """What is known so far; a check belongs to the ranks that found the same."""

    size: int = 1
    checks: dict[Check, list[int]] = field(default_factory=dict)
    facts: list[Facts] = field(default_factory=list)
    backends: str = ""
    matrices: list[Matrix] = field(default_factory=list)

    def add(self, per_rank: Sequence[Sequence[Check]], first: int = 0) -> None:
        """Take the checks of every rank, from rank ``first`` on; those of one name stay together."""
        for rank, checks in enumerate(per_rank, first):
            for check in checks:
                if rank not in (ranks := self.checks.setdefault(check, [])):
                    ranks.append(rank)
        names = list(dict.fromkeys(check.name for check in self.checks))
        self.checks = dict(sorted(self.checks.items(), key=lambda item: names.index(item[0].name)))

    @property
    def bad(self) -> list[str]:
        """What keeps these ranks from training."""
        return list(dict.fromkeys(check.name for check in self.checks if check.verdict == BAD))

    def to_json(self) -> dict[str, Any]:
        return {
            "kos": kos.__version__,
            "ranks": self.size,
            "will_train": not self.bad,
            "checks": [{**asdict(check), "ranks": ranks} for check, ranks in self.checks.items()],
            "backends": self.backends.splitlines(),
            "facts": self.facts,
            "matrices": [asdict(matrix) for matrix in self.matrices],
        }

    def to_text(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines, remedies = [], {""}
        for check, ranks in self.checks.items():
            some = f"  ({ranks_in_words(ranks)})" if len(ranks) < self.size else ""
            lines.append(f"{check.verdict:<4} {check.name:<{width}}  {check.found}{some}")
            if check.remedy not in remedies:  # said once, however many need it
                lines.append(f"{'':<{width + 7}}-> {check.remedy}")
                remedies.add(check.remedy)
        if self.backends:
            lines += ["", self.backends]
        for matrix in self.matrices:
            lines += ["", f"{matrix.what} memory, GB/s: the row reads from the column"]
            lines += _table(matrix.gigabytes_per_second)
            lines += ["", f"{matrix.what} memory, one-way latency in us", *_table(matrix.latency_us)]
        who = "This rank" if self.size == 1 else f"These {self.size} ranks"
        verdict = f"cannot train, see: {', '.join(self.bad)}" if self.bad else "can train"
        return "\n".join([*lines, "", f"{who} {verdict}."])


def _table(rows: list[list[float | None]]) -> list[str]:
    cells = [["", *map(str, range(len(rows)))]]
    cells += [[str(i), *("-" if value is None else f"{value:.4g}" for value in row)] for i, row in enumerate(rows)]
    return ["".join(f"{cell:>8}" for cell in row) for row in cells]


def draw(matrix: Matrix, path: Path) -> None:
    """The bandwidth matrix as a picture, where ``kos.files.check_picture`` has found that it can be."""
    from matplotlib.figure import Figure

    rows = [[float("nan") if value is None else value for value in row] for row in matrix.gigabytes_per_second]
    size, dark = max(4.0, 1.0 + 0.8 * len(rows)), 0.6 * max(filter(None, itertools.chain(*matrix.gigabytes_per_second)))
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.subplots()
    figure.colorbar(axes.imshow(rows, vmin=0, cmap="Blues"), label="GB/s", shrink=0.8)
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if value == value:
                color = "w" if value > dark else "k"
                axes.text(j, i, f"{value:.3g}", ha="center", va="center", color=color, fontsize=8)
    axes.set_xticks(range(len(rows)), matrix.labels, rotation=45, ha="right")
    axes.set_yticks(range(len(rows)), matrix.labels)
    axes.set(xlabel="from", ylabel="reads", title=f"{matrix.what} memory: bandwidth between ranks")
    figure.savefig(path, dpi=150)
