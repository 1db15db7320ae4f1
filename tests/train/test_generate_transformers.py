"""Greedy tokens and limits of sampling beside transformers: random models of all families, in float32."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from kos.train.generate import Sampling, Uncached
from kos.train.model.families import FAMILIES
from kos.train.model.model import Model
from kos.train.ops import numpy as numpy_ops
from tests.train.generation import GREEDY, decoder, tokens_of
from tests.train.models import random_weights
from tests.train.of_transformers import theirs_of, torch, transformers
from tests.train.test_families import CASES

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [1], [*range(20, 4, -1), 39]]


NAMES = [
    "llama, one kv head", "llama3", "dynamic", "yarn", "qwen2, windows", "qwen3, biases and windows",
    "mistral, a window", "olmo2", "smollm3", "gpt2",
]  # fmt: skip


def test_every_family_is_tested():
    assert {CASES[name].model_type for name in NAMES} == {*FAMILIES}


def their_tokens(theirs: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        with torch.no_grad():
            out = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0,
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            )  # fmt: skip
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name, golden):
    """With and without the cache, of prompts of several lengths at once."""
    config = CASES[name]
    weights = random_weights(config, np.random.default_rng(8), np.float32)
    expected = golden(name, lambda: their_tokens(theirs_of(config, weights)))
    assert {len(tokens) for tokens in expected} == {12}
    model = Model(config, numpy_ops)
    assert tokens_of(Uncached(lambda x: model.next_logits(weights, x)), config, PROMPTS, 12, GREEDY) == expected
    assert tokens_of(decoder(config, weights, len(PROMPTS)), config, PROMPTS, 12, GREEDY) == expected


def their_odds(how: Sampling, logits: np.ndarray, before: list[int]) -> list[Any]:
    """Those of the next token, and the likeliest one by the penalty for repetitions alone."""
    process = transformers.generation.logits_process
    steps = [process.RepetitionPenaltyLogitsProcessor(how.repetition_penalty)]
    steps += [process.TemperatureLogitsWarper(how.temperature)]
    for made, value in (("TopK", how.top_k), ("TopP", how.top_p), ("MinP", how.min_p)):
        if value not in (0, 1):
            steps.append(getattr(process, f"{made}LogitsWarper")(value))
    scores = torch.tensor(logits)[None]
    for step in steps:
        scores = step(torch.tensor([before]), scores.clone())
    penalized = steps[0](torch.tensor([before]), torch.tensor(logits)[None])
    return [torch.softmax(scores, -1)[0].numpy(), int(penalized.argmax())]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "settings",
    [{"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.1}, {"repetition_penalty": 1.7}, {"repetition_penalty": 0.5},
     {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)  # fmt: skip
def test_the_odds_of_tokens(settings, seed, golden):
    """Those of the processors and warpers of transformers, in their order."""
    rng = np.random.default_rng(seed)
    logits, before = rng.normal(0, 2, 50).astype(np.float32), rng.integers(0, 50, 12).tolist()
    how = Sampling(**{"temperature": 1.0, "top_k": 0, **settings})
    expected, likeliest = golden(f"{settings} {seed}", lambda: their_odds(how, logits, before), rtol=1e-6)
    taken = []

    class Draws:
        """The generator of random numbers, which keeps the odds, and draws the likeliest."""

        def choice(self, size, p):
            taken.append(p)
            return np.argmax(p)

    assert how.draw(logits, before, Draws()) == np.argmax(expected)
    np.testing.assert_allclose(taken[0], expected, rtol=1e-4, atol=1e-7)
    assert dataclasses.replace(how, temperature=0).draw(logits, before, rng) == likeliest
