"""Refuses calls of a Publisher or Subscriber from a second thread, after ``close``, and in a forked process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from kos.comm.call_guards import program_line
from kos.errors import TransferError


class OneCaller:
    """Base class of Publisher and Subscriber.  Only one thread at a time may call such an object.

    ``what`` names the object in errors, for example "publisher trainer".
    """

    def __init__(self, what: str) -> None:
        self._what, self._process, self._closed = what, os.getpid(), False
        self._in_call, self._caller = threading.Lock(), ("", 0)  # the method that is being called, and the thread

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error("got a closed one")

    def _closed_error(self, got: str) -> TransferError:
        return TransferError(f"{self._what}: expected an open {type(self).__name__.lower()}, {got}")

    @contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        """A context for the body of the method ``name``.  Raises TransferError if the call is refused."""
        if os.getpid() != self._process:
            remedy = f"make a new {type(self).__name__} in this process"
            raise TransferError(f"{self._what}: this process was forked from the one that made it; {remedy}")
        if not self._in_call.acquire(blocking=False):
            raise self._two_callers_error(name)
        self._caller, was_closed = (name, threading.get_ident()), self._closed
        try:
            yield
        except Exception as error:
            if self._closed and not was_closed:
                raise self._closed_error(f"got one that another thread closed during {name}") from error
            raise
        finally:
            self._in_call.release()
            if self._closed:
                self._free_if_idle()

    def _two_callers_error(self, name: str) -> TransferError:
        first, thread = self._caller
        lines = [program_line(frame) for frame in (sys._current_frames().get(thread), sys._getframe())]
        who = "two threads call it at once"
        if thread == threading.get_ident():
            who = "a signal handler and the program call it at once"
        calls = f"{first} at {lines[0]} and {name} at {lines[1]}"
        remedy = f"order their calls, or give each thread a {type(self).__name__} of its own"
        return TransferError(f"{self._what}: {who}: {calls}; {remedy}")

    def close(self) -> None:
        """Close the object, if it is open.  Does nothing in a forked process, in which kos has closed its sockets."""
        if os.getpid() == self._process and not self._closed:
            self._closed = True
            self._interrupt()
            self._free_if_idle()

    def _free_if_idle(self) -> None:
        """Free the resources, unless a thread is in a call: that thread frees them when its call ends."""
        if self._in_call.acquire(blocking=False):
            try:
                self._free()
            finally:
                self._in_call.release()

    def _interrupt(self) -> None:
        """Make a call that another thread is in stop waiting for other processes."""
        raise NotImplementedError

    def _free(self) -> None:
        """Close the connections, and free the memory.  May be called again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
