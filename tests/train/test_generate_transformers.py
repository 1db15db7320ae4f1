"""Limits of sampling beside those of transformers."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from kos.train.generate import Sampling

REASON = "the reference needs transformers and torch (pip install transformers torch)"
transformers = pytest.importorskip("transformers", reason=REASON)
torch = pytest.importorskip("torch", reason=REASON)


def scores_of(logits: np.ndarray) -> Any:
    return torch.tensor(logits)[None].clone()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "settings",
    [{"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.1}, {"repetition_penalty": 1.7}, {"repetition_penalty": 0.5},
     {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)  # fmt: skip
def test_the_odds_of_tokens(settings, seed):
    """Those of the processors and warpers of transformers, in their order."""
    rng = np.random.default_rng(seed)
    logits, before = rng.normal(0, 2, 50).astype(np.float32), rng.integers(0, 50, 12).tolist()
    how = Sampling(**{"temperature": 1.0, "top_k": 0, **settings})
    process = transformers.generation.logits_process
    steps = [process.RepetitionPenaltyLogitsProcessor(how.repetition_penalty)]
    steps += [process.TemperatureLogitsWarper(how.temperature)]
    for made, value in (("TopK", how.top_k), ("TopP", how.top_p), ("MinP", how.min_p)):
        if value not in (0, 1):
            steps.append(getattr(process, f"{made}LogitsWarper")(value))
    scores = scores_of(logits)
    for step in steps:
        scores = step(torch.tensor([before]), scores)
    expected = torch.softmax(scores, -1)[0].numpy()
    taken = []

    class Draws:
        """The generator of random numbers, which keeps the odds."""

        def choice(self, size, p):
            taken.append(p)
            return 0

    how.draw(logits, before, Draws())
    np.testing.assert_allclose(taken[0], expected, rtol=1e-4, atol=1e-7)
    greedy, penalized = dataclasses.replace(how, temperature=0), steps[0](torch.tensor([before]), scores_of(logits))
    assert greedy.draw(logits, before, rng) == int(penalized.argmax())
