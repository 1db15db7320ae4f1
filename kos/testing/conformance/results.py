"""Results of every operation, for each dtype, reduce operation and size, in all forms of the call.

``correct`` compares a call with the model (``model.py``).  Each function is called on all ranks, with ndarrays, and
raises AssertionError for a wrong result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from kos.comm import Communicator, ReduceOp
from kos.comm.compression import FORMATS
from kos.comm.operation import OPERATIONS
from kos.comm.schedules import algorithms
from kos.errors import InvalidArgument
from kos.testing.conformance import model
from kos.testing.conformance.model import COMPRESSED, REDUCING, ROOTED, Step, Trial, forms
from kos.testing.conformance.values import SIZES, assert_bits, assert_same_on_all_ranks, raises

REPEATED = 7
"""The size of the calls that are made three times, each on other data, if only the root uses their argument."""


def correct(
    comm: Communicator, seed: int, step: Step, sizes: Sequence[int] = SIZES, every_schedule: bool = False
) -> None:  # fmt: skip
    """Calls like ``step`` of these sizes with every root, and all their forms, which have the same result.

    With ``every_schedule``, each call is made by every schedule that it may name.  If ``step`` is deterministic, these
    are the schedules that add in rank order.
    """
    if step.name == "send_recv" and comm.size == 1:
        return
    ordered = True if step.deterministic else None
    several = range(1 + len(algorithms(step.name, ordered=ordered))) if every_schedule else [step.algorithm]
    for each in (replace(step, count=count, root=root, algorithm=number) for count in sizes
                 for root in range(comm.size if step.name in ROOTED else 1) for number in several):  # fmt: skip
        for turn in range(3 if each.count == REPEATED and OPERATIONS[each.name].root_gives else 1):
            _one_result(comm, seed + turn, each)


def _one_result(comm: Communicator, seed: int, step: Step) -> None:
    """Make the call, and its other forms on the same data."""
    got = Trial(comm, step, seed).run()
    if step.name == "all_reduce":
        assert_same_on_all_ranks(comm, got, str(step))
    for form in (form for form in forms(step) if form.in_place or step.count <= 1000):
        other = Trial(comm, form, seed).run()
        if got is not None:
            assert_bits(other, got, f"{form}, and the same call in another form")


def compressed(comm: Communicator, seed: int, form: str, dtype: Any) -> None:
    """Every operation that can be compressed, on hostile values among others."""
    for name in COMPRESSED:
        step = Step(name, dtype=dtype, compress=form, values="hostile")
        correct(comm, seed, step, (0, 1, 63, 64, 65, 20_011))
        correct(comm, seed, replace(step, values="near the bounds"), (700,))
        if name in REDUCING:
            correct(comm, seed, replace(step, op=ReduceOp.AVG), (1000,))


def shapes_and_scalars(comm: Communicator) -> None:
    """Arrays of no dimension, the shapes of arrays that an operation makes, and bytes."""
    n, x = comm.size, np.array(float(comm.rank + 1))
    assert comm.all_reduce(x).shape == () and x == n * (n + 1) / 2
    a: Any = np.zeros((2 * n, 3), np.int8)
    shapes = [call(a).shape for call in (comm.all_gather, comm.reduce_scatter, comm.all_to_all)]
    assert shapes == [(n, 2 * n, 3), (2, 3), (2 * n, 3)]
    mine, everyone = bytes([comm.rank]) * comm.rank, [bytes([rank]) * rank for rank in range(n)]
    assert comm.all_gather_bytes(mine) == everyone
    for root in range(n):
        assert comm.gather_bytes(mine, root) == (everyone if comm.rank == root else None)
        if n > 1:
            with raises(InvalidArgument, f"data: expected None on rank {int(root == 0)}, which is not root {root}"):
                comm.broadcast_bytes(b"", root)
        assert comm.broadcast_bytes(mine if comm.rank == root else None, root) == everyone[root]


def feedback_keeps_what_is_lost(comm: Communicator, seed: int, name: str, dtype: Any) -> None:
    """What was sent and the residuals together are the sum of all vectors, up to rounding.  Infinities are not kept.

    Every backend computes the same bits.  A group of one, which compresses nothing, loses nothing.
    """
    n, me, exact, part = comm.size, comm.rank, comm.exact_group_size(), 320
    residual = np.zeros(n * part, dtype)
    if n == 1:
        x = np.arange(5).astype(dtype)
        comm.all_reduce(x, compress=name, residual=residual)
        assert_bits(x, np.arange(5).astype(dtype), "fed back")
        return assert_bits(residual, np.zeros(part, dtype), "residual")
    host, place, mine = me - me % exact, me % exact, slice(me * part, (me + 1) * part)
    given, sent, used = np.zeros(part), np.zeros(part), n // exact * part
    kept = residual[:used].copy()

    def check(xs: list[Any]) -> Any:
        got = comm.reduce_scatter(xs[me].copy(), compress=name, residual=residual)
        total = model.in_rank_order(xs[host : host + exact]).reshape(n // exact, exact, part)
        kept[...] = model.fed_back(FORMATS[name], total[:, place].reshape(-1), kept)[1]
        assert_bits(residual[:used], kept, "residual")
        return got

    for step in range(20):
        xs = [np.random.default_rng((seed, step, r)).standard_normal(n * part).astype(dtype) for r in range(n)]
        given += np.sum([x[mine].astype(np.float64) for x in xs], 0)
        sent += check(xs)
    left = comm.all_gather(residual).reshape(n, -1)[place::exact, :used].reshape(n // exact, n // exact, part)
    own = left[:, me // exact].astype(np.float64).sum(0)
    lost = np.linalg.norm(given - sent - own) / np.linalg.norm(given)
    assert lost < 20 * float(ml_dtypes.finfo(dtype).eps), f"{lost} of the sum"
    assert np.linalg.norm(given - sent) > 1e-3 * np.linalg.norm(given), "was it compressed?"
    largest = ml_dtypes.finfo(dtype).max
    for x in xs:
        x[::7] = np.resize(np.array([np.inf, np.nan, -np.inf, 1, 2], dtype), x[::7].size)
        x[1::7], residual[1:used:7], kept[1::7] = largest, largest / dtype.type(64), largest / dtype.type(64)
    check(xs)
    assert np.isfinite(residual.astype(np.float32)).all()
