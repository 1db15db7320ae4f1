"""Guards of the calls of a communicator: against two threads at once, and for exceptions of signal handlers.

All ranks must call the collectives of a communicator in one order.  Threads that order their calls, by a lock, a queue
or ``join``, never overlap.  Collectives that overlap therefore have no order.  So a communicator stores the collective
in progress and its thread (``Communicator._active``).  If another thread starts a collective, it raises, with both
lines of the program.  Messages in host memory are matched by rank and tag, not by the order of calls.  Any thread may
wait for a Work.

Python runs signal handlers between any two instructions of the main thread, so their exceptions may end any step
half-way.  kos installs no handlers, and does not delay them.  The call raises such an exception unchanged, and its
communicator is aborted: ``interruptible`` wraps the methods of a communicator.  The core and ``Work`` call
``Communicator._interrupted`` themselves.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, TypeVar, cast

from kos.comm.work import Work
from kos.errors import CollectiveError, by_handler

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
    """A context in which a thread makes ``work``; ``Operations._start_work`` repeats these lines instead."""
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


Method = TypeVar("Method", bound=Callable[..., Any])
_CALLED = tuple(f"{_KOS}{name}" for name in ("comm", "cuda", "memory"))
"""The folders whose code runs in a call."""


def interruption(error: BaseException) -> BaseException | None:
    """The exception that a signal handler raised: ``error``, or one of its causes that kos has caught in this call."""
    found: BaseException | None = error
    seen: set[int] = set()  # a program's errors may be causes of each other
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        trace = found.__traceback__
        caught = trace is not None and trace.tb_frame.f_code.co_filename.startswith(_CALLED)
        if (caught or found is error) and by_handler(found):
            return found
        found = found.__cause__ or found.__context__
    return None


def interruptible(method: Method) -> Method:
    """Wrap a method of a communicator: abort the communicator if a signal handler raises within the method."""

    @functools.wraps(method)
    def call(comm: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(comm, *args, **options)
        except BaseException as error:
            comm._interrupted(method.__name__, error)
            raise

    return cast(Method, call)
