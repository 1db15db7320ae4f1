"""Calls on GPUs that the compiled core makes, for tests: on ranks that are threads, with stand-ins for GPUs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import kos
from kos.memory.array import Array
from tests.host_compiler import COMPILER

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
Run = Callable[[Callable[[Any], None]], None]
"""Runs a function of a communicator on two ranks."""


def hits(comm: Any) -> int:
    """The calls of ``comm`` that the core has made."""
    eager = comm._core_group
    return 0 if eager is None else int(eager.hits)


def on_gpu(values: Any, stream: Any = None) -> Array:
    return Array.from_numpy(np.array(values), 0, stream=stream)


@contextmanager
def by(comm: Any, core: int) -> Iterator[None]:
    """The core makes so many of the calls meanwhile."""
    before = hits(comm)
    yield
    assert hits(comm) - before == core


def known(comm: kos.Communicator, x: Array, **options: Any) -> None:
    """Make the core know all_reduces like that of ``x``."""
    for _ in range(3):
        comm.all_reduce(x, **options)
    with by(comm, 1):
        comm.all_reduce(x, **options)
