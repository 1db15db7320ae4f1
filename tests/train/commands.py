"""The command ``kos.train`` in processes of its own."""

import sys
from pathlib import Path

import pytest

from tests.forked import python
from tests.launcher import MPIRUN, OUTSIDE

ENVIRONMENT = OUTSIDE
SHAPE = ["--hidden-size=32", "--num-hidden-layers=2", "--intermediate-size=48", "--batch-size=8", "--seq-len=32"]


def _command(*flags: str | Path, ranks: int = 2, fresh: bool = False) -> list[str]:
    """``fresh``: each rank is a Python of its own, not forked from one that has imported kos."""
    if ranks > 1 and not MPIRUN:
        pytest.skip("needs mpirun")
    launcher = [MPIRUN, "-n", str(ranks)] if ranks > 1 else []
    return [*launcher, *([sys.executable] if fresh else python()), "-m", "kos.train", *SHAPE, *map(str, flags)]
