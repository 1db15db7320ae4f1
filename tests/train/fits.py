"""Runs of ``kos.train.fit``, small, with batches, a loss and callbacks of the program's own."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kos.testing import spawn
from kos.train import Batch, Callback, FitResult, TrainConfig, Trainer, fit, read_metrics
from tests.train.sharded import tensors_of_run

STEPS, ROWS, TOKENS, VOCABULARY = 4, 8, 16, 32
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def config_of(out: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "steps": STEPS, "batch_size": ROWS, "micro_batch_size": 2, "seq_len": TOKENS, "lr": 1e-2, "warmup_steps": 0,
        "eval_every": 2, "sample_tokens": 0, "save_every": 0, "device": "cpu", "model": SHAPE, "out": out,
    }  # fmt: skip
    return TrainConfig.from_preset("tiny", **{**values, **changes})


def batch_of(step: int, rows: int = ROWS, **more: Any) -> Batch:
    """Rising tokens; every fifth target is left out."""
    tokens = np.sort(np.random.default_rng(step).integers(0, VOCABULARY, (rows, TOKENS + 1)), axis=1)
    targets = np.where(np.arange(TOKENS) % 5 == 4, -1, tokens[:, 1:])
    return Batch(tokens[:, :-1], targets, **more)


def batches_of(count: int = STEPS, **more: Any) -> list[Batch]:
    return [batch_of(step, **more) for step in range(count)]


def part(batch: Batch, rank: int, ranks: int) -> Batch:
    rows = len(batch.tokens) // ranks
    return batch.map(lambda field: field[rank * rows : (rank + 1) * rows])


class OnStep(Callback):
    def __init__(self, function: Callable[[Trainer, Mapping[str, Any]], object]) -> None:
        self.function = function

    def on_step(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self.function(trainer, metrics)


class Stream:
    """Batches with a state, as a data loader has it; the number of the next one."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.step, self.rank, self.ranks = 0, rank, ranks

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.step += 1
            yield part(batch_of(self.step - 1), self.rank, self.ranks)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == self.rank
        self.step = state["step"]


def cross_entropy(logits: np.ndarray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """What a program may write; targets that are left out give nonsense, which counts nothing."""
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    at_target = np.arange(len(odds)), batch.targets
    losses = -np.log(odds[at_target])
    odds[at_target] -= 1
    weights = 1 if batch.weights is None else batch.weights
    return losses * weights, odds * (1 if batch.weights is None else batch.weights[:, None])


def on_ranks(ranks: int, config: TrainConfig, of: Callable[[int], Mapping[str, Any]] | None = None,
             **program: Any) -> list[FitResult]:  # fmt: skip
    """The results of ``fit`` on ranks that are threads; ``of(rank)`` are more arguments of a rank."""
    return spawn(lambda comm: fit(config, comm, **program, **(of(comm.rank) if of else {})), ranks, timeout=100)


def column(out: Path, *names: str) -> list[Any]:
    return [tuple(row[name] for name in names) for row in read_metrics(out) if names[-1] in row]


def result(out: Path) -> tuple[Any, Any]:
    """The numbers of each step, and the weights and the state at the end."""
    return column(out, "step", "loss", "grad_norm"), tensors_of_run(out)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), "dp": (2, {}), "zero": (2, {"zero": 1}), "pp": (2, {"pp": 2}), "cp": (2, {"cp": 2}),
    "tp": (2, {"tp": 2}),
}  # fmt: skip
