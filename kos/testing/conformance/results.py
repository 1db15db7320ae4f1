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
from kos.comm import host_compressed as on_host
from kos.comm.compression import FORMATS
from kos.comm.schedules import algorithms
from kos.errors import InvalidArgument
from kos.testing.conformance import model
from kos.testing.conformance.model import COMPRESSED, REDUCING, ROOTED, Step, Trial, forms
from kos.testing.conformance.values import (
    SIZES,
    assert_bits,
    assert_numbers,
    assert_same_on_all_ranks,
    decoded,
    raises,
    vector,
)


def correct(comm: Communicator, seed: int, step: Step, sizes: Sequence[int] = SIZES) -> None:
    """Calls like ``step`` of these sizes with every root, and all their forms, which have the same result."""
    if step.name == "send_recv" and comm.size == 1:
        return
    several = step.name == "all_gather" and not step.compress
    numbers = range(1 + len(algorithms(step.name))) if several else [step.algorithm]
    for each in (replace(step, count=count, root=root, algorithm=number) for count in sizes
                 for root in range(comm.size if step.name in ROOTED else 1) for number in numbers):  # fmt: skip
        got = Trial(comm, each, seed).run()
        if step.name == "all_reduce":
            assert_same_on_all_ranks(comm, got, str(each))
        for form in (form for form in forms(each) if form.in_place or each.count <= 1000):
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


def compressed_between_groups(comm: Any, seed: int, form: str, dtype: Any, local: int = 2) -> None:
    """Exact sums of ``local`` neighbours, then compressed ones between these groups (docs/guides/collectives.md)."""
    local = 1 if comm.size % local or comm.size == local else local
    host, rail = comm.split(comm.rank // local), comm.split(comm.rank % local)
    for count in (1, 63, 64, 65, 1000, 20_011):
        xs = [vector((seed, rank), local * count, dtype, "hostile") for rank in range(comm.size)]
        x = xs[comm.rank].copy()
        part = host.reduce_scatter(x, deterministic=True)
        rail.all_reduce(part, compress=form)
        host.all_gather(part, x)
        step = Step("all_reduce", count, dtype, compress=form)
        with np.errstate(all="ignore"):
            sums = [np.split(model.in_rank_order(xs[at : at + local]), local) for at in range(0, comm.size, local)]
        parts: Any = [model.result(step, list(part), 0) for part in zip(*sums, strict=True)]
        assert_numbers(x, np.concatenate(parts), f"{step}, between groups of {local}")
    host.close()
    rail.close()


def in_rank_order(comm: Communicator, seed: int, name: str, dtype: Any) -> None:
    """By every schedule that adds in rank order; any other order of additions rounds these numbers differently."""
    for number in range(1 + len(algorithms(name, ordered=True)) if name != "reduce" else 1):
        step = Step(name, dtype=dtype, algorithm=number, deterministic=name in REDUCING[:3], values="apart")
        correct(comm, seed, step, (1, 2, 7, 997, 70_001))


def shapes_and_scalars(comm: Communicator) -> None:
    """Arrays of no dimension, and the shapes of arrays that an operation makes."""
    n, x = comm.size, np.array(float(comm.rank + 1))
    assert comm.all_reduce(x).shape == () and x == n * (n + 1) / 2
    a: Any = np.zeros((2 * n, 3), np.int8)
    shapes = [call(a).shape for call in (comm.all_gather, comm.reduce_scatter, comm.all_to_all)]
    assert shapes == [(n, 2 * n, 3), (2, 3), (2 * n, 3)]
    mine, everyone = bytes([comm.rank]) * comm.rank, [bytes([rank]) * rank for rank in range(n)]
    assert comm.all_gather_bytes(mine) == everyone
    for root in range(n):
        assert comm.gather_bytes(mine, root) == (everyone if comm.rank == root else None)
        assert comm.broadcast_bytes(mine if comm.rank == root else None, root) == everyone[root]


def arguments_of_other_ranks_than_the_root(comm: Communicator) -> None:
    """What only the root has is None elsewhere, or an array like the root's, which is not used; bytes are refused."""
    n, root = comm.size, comm.size - 1
    x, sent = np.arange(3.0 * n) + 1, comm.rank == root
    mine = x[3 * comm.rank :][:3]
    for _ in range(3):
        for given in (x if sent else None, x.copy() if sent else -x):
            out, part = np.zeros(3 * n), np.zeros(3)
            assert comm.broadcast(given, root, out=out) is out
            assert_bits(out, x, "broadcast with out")
            comm.scatter(given, part, root)
            assert_bits(part, mine, "scatter")
            for counts in ([3] * n, None):
                part[:] = 0
                comm.scatter_v(given, counts, part, root)
                assert_bits(part, mine, "scatter_v")
            assert given is None or (np.abs(given) == x).all()
    if n > 1:
        with raises(InvalidArgument, f"data: expected None on rank 0, which is not root {root}, got data"):
            comm.broadcast_bytes(b"", root)
    assert comm.broadcast_bytes(b"x" if sent else None, root) == b"x"


def sums_of_16_bits_in_fp32(comm: Communicator, dtype: Any) -> None:
    """The first number's neighbours are 2 apart: 16-bit additions of 0.75 are lost or round up."""
    base = 1 / float(ml_dtypes.finfo(dtype).eps) * 2
    xs = np.array([base] + [0.75] * (comm.size - 1))
    expected = np.array([xs.sum()], np.float32).astype(dtype)
    for algorithm in ("auto", *algorithms("all_reduce")):
        x = xs[comm.rank : comm.rank + 1].astype(dtype)
        comm.all_reduce(x, algorithm=algorithm)
        assert_bits(x, expected, algorithm)
    # An average of large numbers whose sum does not fit.
    x = np.full(3, 60000 if dtype == np.float16 else 3e38).astype(dtype)
    assert_bits(comm.all_reduce(x.copy(), ReduceOp.MAX), x, "max")
    if dtype == np.float16:
        assert_bits(comm.all_reduce(x.copy(), ReduceOp.AVG), x, "average")


def nan_wins_min_and_max_on_every_rank(comm: Communicator) -> None:
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM):
            for bad in range(comm.size):
                x = np.full(5, np.nan if comm.rank == bad else comm.rank).astype(dtype)
                comm.all_reduce(x, op)
                assert np.isnan(x.astype(np.float32)).all(), f"{op} of {dtype}: {x}"


