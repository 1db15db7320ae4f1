"""Pictures as SVG text, without dependencies: shapes, timelines, and messages between actors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from kos.files import PALETTE
from kos.files import PALETTE_LIGHT as LIGHT

WIDTH = 700
INK, GREY, PALE = PALETTE[-1], PALETTE[-2], "#e4e7eb"
COLOURS = PALETTE[:4]
"""One for each rank."""


class Picture:
    """An SVG as text, ``WIDTH`` wide, on white, so that it can be read on a dark page too."""

    def __init__(self, title: str, note: str = "") -> None:
        self._parts: list[str] = []
        self.text(WIDTH / 2, 18, title, size=14, bold=True)
        if note:
            self.text(WIDTH / 2, 36, note, colour=GREY)
        self.top = 48 if note else 32

    def rect(self, x: float, y: float, width: float, height: float, fill: str, line: str = "none") -> None:
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
                           f'fill="{fill}" stroke="{line}"/>')  # fmt: skip

    def text(self, x: float, y: float, words: str, colour: str = INK, size: int = 12, anchor: str = "middle",
             bold: bool = False) -> None:  # fmt: skip
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}"'
                           f"{weight}>{escape(words)}</text>")  # fmt: skip

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = GREY, width: float = 1.0,
             dashed: bool = False, head: bool = False) -> None:  # fmt: skip
        if head:  # a triangle of its own: few programs give the head of a marker the colour of its line
            length, dx, dy = math.hypot(x2 - x1, y2 - y1), x2 - x1, y2 - y1
            dx, dy = 7 * dx / length, 7 * dy / length
            corners = [(x2, y2), (x2 - dx - dy / 2, y2 - dy + dx / 2), (x2 - dx + dy / 2, y2 - dy - dx / 2)]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
            self._parts.append(f'<polygon points="{points}" fill="{colour}"/>')
            x2, y2 = x2 - dx, y2 - dy
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
                           f'stroke-width="{width}"{dash}/>')  # fmt: skip

    def svg(self, height: float) -> str:
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
                f'height="{height:.0f}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">')  # fmt: skip
        paper = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
        return "\n".join([head, paper, *self._parts, "</svg>\n"])


class Box(NamedTuple):
    """What goes on in a row from ``start`` to ``end``."""

    row: int
    start: float
    end: float
    words: str
    colour: str


def timeline(title: str, note: str, rows: Sequence[str], boxes: Sequence[Box], legend: Mapping[str, str],
             until: float = 0.0) -> str:  # fmt: skip
    """Time runs to the right, to ``until`` at least."""
    picture = Picture(title, note)
    left, height = 14 + 7.6 * max(map(len, rows)), 24
    scale = (WIDTH - left - 14) / max(until, *(box.end for box in boxes))
    top = picture.top
    bottom = top + len(rows) * (height + 6)
    for row, name in enumerate(rows):
        y = top + row * (height + 6)
        picture.text(left - 8, y + height / 2 + 4, name, anchor="end", bold=True)
        picture.rect(left, y, WIDTH - left - 14, height, "#f5f7fa")
    for box in boxes:
        x, y, width = left + box.start * scale, top + box.row * (height + 6), (box.end - box.start) * scale
        picture.rect(x, y, max(width - 1, 1), height, box.colour)
        if box.words and len(box.words) * 7.2 < width:
            picture.text(x + width / 2, y + height / 2 + 4, box.words, INK if box.colour in LIGHT else "#ffffff")
    x = left
    for name, colour in legend.items():
        picture.rect(x, bottom + 8, 12, 12, colour)
        picture.text(x + 17, bottom + 18, name, GREY, anchor="start")
        x += 32 + 7.3 * len(name)
    return picture.svg(bottom + 30)


def exchange(title: str, note: str, actors: Sequence[str], events: Sequence[tuple[int, int, str]]) -> str:
    """A sequence diagram, in which time runs downwards.

    An event (source, target, text) is a message from one actor to another, or a note if both are the same actor.  The
    text of a message is drawn between the lifeline of its sender and the next lifeline.  Raises ValueError if a text is
    too long for this space.
    """
    picture = Picture(title, note)
    pitch = WIDTH / len(actors)
    at = [pitch * (i + 0.5) for i in range(len(actors))]
    top, row = picture.top + 26, 30
    bottom = top + row * len(events) + 14
    for x, name in zip(at, actors, strict=True):
        picture.line(x, top, x, bottom)
        picture.rect(x - pitch / 2 + 6, top - 26, pitch - 12, 24, PALE)
        picture.text(x, top - 10, name, bold=True)
    for number, (src, dst, words) in enumerate(events):
        y, half = top + row * (number + 1), 3.3 * len(words) + 4
        if src == dst:
            middle = min(max(at[src], half + 4), WIDTH - half - 4)
            picture.rect(middle - half, y - 16, 2 * half, 20, "#fff7e0", "#d9b44a")
        else:
            middle = at[src] + (pitch / 2 if dst > src else -pitch / 2)
            if 2 * half > pitch:
                raise ValueError(f"{title}: expected at most {pitch / 6.6 - 1:.0f} letters, got {words!r}")
            picture.line(at[src], y + 2, at[dst], y + 2, COLOURS[0], 1.4, head=True)
        picture.text(middle, y - 3, words)
    return picture.svg(bottom + 8)
