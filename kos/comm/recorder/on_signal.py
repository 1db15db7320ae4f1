"""Dumps of the flight recorder when a signal arrives."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

from kos.comm.recorder import recorders
from kos.errors import InvalidArgument

log = logging.getLogger(__name__)


def dump_on_signal(number: int) -> None:
    """Dump every recorder of this process when signal ``number`` arrives; a handler it had is called after it.

    To be called from the main thread.  ``kos.init`` does it for the signal that KOS_RECORDER_SIGNAL names
    (``USR2`` or ``12``).  Python runs handlers between two of its own instructions: a rank that is stuck
    inside a C function does not answer.
    """
    previous = signal.getsignal(number)
    if previous is _on_signal:
        return
    if callable(previous):
        _previous[number] = previous
    signal.signal(number, _on_signal)


def listen() -> None:
    """``dump_on_signal`` as the environment asks for it.  Raises InvalidArgument for a signal that is none."""
    wanted = os.environ.get("KOS_RECORDER_SIGNAL")
    if not wanted:
        return
    try:
        number = (
            int(wanted) if wanted.isdecimal() else signal.Signals["SIG" + wanted.upper().removeprefix("SIG")]
        )
        number = signal.Signals(number)
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError
    except (KeyError, ValueError):
        raise InvalidArgument(
            f"KOS_RECORDER_SIGNAL: expected a signal that can be caught, such as USR2, got {wanted!r}"
        ) from None
    if threading.current_thread() is threading.main_thread():
        dump_on_signal(number)


_previous: dict[int, Any] = {}


def _on_signal(number: int, frame: FrameType | None) -> None:
    for recorder in list(recorders):
        try:
            recorder.dump(reason=f"signal {signal.Signals(number).name}")
        except OSError as error:
            log.warning("rank %d: no flight record was left: %s", recorder.rank, error)
    if number in _previous:
        _previous[number](number, frame)
