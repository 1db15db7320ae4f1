"""What polls operations in flight beside ``Work.wait``: waits for the first of several, and two threads."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import inf
from typing import Any, TypeVar

from kos.comm.arguments import check_timeout
from kos.comm.waits import Backoff, wait
from kos.errors import InvalidArgument, KosError

log = logging.getLogger(__name__)

W = TypeVar("W")

_SLEEP_SECONDS = 50e-6  # between two polls of a thread
_LONG_SLEEP, _LONG_AFTER = 1e-3, 0.01  # of the watcher, and after so many seconds in which no operation ends
_LONGEST_PAUSE = 0.02  # of ``wait_any``, which then checks timeouts and reports its wait


def completed(works: Iterable[Any]) -> list[Any]:
    """Those of ``works`` that are complete or have failed.  Each engine is polled once, and timeouts are checked."""
    polled, over = set[Any](), []
    for work in works:
        if work.backend.on_gpu:
            try:
                is_over = work.done()
            except KosError:
                is_over = True
        else:
            if (engine := work.backend.engine) not in polled:
                polled.add(engine)
                engine.poll()
            if not (is_over := work.state != "in flight"):
                work.check_timeout()
        if is_over:
            over.append(work)
    return over


def wait_any(works: Iterable[W], timeout: float | None = None) -> W | None:
    """Wait until one of ``works`` is complete or has failed, and return it: its ``wait()`` does not block.

    They may be of several communicators.  Each has the timeout of its operation, counted from this call.  After
    ``timeout`` seconds, if given, returns None, and the operations go on.  Raises InvalidArgument without works.

        work = kos.wait_any(works)
    """
    several: list[Any] = list(works)
    if not several:
        raise InvalidArgument("works: expected at least one Work, got none")
    deadline = inf if timeout is None else time.monotonic() + check_timeout(timeout)
    return next(iter(_first_completed(several, deadline)), None)


def as_completed(works: Iterable[W]) -> Iterator[W]:
    """Yield each of ``works`` once it is complete or has failed, in the order in which they end.

    They may be of several communicators.  The timeouts are those of ``wait_any``.

        for work in kos.as_completed(works):
            print(work.wait())
    """
    left: list[Any] = list(works)
    while left:
        over = _first_completed(left, inf)
        left = [work for work in left if work not in over]
        yield from over


def _first_completed(works: list[Any], deadline: float) -> list[Any]:
    """Wait until one of ``works`` is over; returns those that are, none after ``deadline``."""
    backends = {work.backend for work in works}
    backend, = backends if len(backends) == 1 else (None,)
    waiter = Backoff() if backend is None or backend.on_gpu else backend.waiter()
    first = next((work for work in works if not work.backend.on_gpu), None)
    reported = False

    def report() -> None:
        nonlocal reported
        if first is not None:
            reported = True
            with first.backend.engine.lock:
                first.backend.failures.show_wait(first.backend.late(first))

    try:
        return wait(partial(completed, works), deadline, report, waiter, _LONGEST_PAUSE)
    finally:
        if reported:
            first.backend.failures.show_wait(None)  # type: ignore[union-attr]


class ProgressThread:
    """Advances the operations of an engine while the program computes.

    It sleeps while no operation is in flight, and while the program waits, which polls itself: on a host whose cores
    are all in use, a second poll would keep the awaited rank from running.  It also sleeps before each poll, so that
    the program gets Python's lock, and so that an operation for which the program waits at once is left to it.  It
    starts with the first operation in flight.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._event, self._closed, self._process = engine, threading.Event(), False, os.getpid()
        self._asleep = True  # until ``wake``
        self.paused = set[object]()  # the tokens of the program's waits
        self._thread = threading.Thread(target=self._run, name="kos-progress", daemon=True)
        engine.thread = self
        atexit.register(self.close)  # runs before the backend's exit handlers, which were registered earlier

    def wake(self) -> None:
        """Poll from now on, unless the program waits.  The caller holds the engine's lock."""
        if self._asleep and not self.paused:
            if self._thread.ident is None:
                self._thread.start()
            self._asleep = False
            self._event.set()

    def close(self) -> None:
        """End the thread; operations in flight then advance only while the program waits."""
        if os.getpid() != self._process:
            return  # a forked process has no such thread, and the event's lock may stay held there
        self._engine.thread, self._closed = None, True
        self._event.set()
        if self._thread.ident is not None:
            self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        engine, asleep = self._engine, True
        while not self._closed:
            if asleep:
                self._event.wait()
                self._event.clear()
            time.sleep(_SLEEP_SECONDS)
            with engine.lock:  # a program that pauses polls after this
                self._asleep = asleep = bool(self.paused) or not engine.poll()


# The watcher: a thread of the process that polls the Works it watches, and calls back when they are over.

_watched: list[tuple[Any, Callable[[Any], object]]] = []
_new_work = threading.Event()
_watcher: threading.Thread | None = None
_ends = False


def watch(work: Any, call: Callable[[Any], object]) -> None:
    """Make ``call(work)`` on the watcher's thread once ``work`` is over.  MPI must allow this thread to call it."""
    global _watcher
    if not work.backend.on_gpu:
        work.backend.transport.check_threads()
    _watched.append((work, call))
    if _watcher is None:
        _watcher = threading.Thread(target=_watch, name="kos-watcher", daemon=True)
        _watcher.start()
        atexit.register(_end_watcher)  # runs before the backends' exit handlers, which were registered earlier
    _new_work.set()


def _watch() -> None:
    while not _ends:
        _new_work.wait()
        last = time.monotonic()
        while _watched and not _ends:
            begins = time.monotonic()
            if _call_back([*_watched]) or _new_work.is_set():
                _new_work.clear()
                last = begins
            least = _SLEEP_SECONDS if begins < last + _LONG_AFTER else _LONG_SLEEP
            time.sleep(max(least, time.monotonic() - begins))  # the program gets Python's lock half of the time
        _new_work.clear()
        if _watched:  # added since the list was empty
            _new_work.set()


def _call_back(watched: list[tuple[Any, Callable[[Any], object]]]) -> bool:
    """Make the calls of those that are over; whether there were any."""
    over = [work for work, _ in watched]
    try:
        over = completed(over)
    except Exception:  # of a backend: each ``wait`` meets it too
        log.exception("the watcher could not poll")
    found = {*map(id, over)}
    for each in watched:
        work, call = each
        if id(work) in found:
            _watched.remove(each)
            try:
                call(work)
            except Exception:
                log.exception("the callback of %s raised", work)
    return bool(found)


def _end_watcher() -> None:
    global _ends
    _ends = True
    _new_work.set()
    if _watcher is not None:
        _watcher.join()


def _forget() -> None:
    """In a forked process, which has no such thread, and whose operations continue in the process of the rank."""
    global _watched, _new_work, _watcher
    _watched, _new_work, _watcher = [], threading.Event(), None


os.register_at_fork(after_in_child=_forget)
