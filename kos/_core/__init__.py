"""The compiled core: runs calls in the shared memory of a host without executing Python code.

It is optional: without it, or with KOS_CORE=0, the ranks of one host work as those of several hosts do.  ``core.h`` has
its interface in C, ``native.pyi`` that in Python.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kos.dtypes import DTYPES
from kos.environment import KOS_CORE
from kos.errors import is_on

native: Any = None
"""The extension module, or None."""
unavailable: str | None = None
"""Why the extension module cannot be used; None if it can."""

try:
    if not is_on(KOS_CORE):
        unavailable = "the compiled core is off: KOS_CORE=0"
    else:
        module = import_module("kos._core.native")
        if not hasattr(module, "dtype") or any(module.dtype(code) != name for code, name in enumerate(DTYPES)):
            raise ImportError("it was built for other dtypes: install kos again")
        native = module
except ModuleNotFoundError:
    unavailable = "the compiled core was not built: kos was installed without a C compiler or Python.h"
except ImportError as error:
    unavailable = f"kos._core.native does not load: {error}"
