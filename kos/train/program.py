"""What a program can pass to its run: batches, a loss, and callbacks after steps, validations and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from kos.train.data.own import Rows
from kos.train.ops import Loss
from kos.train.ops.batch import Batch


class Callback:
    """Base class of callbacks; override the methods that you need.  A callback may be on one rank or on all ranks.

    ``trainer`` is the run's ``Trainer``.  Its method ``request_stop`` stops all ranks.  An exception in a callback ends
    the run on this rank, and the other ranks raise an error that names this rank.
    """

    def on_step(self, trainer: Any, metrics: Mapping[str, Any]) -> None:
        """Called after each step.  ``metrics`` is the step's row of ``metrics.jsonl``."""

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, Any]) -> None:
        """Called after a step with a validation, after ``on_step``.  ``metrics`` includes ``val_loss``."""

    def on_save(self, trainer: Any, checkpoint: Path) -> None:
        """Called when a checkpoint is complete in its folder."""

    def on_end(self, trainer: Any) -> None:
        """Called after the last step, when the last checkpoint is complete; also after a request to stop."""


class Program(TypedDict, total=False):
    """What a program can pass to its run; each key is optional."""

    batches: Iterable[Batch] | None
    """Batches whose sequences have ``config.seq_len`` tokens.  Default: the batches of ``config.data``.  With an empty
    tuple, nothing is read from ``config.data``, and the program passes each batch to ``Trainer.step``."""

    rows: Rows
    """``"all"`` (the default): ``batches`` gives every rank the whole batch of ``config.batch_size`` sequences, the
    same on all ranks.  ``"own"``: it gives each of the dp data-parallel ranks its ``config.batch_size / dp`` rows."""

    val_batches: Iterable[Batch] | None
    """Batches for validation, with any number of sequences each.  Each validation iterates over them again."""

    loss: Loss | None
    """A function that returns the loss and its gradient, instead of the cross-entropy: see ``kos.train.Loss``."""

    callbacks: Sequence[Callback]
    """Objects whose methods are called during the run, in the order of this sequence."""

    verbose: bool
    """Whether rank 0 prints what the command prints (the default)."""
