"""AdamW on a GPU, as ``kos.train.optimizer.AdamW``: norm, clipping, schedule and update without the host.

``queue`` may be captured into a CUDA graph: the step counter, and the learning rate with it, live on the
device.  A gradient norm that is not finite changes nothing, and stands in ``read()`` for the host to see.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kos.errors import InvalidArgument
from kos.memory.array import Array
from kos.train.ops.cuda import CudaOps
from kos.train.optimizer import Schedule
from kos.train.parameters import Parameters

CHUNK = 16_384  # elements of a thread block
SHAPES = {"cosine": 0, "constant": 1, "wsd": 2}  # of adamw.cu
STATE = ("step", "lr", "norm", "scale", "step_size", "root", "decay", "finite", "sum_of_squares")
_CHUNK_DTYPE = np.dtype([("start", np.int64), ("length", np.int32), ("decayed", np.int32)])


class CudaAdamW:
    """AdamW over fp32 ``weights``; ``copy``, in the same layout, gets them rounded to its dtype.

    Matrices are decayed, vectors are not.  ``state`` (9,) float64 holds what ``STATE`` names.
    """

    def __init__(
        self,
        ops: CudaOps,
        weights: Parameters,
        copy: Parameters | None,
        schedule: Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        grad_clip: float = 0.0,
    ) -> None:
        if copy is not None and copy.spans != weights.spans:
            raise InvalidArgument("CudaAdamW: expected weights and their copy in one layout")
        self.ops = ops
        self.weights, self.copy = weights, copy
        self.exp_avg, self.exp_avg_sq = weights.like(), weights.like()
        self.schedule, self.betas, self.eps = schedule, betas, eps
        self.weight_decay, self.grad_clip = weight_decay, grad_clip
        self.state = ops.zeros(len(STATE), np.float64)
        chunks = _chunks(weights)
        self._chunk_count = len(chunks)
        self._chunks = Array.from_numpy(chunks.view(np.uint8), ops.device, stream=ops.stream, label="AdamW chunks")
        self._blocks = 4 * ops.multiprocessors
        self._partial = ops.zeros(self._blocks, np.float64)

    @property
    def step_count(self) -> int:
        """Updates made so far; waits for the device."""
        return int(self.read()["step"])

    @step_count.setter
    def step_count(self, step: int) -> None:
        state = np.zeros(len(STATE))
        state[0] = step
        self.state.copy_from(state, self.ops.stream)

    def queue(self, gradients: Parameters, average: float = 1.0) -> None:
        """One update with ``average * gradients``, clipped; the gradients are left as they are."""
        self.queue_norm(gradients)
        self.queue_update(gradients, average)

    def queue_norm(self, gradients: Parameters) -> None:
        """The sum of squares of ``gradients`` goes to ``state[8]``, which ranks may add up before the update."""
        flat = gradients.flat
        self._launch("squares", flat, self._blocks, 512, flat, flat.size, self._partial)
        self._launch("finish_norm", flat, 1, 512, self._partial, self._blocks, self.state)

    def queue_update(self, gradients: Parameters, average: float = 1.0) -> None:
        """Learning rate, clipping and the update, from ``state[8]``."""
        flat, copy = gradients.flat, self.weights.flat if self.copy is None else self.copy.flat
        schedule, (beta1, beta2) = self.schedule, self.betas
        self._launch(
            "prepare", flat, 1, 1, self.state, SHAPES[schedule.kind], float(schedule.lr), float(schedule.min_lr),
            schedule.steps, schedule.warmup_steps, schedule.decay_steps, float(beta1), float(beta2),
            float(self.weight_decay), float(average), float(self.grad_clip),
        )  # fmt: skip
        self._launch(
            "adamw", flat, self._chunk_count, 256, self.weights.flat, flat, self.exp_avg.flat, self.exp_avg_sq.flat,
            copy, self._chunks, self.state, np.float32(beta1), np.float32(beta2), np.float32(self.eps),
        )  # fmt: skip

    def refresh_copy(self) -> None:
        """The copy from the weights, after these were loaded."""
        if self.copy is not None:
            self.ops.cast(self.weights.flat, self.copy.flat)

    def read(self) -> dict[str, float]:
        """``state`` by name, after everything queued so far; waits for the device."""
        return dict(zip(STATE, map(float, self.ops.to_host(self.state)), strict=True))

    def _launch(self, name: str, gradients: Array, grid: int, block: int, *arguments: Any) -> None:
        weight = "float32" if self.copy is None else self.copy.flat.dtype.name
        self.ops.launch(
            "adamw.cu", name, grid, block, *arguments,
            GRADIENT=gradients.dtype.name, WEIGHT=weight, COPY=int(self.copy is not None),
        )  # fmt: skip


def _chunks(weights: Parameters) -> np.ndarray[Any, Any]:
    """Slices of the flat array, each within one tensor."""
    rows = [
        (at, min(CHUNK, span.stop - at), len(weights.shapes[name]) >= 2)
        for name, span in weights.spans.items()
        for at in range(span.start, span.stop, CHUNK)
    ]
    return np.array(rows, _CHUNK_DTYPE)
