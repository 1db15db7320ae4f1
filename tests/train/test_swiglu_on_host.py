"""SwiGLU's backward within a product without a GPU: tensor cores and TMA are emulated."""

import numpy as np
import pytest

from kos.train.ops.cuda import attention, swiglu
from tests.train import swiglu_cases as cases
from tests.train.host_kernels import emulator
from tests.train.host_kernels.ops import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def ops(monkeypatch):
    emulator.host_memory(monkeypatch)
    monkeypatch.setattr(attention, "tensor_map", emulator.HostMap.of)
    made = emulator.HostOps()
    made.shared_memory, made.swiglu_kernel = 227 << 10, True
    return made


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_it_has_the_bits_of_two_operations(rng, ops, shape):
    cases.check(rng, ops, shape)


@pytest.mark.parametrize(("times", "chosen"), [([2.0, 1.5], "fused"), ([1.0, 1.5], "apart")])
def test_the_fastest_is_chosen_once(rng, ops, monkeypatch, times, chosen):
    """By a search alone; then the table has it. Without one, no time decides: it is one kernel."""
    searches = []

    def fastest(runs, stream):
        searches.append(len(runs))
        return int(np.argmin(times))

    monkeypatch.setattr(swiglu, "fastest", fastest)
    given, _ = cases.operands(rng, ops, 64, 64, 8)
    assert ops.fuses_swiglu(*given, ops.make_arena()) and not ops.algorithms
    ops.search = True
    for _ in range(2):
        assert ops.fuses_swiglu(*given, ops.make_arena()) == (chosen == "fused")
    assert searches == [2] and [*ops.algorithms.values()] == [chosen]


@pytest.mark.parametrize(
    ("shape", "dtype"), [((64, 72, 8), "bfloat16"), ((64, 64, 12), "bfloat16"), ((64, 64, 8), "float32")]
)
def test_other_operands_are_left_to_two_operations(rng, ops, monkeypatch, shape, dtype):
    """Whatever a search would find."""
    monkeypatch.setattr(swiglu, "fastest", lambda runs, stream: 1)
    ops.search = True
    given, _ = cases.operands(rng, ops, *shape)
    d_out, weight, gate_up = (x if dtype == "bfloat16" else ops.zeros(x.shape, dtype) for x in given)
    assert not ops.fuses_swiglu(d_out, weight, gate_up, ops.make_arena()) and not ops.algorithms
