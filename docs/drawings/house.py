"""The packages of kos as a house, from the imports in their syntax trees: each imports only what is below it."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

from docs.drawings.svg import GREY, WIDTH, Picture

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


def rows_of(graph: Graph) -> list[list[str]]:
    """The nodes by level, each below all that import it.  CycleError where there is a circle."""
    level = dict.fromkeys(graph, 0)
    for node in reversed([*TopologicalSorter(graph).static_order()]):
        for below in graph[node]:
            level[below] = max(level[below], level[node] + 1)
    return [sorted(node for node in graph if level[node] == row) for row in range(max(level.values(), default=-1) + 1)]


ROOM_WIDTH, ROOM_HEIGHT, GAP, ACROSS = 92, 20, 8, 5
"""Of the boxes of rooms, and how many stand side by side."""


def house(folder: Path = KOS) -> str:
    """Floors of packages, and in each package its rooms.  No floor imports one above it."""
    packages, rooms = imports(folder)
    picture = Picture("The packages of kos", "each imports only packages on floors below; "
                      "inside a package, most imports go to later parts")  # fmt: skip
    inside = {name: {room: into for room, into in rooms.items() if room.startswith(f"{name}/")} for name in packages}
    order = {name: [room for row in rows_of(inside[name]) for room in row] for name in packages}
    y = float(picture.top)
    for row in rows_of(packages):
        size = {name: _size(len(order[name])) for name in row}
        high = max(height for _, height in size.values())
        picture.rect(0, y, WIDTH, high + 2 * GAP, "#f5f7fa")
        x = (WIDTH - sum(width for width, _ in size.values()) - 2 * GAP * (len(row) - 1)) / 2
        for name in row:
            width, height = size[name]
            _package(picture, name, order[name], (x, y + GAP + high - height, width, height))
            x += width + 2 * GAP
        y += high + 2 * GAP + 4
    return picture.svg(y - 4)


def _size(rooms: int) -> tuple[float, float]:
    """The width and height of a package."""
    across, down = min(rooms, ACROSS), -(-rooms // ACROSS)
    return max(120, across * (ROOM_WIDTH + GAP) + GAP), 24 + down * (ROOM_HEIGHT + GAP)


def _package(picture: Picture, name: str, rooms: list[str], box: tuple[float, float, float, float]) -> None:
    left, top, width, height = box
    picture.rect(left, top, width, height, "#dcebf8", GREY)
    picture.text(left + width / 2, top + 16, name, bold=True)
    for i, room in enumerate(rooms):
        inner = min(len(rooms), ACROSS) * (ROOM_WIDTH + GAP) - GAP
        x = left + (width - inner) / 2 + i % ACROSS * (ROOM_WIDTH + GAP)
        y = top + 24 + i // ACROSS * (ROOM_HEIGHT + GAP)
        picture.rect(x, y, ROOM_WIDTH, ROOM_HEIGHT, "#ffffff", GREY)
        picture.text(x + ROOM_WIDTH / 2, y + 14, room.split("/")[-1])
