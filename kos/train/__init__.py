"""A LLaMA trainer on kos: ``python -m kos.train`` trains a model.

In Python, ``fit`` trains one with batches, a loss and callbacks of one's own, and ``Trainer`` has the parts of a run.
``load`` reads a model, and ``read_metrics`` a run's metrics.

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kos.errors import ConfigError, install

if TYPE_CHECKING:
    from kos.train.config.flags import parse
    from kos.train.config.options import TrainConfig
    from kos.train.fitting import FitResult, fit
    from kos.train.ops import Batch, CudaLoss, Loss
    from kos.train.program import Callback, Program
    from kos.train.tools import read_metrics
    from kos.train.trained import TrainedModel, load
    from kos.train.trainer import Trainer

_MODULES = {
    "Batch": "ops", "Callback": "program", "CudaLoss": "ops", "FitResult": "fitting", "Loss": "ops",
    "Program": "program", "TrainConfig": "config.options", "TrainedModel": "trained", "Trainer": "trainer",
    "fit": "fitting", "load": "trained", "parse": "config.flags", "read_metrics": "tools",
}  # fmt: skip

__all__ = [
    "Batch", "Callback", "CudaLoss", "FitResult", "Loss", "Program", "TrainConfig", "TrainedModel", "Trainer", "fit",
    "load", "parse", "read_metrics",
]  # fmt: skip


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'kos.train' has no attribute {name!r}")
    try:
        return getattr(import_module(f"kos.train.{_MODULES[name]}"), name)
    except ImportError as error:
        import_module("kos.comm")  # needs no package of the extra: its ImportError has another reason
        raise missing(error) from error


def missing(error: ImportError) -> ConfigError:
    """The error where packages of the extra ``train`` are not installed."""
    return ConfigError(f"expected the trainer's packages ({install('train')}), got: {error}")
