"""Failures of one rank fail all ranks: with the same error, printed once, and no rank is left waiting.

A request to stop is such an end too.  A signal reaches one rank; all stop together (``stop_together``).  This file
imports nothing that takes time: a signal that comes before ``Stop.listen`` kills.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import kos.errors
from kos.errors import ConfigError, KosError, SettingError, in_words

if TYPE_CHECKING:
    from kos.comm.communicator import Communicator

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
        self.requested = self._at_once = False
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
        self._before: dict[signal.Signals, Any] = {}  # what handled them
        self._wakeup, self._writer = -1, cast("int | None", None)  # file descriptors: before, and of ``announce``

    @property
    def stop_request(self) -> int:
        """What was asked for: nothing (0), STOP or LEAVE. Ctrl-C always asks for the end of the run."""
        return (LEAVE if self.leaves and self.number != signal.SIGINT else STOP) if self.requested else 0

    def listen(self, until_restored: bool = False) -> None:
        """Handle the signals, in the main thread: Python allows no other one to. Elsewhere they stay the caller's.

        A second signal ends the process; or with ``until_restored``, does what it did before.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self.listens = True
        before = {number: signal.signal(number, self.request) for number in SIGNALS}
        self._before = before if until_restored else {}

    def restore(self) -> None:
        """Give back the signals that ``listen`` has taken."""
        self.ignore()
        if self._writer is not None:
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._writer)
        self.listens, self._writer = False, None

    def announce(self, say: Callable[[str], object]) -> None:
        """Say ``plan`` as soon as a signal comes, from a thread: Python's handler waits until what computes returns."""
        if not self.listens:
            return

        def watch() -> None:
            said = False
            while read := os.read(reader, 1):
                if said or read[0] not in SIGNALS:
                    continue
                said, killed = True, read[0] != signal.SIGUSR1 and "OMPI_COMM_WORLD_SIZE" in os.environ
                self.advised = killed and bool(self.advice)
                say(f"kos: {self.plan}; {KILLED + self.advice if killed else 'Ctrl-C again to end now'}")
            os.close(reader)

        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._wakeup, self._writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False), writer
        threading.Thread(target=watch, name="kos-signals", daemon=True).start()
        if self.requested:
            os.write(writer, bytes([self.number]))

    def request(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler: record the request. The next signal is no longer handled, as ``ignore`` says.

        Raises Stopped in a block of ``at_once`` if the signal asks this rank to stop.
        """
        self.requested, self.number = True, signal.Signals(number)
        self.ignore()
        self._check()

    def ignore(self) -> None:
        """Handle no more signals: the next one ends the process, or does what it did before ``listen``."""
        for number in SIGNALS if self.listens else ():
            signal.signal(number, self._before.get(number) or signal.SIG_DFL)

    def _check(self) -> None:
        if self.stop_request == STOP and self._at_once:  # a rank that leaves does so after the first step
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


PATIENCE = 3600.0
"""Seconds that ranks wait for one that reads, writes or computes alone: a large checkpoint takes minutes.
That it died is seen at once all the same."""

T = TypeVar("T")
Error = TypeVar("Error", bound=KosError)

_log = logging.getLogger(__name__)


def alone(comm: Communicator, action: Callable[[], T]) -> T:
    """As ``together``, on rank 0 alone; all ranks get its result, which must fit JSON.

    The others have nothing to do: rank 0 waits for them by the timeout only.
    """
    first = comm.rank == 0
    _, answers = _run_and_compare(comm, action if first else lambda: None, json.dumps, 0.0 if first else PATIENCE)
    return cast(T, json.loads(answers[0]))


def together(comm: Communicator, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank that calls this; if it fails on any rank, raise on all.

    The error is the lowest failing rank's, of the same class, with ``on_every_rank`` set.  A rank waits ``PATIENCE``
    for the others, or the timeout if that is longer, and logs when the timeout is over.
    """
    return _run_and_compare(comm, action, lambda result: "", PATIENCE)[0]


def answers_of_all(comm: Communicator, action: Callable[[], str]) -> list[str]:
    """As ``together``; the result of every rank."""
    return _run_and_compare(comm, action, str, PATIENCE)[1]


def _run_and_compare(
    comm: Communicator, action: Callable[[], T], encode: Callable[[T], str], patience: float
) -> tuple[T, list[str]]:
    """The result of ``action`` here, and every rank's encoded result."""
    failure: KosError | None = None
    try:
        result = action()
        answer = f"+{encode(result)}"
    except KosError as error:
        failure = error
    except (OSError, MemoryError) as error:
        failure = KosError(in_words(error))
        failure.__cause__ = error
    if failure is not None:
        kind = ConfigError if isinstance(failure, SettingError) else type(failure)
        answer = f"{kind.__name__} {' '.join(failure.settings)}\n{failure}"
    patience = max(patience, comm.timeout)
    late = "waiting for another rank for %g s: it is stopped, or at work (timeout: %g s)"
    watch = threading.Timer(comm.timeout, _log.warning, (late, comm.timeout, patience))
    watch.daemon = True
    if patience > comm.timeout:
        watch.start()
    try:
        mine = answer.encode(errors="surrogatepass")  # a path may have bytes that are no text
        answers = [each.decode(errors="surrogatepass") for each in comm.all_gather_bytes(mine, timeout=patience)]
    finally:
        watch.cancel()
    first = next((rank for rank, answer in enumerate(answers) if not answer.startswith("+")), None)
    if first is None:
        return result, [answer[1:] for answer in answers]
    if first != comm.rank or failure is None:
        about, _, message = answers[first].partition("\n")
        name, *settings = about.split()
        failure = {"Stopped": Stopped}.get(name, getattr(kos.errors, name, KosError))(message).about(*settings)
    raise on_every_rank(failure)


def on_every_rank(error: Error) -> Error:
    """Mark an error that every rank raises."""
    error.on_every_rank = True
    return error


@contextmanager
def raised_on_every_rank() -> Iterator[None]:
    """Mark a ConfigError as raised by every rank, because ``same_on_all`` has compared the settings."""
    try:
        yield
    except ConfigError as error:
        on_every_rank(error)
        raise


def stop_together(comm: Communicator, stop: Stop) -> None:
    """Raise ``Stopped`` on all ranks if the end of the run was requested on any.  Takes about 50 µs."""
    if any(comm.all_gather_bytes(b"!" * (stop.stop_request == STOP))):
        raise Stopped("asked to stop")


def gather_json(comm: Communicator, mine: Any) -> list[Any]:
    """Every rank's value, of JSON's types; others become text. Collective."""
    return [json.loads(each) for each in comm.all_gather_bytes(json.dumps(mine, default=str).encode())]


def same_on_all(comm: Communicator, facts: Mapping[str, object], other: object = None) -> list[Any]:
    """ConfigError on every rank, naming two of them and what differs, unless all hold the same ``facts``.

    Returns each rank's ``other``, of JSON's types, which may differ.
    """
    everyone = gather_json(comm, [dict(facts), other])
    for rank, (theirs, _) in enumerate(everyone):
        for name, value in everyone[0][0].items():
            if theirs.get(name) != value:
                got = f"{value} on rank 0 and {theirs.get(name)} on rank {rank}"
                raise ConfigError(f"{name}: expected the same on all ranks, got {got}")
    return [each for _, each in everyone]
