"""What a program brings to its run: batches, a loss, and callbacks after steps, validations and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from kos.train.data.batch import Batch
from kos.train.data.own import Rows
from kos.train.ops import Loss


class Callback:
    """Base class; override what you need.  A callback may be on one rank or on all.

    ``trainer`` is the run's ``Trainer``; its ``request_stop`` stops all ranks.  An exception ends the run on this rank,
    and the other ranks raise an error that names it.
    """

    def on_step(self, trainer: Any, metrics: Mapping[str, Any]) -> None:
        """After each step.  ``metrics`` is its row of ``metrics.jsonl``."""

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, Any]) -> None:
        """After a step with a validation, when ``on_step`` has been called; ``metrics`` has ``val_loss``."""

    def on_save(self, trainer: Any, checkpoint: Path) -> None:
        """Once a checkpoint is complete in its folder."""

    def on_end(self, trainer: Any) -> None:
        """After the last step, when the last checkpoint is complete, also after a request to stop."""


class Program(TypedDict, total=False):
    """What a program brings to its run; each may be left out."""

    batches: Iterable[Batch] | None
    """Batches of ``config.seq_len`` tokens a sequence.  Default: those of ``config.data``.  With an empty tuple nothing
    is read from ``config.data``, and ``Trainer.step`` is called with each batch."""

    rows: Rows
    """``"all"`` (the default): every rank gets the whole batch of ``config.batch_size`` sequences, the same on all
    ranks.  ``"own"``: each of the dp data-parallel ranks gets its rows, ``config.batch_size / dp``."""

    val_batches: Iterable[Batch] | None
    """Batches for validation, of any number of sequences: an iterable that each validation iterates."""

    loss: Loss | None
    """The loss and its gradient, instead of the cross-entropy: see ``kos.train.Loss``."""

    callbacks: Sequence[Callback]
    """Objects whose methods are called during the run, in this order."""

    verbose: bool
    """Whether rank 0 prints what the command prints (the default)."""
