"""Optimizers over flat arrays: parameter groups, named state, the gradient norm, and the update.

An ``UpdateRule``, such as ``AdamW``, declares the names and dtypes of its state. Checkpoints, memory plans, ZeRO-1 and
resuming use this declaration. ``Optimizer`` is one program, whose kernels each dialect has
(``kos.train.ops.numpy_optimizer``, ``ops/cuda/kernels/optimizer.cu``). The counters of steps and updates, and the
learning rate, lie where the kernels compute, so the program can be captured into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kos.dtypes import DTYPES
from kos.errors import InvalidArgument
from kos.memory.arena import Arena
from kos.train.ops import Array
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.numpy_optimizer import CHUNKS, SCALARS, SHAPES, LearningRate
from kos.train.ops.parameters import OwnedSlices, Parameters, Shape, overlap, packed
from kos.train.parallel.mesh import ALONE, Axis

CHUNK = 16_384
"""Elements of a thread block; on a host, weights, gradients, two moments and one temporary are 320 KiB, within an L2.
A chunk begins at a multiple of it, or where a tensor begins."""

Update = Callable[[np.ndarray, np.ndarray, Sequence[np.ndarray], np.ndarray], None]
"""``update(weights, gradient, state, scratch)`` updates a block in place.  ``scratch`` is as long as the block."""


class UpdateRule:
    """How an optimizer updates weights, and which state it keeps for them.

    A new rule is a file beside ``adamw.py``, a kernel, and an entry in ``OPTIMIZERS`` (``config/__init__.py``). The
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
        """The function that updates a chunk on a host in update ``number``, counted from 1; skipped steps do not count.
        """
        raise NotImplementedError

    def state_bytes(self) -> int:
        """Bytes of state per weight."""
        return sum(DTYPES[dtype].itemsize for dtype in self.state.values())


class MatrixRule(UpdateRule):
    """A rule that updates whole matrices (``kos.train.optim.muon``), so no ``parts`` may split a matrix.

    On GPUs, its kernels are in ``ops/cuda/kernels/KERNEL.cu``.
    """

    def update_matrices(self, optimizer: Optimizer, gradients: Parameters, lr_scale: float, decay: float) -> None:
        """Update the matrices whose state this rank holds."""
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


def decay_matrices(shapes: Mapping[str, Shape], decay: float = 0.1) -> list[Group]:
    """Two groups: matrices, with weight decay, and vectors (norms and biases), without."""
    matrices = {name for name, shape in shapes.items() if len(shape) >= 2}
    return [Group(matrices, decay), Group(shapes.keys() - matrices)]


CONSTANT = LearningRate("constant", 0.0, 0.0, 1, 0)


