"""Collective schedules (``kos.comm.schedules``): ranks are rows, steps are columns, messages are arrows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from docs.drawings.svg import COLOURS, GREY, PALE, WIDTH, Picture
from kos.comm.schedules import Schedule
from kos.comm.schedules.schedule import Round
from kos.comm.schedules.verify import contents
from kos.errors import plural

BAR, FIELD, GAP = 13, 9, 22  # pixels: a chunk's height, a contribution's width, between two ranks
State = list[dict[int, int]]
"""By rank and chunk: the ranks whose contributions it holds, as a bit mask."""


class Arrow(NamedTuple):
    """A message between two ranks: the first of ``span`` chunks at both ends, and whether it is added."""

    src: int
    dst: int
    start: float
    end: float
    span: int
    adds: bool


def steps_of(schedule: Schedule) -> tuple[list[State], list[list[Arrow]]]:
    """The state before the first step and after each, and the messages of each step.

    A step is a round with messages and the local rounds after it.
    """
    states, arrows = list[State](), list[list[Arrow]]()
    shown = _shown(schedule)
    for steps, held in zip([(), *schedule.rounds], contents(schedule), strict=True):
        sent = [*_arrows(schedule, steps)]
        arrows += [sent] if sent else []
        state = [{chunk: value.ranks for (space, chunk), value in mine.items() if space == shown} for mine in held]
        states[len(arrows) :] = [state]
    return states, arrows


def _shown(schedule: Schedule) -> str:
    """The space that is drawn."""
    return "data" if "data" in schedule.units else "output"


def _arrows(schedule: Schedule, steps: Round) -> Iterator[Arrow]:
    shown, middle = _shown(schedule), (schedule.units[_shown(schedule)] * schedule.parts - 1) / 2
    for src, mine in enumerate(steps):
        for dst in range(schedule.ranks):
            sends = [s for s in mine if s.kind == "send" and s.peer == dst]
            receives = [s for s in steps[dst] if s.kind in ("recv", "recv_reduce") and s.peer == src]
            for send, receive in zip(sends, receives, strict=True):
                start = send.chunk if send.space == shown else middle
                end = receive.chunk if receive.space == shown else receive.chunk % schedule.parts
                adds = receive.kind == "recv_reduce" or receive.space == "scratch"
                yield Arrow(src, dst, start, end, receive.span, adds)


def collective(schedule: Schedule) -> str:
    """The picture of a schedule of up to four ranks."""
    (states, arrows), ranks = steps_of(schedule), schedule.ranks
    whole = schedule.parts * max(schedule.units.values())
    sent = max(sum(s.span for steps in schedule.rounds for s in steps[r] if s.kind == "send") for r in range(ranks))
    title = f"{schedule.collective} by {schedule.algorithm}, {plural(ranks, 'rank')}"
    cost = f"{plural(len(arrows), 'step')}; a rank sends at most {sent / whole:g} times the bytes of its buffer"
    picture = Picture(title, cost)
    chunks = schedule.parts * schedule.units[_shown(schedule)]
    width, height = FIELD * ranks, BAR * chunks
    pitch = min((WIDTH - 80 - width) / len(arrows), 240)
    left = 70 + (WIDTH - 80 - width - pitch * len(arrows)) / 2

    def corner(column: int, rank: int) -> tuple[float, float]:
        return left + pitch * column, picture.top + 24 + rank * (height + GAP)

    for column, state in enumerate(states):
        picture.text(corner(column, 0)[0] + width / 2, picture.top + 12, f"step {column}" if column else "start")
        for rank, held in enumerate(state):
            x, y = corner(column, rank)
            if column == 0:
                picture.text(x - 22, y + height / 2 + 4, f"rank {rank}", COLOURS[rank], anchor="end", bold=True)
            for chunk in range(chunks):
                letter = "abcdefgh"[chunk] if "data" in schedule.units else str(chunk)
                picture.text(x - 7, y + chunk * BAR + 10, letter, GREY, size=11)
                for each in range(ranks):
                    colour = COLOURS[each] if held.get(chunk, 0) >> each & 1 else PALE
                    picture.rect(x + each * FIELD, y + chunk * BAR, FIELD - 1, BAR - 2, colour)
    for column, messages in enumerate(arrows):
        for arrow in messages:
            (x1, y1), (x2, y2) = corner(column, arrow.src), corner(column + 1, arrow.dst)
            x1, x2, long, colour = x1 + width + 2, x2 - 14, BAR * arrow.span, COLOURS[arrow.src]
            y1, y2 = y1 + BAR * arrow.start, y2 + BAR * arrow.end
            if arrow.span > 1:
                picture.line(x1, y1, x1, y1 + long - 2, colour, 2)
                picture.line(x2, y2, x2, y2 + long - 2, colour, 2)
            picture.line(x1, y1 + long / 2 - 1, x2, y2 + long / 2 - 1, colour, 1.4, dashed=not arrow.adds, head=True)
    bottom = picture.top + 24 + ranks * (height + GAP) + 8
    row = "chunk" if "data" in schedule.units else "part of the output"
    legend = f"Each row is a {row}. A field is coloured if it holds that rank's data. "
    legend += "Solid: added. Dashed: copied."
    picture.text(WIDTH / 2, bottom, legend, GREY, size=11)
    return picture.svg(bottom + 14)
