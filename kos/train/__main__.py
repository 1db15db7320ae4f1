"""``mpirun -n N python -m kos.train``: train a LLaMA; ``--help`` shows every setting."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import kos
from kos.errors import ConfigError, KosError, debugging
from kos.files import printing
from kos.launcher import launched_place, launched_rank
from kos.reporting import end_process, exit_status, report
from kos.train import missing
from kos.train.parallel.failures import Left, Stop, Stopped

if TYPE_CHECKING:
    from kos.train.config.options import TrainConfig

CLOSE_SECONDS = 60.0
"""How long a rank may take to close after a failure: to free memory, CUDA waits for a GPU that may never be idle."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns 0, also after a request to stop. A failure never returns: it ends the process and the MPI job.

    Nor does a rank that leaves (``--elastic``), which ends with exit code 75. In another thread than the main one,
    signals are the caller's: they stop no run.
    """
    stop = Stop()
    stop.listen()
    arguments = sys.argv[1:] if argv is None else list(argv)
    rank, trainer, begun = launched_rank(), None, False
    _prepare_output(rank)
    if rank != 0 and {"-h", "--help"} & set(arguments):
        return 0
    try:
        try:
            from kos.train.config.flags import parse, read_command_line

            plans = "--plan" in arguments
            if not plans:
                read_command_line(arguments)  # help, and unknown flags, before all that a run needs is imported
            from kos.train.machine import thread_pools
            from kos.train.trainer import Trainer

            thread_pools()
        except ImportError as error:
            raise missing(error) from error
        if plans:
            from kos.train.tools import plan

            with printing():
                print(plan.report(arguments))
            return 0
        config = parse(arguments)
        if config.show_data:
            if rank == 0:
                _show_data(config)
            return 0
        if config.join is not None:
            begun = True
            Trainer(config, None, stop).run(lambda error: _fail_later(error, 0, arguments))
            return 0
        with kos.init(config.backend, timeout=config.timeout) as comm:
            try:
                trainer, begun = Trainer(config, comm, stop), True
                trainer.run(lambda error: _fail_later(error, rank, arguments))
            except Stopped:
                if rank == 0:
                    print("kos: stopped before the first step, nothing to save", file=sys.stderr)
    except Left as left:
        logging.getLogger("kos.train").warning("%s", left)
        end_process(Left.code)
    except (KosError, OSError, MemoryError) as error:
        note = ""
        if settings := getattr(error, "settings", ()):
            with contextlib.suppress(ImportError, KosError):
                from kos.train.config.flags import overrides

                note = overrides(arguments, settings)
        rank = rank if trainer is None else trainer.comm.rank  # others may have been lost
        if stop.listens:
            stop.ignore()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # mpirun kills this process half a second later
        _fail(error, rank, note, "--debug" in arguments or debugging(), begun)
    return 0


def _prepare_output(rank: int) -> None:
    """Have this rank log to stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that a terminal cannot show ends no run
    where = "" if launched_place()[1] == 1 else f"rank {rank}: "
    logging.basicConfig(format=f"kos: {where}%(message)s", level=logging.WARNING, stream=sys.stderr)
    if rank != 0:  # all ranks read the same settings, and the same packing plan
        for name in ("kos.reporting", "kos.train.config", "kos.train.data.packing", "kos.train.data.documents"):
            logging.getLogger(name).setLevel(logging.ERROR)


def _show_data(config: TrainConfig) -> None:
    """Print the sequences that ``--show-data`` asks for."""
    from kos.train.checkpoint import resume
    from kos.train.folder import run_folder
    from kos.train.tools import show

    out = run_folder(config) if config.resume == "auto" else Path()
    with printing():
        print(show.report(config, resume.find(config, out / "checkpoints", lambda what, share: None)))


def _fail_later(error: KosError, rank: int, arguments: Sequence[str]) -> None:
    """Print the error and end the process if it has not ended in time."""
    debug = "--debug" in arguments or debugging()
    timer = threading.Timer(CLOSE_SECONDS, _fail, (error, rank, "; what it held could not be closed", debug))
    timer.daemon = True
    timer.start()


def _fail(error: Exception, rank: int, note: str, debug: bool, begun: bool = True) -> None:
    """Report the error with its note and end the job: with exit code 2 for bad settings, and for what it cannot begin.

    That is data of no kind that kos reads, or a backend that cannot run here.  All other errors end it with 1.
    ``sys.exit`` is not used: MPI_Finalize would wait for ranks that do not call it.
    """
    report(error, rank, note, debug, alone=launched_place()[1] == 1)
    end_process(2 if isinstance(error, ConfigError) else 1 if begun else exit_status(error))


if __name__ == "__main__":
    sys.exit(main())
