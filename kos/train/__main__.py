"""``mpirun -n N python -m kos.train``: train a LLaMA; ``--help`` shows every setting."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from kos.train.blas import choose_kernels

choose_kernels()  # before anything imports NumPy

import kos  # noqa: E402
from kos.comm.mpi_job import launched_rank  # noqa: E402
from kos.errors import ConfigError, KosError  # noqa: E402

if TYPE_CHECKING:
    from kos.train.loop import Trainer

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
"""What asks a run to save and stop: mpirun passes SIGUSR1 on and then waits, Ctrl-C reaches a single rank."""

SPOKESMAN_SECONDS = 10.0
"""How long the other ranks wait for rank 0 to say an error that all have; its exit ends them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit code. A failure does not return: it ends the process, and with it the MPI job."""
    rank = launched_rank()
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
            trainer = Trainer(config, comm)
            for number in STOP_SIGNALS:
                signal.signal(number, _stopper(trainer))
            trainer.run()
    except KosError as error:
        _fail(error, rank, debug="--debug" in arguments)
    return 0


def _stopper(trainer: Trainer) -> Callable[[int, FrameType | None], None]:
    """A signal handler that asks for a stop the first time and stands aside for a second."""

    def stop(number: int, frame: FrameType | None) -> None:
        trainer.ask_stop()
        signal.signal(number, signal.SIG_DFL)

    return stop


def _fail(error: KosError, rank: int, debug: bool) -> None:
    """Say the error on one line, once for all ranks if all have it, and end the job: 2 bad settings, 1 the rest.

    Not by ``sys.exit``: MPI_Finalize would wait for ranks that are not coming. mpirun ends the others as soon
    as one process exits with an error.
    """
    shared = error.on_every_rank or isinstance(error, ConfigError)
    if shared and rank != 0:
        time.sleep(SPOKESMAN_SECONDS)
    else:
        if debug:
            traceback.print_exception(error)
        where = "" if shared else f"rank {rank}: "
        print(f"kos: error: {where}{' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    sys.exit(main())
