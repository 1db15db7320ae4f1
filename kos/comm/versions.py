"""The versions of kos, Python and NumPy of each rank, compared by ``kos.init``.

Different versions of kos are refused, since the protocol between ranks may change in any version.  Different versions
of Python or NumPy work together, but may give different bits or lack a dtype: they give a warning.
"""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from kos.errors import RendezvousError

log = logging.getLogger(__name__)

_SHOWN = 8  # ranks in a message


def versions() -> dict[str, str]:
    """The versions in this process, by name."""
    kos: str = sys.modules["kos"].__version__  # an import would be a circle: ``kos`` imports names of this package
    return {"kos": kos, "Python": platform.python_version(), "NumPy": np.__version__}


def check(ranks: Sequence[Mapping[str, str]], warns: bool) -> None:
    """Compare the versions of all ranks; ``{}`` stands for unknown ones.

    Raises RendezvousError if those of kos differ; logs others if ``warns``.
    """
    for name in dict.fromkeys(name for found in ranks for name in found):
        holders: dict[str, list[int]] = {}
        for rank, found in enumerate(ranks):
            holders.setdefault(found.get(name, "an unknown version"), []).append(rank)
        if len(holders) == 1:
            continue
        text = ", ".join(f"{version} on {_names(each)}" for version, each in holders.items())
        if name == "kos":
            raise RendezvousError(f"init: expected one version of kos on all ranks, got {text}")
        if warns:
            log.warning("the ranks have different versions of %s: %s", name, text)


def _names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {ranks[:_SHOWN]}{more}"
