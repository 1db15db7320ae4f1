"""Learning-rate schedules. On GPUs, ``prepare`` of ``kernels/optimizer.cu`` computes the same in a captured step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of each step: a linear warm-up, then one of three shapes.

    ``cosine`` falls from ``lr`` to ``min_lr`` at ``steps``; ``constant`` stays; ``wsd``
    (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395) stays at ``lr`` and falls linearly
    to ``min_lr`` over the last ``decay_steps``.
    """

    kind: str
    lr: float
    min_lr: float
    steps: int
    warmup_steps: int
    decay_steps: int = 0

    def __call__(self, step: int) -> float:
        """The learning rate of ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        start = self.warmup_steps if self.kind == "cosine" else max(self.warmup_steps, self.steps - self.decay_steps)
        progress = min(1.0, max(0, step - start) / max(1, self.steps - start))
        share = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.min_lr + share * (self.lr - self.min_lr)
