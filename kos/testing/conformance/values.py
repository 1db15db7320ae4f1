"""Inputs of all ranks, which every rank can generate, and comparisons of results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from kos.comm import Communicator, ReduceOp
from kos.comm.compression import BLOCK
from kos.comm.reduction import _ALLOWED
from kos.dtypes import DTYPES, dtype_of
from kos.errors import KosError

Array = np.ndarray[Any, Any]

ALL_DTYPES = [dtype.numpy for dtype in DTYPES.values()]
REDUCTIONS = [(dtype, op) for dtype in ALL_DTYPES for op in ReduceOp if op in _ALLOWED[dtype_of(dtype).kind]]
SIZES = (0, 1, 2, 7, 997)  # elements
LARGE = 300_007  # elements, prime: several segments of every schedule


def inputs(seed: int, size: int, count: int, dtype: Any) -> list[Array]:
    """Every rank's random contribution; any rank can generate all of them."""
    return [vector([seed, rank], count, dtype) for rank in range(size)]


def vector(seed: Sequence[int], count: int, dtype: Any, kind: str = "any") -> Array:
    """Random numbers of one ``kind``; the last word of ``seed`` is the rank.

    - "any": any values of the dtype, also booleans whose bytes are neither 0 nor 1;
    - "with NaN and zeros": the same with some NaN, of different bits, and some zeros of both signs;
    - "whole": whole numbers from 0 to 4;
    - "large": numbers so large that the dtype cannot hold the sum of any two;
    - "apart": numbers whose magnitude differs from rank to rank, so that another order of additions rounds differently;
    - "hostile" and "near the bounds": for compression, difficult numbers, and numbers with errors near the bounds.
    """
    rng, dtype = np.random.default_rng([*seed, count]), np.dtype(dtype)
    if kind == "large":
        return (float(ml_dtypes.finfo(dtype).max) * rng.uniform(0.9, 1, count)).astype(dtype)
    if kind == "whole":
        return rng.integers(0, 5, count).astype(dtype)
    if kind == "hostile":
        return _hostile(rng, count, dtype)
    if kind == "near the bounds":
        return near_the_bounds(rng, -(-count // (6 * BLOCK)), dtype)[:count]
    x = _any(rng, count, dtype)
    if kind == "with NaN and zeros":
        some = rng.random(count)
        x[some < 0.5] = 0
        x[some < 0.2] = np.nan
        bits = x.view(f"u{dtype.itemsize}")
        bits[some < 0.2] |= rng.integers(0, 4, count, bits.dtype)[some < 0.2]  # a NaN stays one in every dtype
        bits[some < 0.5] |= rng.integers(0, 2, count, bits.dtype)[some < 0.5] << 8 * dtype.itemsize - 1
    return x if kind != "apart" else (x.astype(np.float64) * 16.0 ** (seed[-1] % 3)).astype(dtype)


def _any(rng: np.random.Generator, count: int, dtype: np.dtype[Any]) -> Array:
    if dtype == np.bool_:
        return np.where(rng.random(count) < 0.5, 0, rng.choice([1, 2, 128, 255], count)).astype(np.uint8).view(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, count, dtype, endpoint=True)
    if dtype.kind == "c":
        return (rng.normal(size=count) + 1j * rng.normal(size=count)).astype(dtype)
    return rng.normal(size=count).astype(dtype)


def _hostile(rng: np.random.Generator, count: int, dtype: np.dtype[Any]) -> Array:
    """Normal numbers; blocks of zeros, with an outlier, of one sign, of tiny and huge ones, the largest; inf, NaN."""
    groups, largest = -(-count // (5 * BLOCK)), float(ml_dtypes.finfo(dtype).max)
    x, each = rng.standard_normal((groups, 5, BLOCK)), (groups, 1)
    x[:, 0, :1] = rng.choice([1e4, -1e4, np.inf, -np.inf, np.nan, 0.0], each)
    x[:, 1] *= rng.choice([0, 1e-7, 1e-40, 3e4], each)
    x[:, 2] = abs(x[:, 2])
    x[:, 3, :2] = largest * rng.uniform(0.98, 1, each) * rng.choice([1, -1, 0.5], each)
    with np.errstate(over="ignore"):
        return x.reshape(-1)[:count].astype(dtype)


def near_the_bounds(rng: np.random.Generator, blocks: int, dtype: Any) -> Any:
    """Blocks of the dtype whose errors are near the bounds, of every size and with special values."""
    info = ml_dtypes.finfo(dtype)
    low, high = (np.log2(float(x)) for x in (info.smallest_subnormal, info.max))
    largest = 2.0 ** rng.uniform(low, high, (6, blocks, 1))
    x = rng.uniform(-1, 1, (6, blocks, BLOCK)) * largest
    levels = rng.choice([6, 7, 126, 127], (blocks, 1))
    x[1] = (rng.integers(-levels, levels, (blocks, BLOCK)) + 0.5) * largest[1] / levels  # between two codes
    x[2] = 2.0 ** rng.integers(-18, 0, (blocks, BLOCK)) * (1 + rng.integers(0, 17, (blocks, BLOCK)) / 16) * largest[2]
    x[3] = rng.choice([1, 3, 100], (blocks, 1)) * rng.integers(-3, 4, (blocks, BLOCK)) * float(info.smallest_subnormal)
    x[4] = float(info.max) * rng.uniform(0.9, 1, (blocks, BLOCK))
    x[5] = np.exp(rng.normal(-14, 3, (blocks, BLOCK)))  # in float16 mostly subnormal
    x[0, 0], x[1:3, :, :1] = 1e-38, largest[1:3]
    x = np.clip(x, -float(info.max), float(info.max))
    x[:, ::4, 1] = rng.choice([np.inf, -np.inf, np.nan, 0], x[:, ::4, 1].shape)
    with np.errstate(all="ignore"):
        return x.astype(dtype).reshape(-1)


def poison(shape: Any, dtype: Any) -> Array:
    """An array of values that no result has: NaN, or a bit pattern."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = 0xFF if np.dtype(dtype) != np.bool_ else 1
    return array


def assert_bits(got: Array, expected: Array, what: str = "") -> None:
    """The same shape, dtype and bytes."""
    assert got.dtype == expected.dtype, f"{what}: {got.dtype} instead of {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    mine, theirs = (np.ascontiguousarray(each).reshape(-1) for each in (got, expected))
    differ = mine.view(np.uint8) != theirs.view(np.uint8)
    assert not differ.any(), f"{what}: {wrong_elements(differ.reshape(mine.size, -1).any(axis=1), mine, theirs)}"


def assert_numbers(got: Array, expected: Array, what: str = "") -> None:
    """The same shape, dtype and bytes, but for NaN, which is any NaN."""
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    nan = np.isnan(expected.astype(np.float32))
    assert (np.isnan(got.astype(np.float32)) == nan).all(), f"{what}: NaN elsewhere"
    assert_bits(got[~nan], expected[~nan], what)


def wrong_elements(where: Array, got: Array, expected: Array) -> str:
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