class Optimizer:
    """``rule`` over ``weights``; ``copy``, in the layout of the gradients, receives them rounded to its dtype.

    Weights of bfloat16 are rounded stochastically (Gupta et al. 2015, arXiv:1502.02551).  The random bits depend only
    on ``seed``, step and position in the layout, so they are the same in any OwnedSlices.

    - ``weights``: all, or the OwnedSlices of this rank (ZeRO-1), whose parts begin and end at multiples of CHUNK or
      where tensors do.  Gradients and copy are whole.
    - ``groups``: the parameter groups; by default ``decay_matrices``.
    - ``parts``: the slices that this rank updates, and whose state it keeps; by default those of ``weights``.
    - ``normed``: the slices whose squares this rank adds to the gradient norm; by default ``parts``.
    - ``normed_tensors``: the tensors whose squares this rank adds to the gradient norm; by default all.
    - ``places``: where each tensor begins in the layout of the whole model, if ``weights`` are a stage of it.
    - ``exact``: 0, or the number of elements of the whole model.  If it is given, the norm has the same bits for every
      split into ranks and chunks.
    - ``skip_outliers``: if not 0, steps are skipped whose norm exceeds it or is not finite.  Otherwise, a norm that is
      not finite stops all updates.
    - ``tp``: the ranks that hold the other shards of matrices.
    - ``arena``: memory that is idle between steps, which matrix updates may use.

    ``state`` maps names to arrays of state, ``names_of_state`` to their tensors.  ``scalars`` (11,) float64 holds what
    ``SCALARS`` names.
    """

    def __init__(
        self, rule: UpdateRule, weights: Parameters | OwnedSlices, learning_rate: LearningRate = CONSTANT, *,
        ops: Any = numpy_ops, copy: Parameters | None = None, groups: Sequence[Group] | None = None,
        parts: Sequence[slice] | None = None, normed: Sequence[slice] | None = None, grad_clip: float = 0.0,
        skip_outliers: float = 0.0, seed: int = 0, normed_tensors: Collection[str] | None = None,
        places: Mapping[str, int] | None = None, exact: int = 0, tp: Axis = ALONE, arena: Arena | None = None,
    ) -> None:  # fmt: skip
        if copy is not None and (copy.spans != weights.spans or copy.flat.dtype.itemsize > weights.flat.dtype.itemsize):
            raise InvalidArgument("Optimizer: expected a copy in the layout of the weights, and no wider")
        self.rule, self.ops, self.weights, self.copy = rule, ops, weights, copy
        self.tp, self.arena = tp, arena or ops.make_arena()
        self.learning_rate, self.grad_clip, self.skip_outliers = learning_rate, grad_clip, skip_outliers
        self.seed, self.exact = seed, exact
        self.scalars = ops.zeros(len(SCALARS), np.float64)
        self.groups = groups = decay_matrices(weights.shapes) if groups is None else groups
        self.places = places or {name: span.start for name, span in weights.spans.items()}
        layout = weights if isinstance(weights, Parameters) else weights.layout
        mine = weights.parts() if parts is None else packed(parts)
        held = state_of(rule, groups, weights.spans, [part for part, _ in mine])
        self.names_of_state = {name: kept.names for name, kept in held.items()}
        self.state = {name: OwnedSlices(layout, kept.slices, self._dtype(kept.dtype)) for name, kept in held.items()}
        of_all, names, self._starts = split(weights, weights.parts(), CHUNK, groups, places)
        own = next((packed(held[name].slices) for name in rule.state), mine)
        chunks, _, _ = split(weights, own, CHUNK, groups, places)
        chunks["local"] = of_all["local"][np.searchsorted(of_all["index"], chunks["index"])]
        in_norm, _, _ = split(weights, mine if normed is None else packed(normed), CHUNK, groups, places)
        of_norm = np.isin(of_all["index"], in_norm["index"])
        self._sparse = normed_tensors is not None and not {*normed_tensors} >= weights.spans.keys()
        if self._sparse:
            of_norm &= np.isin(names, [*(normed_tensors or ())])
        self._chunk_count, self._norm_count = len(chunks), int(of_norm.sum())
        numbers = np.array([(group.decay, group.lr_scale) for group in groups])
        self._chunks, self._norm_chunks, self._groups = map(self._table, (chunks, of_all[of_norm], numbers))
        self._partial = ops.zeros((2 if exact else 1, max(1, len(self._starts))), np.float64)
        self._largest = ops.zeros(1, np.int64 if weights.flat.dtype == np.float64 else np.int32)  # bits of a float

    def _dtype(self, dtype: str) -> Any:
        """The dtype of an array of state; on a host it is not narrower than the weights."""
        flat = self.weights.flat
        return np.promote_types(DTYPES[dtype].numpy, flat.dtype) if isinstance(flat, np.ndarray) else dtype

    def _table(self, rows: np.ndarray) -> Array:
        """A copy of ``rows``, as bytes, where the kernels read it."""
        table = self.ops.zeros(rows.nbytes, np.uint8)
        if rows.nbytes:
            self.ops.copy(rows.reshape(-1).view(np.uint8), table)
        return table

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
        self.ops.copy(scalars, self.scalars)

    def norm(
        self, gradients: Parameters, sum_shards: Callable[[Array], object] | None = None, others: Axis = ALONE,
        find_largest: Callable[[Array], object] | None = None,
    ) -> None:  # fmt: skip
        """Compute the sum of squares of the gradients of the whole model, in ``scalars``, for ``update``.

        ``sum_shards(partial)`` adds the sums of squares over ranks with a shard each; they are 0 for others' chunks.
        ``others`` hold the rest of the model.  ``find_largest(bits)`` (1,) takes the maximum over all ranks; it is
        needed if the norm is ``exact``.
        """
        flat = gradients.flat
        if sum_shards is not None or self._sparse:
            self.ops.zero(self._partial)
        chunks, (rows, stride) = (flat, self._norm_chunks), self._partial.shape
        if self.exact:
            self.ops.zero(self._largest)
            if self._norm_count:
                self._launch("largest", flat, self._norm_count, 256, *chunks, self._largest)
            if find_largest is not None:
                find_largest(self._largest)
        more = (stride, self._largest, self.exact.bit_length()) if self.exact else ()
        if self._norm_count:
            name = "reproducible_squares" if self.exact else "squares"
            self._launch(name, flat, self._norm_count, 256, *chunks, self._partial, *more)
        if sum_shards is not None:
            sum_shards(self._partial)
        self._launch("finish_norm", flat, rows, 1024, self._partial, stride, self.scalars)
        if others.size > 1:
            sums = self.scalars[SCALARS.index("sum_of_squares") :][:rows]
            # In rank order: copies of the same weights are in different groups of ``others``, and need equal norms.
            others.comm.all_reduce(sums, deterministic=others.size > 2)

    def invalidate_if_aborted(self, gradients: Parameters, addresses: Array, report: Array) -> None:
        """Give ``report`` an epoch that no rank has if a collective of this rank was aborted (``addresses``: (n,)
        uint64, ``Communicator.abort_flags``).  Its sums are then undefined, and no rank applies the step.
        """
        self._launch("invalidate_if_aborted", gradients.flat, 1, 1, addresses, addresses.size, report)

    def check_in_step(self, gradients: Parameters, report: Array, reports: Array) -> None:
        """Updates change nothing any more unless all ranks report the same epoch and step (``STATUS_FIELDS``).
        On a host, this raises CollectiveMismatch.

        The reports of a step whose collectives were ended are those of an earlier step, or zeros.
        """
        self._launch("check_in_step", gradients.flat, 1, 32, report, reports, *reports.shape, self.scalars)

    def update(self, gradients: Parameters, micro_batches: float = 1, count: Array | None = None) -> None:
        """One update with the mean gradient over ``micro_batches``, clipped by its norm.

        There is none if ``count`` (1,), the targets in a micro-batch (``Dataset.micro_batches``), is infinite.
        """
        flat, copy = gradients.flat, self.weights.flat if self.copy is None else self.copy.flat
        rate, (beta1, beta2) = self.learning_rate, self.rule.bias_correction
        self._launch(
            "prepare", flat, 1, 1, self.scalars, SHAPES[rate.kind], float(rate.lr), float(rate.min_lr),
            rate.steps, rate.warmup_steps, rate.decay_steps, float(beta1), float(beta2),
            float(micro_batches), float(self.grad_clip), float(self.skip_outliers), 0 if count is None else count,
        )  # fmt: skip
        if self._chunk_count:
            state = [self.state[name].flat for name in self.rule.state]
            self.ops.update(
                self.rule, self.weights.flat, flat, state, copy, self._chunk_count, self._chunks, self._groups,
                self.scalars, self.seed, **self.macros(flat),
            )  # fmt: skip
        for group in self.groups:
            if group.rule:
                group.rule.update_matrices(self, gradients, group.lr_scale, group.decay)

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
        bad = np.flatnonzero(~np.isfinite(self.ops.to_host(self._partial)[0]))
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
