"""The kernels of optimizers on a host, and the tables that they read: those of ``cuda/kernels/optimizer.cu`` and
``muon.cu`` have the same names and arguments.

All passes over a chunk run while it is in the cache, so a step reads and writes each array of the state once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kos.errors import CollectiveMismatch

Array = np.ndarray[Any, Any]
CHUNKS = np.dtype([
    ("start", "i8"), ("local", "i8"), ("length", "i4"), ("group", "i4"), ("index", "i8"), ("place", "i8"),
    ("kept", "i8"),
])  # fmt: skip
SHAPES = {"cosine": 0, "constant": 1, "wsd": 2}  # of optimizer.cu
SCALARS = ("step", "updates", "lr", "norm", "scale", "step_size", "root", "finite", "sum_of_squares", "rest", "halted")
"""What an optimizer keeps of a step, as an array of float64."""


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of each step: a linear warm-up, then one of three shapes.

    ``cosine`` falls from ``lr`` to ``min_lr`` at ``steps``; ``constant`` stays; ``wsd``
    (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395) stays at ``lr`` and falls linearly
    to ``min_lr`` over the last ``decay_steps``. On GPUs, ``prepare`` of ``kernels/optimizer.cu`` computes the same in a
    captured step.
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


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that clips a gradient of this norm, as in ``torch.nn.utils.clip_grad_norm_``; 0: no clipping."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


# --- the norm ------------------------------------------------------------------------------------------


def squares(gradients: Array, chunks: Array, partial: Array) -> None:
    """partial (1, all chunks): the sums of squares of ``chunks``, added in the gradients' dtype within a chunk."""
    for start, _, length, _, index, *_ in chunks.view(CHUNKS).tolist():
        block = gradients[start : start + length]
        block = block if block.itemsize > 2 else block.astype(np.float32)
        partial[0, index] = np.dot(block, block)


def largest(gradients: Array, chunks: Array, most: Array) -> None:
    """most (1,): the bits of the largest magnitude so far.  Bits have the order of magnitudes, NaN's exceed all."""
    for start, _, length, *_ in chunks.view(CHUNKS).tolist():
        most[0] = max(most[0], np.abs(gradients[start : start + length]).max().view(most.dtype))


def reproducible_squares(
    gradients: Array, chunks: Array, partial: Array, stride: int, most: Array, count_bits: int
) -> None:
    """partial (2, all chunks): sums of squares that can be added over ranks and chunks without rounding errors.

    Each square is rounded to a multiple of a unit, and its remainder to a multiple of a smaller unit.  The two
    parts are summed separately.  No number is larger than ``most``, so each sum of 2^``count_bits`` parts fits in 53
    bits, and the order of the additions does not matter (Demmel & Nguyen 2013, "Fast reproducible floating-point
    summation").
    """
    magnitude = float(most.view(f"f{most.itemsize}")[0])
    exact = 0 < magnitude < math.inf
    unit = 2.0 ** (2 * math.frexp(magnitude)[1] + count_bits - 52) if exact else 0.0
    for start, _, length, _, index, *_ in chunks.view(CHUNKS).tolist():
        left = gradients[start : start + length].astype(np.float64)
        left *= left
        partial[:, index] = left.sum(), 0
        for row, of_row in enumerate((unit, unit * 2.0 ** (count_bits - 53)) if exact else ()):
            rounded = np.rint(left / of_row)
            rounded *= of_row
            partial[row, index] = rounded.sum()
            left -= rounded


def finish_norm(partial: Array, stride: int, scalars: Array) -> None:
    """The sum of each row of ``partial``."""
    at = SCALARS.index("sum_of_squares")
    scalars[at : at + len(partial)] = [math.fsum(row) for row in partial]


# --- the update ----------------------------------------------------------------------------------------


def check_in_step(report: Array, reports: Array, ranks: int, columns: int, scalars: Array) -> None:
    """Raise CollectiveMismatch unless all ranks report the same epoch and step (``kos.train.step.STATUS_FIELDS``)."""
    if not (reports[:, 1:3] == report[1:3]).all():
        got = "; ".join(f"{step:.0f} of epoch {epoch:.0f}" for epoch, step in reports[:, 1:3])
        expected = f"step {report[2]:.0f} of epoch {report[1]:.0f} on every rank"
        raise CollectiveMismatch(f"the update: expected {expected}, got {got}")


