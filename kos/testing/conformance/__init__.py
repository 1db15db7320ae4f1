"""The promises of every collective (docs/guides/backends.md) as tests for any backend.

Call ``run(world)`` on all ranks of a communicator, use ``cases()`` as parametrized tests of pytest, or run
``python -m kos.testing.conformance --backend NAME``, alone or under mpirun, torchrun or srun.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kos.comm import Communicator
from kos.errors import InvalidArgument, plural
from kos.testing.conformance import failures, intact, model, order, results
from kos.testing.conformance.on_gpu import OnGPU
from kos.testing.conformance.table import Case, cases

__all__ = ["Case", "cases", "run"]

log = logging.getLogger(__name__)
_SILENT = logging.Logger("silent", logging.CRITICAL)
_CHECKS = [module.__file__ for module in (failures, intact, model, order, results)]

EXCHANGE_SECONDS = 60.0
"""The least timeout of exchanges between checks: on a busy machine ranks end a check seconds apart."""
CHECK_SECONDS = 300.0
"""Limit of one check, in seconds."""


def run(
    world: Communicator, full: bool = False, seed: int = 0, only: str = "", gpu: bool = False
) -> dict[str, str]:  # fmt: skip
    """Check the promises that apply to ``world`` and whose name contains ``only``.  Collective.

    ``gpu``: those for arrays on this rank's GPU, of a communicator that uses one.
    Returns the failures, the same on all ranks: for each broken promise, the tracebacks of the ranks that raised.
    Rank 0 logs each check before it starts, and the cause of each failure (the logger ``kos.testing.conformance``).
    If a check does not end within ``CHECK_SECONDS`` seconds, the rank logs it and ends its process with exit status 1.
    Raises InvalidArgument if Python runs without assertions (``-O``), or if no name contains ``only``.
    """
    if not __debug__:
        raise InvalidArgument("conformance: expected assertions, got Python without them (-O)")
    if gpu and world.device is None:
        raise InvalidArgument(f"gpu: expected a communicator that uses a GPU, got {world}")
    wrap: Any = OnGPU if gpu else lambda comm: comm
    chosen = [case for case in cases(full, seed, gpu) if only in case.name and case.applies(wrap(world))]
    if not chosen:
        ranks = plural(world.size, "rank")
        raise InvalidArgument(f"only: expected a part of a promise's name, got {only!r} on {ranks}")
    broken: dict[str, str] = {}
    world.rendezvous.timeout = max(world.rendezvous.timeout, EXCHANGE_SECONDS)
    comm = world.duplicate()
    logger = log if world.rank == 0 else _SILENT
    for number, case in enumerate(chosen, 1):
        logger.info("%d of %d: %s", number, len(chosen), case.name)
        failure: tuple[str, str] | None = None
        try:
            with _time_limit(case, world.rank):
                case.call(wrap(comm))
        except Exception as error:
            failure = _cause(error), traceback.format_exc()
            comm.abort(reason=f"conformance: {case.name} failed")
        rows = [json.loads(row) for row in world.rendezvous.allgather(json.dumps(failure).encode())]
        failed = {rank: row for rank, row in enumerate(rows) if row}
        for rank, (cause, _) in failed.items():
            logger.error("BROKEN %s: rank %d: %s", case.name, rank, cause)
        if failed:
            broken[case.name] = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in failed.items())
            if not failure:
                comm.abort(reason=f"conformance: {case.name} failed")
            comm = world.duplicate()
    comm.close()
    return broken


@contextmanager
def _time_limit(case: Case, rank: int) -> Iterator[None]:
    """End the process and log the stack of this thread if the block takes longer than CHECK_SECONDS."""
    waiting = threading.get_ident()

    def end() -> None:
        stack = "".join(traceback.format_stack(sys._current_frames().get(waiting)))
        log.error("BROKEN %s: rank %d: no end within %g s:\n%s", case.name, rank, CHECK_SECONDS, stack)
        time.sleep(1.0)  # in which other ranks may report the same
        os._exit(1)

    alarm = threading.Timer(CHECK_SECONDS, end)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def _cause(error: Exception) -> str:
    """The error as one line, and the line of the check that raised it."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    frames = traceback.extract_tb(error.__traceback__)[1:]
    at = [frame for frame in frames if frame.filename in _CHECKS]
    return f"{text} ({Path(at[-1].filename).name}:{at[-1].lineno}: {at[-1].line})" if at else text
