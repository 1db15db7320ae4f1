"""The watchdog: one daemon thread of a process that finds failures while the program waits or computes outside kos.

Every ``TICK`` seconds it calls ``watch`` on each GPU backend, which checks for dead ranks, errors of libraries and
passed deadlines.  It also calls ``watch`` on the status of this host, which publishes the rank's last call.

A communicator that fails aborts its operations in flight, so that streams drain, and its next use raises the error.
The watchdog also calls the callbacks of ``on_failure``, once each, for any failure.  For them it also checks backends
for host memory (``find_failure``).  There the next call ends the operations in flight.

Calls take no lock and do not wake this thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from kos.errors import KosError

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two checks."""

Callback = Callable[[KosError], None]


_lock = threading.RLock()  # reentrant: the garbage collector may remove a backend while this thread adds one
_checking = threading.Lock()  # held while ``find_failure`` runs
watched: weakref.WeakSet[Any] = weakref.WeakSet()
"""The backends that the thread checks."""
_callbacks: weakref.WeakKeyDictionary[Any, list[Callback]] = weakref.WeakKeyDictionary()
_calling: weakref.WeakSet[Any] = weakref.WeakSet()  # whose callbacks are being called
_logged: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()  # errors of checks, by backend
_thread: threading.Thread | None = None
_stop = threading.Event()


def add(backend: Any) -> None:
    """Call ``backend.watch()`` every ``TICK`` seconds until the backend, or status, is removed or garbage-collected.

    The first one starts the thread.
    """
    with _lock:
        watched.add(backend)
        _start()


def remove(backend: Any) -> None:
    """Stop watching ``backend``."""
    with _lock:
        watched.discard(backend)


def on_failure(backend: Any, callback: Callback) -> None:
    """Call ``callback(error)`` once, on the watchdog's thread, when ``backend`` has failed."""
    with _lock:
        _callbacks.setdefault(backend, []).append(callback)
        _start()


def has_callbacks(backend: Any) -> bool:
    """Whether ``backend`` has callbacks of ``on_failure`` that are not called yet, or are being called."""
    return backend in _callbacks or backend in _calling  # in this order: ``_tick`` moves it from one to the other


def wait_for_check() -> None:
    """Wait while a backend is checked for ``on_failure``: the caller is about to free its backend's memory."""
    with _checking:
        pass


def _start() -> None:
    global _thread
    if _thread is None:
        _stop.clear()
        atexit.register(_end)
        _thread = threading.Thread(target=_run, name="kos-watchdog", daemon=True)
        _thread.start()


def _end() -> None:
    """Stop at the end of the process: other ranks may end too, which is no failure."""
    global _thread
    thread, _thread = _thread, None
    _stop.set()
    if thread is not None and thread is not threading.current_thread():
        thread.join(1.0)


def _forked() -> None:
    """Reset in a forked process, which is not a rank."""
    global _thread, _lock, _checking, _stop
    _thread, _lock, _checking, _stop = None, threading.RLock(), threading.Lock(), threading.Event()  # it may hold them
    watched.clear()
    _callbacks.clear()
    _calling.clear()


os.register_at_fork(after_in_child=_forked)


def _run() -> None:
    while not _stop.wait(TICK):
        _tick()


def check_others() -> None:
    """Check the GPU backends while one of them waits on the watchdog's thread.  On other threads: do nothing."""
    if threading.current_thread() is _thread:
        _watch()


def _watch() -> None:
    with _lock:
        backends = list(watched)
    for backend in backends:
        try:
            backend.watch()
        except Exception as error:  # a defect of kos must not end the thread
            _log(backend, error)


def _log(backend: Any, error: Exception) -> None:
    """Log an error of a check the first time: each tick may raise the same one."""
    logged, text = _logged.setdefault(backend, set()), f"{type(error).__name__}: {error}"
    if text not in logged:
        logged.add(text)
        log.error("the watchdog could not check %s", backend, exc_info=error)


def _tick() -> None:
    _watch()
    with _lock:
        waiting = list(_callbacks)
    for backend in waiting:
        failure = None
        with _checking:
            try:
                failure = backend.find_failure()
                if failure is not None and backend.failures.first is None:
                    backend.failures.status.post_failure(failure)  # the cause, if a callback aborts the communicator
            except Exception as error:
                _log(backend, error)
        if failure is None:
            continue
        with _lock:
            _calling.add(backend)
            callbacks = _callbacks.pop(backend, [])
        for callback in callbacks:
            try:
                callback(failure)
            except BaseException:  # such as that of sys.exit, which would end this thread
                log.exception("on_failure: %s raised", callback)
        _calling.discard(backend)
