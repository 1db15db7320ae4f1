"""The promises of every collective (docs/communicator.md, "What is promised") as tests that any backend can call.

``run(world)`` on all ranks of a communicator, or each of ``cases()`` as a parametrized test of pytest; from the
command line ``python -m kos.testing.conformance --backend NAME``, alone or under mpirun, torchrun or srun.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from kos.comm import Communicator
from kos.comm.schedules import algorithms
from kos.errors import InvalidArgument
from kos.testing.conformance import failures, order, results, values

__all__ = ["Case", "cases", "run"]

_FEW = {"float32": None, "bfloat16": ("SUM", "AVG"), "int32": ("SUM", "BXOR"), "bool": ("BOR",)}
"""The dtypes of the short suite, and the reduce operations of each (None: all)."""


class Case(NamedTuple):
    """One promise: ``call(comm)`` raises where it does not hold, on all ranks or on some."""

    name: str
    call: Callable[[Communicator], None]
    ranks: int = 1
    """How many it takes."""

    def __str__(self) -> str:
        return self.name


def cases(full: bool = False, seed: int = 0) -> list[Case]:
    """All promises; for every dtype, size and schedule if ``full`` (minutes), else for a few (seconds)."""
    dtypes = [dtype for dtype in values.ALL_DTYPES if full or dtype.name in _FEW]
    found: list[Case] = []

    def add(call: Callable[..., None], *args: object, ranks: int = 1) -> None:
        name = " ".join([call.__name__, *(str(getattr(arg, "name", arg)) for arg in args)])
        first = (seed,) if "seed" in inspect.signature(call).parameters else ()
        found.append(Case(name, lambda comm: call(comm, *first, *args), ranks))

    for dtype in dtypes:
        for known, op in values.REDUCTIONS:
            if known == dtype and (full or op.name in (_FEW[dtype.name] or op.name)):
                add(results.all_reduce, dtype, op)
                add(results.reduce_scatter, dtype, op)
        for deterministic in (False, True):
            add(results.reduce, dtype, deterministic)
        if dtype != np.bool_:
            add(results.reduce_scatter_v, dtype)
        for move in _MOVES:
            add(move, dtype)
    for algorithm in algorithms("all_reduce") if full else ("auto",):
        add(results.all_reduce_by_algorithm, algorithm, np.float32)
    for algorithm in algorithms("reduce_scatter") if full else ("auto",):
        add(results.reduce_scatter_by_algorithm, algorithm)
    for kind in (np.float32, ml_dtypes.bfloat16):
        add(results.deterministic_adds_in_rank_order, np.dtype(kind))
    add(results.sums_of_16_bits_in_fp32, np.dtype(ml_dtypes.bfloat16))
    for call in (results.nan_wins_min_and_max_on_every_rank, results.shapes_and_scalars, results.large, *_ORDERS):
        add(call)
    add(failures.refused, ranks=2)
    for what in failures.MISMATCHES:
        add(failures.mismatch, what, ranks=2)
    for call in (failures.absent, failures.lost, failures.messages):
        add(call, ranks=2)
    return found


def run(world: Communicator, full: bool = False, seed: int = 0, only: str = "") -> dict[str, str]:
    """Check the promises whose name contains ``only`` on the ranks of ``world``.  Collective.

    Returns the failures, the same on all ranks: of each promise that does not hold the tracebacks of the ranks that
    found it so.  Raises InvalidArgument where Python runs without assertions (``-O``).
    """
    if not __debug__:
        raise InvalidArgument("conformance: expected assertions, got Python without them (-O)")
    broken: dict[str, str] = {}
    comm = world.duplicate()
    for case in cases(full, seed):
        if only not in case.name or world.size < case.ranks:
            continue
        failure = b""
        try:
            case.call(comm)
        except Exception:
            failure = traceback.format_exc().encode()
            comm.abort(reason=f"conformance: {case.name} failed")
        told = [text.decode() for text in world.rendezvous.allgather(failure)]
        if any(told):
            broken[case.name] = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
            if not failure:
                comm.abort(reason=f"conformance: {case.name} failed")
            comm = world.duplicate()
    comm.close()
    return broken


_MOVES = (
    results.broadcast, results.all_gather, results.all_gather_v, results.all_to_all, results.all_to_all_v,
    results.gather_and_scatter, results.messages,
)  # fmt: skip
_ORDERS = (
    order.barrier_waits_for_everybody, order.waiting_for_one_moves_the_other_across_groups, order.a_part_of_a_part,
    order.messages_of_duplicates_do_not_meet, order.batch, order.close, order.several_at_once, order.persistent,
    order.bytes_of_any_length,
)  # fmt: skip
