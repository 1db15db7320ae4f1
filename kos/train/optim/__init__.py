"""Optimizers over flat fp32 arrays: parameter groups, named state, the gradient norm, and the learning rate.

An ``UpdateRule``, such as ``AdamW``, declares the names and dtypes of its state. Checkpoints, memory plans, ZeRO-1 and
resuming use this declaration. ``Optimizer`` runs the rule on a host, and ``kos.train.optim.cuda.CudaOptimizer`` runs it
on a GPU. On a host, all passes over a block run while the block is in the cache, so a step reads and writes each array
of the state once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kos.dtypes import DTYPES
from kos.errors import CollectiveMismatch, InvalidArgument
from kos.memory.arena import Arena
from kos.train.model.parameters import OwnedSlices, Parameters, Shape, packed
from kos.train.parallel.mesh import ALONE, Axis

BLOCK = 16_384  # elements: weights, gradients, two moments and one temporary are 320 KiB, within an L2
CHUNKS = np.dtype([
    ("start", "i8"), ("local", "i8"), ("length", "i4"), ("group", "i4"), ("index", "i8"), ("place", "i8"),
    ("kept", "i8"),
])  # fmt: skip

Update = Callable[[np.ndarray, np.ndarray, Sequence[np.ndarray], np.ndarray], None]
"""``update(weights, gradient, state, scratch)`` updates a block in place.  ``scratch`` is as long as the block."""


class UpdateRule:
    """How an optimizer updates weights, and which state it keeps for them.

    A new rule is a file beside ``adamw.py``, a kernel, and an entry in ``OPTIMIZERS`` (``config/optimizers.py``). The
    tests of rules run every entry. Checkpoints, plans and ZeRO-1 follow from the fields below.

    On GPUs, the update is the CUDA kernel named ``kernel`` in ``ops/cuda/kernels/KERNEL.cu``. ``CudaOps.update`` passes
    its arguments: the state in the order of ``state``, and ``operands`` before the seed.
    """

    state: ClassVar[Mapping[str, str]]
    """The names and dtypes of the arrays of state.  Each array has the layout of the weights."""

    about: ClassVar[str]
    """A description of the state, for memory plans."""

    options: ClassVar[tuple[str, ...]]
    """The settings of a run that belong to this rule.  A run whose optimizer has no such rule refuses them."""

    kernel: ClassVar[str]
    operands: Sequence[Any] = ()

    bias_correction: Sequence[float] = (0.0, 0.0)
    """The decay rates of the two moments whose bias ``prepare`` corrects on GPUs.  0 means no correction."""

    def step(self, number: int, lr: float, decay: float) -> Update:
        """The function that updates a block on a host in update ``number``, counted from 1; skipped steps do not count.
        """
        raise NotImplementedError

    def state_bytes(self) -> int:
        """Bytes of state per weight."""
        return sum(DTYPES[dtype].itemsize for dtype in self.state.values())


class MatrixRule(UpdateRule):
    """A rule that updates whole matrices (``kos.train.optim.muon``), so no ``parts`` may split a matrix.

    On GPUs, its kernels are in ``ops/cuda/kernels/KERNEL.cu``.
    """

    def step_matrices(self, optimizer: Optimizer, gradients: Parameters, lr: float, decay: float, scale: float) -> None:
        """Update, on a host, the matrices whose state this rank holds."""
        raise NotImplementedError

    def queue_matrices(self, optimizer: Any, gradients: Parameters, lr_scale: float, decay: float) -> None:
        """Queue the update on the GPU of a ``CudaOptimizer``."""
        raise NotImplementedError

    def batches(self, held: OwnedSlices, most: int) -> Iterator[Sequence[Any]]:
        """Batches of the matrices of ``held`` to update together: at most ``most`` elements each, or one matrix."""
        raise NotImplementedError

    def scratch_bytes(self, held: OwnedSlices, itemsize: int, most: int) -> int:
        """The most bytes that an update takes from the optimizer's arena."""
        raise NotImplementedError


class Group(NamedTuple):
    """A parameter group: tensors with one weight decay, and one factor on the learning rate (``lr_scale``).

    ``rule`` updates the tensors as whole matrices.  If it is None, the optimizer's own rule updates them element by
    element.  ``frozen`` tensors are not trained: they have no gradient and no optimizer state.
    """

    names: Collection[str]
    decay: float = 0.0
    lr_scale: float = 1.0
    rule: MatrixRule | None = None
    frozen: bool = False


