"""Generation on an emulated GPU: the kernels of the cache and of few rows, and models of all families on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kos.memory.arena import Arena
from kos.train.data.tokenizers import NumberTokenizer
from kos.train.trained import TrainedModel
from tests.train import generate_cases as cases
from tests.train.host_kernels.ops import arena, needs_compiler, ops
from tests.train.ops_cases import Side
from tests.train.test_generate import CASES, random_weights

__all__ = ["arena", "ops"]
pytestmark = needs_compiler


@pytest.mark.parametrize(("number", "dtype"), [(0, "float32"), (1, "float32"), (2, "bfloat16"), (3, "bfloat16")])
def test_attention_to_a_cache(ops: Any, rng: Any, arena: Arena, number: int, dtype: str) -> None:
    cases.check_attention(ops, Side(ops, dtype), rng, arena, cases.ATTENTIONS[number])


@pytest.mark.parametrize("case", [("float32", 3, 77, 5), ("bfloat16", 2, 264, 6), ("float32", 16, 32, 3)])
def test_products_of_few_rows(ops: Any, rng: Any, case: tuple[str, int, int, int]) -> None:
    dtype, *shape = case
    cases.check_linear(ops, Side(ops, dtype), rng, *shape)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "olmo2", "gpt2"])
def test_a_model(ops: Any, name: str) -> None:
    cases.check_model(ops, name, np.dtype(np.float32), 1e-5)


def test_what_a_trained_model_computes(ops: Any) -> None:
    """Logits, loss and texts on an emulated GPU in float32 are those of the CPU."""
    config = CASES["llama3"]
    weights, tokenizer = random_weights(config), NumberTokenizer(config.vocab_size)
    there = cases.weights_on(ops, weights, config, np.dtype(np.float32))
    cpu, gpu = TrainedModel(config, weights, tokenizer), TrainedModel(config, there, tokenizer, ops=ops)
    tokens = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    assert gpu.logits(tokens).dtype == np.float32
    np.testing.assert_allclose(gpu.logits(tokens), cpu.logits(tokens), rtol=1e-4, atol=1e-4)
    assert gpu.loss(tokens) == pytest.approx(cpu.loss(tokens), rel=1e-5)
    prompts = ["3 1 4", "9"]
    assert gpu.generate(prompts, 4, temperature=0) == cpu.generate(prompts, 4, temperature=0)
