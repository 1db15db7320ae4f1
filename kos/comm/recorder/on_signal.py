"""Dumps of the flight recorder when a signal arrives."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

from kos.comm.recorder import recorders
from kos.environment import KOS_RECORDER_SIGNAL
from kos.errors import InvalidArgument

log = logging.getLogger(__name__)
_previous: dict[int, Any] = {}
_TERMINATING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def dump_on_signal(number: int) -> None:
    """Dump every recorder of this process when signal ``number`` arrives, then call the previous handler.

    Without a previous handler, SIGTERM, SIGHUP and SIGQUIT then end the process.

    Raises InvalidArgument outside of the main thread, the only one that installs handlers.  ``kos.init`` calls it for
    the signal of KOS_RECORDER_SIGNAL (``USR2`` or ``12``).  Python runs handlers between its own instructions: a rank
    that is stuck inside a C function writes no dump.
    """
    previous, thread = signal.getsignal(number), threading.current_thread()
    if previous is _on_signal:
        return
    if thread is not threading.main_thread():
        raise InvalidArgument(f"dump_on_signal: expected a call of the main thread, got one of {thread.name}")
    _previous[number] = previous
    signal.signal(number, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    for recorder in list(recorders):
        recorder.try_dump(f"signal {signal.Signals(number).name}", always=True)
    if callable(previous := _previous[number]):
        previous(number, frame)
    elif previous is signal.SIG_DFL and number in _TERMINATING:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def dump_on_env_signal() -> None:
    """``dump_on_signal`` for KOS_RECORDER_SIGNAL; outside of the main thread, a warning if that has not called it.

    Raises InvalidArgument for an invalid signal.
    """
    wanted = KOS_RECORDER_SIGNAL.get()
    if not wanted:
        return
    known = {name: s for s in signal.Signals for name in (str(s.value), s.name, s.name.removeprefix("SIG"))}
    number = known.get(wanted.upper())
    if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
        expected = "a signal that can be caught, such as USR2"
        raise InvalidArgument(f"KOS_RECORDER_SIGNAL: expected {expected}, got {wanted!r}")
    if threading.current_thread() is threading.main_thread():
        dump_on_signal(number)
    elif signal.getsignal(number) is not _on_signal:
        what = f"kos.comm.recorder.on_signal.dump_on_signal({number:d}) in the main thread"
        log.warning("KOS_RECORDER_SIGNAL=%s: the signal writes no dump until the program calls %s", wanted, what)
