"""Stopping on request.  A signal reaches one rank; all stop together (``failures.stop_together``).

Imports nothing that takes time: a signal that comes before ``listen`` kills.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kos.errors import KosError

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
"""Signals that stop a run: mpirun forwards SIGUSR1 and then waits, Ctrl-C reaches a single rank."""

KILLED = (
    "mpirun kills its ranks half a second after Ctrl-C or the loss of a rank"
    " (with SIGUSR1 to mpirun, or with make train, it waits)"
)
"""What Open MPI does after it has sent SIGTERM to its ranks."""


STOP, LEAVE = 1, 2
"""What a signal asks for: that the run stops, or with ``--elastic`` that this rank leaves it and the others go on."""


class Stopped(KosError):
    """Raised on all ranks at once, where nothing is half done."""

    on_every_rank = True


class Left(KosError):
    """Raised on a rank that leaves the run, as it was asked to; the others go on."""

    code = 75
    """The exit code, EX_TEMPFAIL of sysexits.h: whoever started the rank may start it again."""


class Stop:
    """Whether this rank was asked to stop.  A second signal ends the process."""

    def __init__(self) -> None:
        self.asked = self._at_once = False
        self.number = SIGNALS[0]  # of the signal
        self.leaves = False
        """Whether this rank may leave while others go on."""
        self.plan = "stopping before the first step"
        """What a stop does now."""
        self.advice = ""
        """How to resume; printed if mpirun is about to kill the ranks."""
        self.advised = False  # whether it was printed
        self.listens = False
        """Whether this process handles the signals."""

    @property
    def wish(self) -> int:
        """What was asked for: nothing (0), STOP or LEAVE. Ctrl-C always asks for the end of the run."""
        return (LEAVE if self.leaves and self.number != signal.SIGINT else STOP) if self.asked else 0

    def listen(self) -> None:
        """Handle the signals, in the main thread: Python allows no other one to. Elsewhere they stay the caller's."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.listens = True
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def announce(self, say: Callable[[str], object]) -> None:
        """Say ``plan`` as soon as a signal comes, from a thread: Python's handler waits until what computes returns."""
        if not self.listens:
            return

        def watch() -> None:
            while (number := os.read(reader, 1)[0]) not in SIGNALS:
                pass
            killed = number != signal.SIGUSR1 and "OMPI_COMM_WORLD_SIZE" in os.environ
            self.advised = killed and bool(self.advice)
            say(f"kos: {self.plan}; {KILLED + self.advice if killed else 'Ctrl-C again to end now'}")

        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=watch, name="kos-signals", daemon=True).start()
        if self.asked:
            os.write(writer, bytes([self.number]))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked, self.number = True, signal.Signals(number)
        self.ignore()
        self._check()

    @staticmethod
    def ignore() -> None:
        """Handle no more signals: the next one ends the process."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _check(self) -> None:
        if self.wish == STOP and self._at_once:  # a rank that leaves does so after the first step
            raise Stopped("asked to stop")

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What may stop at any moment; inside of ``together``, which notifies the other ranks."""
        self._at_once = True
        try:
            self._check()
            yield
        finally:
            self._at_once = False
