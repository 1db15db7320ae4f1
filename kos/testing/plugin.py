"""A pytest plugin with the fixture ``spawn_ranks``: ``pytest_plugins = ["kos.testing.plugin"]`` in the top conftest.py.

docs/guides/testing-your-code.md shows its use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kos.testing import spawn


@pytest.fixture
def world_size() -> int:
    """Ranks of ``spawn_ranks``: 2, unless a test, its class or its module parametrizes this name."""
    return 2


@pytest.fixture
def spawn_ranks(world_size: int) -> Callable[..., list[Any]]:
    """``spawn_ranks(fn)`` runs ``fn(comm)`` on ``world_size`` ranks, and returns their results by rank.

    Keywords are those of ``kos.testing.spawn``: ``timeout`` in seconds (60), ``faults``.  An assertion that
    fails on a rank fails the test, with that rank named.
    """
    return partial(spawn, world_size=world_size)
