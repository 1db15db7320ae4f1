"""Train a LLaMA on batches of your own: ``mpirun -n 2 python examples/train_own_batches.py``."""

import sys
from collections.abc import Iterator

import numpy as np

from kos.train import Batch, TrainConfig, fit, load

DIGITS, PLUS, EQUALS, END = 10, 10, 11, 12  # the vocabulary: ten digits, "+", "=", and the end of a sum


def batch(seed: int, rows: int = 64) -> Batch:
    """Sums such as 7 + 8 = 1 5; the loss counts the result alone."""
    a, b = np.random.default_rng(seed).integers(0, DIGITS, (2, rows))
    plus, equals, end = (np.full(rows, token) for token in (PLUS, EQUALS, END))
    text = np.stack([a, plus, b, equals, (a + b) // DIGITS, (a + b) % DIGITS, end], axis=1)
    return Batch(text[:, :-1], np.where(np.arange(6) >= 3, text[:, 1:], -1))


def batches() -> Iterator[Batch]:
    """The same on every rank, which trains on its rows."""
    yield from map(batch, range(1, 10**9))


model = {"vocab_size": 13, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = TrainConfig.from_preset(
    "tiny", model=model, seq_len=6, batch_size=64, steps=100, lr=1e-2, warmup_steps=10, eval_every=50, log_every=10,
    sample_tokens=0, device="cpu", out=sys.argv[1] if len(sys.argv) > 1 else None,
)  # fmt: skip
result = fit(config, batches=batches(), val_batches=[batch(0)])
likeliest = load(result.checkpoint).logits([7, PLUS, 8, EQUALS, 1])[-2:].argmax(axis=1)
print(f"7 + 8 = {likeliest[0]}{likeliest[1]}")
