"""The last norm, the logits and the loss; ranks of tp split the vocabulary.

Only some rows of logits exist at once: V columns of them are larger than all other activations of a token.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from kos.train.layers.context import LOOKUPS, PassContext
from kos.train.layers.norm import Norm
from kos.train.layers.placement import Placement
from kos.train.ops import Array

HEAD_ROWS = 1024  # tokens whose logits are in memory at once, by default


class Head:
    """``name`` is the matrix (``vocabulary``, D), ``tied`` to the embedding or the head's own."""

    def __init__(self, name: str, vocabulary: int, norm: Norm, tied: bool) -> None:
        self.name, self.vocabulary, self.norm, self.tied = name, vocabulary, norm, tied
        self.rows = HEAD_ROWS

    def placements(self, shard: int, shards: int) -> dict[str, Placement]:
        table = Placement.split((self.vocabulary, self.norm.size), 0, shard, shards)
        return ({} if self.tied else {self.name: table}) | self.norm.placements()

    def normed(self, ctx: PassContext, x_nD: Array, statistics: Array | None = None) -> Array:
        """The input of the product, of all ranks' rows."""
        normed_nD = self.norm.normed(ctx, x_nD, ctx.arena, statistics)
        return ctx.tp.gather(normed_nD, ctx.arena)

    def logits(self, ctx: PassContext, normed: Array) -> Array:
        """This rank's part of the logits of some rows."""
        table_vD = ctx.weights[self.name]
        logits = ctx.arena.take((len(normed), len(table_vD)), normed.dtype)
        ctx.products.logits(normed, table_vD, logits)
        return logits

    def loss(self, ctx: PassContext, x_nD: Array, targets_N: Array, loss: Array, count: Array | None) -> None:
        """The mean loss, to ``loss`` (1,), float64. ``count`` (1,) divides the sum; None: the number of targets."""
        normed_ND = self.normed(ctx, x_nD)
        losses_N, count = self._loss_arrays(ctx, targets_N, x_nD.dtype, count)
        for rows in chain(*ctx.products.chunks(len(targets_N), self.rows)):
            with ctx.arena.scope():
                logits = self.logits(ctx, normed_ND[rows])
                ctx.products.cross_entropy(logits, targets_N[rows], losses_N[rows])
        ctx.cp.mean_loss(losses_N, count, loss, ctx.arena)

    def _loss_arrays(self, ctx: PassContext, targets_N: Array, dtype: Any, count: Array | None) -> tuple[Array, Array]:
        """Memory for the losses of tokens, and ``count`` or the number of targets."""
        wide = ctx.ops.statistics_dtype(dtype)
        losses_N = ctx.arena.take((len(targets_N),), wide)
        if count is None:
            count = ctx.arena.take((1,), wide)
            ctx.ops.count_targets(targets_N, count)
        return losses_N, count

    def backward(
        self, ctx: PassContext, x_nD: Array, targets_N: Array, dx_nD: Array, loss: Array, count: Array | None,
        with_embedding: bool,
    ) -> None:  # fmt: skip
        """``loss`` and its gradient in one. Writes ``dx_nD``.

        ``with_embedding``: this rank has the lookups as well, whose term completes the gradient of a tied matrix.
        """
        arena, (of, _, final) = ctx.arena, ctx.into
        with arena.scope():
            losses_N, count = self._loss_arrays(ctx, targets_N, x_nD.dtype, count)
            statistics_n = self.norm.statistics(ctx, x_nD, arena)
            normed_ND = self.normed(ctx, x_nD, statistics_n)
            d_normed_nD = d_normed_ND = arena.take(normed_ND.shape, x_nD.dtype)
            self._gradients(ctx, normed_ND, targets_N, count, losses_N, d_normed_ND)
            if not (self.tied and with_embedding) or LOOKUPS in of:
                final(self.name)
            ctx.ops.zero(dx_nD)
            if ctx.tp.size > 1:
                d_normed_nD = arena.take(x_nD.shape, x_nD.dtype)
                ctx.products.start_sum(d_normed_ND, d_normed_nD, None)()
            self.norm.backward(ctx, d_normed_nD, x_nD, statistics_n, dx_nD)
            ctx.cp.mean_loss(losses_N, count, loss, arena)

    def _gradients(
        self, ctx: PassContext, normed: Array, targets_N: Array, count: Array, losses_N: Array, d_normed: Array
    ) -> None:
        """The losses, and the gradients of the matrix and of its input, chunk by chunk."""
        (of, accumulate, _), ops, products, table = ctx.into, ctx.ops, ctx.products, ctx.weights[self.name]
        pieces, d_weight = products.chunks(len(targets_N), self.rows), of[self.name]
        wide = ops.statistics_dtype(normed.dtype)
        in_place = sum(map(len, pieces)) == 1 or d_weight.dtype == wide
        sum_vD = d_weight if in_place else ctx.arena.take(d_weight.shape, wide)  # rounded once, not for each chunk
        if accumulate and not in_place:
            ops.copy(d_weight, sum_vD)

        def of_piece(piece: int, d_table: Array) -> None:
            for number, rows in enumerate(pieces[piece]):
                with ctx.arena.scope():
                    logits, add = self.logits(ctx, normed[rows]), accumulate or number > 0
                    products.cross_entropy(logits, targets_N[rows], losses_N[rows], count)
                    products.logits_backward(logits, normed[rows], table, d_normed[rows], d_table, add)

        products.sum_pieces(of_piece, sum_vD)
        if not in_place:
            ops.copy(sum_vD, d_weight)
