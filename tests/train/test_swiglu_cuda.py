"""SwiGLU's backward within a product on a Hopper GPU: ``test_swiglu_on_host``, larger shapes, the search."""

import pytest

from kos.memory.array import Array
from kos.train.ops.cuda import CudaOps
from tests.train import swiglu_cases as cases

pytestmark = pytest.mark.gpu


@pytest.fixture
def ops():
    made = CudaOps(0, search=True)
    if not made.swiglu_kernel:
        pytest.skip("needs a Hopper GPU")
    return made


@pytest.mark.parametrize("shape", [*cases.SHAPES, (5000, 1536, 328), (4096, 4096, 2048)], ids=str)
def test_it_has_the_bits_of_two_operations(rng, ops, shape):
    cases.check(rng, ops, shape)


def test_a_search_chooses_for_other_ranks(rng, ops):
    given, _ = cases.operands(rng, ops, 4096, 2048, 768)
    fused = ops.fuses_swiglu(*given, ops.make_arena())
    other = CudaOps(0, algorithms=ops.algorithms)
    assert other.fuses_swiglu(*given, other.make_arena()) == fused
    if fused:
        results = []
        for each in (ops, other):
            out = Array.zeros(given[2].shape, given[2].dtype, 0, stream=each.stream)
            each.linear_swiglu_backward(*given, out, each.make_arena())
            results.append(out.numpy().tobytes())
        assert results[0] == results[1]
