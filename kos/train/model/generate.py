"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kos.errors import TrainingError
from kos.train.data.tokenizers import Tokenizer

NextLogits = Callable[[np.ndarray], np.ndarray]
"""The logits (V,) of the token after (1, T)."""


def generate(
    next_logits: NextLogits, context: int, prompt: Sequence[int], count: int, *, seed: int,
    temperature: float = 0.8, top_k: int = 0, stop: int | None = None, stopped: Callable[[], bool] = lambda: False,
) -> Iterator[int]:  # fmt: skip
    """Up to ``count`` token ids that follow ``prompt``, drawn from softmax(logits / temperature).

    Temperature 0 takes the likeliest; ``top_k`` > 0 draws among the k likeliest. The model sees the last ``context``
    tokens. Ends early at token ``stop``, or when ``stopped`` returns True.
    """
    rng = np.random.default_rng(seed)
    ids = list(prompt)
    for _ in range(count):
        seen = np.asarray([ids[-context:]], np.int32)
        token = _draw(next_logits(seen), temperature, top_k, rng)
        if token == stop or stopped():
            return
        ids.append(token)
        yield token


def _draw(logits: np.ndarray, temperature: float, top_k: int, rng: np.random.Generator) -> int:
    if not np.isfinite(top := logits.max()):
        raise TrainingError(f"sampling: expected finite logits, got {top}: the weights are not usable")
    if temperature == 0:
        return int(np.argmax(logits))
    with np.errstate(over="ignore"):  # at most 0, however small the temperature
        scores = (logits.astype(np.float64) - top) / temperature
    if 0 < top_k < scores.size:
        scores[scores < np.partition(scores, -top_k)[-top_k]] = -np.inf
    odds = np.exp(scores)
    return int(rng.choice(scores.size, p=odds / odds.sum()))


def sample_text(
    next_logits: NextLogits, context: int, tokenizer: Tokenizer, prompt: str, count: int, **options: Any
) -> str:
    """``prompt`` and up to ``count`` generated tokens, as text; ``options`` are those of ``generate``."""
    ids = tokenizer.encode_prompt(prompt)
    tokens = [*generate(next_logits, context, ids, count, stop=tokenizer.eos, **options)]
    if not prompt:
        return tokenizer.decode(tokens)
    before = tokenizer.decode(ids)
    whole = tokenizer.decode([*ids, *tokens])  # with the space between prompt and sample
    return prompt + (whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(tokens))
