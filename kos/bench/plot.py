"""Latency and bus bandwidth over size: ``python -m kos.bench.plot RESULT.json PICTURE.png``.

One row of panels for each operation: single calls on the left (in a CUDA graph where there are such rows), bus
bandwidth back to back on the right; one line per implementation, the physical limit dashed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kos.bench.implementations import OURS
from kos.bench.report import size
from kos.errors import KosError
from kos.files import PALETTE, PALETTE_LIGHT, check_picture
from kos.reporting import ArgumentParser

Row = dict[str, Any]

_BLUE, _ORANGE, _GREEN, *_, _BROWN, _GREY, _INK = PALETTE
_COLORS = {
    "mpi": _ORANGE, "kos-nccl": _ORANGE, "mock": _ORANGE, "auto": _BROWN,
    "peer": PALETTE_LIGHT[1], "tcp": PALETTE_LIGHT[1],
    "mpi-native": _BLUE, "nccl": _BLUE, "nccl-window": PALETTE_LIGHT[0], "gloo": _GREEN, "torch-nccl": _GREEN,
    "torch-symm": _GREY,
}  # fmt: skip
_STYLES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
_MARKERS = "os^Dvx"


def series(rows: list[Row], mode: str) -> dict[str, list[Row]]:
    """Rows by implementation, in the order of their sizes: called as functions, in place where that was measured."""
    chosen: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["mode"] != mode or row["call"] != "function" or row["ranks"] != rows[0]["ranks"]:
            continue
        name = row["backend"] if row["algorithm"] == "auto" else f"{row['backend']} {row['algorithm']}"
        sizes = chosen.setdefault(name, {})
        if row["bytes"] not in sizes or row["in_place"]:
            sizes[row["bytes"]] = row
    return {name: [sizes[size] for size in sorted(sizes)] for name, sizes in chosen.items()}


def plot(result: Row, path: Path) -> None:
    """Draw ``result``, the JSON object of a run.  The format follows from the ending of ``path``."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    ranks = max(row["ranks"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["ranks"] == ranks]
    operations = list(dict.fromkeys(row["op"] for row in rows))
    modes = {row["mode"] for row in rows}
    left = next(mode for mode in ("graph", "single_shot", "eager") if mode in modes)
    right = next(mode for mode in ("graph", "eager", "single_shot") if mode in modes)
    figure = Figure(figsize=(13, 5.4 * len(operations)), layout="constrained")
    panels = figure.subplots(len(operations), 2, squeeze=False)
    for (latency, bandwidth), op in zip(panels, operations, strict=True):
        mine = [row for row in rows if row["op"] == op]
        _panel(latency, series(mine, left), "time_us")
        _panel(bandwidth, series(mine, right), "busbw_gbps")
        latency.set(title=f"{op}: time of a call ({left})", ylabel="µs", xscale="log", yscale="log")
        bandwidth.set(title=f"{op}: bus bandwidth ({right})", ylabel="GB/s", xscale="log", ylim=(0, None))
        for axes in (latency, bandwidth):
            sizes = sorted({row["bytes"] for row in mine})
            step = -(-len(sizes) // 10)
            axes.set_xticks(sizes[::step], list(map(size, sizes[::step])))
            axes.minorticks_off()
            axes.set_xlabel("message size")
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        latency.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=99))
        latency.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        latency.legend(fontsize=9, frameon=False)
    place = "in place" if all(row["in_place"] for row in rows) else "in place where measured"
    if not any(row["in_place"] for row in rows):
        place = "out of place"
    title = f"{result['hardware']}, {ranks} ranks, {rows[0]['dtype']}, {place}, {result['date'][:10]}"
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=120)


def _panel(axes: Any, lines: dict[str, list[Row]], value: str) -> None:
    limits: dict[int, float] = {}
    sized: dict[int, Row] = {}
    seen: list[str] = []
    for index, (name, rows) in enumerate(lines.items()):
        backend, ours = rows[0]["backend"], rows[0]["backend"] in OURS or rows[0]["backend"] == "mock"
        style = _STYLES[2 if backend == "auto" else seen.count(backend) % len(_STYLES)]
        seen.append(backend)
        axes.plot(
            [row["bytes"] for row in rows], [row[value] for row in rows], label=f"{name} (kos)" if ours else name,
            color=_COLORS.get(backend, _INK), linewidth=2.4 if ours else 1.5, linestyle=style,
            marker=_MARKERS[index % len(_MARKERS)], markersize=4, zorder=3 if ours else 2,
        )  # fmt: skip
        for row in rows:
            limits[row["bytes"]] = min(row["limit_us"], limits.get(row["bytes"], row["limit_us"]))
            sized[row["bytes"]] = row
    sizes = sorted(limits)
    bound = [limits[size] for size in sizes]
    if value == "busbw_gbps":
        bound = [sized[size][value] * sized[size]["time_us"] / limits[size] for size in sizes]
    axes.plot(sizes, bound, label="physical limit", color=_INK, linestyle="--", linewidth=1.2, zorder=1)


def main() -> None:
    parser = ArgumentParser(prog="python -m kos.bench.plot", description=__doc__)
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("picture", type=Path, metavar="PICTURE.png")
    options = parser.parse_args()
    try:
        check_picture(options.picture)
        plot(json.loads(options.result.read_text()), options.picture)
    except (KosError, OSError) as error:
        parser.exit(2, f"kos: error: {error}\n")
    except (KeyError, TypeError, ValueError) as error:
        parser.exit(2, f"kos: error: {options.result}: expected a result of kos.bench, got {error!r}\n")


if __name__ == "__main__":
    main()
