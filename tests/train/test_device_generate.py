"""Generation on GPUs, also emulated: kernels of the cache and of few rows, models of all families, one graph a step."""

import ml_dtypes
import numpy as np
import pytest

import kos.train
from kos.errors import BackendUnavailable
from kos.train.data.tokenizers import NumberTokenizer
from kos.train.generate import Decoder
from kos.train.trained import TrainedModel
from tests.train import generate_cases as cases
from tests.train.generation import CASES, GREEDY, PROMPTS, decoder, random_weights, tokens_of
from tests.train.ops_cases import DTYPES, arena, case, on_gpu, ops, side, sides
from tests.train.runs import _train

__all__ = ["arena", "ops", "side"]


@sides("shape", [(each,) for each in cases.ATTENTIONS], turns=[(cases.ATTENTIONS[n],) for n in (0, 2, 1, 3)])
def test_attention_to_a_cache(ops, side, rng, arena, shape):
    cases.check_attention(ops, side, rng, arena, shape)


@sides("n d f", [(1, 2048, 3072), (3, 77, 130), (16, 8192, 2048)], turns=[(3, 77, 5), (2, 264, 6), (16, 32, 3)])
def test_products_of_few_rows(ops, side, rng, n, d, f):
    cases.check_linear(ops, side, rng, n, d, f)


MODELS = [case("gpu", dtype, name, bound) for dtype, bound in zip(DTYPES, (1e-4, 0.03), strict=True) for name in CASES]
EMULATED = ("llama", "mistral", "qwen3", "olmo2", "gpt2")


@pytest.mark.parametrize(
    ("side", "name", "bound"), [*MODELS, *(case("host", "float32", name, 1e-5) for name in EMULATED)], indirect=["side"]
)
def test_a_model(ops, side, name, bound):
    """In bfloat16 logits are within 3% of the largest: two layers round each number to 8 bits."""
    cases.check_model(ops, name, np.dtype(getattr(ml_dtypes, side.dtype, side.dtype)), bound)


@pytest.mark.parametrize("side", [case("host", "float32")], indirect=True)
def test_what_a_trained_model_computes(ops):
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


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [2, 7, 16])
def test_a_batch_has_the_bits_of_each_prompt_alone(sequences):
    ops, config, dtype = on_gpu(0), CASES["llama"], np.dtype(ml_dtypes.bfloat16)
    weights = cases.weights_on(ops, random_weights(config), config, dtype)
    prompts = [[(7 * n + at) % 41 for at in range(1 + 3 * n % 20)] for n in range(sequences)]
    together = cases.logits_of(config, ops, weights, prompts, 6)
    for prompt, of_prompt in zip(prompts, together, strict=True):
        np.testing.assert_array_equal(cases.logits_of(config, ops, weights, [prompt], 6)[0], of_prompt)


@pytest.mark.gpu
def test_tokens_beyond_the_context_are_those_of_the_cpu():
    """In float32; sequences that end stay in the batch, and longer ones are encoded anew between replays."""
    ops, config = on_gpu(0), CASES["llama3"]
    weights = random_weights(config)
    there = cases.weights_on(ops, weights, config, np.dtype(np.float32))
    expected = tokens_of(decoder(config, weights, 4), config, PROMPTS, 60, GREEDY)
    source = Decoder(config, ops, there, 4, config.max_position_embeddings)
    assert tokens_of(source, config, PROMPTS, 60, GREEDY) == expected


@pytest.mark.gpu
def test_a_model_that_is_loaded_on_a_gpu(text, tmp_path):
    _train(text, tmp_path / "run", steps=3)
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
