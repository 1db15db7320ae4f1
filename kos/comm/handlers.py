"""Exceptions of signal handlers within a call: the call raises them unchanged, and its communicator is aborted.

Python runs handlers between any two instructions of the main thread, so their exceptions may end any step half-way.
kos installs no handlers, and does not delay them.  ``interruptible`` wraps the methods of a communicator.  The core
and ``Work`` call ``Communicator._interrupted`` themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from kos.errors import by_handler

Method = TypeVar("Method", bound=Callable[..., Any])
_PACKAGE = Path(__file__).parents[1]
_CALLED = tuple(str(_PACKAGE / name) for name in ("comm", "cuda", "memory"))
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
