"""A product with a matrix of weights. Tensor parallelism lives here (``kos.train.parallel.tensor``).

Suffixes name dimensions: N = B T tokens, n those of them in this rank's residual stream (all, but for tensor
parallelism), D the hidden size, F this rank's features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

from kos.memory.sharded import Sharded
from kos.train.layers import PassContext
from kos.train.layers.lora import Adapters, Lora
from kos.train.ops import Array
from kos.train.ops.linear import bias_of
from kos.train.parallel.tensor import Half


class Linear:
    """out = x weight^T, and + bias if ``biased``. ``name`` is the matrix in ``weights``.

    ``members``: the matrices that are stacked in it, by name, and the rows of each; by default it is one, of ``rows``.
    Their biases are stacked alike. ``most``: into how many parts a member can be split, if that has a limit; of more
    ranks several hold a copy of each part.
    """

    dim: ClassVar[int]
    """Along which ranks of tp split the matrix (out, in)."""

    def __init__(
        self, name: str, columns: int, rows: int = 0, members: Mapping[str, int] | None = None, biased: bool = False,
        most: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.columns, self.members, self.most = name, columns, dict(members or {name: rows}), most or {}
        self.bias = bias_of(name) if biased else None
        self.adapters: Adapters | None = None

    @property
    def rows(self) -> int:
        return sum(self.members.values())

    def adapt(self, lora: Lora) -> None:
        """Add the adapters that ``lora`` names."""
        self.adapters = Adapters(self, lora) or None

    def split(self, shards: int) -> list[slice]:
        """What a rank of ``shards`` has along ``dim``: the slice of each member."""
        return [slice(0, self.columns // shards)]

    def placements(self, shard: int, shards: int) -> dict[str, Sharded]:
        """Of each tensor, in the order in which the backward finishes their gradients."""
        found = {
            name: Sharded((rows, self.columns)).split("tp", self.dim, shard, shards, self.most.get(name))
            for name, rows in self.members.items()
        }
        for name, rows in self.members.items() if self.bias else ():
            bias = Sharded((rows,), initial=0.0)
            found[bias_of(name)] = bias if self.dim else bias.split("tp", 0, shard, shards, self.most.get(name))
        return (self.adapters.placements(shard, shards) if self.adapters else {}) | found

    def groups(self) -> dict[str, tuple[str, ...]]:
        """The names of the members of the matrix and of the bias."""
        found = {self.name: tuple(self.members)}
        return found | ({self.bias: tuple(map(bias_of, self.members))} if self.bias else {})

    def splits(self, shards: int) -> dict[str, tuple[int, list[slice]]]:
        """By the names of the matrix and a bias that ranks split: ``dim``, ``split``."""
        split = self.dim, self.split(shards)
        found = {self.name: split} | ({self.bias: split} if self.bias and self.dim == 0 else {})
        return found | (self.adapters.splits(shards) if self.adapters else {})

    def weight_gradient(self, ctx: PassContext, d_out: Array, x: Array) -> None:
        """Compute it, and report it as final. Nothing of what is frozen."""
        (of, accumulate, final), ops = ctx.into, ctx.ops
        if self.name in of:
            ops.linear_weight_gradient(d_out, x, ops.matrix(of, self.name), accumulate, ctx.arena)
            final(self.name)
        if self.bias and self.bias in of:
            self._bias_gradient(ctx, d_out, ops.matrix(of, self.bias), accumulate)
            final(self.bias)

    def _bias_gradient(self, ctx: PassContext, d_out: Array, d_bias: Array, accumulate: bool) -> None:
        """Of a row-parallel matrix all ranks have all rows."""
        if self.dim == 0 or ctx.tp.owns_replicated:
            ctx.ops.sum_rows(d_out, d_bias, accumulate, ctx.arena)
        elif not accumulate:
            ctx.ops.zero(d_bias)

    def _weight(self, ctx: PassContext) -> Any:
        return ctx.ops.matrix(ctx.weights, self.name)

    def _bias(self, ctx: PassContext) -> Array | None:
        return ctx.weights[self.bias] if self.bias else None


class ColumnLinear(Linear):
    """Split by output features: from the tokens of all ranks to this rank's features."""

    dim = 0

    def features(self, shards: int) -> int:
        """Those of a rank of ``shards``."""
        return self.split(shards)[-1].stop

    def split(self, shards: int) -> list[slice]:
        each = (rows // min(shards, self.most.get(name, shards)) for name, rows in self.members.items())
        ends = [0, *accumulate(each)]
        return [*map(slice, ends, ends[1:])]

    def forward(self, ctx: PassContext, x_ND: Array, out_NF: Array, lora_hidden: Sequence[Array], half: Half) -> None:
        """For ``half``: out_NF = x_ND weight^T + bias, of these rows. ``lora_hidden`` are those of ``adapters``."""
        ctx.ops.linear(x_ND, self._weight(ctx), out_NF, None, self._bias(ctx))
        if self.adapters:
            self.adapters.forward(ctx, x_ND, lora_hidden, half.rows)
            self.adapters.add(ctx, lora_hidden, out_NF, half.rows)

    def backward(
        self, ctx: PassContext, d_out_NF: Array, dx_nD: Array, d_lora_hidden: Sequence[Array]
    ) -> Callable[[], object]:
        """Begin to compute ``dx_nD``, whose sum over ranks overlaps the second half of the matmul.

        ``d_lora_hidden`` are those of ``adapters``. The returned function completes ``dx_nD``. Until it returns,
        ``ctx.arena`` holds scratch memory.
        """
        weight, adapters = self._weight(ctx), self.adapters
        if ctx.tp.size == 1:
            ctx.ops.linear_input_gradient(d_out_NF, weight, dx_nD)
            if adapters and not ctx.tp.in_order:
                adapters.input_gradient(ctx, d_lora_hidden, dx_nD, slice(0, len(dx_nD)))
        term_ND, waits = ctx.tp.empty_terms(dx_nD, ctx.arena), list[Callable[[], object]]()

        def compute_terms(rows: slice, terms: Array) -> None:
            ctx.ops.linear_input_gradient(d_out_NF[rows], weight, terms)
            if adapters and not ctx.tp.in_order:
                adapters.input_gradient(ctx, d_lora_hidden, terms, rows)

        for half in ctx.tp.halves(len(term_ND)) if ctx.tp.size > 1 else ():
            waits.append(ctx.tp.compute_and_start_sum(compute_terms, term_ND, dx_nD, half, ctx.arena))

        def complete() -> None:
            for wait in waits:
                wait()
            if adapters and ctx.tp.in_order:  # the gradients of all members are summed first
                ctx.tp.add_own(dx_nD, partial(adapters.input_gradient, ctx, d_lora_hidden), ctx.arena)

        return complete


class RowLinear(Linear):
    """Split by input features: from this rank's features to a term of each token's sum over ranks."""

    dim = 1

    def forward(
        self, ctx: PassContext, x_NF: Array, term_ND: Array, out_nD: Array, residual_nD: Array, half: Half,
        lora_hidden: Sequence[Array],
    ) -> Callable[[], None]:  # fmt: skip
        """For ``half``: out_nD = residual_nD + this rank's rows of x weight^T, summed over the ranks' features.

        ``lora_hidden`` are those of ``adapters``. The returned function completes ``out_nD``. Until then the product is
        in ``term_ND``.
        """
        (rows, own), weight, bias, adapters = half, self._weight(ctx), self._bias(ctx), self.adapters
        if adapters:
            adapters.forward(ctx, x_NF[rows], lora_hidden, rows)
        if ctx.tp.size == 1:
            ctx.ops.linear(x_NF, weight, out_nD, residual_nD, bias)
            if adapters and ctx.tp.in_order:
                ctx.tp.add_own(out_nD, partial(adapters.add, ctx, lora_hidden), ctx.arena)
            elif adapters:
                adapters.add(ctx, lora_hidden, out_nD, rows)
            return lambda: None
        first, later = ctx.tp.axis.rank == 0, ctx.tp.splits_rows  # whether the residual is added after the sum
        added = residual_nD if first and not later else None

        def compute_terms(rows: slice, terms: Array) -> None:
            ctx.ops.linear(x_NF[rows], weight, terms, added, bias if first else None)
            if adapters and not ctx.tp.in_order:
                adapters.add(ctx, lora_hidden, terms, rows)

        wait = ctx.tp.compute_and_start_sum(compute_terms, term_ND, out_nD, half)

        def complete() -> None:
            wait()
            if later:
                ctx.ops.add(out_nD[own], residual_nD[own], out_nD[own])
            if adapters and ctx.tp.in_order:
                ctx.tp.add_own(out_nD, partial(adapters.add, ctx, lora_hidden), ctx.arena)

        return complete

    def backward(
        self, ctx: PassContext, d_out: Any, d_out_ND: Array, dx_NF: Array, x_NF: Array, lora_hidden: Sequence[Array]
    ) -> None:
        """dx_NF = d_out_ND weight, and the gradients of ``adapters``. ``d_out``: as ``LinearOps.gradient`` gives it.

        ``lora_hidden`` are those of ``adapters``, or () if they must be computed again.
        """
        ctx.ops.linear_input_gradient(d_out, self._weight(ctx), dx_NF)
        if self.adapters:
            with ctx.arena.scope():
                rows = slice(0, len(d_out_ND))
                d_lora_hidden = self.adapters.empty(ctx, rows.stop, d_out_ND.dtype, ctx.arena)
                if not lora_hidden:
                    lora_hidden = self.adapters.empty(ctx, rows.stop, d_out_ND.dtype, ctx.arena)
                    self.adapters.forward(ctx, x_NF, lora_hidden, rows)
                self.adapters.backward(ctx, d_out_ND, lora_hidden, d_lora_hidden)
                self.adapters.input_gradient(ctx, d_lora_hidden, dx_NF, rows)
                self.adapters.gradient_of_a(ctx, d_lora_hidden, x_NF)