def prepare(
    scalars: Array, shape: int, lr: float, min_lr: float, steps: int, warmup: int, decay_steps: int, beta1: float,
    beta2: float, micro_batches: float, max_norm: float, outlier: float, count: Any,
) -> None:  # fmt: skip
    """The norm, the learning rate and the factor on gradients of this step, and whether it is an update."""
    now = dict(zip(SCALARS, scalars.tolist(), strict=True))
    now["norm"] = norm = math.sqrt(math.fsum((now["sum_of_squares"], now["rest"]))) / micro_batches
    good = math.isfinite(norm) and not (outlier and norm > outlier)
    now["halted"] = now["halted"] or float(not good and not outlier)
    masked = not isinstance(count, int) and math.isinf(count[0])
    now["finite"] = float(good and not now["halted"] and not masked)
    if not now["halted"]:
        schedule = LearningRate([*SHAPES][shape], lr, min_lr, steps, warmup, decay_steps)
        now["lr"] = schedule(int(now["step"]))
        now["step"] += 1
        now["updates"] += now["finite"]
        now["scale"] = clip_coefficient(norm, max_norm) / micro_batches
    if now["finite"]:
        now["step_size"] = now["lr"] / (1 - beta1 ** now["updates"])
        now["root"] = 1 / math.sqrt(1 - beta2 ** now["updates"])
    scalars[:] = [*now.values()]


def update(
    rule: Any, weights: Array, gradients: Array, state: Sequence[Array], copy: Array, count: int, chunks: Array,
    groups: Array, scalars: Array, seed: int, **defines: Any,
) -> None:  # fmt: skip
    """The update of an ``UpdateRule`` (``kos.train.optim``).  The gradients remain scaled afterwards."""
    now = dict(zip(SCALARS, scalars.tolist(), strict=True))
    if not now["finite"]:
        return
    of_groups = groups.view(np.float64).reshape(-1, 2).tolist()
    updates = [rule.step(int(now["updates"]), now["lr"] * lr_scale, decay) for decay, lr_scale in of_groups]
    rows = chunks.view(CHUNKS)
    scratch = np.empty(rows["length"].max(), weights.dtype)
    for start, local, length, group, _, _, kept in rows.tolist():
        w, g = weights[local : local + length], gradients[start : start + length]
        if now["scale"] != 1.0:
            g *= now["scale"]
        updates[group](w, g, [flat[kept : kept + length] for flat in state], scratch[:length])


# --- Muon ----------------------------------------------------------------------------------------------


def muon_momentum(gradients: Array, momentum: Array, out: Array, size: int, scalars: Array, mu: float) -> None:
    """out = (1 - mu) g + mu m, after m = mu m + (1 - mu) g."""
    now = dict(zip(SCALARS, scalars.tolist(), strict=True))
    g, m, u = gradients, momentum, out.reshape(-1)
    if not now["finite"]:
        u[:] = 0
        return
    if now["scale"] != 1.0:
        g *= now["scale"]
    np.subtract(g, m, out=u)
    u *= 1 - mu
    m += u
    np.subtract(m, g, out=u)
    u *= mu
    u += g


def arrange(
    parts: Array, out: Array, matrices: int, shards: int, copies: int, rows: int, columns: int, stacked: int
) -> None:
    """out (matrices, …), whole, of the parts of all ranks of tp, of which ``copies`` neighbours hold the same."""
    mine = parts.reshape(shards, copies, matrices, rows, columns)[:, 0]
    whole = mine.transpose(1, 0, 2, 3) if stacked else mine.transpose(1, 2, 0, 3)
    out.reshape(whole.shape)[...] = whole


def muon_update(
    weights: Array, update: Array, copy: Array, size: int, columns: int, stride: int, scalars: Array, lr_scale: float,
    decay: float, factor: float, seed: int, place: int,
) -> None:  # fmt: skip
    """weights = (1 - rate decay) weights - rate factor update, of rows of ``stride`` elements."""
    now = dict(zip(SCALARS, scalars.tolist(), strict=True))
    if not now["finite"]:
        return
    w, rate = weights.reshape(-1, columns), now["lr"] * lr_scale
    u = np.lib.stride_tricks.as_strided(update, w.shape, (stride * update.itemsize, update.itemsize))
    u *= rate * factor
    if (shrink := 1 - rate * decay) != 1.0:
        w *= shrink
    w -= u


KERNELS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        squares, largest, reproducible_squares, finish_norm, check_in_step, prepare,
        muon_momentum, arrange, muon_update,
    )
}  # fmt: skip


def launch(file: str, name: str, grid: Any, block: int, *arguments: Any, **defines: Any) -> None:
    """Compute the kernel ``name``."""
    KERNELS[name](*arguments)
