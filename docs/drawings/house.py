"""The packages of kos and their imports, from the syntax trees."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from docs.drawings.svg import GREY, INK, WIDTH, Picture

KOS = Path(__file__).resolve().parents[2] / "kos"
Graph = dict[str, set[str]]


def imports(folder: Path) -> tuple[Graph, Graph]:
    """Which packages of kos import which, and which rooms (packages inside them) import which of the same package.

    Modules of two rooms may import one another, though never in a circle of modules.  Then the way counts in which most
    import statements go.
    """
    files = {".".join(f.relative_to(folder.parent).with_suffix("").parts): f for f in sorted(folder.rglob("*.py"))}
    packages, rooms, statements = Graph(), Graph(), Counter[tuple[str, str]]()

    def parts(module: str) -> tuple[str, str]:
        names = [*module.removesuffix(".__init__").split(".")[1:], "", ""]
        inner = f"{folder.name}.{names[0]}.{names[1]}.__init__" in files
        return names[0] or "comm", f"{names[0]}/{names[1]}" if inner else ""  # kos itself is the face of comm

    for module, file in files.items():
        mine, room = parts(module)
        packages.setdefault(mine, set())
        if room:
            rooms.setdefault(room, set())
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
            for theirs, other in {parts(name) for name in names if name in files or f"{name}.__init__" in files}:
                packages[mine] |= {theirs} - {mine}
                statements[room, other] += bool(room and other) and mine == theirs and room != other
    packages.pop("__main__", None)
    for (room, other), count in sorted(statements.items(), key=lambda each: (-each[1], each[0])):
        if count and room not in _below(rooms, other):
            rooms[room].add(other)
    return packages, rooms


def _below(graph: Graph, node: str) -> set[str]:
    """The node, and all that can be reached from it."""
    return {node}.union(*(_below(graph, each) for each in graph[node]))


def reduced(graph: Graph) -> Iterator[tuple[str, str]]:
    """The arrows that do not follow from others."""
    for node, into in graph.items():
        yield from ((node, each) for each in sorted(into)
                    if not any(each in _below(graph, other) for other in into - {each}))  # fmt: skip


def rows_of(graph: Graph) -> list[list[str]]:
    """The nodes by level, each below all that import it.  CycleError where there is a circle."""
    level = dict.fromkeys(graph, 0)
    for node in reversed([*TopologicalSorter(graph).static_order()]):
        for below in graph[node]:
            level[below] = max(level[below], level[node] + 1)
    return [sorted(node for node in graph if level[node] == row) for row in range(max(level.values(), default=-1) + 1)]


def house(folder: Path = KOS) -> str:
    """Boxes are packages, in them their rooms; arrows are imports, without those that follow from others."""
    packages, rooms = imports(folder)
    picture = Picture("Packages of kos", "arrows: what imports what, without the arrows that follow from others")
    inside = {name: {room: into for room, into in rooms.items() if room.startswith(f"{name}/")} for name in packages}
    at = dict[str, tuple[float, float, float, float]]()
    room_width, room_height, y = 92, 20, float(picture.top)
    arrows = [*reduced(packages)]
    for row in rows_of(packages):
        plans = {name: rows_of(inside[name]) for name in row}
        widths = {name: max(110, (room_width + 10) * max(map(len, plan), default=0) + 10)
                  for name, plan in plans.items()}  # fmt: skip
        bottom = y + max(24 + (room_height + 16) * len(plan) for plan in plans.values())
        above = [at[upper][0] + at[upper][2] / 2 for upper, lower in arrows if lower in row]
        x = (sum(above) / len(above) if above else WIDTH / 2) - (sum(widths.values()) + 16 * (len(row) - 1)) / 2
        for name in row:
            width, height = widths[name], 24 + (room_height + 16) * len(plans[name])
            at[name] = x, bottom - height, width, height
            for level, here in enumerate(plans[name]):
                left = x + (width - (room_width + 10) * len(here) + 10) / 2
                for i, room in enumerate(here):
                    down = bottom - height + 24 + level * (room_height + 16)
                    at[room] = left + i * (room_width + 10), down, room_width, room_height
            x += width + 16
        y = bottom + 24
    for name, (left, top, wide, high) in at.items():
        picture.rect(left, top, wide, high, "#ffffff" if name in rooms else "#eef4fb", GREY)
        picture.text(left + wide / 2, top + 15, name.split("/")[-1], bold=name not in rooms)
    for graph, colour in [(packages, INK), *((each, GREY) for each in inside.values() if each)]:
        for upper, lower in reduced(graph):
            (x1, y1, w1, h1), (x2, y2, w2, _) = at[upper], at[lower]
            start = min(max(x2 + w2 / 2, x1 + 8), x1 + w1 - 8)
            picture.line(start, y1 + h1, min(max(start, x2 + 8), x2 + w2 - 8), y2, colour, head=True)
    return picture.svg(y - 12)
