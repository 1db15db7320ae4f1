"""Optimizers over flat fp32 arrays: parameter groups, state by name, the norm of gradients, the learning rate.

An ``UpdateRule``, such as ``AdamW``, names what it keeps of each weight. Checkpoints, memory plans, ZeRO-1 and resuming
take names and dtypes from it. ``Optimizer`` runs it on a host, ``kos.train.optim.cuda.CudaOptimizer`` on a GPU. All
passes over a block are made while the block lies in the cache: a step reads and writes each array of the state once.
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
from kos.train.parallel.mesh import ALONE, DENSE, Axis

BLOCK = 16_384  # elements: weights, gradients, two moments and one temporary are 320 KiB, within an L2
CHUNKS = np.dtype([
    ("start", "i8"), ("local", "i8"), ("length", "i4"), ("group", "i4"), ("index", "i8"), ("place", "i8"),
    ("kept", "i8"),
])  # fmt: skip

Update = Callable[[np.ndarray, np.ndarray, Sequence[np.ndarray], np.ndarray], None]
"""``update(weights, gradient, state, scratch)`` changes a block's weights and state; ``scratch`` is of its size."""


class UpdateRule:
    """How an optimizer changes a weight, and what it keeps of it.

    On GPUs it is the kernel ``kernel`` of ``ops/cuda/kernels/KERNEL.cu``, which takes what ``CudaOps.update`` passes:
    the state in the order of ``state``, and ``operands`` before the seed.
    """

    state: ClassVar[Mapping[str, str]]
    """The names of the arrays that it keeps, in the layout of the weights, and their dtypes."""

    about: ClassVar[str]
    """The state in words, for memory plans."""

    options: ClassVar[tuple[str, ...]]
    """The settings of a run that it takes, and that are refused with optimizers that have no such rule."""

    kernel: ClassVar[str]
    operands: Sequence[Any] = ()

    betas: tuple[float, float] = (0.0, 0.0)
    """Decays of the moments whose bias a step on a GPU corrects; 0: none."""

    def step(self, number: int, lr: float, decay: float) -> Update:
        """The update of step ``number``, counted from 1, on a host, with a learning rate and a weight decay."""
        raise NotImplementedError

    def state_bytes(self) -> int:
        """Bytes that are kept of each weight."""
        return sum(DTYPES[dtype].itemsize for dtype in self.state.values())


class MatrixRule(UpdateRule):
    """An update of whole matrices, which no ``parts`` cut (``kos.train.optim.muon``).  All take its state by name.

    On GPUs its kernels are in ``ops/cuda/kernels/KERNEL.cu``.
    """

    def step_matrices(self, optimizer: Optimizer, gradients: Parameters, lr: float, decay: float, scale: float) -> None:
        """The update on a host, of what is held of the state."""
        raise NotImplementedError

    def queue_matrices(self, optimizer: Any, gradients: Parameters, lr_scale: float, decay: float) -> None:
        """The update on the GPU of a ``CudaOptimizer``."""
        raise NotImplementedError

    def batches(self, held: OwnedSlices, most: int) -> Iterator[Sequence[Any]]:
        """The matrices of ``held``, a part of the state, that are updated at once: ``most`` elements, or one."""
        raise NotImplementedError

    def scratch_bytes(self, held: OwnedSlices, itemsize: int, most: int) -> int:
        """What an update takes from the optimizer's arena at most."""
        raise NotImplementedError


class Group(NamedTuple):
    """Tensors that are updated alike: their weight decay, and what multiplies the learning rate.

    ``rule`` is that of matrices; None: the optimizer's own, the only one for single weights.  ``axes``: the ranks along
    them hold the same weights, and their gradients are summed over these.  ``frozen`` tensors have no optimizer: no
    gradient, no state, and they stay as they are.
    """

    names: Collection[str]
    decay: float = 0.0
    lr_scale: float = 1.0
    rule: MatrixRule | None = None
    axes: tuple[str, ...] = DENSE
    frozen: bool = False


def by_axes(groups: Sequence[Group]) -> dict[tuple[str, ...], set[str]]:
    """The tensors of ``groups`` by the axes over which their gradients are summed, dense ones first; (): frozen."""
    found = dict[tuple[str, ...], set[str]]()
    for group in sorted(groups, key=lambda group: group.axes != DENSE):
        found.setdefault(() if group.frozen else group.axes, set()).update(group.names)
    return found


class Kept(NamedTuple):
    """What an optimizer keeps under one name: its dtype, of which tensors, and the parts of the layout held here."""

    dtype: str
    names: set[str]
    slices: list[slice]
    rule: UpdateRule


def state_of(
    rule: UpdateRule, groups: Sequence[Group], spans: Mapping[str, slice], parts: Sequence[slice]
) -> dict[str, Kept]:
    """All that ``rule`` and those of groups keep of ``parts`` of a layout."""
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
    """Matrices are decayed, vectors (norms, biases) are not."""
    matrices = {name for name, shape in shapes.items() if len(shape) >= 2}
    return [Group(matrices, decay), Group(shapes.keys() - matrices)]


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor for gradients of this norm, as in ``torch.nn.utils.clip_grad_norm_``; 0 turns clipping off."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


