"""The promises of every collective (docs/guides/backends.md) as tests for any backend.

Call ``run(world)`` on all ranks of a communicator, use ``cases()`` as parametrized tests of pytest, or run
``python -m kos.testing.conformance --backend NAME``, alone or under mpirun, torchrun or srun.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kos.comm import Communicator, ReduceOp
from kos.comm.compression import FORMATS
from kos.comm.schedules import algorithms
from kos.errors import InvalidArgument, plural
from kos.testing.conformance import compressed, failures, intact, order, results, values
from kos.testing.conformance.model import MOVING

__all__ = ["Case", "cases", "run"]

log = logging.getLogger(__name__)
_SILENT = logging.Logger("silent", logging.CRITICAL)
_CHECKS = [module.__file__ for module in (failures, intact, order, results)]

EXCHANGE_SECONDS = 60.0
"""The least timeout of exchanges between checks: on a busy machine ranks end a check seconds apart."""
CHECK_SECONDS = 300.0
"""Limit of one check, in seconds."""

_FEW = {"float32": None, "bfloat16": ("SUM", "AVG"), "int32": ("SUM", "BXOR"), "bool": ("BOR",)}
"""The dtypes of the short suite, and the reduce operations of each (None: all)."""


class Case(NamedTuple):
    """One promise: ``call(comm)`` raises on some or all ranks if it does not hold."""

    name: str
    call: Callable[[Communicator], None]
    ranks: int = 1
    """The least number of ranks."""

    def __str__(self) -> str:
        return self.name


def cases(full: bool = False, seed: int = 0) -> list[Case]:
    """All promises; for every dtype, size and schedule if ``full`` (minutes), else for a few (seconds)."""
    found: list[Case] = []

    def add(call: Callable[..., None], *args: Any, name: str = "", ranks: int = 1) -> None:
        words = [name or call.__name__, *(str(getattr(arg, "name", arg)) for arg in args if arg != name)]
        given = (seed, *args) if "seed" in inspect.signature(call).parameters else args
        found.append(Case(" ".join(words), lambda comm: call(comm, *given), ranks))

    add(order.sends_need_no_further_call, ranks=2)  # first: if one of these two fails, most others time out
    add(order.one_poll_advances_all_messages, ranks=2)
    for dtype in (dtype for dtype in values.ALL_DTYPES if full or dtype.name in _FEW):
        for known, op in values.REDUCTIONS:
            if known == dtype and (full or op.name in (_FEW[dtype.name] or op.name)):
                for name in ("all_reduce", "reduce_scatter"):
                    add(results.correct, name, dtype, op, name=name)
        op = ReduceOp.BXOR if dtype == np.bool_ else ReduceOp.SUM
        for name in ("reduce", "reduce_scatter", "reduce_scatter_v", "scan", "exscan"):
            add(results.correct, name, dtype, op, 0, name in ("reduce", "reduce_scatter"), name=name)
        for name in MOVING[:-1]:
            add(results.correct, name, dtype, name=name)
        add(results.messages, dtype)
    for name in ("all_reduce", "reduce_scatter"):
        for algorithm in range(1 + len(algorithms(name)) if full else 1):
            sizes = (*values.SIZES, values.LARGE)
            add(results.correct, name, np.dtype(np.float32), ReduceOp.SUM, algorithm, False, sizes, name=name)
    for kind in (np.float32, ml_dtypes.bfloat16):
        add(results.deterministic_adds_in_rank_order, np.dtype(kind))
        add(results.scans_add_in_rank_order, np.dtype(kind))
    add(results.sums_of_16_bits_in_fp32, np.dtype(ml_dtypes.bfloat16))
    for call in (results.nan_wins_min_and_max_on_every_rank, results.shapes_and_scalars, results.large,
                 results.arguments_of_other_ranks_than_the_root, *order.ALL):  # fmt: skip
        add(call)
    for form in FORMATS:
        for kind in (np.float32, np.float16, ml_dtypes.bfloat16):
            add(compressed.compressed, form, np.dtype(kind))
        add(compressed.feedback_keeps_what_is_lost, form, np.dtype(np.float32))
    for kind in (np.float32, ml_dtypes.bfloat16):
        add(compressed.compressed_between_groups, np.dtype(kind))
    for kind in (np.float32, np.float16, ml_dtypes.bfloat16):
        add(compressed.errors_are_within_the_bounds, np.dtype(kind))
    add(compressed.compressed_sums_are_near)
    for row in failures.SCENARIOS:
        if full or (row.program, row.fault) in failures.FEW:
            found.append(Case(str(row), partial(failures.check, row=row), row.ranks))
    for call in (intact.refused, intact.refused_sizes, intact.messages, intact.cancelled):
        add(call, ranks=2)
    return found


def run(world: Communicator, full: bool = False, seed: int = 0, only: str = "") -> dict[str, str]:
    """Check the promises whose name contains ``only`` on the ranks of ``world``.  Collective.

    Returns the failures, the same on all ranks: for each broken promise, the tracebacks of the ranks that raised.
    Rank 0 logs each check before it starts, and the cause of each failure (the logger ``kos.testing.conformance``).
    If a check does not end within ``CHECK_SECONDS`` seconds, the rank logs it and ends its process with exit status 1.
    Raises InvalidArgument if Python runs without assertions (``-O``), or if no name contains ``only``.
    """
    if not __debug__:
        raise InvalidArgument("conformance: expected assertions, got Python without them (-O)")
    chosen = [case for case in cases(full, seed) if only in case.name and world.size >= case.ranks]
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
                case.call(comm)
        except Exception as error:
            failure = _cause(error), traceback.format_exc()
            comm.abort(reason=f"conformance: {case.name} failed")
        rows = [json.loads(row) for row in world.rendezvous.allgather(json.dumps(failure).encode())]
        failures = {rank: row for rank, row in enumerate(rows) if row}
        for rank, (cause, _) in failures.items():
            logger.error("BROKEN %s: rank %d: %s", case.name, rank, cause)
        if failures:
            broken[case.name] = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in failures.items())
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
