"""AdamW, gradient norm and learning-rate schedules over flat fp32 arrays.

AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with torch's conventions: decoupled weight decay,
bias-corrected moments, ``eps`` outside the square root. All passes over a block are made while the
block lies in the cache: a step reads and writes each array of the state once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kos.train.model.parameters import Parameters, Shard

BLOCK = 16_384  # elements: weights, gradients, two moments and one temporary are 320 KiB, within an L2


def squares(flat: np.ndarray, parts: Sequence[slice]) -> np.ndarray:
    """The sum of squares of each ``BLOCK`` of ``flat``, fp32 within a block; 0 for those outside of ``parts``.

    A part begins at a multiple of ``BLOCK``; what it has beyond the end of ``flat`` is not looked at.
    """
    sums = np.zeros(-(-flat.size // BLOCK))
    for part in parts:
        for start in range(part.start, min(part.stop, flat.size), BLOCK):
            block = flat[start : min(start + BLOCK, part.stop)]
            sums[start // BLOCK] = np.dot(block, block)
    return sums


def root_of_sum(sums: np.ndarray) -> float:
    """In float64, one after another: the bits do not depend on who worked out which."""
    total = 0.0
    for each in sums.tolist():
        total += each
    return math.sqrt(total)


def global_norm(flat: np.ndarray) -> float:
    """The Euclidean norm of a flat fp32 array: fp32 within a block, float64 across blocks."""
    return root_of_sum(squares(flat, [slice(0, flat.size)]))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by, as ``torch.nn.utils.clip_grad_norm_``; 0 turns it off."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


class AdamW:
    """AdamW over ``weights.flat``; matrices are decayed, vectors (norms) are not.

    With ``parts`` only those are updated, and have moments (ZeRO-1).
    """

    def __init__(
        self, weights: Parameters, *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.1, parts: Sequence[slice] | None = None,
    ) -> None:  # fmt: skip
        held: Any = weights.like() if parts is None else Shard(weights, parts, weights.flat.dtype)
        self.weights, self.exp_avg, self.exp_avg_sq = weights, held, held.like()
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.step_count = 0
        self._blocks = _blocks(weights, held.parts())
        self._scratch = np.empty(BLOCK, weights.flat.dtype)

    def step(self, gradients: Parameters, lr: float, scale: float = 1.0) -> None:
        """One update with ``scale * gradients``; the gradients are left scaled.

        ``scale`` carries the average over micro-batches and the clipping in the one pass.
        """
        self.step_count += 1
        beta1, beta2 = self.betas
        step_size = lr / (1 - beta1**self.step_count)
        root = 1 / math.sqrt(1 - beta2**self.step_count)
        for span, local, decayed in self._blocks:
            w, g = self.weights.flat[span], gradients.flat[span]
            m, v = self.exp_avg.flat[local], self.exp_avg_sq.flat[local]
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


def _blocks(weights: Parameters, parts: Sequence[tuple[slice, slice]]) -> list[tuple[slice, slice, bool]]:
    """Slices that fit in the cache, each of one tensor and part: of the flat array, of what is held; if decayed."""
    blocks = []
    for name, span in weights.spans.items():
        for part, local in parts:
            stop = min(span.stop, part.stop)
            for at in range(max(span.start, part.start), stop, BLOCK):
                end, shift = min(at + BLOCK, stop), local.start - part.start
                blocks.append((slice(at, end), slice(at + shift, end + shift), len(weights.shapes[name]) >= 2))
    return blocks


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
