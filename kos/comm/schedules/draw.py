"""A schedule as text and as a picture: ranks are lines, time runs to the right, messages are arrows."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import Any

from kos.comm.schedules.schedule import Round, Schedule, Step
from kos.errors import InvalidArgument
from kos.files import check_picture

MAX_ARROWS = 4096
"""Most arrows of a picture."""

LEGEND = "round; numbers: chunks, one colour each; solid, +: added to the receiver's; dashed: overwrites"


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
    receive = _receive_of(rank, step, steps)
    theirs = slot(receive.space, receive.chunk)
    return f"{rank} -> {step.peer}  {mine}{'' if mine == theirs else f' as {theirs}'}{mark.get(receive.kind, '')}"


def _chunks(chunk: int, span: int) -> str:
    return f"{chunk}" if span == 1 else f"{chunk}-{chunk + span - 1}"


def _receive_of(rank: int, step: Step, steps: Round) -> Step:
    """The receive that matches ``step``, a send of ``rank``."""
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

    rounds, ranks = len(schedule.rounds), schedule.ranks
    figure = Figure(figsize=(max(2 + rounds, 8), 1.5 + 0.5 * ranks), dpi=150 if rounds < 20 else 100, layout="tight")
    axes = figure.subplots()
    axes.set(xlim=(0, max(rounds, 1)), ylim=(ranks - 0.5, -0.5), xlabel=LEGEND, title=str(schedule), frame_on=False)
    axes.set_xticks([number + 0.5 for number in range(rounds)], [str(number) for number in range(rounds)])
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.hlines(range(ranks), 0, rounds, color="#bbbbbb", linewidth=0.7)
    for number, steps in enumerate(schedule.rounds):
        for rank, mine in enumerate(steps):
            sends = [s for s in mine if s.kind == "send"]
            for i, s in enumerate(sends):
                x = number + 0.1 + 0.4 * i / len(sends)
                _arrow(axes, schedule, rank, s, steps, x, number + 0.9, len(sends) <= 4)
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)


def _arrow(axes: Any, schedule: Schedule, rank: int, s: Step, steps: Round, x1: float, x2: float, label: bool) -> None:
    adds, color = _receive_of(rank, s, steps).kind == "recv_reduce", _color(s.chunk, schedule.parts)
    axes.annotate("", (x2, s.peer), (x1, rank), arrowprops={
        "arrowstyle": "-|>", "color": color, "linestyle": "-" if adds else (0, (5, 3)), "shrinkA": 0, "shrinkB": 0})
    if label:  # at one distance from the start, so that crossing arrows keep their labels apart
        along = 0.3 / abs(s.peer - rank)
        axes.text(x1 + (x2 - x1) * along, rank + (s.peer - rank) * along, "+" * adds + _chunks(s.chunk, s.span),
                  ha="center", va="center", fontsize=9, color=color, bbox={"color": "white", "pad": 0.5})


def _color(chunk: int, parts: int) -> tuple[float, float, float]:
    """Hues that differ as much as they can, dark enough for white paper."""
    k = chunk % parts
    return colorsys.hls_to_rgb(k / parts, 0.42 if k % 2 else 0.34, 0.85)