class Optimizer:
    """``rule`` over ``weights.flat``, on a host.  ``state`` has by name what the rules keep.

    With ``parts`` only those are updated, and have state (ZeRO-1).  ``normed``: those that count in this rank's part of
    the norm, by default all.  ``groups``: default ``decay_matrices``.
    ``counted`` names the tensors that count in this rank's part of the norm; None: all.  ``exact`` > 0, the elements of
    the whole model: the norm has the same bits for every split into ranks and blocks.
    ``tp`` has the shards of matrices; ``arena``, idle between steps, takes some of them.
    """

    def __init__(
        self, rule: UpdateRule, weights: Parameters, *, learning_rate: Callable[[int], float] = lambda step: 0.0,
        groups: Sequence[Group] | None = None, parts: Sequence[slice] | None = None,
        normed: Sequence[slice] | None = None, grad_clip: float = 0.0,
        skip_outliers: float = 0.0, counted: Collection[str] | None = None, exact: int = 0, tp: Axis = ALONE,
        arena: Arena | None = None,
    ) -> None:  # fmt: skip
        self.rule, self.weights, self.step_count, self.tp, self.arena = rule, weights, 0, tp, arena or Arena()
        self.learning_rate, self.grad_clip, self.skip_outliers = learning_rate, grad_clip, skip_outliers
        self.counted, self.exact = weights.shapes.keys() if counted is None else counted, exact
        self.last_norm = self.last_lr = 0.0
        """Of the last update: the norm of the gradient before clipping, and the learning rate."""
        self.groups = decay_matrices(weights.shapes) if groups is None else groups
        self.parts = weights.parts() if parts is None else packed(parts)
        held = state_of(rule, self.groups, weights.spans, [part for part, _ in self.parts])
        self.state = {
            name: OwnedSlices(weights, kept.slices, np.promote_types(DTYPES[kept.dtype].numpy, weights.flat.dtype))
            for name, kept in held.items()
        }
        """What the rules keep, by name; ``names_of_state``: of which tensors."""
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

    def norm(
        self, gradients: Parameters, sum_shards: Callable[[np.ndarray], object] | None = None, others: Axis = ALONE,
        find_largest: Callable[[np.ndarray], object] | None = None,
    ) -> None:  # fmt: skip
        """The norm of the gradient of the whole model, for ``update``.

        ``sum_shards`` adds the sums of squares over ranks with a shard each. ``others`` hold the rest of the model.
        ``find_largest`` takes the maximum over all ranks; it is needed if the norm is ``exact``.
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
        """One update with the mean over ``micro_batches``, clipped; none if the norm is not finite, or an outlier.

        Nor is there one if ``count`` (1,), the targets in a micro-batch (``Dataset.micro_batches``), is infinite.
        """
        self.last_norm, self.last_lr = norm, lr = self._root / micro_batches, self.learning_rate(self.step_count)
        masked = count is not None and math.isinf(count[0])
        if masked or not math.isfinite(norm) or (self.skip_outliers and norm > self.skip_outliers):
            self.step_count += 1
        else:
            self.step(gradients, lr, clip_coefficient(norm, self.grad_clip) / micro_batches)

    def agree(self, gradients: Parameters, report: np.ndarray, reports: np.ndarray) -> None:
        """CollectiveMismatch unless all ranks report the same epoch and step (``kos.train.train.REPORT``)."""
        if not (reports[:, 1:3] == report[1:3]).all():
            got = "; ".join(f"{step:.0f} of epoch {epoch:.0f}" for epoch, step in reports[:, 1:3])
            expected = f"step {report[2]:.0f} of epoch {report[1]:.0f} on every rank"
            raise CollectiveMismatch(f"the update: expected {expected}, got {got}")

    def squares(self, gradients: Parameters, counted: Container[str]) -> np.ndarray:
        """The sum of squares of each block of the layout, fp32 within it; 0 for those of others and not ``counted``."""
        sums = np.zeros(self._count)
        for index, name, span in self._blocks:
            if name in counted:
                block = gradients.flat[span]
                sums[index] = np.dot(block, block)
        return sums

    def largest(self, gradients: Parameters, counted: Container[str]) -> float:
        """The largest magnitude of ``counted`` gradients here; inf if one is not finite."""
        tops = [float(np.abs(gradients.flat[span]).max()) for _, name, span in self._blocks if name in counted]
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
        """One update with ``scale * gradients``; the gradients are left scaled.

        ``scale`` carries the average over micro-batches and the clipping in the one pass.
        """
        self.step_count += 1
        rates = [lr * group.lr_scale for group in self.groups]
        updates = [
            self.rule.step(self.step_count, rate, group.decay) for rate, group in zip(rates, self.groups, strict=True)
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
    """Chunks of ``parts`` of at most ``size`` elements, each of one tensor; the tensor's name of each; all starts.

    A chunk begins at a multiple of ``size`` or where a tensor begins, and so do the parts.  So ``index`` counts the
    same chunks on all ranks.  ``start`` is a chunk's position in the layout, ``local`` in what this rank holds, and
    ``place`` in the layout of the whole model, where tensors begin at ``places``.  ``group`` numbers its group.  Where
    its state lies, ``kept``, is for the caller to change if that is not ``local``.
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
    real = starts < stops[tensors]  # not between two regions of the layout
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
