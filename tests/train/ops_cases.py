"""What tests of operations on GPUs share: arrays that exist twice, and the fixtures ``ops``, ``arena`` and ``side``.

Inputs are rounded to the dtype first, so that what is measured is the kernel's error alone: its norm over that
of the result, as a multiple of the dtype's rounding unit.  Outputs and scratch start as NaN.
"""

from __future__ import annotations

import numpy as np
import pytest

from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops import numpy as reference
from kos.train.ops.cuda import CudaOps

DTYPES = ["float32", "bfloat16"]
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}  # half a unit in the last place, relative


@pytest.fixture(scope="module")
def ops():
    return CudaOps(0)


@pytest.fixture
def arena(ops):
    """Scratch memory that is NaN wherever nothing has been written."""

    def allocate(nbytes):
        slab = ops.zeros(max(nbytes, 1), np.uint8)
        slab.fill_bytes(255, ops.stream)
        return slab

    arena = ops.make_arena()
    return Arena(0, allocate, arena._view)


def check_orthogonalize(ops, side, rng, arena, count, rows, columns):
    """Matrices of any norm, several at once; what is left is in the dtype's rounding near float64's."""
    x, x64 = side.put(rng.normal(size=(count, rows, columns)) * 10.0 ** rng.integers(-3, 4, (count, 1, 1)))
    ops.orthogonalize(x, arena)
    reference.orthogonalize(x64, Arena())
    got = side.get(x)
    for ours, expected in zip(got, x64, strict=True):
        error = np.linalg.norm(ours - expected) / np.linalg.norm(expected)
        assert error < (1e-5 if side.dtype == "float32" else 0.03), (rows, columns)


class Side:
    """Arrays that exist twice: rounded to ``dtype`` on the device, and the same numbers in float64."""

    def __init__(self, ops, dtype):
        self.ops, self.dtype = ops, dtype

    def put(self, values, dtype=None):
        """The device's array and float64's, of the same rounded numbers."""
        from kos.dtypes import DTYPES as table

        rounded = np.asarray(values, np.float32).astype(table[dtype or self.dtype].numpy)
        return Array.from_numpy(rounded, 0, stream=self.ops.stream), rounded.astype(np.float64)

    def nan(self, *shape, dtype=None):
        array = self.ops.zeros(shape, dtype or self.dtype)
        array.fill_bytes(255, self.ops.stream)
        return array

    def ints(self, values):
        return Array.from_numpy(np.asarray(values, np.int32), 0, stream=self.ops.stream)

    def get(self, array):
        return self.ops.to_host(array).astype(np.float64)

    def close(self, got, expected, units, dtype=None):
        """The error of ``got``, an array of the device, in rounding units of its dtype."""
        got = self.get(got)
        assert got.shape == expected.shape
        error = np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)
        floor = UNIT[dtype or self.dtype]
        assert error <= units * floor, f"{error / floor:.2f} units, expected at most {units}"


@pytest.fixture(params=DTYPES)
def side(ops, request):
    return Side(ops, request.param)


def columns(array):
    return np.asfortranarray(array)


def weight_gradients(side, rng, shape, expected, backward, units):
    """A weight's gradient, in the activations' dtype and in fp32, written and added."""
    for dtype in {side.dtype, "float32"}:
        written = side.nan(*shape, dtype=dtype)
        backward(written, False)
        limit = units if dtype == "float32" else 2  # fp32 sums, rounded once
        side.close(written, expected, limit, dtype)
        added, start = side.put(rng.normal(size=shape), dtype)
        backward(added, True)
        side.close(added, start + expected, limit, dtype)
