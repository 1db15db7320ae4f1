"""Generation on a GPU: the kernels of the cache and of few rows, models of all families, one CUDA graph a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kos.train
from kos.errors import BackendUnavailable
from kos.memory.arena import Arena
from kos.train.generate import Decoder
from tests.train import generate_cases as cases
from tests.train.ops_cases import DTYPES, Side, arena, ops
from tests.train.test_generate import CASES, GREEDY, PROMPTS, decoder, random_weights, tokens_of
from tests.train.test_loop import _train, text

__all__ = ["arena", "ops", "text"]
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases.ATTENTIONS, ids=str)
def test_attention_to_a_cache(ops: Any, rng: Any, arena: Arena, case: tuple[Any, ...], dtype: str) -> None:
    cases.check_attention(ops, Side(ops, dtype), rng, arena, case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2048, 3072), (3, 77, 130), (16, 8192, 2048)], ids=str)
def test_products_of_few_rows(ops: Any, rng: Any, shape: tuple[int, int, int], dtype: str) -> None:
    cases.check_linear(ops, Side(ops, dtype), rng, *shape)


@pytest.mark.parametrize("name", CASES)
def test_a_model_in_float32(ops: Any, name: str) -> None:
    cases.check_model(ops, name, np.dtype(np.float32), 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_model_in_bfloat16(ops: Any, name: str) -> None:
    """Logits are within 3% of the largest: two layers round each number to 8 bits. The emulated GPU has 1.2%."""
    cases.check_model(ops, name, np.dtype(ml_dtypes.bfloat16), 0.03)


@pytest.mark.parametrize("sequences", [2, 7, 16])
def test_a_batch_has_the_bits_of_each_prompt_alone(ops: Any, sequences: int) -> None:
    config, dtype = CASES["llama"], np.dtype(ml_dtypes.bfloat16)
    weights = cases.weights_on(ops, random_weights(config), config, dtype)
    prompts = [[(7 * n + at) % 41 for at in range(1 + 3 * n % 20)] for n in range(sequences)]
    together = cases.logits_of(config, ops, weights, prompts, 6)
    for prompt, of_prompt in zip(prompts, together, strict=True):
        np.testing.assert_array_equal(cases.logits_of(config, ops, weights, [prompt], 6)[0], of_prompt)


def test_tokens_beyond_the_context_are_those_of_the_cpu(ops: Any) -> None:
    """In float32; sequences that end stay in the batch, and longer ones are encoded anew between replays."""
    config = CASES["llama3"]
    weights = random_weights(config)
    there = cases.weights_on(ops, weights, config, np.dtype(np.float32))
    expected = tokens_of(decoder(config, weights, 4), config, PROMPTS, 60, GREEDY)
    source = Decoder(config, ops, there, 4, config.max_position_embeddings)
    assert tokens_of(source, config, PROMPTS, 60, GREEDY) == expected


def test_a_model_that_is_loaded_on_a_gpu(text: Path, tmp_path: Path) -> None:
    _train(text, tmp_path / "run", steps=3, tokenizer="chars")
    cpu, gpu = kos.train.load(tmp_path / "run"), kos.train.load(tmp_path / "run", "cuda:0")
    prompt = "one ring"
    expected = cpu.logits(prompt)
    assert gpu.logits(prompt).dtype == np.float32
    assert np.abs(gpu.logits(prompt) - expected).max() < 0.03 * np.abs(expected).max()
    assert gpu.loss(prompt) == pytest.approx(cpu.loss(prompt), rel=0.01)
    several = gpu.generate([prompt, "the", ""], 40, seed=5)
    assert several == [gpu.generate(each, 40, seed=5) for each in (prompt, "the", "")]
    with pytest.raises(BackendUnavailable):
        kos.train.load(tmp_path / "run", "cuda:99")
