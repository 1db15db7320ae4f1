"""What tests of operations on devices share: ``sides``, arrays that exist twice, and fixtures.

A test with ``sides`` runs on a GPU, and on an emulated one, whose kernels are compiled for the host.

Inputs are rounded to the dtype first, so that what is measured is the kernel's error alone: its norm over that
of the result, as a multiple of the dtype's rounding unit.  Outputs and scratch start as NaN.
"""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops.cuda import CudaOps, attention
from tests.host_compiler import needs_compiler
from tests.train.host_kernels.emulator import HostMap, HostOps, host_memory

DTYPES = ["float32", "bfloat16"]
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}  # half a unit in the last place, relative


on_gpu = functools.cache(CudaOps)
Shapes = Iterable[tuple[object, ...]]


def sides(
    names: str = "", gpu: Shapes | None = None, host: Shapes | None = None, turns: Shapes = (), slow: Shapes = ()
) -> pytest.MarkDecorator:
    """Run a test on each side, with the shapes of ``gpu`` and of ``host``, the emulated GPU, in each dtype.

    ``turns``: emulated shapes that have one dtype each, by turns, for they take long to compile. The emulated shapes of
    ``slow`` are marked `slow`. A test that has no ``names`` has one shape on each side.
    """
    once: Shapes = () if names else [()]
    cases = [case("gpu", dtype, *shape) for shape in (once if gpu is None else gpu) for dtype in DTYPES]
    cases += [case("host", dtype, *shape) for shape in (once if host is None else host) for dtype in DTYPES]
    cases += [case("host", DTYPES[n % 2], *shape) for n, shape in enumerate(turns)]
    cases += [case("host", dtype, *shape, slow=True) for shape in slow for dtype in DTYPES]
    return pytest.mark.parametrize(("side", *names.split()), cases, indirect=["side"])


def case(device: str, dtype: str, *shape: object, slow: bool = False) -> Any:
    """Values of ``side`` and of the other parameters, one by one."""
    words = device, dtype, *(getattr(each, "__name__", str(each)) for each in shape)
    marks = [pytest.mark.gpu if device == "gpu" else needs_compiler, *[pytest.mark.slow] * slow]
    return pytest.param((device, dtype), *shape, id="-".join(words), marks=marks)


def on_hopper(name: str, cases: Shapes, large: Shapes) -> pytest.MarkDecorator:
    """Run a test of a kernel in ``*_hopper.cu`` on a GPU with all cases, and emulated without the ``large`` ones."""
    emulated = [pytest.param(case, marks=needs_compiler) for case in cases]
    of_gpu = [pytest.param(case, marks=pytest.mark.gpu) for case in (*cases, *large)]
    return pytest.mark.parametrize(name, [*emulated, *of_gpu], ids=str)


def hopper_ops(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, sequential: bool = False, **options: Any
) -> CudaOps:
    """The operations of a Hopper GPU, made with ``options``, in tests that are marked ``gpu``; emulated in others."""
    if request.node.get_closest_marker("gpu"):
        made = CudaOps(0, sequential=sequential, **options)
        return made if made.hopper else pytest.skip("needs a Hopper GPU")
    host_memory(monkeypatch)
    monkeypatch.setattr(attention, "tensor_map", HostMap.of)
    emulated = HostOps()
    emulated.hopper, emulated.sequential, emulated.shared_memory = True, sequential, 227 << 10
    return emulated


@pytest.fixture
def side(request, monkeypatch):
    device, dtype = request.param
    if device == "host":
        host_memory(monkeypatch)
    return Side(HostOps() if device == "host" else on_gpu(0), dtype)


@pytest.fixture
def ops(side):
    return side.ops


@pytest.fixture
def arena(ops):
    """Scratch memory that is NaN wherever nothing has been written."""

    def allocate(nbytes):
        slab = ops.zeros(max(nbytes, 1), np.uint8)
        slab.fill_bytes(255, ops.stream)
        return slab

    arena = ops.make_arena()
    return Arena(0, allocate, arena._view)


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
