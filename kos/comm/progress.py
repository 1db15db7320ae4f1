"""What polls operations in flight beside ``Work.wait``: waits for the first of several, and two threads."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any, TypeVar

from kos.comm.arguments import check_timeout
from kos.comm.waits import Backoff
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
    report_at, reported = time.monotonic() + _LONGEST_PAUSE, False
    try:
        while True:
            mark = waiter.mark()
            over, now = completed(works), time.monotonic()
            if over or now >= deadline:
                return over
            if first is not None and now > report_at:
                with first.backend.engine.lock:
                    first.backend.failures.show_wait(first.backend.late(first))
                report_at, reported = now + _LONGEST_PAUSE, True
            waiter.pause(mark, min(deadline - now, _LONGEST_PAUSE))
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


class Watcher:
    """Calls back when operations are over, on one thread of the process, which polls them."""

    def __init__(self) -> None:
        self._watched: list[tuple[Any, Callable[[Any], object]]] = []
        self._event, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def add(self, work: Any, call: Callable[[Any], object]) -> None:
        """Make ``call(work)`` once ``work`` is over."""
        self._watched.append((work, call))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kos-watcher", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # runs before the backends' exit handlers, which were registered earlier
        self._event.set()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._event.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._event.wait()
            self._event.clear()
            last = time.monotonic()
            while self._watched and not self._closed:
                begins = time.monotonic()
                if self._call_back(list(self._watched)) or self._event.is_set():
                    self._event.clear()
                    last = begins
                least = _SLEEP_SECONDS if begins < last + _LONG_AFTER else _LONG_SLEEP
                time.sleep(max(least, time.monotonic() - begins))  # the program gets Python's lock half of the time

    def _call_back(self, watched: list[tuple[Any, Callable[[Any], object]]]) -> bool:
        """Make the calls of those that are over; whether there were any."""
        works = {work: None for work, _ in watched}
        try:
            works = dict.fromkeys(completed(works))
        except Exception:  # of a backend: each ``wait`` meets it too
            log.exception("the watcher could not poll")
        ended = [each for each in watched if each[0] in works]
        for each in ended:
            self._watched.remove(each)
            try:
                each[1](each[0])
            except Exception:
                log.exception("the callback of %s raised", each[0])
        return bool(ended)


_watcher = Watcher()


def watch(work: Any, call: Callable[[Any], object]) -> None:
    """Make ``call(work)`` on the watcher's thread once ``work`` is over.  MPI must allow this thread to call it."""
    if not work.backend.on_gpu:
        work.backend.transport.check_threads()
    _watcher.add(work, call)


def _forget() -> None:
    """In a forked process, which has no such thread, and whose operations continue in the process of the rank."""
    global _watcher
    _watcher = Watcher()


os.register_at_fork(after_in_child=_forget)
