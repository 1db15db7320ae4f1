"""REINFORCE on a toy: from rewards alone, a LLaMA learns to write numbers that rise.

``mpirun -n 2 python examples/reinforce.py``: each rank samples its own rows with the present weights.
"""

import sys

import numpy as np

import kos
from kos.train import Batch, TrainConfig, Trainer

VOCABULARY, LENGTH, ROWS, STEPS = 16, 8, 64, 60


def sample(trainer: Trainer, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Sequences (rows, LENGTH + 1) that begin with token 0; each next token is drawn from the model's odds."""
    tokens = np.zeros((rows, 1), np.int32)
    for _ in range(LENGTH):
        odds = np.exp(trainer.model.logits(tokens)[:, -1].astype(np.float64))
        shares = np.cumsum(odds / odds.sum(axis=1, keepdims=True), axis=1)
        drawn = (rng.random((rows, 1)) > shares[:, :-1]).sum(axis=1)
        tokens = np.column_stack([tokens, drawn]).astype(np.int32)
    return tokens


def policy_gradient(logits: np.ndarray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The loss -advantage * log p(token) of each token, and its gradient; the advantages are the batch's weights."""
    at, advantage = (np.arange(len(logits)), batch.targets), batch.weights
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    losses = -advantage * np.log(odds[at])
    odds[at] -= 1
    return losses, odds * advantage[:, None]


def main() -> None:
    model = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = TrainConfig.from_preset(
        "tiny", model=model, seq_len=LENGTH, batch_size=ROWS, steps=STEPS, lr=2e-2, warmup_steps=0, device="cpu",
        out=sys.argv[1] if len(sys.argv) > 1 else None,
    )  # fmt: skip
    with kos.init() as comm, Trainer(config, comm, batches=(), rows="own", loss=policy_gradient) as trainer:
        rng = np.random.default_rng(comm.rank)
        for step in range(STEPS):
            tokens = sample(trainer, ROWS // comm.size, rng)
            rises = np.diff(tokens, axis=1) > 0
            later = np.cumsum(rises[:, ::-1], axis=1)[:, ::-1]  # the reward of a token: the rises from it on
            mean = comm.all_reduce(later.mean(axis=0)) / comm.size  # the baseline
            trainer.step(Batch(tokens[:, :-1], tokens[:, 1:], weights=later - mean))
            if comm.rank == 0 and step in (0, STEPS - 1):
                print(f"step {step + 1}: {mean[0]:.1f} of {LENGTH} tokens rise")
        trainer.save()


if __name__ == "__main__":
    main()