def feedback_keeps_what_is_lost(comm: Communicator, seed: int, name: str, dtype: Any) -> None:
    """The sum of what was sent, and the residual, are the sum of all vectors, up to rounding; infinities are not kept.

    Every backend computes the same bits.  A group of one, which compresses nothing, loses nothing.
    """
    if comm.size == 1:
        x, nothing = np.arange(5).astype(dtype), np.zeros(5, dtype)
        comm.feed_back(x, nothing, name)
        return assert_bits(x, np.arange(5).astype(dtype), "fed back")
    rng, form = np.random.default_rng(seed + comm.rank), FORMATS[name]
    residual, given, sent = np.zeros(1000, dtype), np.zeros(1000), np.zeros(1000)
    for _ in range(20):
        x = rng.standard_normal(1000).astype(dtype)
        given += x.astype(np.float64)
        y, kept = x.copy(), residual.copy()
        comm.feed_back(x, residual, name)
        on_host.feed_back(y, kept, name)
        assert_bits(x, y, "fed back")
        assert_bits(residual, kept, "residual")
        sent += decoded(form, x)
    lost = np.linalg.norm(given - sent - residual.astype(np.float64)) / np.linalg.norm(given)
    assert lost < 20 * float(ml_dtypes.finfo(dtype).eps), f"{lost} of the sum"
    x[::7] = np.inf, np.nan, -np.inf, *x[21::7]
    largest = ml_dtypes.finfo(dtype).max
    x[1::7], residual[1::7] = largest, largest / dtype.type(64)
    y, kept = x.copy(), residual.copy()
    comm.feed_back(x, residual, name)
    on_host.feed_back(y, kept, name)
    assert_bits(residual, kept, "residual of the largest")
    assert (x[1::7] == largest).all(), "a finite number became infinite"
    assert np.isfinite(residual.astype(np.float32)).all() and not np.isfinite(x[:21:7].astype(np.float32)).any()
