"""Latency and bus bandwidth over size: ``python -m benchmarks.collectives.plot RESULT.json PICTURE.png``.

One row of panels for each operation: single calls on the left (in a CUDA graph where there are such rows), bus
bandwidth back to back on the right; one line per implementation, the physical limit dashed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.collectives.cases import bandwidths
from kos.errors import KosError
from kos.files import check_picture

Row = dict[str, Any]

_OURS = {"mpi": "#c1121f", "kos-nccl": "#c1121f", "peer": "#e85d04", "auto": "#6a040f", "mock": "#c1121f",
         "tcp": "#e85d04"}  # fmt: skip
_PEERS = {"mpi-native": "#1d3557", "gloo": "#2a9d8f", "nccl": "#1d3557", "nccl-window": "#457b9d",
          "torch-nccl": "#2a9d8f", "torch-symm": "#8d99ae"}  # fmt: skip
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

    ranks = max(row["ranks"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["ranks"] == ranks]
    operations = list(dict.fromkeys(row["op"] for row in rows))
    modes = {row["mode"] for row in rows}
    left = "graph" if "graph" in modes else "single_shot" if "single_shot" in modes else "eager"
    right = "graph" if "graph" in modes else "eager" if "eager" in modes else "single_shot"
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
            axes.set_xticks(sizes[::step], [_size(size) for size in sizes[::step]])
            axes.minorticks_off()
            axes.set_xlabel("message size")
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        latency.set_yticks(_ticks(*latency.get_ylim()))
        latency.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        latency.legend(fontsize=9, frameon=False)
    dtype = rows[0]["dtype"]
    figure.suptitle(f"{result['hardware']}, {ranks} ranks, {dtype}, {result['date'][:10]}", fontsize=12)
    figure.savefig(path, dpi=120)


def _panel(axes: Any, lines: dict[str, list[Row]], value: str) -> None:
    limits: dict[int, float] = {}
    for index, (name, rows) in enumerate(lines.items()):
        backend = rows[0]["backend"]
        ours = backend in _OURS
        color = (_OURS | _PEERS).get(backend, "#555555")
        before = [other for other in list(lines)[:index] if lines[other][0]["backend"] == backend]
        style = _STYLES[2 if backend == "auto" else len(before) % len(_STYLES)]
        axes.plot(
            [row["bytes"] for row in rows], [row[value] for row in rows],
            label=f"{name} (kos)" if ours else name, color=color, linewidth=2.4 if ours else 1.5,
            linestyle=style, marker=_MARKERS[index % len(_MARKERS)], markersize=4,
            zorder=3 if ours else 2,
        )  # fmt: skip
        for row in rows:
            limits[row["bytes"]] = min(row["limit_us"], limits.get(row["bytes"], row["limit_us"]))
    example = next(iter(lines.values()), None)
    if example is None:
        return
    sizes = sorted(limits)
    bound = [limits[size] for size in sizes]
    if value == "busbw_gbps":
        op, ranks = example[0]["op"], example[0]["ranks"]
        bound = [bandwidths(op, ranks, size, time)[1] for size, time in zip(sizes, bound, strict=True)]
    axes.plot(sizes, bound, label="physical limit", color="black", linestyle="--", linewidth=1.2, zorder=1)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the two."""
    ticks = [m * 10.0**e for e in range(-4, 9) for m in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def _size(nbytes: int) -> str:
    for unit, name in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}B"
    return f"{nbytes} B"


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m benchmarks.collectives.plot RESULT.json PICTURE.png")
    source, target = map(Path, sys.argv[1:])
    try:
        check_picture(target)
        plot(json.loads(source.read_text()), target)
    except (KosError, OSError) as error:
        raise SystemExit(f"kos: error: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise SystemExit(f"kos: error: {source}: expected a result of benchmarks.collectives, got {error!r}") from error


if __name__ == "__main__":
    main()
