"""Polling until a deadline, with backoff, and blocking calls in daemon threads, with a timeout."""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as await_futures
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

CHECK_SECONDS = 0.1  # between two calls of ``look``
EXIT_SECONDS = 5.0
_awaited = set[Future[Any]]()  # by the exit of the process


class Backoff:
    """The wait of a polling loop without events: spins, then yields the core, then sleeps.

    Ranks often outnumber cores, so a waiting rank must let the awaited rank run; with ``crowded`` it does so at once.
    ``block(seconds, polled)``, if given, may sleep until an event instead, and returns whether it did.  ``polled`` is
    True after many polls.
    """

    __slots__ = ("_block", "_polls", "_sleep_at")
    SPINS, YIELDS, SLEEP_AFTER, SLEEP = 50, 200, 1.0, 0.0005

    def __init__(self, crowded: bool = False, block: Callable[[float | None, bool], bool] | None = None) -> None:
        self._block = block
        self._polls = self.SPINS if crowded else 0  # spinning may keep the awaited rank from running
        self._sleep_at = 0.0

    def mark(self) -> int:
        return 0

    def pause(self, mark: int = 0, seconds: float | None = None) -> None:
        self._polls += 1
        if self._block is not None and self._block(seconds, self._polls > self.YIELDS):
            return
        if self._polls <= self.SPINS:
            return
        if self._polls <= self.YIELDS:
            os.sched_yield()
            return
        now = time.monotonic()
        if not self._sleep_at:
            self._sleep_at = now + self.SLEEP_AFTER
        if now < self._sleep_at:
            os.sched_yield()
        else:
            time.sleep(self.SLEEP)


def wait(
    poll: Callable[[], T], deadline: float, look: Callable[[], object] = int, waiter: Any = 0.001,
    every: float = CHECK_SECONDS,
) -> T:  # fmt: skip
    """Poll until the result is true; returns it, or the last one after ``deadline``, a time of ``time.monotonic``.

    Every ``every`` seconds, ``look`` is called, which may raise.  Between two polls, this function sleeps ``waiter``
    seconds, or ``waiter`` waits: a function, or an object as ``Backend.waiter`` returns.  Once ``look`` has returned
    False, that object waits for an event, and not for the next ``look``.
    """
    if isinstance(waiter, float):
        waiter = partial(time.sleep, waiter)
    look_at, mark, awaits_look = time.monotonic() + every, getattr(waiter, "mark", int), True
    while True:
        since = mark()
        if (found := poll()) or (now := time.monotonic()) > deadline:
            return found
        if now > look_at:
            awaits_look = look() is not False
            look_at = now + every
        if callable(waiter):
            waiter()
        else:
            until = min(deadline, look_at) if awaits_look else deadline
            waiter.pause(since, None if until == math.inf else until - now)


def start_in_thread(call: Callable[[], T], name: str | None = None) -> Future[T]:
    """Begin a call that may never return, on a daemon thread called ``name``."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def wait_at_exit(future: Future[Any]) -> None:
    """Let the exit of the process wait until ``future`` is done, and the callbacks that it has by now have run.

    It waits for all such futures together, at most ``EXIT_SECONDS``.
    """
    _awaited.add(future)
    future.add_done_callback(_awaited.discard)


@atexit.register  # early, and so it runs after the handlers that stop other threads
def _wait_at_exit() -> None:
    wait(lambda: not _awaited, time.monotonic() + EXIT_SECONDS)


os.register_at_fork(after_in_child=lambda: _awaited.clear())  # whose threads are not in the child


def call_with_timeout(call: Callable[[], T], timeout: float | None, look: Callable[[], None] | None = None) -> list[T]:
    """Run a call that has no timeout: returns a list of its result, or an empty list after ``timeout`` seconds.

    Meanwhile ``look`` is called, which may raise.
    """
    future, deadline = start_in_thread(call), math.inf if timeout is None else time.monotonic() + timeout
    while not await_futures([future], timeout if look is None else CHECK_SECONDS).done:
        if time.monotonic() >= deadline:
            return []
        if look is not None:
            look()
    return [future.result()]