def frozen_in(groups: Sequence[Group]) -> set[str]:
    """The frozen tensors of ``groups``."""
    return {name for group in groups if group.frozen for name in group.names}


class Kept(NamedTuple):
    """One named array of state: its dtype, its tensors, the slices of the layout held here, and its rule."""

    dtype: str
    names: set[str]
    slices: list[slice]
    rule: UpdateRule


def state_of(
    rule: UpdateRule, groups: Sequence[Group], spans: Mapping[str, slice], parts: Sequence[slice]
) -> dict[str, Kept]:
    """The state that ``rule``, and the rules of the groups, keep for ``parts`` of a layout, by name."""
    found: dict[str, Kept] = {}
    for each in [rule, *(group.rule for group in groups if group.rule)]:
        names = {name for group in groups if (group.rule or rule) is each for name in group.names}
        slices = list(parts)
        if names != spans.keys():
            inside = [spans[name] for name in spans if name in names]
            slices = [cut for part in parts for span in inside if (cut := overlap(part, span))]
        found |= {name: Kept(dtype, names, slices, each) for name, dtype in each.state.items()}
    return found


def elements(slices: Sequence[slice]) -> int:
    return sum(part.stop - part.start for part in slices)


def overlap(a: slice, b: slice) -> slice | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return slice(start, stop) if start < stop else None


def decay_matrices(shapes: Mapping[str, Shape], decay: float = 0.1) -> list[Group]:
    """Two groups: matrices, with weight decay, and vectors (norms and biases), without."""
    matrices = {name for name, shape in shapes.items() if len(shape) >= 2}
    return [Group(matrices, decay), Group(shapes.keys() - matrices)]


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that clips a gradient of this norm, as in ``torch.nn.utils.clip_grad_norm_``; 0: no clipping."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


