"""``kos.train.optim.Optimizer`` on a GPU: norm, clipping, schedule and update without the host.

What is queued may be captured into a CUDA graph: the counters of steps and updates, and the learning rate, live on the
device.  A gradient norm that is not finite changes nothing any more, and stands in ``read()`` for the host to see.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from kos.errors import InvalidArgument
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.model.parameters import OwnedSlices, Parameters, packed
from kos.train.ops.cuda import CudaOps
from kos.train.optim import Group, LearningRate, UpdateRule, decay_matrices, split, state_of
from kos.train.parallel.mesh import ALONE, Axis

CHUNK = 16_384  # elements of a thread block: a chunk begins at a multiple of it, or where a tensor begins
SHAPES = {"cosine": 0, "constant": 1, "wsd": 2}  # of optimizer.cu
SCALARS = ("step", "updates", "lr", "norm", "scale", "step_size", "root", "finite", "sum_of_squares", "rest", "halted")


class CudaOptimizer:
    """``rule`` over ``weights``; ``copy``, in their layout, receives them rounded to its dtype.

    Weights of bfloat16 are rounded stochastically (Gupta et al. 2015, arXiv:1502.02551).  The random bits depend only
    on ``seed``, step and position in the layout, so they are the same in any OwnedSlices.
    ``weights`` may be the OwnedSlices of this rank (ZeRO-1: Rajbhandari et al. 2020, arXiv:1910.02054), with parts that
    begin and end at multiples of CHUNK or where tensors do; gradients and copy are whole.  ``groups``: default
    ``decay_matrices``.
    ``places``: where each tensor begins in the layout of the whole model, if ``weights`` are a stage of it.
    ``counted`` names the tensors that count in this rank's part of the norm; None: all.  ``normed``: the parts that do.
    ``exact`` > 0, the elements of the whole model: the norm has the same bits for every split into ranks and chunks.
    ``skip_outliers`` > 0 skips steps whose norm exceeds it or is not finite; otherwise a norm that is not finite stops.
    ``state`` has by name what the rules keep.  ``tp`` has the shards of matrices, and ``arena``, idle between steps,
    takes some of them.  ``scalars`` (11,) float64 holds what ``SCALARS`` names.
    """

    def __init__(
        self, rule: UpdateRule, ops: CudaOps, weights: Parameters | OwnedSlices, copy: Parameters | None,
        learning_rate: LearningRate, *, groups: Sequence[Group] | None = None, grad_clip: float = 0.0,
        skip_outliers: float = 0.0, seed: int = 0, counted: Collection[str] | None = None,
        normed: Sequence[slice] | None = None,
        places: Mapping[str, int] | None = None, exact: int = 0, tp: Axis = ALONE, arena: Arena | None = None,
    ) -> None:  # fmt: skip
        if copy is not None and (copy.spans != weights.spans or copy.flat.dtype.itemsize > weights.flat.dtype.itemsize):
            raise InvalidArgument("CudaOptimizer: expected a copy in the layout of the weights, and no wider")
        self.rule, self.ops, self.weights, self.copy = rule, ops, weights, copy
        self.tp, self.arena = tp, arena or ops.make_arena()
        self.learning_rate, self.grad_clip, self.skip_outliers = learning_rate, grad_clip, skip_outliers
        self.seed, self.exact = seed, exact
        self.scalars = ops.zeros(len(SCALARS), np.float64)
        self.groups = groups = decay_matrices(weights.shapes) if groups is None else groups
        self.places = places or {name: span.start for name, span in weights.spans.items()}
        layout = weights if isinstance(weights, Parameters) else weights.layout
        held = state_of(rule, groups, weights.spans, [part for part, _ in weights.parts()])
        self.names_of_state = {name: kept.names for name, kept in held.items()}
        self.state = {name: OwnedSlices(layout, kept.slices, kept.dtype) for name, kept in held.items()}
        of_all, names, self._starts = split(weights, weights.parts(), CHUNK, groups, places)
        own = next((packed(held[name].slices) for name in rule.state), weights.parts())
        chunks, _, _ = split(weights, own, CHUNK, groups, places)
        chunks["local"] = of_all["local"][np.searchsorted(of_all["index"], chunks["index"])]
        of_norm = of_all if counted is None else of_all[np.isin(names, [*counted])]
        if normed is not None:
            mine, _, _ = split(weights, packed(normed), CHUNK, groups, places)
            of_norm = of_norm[np.isin(of_norm["index"], mine["index"])]
        self._chunk_count, self._norm_count, self._sparse = len(chunks), len(of_norm), counted is not None
        numbers = np.array([(group.decay, group.lr_scale) for group in groups])
        self._chunks, self._norm_chunks, self._groups = (
            Array.from_numpy(rows.view(np.uint8), ops.device, stream=ops.stream, label="optimizer's chunks")
            for rows in (chunks, of_norm, numbers)
        )
        self.partial = ops.zeros((2 if exact else 1, max(1, len(self._starts))), np.float64)
        self.largest = ops.zeros(1, np.int32)

    @property
    def step_count(self) -> int:
        """The steps so far, including skipped ones, which set the learning rate; waits for the device."""
        return int(self.read()["step"])

    @property
    def updates(self) -> int:
        """The steps so far that were not skipped; waits for the device."""
        return int(self.read()["updates"])

    def continue_after(self, step: int, updates: int) -> None:
        """Continue after ``step`` steps, of which ``updates`` were not skipped."""
        self._set(**dict.fromkeys(SCALARS, 0) | {"step": step, "updates": updates})

    def halt(self) -> None:
        """Make updates change nothing until ``resume``; step and norm stay. Waits for the device."""
        self._set(halted=1)

    def resume(self) -> None:
        """Let updates change something again; step and norm stay. Waits for the device."""
        self._set(halted=0)

    def _set(self, **changes: float) -> None:
        scalars = self.ops.to_host(self.scalars)
        for name, value in changes.items():
            scalars[SCALARS.index(name)] = value
        self.scalars.copy_from(scalars, self.ops.stream)

    def norm(
        self, gradients: Parameters, sum_shards: Callable[[Array], object] | None = None, others: Axis = ALONE,
        find_largest: Callable[[Array], object] | None = None,
    ) -> None:  # fmt: skip
        """The sum of squares of ``gradients`` goes to ``scalars``, with ``exact`` its low-order part too.

        ``sum_shards(partial)`` adds the sums of squares over ranks with a shard each; they are 0 for others' chunks.
        ``others`` hold the rest of the model.  ``find_largest(bits)`` (1,) takes the maximum over all ranks.
        """
        flat = gradients.flat
        if sum_shards is not None or self._sparse:
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
        if sum_shards is not None:
            sum_shards(self.partial)
        self._launch("finish_norm", flat, rows, 1024, self.partial, stride, self.scalars)
        if others.size > 1:
            sums = self.scalars[SCALARS.index("sum_of_squares") :][:rows]
            # In rank order: copies of the same weights are in different groups of ``others``, and need equal norms.
            others.comm.all_reduce(sums, deterministic=others.size > 2)

    def invalidate_if_aborted(self, gradients: Parameters, addresses: Array, report: Array) -> None:
        """Give ``report`` an epoch that no rank has if a collective of this rank was aborted (``addresses``: (n,)
        uint64, ``Communicator.abort_flags``).  Its sums are then undefined, and no rank applies the step.
        """
        self._launch("invalidate_if_aborted", gradients.flat, 1, 1, addresses, addresses.size, report)

    def agree(self, gradients: Parameters, report: Array, reports: Array) -> None:
        """Updates change nothing any more unless all ranks report the same epoch and step (``kos.train.train.REPORT``).

        The reports of a step whose collectives were ended are those of an earlier step, or zeros.
        """
        self._launch("agree", gradients.flat, 1, 32, report, reports, *reports.shape, self.scalars)

    def update(self, gradients: Parameters, micro_batches: float = 1, count: Array | None = None) -> None:
        """One update with the mean over ``micro_batches``, clipped by its norm; the gradients are left as they are.

        There is none if ``count`` (1,), the targets in a micro-batch (``Dataset.micro_batches``), is infinite.
        """
        flat, copy = gradients.flat, self.weights.flat if self.copy is None else self.copy.flat
        rate, (beta1, beta2) = self.learning_rate, self.rule.bias_correction
        self._launch(
            "prepare", flat, 1, 1, self.scalars, SHAPES[rate.kind], float(rate.lr), float(rate.min_lr),
            rate.steps, rate.warmup_steps, rate.decay_steps, float(beta1), float(beta2),
            1 / micro_batches, float(self.grad_clip), float(self.skip_outliers), 0 if count is None else count,
        )  # fmt: skip
        if self._chunk_count:
            state = [self.state[name].flat for name in self.rule.state]
            self.ops.update(
                self.rule, self.weights.flat, flat, state, copy, self._chunk_count, self._chunks, self._groups,
                self.scalars, self.seed, **self.macros(flat),
            )  # fmt: skip
        for group in self.groups:
            if group.rule:
                group.rule.queue_matrices(self, gradients, group.lr_scale, group.decay)

    def refresh_copy(self) -> None:
        """The copy (this rank's parts of it) from the weights, after these were loaded."""
        if self.copy is not None:
            for part, local in self.weights.parts():
                self.ops.copy(self.weights.flat[local], self.copy.flat[part])

    def read(self) -> dict[str, float]:
        """``scalars`` by name, after everything queued so far; waits for the device."""
        return dict(zip(SCALARS, map(float, self.ops.to_host(self.scalars)), strict=True))

    def not_finite(self) -> str | None:
        """The first tensor, in the order of the layout, whose last gradient was not finite; waits for the device."""
        bad = np.flatnonzero(~np.isfinite(self.ops.to_host(self.partial)[0]))
        if not bad.size:
            return None
        at = int(self._starts[bad[0]])
        return next(name for name, span in self.weights.spans.items() if span.start <= at < span.stop)

    def _launch(self, name: str, gradients: Array, grid: int, block: int, *arguments: Any) -> None:
        self.ops.launch("optimizer.cu", name, grid, block, *arguments, **self.macros(gradients))

    def macros(self, gradients: Array) -> dict[str, Any]:
        """Those of the kernels of optimizers."""
        weight = "float32" if self.copy is None else self.copy.flat.dtype.name
        master, copies = self.weights.flat.dtype.name, int(self.copy is not None)
        return {"MASTER": master, "GRADIENT": gradients.dtype.name, "WEIGHT": weight, "COPY": copies}
