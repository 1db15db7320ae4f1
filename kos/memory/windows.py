"""Window: device memory that a communicator has registered with a library, released with its last array.

A graph that captured an operation on a window holds bare addresses, and may outlive the arrays.  The memory tracks such
graphs, and is freed after they are destroyed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from kos.cuda.driver import cu
from kos.cuda.graphs import CapturedGraph, captured_graph
from kos.cuda.streams import LEGACY

Run = Callable[..., None]
"""Queues an operation on a stream: (stream, address of what is sent, address of what is received)."""


class Window:
    """The owner of an array in registered memory; ``release`` undoes the registration and frees the memory."""

    __slots__ = ("_release", "closed", "pointer")

    def __init__(self, pointer: int, release: Callable[[], None]) -> None:
        self.pointer, self._release = pointer, release
        self.closed = False  # whether the memory was released

    def close(self) -> None:
        """Release the memory, which must be unused.  A second call does nothing."""
        pointer, self.pointer, self.closed = self.pointer, 0, True
        if pointer and not sys.is_finalizing():
            self._release()

    def __del__(self) -> None:
        self.close()


class WindowMemory:
    """``nbytes`` of registered memory, with the library's ``handle``, and the graphs that use it.

    ``owner`` is the program's array that the memory belongs to; None for memory that is freed with its registration.
    """

    __slots__ = ("_graphs", "handle", "nbytes", "owner", "pointer")

    def __init__(self, pointer: int, nbytes: int, handle: Any, owner: Any = None) -> None:
        self.pointer, self.nbytes, self.handle, self.owner = pointer, nbytes, handle, owner
        self._graphs: list[CapturedGraph] = []
        memories[id(self)] = self  # several communicators may register one address
        changed()

    def add(self, graph: CapturedGraph) -> None:
        """Record that ``graph`` uses the memory."""
        if graph not in self._graphs:
            self._graphs.append(graph)

    def in_graphs(self) -> bool:
        """Whether a live graph uses the memory."""
        self._graphs = [graph for graph in self._graphs if graph.alive()]
        return bool(self._graphs)

    def forget(self) -> None:
        """Remove the memory from the table before it is freed."""
        memories.pop(id(self), None)
        changed()


memories: dict[int, WindowMemory] = {}
"""All windows of this process."""


def changed() -> None:
    """Called when there is another window, or one less; replaced by whoever must know."""


def under(pointers: Iterable[Any]) -> list[WindowMemory]:
    """The windows of this process in which one of the addresses lies."""
    known = [p for p in pointers if isinstance(p, int)]
    return [m for m in list(memories.values()) if any(0 <= p - m.pointer < m.nbytes for p in known)]


def keep_in_graph(used: Iterable[WindowMemory], stream: int) -> None:
    """If ``stream`` is being captured, record that the graph uses these windows."""
    if stream != LEGACY and cu.cuStreamIsCapturing(stream)[1] and (graph := captured_graph(stream)) is not None:
        for memory in used:
            memory.add(graph)


def place(pointer: int) -> int:
    """The property of an address on which a call depends: the address itself in a window, elsewhere its alignment."""
    for memory in list(memories.values()):
        if 0 <= pointer - memory.pointer < memory.nbytes:
            return pointer
    return pointer & 15
