"""A product with a matrix of weights. Tensor parallelism lives here (``kos.train.parallel.tensor``).

Suffixes name dimensions: N = B T tokens, n those of them in this rank's residual stream (all, but for tensor
parallelism), D the hidden size, F this rank's features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, ClassVar

from kos.train.layers.context import PassContext
from kos.train.layers.placement import Placement
from kos.train.layers.products import Stacked
from kos.train.ops import Array
from kos.train.parallel.tensor import Half


def bias_of(name: str) -> str:
    return name.removesuffix("weight") + "bias"


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

    @property
    def rows(self) -> int:
        return sum(self.members.values())

    def stacked(self, shards: int) -> Stacked:
        """The rows of each member, of a rank of ``shards``; None if the ranks split the columns."""
        return None

    def placements(self, shard: int, shards: int) -> dict[str, Placement]:
        """Of each tensor, in the order in which the backward finishes their gradients."""
        found = {
            name: Placement.split((rows, self.columns), self.dim, shard, shards, self.most.get(name))
            for name, rows in self.members.items()
        }
        for name, rows in self.members.items() if self.bias else ():
            whole, split = Placement((rows,)), Placement.split((rows,), 0, shard, shards, self.most.get(name))
            found[bias_of(name)] = whole if self.dim else split
        return found

    def groups(self) -> dict[str, tuple[str, ...]]:
        """The names of the members of the matrix and of the bias."""
        found = {self.name: tuple(self.members)}
        return found | ({self.bias: tuple(map(bias_of, self.members))} if self.bias else {})

    def weight_gradient(self, ctx: PassContext, d_out: Array, x: Array) -> None:
        """Compute it, and report it as final."""
        of, accumulate, final = ctx.into
        stacked = self.stacked(ctx.tp.size)
        ctx.products.weight_gradient(d_out, x, of[self.name], accumulate, stacked)
        final(self.name)
        if self.bias:
            ctx.products.bias_gradient(d_out, of[self.bias], accumulate, stacked)
            final(self.bias)

    def _bias(self, ctx: PassContext) -> Array | None:
        return ctx.weights[self.bias] if self.bias else None


class ColumnLinear(Linear):
    """Split by output features: from the tokens of all ranks to this rank's features."""

    dim = 0

    def features(self, shards: int) -> int:
        """Those of a rank of ``shards``."""
        return sum(rows.stop - rows.start for rows in self.stacked(shards) or ())

    def stacked(self, shards: int) -> Stacked:
        each = (rows // min(shards, self.most.get(name, shards)) for name, rows in self.members.items())
        ends = [0, *accumulate(each)]
        return [*map(slice, ends, ends[1:])]

    def forward(self, ctx: PassContext, x_ND: Array, out_NF: Array, transposed: Any = None) -> None:
        stacked, bias = self.stacked(ctx.tp.size), self._bias(ctx)
        ctx.products.linear(ctx.weights[self.name], x_ND, out_NF, stacked, None, bias, transposed)

    def backward(self, ctx: PassContext, d_out_NF: Array, dx_nD: Array) -> Callable[[], object]:
        """Begin to compute ``dx_nD``, whose sum over ranks overlaps the second half of the product.

        The returned function waits. Until then scratch memory is in use.
        """
        products, weight, stacked = ctx.products, ctx.weights[self.name], self.stacked(ctx.tp.size)
        if ctx.tp.size == 1:
            products.input_gradient(weight, d_out_NF, dx_nD, stacked)
            return lambda: None
        term_ND, waits = ctx.tp.empty_rows(dx_nD, ctx.arena), []
        for half in ctx.tp.halves(len(term_ND)):
            products.input_gradient(weight, d_out_NF[half.rows], term_ND[half.rows], stacked)
            waits.append(products.start_sum(term_ND, dx_nD, [half]))
        return lambda: [wait() for wait in waits]


class RowLinear(Linear):
    """Split by input features: from this rank's features to a term of each token's sum over ranks."""

    dim = 1

    def forward(
        self, ctx: PassContext, x_NF: Array, term_ND: Array, out_nD: Array, residual_nD: Array, half: Half,
        transposed: Any = None,
    ) -> Callable[[], None]:  # fmt: skip
        """For ``half``: out_nD = residual_nD + this rank's rows of x weight^T, summed over the ranks' features.

        The returned function completes ``out_nD``. Until then the product is in ``term_ND``.
        """
        (rows, own), products, weight, bias = half, ctx.products, ctx.weights[self.name], self._bias(ctx)
        if ctx.tp.size == 1:
            products.linear(weight, x_NF, out_nD, None, residual_nD, bias, transposed)
            return lambda: None
        of_term = bias if ctx.tp.axis.rank == 0 and not products.bias_after_sum else None
        products.linear(weight, x_NF[rows], term_ND[rows], None, None, of_term)
        wait = products.start_sum(term_ND, out_nD, [half])

        def complete() -> None:
            wait()
            ctx.ops.add(out_nD[own], residual_nD[own], out_nD[own])
            if bias is not None and products.bias_after_sum:
                ctx.ops.add(out_nD[own], bias, out_nD[own])

        return complete

    def backward(self, ctx: PassContext, d_out_ND: Array, dx_NF: Array) -> None:
        """dx_NF = d_out_ND weight."""
        ctx.products.input_gradient(ctx.weights[self.name], d_out_ND, dx_NF, None)
