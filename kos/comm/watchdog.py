"""The watchdog: one daemon thread of a process that finds failures while the program waits for a GPU, not for kos.

A few times a second it checks, for each communicator on a GPU, whether a rank died, a library reported an error or a
deadline passed (``watch``).  A communicator that fails ends what it has in flight, so that streams
drain, and its next use raises the error.  The watchdog also calls the functions of ``on_failure``, once each,
whoever found the failure.

Nothing on the path of a call takes a lock or wakes this thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from kos.errors import KosError

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two looks."""

Callback = Callable[[KosError], None]


class Failing(Protocol):
    """Any backend."""

    broken: KosError | None


class Watched(Protocol):
    """A backend that the watchdog looks after."""

    def watch(self) -> None:
        """Look for failures and act on them.  Called by the watchdog's thread, a few times a second."""


_lock = threading.RLock()  # the collector may remove a dropped backend while this thread adds one
_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_callbacks: weakref.WeakKeyDictionary[Failing, list[Callback]] = weakref.WeakKeyDictionary()
_thread: threading.Thread | None = None
_stop = threading.Event()


def add(backend: Watched) -> None:
    """Look after ``backend`` until it is removed or dropped; the first one starts the thread."""
    with _lock:
        _watched.add(backend)
        _start()


def remove(backend: Watched) -> None:
    """``backend`` is closed."""
    with _lock:
        _watched.discard(backend)


def on_failure(backend: Failing, callback: Callback) -> None:
    """Have ``callback(error)`` called once, on the watchdog's thread, when ``backend`` has failed."""
    with _lock:
        _callbacks.setdefault(backend, []).append(callback)
        _start()


def _start() -> None:
    global _thread
    if _thread is None:
        _stop.clear()
        atexit.register(_end)
        _thread = threading.Thread(target=_run, name="kos-watchdog", daemon=True)
        _thread.start()


def _end() -> None:
    """The process ends: other ranks may end too, and that is no failure."""
    global _thread
    thread, _thread = _thread, None
    _stop.set()
    if thread is not None and thread is not threading.current_thread():
        thread.join(1.0)


def _forked() -> None:
    """A process that a rank forks is no rank."""
    global _thread
    _thread = None
    _watched.clear()
    _callbacks.clear()


os.register_at_fork(after_in_child=_forked)


def _run() -> None:
    while not _stop.wait(TICK):
        _tick()


def _tick() -> None:
    with _lock:
        watched = list(_watched)
    for backend in watched:
        try:
            backend.watch()
        except Exception:  # a defect of ours, which must not end the thread
            log.exception("the watchdog could not look after %s", backend)
    with _lock:
        failed = [(backend, backend.broken) for backend in _callbacks if backend.broken is not None]
        due = [(error, _callbacks.pop(backend)) for backend, error in failed]
    for error, callbacks in due:
        for callback in callbacks:
            try:
                assert error is not None
                callback(error)
            except Exception:
                log.exception("on_failure: %s raised", callback)
