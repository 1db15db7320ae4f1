"""Low-rank adapters of linear layers: out += scale x A^T B^T, with A (rank, in) and B (out, rank).

LoRA: Hu et al. 2021, arXiv:2106.09685. The names of tensors and the meaning of settings are those of the library peft.
The matrix itself is frozen, so its backward has no matmul for the weight's gradient. The matmuls for the gradients of A
and B are small. The backward computes them at once, even if a pipeline's schedule defers gradients of weights.

With tensor parallelism, an adapter is split as its matrix is. The B of a column-parallel matrix is split by rows, and
the A of a row-parallel matrix by columns. Every rank holds the other factor whole, and computes a partial sum of its
gradient. No collective is added. The adapter gives a rank a partial sum in the forward of a row-parallel matrix, and in
the backward of a column-parallel one. It is added to the partial sum of the matrix, which the ranks sum anyway.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from kos.memory.arena import Arena
from kos.memory.sharded import Sharded
from kos.train.layers import PassContext
from kos.train.ops import Array

A, B = "lora_A.weight", "lora_B.weight"


class Lora(NamedTuple):
    """The settings of a model's adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The last parts of matrices' names, such as ``q_proj``; or one regular expression, which matches a whole name
    without ``.weight``."""

    rslora: bool = False
    """Whether ``alpha`` is divided by the square root of the rank (Kalajdzievski 2023, arXiv:2312.03732)."""

    layers: tuple[int, ...] = ()
    """The numbers of the layers that have adapters; () for all."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def pattern(self) -> str | None:
        """The regular expression, if the targets are one."""
        return next(filter(is_pattern, self.targets), None)

    def adapts(self, name: str) -> bool:
        """Whether a matrix of a layer has an adapter."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, name.removesuffix(".weight")) is not None
        number = next(int(part) for part in name.split(".") if part.isdigit())
        return module_of(name) in self.targets and (not self.layers or number in self.layers)


def is_pattern(target: str) -> bool:
    """Whether a target is a regular expression, and not the last part of a name."""
    return re.fullmatch(r"[\w.]+", target) is None


def is_adapter(name: str) -> bool:
    """Whether a tensor is the A or B of an adapter."""
    return name.endswith((A, B))


def module_of(name: str) -> str:
    """The module of a tensor: ``model.layers.0.self_attn.q_proj.weight`` -> ``q_proj``."""
    return name.split(".")[-2]


class Adapters:
    """The adapters of those members of ``linear`` (``kos.train.layers.linear``) that ``lora`` names.

    ``lora_hidden`` has one array (N, rank) for each adapted member: x A^T times ``Lora.scale``.  ``d_lora_hidden`` has
    the gradients of x A^T.
    """

    def __init__(self, linear: Any, lora: Lora) -> None:
        self.linear, self.lora = linear, lora
        at = [(number, name) for number, name in enumerate(linear.members) if lora.adapts(name)]
        self.members = {number: name.removesuffix("weight") for number, name in at}
        """By the number of an adapted member, the prefix of the names of its adapter's tensors."""

    def __bool__(self) -> bool:
        return bool(self.members)

    def placements(self, shard: int, shards: int) -> dict[str, Sharded]:
        """The placement of each tensor, in the order in which the backward completes the gradients."""
        linear, rank, of_a, of_b = self.linear, self.lora.rank, dict[str, Sharded](), dict[str, Sharded]()
        for name in self.members.values():
            shapes = (linear.members[f"{name}weight"], rank), (rank, linear.columns)
            found = [Sharded(shape) for shape in shapes]
            most = linear.most.get(f"{name}weight")
            found[linear.dim] = found[linear.dim].split("tp", linear.dim, shard, shards, most)
            of_b[name + B], of_a[name + A] = found[0]._replace(initial=0.0), found[1]
        return of_b | of_a

    def splits(self, shards: int) -> dict[str, tuple[int, list[slice]]]:
        """As ``Linear.splits``: for each tensor that is split over ranks, the dimension and this rank's slice of it."""
        dim, parts = self.linear.dim, self.linear.split(shards)
        return {
            name + (A if dim else B): (dim, [slice(0, part.stop - part.start)])
            for number, name in self.members.items() for part in [parts[number]]
        }  # fmt: skip

    def empty(self, ctx: PassContext, tokens: int, dtype: Any, arena: Arena) -> list[Array]:
        """Allocate memory for ``lora_hidden`` or for ``d_lora_hidden``."""
        return [arena.take((tokens, self.lora.rank), dtype) for _ in self.members]

    # --- forward -----------------------------------------------------------------------------------------

    def forward(self, ctx: PassContext, x: Array, lora_hidden: Sequence[Array], rows: slice) -> None:
        """Compute lora_hidden[rows] = scale x A^T; ``x`` has only these rows."""
        ops = ctx.ops.of_adapters
        for name, low in zip(self.members.values(), lora_hidden, strict=True):
            ops.low_rank(x, ops.matrix(ctx.weights, name + A), low[rows], True, self.lora.scale, False, ctx.arena)

    def add(self, ctx: PassContext, lora_hidden: Sequence[Array], out: Array, rows: slice) -> None:
        """Add lora_hidden[rows] B^T to ``out``, which has only these rows."""
        ops = ctx.ops.of_adapters
        for name, low, columns in zip(self.members.values(), lora_hidden, self._columns(ctx, out), strict=True):
            ops.low_rank(low[rows], ops.matrix(ctx.weights, name + B), columns, True, 1.0, True, ctx.arena)

    def _columns(self, ctx: PassContext, x: Array) -> list[Array]:
        """The columns of each adapted member in ``x``, which has the columns of all members."""
        parts = self.linear.split(ctx.tp.size) if len(self.linear.members) > 1 else []
        return [ctx.ops.columns_of(x, parts[number]) if parts else x for number in self.members]

    # --- backward ----------------------------------------------------------------------------------------

    def backward(
        self, ctx: PassContext, d_out: Array, lora_hidden: Sequence[Array], d_lora_hidden: Sequence[Array]
    ) -> None:
        """Compute d_lora_hidden = scale d_out B, and the gradient of B."""
        ops, (of, accumulate, final) = ctx.ops.of_adapters, ctx.into
        each = zip(self.members.values(), lora_hidden, d_lora_hidden, self._columns(ctx, d_out), strict=True)
        for name, low, d_low, d in each:
            ops.low_rank(d, ops.matrix(ctx.weights, name + B), d_low, False, self.lora.scale, False, ctx.arena)
            if name + B in of:  # low includes the factor ``scale`` of this gradient
                ops.linear_weight_gradient(d, low, ops.matrix(of, name + B), accumulate, ctx.arena)
                final(name + B)

    def input_gradient(self, ctx: PassContext, d_lora_hidden: Sequence[Array], dx: Array, rows: slice) -> None:
        """Add d_lora_hidden[rows] A to ``dx``, which has only these rows."""
        ops = ctx.ops.of_adapters
        for name, d_low in zip(self.members.values(), d_lora_hidden, strict=True):
            ops.low_rank(d_low[rows], ops.matrix(ctx.weights, name + A), dx, False, 1.0, True, ctx.arena)

    def gradient_of_a(self, ctx: PassContext, d_lora_hidden: Sequence[Array], x: Array) -> None:
        """Compute the gradient of A from ``x``, the input of the layer."""
        ops, (of, accumulate, final) = ctx.ops.of_adapters, ctx.into
        for name, d_low in zip(self.members.values(), d_lora_hidden, strict=True):
            if name + A in of:
                ops.linear_weight_gradient(d_low, x, ops.matrix(of, name + A), accumulate, ctx.arena)
                final(name + A)
