"""Two threads in every order: at each line of a call in turn, another thread makes a second call."""

import linecache
import re
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

LIMIT = 30.0  # seconds
STAYS = 0.02
"""Seconds without progress after which a thread at such a line counts as waiting; slow ones meet in fewer orders."""
_LOCKS = re.compile(r"with .*(lock|_sending|_receiving|_reporting|_checking)|\.acquire\(|\.(wait|join)\(")
"""Lines that may wait for the first call."""


class Interleaving:
    """Each start interrupts the first call at a line of ``files`` that no earlier start has reached, once.

    There another thread makes the second call.  The first goes on when the second has ended, or is about to take a
    lock, which the first may hold.
    """

    def __init__(self, *files: str, finely: bool = False) -> None:
        self._files, self._finely, self._reached = files, finely, set[tuple[CodeType, int]]()

    def __call__(self, first: Callable[[], Any], second: Callable[[], Any]) -> bool:
        """Whether a line was left; raises what one of the calls raised."""
        line, errors, thread = None, list[BaseException](), None

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal line, thread
            here = frame.f_code, frame.f_lasti if self._finely else frame.f_lineno
            if event == "call":
                frame.f_trace_opcodes = self._finely
                return trace if frame.f_code.co_filename.endswith(self._files) else None
            if event == ("opcode" if self._finely else "line") and line is None and here not in self._reached:
                line = here
                self._reached.add(line)
                thread = self._start(second, errors)
            return trace

        sys.settrace(trace)
        try:
            first()
        finally:
            sys.settrace(None)
        if thread is not None:
            thread.join(LIMIT)
            assert not thread.is_alive(), f"the second call hangs at line {line}"
        if errors:
            raise errors[0]
        return line is not None

    @staticmethod
    def _start(call: Callable[[], Any], errors: list[BaseException]) -> threading.Thread:
        """Begin the second call; returns when it has ended, or stays at a line that takes a lock."""
        at_lock, moves, ended = threading.Event(), threading.Event(), threading.Event()

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if event == "line":
                moves.set()
                if _LOCKS.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno)):
                    moves.clear()
                    at_lock.set()
            return trace

        def run() -> None:
            sys.settrace(trace)
            try:
                call()
            except BaseException as error:
                errors.append(error)
            finally:
                sys.settrace(None)
                for event in (ended, moves, at_lock):
                    event.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while True:
            assert at_lock.wait(LIMIT)
            at_lock.clear()
            if ended.is_set() or not moves.wait(STAYS):
                return thread
