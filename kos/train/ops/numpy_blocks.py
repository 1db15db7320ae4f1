"""What the operations on CPUs share: memory by columns, blocks that stay in the cache, sums by matrix products."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from kos.errors import InvalidArgument
from kos.memory.arena import Arena

Array = np.ndarray
BLOCK = 32_768  # elements of a cache-sized block: three of them in fp32 are 384 KiB, within an L2


def empty_columns(arena: Arena, rows: int, columns: int, dtype: Any) -> Array:
    return arena.take((columns, rows), dtype).T


def blocks(size: int, width: int = 1) -> Iterator[slice]:
    """Slices of ``size`` rows of ``width`` elements, each of about ``BLOCK`` elements."""
    step = max(1, BLOCK // width)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def take_block(arena: Arena, dtype: Any) -> Array:
    """Scratch memory of one block."""
    return arena.take((BLOCK,), dtype)


def columns(x: Array) -> Array:
    """An array of ``empty_columns`` as it lies in memory: (columns, rows), contiguous."""
    memory = x.T
    if not memory.flags.c_contiguous:
        raise InvalidArgument(f"expected an array of empty_columns, got strides {x.strides} of shape {x.shape}")
    return memory


def of_rows(x: Array) -> Array:
    """An array of ``empty_columns``, or some of its rows, as it lies in memory: (columns, rows), each contiguous."""
    memory = x.T
    if len(x) > 1 and memory.strides[1] != x.itemsize:
        raise InvalidArgument(f"expected rows of an array of empty_columns, got strides {x.strides} of shape {x.shape}")
    return memory


def multiply(a: Array, b: Array, out: Array, accumulate: bool, arena: Arena) -> None:
    """out = a b, or added to it."""
    with arena.scope():
        fresh = arena.take(out.shape, out.dtype) if accumulate else out
        np.matmul(a, b, out=fresh)
        if accumulate:
            np.add(out, fresh, out=out)


def add_tree(terms: Array, out: Array) -> None:
    """out = ((t0 + t1) + (t2 + t3)) + …, of as many ``terms`` as a power of two, which are overwritten."""
    while len(terms) > 2:
        np.add(terms[0::2], terms[1::2], out=terms[0::2])
        terms = terms[0::2]
    if len(terms) == 2:
        np.add(terms[0], terms[1], out=out)
    else:
        np.copyto(out, terms[0])


def sum_rows(x: Array, out: Array, accumulate: bool, arena: Arena) -> None:
    multiply(ones(len(x), x.dtype), x, out[None], accumulate, arena)  # a sum, at BLAS's speed


@functools.lru_cache(maxsize=64)
def ones(size: int, dtype: np.dtype) -> Array:
    return np.ones((1, size), dtype)
