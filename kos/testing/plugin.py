"""A pytest plugin with the fixtures ``spawn_ranks`` and ``torch_ranks``: ``pytest_plugins =
["kos.testing.plugin"]`` in the top conftest.py.

docs/guides/testing-your-code.md and docs/guides/testing-pytorch.md show their use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kos.errors import KosError, debugging
from kos.testing import spawn


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Leave kos's own frames out of the traceback of an error that kos raises on purpose, unless KOS_DEBUG is set."""
    if call.excinfo is not None and isinstance(call.excinfo.value, KosError) and not debugging():
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "kos":
                module.__dict__.setdefault("__tracebackhide__", _is_on_purpose)


def _is_on_purpose(caught: pytest.ExceptionInfo[BaseException] | None) -> bool:
    return caught is not None and isinstance(caught.value, KosError)


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


@pytest.fixture
def torch_ranks(world_size: int) -> Callable[..., list[Any]]:
    """``torch_ranks(fn)`` runs ``fn(rank)`` on ``world_size`` ranks of torch.distributed, and returns their results.

    Keywords are those of ``kos.testing.torch.spawn``.  The test is skipped where torch is not installed.
    """
    pytest.importorskip("torch")
    from kos.testing.torch import spawn as spawn_processes

    return partial(spawn_processes, world_size=world_size)
