"""Holds Ctrl-C back while calls in host memory change what they share with other calls, or with other ranks.

Python runs the handler of SIGINT between any two instructions of the main thread.  An exception there would end the
steps of an operation half-way.  So a call that starts, waits or polls replaces the handler by one that only records the
signal.  The program's own handler runs where its exception is harmless: between two polls of a wait (``deliver``), or
at the end of the call (``release``).  An operation that is in flight then stays in flight.  This costs 0.8 us a call.
"""

from __future__ import annotations

# Not from ``signal``, because its conversions take ten times as long.
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from threading import get_ident, main_thread
from types import FrameType
from typing import Any

DELIVER_SECONDS = 0.05
"""The longest sleep of a wait that holds Ctrl-C back."""

_handler: Any = None
"""The program's handler, while it is held back.  Only the main thread uses it."""
_noted: list[FrameType | None] = []
"""The frame that Ctrl-C interrupted; empty until then."""


def _note(_: int, frame: FrameType | None) -> None:
    _noted[:] = (frame,)


def hold() -> bool:
    """Hold Ctrl-C back.  True if the caller must ``release`` it; False if it is held already, or cannot be held."""
    global _handler
    if get_ident() != main_thread().ident:
        return False  # Python runs handlers on the main thread
    handler = getsignal(SIGINT)
    if handler is _note or not callable(handler):
        return False
    signal(SIGINT, _note)
    _handler = handler
    return True


def holds() -> bool:
    """Whether Ctrl-C is held back on this thread."""
    return get_ident() == main_thread().ident and getsignal(SIGINT) is _note


def deliver() -> None:
    """Run the program's handler if Ctrl-C came since ``hold``, and raise its exception.  Ctrl-C stays held back."""
    if _noted and get_ident() == main_thread().ident:
        handler = _handler
        try:
            release()
        finally:
            if getsignal(SIGINT) is handler:  # else it has installed another one
                hold()


def release() -> None:
    """Undo ``hold``, and run the program's handler if Ctrl-C came meanwhile."""
    handler = _handler
    if getsignal(SIGINT) is _note:
        signal(SIGINT, handler)
    if _noted:
        handler(SIGINT, _noted.pop())
