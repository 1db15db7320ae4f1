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
from kos.comm.compression import CARRIED, FORMATS
from kos.comm.schedules import algorithms
from kos.errors import InvalidArgument, plural
from kos.testing.conformance import failures, intact, model, order, results, values
from kos.testing.conformance.model import MOVING, REDUCING, Step
from kos.testing.conformance.on_gpu import OnGPU

__all__ = ["Case", "cases", "run"]

log = logging.getLogger(__name__)
_SILENT = logging.Logger("silent", logging.CRITICAL)
_CHECKS = [module.__file__ for module in (failures, intact, model, order, results)]

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


def cases(full: bool = False, seed: int = 0, gpu: bool = False) -> list[Case]:
    """All promises; for every dtype, size and schedule if ``full`` (minutes), else for a few (seconds).

    ``gpu``: those for arrays on GPUs.
    """
    found: list[Case] = []

    def add(call: Callable[..., None], *args: Any, name: str = "", ranks: int = 1, host: bool = False) -> None:
        """A promise; ``host``: of host memory alone."""
        name = name or " ".join([call.__name__, *map(str, args)])
        given = (seed, *args) if "seed" in inspect.signature(call).parameters else args
        if not (gpu and host):
            found.append(Case(name, lambda comm: call(comm, *given), ranks))

    def results_of(name: str, dtype: Any, op: ReduceOp = ReduceOp.SUM, more: str = "", **options: Any) -> None:
        sizes = options.pop("sizes", values.SIZES)
        shown = [name, str(dtype), *([op.name] if name in REDUCING else []), *more.split()]
        add(results.correct, Step(name, dtype=dtype, op=op, **options), sizes, name=" ".join(shown))

    add(order.sends_need_no_further_call, ranks=2, host=True)  # if one of these two fails, most others time out
    add(order.one_poll_advances_all_messages, ranks=2, host=True)
    for dtype in (dtype for dtype in values.ALL_DTYPES if full or dtype.name in _FEW):
        for known, op in values.REDUCTIONS:
            if known == dtype and (full or op.name in (_FEW[dtype.name] or op.name)):
                for name in ("all_reduce", "reduce_scatter"):
                    results_of(name, dtype, op)
        op = ReduceOp.BXOR if dtype == np.bool_ else ReduceOp.SUM
        for name in ("reduce", "reduce_scatter"):
            results_of(name, dtype, op, "deterministic", deterministic=True)
        for name in ("reduce_scatter_v", "scan", "exscan", *MOVING):
            results_of(name, dtype, op)
        add(order.messages_keep_their_order, dtype, host=True)
    f4, f2 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
    for name in ("all_reduce", "reduce_scatter"):
        for algorithm in ("auto", *algorithms(name))[: None if full and not gpu else 1]:
            number, sizes = ("auto", *algorithms(name)).index(algorithm), (*values.SIZES, values.LARGE)
            results_of(name, f4, more=f"by {algorithm}", algorithm=number, sizes=sizes)
    for name in ("all_gather", "broadcast", "send_recv"):
        results_of(name, f4, more="large", sizes=[values.LARGE])
    floats = [np.dtype(name) for name in ("float64", *CARRIED)] if full else [f4, f2]
    for kind in floats:
        for name in ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan"):
            add(results.in_rank_order, name, kind)
        if kind.itemsize == 2:
            add(results.sums_of_16_bits_in_fp32, kind)
    for call in (results.nan_wins_min_and_max_on_every_rank, results.shapes_and_scalars,
                 results.arguments_of_other_ranks_than_the_root):  # fmt: skip
        add(call)
    for each in order.ALL:
        add(each, host=True)
    for form in FORMATS:
        for kind in CARRIED:
            add(results.compressed, form, np.dtype(kind))
        add(results.feedback_keeps_what_is_lost, form, f4)
    for row in failures.SCENARIOS:
        if full or (row.program, row.fault) in failures.FEW:
            add(partial(failures.check, row=row), name=str(row), ranks=row.ranks, host=failures.GPU in row.never)
    for call in (intact.refused, intact.refused_sizes, intact.messages, intact.cancelled):
        add(call, ranks=2, host=True)
    return found


def run(
    world: Communicator, full: bool = False, seed: int = 0, only: str = "", gpu: bool = False
) -> dict[str, str]:  # fmt: skip
    """Check the promises whose name contains ``only`` on the ranks of ``world``.  Collective.

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
    chosen = [case for case in cases(full, seed, gpu) if only in case.name and world.size >= case.ranks]
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
                case.call(OnGPU(comm) if gpu else comm)  # type: ignore[arg-type]
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
