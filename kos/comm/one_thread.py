"""Detects two threads that call one communicator at once, and reports both lines of the program.

All ranks must call the collectives of a communicator in one order.  Threads that order their calls, by a lock, a queue
or ``join``, never overlap.  Collectives that overlap therefore have no order.  So a communicator keeps the collective
that a thread is in (``Communicator._active``), and a thread that finds another thread's collective there raises.
This costs two stores and two comparisons for each call, 0.04 us.

Messages in host memory are matched by rank and tag, not by the order of calls.  Any thread may wait for a Work.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from kos.comm.work import Work
from kos.errors import CollectiveError, CollectiveMismatch

_HERE = str(Path(__file__).parent)
_KOS, _PYTHON = (f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], sysconfig.get_path("stdlib")))
GRACE_SECONDS = 0.1
"""Seconds that a call which differs from those of other ranks waits for a second thread of this rank: it may be the
cause."""


def check_one_thread(comm: Any, work: Work[Any]) -> None:
    """Raise CollectiveError, on all ranks, if a thread makes ``work`` while another is in a collective of ``comm``."""
    other: Work[Any] | None = comm._active
    if other is None or _is_made_in(sys._getframe(1), other):  # a signal handler runs within the thread's call
        return
    error = _two_threads_error(comm, f"{other.text} at {other.call_site}", work)
    if error is None:
        return
    backend = other.backend
    with comm.backend.engine.lock if backend.device is None else backend.shared.lock:
        if backend.failures.first is None:
            backend.to_error(other, error)
        backend.failures.first, comm._two_threads = error.copy(), error
    raise error


def check_batch(comm: Any, owner: int, work: Work[Any]) -> None:
    """Raise CollectiveError if ``work`` would join an open batch of another thread, ``owner``; nothing was sent."""
    if owner != threading.get_ident():
        error = _two_threads_error(comm, f"a batch at {program_line(sys._current_frames().get(owner))}", work)
        if error is not None:
            raise error


def raise_if_two_threads(comm: Any) -> None:
    """After a CollectiveMismatch, raise CollectiveError if another thread of this rank calls ``comm`` now.

    Threads that begin in different orders on different ranks cause such a mismatch.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    if any(not each.name.startswith("kos-") for each in others):
        while comm._two_threads is None and time.monotonic() < deadline:
            time.sleep(0.001)
    if comm._two_threads is not None:
        raise comm._two_threads.copy() from None


@contextmanager
def one_thread(comm: Any, work: Work[Any]) -> Iterator[None]:
    """A context in which a thread makes ``work``; ``Prepared.start`` repeats these lines instead."""
    check_one_thread(comm, work)
    comm._active = work
    try:
        yield
    except CollectiveMismatch:
        raise_if_two_threads(comm)
        raise
    finally:
        comm._active = None


def program_line(frame: FrameType | None) -> str | None:
    """``file:line`` of the innermost frame outside kos and Python's library; None if there is none."""
    while frame is not None and in_library(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def in_library(file: str) -> bool:
    """Whether ``file`` is part of kos or of Python's library; installed packages are not."""
    return file.startswith(_KOS) or (file.startswith(_PYTHON) and "site-packages" not in file)


def _two_threads_error(comm: Any, first: str, work: Work[Any]) -> CollectiveError | None:
    """The error of the calls of both threads, which ``spawn`` raises too; None where it is not ``strict``."""
    threads = comm.rendezvous.threads
    watch = None if threads is None else threads.world.watch
    if watch is not None and not watch.strict:
        return None
    rank = comm.rendezvous.failures.world[comm.rank]
    second = f"{work.name}{work.arguments} at {program_line(sys._getframe())}"
    remedy = "order their calls, or give each thread a communicator of its own (comm.duplicate())"
    text = f"rank {rank}: two threads call {comm.name} at once: {first} and {second}; {remedy}"
    error = CollectiveError(text, ranks=[rank])
    if watch is not None:
        watch.two_threads = watch.two_threads or error
    return error


def _is_made_in(frame: FrameType | None, work: Work[Any]) -> bool:
    """Whether ``work`` is being made by the thread of ``frame``."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_HERE) and any(each is work for each in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False
