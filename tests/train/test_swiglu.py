"""SwiGLU's backward within a matmul, on a Hopper GPU or on the host, where tensor cores and TMA are emulated."""

import ml_dtypes
import numpy as np
import pytest

from kos.memory.array import Array
from kos.train.ops.cuda import swiglu
from tests.host_compiler import needs_compiler
from tests.train.ops_cases import hopper_ops, on_hopper

SHAPES = [(128, 256, 64), (200, 320, 136), (64, 64, 8), (300, 192, 200)]  # tokens, features, columns of d_out
LARGE = [(5000, 1536, 328), (4096, 4096, 2048)]


@pytest.fixture
def ops(request, monkeypatch):
    return hopper_ops(request, monkeypatch, search=True)


def operands(rng, ops, n, f, d):
    """d_out, weight, gate_up, and the product of d_out and weight.  All are small integers, so the product is exact."""
    d_out, weight = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((n, d), (d, f)))
    arrays = d_out, weight, rng.standard_normal((n, 2 * f)), d_out @ weight
    *given, d_inner = (Array.from_numpy(x.astype(ml_dtypes.bfloat16), 0, stream=ops.stream) for x in arrays)
    return given, d_inner


@on_hopper("shape", SHAPES, LARGE)
def test_it_has_the_bits_of_two_operations(rng, ops, shape):
    (d_out, weight, gate_up), d_inner = operands(rng, ops, *shape)
    n, columns = gate_up.shape
    fused, apart = (
        Array.from_numpy(np.full((n + 1, columns), np.nan, ml_dtypes.bfloat16), 0, stream=ops.stream) for _ in range(2)
    )
    ops.linear_swiglu_backward(d_out, weight, gate_up, fused[:n], ops.make_arena())
    ops.swiglu_backward(d_inner, gate_up, None, apart[:n], ops.make_arena())
    got, expected = (np.asarray(x.numpy()).view(np.uint16) for x in (fused, apart))
    np.testing.assert_array_equal(got, expected)


@needs_compiler
@pytest.mark.parametrize(("times", "chosen"), [([2.0, 1.5], "fused"), ([1.0, 1.5], "apart")])
def test_the_fastest_is_chosen_once(rng, ops, monkeypatch, times, chosen):
    """A search measures both, and stores its choice in the table. Without a search, the fused kernel is used."""
    searches = []

    def fastest(runs, stream):
        searches.append(len(runs))
        return int(np.argmin(times))

    monkeypatch.setattr(swiglu, "fastest", fastest)
    given, _ = operands(rng, ops, 64, 64, 8)
    assert ops.fuses_swiglu(*given, ops.make_arena()) and not ops.algorithms
    ops.search = True
    for _ in range(2):
        assert ops.fuses_swiglu(*given, ops.make_arena()) == (chosen == "fused")
    assert searches == [2] and [*ops.algorithms.values()] == [chosen]


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "dtype"), [((64, 72, 8), "bfloat16"), ((64, 64, 12), "bfloat16"), ((64, 64, 8), "float32")]
)
def test_other_operands_are_left_to_two_operations(rng, ops, shape, dtype):
    """Whatever a search would find."""
    ops.search = True
    given, _ = operands(rng, ops, *shape)
    d_out, weight, gate_up = (x if dtype == "bfloat16" else ops.zeros(x.shape, dtype) for x in given)
    assert not ops.fuses_swiglu(d_out, weight, gate_up, ops.make_arena()) and not ops.algorithms
