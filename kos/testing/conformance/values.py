"""Inputs of all ranks, which every rank can generate; expected results by NumPy; comparisons."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import ml_dtypes
import numpy as np

from kos.comm import Communicator, ReduceOp
from kos.comm.reduction import _ALLOWED
from kos.dtypes import DTYPES, dtype_of
from kos.errors import KosError

Array = np.ndarray[Any, Any]

SUMS_IN_16_BITS = ContextVar("SUMS_IN_16_BITS", default=False)
"""Whether a sum of 16-bit floats may be rounded at every rank, as NCCL's own sums are."""

ALL_DTYPES = [dtype.numpy for dtype in DTYPES.values()]
REDUCTIONS = [(dtype, op) for dtype in ALL_DTYPES for op in ReduceOp if op in _ALLOWED[dtype_of(dtype).kind]]
SIZES = (0, 1, 2, 7, 997)  # elements
LARGE = 300_007  # elements, prime: several segments of every schedule


def inputs(seed: int, size: int, count: int, dtype: Any) -> list[Array]:
    """Every rank's random contribution; any rank can generate all of them."""
    rng = np.random.default_rng([seed, size, count])
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return [rng.random(count) < 0.5 for _ in range(size)]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return [rng.integers(info.min, info.max, count, dtype, endpoint=True) for _ in range(size)]
    if dtype.kind == "c":
        return [(rng.normal(size=count) + 1j * rng.normal(size=count)).astype(dtype) for _ in range(size)]
    return [rng.normal(size=count).astype(dtype) for _ in range(size)]


def poison(shape: Any, dtype: Any) -> Array:
    """An array of values that no result has: NaN, or a bit pattern."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = 0xFF if np.dtype(dtype) != np.bool_ else 1
    return array


def factors_of(size: int) -> list[float]:
    """The factor of each rank for PREMUL_SUM."""
    return [0.5 + 0.25 * rank for rank in range(size)]


def in_rank_order(xs: list[Array]) -> Array:
    """((x0 + x1) + x2) + ... in fp32 or wider, rounded once."""
    wide = xs[0].dtype if xs[0].dtype.itemsize >= 4 else np.float32
    total = xs[0].astype(wide)
    for x in xs[1:]:
        total = total + x.astype(wide)
    return total.astype(xs[0].dtype)


_UFUNCS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or, ReduceOp.BXOR: np.bitwise_xor,
}  # fmt: skip


def reduced(contributions: list[Array], op: ReduceOp, factors: list[float]) -> Array:
    """The result, computed by NumPy in 64 bits."""
    wide = {"i": np.int64, "u": np.uint64, "b": np.bool_, "c": np.complex128}
    x: Array = np.stack([c.astype(wide.get(c.dtype.kind, np.float64)) for c in contributions])
    if op is ReduceOp.AVG:
        return x.mean(axis=0)
    if op is ReduceOp.PREMUL_SUM:
        return (x * np.array(factors[: len(x)])[:, None]).sum(axis=0)
    return _UFUNCS[op].reduce(x, axis=0)


def check(got: Array, contributions: list[Array], op: ReduceOp, factors: list[float]) -> None:
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
    assert good.all(), f"{op} of {dtype} on {n}: {_wrong_elements(~good, got, expected)}"


def assert_bits(got: Array, expected: Array, what: str = "") -> None:
    """The same shape, dtype and bytes."""
    assert got.dtype == expected.dtype, f"{what}: {got.dtype} instead of {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    mine, theirs = (np.ascontiguousarray(each).reshape(-1) for each in (got, expected))
    differ = (mine.view(np.uint8) != theirs.view(np.uint8)).reshape(mine.size, mine.itemsize).any(axis=1)
    assert not differ.any(), f"{what}: {_wrong_elements(differ, mine, theirs)}"


def _wrong_elements(where: Array, got: Array, expected: Array) -> str:
    """How many elements are wrong and where, with the first five values."""
    indices = np.flatnonzero(where)
    last, first = indices[-1], indices[0]
    elements = f"element {first}" if len(indices) == 1 else f"{len(indices)} elements from {first} to {last}"
    return f"{elements} of {where.size} wrong: {got[indices[:5]]} instead of {expected[indices[:5]]}"


def assert_same_on_all_ranks(comm: Communicator, got: Array, what: str = "") -> None:
    """Check that every rank holds the same bytes; compares by the rendezvous, not by the backend under test."""
    everyone = comm.rendezvous.allgather(got.tobytes())
    assert len(set(everyone)) == 1, f"{what}: ranks hold {len(set(everyone))} different results"


@contextmanager
def raises(kind: type[KosError] | tuple[type[KosError], ...], pattern: str) -> Iterator[list[KosError]]:
    """Check that the block raises an error of that kind that matches the pattern; the list receives the error."""
    raised: list[KosError] = []
    try:
        yield raised
    except kind as error:
        raised.append(error)
    assert raised, f"expected {kind} with {pattern!r}, got no error"
    assert re.search(pattern, str(raised[0])), f"expected {pattern!r} in the error, got {raised[0]}"
