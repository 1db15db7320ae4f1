"""The style of all pictures: 7 inches wide, legible at 700 pixels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

from kos.bench.report import size
from kos.files import PALETTE, PALETTE_LIGHT

(PEER, KOS, PEER_THIRD), (PEER_LIGHT, KOS_LIGHT, _) = PALETTE[:3], PALETTE_LIGHT
PEER_FOURTH, LIMIT = PALETTE[-2:]
LIMIT_LINE: dict[str, Any] = {"color": LIMIT, "linestyle": (0, (3, 2)), "linewidth": 1.1}
STYLES: dict[str, dict[str, Any]] = {
    "kos": {"color": KOS, "marker": "o"},
    "kos, symmetric buffers": {"color": KOS, "marker": "o"},
    "kos, any buffers": {"color": KOS_LIGHT, "marker": "s"},
    "NCCL": {"color": PEER, "marker": "^"},
    "Open MPI": {"color": PEER, "marker": "^"},
    "NCCL, symmetric windows": {"color": PEER_LIGHT, "marker": "v"},
    "Open MPI from C": {"color": PEER_LIGHT, "marker": "v"},
    "torch two-shot": {"color": PEER_THIRD, "marker": "D"},
    "torch one-shot": {"color": PEER_FOURTH, "marker": "x"},
}
SETTINGS = {
    "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "legend.fontsize": 7.5,
    "xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.6, "legend.frameon": False, "lines.linewidth": 1.6,
    "lines.markersize": 3.5, "axes.axisbelow": True,
}  # fmt: skip
DPI = 200
DIGEST = "Shown"
"""The key of a picture's digest in its file."""


def new(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure and its panels, an array of two dimensions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def save(figure: Any, path: Path) -> None:
    """The same bytes for the same figure: no date and no version in the file, a palette in place of full colour.

    The file names the digest of what it shows, so that a test sees a picture that is older than its results.
    """
    from PIL import Image, PngImagePlugin

    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    picture = Image.open(buffer).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    note = PngImagePlugin.PngInfo()
    note.add_text(DIGEST, digest(figure))
    picture.save(path, format="png", optimize=True, pnginfo=note)


def digest(figure: Any) -> str:
    """Of the figures and words that a picture shows, however they are drawn."""
    shown: list[Any] = []
    for axes in figure.axes:
        shown.append([axes.get_title(), axes.get_xlabel(), axes.get_ylabel()])
        shown += [[line.get_label(), *map(list, line.get_xydata().round(6))] for line in axes.lines]
        shown += [[round(patch.get_width(), 6), round(patch.get_height(), 6)] for patch in axes.patches]
        shown += [text.get_text() for text in axes.texts]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def sizes_along(axes: Any, sizes: Iterable[int], apart: float = 3) -> None:
    """Message sizes on a logarithmic horizontal axis, labels at least so many times as large as the one before."""
    ticks: list[int] = []
    for each in sorted(sizes):
        if not ticks or each >= apart * ticks[-1]:
            ticks.append(each)
    axes.set_xscale("log")
    axes.set_xticks(ticks, [size(tick) for tick in ticks], rotation=45)
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)


def times_up(axes: Any) -> None:
    """Microseconds on a logarithmic vertical axis."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.tick_params(axis="y", which="minor", left=False, labelleft=False)


def line(axes: Any, name: str, series: dict[int, float]) -> None:
    sizes = sorted(series)
    axes.plot(sizes, [series[each] for each in sizes], label=name, **STYLES[name], zorder=3 if "kos" in name else 2)


def limit(axes: Any, series: dict[int, float]) -> None:
    sizes = sorted(series)
    axes.plot(sizes, [series[each] for each in sizes], label="physical limit", **LIMIT_LINE, zorder=1)


def bars(axes: Any, groups: list[str], series: dict[str, list[float]], colors: list[str], texts: bool = True) -> None:
    """Bars side by side, one group for each label."""
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        places = [at + (index - (len(series) - 1) / 2) * width for at in range(len(groups))]
        drawn = axes.bar(places, values, width * 0.94, label=name, color=colors[index])
        if texts:
            axes.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=1, fontsize=6.5)
    axes.set_xticks(range(len(groups)), groups)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(axis="x", visible=False)
