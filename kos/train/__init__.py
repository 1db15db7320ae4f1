"""A LLaMA trainer on kos: ``python -m kos.train`` trains a model, ``load`` reads one, ``read_metrics`` a run's metrics.

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kos.errors import ConfigError, install

if TYPE_CHECKING:
    from kos.train.tools.metrics import read_metrics
    from kos.train.trained import TrainedModel, load

__all__ = ["TrainedModel", "load", "read_metrics"]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'kos.train' has no attribute {name!r}")
    module = "kos.train.tools.metrics" if name == "read_metrics" else "kos.train.trained"
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        raise missing(error) from error


def missing(error: ImportError) -> ConfigError:
    """The error where packages of the extra ``train`` are not installed."""
    return ConfigError(f"expected the trainer's packages ({install('train')}), got: {error}")