class Optimizer:
    """Runs ``rule`` over ``weights.flat`` on a host.  ``state`` maps names to arrays of state.

    - ``groups``: the parameter groups; by default ``decay_matrices``.
    - ``parts``: the slices that this rank updates, and whose state it keeps (ZeRO-1); by default all.
    - ``normed``: the slices whose squares this rank adds to the gradient norm; by default ``parts``.
    - ``counted``: the tensors whose squares this rank adds to the gradient norm; by default all.
    - ``exact``: 0, or the number of elements of the whole model.  If it is given, the norm has the same bits for every
      split into ranks and blocks.
    - ``tp``: the ranks that hold the other shards of matrices.
    - ``arena``: memory that is idle between steps, which matrix updates may use.
    """

    def __init__(
        self, rule: UpdateRule, weights: Parameters, *, learning_rate: Callable[[int], float] = lambda step: 0.0,
        groups: Sequence[Group] | None = None, parts: Sequence[slice] | None = None,
        normed: Sequence[slice] | None = None, grad_clip: float = 0.0,
        skip_outliers: float = 0.0, counted: Collection[str] | None = None, exact: int = 0, tp: Axis = ALONE,
        arena: Arena | None = None,
    ) -> None:  # fmt: skip
        self.rule, self.weights, self.tp, self.arena = rule, weights, tp, arena or Arena()
        self.step_count = self.updates = 0
        """``step_count``: all steps so far, which set the learning rate.  ``updates``: those that were not skipped."""
        self.learning_rate, self.grad_clip, self.skip_outliers = learning_rate, grad_clip, skip_outliers
        self.counted, self.exact = weights.shapes.keys() if counted is None else counted, exact
        self.last_norm = self.last_lr = 0.0
        """The gradient norm before clipping, and the learning rate, of the last update."""
        self.groups = decay_matrices(weights.shapes) if groups is None else groups
        self.parts = weights.parts() if parts is None else packed(parts)
        held = state_of(rule, self.groups, weights.spans, [part for part, _ in self.parts])
        self.state = {
            name: OwnedSlices(weights, kept.slices, np.promote_types(DTYPES[kept.dtype].numpy, weights.flat.dtype))
            for name, kept in held.items()
        }
        """The state by name.  ``names_of_state`` has the tensors of each."""
        self.names_of_state = {name: kept.names for name, kept in held.items()}
        of_norm = self.parts if normed is None else packed(normed)
        rows, names, starts = split(weights, of_norm, BLOCK, self.groups)
        self._count = len(starts)
        self._blocks = [
            (int(index), str(name), slice(start, start + length))
            for (start, _, length, _, index, *_), name in zip(rows.tolist(), names, strict=True)
        ]
        own = next((packed(held[name].slices) for name in rule.state), self.parts)
        self._updates = [
            (slice(start, start + length), slice(local, local + length), group)
            for start, local, length, group, *_ in split(weights, own, BLOCK, self.groups)[0].tolist()
        ]
        self._scratch = np.empty(BLOCK, weights.flat.dtype)

    def continue_after(self, step: int, updates: int) -> None:
        """Continue after ``step`` steps, of which ``updates`` were not skipped."""
        self.step_count, self.updates = step, updates

    def norm(
        self, gradients: Parameters, sum_shards: Callable[[np.ndarray], object] | None = None, others: Axis = ALONE,
        find_largest: Callable[[np.ndarray], object] | None = None,
    ) -> None:  # fmt: skip
        """Compute the gradient norm of the whole model, and store it for ``update``.

        ``sum_shards`` adds up, in place, the squares of the ranks that hold one shard each.  ``others`` are the ranks
        that hold the rest of the model.  ``find_largest`` takes the maximum over all ranks, in place; it is needed if
        the norm is ``exact``.
        """
        if self.exact:
            largest = np.array([self.largest(gradients, self.counted)])
            if find_largest is not None:
                find_largest(largest)
            if not 0 < largest[0] < math.inf:
                self._root = float(largest[0])
                return
            sums = self.exact_squares(gradients, self.counted, float(largest[0]), self.exact)
        else:
            sums = self.squares(gradients, self.counted)
        if sum_shards is not None:
            sum_shards(sums)
        if others.size > 1 and self.exact:
            others.comm.all_reduce(sums)
        elif others.size > 1:
            sums = others.comm.all_gather(np.array(math.fsum(sums)))
        self._root = math.sqrt(math.fsum(sums))

    def update(self, gradients: Parameters, micro_batches: float = 1, count: np.ndarray | None = None) -> None:
        """Update the weights with the clipped mean gradient over ``micro_batches``.

        The update is skipped if the norm is not finite or an outlier.  It is also skipped if ``count`` (1,), the
        number of targets per micro-batch (``Dataset.micro_batches``), is infinite: then the batch has no targets.
        """
        self.last_norm, self.last_lr = norm, lr = self._root / micro_batches, self.learning_rate(self.step_count)
        masked = count is not None and math.isinf(count[0])
        if masked or not math.isfinite(norm) or (self.skip_outliers and norm > self.skip_outliers):
            self.step_count += 1
        else:
            self.step(gradients, lr, clip_coefficient(norm, self.grad_clip) / micro_batches)

    def agree(self, gradients: Parameters, report: np.ndarray, reports: np.ndarray) -> None:
        """Raise CollectiveMismatch unless all ranks report the same epoch and step (``kos.train.train.REPORT``)."""
        if not (reports[:, 1:3] == report[1:3]).all():
            got = "; ".join(f"{step:.0f} of epoch {epoch:.0f}" for epoch, step in reports[:, 1:3])
            expected = f"step {report[2]:.0f} of epoch {report[1]:.0f} on every rank"
            raise CollectiveMismatch(f"the update: expected {expected}, got {got}")

    def squares(self, gradients: Parameters, counted: Container[str]) -> np.ndarray:
        """The sum of squares of each block of the layout, added in fp32 within a block.

        It is 0 for the blocks of other ranks and of tensors that are not ``counted``.
        """
        sums = np.zeros(self._count)
        for index, name, span in self._blocks:
            if name in counted:
                block = gradients.flat[span]
                sums[index] = np.dot(block, block)
        return sums

    def largest(self, gradients: Parameters, counted: Container[str]) -> float:
        """The largest magnitude of the ``counted`` gradients on this rank; inf if one is not finite."""
        tops = [float(np.abs(gradients.flat[span]).max()) for _, name, span in self._blocks if name in counted]
        return max((top if math.isfinite(top) else math.inf for top in tops), default=0.0)

    def exact_squares(self, gradients: Parameters, counted: Container[str], largest: float, count: int) -> np.ndarray:
        """The sum of squares as two float64, which can be added over ranks and blocks without rounding errors.

        Each square is rounded to a multiple of a unit, and its remainder to a multiple of a smaller unit.  The two
        parts are summed separately.  No number is larger than ``largest``, so each sum of ``count`` parts fits in 53
        bits, and the order of the additions does not matter (Demmel & Nguyen 2013, "Fast reproducible floating-point
        summation").
        """
        bits = count.bit_length()
        unit = 2.0 ** (2 * math.frexp(largest)[1] + bits - 52)
        units, sums = (unit, unit * 2.0 ** (bits - 53)), np.zeros(2)
        for _, name, span in self._blocks:
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
        """One update with ``scale * gradients``.  The gradients remain scaled afterwards.

        ``scale`` combines the mean over micro-batches and the clipping, so that both take no pass of their own.
        """
        self.step_count += 1
        self.updates += 1
        rates = [lr * group.lr_scale for group in self.groups]
        updates = [
            self.rule.step(self.updates, rate, group.decay) for rate, group in zip(rates, self.groups, strict=True)
        ]
        state = [self.state[name].flat for name in self.rule.state]
        for span, local, group in self._updates:
            w, g = self.weights.flat[span], gradients.flat[span]
            if scale != 1.0:
                g *= scale
            updates[group](w, g, [flat[local] for flat in state], self._scratch[: w.size])
        for rate, group in zip(rates, self.groups, strict=True):
            if group.rule:
                group.rule.step_matrices(self, gradients, rate, group.decay, scale)


