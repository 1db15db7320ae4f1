"""AdamW, gradient norm and learning-rate schedules over flat fp32 arrays.

AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with torch's conventions: decoupled weight decay,
bias-corrected moments, ``eps`` outside the square root. All passes over a block are made while the
block lies in the cache: a step reads and writes each array of the state once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kos.train.model.parameters import Parameters

BLOCK = 16_384  # elements: weights, gradients, two moments and one temporary are 320 KiB, within an L2


def global_norm(flat: np.ndarray) -> float:
    """The Euclidean norm of a flat fp32 array: fp32 within a block, float64 across blocks."""
    total = 0.0
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        total += float(np.dot(block, block))
    return math.sqrt(total)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by, as ``torch.nn.utils.clip_grad_norm_``; 0 turns it off."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


class AdamW:
    """AdamW over ``weights.flat``; matrices are decayed, vectors (norms) are not."""

    def __init__(
        self, weights: Parameters, *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:  # fmt: skip
        self.weights, self.exp_avg, self.exp_avg_sq = weights, weights.like(), weights.like()
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.step_count = 0
        self._blocks = _blocks(weights)
        self._scratch = np.empty(BLOCK, weights.flat.dtype)

    def step(self, gradients: Parameters, lr: float, scale: float = 1.0) -> None:
        """One update with ``scale * gradients``; the gradients are left scaled.

        ``scale`` carries the average over micro-batches and the clipping in the one pass.
        """
        self.step_count += 1
        beta1, beta2 = self.betas
        step_size = lr / (1 - beta1**self.step_count)
        root = 1 / math.sqrt(1 - beta2**self.step_count)
        arrays = (self.weights.flat, gradients.flat, self.exp_avg.flat, self.exp_avg_sq.flat)
        for span, decayed in self._blocks:
            w, g, m, v = (array[span] for array in arrays)
            t = self._scratch[: w.size]
            if scale != 1.0:
                g *= scale
            m *= beta1
            m += np.multiply(g, 1 - beta1, out=t)
            v *= beta2
            np.multiply(g, g, out=t)
            t *= 1 - beta2
            v += t
            np.sqrt(v, out=t)
            t *= root
            t += self.eps
            np.divide(m, t, out=t)
            t *= step_size
            if decayed:
                w *= 1 - lr * self.weight_decay
            w -= t


def _blocks(weights: Parameters) -> list[tuple[slice, bool]]:
    """Slices of the flat array that fit in the cache, each of one tensor, and whether it is decayed."""
    return [
        (slice(at, min(at + BLOCK, span.stop)), len(weights.shapes[name]) >= 2)
        for name, span in weights.spans.items()
        for at in range(span.start, span.stop, BLOCK)
    ]


@dataclass(frozen=True)
class Schedule:
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
        """The rate of ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        start = self.warmup_steps if self.kind == "cosine" else max(self.warmup_steps, self.steps - self.decay_steps)
        progress = min(1.0, max(0, step - start) / max(1, self.steps - start))
        share = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.min_lr + share * (self.lr - self.min_lr)
