"""What every operation gives: each dtype, reduce operation and size, in place and not, against NumPy in 64 bits.

Each function is called on all ranks, with ndarrays; it raises AssertionError where a result is wrong.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kos.comm import Communicator, ReduceOp
from kos.comm.schedules import algorithms
from kos.testing.conformance.values import (
    LARGE,
    SIZES,
    assert_bits,
    assert_same_on_all_ranks,
    check,
    factors_of,
    in_rank_order,
    inputs,
    named,
    poison,
)


def all_reduce(comm: Communicator, seed: int, dtype: np.dtype, op: ReduceOp) -> None:
    """The same bits on every rank, in place and not."""
    factors = factors_of(comm.size)
    for count in SIZES:
        xs = inputs(seed, comm.size, count, dtype)
        reduce_op = named(op, factors[comm.rank])
        in_place = xs[comm.rank].copy()
        assert comm.all_reduce(in_place, reduce_op) is in_place
        check(in_place, xs, op, factors)
        assert_same_on_all_ranks(comm, in_place, f"{op} of {count} {dtype}")
        x, out = xs[comm.rank].copy(), poison(count, dtype)
        assert comm.all_reduce(x, reduce_op, out=out) is out
        assert_bits(x, xs[comm.rank], "input")
        assert_bits(out, in_place, "out of place")


def all_reduce_by_algorithm(comm: Communicator, seed: int, algorithm: str, dtype: Any) -> None:
    """By each schedule, through several segments of it."""
    for count in (*SIZES, LARGE):
        xs = inputs(seed, comm.size, count, dtype)
        x = xs[comm.rank].copy()
        comm.all_reduce(x, algorithm=algorithm)
        check(x, xs, ReduceOp.SUM, [])
        assert_same_on_all_ranks(comm, x, algorithm)


def reduce(comm: Communicator, seed: int, dtype: np.dtype, deterministic: bool) -> None:
    op = ReduceOp.BXOR if dtype == np.bool_ else ReduceOp.SUM
    for count in SIZES:
        xs = inputs(seed, comm.size, count, dtype)
        for root in range(comm.size):
            x, out = xs[comm.rank].copy(), poison(count, dtype)
            got = comm.reduce(x, root, op, out=out, deterministic=deterministic)
            assert_bits(x, xs[comm.rank], "input")
            in_place = xs[comm.rank].copy()
            comm.reduce(in_place, root, op, deterministic=deterministic)
            if comm.rank == root:
                assert got is out
                check(out, xs, op, [])
                assert_bits(in_place, out, "in place")
            else:
                assert got is None
                assert_bits(out, poison(count, dtype), "out of another rank")
                assert_bits(in_place, xs[comm.rank], "x of another rank")


def reduce_scatter(comm: Communicator, seed: int, dtype: np.dtype, op: ReduceOp) -> None:
    n, me, factors = comm.size, comm.rank, factors_of(comm.size)
    reduce_op = named(op, factors[me])
    for count in SIZES:
        xs = inputs(seed, n, n * count, dtype)
        mine = slice(me * count, (me + 1) * count)
        parts = [x[mine] for x in xs]
        for deterministic in (False, True):
            x, out = xs[me].copy(), poison(count, dtype)
            assert comm.reduce_scatter(x, out, reduce_op, deterministic=deterministic) is out
            check(out, parts, op, factors)
            assert_bits(x, xs[me], "input")
            x = xs[me].copy()
            comm.reduce_scatter(x, x[mine], reduce_op, deterministic=deterministic)
            assert_bits(x[mine], out, "in its own part")
        made = comm.reduce_scatter(xs[me].reshape(n, count), op=reduce_op, deterministic=True)
        assert_bits(made, out.reshape(1, count), "made output")


def reduce_scatter_by_algorithm(comm: Communicator, seed: int, algorithm: str) -> None:
    for count in (7, LARGE):
        xs = inputs(seed, comm.size, comm.size * count, np.float32)
        got = comm.reduce_scatter(xs[comm.rank], algorithm=algorithm)
        check(got, [x[comm.rank * count : (comm.rank + 1) * count] for x in xs], ReduceOp.SUM, [])


def reduce_scatter_v(comm: Communicator, seed: int, dtype: np.dtype) -> None:
    n, me = comm.size, comm.rank
    for counts in ([3 * r for r in range(n)], [0] * n, [5 + r % 2 for r in range(n)]):
        xs = inputs(seed, n, sum(counts), dtype)
        begin = sum(counts[:me])
        parts = [x[begin : begin + counts[me]] for x in xs]
        out = poison(counts[me], dtype)
        comm.reduce_scatter_v(xs[me], counts, out)
        check(out, parts, ReduceOp.SUM, [])
        assert_bits(comm.reduce_scatter_v(xs[me], counts), out)


def broadcast(comm: Communicator, seed: int, dtype: np.dtype) -> None:
    for count in SIZES:
        xs = inputs(seed, comm.size, count, dtype)
        for root in range(comm.size):
            x = xs[comm.rank].copy() if comm.rank == root else poison(count, dtype)
            assert comm.broadcast(x, root) is x
            assert_bits(x, xs[root], f"root {root}")
            out = poison(count, dtype)
            comm.broadcast(xs[comm.rank].copy(), root, out=out)
            assert_bits(out, xs[root], f"root {root}, out of place")


def all_gather(comm: Communicator, seed: int, dtype: np.dtype) -> None:
    n, me = comm.size, comm.rank
    for count in SIZES:
        xs = inputs(seed, n, count, dtype)
        expected = np.stack(xs)
        assert_bits(comm.all_gather(xs[me]), expected, "made output")
        for algorithm in ("auto", *algorithms("all_gather")):
            out = poison(n * count, dtype)
            assert comm.all_gather(xs[me].copy(), out, algorithm=algorithm) is out
            assert_bits(out, expected.reshape(-1), algorithm)
            out = poison(n * count, dtype)
            out[me * count : (me + 1) * count] = xs[me]
            comm.all_gather(out[me * count : (me + 1) * count], out, algorithm=algorithm)
            assert_bits(out, expected.reshape(-1), f"{algorithm} in place")


def all_gather_v(comm: Communicator, seed: int, dtype: np.dtype) -> None:
    n, me = comm.size, comm.rank
    for counts in ([3 * r for r in range(n)], [0] * n, [2 + r % 2 for r in range(n)]):
        xs = [inputs(seed + r, 1, counts[r], dtype)[0] for r in range(n)]
        out = poison(sum(counts), dtype)
        comm.all_gather_v(xs[me], counts, out)
        assert_bits(out, np.concatenate(xs))
        assert_bits(comm.all_gather_v(xs[me], counts), out)


def all_to_all(comm: Communicator, seed: int, dtype: np.dtype) -> None:
    n, me = comm.size, comm.rank
    for count in SIZES:
        xs = inputs(seed, n, n * count, dtype)
        expected = np.stack([x.reshape(n, count)[me] for x in xs])
        out = poison((n, count), dtype)
        comm.all_to_all(xs[me].reshape(n, count), out)
        assert_bits(out, expected)
        assert_bits(comm.all_to_all(xs[me]), expected.reshape(-1), "made output")


def all_to_all_v(comm: Communicator, seed: int, dtype: np.dtype) -> None:
    n, me = comm.size, comm.rank
    matrix = np.random.default_rng(seed).integers(0, 4, (n, n))  # from row to column
    xs = [inputs(seed + r, 1, int(matrix[r].sum()), dtype)[0] for r in range(n)]
    pieces = [np.split(x, np.cumsum(matrix[r])[:-1]) for r, x in enumerate(xs)]
    expected = np.concatenate([pieces[r][me] for r in range(n)])
    out = poison(expected.size, dtype)
    comm.all_to_all_v(xs[me], matrix[me].tolist(), matrix[:, me].tolist(), out)
    assert_bits(out, expected)


def gather_and_scatter(comm: Communicator, seed: int, dtype: np.dtype) -> None:
    n, me = comm.size, comm.rank
    for count in SIZES:
        xs = inputs(seed, n, count, dtype)
        for root in range(comm.size):
            out: Any = poison((n, count), dtype) if me == root else None
            got: Any = comm.gather(xs[me], root, out)
            part = poison(count, dtype)
            if me == root:
                assert got is out
                assert_bits(out, np.stack(xs), "gather")
                comm.scatter(out, part, root)
            else:
                assert got is None
                comm.scatter(None, part, root)
            assert_bits(part, xs[me], "scatter")


def messages(comm: Communicator, seed: int, dtype: np.dtype) -> None:
    n, me = comm.size, comm.rank
    if n == 1:
        return
    right, left = (me + 1) % n, (me - 1) % n
    for count in SIZES:
        xs = inputs(seed, n, count, dtype)
        out = poison(count, dtype)
        comm.send_recv(xs[me], out, right, left)
        assert_bits(out, xs[left], "send_recv")
        # Two tags, received in the other order.
        first, second = poison(count, dtype), poison(count, dtype)
        sent = [comm.send(xs[me], right, 1, async_op=True), comm.send(xs[right], right, 2, async_op=True)]
        comm.recv(second, left, 2)
        comm.recv(first, left, 1)
        for work in sent:
            work.wait()
        assert_bits(first, xs[left], "tag 1")
        assert_bits(second, xs[me], "tag 2")


def large(comm: Communicator, seed: int) -> None:
    n, me = comm.size, comm.rank
    xs = inputs(seed, n, LARGE, np.float32)
    x = xs[me].copy()
    comm.all_reduce(x)
    check(x, xs, ReduceOp.SUM, [])
    assert_same_on_all_ranks(comm, x)
    assert_bits(comm.all_gather(xs[me]), np.stack(xs), "all_gather")
    x = xs[me].copy()
    comm.broadcast(x, n - 1)
    assert_bits(x, xs[-1], "broadcast")
    if n > 1:
        out = poison(LARGE, np.float32)
        comm.send_recv(xs[me], out, (me + 1) % n, (me - 1) % n)
        assert_bits(out, xs[me - 1], "send_recv")


def shapes_and_scalars(comm: Communicator) -> None:
    x: Any = np.array(float(comm.rank + 1))
    assert comm.all_reduce(x).shape == ()
    assert x == sum(range(1, comm.size + 1))
    gathered: Any = comm.all_gather(np.zeros((2, 3), np.int8))
    assert gathered.shape == (comm.size, 2, 3)
    assert comm.reduce_scatter(np.zeros((2 * comm.size, 3))).shape == (2, 3)
    lengths = [len(data) for data in comm.all_gather_bytes(b"x" * comm.rank)]
    assert lengths == list(range(comm.size))


def deterministic_adds_in_rank_order(comm: Communicator, seed: int, dtype: Any) -> None:
    for count in (1, 2, 7, 997, 70_001):
        xs = inputs(seed, comm.size, count, dtype)
        # Far apart in size, so that any other order of additions rounds differently.
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


def sums_of_16_bits_in_fp32(comm: Communicator, dtype: Any) -> None:
    # The first number's neighbours are 2 apart: 16-bit additions of 0.75 are lost or round up.
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
