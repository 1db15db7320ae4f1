"""What a program can pass to its run: batches, a loss, and callbacks after steps, validations and checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from kos.errors import InvalidArgument, SettingError
from kos.train.config import flag_of
from kos.train.config.options import TrainConfig
from kos.train.data.own import OwnBatches, Rows
from kos.train.ops import Batch, CudaLoss, Loss


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


def check(
    config: TrainConfig, batches: Iterable[Batch] | None = None, rows: Rows = "all",
    val_batches: Iterable[Batch] | None = None, loss: Loss | None = None, callbacks: Sequence[Callback] = (),
    verbose: bool = True,
) -> OwnBatches:  # fmt: skip
    """What a program passes, checked: its batches.  Raises InvalidArgument for other types, SettingError for settings.
    """
    listed = isinstance(callbacks, Collection) and all(isinstance(each, Callback) for each in callbacks)
    again = isinstance(val_batches, Iterable) and not isinstance(val_batches, Iterator)
    for name, right, expected, got in (
        ("config", isinstance(config, TrainConfig), "a kos.train.TrainConfig", config),
        ("loss", loss is None or isinstance(loss, CudaLoss) or callable(loss), "a function or a CudaLoss", loss),
        ("val_batches", again or val_batches is None, "a list, or what else can be iterated again", val_batches),
        ("callbacks", listed, "a list of objects of kos.train.Callback", callbacks),
    ):
        if not right:
            raise InvalidArgument(f"{name}: expected {expected}, got {got!r:.80}")
    own = OwnBatches(() if batches is None else batches, rows, config)
    if batches is not None:
        own.check(config)
    if batches is not None or val_batches is not None:
        metrics = ["none", *["val_loss"] * (val_batches is not None)]
        if config.eval_data:
            raise SettingError("--eval-data", "none with batches of one's own", config.eval_data[0])
        if (config.best_metric or "none") not in metrics:
            flag, expected = flag_of("keep_best" if config.keep_best else "patience"), " or ".join(metrics)
            raise SettingError(flag, f"{expected} with batches of one's own", config.best_metric)
    return own
