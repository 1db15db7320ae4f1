"""AdamW on a GPU, as ``kos.train.ops.optimizer.AdamW``: norm, clipping, schedule and update without the host.

What is queued may be captured into a CUDA graph: the step counter, and the learning rate with it, live on the
device.  A gradient norm that is not finite changes nothing any more, and stands in ``read()`` for the host to see.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from kos.errors import InvalidArgument
from kos.memory.array import Array
from kos.train.model.parameters import Parameters, Shard
from kos.train.ops.cuda.dialect import CudaOps
from kos.train.ops.learning_rate import LearningRate
from kos.train.ops.optimizer import split

CHUNK = 16_384  # elements of a thread block: a chunk begins at a multiple of it, or where a tensor begins
SHAPES = {"cosine": 0, "constant": 1, "wsd": 2}  # of adamw.cu
STATE = ("step", "lr", "norm", "scale", "step_size", "root", "decay", "finite", "sum_of_squares", "rest", "halted")


class CudaAdamW:
    """AdamW over ``weights``; ``copy``, in their layout, receives them rounded to its dtype.

    Weights of bfloat16 are rounded stochastically (Gupta et al. 2015, arXiv:1502.02551).  The random bits depend only
    on ``seed``, step and position in the layout, so they are the same in any Shard.
    ``weights`` may be the Shard of this rank (ZeRO-1: Rajbhandari et al. 2020, arXiv:1910.02054), with parts that
    begin and end at multiples of CHUNK; gradients and copy are whole.  Matrices are decayed, vectors are not.
    ``places``: where each tensor begins in the layout of the whole model, if ``weights`` are a stage of it.
    ``counted`` names the tensors that count in this rank's part of the norm; None: all.
    ``exact`` > 0, the elements of the whole model: the norm has the same bits for every split into ranks and chunks.
    ``skip_outliers`` > 0 skips steps whose norm exceeds it or is not finite; otherwise a norm that is not finite stops.
    ``state`` (11,) float64 holds what ``STATE`` names.
    """

    def __init__(
        self, ops: CudaOps, weights: Parameters | Shard, copy: Parameters | None, learning_rate: LearningRate, *,
        betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1,
        grad_clip: float = 0.0, skip_outliers: float = 0.0, seed: int = 0, counted: Collection[str] | None = None,
        places: Mapping[str, int] | None = None, exact: int = 0,
    ) -> None:  # fmt: skip
        if copy is not None and (copy.spans != weights.spans or copy.flat.dtype.itemsize > weights.flat.dtype.itemsize):
            raise InvalidArgument("CudaAdamW: expected a copy in the layout of the weights, and no wider")
        self.ops = ops
        self.weights, self.copy = weights, copy
        self.exp_avg, self.exp_avg_sq = weights.like("float32"), weights.like("float32")
        self.learning_rate, self.betas, self.eps = learning_rate, betas, eps
        self.weight_decay, self.grad_clip, self.skip_outliers = weight_decay, grad_clip, skip_outliers
        self.seed, self.exact = seed, exact
        self.state = ops.zeros(len(STATE), np.float64)
        chunks, names, self._starts = split(weights, CHUNK, places)
        of_norm = chunks if counted is None else chunks[np.isin(names, [*counted])]
        self._chunk_count, self._norm_count, self._sparse = len(chunks), len(of_norm), counted is not None
        self._chunks, self._norm_chunks = (
            Array.from_numpy(rows.view(np.uint8), ops.device, stream=ops.stream, label="AdamW chunks")
            for rows in (chunks, of_norm)
        )
        self.partial = ops.zeros((2 if exact else 1, len(self._starts)), np.float64)
        self.largest = ops.zeros(1, np.int32)

    @property
    def step_count(self) -> int:
        """The number of updates so far; waits for the device."""
        return int(self.read()["step"])

    @step_count.setter
    def step_count(self, step: int) -> None:
        self._set(step=step)

    def halt(self) -> None:
        """Make updates change nothing until ``step_count`` is set."""
        self._set(halted=1)

    def _set(self, **state: float) -> None:
        self.state.copy_from(np.array([state.get(name, 0) for name in STATE], np.float64), self.ops.stream)

    def queue_norm(
        self, gradients: Parameters, add_up: Callable[[Array], object] | None = None,
        add_models: Callable[[Array], object] | None = None, find_largest: Callable[[Array], object] | None = None,
    ) -> None:  # fmt: skip
        """The sum of squares of ``gradients`` goes to ``state[8]``, with ``exact`` its low-order part to ``state[9]``.

        ``add_up(partial)`` adds the sums of squares over ranks with a shard each; they are 0 for others' chunks.
        ``add_models(totals)`` adds over the ranks that hold one model together.  ``find_largest(bits)`` (1,) takes the
        maximum over all ranks.
        """
        flat = gradients.flat
        if add_up is not None or self._sparse:
            self.ops.zero(self.partial)
        chunks, (rows, stride) = (flat, self._norm_chunks), self.partial.shape
        if self.exact:
            self.ops.zero(self.largest)
            if self._norm_count:
                self._launch("largest", flat, self._norm_count, 256, *chunks, self.largest)
            if find_largest is not None:
                find_largest(self.largest)
        more = (stride, self.largest, self.exact.bit_length()) if self.exact else ()
        if self._norm_count:
            name = "exact_squares" if self.exact else "squares"
            self._launch(name, flat, self._norm_count, 256, *chunks, self.partial, *more)
        if add_up is not None:
            add_up(self.partial)
        self._launch("finish_norm", flat, rows, 1024, self.partial, stride, self.state)
        if add_models is not None:
            add_models(self.state[STATE.index("sum_of_squares") :][:rows])

    def queue_update(self, gradients: Parameters, average: float = 1.0) -> None:
        """One update with ``average * gradients``, clipped by their norm; the gradients are left as they are."""
        flat, copy = gradients.flat, self.weights.flat if self.copy is None else self.copy.flat
        rate, (beta1, beta2) = self.learning_rate, self.betas
        self._launch(
            "prepare", flat, 1, 1, self.state, SHAPES[rate.kind], float(rate.lr), float(rate.min_lr),
            rate.steps, rate.warmup_steps, rate.decay_steps, float(beta1), float(beta2),
            float(self.weight_decay), float(average), float(self.grad_clip), float(self.skip_outliers),
        )  # fmt: skip
        if self._chunk_count:
            self._launch(
                "adamw", flat, self._chunk_count, 256, self.weights.flat, flat, self.exp_avg.flat,
                self.exp_avg_sq.flat, copy, self._chunks, self.state, np.float32(beta1), np.float32(beta2),
                np.float32(self.eps), self.seed,
            )  # fmt: skip

    def refresh_copy(self) -> None:
        """The copy (this rank's parts of it) from the weights, after these were loaded."""
        if self.copy is not None:
            for part, local in self.weights.parts():
                self.ops.copy(self.weights.flat[local], self.copy.flat[part])

    def read(self) -> dict[str, float]:
        """``state`` by name, after everything queued so far; waits for the device."""
        return dict(zip(STATE, map(float, self.ops.to_host(self.state)), strict=True))

    def not_finite(self) -> str | None:
        """The first tensor, in the order of the layout, whose last gradient was not finite; waits for the device."""
        bad = np.flatnonzero(~np.isfinite(self.ops.to_host(self.partial)[0]))
        if not bad.size:
            return None
        at = int(self._starts[bad[0]])
        return next(name for name, span in self.weights.spans.items() if span.start <= at < span.stop)

    def _launch(self, name: str, gradients: Array, grid: int, block: int, *arguments: Any) -> None:
        weight = "float32" if self.copy is None else self.copy.flat.dtype.name
        self.ops.launch(
            "adamw.cu", name, grid, block, *arguments,
            MASTER=self.weights.flat.dtype.name, GRADIENT=gradients.dtype.name, WEIGHT=weight,
            COPY=int(self.copy is not None),
        )  # fmt: skip
