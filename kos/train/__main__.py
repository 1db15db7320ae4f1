"""``mpirun -n N python -m kos.train``: train a LLaMA; ``--help`` shows every setting."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

import kos
from kos.comm.mpi_job import launched_rank
from kos.errors import ConfigError, KosError, RankLost

if TYPE_CHECKING:
    from kos.train.loop import Trainer

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
"""What asks a run to save and stop: mpirun passes SIGUSR1 on and then waits, Ctrl-C reaches a single rank."""

SPOKESMAN_SECONDS = 10.0
"""How long the other ranks wait for rank 0 to say an error that all have; its exit ends them."""

ECHO_SECONDS = 3.0
"""How long a rank that lost another waits before it says so: under mpirun the other's exit ends it first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit code. A failure does not return: it ends the process, and with it the MPI job."""
    rank = launched_rank()
    stopper = _Stopper(rank)
    for number in STOP_SIGNALS:
        signal.signal(number, stopper)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that a terminal cannot show ends no run
    logging.basicConfig(format=f"kos: rank {rank}: %(message)s", level=logging.WARNING, stream=sys.stderr)
    arguments = sys.argv[1:] if argv is None else list(argv)
    if rank != 0 and {"-h", "--help"} & set(arguments):
        return 0
    try:
        try:
            from kos.train.config import parse
            from kos.train.loop import Trainer
        except ImportError as error:
            raise ConfigError(f"expected the packages of 'pip install kos[train]', got: {error}") from error
        config = parse(arguments)
        with kos.init(config.backend, timeout=config.timeout) as comm:
            stopper.trainer = Trainer(config, comm)
            stopper.trainer.run()
    except (KosError, OSError, MemoryError) as error:
        _fail(error, rank, debug="--debug" in arguments)
    return 0


class _Stopper:
    """A signal handler: the first signal asks the trainer to stop, if there is one yet; a second ends the process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.trainer: Trainer | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.trainer is None:
            if self.rank == 0:
                os.write(2, b"kos: stopped before the first step\n")
            os._exit(130)
        self.trainer.ask_stop()
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_DFL)


def _fail(error: Exception, rank: int, debug: bool) -> None:
    """Say the error on one line, once for all ranks if all have it, and end the job: 2 bad settings, 1 the rest.

    Not by ``sys.exit``: MPI_Finalize would wait for ranks that are not coming. mpirun ends the others as soon
    as one process exits with an error; a rank that only saw another fail leaves that one the word.
    """
    shared = isinstance(error, ConfigError) or (isinstance(error, KosError) and error.on_every_rank)
    if shared and rank != 0:
        time.sleep(SPOKESMAN_SECONDS)
    else:
        if isinstance(error, RankLost):
            time.sleep(ECHO_SECONDS)
        if debug:
            traceback.print_exception(error)
        where = "" if shared else f"rank {rank}: "
        what = " ".join(str(error).split())
        if not isinstance(error, KosError) or not what:
            what = f"{type(error).__name__}: {what}"
        with contextlib.suppress(OSError, ValueError):
            print(f"kos: error: {where}{what}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    sys.exit(main())
