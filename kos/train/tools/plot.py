"""Draw the loss, learning rate, gradient norm and tokens/s of runs: ``python -m kos.train.tools.plot RUN…``.

RUN is the folder of a run. Its metrics.jsonl is drawn, also while the run goes on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kos.commands import program
from kos.errors import DataError, KosError
from kos.files import PALETTE, check_picture
from kos.reporting import ArgumentParser
from kos.train.tools import METRICS, read_metrics

LINES = ("-", ":", "-.")
"""How runs are drawn whose colours repeat."""
PANELS = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
}
SMOOTHED = 100
"""Steps of a run from which on a panel shows a moving average over a fiftieth of them."""
PALE = 3
"""Runs up to which each step is also drawn, in a pale colour."""

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def read_runs(folders: Sequence[Path]) -> Runs:
    """The rows of each run by its name.  DataError if there are none."""
    rows: dict[str, Sequence[Mapping[str, Any]]] = {}
    for folder in folders:
        path = folder / METRICS if folder.is_dir() else folder
        found = read_metrics(path)
        if not found:
            raise DataError(f"{folder}: expected the folder of a run with metrics.jsonl, got no steps in {path}")
        name = path.parent.name or path.parent.resolve().name
        rows[name if name not in rows else str(path.parent)] = found
    return rows


def draw(runs: Runs, path: Path) -> None:
    """A panel for each of ``PANELS``, a colour for each run.  The format follows from the ending of ``path``."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(11, 6.6), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(1.6, 1))
    places = (grid[0, :], grid[1, 0], grid[1, 1], grid[1, 2])
    looks: list[dict[str, Any]] = [
        {"color": PALETTE[i % len(PALETTE)], "linestyle": LINES[i // len(PALETTE) % len(LINES)]}
        for i in range(len(runs))
    ]
    checked: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "linestyle": "--", "linewidth": 1.2}
    legend = [Line2D([], [], label=name, **look) for name, look in zip(runs, looks, strict=True)]
    legend += [Line2D([], [], color="#555555", label="training loss"),
               Line2D([], [], color="#555555", label="validation loss", **checked)]  # fmt: skip
    figure.legend(handles=legend, loc="outside right upper", fontsize=9, frameon=False)
    for (key, title), place in zip(PANELS.items(), places, strict=True):
        axes = figure.add_subplot(place)
        for look, (name, rows) in zip(looks, runs.items(), strict=True):
            _line(axes, rows, key, {**look, "label": f"{name}: training"}, pale=len(runs) <= PALE)
            if key == "loss" and (points := _values(rows, "val_loss"))[0].size:
                axes.plot(*points, color=look["color"], label=f"{name}: validation", **checked)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xlabel("step", fontsize=9)
        axes.tick_params(labelsize=9)
        axes.grid(color="#dddddd", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
        if key == "tokens_per_second":
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        if key == "lr":
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        positive = any((_values(rows, key)[1] > 0).any() for rows in runs.values())
        if key == "grad_norm" and positive:  # whose first steps are often ten times the others
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_locator(NullLocator())
    figure.savefig(path, dpi=130)


def _line(axes: Any, rows: Sequence[Mapping[str, Any]], key: str, look: dict[str, Any], pale: bool) -> None:
    steps, values = _values(rows, key)
    if len(values) >= SMOOTHED and key != "lr":
        if pale:
            axes.plot(steps, values, color=look["color"], alpha=0.25, linewidth=0.8)
        sums, index, half = np.cumsum([0.0, *values]), np.arange(len(values)), len(values) // 100
        first, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
        values = (sums[end] - sums[first]) / (end - first)
    axes.plot(steps, values, linewidth=1.6, zorder=3, **look)


def _values(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps that have a value, and their values."""
    found = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    points = np.array([point for point in found if math.isfinite(point[1])], float).reshape(-1, 2)
    return points[:, 0], points[:, 1]


def main(argv: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = ArgumentParser(prog=program("kos.train.tools.plot"), description=about)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="The folder of a run.")
    about = "The picture, .png or .svg. Default: plot.png in the folder of the first run."
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help=about)
    arguments = parser.parse_args(argv)
    try:
        runs = read_runs(arguments.runs)
        first = arguments.runs[0]
        path = arguments.out or (first if first.is_dir() else first.parent) / "plot.png"
        check_picture(path)
        draw(runs, path)
    except (KosError, OSError) as error:
        print(f"kos: error: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
