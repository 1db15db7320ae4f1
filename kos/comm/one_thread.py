"""Refuses two threads that call one communicator at once, with both lines of the program.

All ranks must call the collectives of a communicator in one order.  Threads that order their calls, by a lock, a queue
or ``join``, never overlap.  Collectives that overlap therefore have no order.  So a communicator stores
the collective in progress and its thread (``Communicator._active``).  If another thread starts a collective, it raises.

Messages in host memory are matched by rank and tag, not by the order of calls.  Any thread may wait for a Work.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

from kos.comm.work import Work
from kos.errors import CollectiveError

_KOS, _PYTHON = (f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], sysconfig.get_path("stdlib")))


def check_one_thread(comm: Any, work: Work[Any]) -> None:
    """Raise CollectiveError, on all ranks, if a thread makes ``work`` while another is in a collective of ``comm``."""
    active = comm._active
    if active is None:
        return
    # While the core launches a call, it stores only the Work.  The thread cannot make another call meanwhile.
    owner, other = active if type(active) is tuple else (None, active)
    if owner == get_ident():  # a signal handler runs within the thread's call
        return
    error = _two_threads_error(comm, f"{other.text} at {other.call_site}", work)
    backend = other.backend
    with comm.backend.engine.lock if backend.device is None else backend.shared.lock:
        if backend.failures.first is None:
            backend.to_error(other, error)
        backend.failures.first = error.copy()
    raise error


def check_batch(comm: Any, owner: int, work: Work[Any]) -> None:
    """Raise CollectiveError if ``work`` would join an open batch of another thread, ``owner``; nothing was sent."""
    if owner != get_ident():
        line = program_line(sys._current_frames().get(owner))
        raise _two_threads_error(comm, f"a batch at {line}", work)


@contextmanager
def one_thread(comm: Any, work: Work[Any]) -> Iterator[None]:
    """A context in which a thread makes ``work``; ``Prepared.start`` repeats these lines instead."""
    check_one_thread(comm, work)
    comm._active = get_ident(), work
    try:
        yield
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


def _two_threads_error(comm: Any, first: str, work: Work[Any]) -> CollectiveError:
    """The error of a second thread that makes ``work``; ``first`` is the call of the other one, with its line."""
    rank = comm.rendezvous.failures.world[comm.rank]
    second = f"{work.name}{work.arguments} at {program_line(sys._getframe())}"
    remedy = "order their calls, or give each thread a communicator of its own (comm.duplicate())"
    text = f"rank {rank}: two threads call {comm.name} at once: {first} and {second}; {remedy}"
    return CollectiveError(text, ranks=[rank])
