"""A LLaMA trainer on kos: ``python -m kos.train`` trains a model, ``load`` reads one in Python.

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kos.errors import ConfigError, install

if TYPE_CHECKING:
    from kos.train.trained import TrainedModel, load

__all__ = ["TrainedModel", "load"]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'kos.train' has no attribute {name!r}")
    try:
        return getattr(import_module("kos.train.trained"), name)
    except ImportError as error:
        raise missing(error) from error


def missing(error: ImportError) -> ConfigError:
    """The error where packages of the extra ``train`` are not installed."""
    return ConfigError(f"expected the trainer's packages ({install('train')}), got: {error}")
