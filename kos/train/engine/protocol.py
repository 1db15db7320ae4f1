"""Engine: what computes a training step.  The loop gives it steps and gets back losses, on any hardware."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from kos.train.ops.optimizer import AdamW


class StepResult(NamedTuple):
    """What a step came to, the same on every rank but for ``seconds``."""

    loss: float
    norm: float  # of the gradient, before clipping
    lr: float
    seconds: float
    stop: bool  # whether any rank was asked to stop


class Engine(Protocol):
    """A model in training: its weights and moments live where the engine computes.  All calls are collective."""

    lag: int
    """How many steps may be started before the first of them is finished, so that the device never waits."""

    chosen: dict[str, str]
    """Settings that it chose itself, and their values."""

    place: str
    """What it computes on, for errors."""

    asked: Callable[[], bool]
    """Whether this rank was asked to stop; an engine whose steps take long looks again at their end."""

    def describe(self) -> str:
        """Lines for the log: where it computes, and with how much memory."""

    def trial(self) -> tuple[float, float] | None:
        """Seconds of a step and of a validation, tried before there are weights; None: they show at once."""

    def new_state(self) -> AdamW:
        """Weights and moments of zeros in host memory, to be filled and given to ``load``."""

    def draw_weights(self) -> None:
        """Draw this rank's part of the initial weights; waits for no other.  ``load(None)`` gives it to all."""

    def load(self, state: AdamW | None) -> None:
        """Take over rank 0's ``state``, which the other ranks have not; or what all have drawn."""

    def state(self) -> AdamW | None:
        """Weights and moments in host memory; on rank 0."""

    def start_step(self, step: int, stop: bool) -> None:
        """Begin the step (counted from 0); ``stop``: this rank was asked to stop."""

    def finish_step(self, step: int) -> StepResult:
        """Wait for a step that was begun, the oldest first."""

    def not_finite(self, step: int) -> str | None:
        """The first tensor whose gradient was not finite in this step, which no later step followed."""

    def evaluate(self) -> float:
        """The mean loss over the validation windows, for any number of ranks."""

    def sampler(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """What gives the logits (V,) of the token after (1, T); None on ranks that take no part."""

    def close(self) -> None:
        """Let go of what would keep the communicator from ending; waits for nothing."""

    def measures(self, tokens_per_second: float) -> dict[str, float]:
        """What else is worth a column: per GPU, model flops utilisation by both conventions, memory in bytes."""


Show = Callable[[str, float], None]
"""Called between the parts of what takes long, with what it is and the share that is done."""
