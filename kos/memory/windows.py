"""Window: device memory that a communicator has registered with a library, given back with its last array."""

from __future__ import annotations

import sys
from typing import Any, Protocol


class Registrar(Protocol):
    """Who registered the memory."""

    def release(self, pointer: int, window: Any) -> None:
        """Undo the registration and free the memory."""


class Window:
    """The owner of an array in registered memory."""

    __slots__ = ("_registrar", "_window", "closed", "pointer")

    def __init__(self, registrar: Registrar, pointer: int, window: Any) -> None:
        self._registrar, self.pointer, self._window = registrar, pointer, window
        self.closed = False  # whether the memory was given back

    def close(self) -> None:
        """Give it back; nothing may be using it.  A second call does nothing."""
        pointer, self.pointer, self.closed = self.pointer, 0, True
        if pointer and not sys.is_finalizing():
            self._registrar.release(pointer, self._window)

    def __del__(self) -> None:
        self.close()
