"""``fit``: a whole run in one call, with optional batches, loss and callbacks of the calling program."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from kos.comm.communicator import Communicator
from kos.train.config.options import TrainConfig
from kos.train.parallel.failures import Stop
from kos.train.program import Program
from kos.train.trainer import Trainer


class FitResult(NamedTuple):
    """How a run ended."""

    step: int
    """The number of completed steps."""

    stopped: bool
    """Whether a callback, a signal or ``patience`` ended the run before ``config.steps``."""

    metrics: dict[str, Any]
    """The last row of ``metrics.jsonl``; empty if this run completed no step."""

    checkpoint: Path | None
    """The folder of the last checkpoint, which ``kos.train.load`` reads; None if there is none."""


def fit(config: TrainConfig, comm: Communicator | None = None, **program: Unpack[Program]) -> FitResult:
    """Train as ``python -m kos.train`` does, and return when the last checkpoint is complete.  Collective.

    ``comm`` and ``program`` are as for ``Trainer``.  In the main thread, SIGINT (Ctrl-C), SIGTERM and SIGUSR1 stop the
    run after the current step.  The run saves a checkpoint, and ``fit`` returns.  A second signal has the effect that
    it had before the call.  In another thread, ``fit`` leaves the program's signal handlers in place.

    Raises:
        ConfigError, InvalidArgument, DataError: as ``Trainer`` and ``Trainer.step`` do.
        KosError: the run was stopped, by a signal or a callback, before its first step.
        TrainingError: the loss is not finite.
        CollectiveError: another rank failed; the error names the rank.
    """
    stop = Stop()
    with contextlib.ExitStack() as held:
        held.callback(stop.restore)
        stop.listen(until_restored=True)
        trainer = held.enter_context(Trainer(config, comm, stop, **program))
        trainer.run()
    stopped = trainer.steps_done < trainer.config.steps and not trainer.ended
    last = trainer.checkpoints / f"step-{trainer.saved_step}" if trainer.saved_step >= 0 else None
    return FitResult(trainer.steps_done, stopped, trainer.row or {}, last)
