"""The table of promises.  Each row has a name, a condition on the communicators to which it applies, and a check.

The checks of results compare a ``Step`` with the model of the semantics (``model.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kos.comm import Communicator, ReduceOp
from kos.comm.compression import CARRIED, FORMATS
from kos.dtypes import DTYPES
from kos.testing.conformance import failures, intact, order, results, values
from kos.testing.conformance.model import MOVING, REDUCING, Step


def _every_backend(comm: Communicator) -> bool:
    return True


def _has_envelopes(comm: Communicator) -> bool:
    return bool(comm.backend.has_envelopes)


class Case(NamedTuple):
    """One promise."""

    name: str
    call: Callable[[Communicator], None]
    """Called on all ranks; raises on some or all of them if the promise does not hold."""
    ranks: int = 1
    """The least number of ranks."""
    host: bool = False
    """Whether the promise is only for host memory."""
    needs: Callable[[Communicator], bool] = _every_backend
    """Whether the backend of a communicator makes this promise."""

    def __str__(self) -> str:
        return self.name

    def applies(self, comm: Communicator) -> bool:
        """Whether ``comm`` has enough ranks, and its backend makes this promise."""
        return comm.size >= self.ranks and self.needs(comm)


def cases(full: bool = False, seed: int = 0, gpu: bool = False) -> list[Case]:
    """All promises; for every dtype, size and schedule if ``full`` (minutes), else for a few (seconds).

    ``gpu``: those for arrays on GPUs.
    """
    rows = chain(_first(), _of_results(full, seed), _of_compression(seed), _of_order(full, seed), _of_failures(full))
    return [case for case in rows if not (gpu and case.host)]


_FEW = {"float32": None, "bfloat16": ("SUM", "AVG"), "int32": ("SUM", "BXOR"), "bool": ("BAND", "BXOR")}
"""The dtypes of the short suite, and the reduce operations of each (None: all)."""
_F4, _F2, _BF2 = (np.dtype(each) for each in (np.float32, np.float16, ml_dtypes.bfloat16))


def _row(check: Callable[..., None], *arguments: Any, seed: int | None = None, **options: Any) -> Case:
    """A promise whose name is that of its check and the arguments.  A ``seed``, if given, is passed before these."""
    name = " ".join([check.__name__, *map(str, arguments)])
    given = arguments if seed is None else (seed, *arguments)
    return Case(name, lambda comm: check(comm, *given), **options)


def _floats(full: bool) -> list[np.dtype[Any]]:
    return [np.dtype(name) for name in ("float64", *CARRIED)] if full else [_F4, _BF2]


def _dtypes(full: bool) -> list[np.dtype[Any]]:
    return [dtype for dtype in values.ALL_DTYPES if full or dtype.name in _FEW]


def _first() -> Iterator[Case]:
    """Two promises that come first, because most others time out if one of them is broken."""
    yield _row(order.sends_need_no_further_call, ranks=2, host=True)
    yield _row(order.one_poll_advances_all_messages, ranks=2, host=True)


def _of_results(full: bool, seed: int) -> Iterator[Case]:
    """The results of calls (``results.correct``)."""

    def row(step: Step, how: str = "", host: bool = False, **options: Any) -> Case:
        op = [step.op.name] if step.name in REDUCING else []
        name = " ".join([step.name, str(step.dtype), *op, *how.split()])
        return Case(name, lambda comm: results.correct(comm, seed, step, **options), host=host)

    for dtype in _dtypes(full):
        for op in (op for known, op in values.REDUCTIONS if known == dtype):
            if full or op.name in (_FEW[dtype.name] or op.name):
                for name in ("all_reduce", "reduce_scatter"):
                    yield row(Step(name, dtype=dtype, op=op))
        op = ReduceOp.BXOR if dtype == np.bool_ else ReduceOp.SUM
        for name in ("reduce", "reduce_scatter"):
            yield row(Step(name, dtype=dtype, op=op, deterministic=True), "deterministic")
        for name in (*REDUCING[3:], *MOVING):
            yield row(Step(name, dtype=dtype, op=op), every_schedule=name == "all_gather")
    for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send_recv"):
        yield row(Step(name, dtype=_F4), "large", sizes=(values.LARGE,), every_schedule=name == "all_gather")
    for name in ("all_reduce", "reduce_scatter") if full else ():
        sizes = (*values.SIZES, values.LARGE)
        yield row(Step(name, dtype=_F4), "by every schedule", host=True, sizes=sizes, every_schedule=True)
    for dtype in _floats(full):
        for name in ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan"):
            step = Step(name, dtype=dtype, deterministic=name in REDUCING[:3], values="apart")
            yield row(step, "in rank order", sizes=(1, 2, 7, 997, 70_001), every_schedule=name != "reduce")
        if dtype.itemsize == 2:  # which are added in fp32
            step = Step("all_reduce", dtype=dtype)
            yield row(step, "by every schedule", host=True, sizes=(2, 997), every_schedule=True)
    for dtype, op in ((_F2, ReduceOp.AVG), (_F2, ReduceOp.MAX), (_BF2, ReduceOp.MAX)):
        yield row(Step("all_reduce", dtype=dtype, op=op, values="large"), "large numbers", sizes=(7,))
    special = Step("all_reduce", dtype=_F4, op=ReduceOp.MIN, values="with NaN and zeros")
    for dtype in [each.numpy for each in DTYPES.values() if each.is_float] if full else (_F4, _F2, _BF2):
        for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM):
            yield row(replace(special, dtype=dtype, op=op), special.values, sizes=(997,))
    yield row(special, f"{special.values} by every schedule", host=True, sizes=(7, 997), every_schedule=True)
    yield _row(results.shapes_and_scalars)


def _of_compression(seed: int) -> Iterator[Case]:
    for form in FORMATS:
        for dtype in map(np.dtype, CARRIED):
            yield _row(results.compressed, form, dtype, seed=seed)
        yield _row(results.feedback_keeps_what_is_lost, form, _F4, seed=seed)


def _of_order(full: bool, seed: int) -> Iterator[Case]:
    """Concurrent and repeated operations, and messages, all in host memory."""
    for check in (order.barrier_waits_for_all_ranks, order.split_of_a_split, order.close):
        yield _row(check, host=True)
    for seeded in (order.several_in_flight, order.repeated):
        yield _row(seeded, seed=seed, host=True)
    yield _row(order.waiting_for_one_advances_the_other_across_groups, ranks=2, host=True)
    for dtype in _dtypes(full):
        yield _row(order.messages_keep_their_order, dtype, seed=seed, ranks=2, host=True)
    for check in (order.messages_from_any_rank, order.receives_keep_their_order):
        yield _row(check, ranks=2, host=True, needs=_has_envelopes)
    yield _row(order.views_put_and_get, host=True)


def _of_failures(full: bool) -> Iterator[Case]:
    for row in failures.SCENARIOS:
        if full or (row.program, row.fault) in failures.FEW:
            call = partial(failures.check, row=row)
            yield Case(str(row), call, row.ranks, host=failures.GPU in row.never, needs=row.applies)
    for check in (intact.refused, intact.refused_sizes, intact.messages, intact.cancelled):
        yield _row(check, ranks=2, host=True)
