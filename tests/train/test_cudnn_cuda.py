"""Attention by cuDNN on a GPU against the numpy dialect in float64, as ``test_attention_cuda.py`` tests our own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kos import cuda
from kos.errors import BackendUnavailable
from kos.train.ops.cuda.cudnn import CudnnAttention, Shape, library
from tests.train import test_attention_cuda as ours


def missing() -> str | None:
    """Why nothing of this can run here."""
    if cuda.unavailable() is not None:
        return f"needs a GPU: {cuda.unavailable()}"
    try:
        library()
    except BackendUnavailable as error:
        return str(error)
    return None


rng, stream = ours.rng, ours.stream
REASON = missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SHAPES = [shape for shape in ours.SHAPES if shape[1] > 1] + [(16, 2, 4, 2, 64), (4, 1023, 4, 2, 64)]


def make_case(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, stream: Any, **options: Any) -> ours.Case:
    """A case that cuDNN launches, with all of its scratch memory full of NaN."""
    case, attention = ours.make_case(rng, shape, dtype, **options), CudnnAttention(0, stream)

    def launch(stream: Any, arena: Any) -> None:
        with arena.scope():
            size = max(attention.graph(Shape(*shape, dtype), backward)[1] for backward in (False, True))
            arena.take((max(size, 1),), np.uint8).fill_bytes(255, stream)
        operands = (case.qkv, case.out, case.log_sum_exp, case.heads, case.kv_heads)
        attention.forward(case.qkv, case.heads, case.kv_heads, case.out, case.log_sum_exp, arena)
        attention.backward(case.d_out, *operands, case.d_qkv, arena)

    case.launch = launch  # type: ignore[method-assign]
    return case


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_against_float64(rng: np.random.Generator, stream: Any, dtype: str, shape: tuple[int, ...]) -> None:
    case = make_case(rng, shape, dtype, stream)
    ours.assert_close(case, case.run(stream, ours.device_arena()), dtype, shape[-1])


def test_large_scores(rng: np.random.Generator, stream: Any) -> None:
    """Scores of hundreds: only the shift by the maximum keeps them finite."""
    case = make_case(rng, (1, 200, 2, 2, 64), "bfloat16", stream, spread=8.0)
    results = case.run(stream, ours.device_arena())
    assert all(np.isfinite(x.astype(np.float32)).all() for x in results.values())
    error = np.linalg.norm(results["out"].astype(np.float64) - case.expected["out"])
    assert error < 2 * ours.EPSILON["bfloat16"] * np.linalg.norm(case.expected["out"])


def test_equal_bits_and_graph(rng: np.random.Generator, stream: Any) -> None:
    """Run after run, and replayed from a graph, on operands that change between replays; many heads to a kv head."""
    shape = (2, 777, 16, 2, 128)
    case, other = (make_case(rng, shape, "bfloat16", stream) for _ in range(2))
    arena = ours.device_arena()
    first, second = (case.run(stream, arena) for _ in range(2))
    arena.fix()
    with cuda.capture(stream, keep=[case, arena]) as graph:
        case.launch(stream, arena)
    case.qkv.copy_from(other.qkv, stream)
    case.d_qkv.fill_bytes(255, stream)
    graph.replay(stream)
    replayed, again = case.results(stream), case.run(stream, arena)
    assert not np.array_equal(replayed["out"].view(np.uint16), first["out"].view(np.uint16))
    for a, b in ((first, second), (replayed, again)):
        for name in a:
            np.testing.assert_array_equal(a[name].view(np.uint8), b[name].view(np.uint8))


def test_one_token_is_refused(stream: Any) -> None:
    with pytest.raises(
        BackendUnavailable, match=r"attention: cuDNN .* refuses Shape\(samples=1, length=1, .*: s_q = s_"
    ):
        CudnnAttention(0, stream).graph(Shape(1, 1, 1, 1, 128, "bfloat16"), True)
