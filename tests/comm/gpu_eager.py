"""Helpers for tests of calls on GPUs that the compiled core makes: ranks are threads, and GPUs are stand-ins."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import kos
from kos.memory.array import Array


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


def call_during_start(comm: Any, x: Any, event: str, act: Callable[[], Any]) -> None:
    """Call all_reduce, and run ``act`` when its start begins or ends (the ``event`` "call" or "return")."""

    def profile(frame: Any, at: str, argument: Any) -> None:
        if at == event and frame.f_code.co_name.endswith("start_work"):
            sys.setprofile(None)
            act()

    sys.setprofile(profile)
    try:
        comm.all_reduce(x)
    finally:
        sys.setprofile(None)
