"""kos: collective communication without torch, and a LLaMA trainer that stands on it.

Names are imported when they are first used: ``import kos`` alone loads neither NumPy nor anything else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kos import errors
    from kos.comm import Communicator, PremulSum, ReduceOp, Work, init

__version__ = "0.1.0"

__all__ = ["Communicator", "PremulSum", "ReduceOp", "Work", "__version__", "errors", "init"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kos' has no attribute {name!r}")
    value = import_module("kos.errors") if name == "errors" else getattr(import_module("kos.comm"), name)
    globals()[name] = value
    return value
