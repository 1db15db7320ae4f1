"""Waiting for a GPU to become idle after an abort.

Kernels of other communicators may keep the GPU busy, since they wait for the same rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from kos.comm import watchdog
from kos.comm.waits import start_in_thread
from kos.cuda import driver
from kos.errors import CudaError, KosError

log = logging.getLogger(__name__)

_ABORT_SECONDS = 20.0
_HALTED_SECONDS = 1.0
"""How long a failed communicator waits for the GPU before others that wait for the same stopped rank fail too."""
ENDED = "what was in flight was ended, and its results are undefined"

_aborting: dict[Any, float] = {}
"""Failed backends that wait for their GPU to become idle, and when each began."""


def wait_for_idle(backend: Any, drain: Callable[[], None]) -> None:
    """Run ``drain``, which waits until the GPU is idle, on a thread; the others are checked meanwhile."""
    began = _aborting[backend] = time.monotonic()
    drained = start_in_thread(drain)
    drained.add_done_callback(lambda _: _aborting.pop(backend, None))
    while not wait([drained], watchdog.TICK).done:
        if time.monotonic() > began + _ABORT_SECONDS:
            log.error("rank %d: the GPU did not end its work within %g s", backend.rank, _ABORT_SECONDS)
            return
        watchdog.check_others()


def raise_if_stuck(backend: Any, now: float) -> None:
    """Raise if another communicator failed because of a rank of this one, and the GPU does not become idle.

    In that case this communicator waits for the rank in calls whose start the watchdog does not see, such as those
    of a replayed graph.
    """
    failures = backend.failures
    for other, began in list(_aborting.items()):
        failure = other.failures.first
        ranks = set() if failure is None else set(failure.ranks) & set(failures.world)
        patience = _HALTED_SECONDS if all(map(failures.status.halted, ranks)) else backend.timeout
        if ranks and other.device == backend.device and now - began > patience:
            assert failure is not None
            cause = str(failure).removesuffix(f"; {ENDED}")
            raise failure.copy(f"the GPU was not idle {patience:g} s after another communicator failed: {cause}")


def lost(backend: Any, error: KosError) -> bool:
    """Whether ``error`` makes the GPU of this rank unusable."""
    if not isinstance(error, CudaError):
        return False
    try:
        with driver.on_device(backend.device):
            return driver.broken() is not None
    except CudaError:  # it cannot even be made current
        return True