def split(
    layout: Parameters | OwnedSlices, parts: Sequence[tuple[slice, slice]], size: int, groups: Sequence[Group],
    places: Mapping[str, int] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Split ``parts`` of a layout into chunks of at most ``size`` elements, each within one tensor.

    Returns the chunks (``CHUNKS``), the name of each chunk's tensor, and the starts of all chunks of the layout.
    Chunks and parts begin at a multiple of ``size`` or where a tensor begins.  So all ranks number the same chunks in
    the same way.  The fields of a chunk are:

    - ``start``: its position in the layout; ``length``: its elements; ``index``: its number in the layout,
    - ``local``: its position in what this rank holds,
    - ``place``: its position in the layout of the whole model, where tensors begin at ``places``,
    - ``group``: the number of its group,
    - ``kept``: the position of its state.  It equals ``local``; callers change it if the state is elsewhere.
    """
    spans = layout.spans
    group_of = {name: number for number, group in enumerate(groups) for name in group.names}
    if len(group_of) != sum(len(group.names) for group in groups) or group_of.keys() != spans.keys():
        got = [sorted(group.names) for group in groups]
        raise InvalidArgument(f"parameter groups: expected each of {[*spans]} in one group, got {got}")
    first_of, stops = (np.array([getattr(each, at) for each in spans.values()], np.int64) for at in ("start", "stop"))
    end = max(stops, default=0)
    starts = np.union1d(np.arange(0, end, size), first_of)
    tensors = np.searchsorted(first_of, starts, side="right") - 1
    real = starts < stops[tensors]  # not in the gap between two regions of the layout
    starts, tensors = starts[real], tensors[real]
    rows = np.zeros(len(starts), CHUNKS)
    rows["start"], rows["index"] = starts, np.arange(len(starts))
    rows["length"] = np.minimum(np.diff(starts, append=end), stops[tensors] - starts)
    rows["group"] = np.array([group_of[name] for name in spans], np.int64)[tensors]
    whole = first_of if places is None else np.array([places[name] for name in spans], np.int64)
    rows["place"] = starts + (whole - first_of)[tensors]
    mine = np.zeros(len(starts), bool)
    for part, local in parts:
        inside = slice(*np.searchsorted(starts, (part.start, part.stop)))
        rows["local"][inside], mine[inside] = starts[inside] - part.start + local.start, True
    rows["kept"] = rows["local"]
    return rows[mine], np.array([*spans])[tensors[mine]], starts


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
