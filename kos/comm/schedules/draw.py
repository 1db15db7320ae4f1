"""A schedule as text and as a picture: ranks are lines, time runs to the right, messages are arrows."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import Any

from kos.comm.schedules.schedule import Round, Schedule, Step
from kos.errors import InvalidArgument
from kos.files import check_picture

MAX_ARROWS = 4096
"""More arrows than this make no picture that anybody can read."""

ROW, LEFT, TOP = 52, 86, 84  # pixels
LEGEND = ("numbers: chunks, one colour each    solid, +: added to the receiver's    dashed: overwrites    "
          "on a rank's line: steps inside the rank")


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


def _describe(rank: int, step: Step, steps: Round) -> str:
    def slot(space: str, chunk: int) -> str:
        return f"{space}[{_chunks(chunk, step.span)}]"

    mine, mark = slot(step.space, step.chunk), {"reduce": " +", "recv_reduce": " +"}
    if step.kind != "send":
        return f"{rank}: {slot(step.source_space, step.source_chunk)} -> {mine}{mark.get(step.kind, '')}"
    landing = _landing(rank, step, steps)
    theirs = slot(landing.space, landing.chunk)
    return f"{rank} -> {step.peer}  {mine}{'' if mine == theirs else f' as {theirs}'}{mark.get(landing.kind, '')}"


def _chunks(chunk: int, span: int) -> str:
    return f"{chunk}" if span == 1 else f"{chunk}-{chunk + span - 1}"


def _landing(rank: int, step: Step, steps: Round) -> Step:
    """The receive that ``step``, a send of ``rank``, meets."""
    mine = [s for s in steps[rank] if s.kind == "send" and s.peer == step.peer]
    theirs = [s for s in steps[step.peer] if s.kind in ("recv", "recv_reduce") and s.peer == rank]
    return theirs[next(i for i, s in enumerate(mine) if s is step)]


def draw(schedule: Schedule, path: str | Path) -> None:
    """Write a picture of ``schedule`` to ``path``, which ends in .svg or .png.

    Raises InvalidArgument for another ending and a schedule too large to draw, BackendUnavailable without matplotlib.
    """
    check_picture(Path(path))
    arrows = sum(s.kind == "send" for steps in schedule.rounds for mine in steps for s in mine)
    if arrows > MAX_ARROWS:
        raise InvalidArgument(f"{schedule} has {arrows} messages, too many to draw (at most {MAX_ARROWS})")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    widths = [74 + 16 * min(max(max(map(len, steps), default=0) - 2, 0), 24) for steps in schedule.rounds]
    width, height = max(LEFT + sum(widths) + 24, 860), TOP + ROW * (schedule.ranks - 1) + 36
    figure = Figure(figsize=(width / 100, height / 100), dpi=150 if width < 3000 else 100)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    axes.text(14, 24, str(schedule), fontsize=12)
    axes.text(14, 44, LEGEND, fontsize=8, color="#666666")
    axes.text(14, TOP - 18, "round", fontsize=9, color="#666666")
    for rank in range(schedule.ranks):
        y = TOP + ROW * rank
        axes.text(14, y + 4, f"rank {rank}", fontsize=9)
        axes.plot([LEFT - 8, LEFT + sum(widths) + 8], [y, y], color="#bbbbbb", linewidth=0.7)
    x = LEFT
    for number, (steps, wide) in enumerate(zip(schedule.rounds, widths, strict=True)):
        axes.text(x + wide / 2, TOP - 18, str(number), ha="center", fontsize=9, color="#666666")
        axes.plot([x, x], [TOP - 12, height - 18], color="#eeeeee", linewidth=0.7)
        for rank in range(schedule.ranks):
            _draw_rank(axes, schedule, rank, steps, x + 8, wide - 18)
        x += wide
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)


def _draw_rank(axes: Any, schedule: Schedule, rank: int, steps: Round, x: float, width: float) -> None:
    """Arrows start side by side in the left of the round and end in its right; labels sit at their starts."""
    y = TOP + ROW * rank
    sends = [s for s in steps[rank] if s.kind == "send"]
    for i, s in enumerate(sends):
        adds, color = _landing(rank, s, steps).kind == "recv_reduce", _color(s.chunk, schedule.parts)
        shift = i * min(16.0, width / (2 * len(sends)))
        x1, x2, y2 = x + shift, x + width - (0 if len(sends) < 2 else width / 4 - shift / 2), TOP + ROW * s.peer
        y1 = y + (3 if y2 > y else -3)
        axes.annotate("", (x2, y2), (x1, y1), arrowprops={
            "arrowstyle": "-|>", "color": color, "linestyle": "-" if adds else (0, (5, 3)), "shrinkA": 0, "shrinkB": 0})
        if len(sends) <= 4:
            # On the arrow at a fixed height from its start, so that crossing arrows keep their labels apart.
            along = 15 / abs(y2 - y1)
            axes.text(x1 + (x2 - x1) * along, y1 + (y2 - y1) * along + 4, "+" * adds + _chunks(s.chunk, s.span),
                      ha="center", fontsize=9, color=color, bbox={"color": "white", "pad": 0.5})
    inside = [s for s in steps[rank] if s.kind in ("copy", "reduce")]
    for s in inside[:1]:
        label = ("+" if s.kind == "reduce" else "=") + _chunks(s.chunk % schedule.parts, s.span)
        axes.text(x + width / 2, y - 4, label + "…" * (len(inside) > 1), ha="center", fontsize=9,
                  color=_color(s.chunk, schedule.parts))


def _color(chunk: int, parts: int) -> tuple[float, float, float]:
    """Hues that differ as much as they can, dark enough for white paper."""
    k = chunk % parts
    return colorsys.hls_to_rgb(k / parts, 0.42 if k % 2 else 0.34, 0.85)
