"""A schedule as text and as a picture: ranks are lines, time runs to the right, messages are arrows.

SVG is written here; PNG needs matplotlib (extra ``plot``).
"""

from __future__ import annotations

import colorsys
import importlib
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from kos.comm.schedules.schedule import Schedule, Step
from kos.errors import InvalidArgument

MAX_ARROWS = 4096
"""More arrows than this make no picture that anybody can read."""

ROW, LEFT, TOP, FONT = 52, 86, 84, 12  # pixels
INK, FAINT = "#222222", "#bbbbbb"


def text(schedule: Schedule) -> str:
    """One line per message and local step: ``0 -> 1  data[3] +`` adds chunk 3 of rank 0 to rank 1's."""
    lines = [str(schedule)]
    for number, steps in enumerate(schedule.rounds):
        lines.append(f"round {number}")
        cells = [_describe(rank, s, steps) for rank, mine in enumerate(steps) for s in mine
                 if s.kind not in ("recv", "recv_reduce")]
        width = max(map(len, cells), default=0) + 3
        per_line = max(1, 100 // width)
        lines += ["  " + "".join(c.ljust(width) for c in cells[i:i + per_line]).rstrip()
                  for i in range(0, len(cells), per_line)]
    return "\n".join(lines)


def draw(schedule: Schedule, path: str | Path) -> None:
    """Write a picture of ``schedule`` to ``path``, which ends in .svg or .png.

    Raises InvalidArgument for another ending, a schedule too large to draw, or a missing matplotlib.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise InvalidArgument(f"a picture's name must end in .svg or .png, got {path.name!r}")
    picture = _picture(schedule)
    if path.suffix == ".svg":
        path.write_text(_svg(picture), encoding="utf-8")
    else:
        _png(picture, path)


def _describe(rank: int, step: Step, steps: tuple[tuple[Step, ...], ...]) -> str:
    if step.kind != "send":
        mark = " +" if step.kind == "reduce" else ""
        return f"{rank}: {_slot(step.source_space, step.source_chunk, step.span)} -> " \
               f"{_slot(step.space, step.chunk, step.span)}{mark}"
    landing = _landing(rank, step, steps)
    mark = " +" if landing.kind == "recv_reduce" else ""
    where = _slot(step.space, step.chunk, step.span)
    if (landing.space, landing.chunk) != (step.space, step.chunk):
        where += f" as {_slot(landing.space, landing.chunk, landing.span)}"
    return f"{rank} -> {step.peer}  {where}{mark}"


def _slot(space: str, chunk: int, span: int) -> str:
    return f"{space}[{_chunks(chunk, span)}]"


def _chunks(chunk: int, span: int) -> str:
    return f"{chunk}" if span == 1 else f"{chunk}-{chunk + span - 1}"


def _landing(rank: int, step: Step, steps: tuple[tuple[Step, ...], ...]) -> Step:
    """The receive that ``step``, a send of ``rank``, meets."""
    mine = [s for s in steps[rank] if s.kind == "send" and s.peer == step.peer]
    theirs = [s for s in steps[step.peer] if s.kind in ("recv", "recv_reduce") and s.peer == rank]
    return theirs[next(i for i, s in enumerate(mine) if s is step)]


@dataclass(frozen=True)
class _Line:
    x1: float
    y1: float
    x2: float
    y2: float
    color: str
    dashed: bool = False
    arrow: bool = False


@dataclass(frozen=True)
class _Text:
    x: float
    y: float
    text: str
    color: str = INK
    size: int = FONT
    anchor: Literal["start", "middle"] = "middle"
    halo: bool = False  # white round the letters, over the lines behind them


@dataclass(frozen=True)
class _Picture:
    width: float
    height: float
    lines: list[_Line]
    texts: list[_Text]


def _picture(schedule: Schedule) -> _Picture:
    arrows = sum(s.kind == "send" for steps in schedule.rounds for mine in steps for s in mine)
    if arrows > MAX_ARROWS:
        raise InvalidArgument(f"{schedule} has {arrows} messages, too many to draw (at most {MAX_ARROWS})")
    lines: list[_Line] = []
    texts = [_Text(14, 24, str(schedule), size=16, anchor="start"),
             _Text(14, 44, "numbers: chunks, one colour each    solid, +: added to the receiver's"
                           "    dashed: overwrites    on a rank's line: steps inside the rank",
                   "#666666", anchor="start")]
    x = float(LEFT)
    for number, steps in enumerate(schedule.rounds):
        busiest = max((len(mine) for mine in steps), default=0)
        width = 74 + 16 * min(max(busiest - 2, 0), 24)
        texts.append(_Text(x + width / 2, TOP - 18, str(number), "#666666"))
        lines.append(_Line(x, TOP - 12, x, TOP + ROW * (schedule.ranks - 1) + 18, "#eeeeee"))
        for rank, mine in enumerate(steps):
            _draw_rank(schedule, rank, mine, steps, x + 8, width - 18, lines, texts)
        x += width
    texts += [_Text(14, TOP - 18, "round", "#666666", anchor="start")]
    for rank in range(schedule.ranks):
        y = TOP + ROW * rank
        lines.insert(0, _Line(LEFT - 8, y, x + 8, y, FAINT))
        texts.append(_Text(14, y + 4, f"rank {rank}", anchor="start"))
    return _Picture(max(x + 24, 860), TOP + ROW * (schedule.ranks - 1) + 36, lines, texts)


def _draw_rank(schedule: Schedule, rank: int, mine: tuple[Step, ...], steps: tuple[tuple[Step, ...], ...],
               x: float, width: float, lines: list[_Line], texts: list[_Text]) -> None:
    """Arrows start side by side in the left of the round and end in its right; labels sit at their starts."""
    sends = [s for s in mine if s.kind == "send"]
    y = TOP + ROW * rank
    for i, s in enumerate(sends):
        landing = _landing(rank, s, steps)
        adds = landing.kind == "recv_reduce"
        color = _color(s.chunk % schedule.parts, schedule.parts)
        shift = i * min(16.0, width / (2 * len(sends)))
        x1, x2, y2 = x + shift, x + width - (0 if len(sends) < 2 else width / 4 - shift / 2), TOP + ROW * s.peer
        y1 = y + (3 if y2 > y else -3)
        lines.append(_Line(x1, y1, x2, y2, color, not adds, True))
        if len(sends) <= 4:
            # On the arrow at a fixed height from its start, so that crossing arrows keep their labels apart.
            along = 15 / abs(y2 - y1)
            texts.append(_Text(x1 + (x2 - x1) * along, y1 + (y2 - y1) * along + 4,
                               ("+" if adds else "") + _chunks(s.chunk, s.span), color, halo=True))
    inside = [s for s in mine if s.kind in ("copy", "reduce")]
    for s in inside[:1]:
        mark = "+" if s.kind == "reduce" else "="
        texts.append(_Text(x + width / 2, y - 4, mark + _chunks(s.chunk % schedule.parts, s.span) +
                           ("…" if len(inside) > 1 else ""), _color(s.chunk % schedule.parts, schedule.parts)))


def _color(k: int, n: int) -> str:
    """Hues that differ as much as they can, dark enough for white paper."""
    r, g, b = colorsys.hls_to_rgb(k / max(n, 1), 0.42 if k % 2 else 0.34, 0.85)
    return f"#{int(255 * r):02x}{int(255 * g):02x}{int(255 * b):02x}"


def _svg(p: _Picture) -> str:
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{p.width:.0f}" height="{p.height:.0f}" '
           f'font-family="Helvetica, Arial, sans-serif"><rect width="100%" height="100%" fill="white"/>']
    for line in p.lines:
        dash = ' stroke-dasharray="5 3"' if line.dashed else ""
        out.append(f'<path d="M{line.x1:.1f} {line.y1:.1f}L{line.x2:.1f} {line.y2:.1f}" stroke="{line.color}" '
                   f'stroke-width="{1.5 if line.arrow else 1}"{dash}/>')
        if line.arrow:
            (x, y), (dx, dy) = (line.x2, line.y2), _direction(line)
            out.append(f'<path d="M{x:.1f} {y:.1f}L{x - 8 * dx - 3 * dy:.1f} {y - 8 * dy + 3 * dx:.1f}'
                       f'L{x - 8 * dx + 3 * dy:.1f} {y - 8 * dy - 3 * dx:.1f}Z" fill="{line.color}"/>')
    for t in p.texts:
        halo = ' stroke="white" stroke-width="4" paint-order="stroke"' if t.halo else ""
        out.append(f'<text x="{t.x:.1f}" y="{t.y:.1f}" fill="{t.color}" font-size="{t.size}" '
                   f'text-anchor="{t.anchor}"{halo}>{escape(t.text)}</text>')
    return "\n".join([*out, "</svg>", ""])


def _direction(line: _Line) -> tuple[float, float]:
    dx, dy = line.x2 - line.x1, line.y2 - line.y1
    length = (dx * dx + dy * dy) ** 0.5 or 1.0
    return dx / length, dy / length


def _png(p: _Picture, path: Path) -> None:
    try:
        figure_module = importlib.import_module("matplotlib.figure")
        effects = importlib.import_module("matplotlib.patheffects")
    except ImportError as e:
        raise InvalidArgument("a PNG needs matplotlib: pip install 'kos[plot]', or draw to a .svg") from e
    figure = figure_module.Figure(figsize=(p.width / 100, p.height / 100), dpi=150 if p.width < 3000 else 100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, p.width), ylim=(p.height, 0))
    axes.axis("off")
    for line in p.lines:
        style = (0, (5, 3)) if line.dashed else "solid"
        axes.plot([line.x1, line.x2], [line.y1, line.y2], color=line.color, linewidth=1.1 if line.arrow else 0.7,
                  linestyle=style, zorder=1)
        if line.arrow:
            (x, y), (dx, dy) = (line.x2, line.y2), _direction(line)
            axes.fill([x, x - 8 * dx - 3 * dy, x - 8 * dx + 3 * dy], [y, y - 8 * dy + 3 * dx, y - 8 * dy - 3 * dx],
                      color=line.color, zorder=2, linewidth=0)
    for t in p.texts:
        axes.text(t.x, t.y, t.text, color=t.color, fontsize=0.72 * t.size, zorder=3,
                  ha={"start": "left", "middle": "center"}[t.anchor],
                  path_effects=[effects.withStroke(linewidth=3, foreground="white")] if t.halo else None)
    figure.savefig(path)
