"""kos: collective communication without torch, and a LLaMA trainer built on it.

Names are imported when they are first used: ``import kos`` alone loads neither NumPy nor anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kos import errors
    from kos.comm import (
        ANY,
        NOBODY,
        Communicator,
        PremulSum,
        ReduceOp,
        Work,
        as_completed,
        init,
        join,
        register_backend,
        wait_any,
    )

__version__ = "0.3.0"

__all__ = [
    "ANY", "NOBODY", "Communicator", "PremulSum", "ReduceOp", "Work", "__version__", "as_completed", "errors",
    "init", "join", "register_backend", "wait_any",
]  # fmt: skip


def __getattr__(name: str) -> object:
    from importlib import import_module as _import_module

    if name not in __all__:
        raise AttributeError(f"module 'kos' has no attribute {name!r}")
    value = _import_module("kos.errors") if name == "errors" else getattr(_import_module("kos.comm"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
