"""AdamW and the norm of gradients, over flat fp32 arrays.

AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with torch's conventions: decoupled weight decay,
bias-corrected moments, ``eps`` outside the square root. All passes over a block are made while the
block lies in the cache: a step reads and writes each array of the state once.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from kos.train.model.parameters import Parameters, Shard

BLOCK = 16_384  # elements: weights, gradients, two moments and one temporary are 320 KiB, within an L2
CHUNKS = np.dtype([
    ("start", "i8"), ("local", "i8"), ("length", "i4"), ("decayed", "i4"), ("index", "i8"), ("place", "i8"),
])  # fmt: skip


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor for gradients of this norm, as in ``torch.nn.utils.clip_grad_norm_``; 0 turns clipping off."""
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
        rows, names, starts = split(held, BLOCK)
        self._count = len(starts)
        self._blocks = [
            (int(index), str(name), slice(start, start + length), slice(local, local + length), bool(decayed))
            for (start, local, length, decayed, index, _), name in zip(rows.tolist(), names, strict=True)
        ]
        self._scratch = np.empty(BLOCK, weights.flat.dtype)

    def squares(self, gradients: Parameters, counted: Container[str]) -> np.ndarray:
        """The sum of squares of each block of the layout, fp32 within it; 0 for those of others and not ``counted``."""
        sums = np.zeros(self._count)
        for index, name, span, _, _ in self._blocks:
            if name in counted:
                block = gradients.flat[span]
                sums[index] = np.dot(block, block)
        return sums

    def largest(self, gradients: Parameters, counted: Container[str]) -> float:
        """The largest magnitude of ``counted`` gradients here; inf if one is not finite."""
        tops = [float(np.abs(gradients.flat[span]).max()) for _, name, span, _, _ in self._blocks if name in counted]
        return max((top if math.isfinite(top) else math.inf for top in tops), default=0.0)

    def exact_squares(self, gradients: Parameters, counted: Container[str], largest: float, count: int) -> np.ndarray:
        """Two float64 that add up over ranks and blocks without rounding; together they are the sum of squares.

        Squares are rounded to a multiple of a unit, and the remainders to a multiple of a smaller one.  So the sum of
        ``count`` squares of numbers of at most ``largest`` fits in 53 bits, and its order does not matter (Demmel &
        Nguyen 2013, "Fast reproducible floating-point summation").
        """
        bits = count.bit_length()
        unit = 2.0 ** (2 * math.frexp(largest)[1] + bits - 52)
        units, sums = (unit, unit * 2.0 ** (bits - 53)), np.zeros(2)
        for _, name, span, _, _ in self._blocks:
            if name in counted:
                left = gradients.flat[span].astype(np.float64)
                left *= left
                for index, unit in enumerate(units):
                    rounded = np.rint(left / unit)
                    rounded *= unit
                    sums[index] += rounded.sum()
                    left -= rounded
        return sums

    def step(self, gradients: Parameters, lr: float, scale: float = 1.0) -> None:
        """One update with ``scale * gradients``; the gradients are left scaled.

        ``scale`` carries the average over micro-batches and the clipping in the one pass.
        """
        self.step_count += 1
        beta1, beta2 = self.betas
        step_size = lr / (1 - beta1**self.step_count)
        root = 1 / math.sqrt(1 - beta2**self.step_count)
        for _, _, span, local, decayed in self._blocks:
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


def split(
    held: Parameters | Shard, size: int, places: Mapping[str, int] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chunks of ``held`` of at most ``size`` elements, each of one tensor; the tensor's name of each; all starts.

    A chunk begins at a multiple of ``size`` or where a tensor begins, and so do the parts of ``held``.  So ``index``
    counts the same chunks on all ranks.  ``start`` is a chunk's position in the layout, ``local`` in ``held.flat``, and
    ``place`` in the layout of the whole model, where tensors begin at ``places``.
    """
    first_of, end = np.array([span.start for span in held.spans.values()]), [*held.spans.values()][-1].stop
    starts = np.union1d(np.arange(0, end, size), first_of)
    tensors = np.searchsorted(first_of, starts, side="right") - 1
    rows = np.zeros(len(starts), CHUNKS)
    rows["start"], rows["length"], rows["index"] = starts, np.diff(starts, append=end), np.arange(len(starts))
    rows["decayed"] = np.array([len(shape) >= 2 for shape in held.shapes.values()])[tensors]
    whole = first_of if places is None else np.array([places[name] for name in held.spans])
    rows["place"] = starts + (whole - first_of)[tensors]
    mine = np.zeros(len(starts), bool)
    for part, local in held.parts():
        inside = slice(*np.searchsorted(starts, (part.start, part.stop)))
        rows["local"][inside], mine[inside] = starts[inside] - part.start + local.start, True
    return rows[mine], np.array([*held.spans])[tensors[mine]], starts
