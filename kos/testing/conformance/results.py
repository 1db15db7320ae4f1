"""Results of every operation, for each dtype, reduce operation and size, in place and not, compared with NumPy.

NumPy computes in 64 bits.  Each function is called on all ranks, with ndarrays, and raises AssertionError for a wrong
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from kos.comm import Communicator, PremulSum, ReduceOp
from kos.comm.schedules import algorithms
from kos.errors import InvalidArgument
from kos.testing.conformance.model import MOVING, ROOTED, Step, call, contributions, in_place, parts
from kos.testing.conformance.values import (
    LARGE,
    SIZES,
    assert_bits,
    assert_same_on_all_ranks,
    check,
    factors_of,
    in_rank_order,
    inputs,
    poison,
    raises,
)


def correct(
    comm: Communicator, seed: int, name: str, dtype: Any, op: ReduceOp = ReduceOp.SUM, algorithm: int = 0,
    deterministic: bool = False, sizes: Sequence[int] = SIZES,
) -> None:  # fmt: skip
    """An operation: into a given array, into a new array, with sizes exchanged first, and in place."""
    n, me, factors = comm.size, comm.rank, factors_of(comm.size)
    given = PremulSum(factors[me]) if op is ReduceOp.PREMUL_SUM else op
    several = range(1 + len(algorithms(name))) if name == "all_gather" else [algorithm]
    for step in (Step(name, count, dtype, given, root, number, deterministic) for count in sizes
                 for root in range(n if name in ROOTED else 1) for number in several):  # fmt: skip
        if name == "send_recv" and n == 1:
            return
        xs = contributions(seed, step, n)
        mine, x = parts(step, xs, me), xs[me].copy()
        untouched = poison(sum(part.size for part in mine or xs[:1]) if name in MOVING else (mine or xs)[0].size, dtype)
        out = untouched.copy()
        got = call(comm, step, x, out)
        assert_bits(x, xs[me], f"input of {step}")
        assert got is (None if mine is None else out)
        if mine is None:
            assert_bits(out, untouched, f"out of another rank in {step}")
        elif name in MOVING:
            assert_bits(out, np.concatenate(mine), str(step))
        else:
            check(out, mine, op, factors)
        if name == "all_reduce":
            assert_same_on_all_ranks(comm, out, str(step))
        again = {}
        if name.startswith(("all_gather", "all_to_all", "gather")):
            again["made output of"] = call(comm, step, x, None)
        if name.endswith("_v"):
            again["sizes travel:"] = call(comm, replace(step, sized=False), x, untouched.copy())
        for what, got in again.items():
            assert (got is None) == (mine is None), f"{what} {step}"
            assert_bits(out if got is None else got.reshape(-1), out, f"{what} {step}")
        if name.removesuffix("_v") not in ("all_to_all", "send_recv"):
            for sized in (True, False)[: 1 + name.endswith("_v")]:
                _check_in_place(comm, replace(step, in_place=True, sized=sized), x, None if mine is None else out)


def _check_in_place(comm: Communicator, step: Step, x: Any, out: Any) -> None:
    """The call of ``x`` in place gives ``out``, None on a rank without a result, and changes nothing else."""
    count = (x if out is None else out).size
    given, result = in_place(step, comm.size, comm.rank, x.copy(), poison(count, x.dtype))
    kept, part = in_place(step, comm.size, comm.rank, x.copy(), poison(count, x.dtype))
    assert call(comm, step, given, result) is (None if out is None else result)
    if out is not None:
        part[...] = out
    assert_bits(result, part, f"in place: {step}")
    assert_bits(given, kept, f"input in place: {step}")


def messages(comm: Communicator, seed: int, dtype: Any) -> None:
    """Two tags, received in reverse order."""
    n, me = comm.size, comm.rank
    correct(comm, seed, "send_recv", dtype)
    for count in SIZES if n > 1 else ():
        xs = inputs(seed, n, count, dtype)
        right, left = (me + 1) % n, (me - 1) % n
        first, second = poison(count, dtype), poison(count, dtype)
        sent = [comm.send(xs[me], right, 1, async_op=True), comm.send(xs[right], right, 2, async_op=True)]
        comm.recv(second, left, 2)
        comm.recv(first, left, 1)
        for work in sent:
            work.wait()
        assert_bits(first, xs[left], "tag 1")
        assert_bits(second, xs[me], "tag 2")


def large(comm: Communicator, seed: int) -> None:
    """Several segments of every schedule."""
    for name in ("all_gather", "broadcast", "send_recv"):
        correct(comm, seed, name, np.float32, sizes=[LARGE])


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


def deterministic_adds_in_rank_order(comm: Communicator, seed: int, dtype: Any) -> None:
    """Includes numbers of such different size that any other order of additions rounds differently."""
    for count in (1, 2, 7, 997, 70_001):
        xs = inputs(seed, comm.size, count, dtype)
        xs = [(x.astype(np.float64) * 16.0 ** (r % 3)).astype(dtype) for r, x in enumerate(xs)]
        for algorithm in ("auto", *algorithms("all_reduce", ordered=True)):
            x = xs[comm.rank].copy()
            comm.all_reduce(x, algorithm=algorithm, deterministic=True)
            assert_bits(x, in_rank_order(xs), f"{algorithm}, {count} elements")
        for root in range(comm.size):
            out = poison(count, dtype)
            comm.reduce(xs[comm.rank], root, out=out, deterministic=True)
            if comm.rank == root:
                assert_bits(out, in_rank_order(xs), f"reduce, {count} elements")
        if count % comm.size == 0:
            part = comm.reduce_scatter(xs[comm.rank], deterministic=True)
            whole = in_rank_order(xs).reshape(comm.size, -1)
            assert_bits(part, whole[comm.rank], f"reduce_scatter, {count} elements")


def scans_add_in_rank_order(comm: Communicator, seed: int, dtype: Any) -> None:
    """The same bits on every backend and by every schedule, of numbers of which any other order differs."""
    for count in (1, 7, 70_001):
        xs = inputs(seed, comm.size, count, dtype)
        xs = [(x.astype(np.float64) * 16.0 ** (r % 3)).astype(dtype) for r, x in enumerate(xs)]
        for algorithm in ("auto", *algorithms("scan")):
            out = poison(count, dtype)
            assert comm.scan(xs[comm.rank], out=out, algorithm=algorithm) is out
            assert_bits(out, in_rank_order(xs[: comm.rank + 1]), f"scan by {algorithm}, {count} elements")
            x = xs[comm.rank].copy()
            got = comm.exscan(x, algorithm=algorithm)
            assert got is (x if comm.rank else None)
            assert_bits(x, in_rank_order(xs[: comm.rank] or xs[:1]), f"exscan by {algorithm}, {count} elements")


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
