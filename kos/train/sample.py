"""Text from a trained model: ``python -m kos.train.sample RUN --prompt "def "``.

RUN is a run's folder (its newest whole checkpoint is taken) or a checkpoint's. One process, no MPI.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kos.errors import ConfigError, KosError, TrainingError
from kos.train import checkpoint, huggingface
from kos.train.gpt2 import make_model
from kos.train.model import Llama
from kos.train.ops import numpy as numpy_ops
from kos.train.parameters import Parameters
from kos.train.tokenizers import Tokenizer, tokenizer_from_json


def generate(
    model: Llama, weights: Mapping[str, np.ndarray], prompt: Sequence[int], count: int, *,
    seed: int, temperature: float = 0.8, top_k: int = 0, stop: int | None = None,
    cut: Callable[[], bool] = lambda: False,
) -> Iterator[int]:  # fmt: skip
    """Up to ``count`` token ids that follow ``prompt``, drawn from softmax(logits / temperature).

    Temperature 0 takes the likeliest; ``top_k`` > 0 draws among the k likeliest. The context is the last
    ``max_position_embeddings`` tokens. Ends early at token ``stop``, or when ``cut`` says so.
    """
    rng = np.random.default_rng(seed)
    ids = list(prompt)
    for _ in range(count):
        context = np.asarray([ids[-model.config.max_position_embeddings :]], np.int32)
        token = _draw(model.next_logits(weights, context), temperature, top_k, rng)
        if token == stop or cut():
            return
        ids.append(token)
        yield token


def _draw(logits: np.ndarray, temperature: float, top_k: int, rng: np.random.Generator) -> int:
    if np.isnan(logits).any():
        raise TrainingError("sampling: expected logits, got NaN: the weights are no good")
    if temperature == 0:
        return int(np.argmax(logits))
    with np.errstate(over="ignore"):  # at most 0, however small the temperature
        scores = (logits.astype(np.float64) - logits.max()) / temperature
    if 0 < top_k < scores.size:
        scores[scores < np.partition(scores, -top_k)[-top_k]] = -np.inf
    odds = np.exp(scores)
    return int(rng.choice(scores.size, p=odds / odds.sum()))


def sample_text(
    model: Llama, weights: Mapping[str, np.ndarray], tokenizer: Tokenizer, prompt: str, count: int, **options: Any
) -> str:
    """``prompt`` and up to ``count`` generated tokens, as text; ``options`` are those of ``generate``."""
    ids = tokenizer.encode(prompt).tolist() or [tokenizer.start]
    return prompt + tokenizer.decode(generate(model, weights, ids, count, stop=tokenizer.eos, **options))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kos.train.sample",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or a checkpoint's")
    parser.add_argument("--prompt", default="", help="text to go on from")
    parser.add_argument("--tokens", type=int, default=500, help="tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    arguments = parser.parse_args(argv)
    options = {name: getattr(arguments, name) for name in ("seed", "temperature", "top_k")}
    try:
        for name, value in {"tokens": arguments.tokens, **options}.items():
            if not value >= 0:
                raise ConfigError(f"--{name.replace('_', '-')}: expected 0 or more, got {value}")
        found = checkpoint.find(arguments.run, without=checkpoint.OPTIMIZER)
        model = make_model(huggingface.read_config(found.path), numpy_ops)
        weights = Parameters(model.config.parameter_shapes(), groups=model.config.fused_groups())
        huggingface.read_weights(found.path, weights)
        tokenizer = tokenizer_from_json(checkpoint.read_tokenizer(found.path))
        text = sample_text(model, weights, tokenizer, arguments.prompt, arguments.tokens, **options)
    except KosError as error:
        print(f"kos: error: {error}", file=sys.stderr)
        return 1
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        try:
            print(text, flush=True)
        except OSError as error:  # of a reader that is gone, or a full disk; Python would try again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print(f"kos: error: expected to write the text, got {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
