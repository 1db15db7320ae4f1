"""The reduction kernels of nccl, compiled for the host, are compared with the stand-ins in the tests of its logic."""

from fractions import Fraction
from functools import reduce

import numpy as np
import pytest

from kos.comm.gpu.composed import ORDERED
from kos.dtypes import DTYPES
from tests.comm.fake_gpu import FakeKernel
from tests.comm.host_kernel import HostKernel
from tests.comm.ranks import assert_bits
from tests.host_compiler import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

RANKS, COUNT = 3, 997
CASES = {
    "reduce_ordered": [
        ("bfloat16", "bfloat16", "SUM"), ("float32", "float16", "SUM"), ("float64", "float64", "AVG"),
        ("int16", "int16", "PROD"), ("uint8", "uint8", "BXOR"), ("int64", "int64", "MIN"),
        ("bool", "bool", "BXOR"), ("complex128", "complex128", "PROD"),
    ],
    "scan_ordered": [("bfloat16", "bfloat16", "SUM"), ("float64", "float64", "PROD"), ("int64", "int64", "MIN"),
                     ("bool", "bool", "BAND")],
    "scale": [("bfloat16", "float32", "SUM"), ("float64", "float64", "SUM")],
}  # fmt: skip


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in CASES for case in CASES[name]])
@pytest.mark.usefixtures("fake")
def test_kernels_agree_with_their_stand_ins(seed, name, case):
    dtype, result, op = case
    generator, given = np.random.default_rng(seed), DTYPES[dtype]
    x = generator.normal(size=RANKS * COUNT) * 100
    if given.kind == "complex":
        x = x + 1j * generator.permutation(x)
    elif not given.is_float:
        x = generator.integers(0, 2**32, RANKS * COUNT, np.uint64)
    with np.errstate(invalid="ignore"):
        x = (x % 4).astype(np.uint8).view(bool) if given.kind == "bool" else x.astype(given.numpy)
    if name != "scale" and given.is_float:
        x[::101] = np.nan
    results = []
    for kernel in (
        FakeKernel(name, *case, RANKS),
        HostKernel(ORDERED, name, 0, DTYPE=dtype, RESULT=result, OP=op, RANKS=RANKS),
    ):
        source = x.copy()
        out = np.zeros(COUNT * (RANKS if name == "scan_ordered" else 1), DTYPES[result].numpy)
        ends = [address(source), address(out)]
        arguments = {
            "reduce_ordered": [ends[0], COUNT, ends[1], COUNT],
            "scan_ordered": [ends[0], COUNT, ends[1], COUNT, int(op != "SUM")],
            "scale": [*ends, COUNT, np.float64(0.3)],
        }[name]
        kernel.bind(4, 64, *arguments)(0)
        results.append(out)
    expected, got = results
    if given.kind == "complex":  # how NumPy rounds its products depends on the CPU
        expected = np.array([reduce(product, terms) for terms in x.reshape(RANKS, COUNT).T.tolist()])
    numbers = ~np.isnan(expected)
    assert (np.isnan(got) == ~numbers).all() and numbers.any()
    assert_bits(got[numbers], expected[numbers], f"{name} of {dtype} to {result}")


def product(a: complex, b: complex) -> complex:
    """Rounded as with fused multiply-add."""

    def fused(x: float, y: float, z: float) -> float:
        return float(Fraction(x) * Fraction(y) + Fraction(z))

    return complex(fused(a.real, b.real, -(a.imag * b.imag)), fused(a.real, b.imag, a.imag * b.real))


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]
