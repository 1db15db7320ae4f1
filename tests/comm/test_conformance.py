"""Every operation, dtype, reduce op and size on every backend, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kos
from kos import PremulSum, ReduceOp
from kos.comm.reduction import _ALLOWED
from kos.comm.schedules import algorithms
from kos.dtypes import dtype_of
from tests.comm.ranks import (
    ALL_DTYPES,
    SIZES,
    SUMS_IN_16_BITS,
    assert_bits,
    assert_same_on_all_ranks,
    inputs,
    poison,
    roots,
)

LARGE = 300_007  # elements, prime: several segments of every schedule

REDUCTIONS = [(dtype, op) for dtype in ALL_DTYPES for op in ReduceOp if op in _ALLOWED[dtype_of(dtype).kind]]


def reduced(contributions: list[np.ndarray], op: ReduceOp, factors: list[float]) -> np.ndarray:
    """The result in 64 bits, by NumPy alone."""
    dtype = contributions[0].dtype
    wide = {"i": np.int64, "u": np.uint64, "b": np.bool_, "c": np.complex128}.get(dtype.kind, np.float64)
    x = np.stack([c.astype(wide) for c in contributions])
    match op:
        case ReduceOp.SUM:
            return x.sum(axis=0)
        case ReduceOp.PREMUL_SUM:
            return (x * np.array(factors)[:, None]).sum(axis=0)
        case ReduceOp.AVG:
            return x.mean(axis=0)
        case ReduceOp.PROD:
            return x.prod(axis=0)
        case ReduceOp.MIN:
            return x.min(axis=0)
        case ReduceOp.MAX:
            return x.max(axis=0)
        case ReduceOp.BAND:
            return np.bitwise_and.reduce(x)
        case ReduceOp.BOR:
            return np.bitwise_or.reduce(x)
        case ReduceOp.BXOR:
            return np.bitwise_xor.reduce(x)
    raise AssertionError(op)


def check(got: np.ndarray, contributions: list[np.ndarray], op: ReduceOp, factors: list[float]) -> None:
    """Integers and comparisons exactly; sums and products within the rounding of the type they run in."""
    dtype, expected = contributions[0].dtype, reduced(contributions, op, factors)
    if dtype.kind in "iub" or op in (ReduceOp.MIN, ReduceOp.MAX):
        assert_bits(got, expected.astype(dtype), str(op))
        return
    n = len(contributions)
    carrier = dtype_of(dtype).accumulate
    if SUMS_IN_16_BITS.get() and dtype.itemsize == 2:
        carrier = dtype
    eps = float(ml_dtypes.finfo(carrier).eps)
    magnitude = reduced(
        [np.abs(c.astype(np.complex128)).astype(np.float64) for c in contributions], op, [abs(f) for f in factors]
    )
    bound = (n + 2) * (eps * magnitude + float(ml_dtypes.finfo(carrier).smallest_subnormal))
    wide = got.astype(np.complex128 if dtype.kind == "c" else np.float64)
    if carrier != dtype:
        # Rounded once: the exact result, less and plus the carrier's error, brackets it when rounded.
        low = (expected - bound).astype(np.float32).astype(dtype).astype(np.float64)
        high = (expected + bound).astype(np.float32).astype(dtype).astype(np.float64)
        good = (low <= wide) & (wide <= high)
        good |= np.isnan(wide) & (np.isnan(low) | np.isnan(high))
    else:
        good = np.abs(wide - expected) <= 4 * bound
    assert good.all(), f"{op} of {dtype} on {n}: {got[~good][:5]} instead of {expected[~good][:5]}"


def named(op: ReduceOp, factor: float) -> Any:
    return PremulSum(factor) if op is ReduceOp.PREMUL_SUM else op


def factors_of(size: int) -> list[float]:
    return [0.5 + 0.25 * rank for rank in range(size)]


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS, ids=lambda x: getattr(x, "name", str(x)))
def test_all_reduce(ranks: Any, seed: int, dtype: np.dtype, op: ReduceOp) -> None:
    def body(comm: kos.Communicator) -> None:
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

    ranks.run(body)


@pytest.mark.parametrize("dtype", [np.float32, np.int64], ids=["float32", "int64"])
@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
def test_all_reduce_by_algorithm(ranks: Any, seed: int, algorithm: str, dtype: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        for count in (*SIZES, LARGE):
            xs = inputs(seed, comm.size, count, dtype)
            x = xs[comm.rank].copy()
            comm.all_reduce(x, algorithm=algorithm)
            check(x, xs, ReduceOp.SUM, [])
            assert_same_on_all_ranks(comm, x, algorithm)

    ranks.run(body)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_reduce(ranks: Any, seed: int, dtype: np.dtype, deterministic: bool) -> None:
    op = ReduceOp.BXOR if dtype == np.bool_ else ReduceOp.SUM

    def body(comm: kos.Communicator) -> None:
        for count in SIZES:
            xs = inputs(seed, comm.size, count, dtype)
            for root in roots(comm):
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

    ranks.run(body)


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS, ids=lambda x: getattr(x, "name", str(x)))
def test_reduce_scatter(ranks: Any, seed: int, dtype: np.dtype, op: ReduceOp) -> None:
    def body(comm: kos.Communicator) -> None:
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

    ranks.run(body)


@pytest.mark.parametrize("algorithm", algorithms("reduce_scatter"))
def test_reduce_scatter_by_algorithm(ranks: Any, seed: int, algorithm: str) -> None:
    def body(comm: kos.Communicator) -> None:
        for count in (7, LARGE):
            xs = inputs(seed, comm.size, comm.size * count, np.float32)
            got = comm.reduce_scatter(xs[comm.rank], algorithm=algorithm)
            check(got, [x[comm.rank * count : (comm.rank + 1) * count] for x in xs], ReduceOp.SUM, [])

    ranks.run(body)


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if d != np.bool_], ids=str)
def test_reduce_scatter_v(ranks: Any, seed: int, dtype: np.dtype) -> None:
    def body(comm: kos.Communicator) -> None:
        n, me = comm.size, comm.rank
        for counts in ([3 * r for r in range(n)], [0] * n, [5 + r % 2 for r in range(n)]):
            xs = inputs(seed, n, sum(counts), dtype)
            begin = sum(counts[:me])
            parts = [x[begin : begin + counts[me]] for x in xs]
            out = poison(counts[me], dtype)
            comm.reduce_scatter_v(xs[me], counts, out)
            check(out, parts, ReduceOp.SUM, [])
            assert_bits(comm.reduce_scatter_v(xs[me], counts), out)

    ranks.run(body)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_broadcast(ranks: Any, seed: int, dtype: np.dtype) -> None:
    def body(comm: kos.Communicator) -> None:
        for count in SIZES:
            xs = inputs(seed, comm.size, count, dtype)
            for root in roots(comm):
                x = xs[comm.rank].copy() if comm.rank == root else poison(count, dtype)
                assert comm.broadcast(x, root) is x
                assert_bits(x, xs[root], f"root {root}")
                out = poison(count, dtype)
                comm.broadcast(xs[comm.rank].copy(), root, out=out)
                assert_bits(out, xs[root], f"root {root}, out of place")

    ranks.run(body)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_all_gather(ranks: Any, seed: int, dtype: np.dtype) -> None:
    def body(comm: kos.Communicator) -> None:
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

    ranks.run(body)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_all_gather_v(ranks: Any, seed: int, dtype: np.dtype) -> None:
    def body(comm: kos.Communicator) -> None:
        n, me = comm.size, comm.rank
        for counts in ([3 * r for r in range(n)], [0] * n, [2 + r % 2 for r in range(n)]):
            xs = [inputs(seed + r, 1, counts[r], dtype)[0] for r in range(n)]
            out = poison(sum(counts), dtype)
            comm.all_gather_v(xs[me], counts, out)
            assert_bits(out, np.concatenate(xs))
            assert_bits(comm.all_gather_v(xs[me], counts), out)

    ranks.run(body)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_all_to_all(ranks: Any, seed: int, dtype: np.dtype) -> None:
    def body(comm: kos.Communicator) -> None:
        n, me = comm.size, comm.rank
        for count in SIZES:
            xs = inputs(seed, n, n * count, dtype)
            expected = np.stack([x.reshape(n, count)[me] for x in xs])
            out = poison((n, count), dtype)
            comm.all_to_all(xs[me].reshape(n, count), out)
            assert_bits(out, expected)
            assert_bits(comm.all_to_all(xs[me]), expected.reshape(-1), "made output")

    ranks.run(body)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_all_to_all_v(ranks: Any, seed: int, dtype: np.dtype) -> None:
    def body(comm: kos.Communicator) -> None:
        n, me = comm.size, comm.rank
        matrix = np.random.default_rng(seed).integers(0, 4, (n, n))  # from row to column
        xs = [inputs(seed + r, 1, int(matrix[r].sum()), dtype)[0] for r in range(n)]
        pieces = [np.split(x, np.cumsum(matrix[r])[:-1]) for r, x in enumerate(xs)]
        expected = np.concatenate([pieces[r][me] for r in range(n)])
        out = poison(expected.size, dtype)
        comm.all_to_all_v(xs[me], matrix[me], matrix[:, me], out)
        assert_bits(out, expected)

    ranks.run(body)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_gather_and_scatter(ranks: Any, seed: int, dtype: np.dtype) -> None:
    def body(comm: kos.Communicator) -> None:
        n, me = comm.size, comm.rank
        for count in SIZES:
            xs = inputs(seed, n, count, dtype)
            for root in roots(comm):
                out = poison((n, count), dtype) if me == root else None
                got = comm.gather(xs[me], root, out)
                part = poison(count, dtype)
                if me == root:
                    assert got is out
                    assert_bits(out, np.stack(xs), "gather")
                    comm.scatter(out, part, root)
                else:
                    assert got is None
                    comm.scatter(None, part, root)
                assert_bits(part, xs[me], "scatter")

    ranks.run(body)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_messages(ranks: Any, seed: int, dtype: np.dtype) -> None:
    def body(comm: kos.Communicator) -> None:
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

    ranks.run(body)


def test_large(ranks: Any, seed: int) -> None:
    def body(comm: kos.Communicator) -> None:
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

    ranks.run(body)


def test_barrier_waits_for_everybody(ranks: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        # Each round one rank comes last: nobody may have left before it says so.
        for last in range(comm.size):
            work = None if comm.rank == last else comm.barrier(async_op=True)
            if work is not None:
                assert not work.done()
            comm.rendezvous.barrier()
            if work is None:
                comm.barrier()
            else:
                work.wait()

    ranks.run(body)


def test_shapes_and_scalars(ranks: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        x = np.array(float(comm.rank + 1))
        assert comm.all_reduce(x).shape == ()
        assert x == sum(range(1, comm.size + 1))
        assert comm.all_gather(np.zeros((2, 3), np.int8)).shape == (comm.size, 2, 3)
        assert comm.reduce_scatter(np.zeros((2 * comm.size, 3))).shape == (2, 3)
        lengths = [len(data) for data in comm.all_gather_bytes(b"x" * comm.rank)]
        assert lengths == list(range(comm.size))

    ranks.run(body)
