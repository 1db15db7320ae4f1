"""The lookup of tokens, and the head: the last norm, the logits and the loss. Ranks of tp split the vocabulary.

Only some rows of logits exist at once: V columns of them are larger than all other activations of a token.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from kos.memory.arena import Arena
from kos.memory.sharded import Sharded
from kos.train.layers import PassContext
from kos.train.layers.norm import Norm
from kos.train.ops import Array, Loss
from kos.train.parallel.gradients import LOOKUPS


class Embedding:
    """A table (``vocabulary``, ``size``). ``tied``: it is the head's matrix too.

    Lookups of the token ``padding`` give its row no gradient, as in torch's ``nn.Embedding`` (``padding_idx``).
    """

    def __init__(self, name: str, vocabulary: int, size: int, tied: bool, padding: int | None = None) -> None:
        self.name, self.shape, self.tied, self.padding = name, (vocabulary, size), tied, padding

    def placements(self, shard: int, shards: int) -> dict[str, Sharded]:
        return {self.name: Sharded(self.shape).split("tp", 0, shard, shards)}

    def forward(self, ctx: PassContext, tokens_N: Array, seq_len: int, keep: Arena) -> Array:
        """This rank's rows of the embeddings of all tokens, in ``keep``."""
        tp, table_VD = ctx.tp, ctx.weights[self.name]
        x_nD = keep.take((tp.rows(len(tokens_N)), self.shape[1]), table_VD.dtype)
        if tp.size == 1:
            ctx.ops.embedding(tokens_N, table_VD, x_nD)
            return x_nD
        with ctx.arena.scope():
            term_ND = tp.empty_rows(x_nD, ctx.arena)
            ctx.ops.embedding(tokens_N, table_VD, term_ND, tp.first)
            tp.start_sum(term_ND, x_nD)()
        return x_nD

    def backward(self, ctx: PassContext, tokens_N: Array, seq_len: int, dx_ND: Array, with_head: bool) -> None:
        """The last gradient. ``with_head``: a tied head has written its term, unless lookups are summed apart."""
        of, accumulate, final = ctx.into
        name = LOOKUPS if LOOKUPS in of else self.name
        if name not in of:
            return
        adds = accumulate or (name != LOOKUPS and self.tied and with_head)
        first = None if ctx.tp.size == 1 else ctx.tp.first
        ctx.ops.embedding_backward(dx_ND, tokens_N, of[name], adds, ctx.arena, first, self.padding)
        final(name)


class PositionEmbedding(Embedding):
    """With learned positions: a second table, ``positions``, of ``length`` rows. For one rank of tp and cp alone."""

    def __init__(self, name: str, vocabulary: int, size: int, tied: bool, positions: str, length: int) -> None:
        super().__init__(name, vocabulary, size, tied)
        self.positions, self.length = positions, length

    def placements(self, shard: int, shards: int) -> dict[str, Sharded]:
        return {self.positions: Sharded((self.length, self.shape[1])), **super().placements(shard, shards)}

    def forward(self, ctx: PassContext, tokens_N: Array, seq_len: int, keep: Arena) -> Array:
        x_ND, table = super().forward(ctx, tokens_N, seq_len, keep), ctx.weights[self.positions]
        if ctx.cache is not None and seq_len == 1:
            with ctx.arena.scope():
                learned_ND = ctx.arena.take(x_ND.shape, x_ND.dtype)
                ctx.ops.embedding(ctx.cache.positions, table, learned_ND)
                ctx.ops.add(x_ND, learned_ND, x_ND)
            return x_ND
        for start in range(0, len(tokens_N), seq_len):
            sample = x_ND[start : start + seq_len]
            ctx.ops.add(sample, table[:seq_len], sample)
        return x_ND

    def backward(self, ctx: PassContext, tokens_N: Array, seq_len: int, dx_ND: Array, with_head: bool) -> None:
        of, accumulate, final = ctx.into
        if self.positions in of:
            d_positions, samples = of[self.positions], dx_ND.reshape(len(dx_ND) // seq_len, -1)
            if not accumulate:
                ctx.ops.zero(d_positions[seq_len:])
            ctx.ops.sum_rows(samples, d_positions[:seq_len].reshape(-1), accumulate, ctx.arena)
            final(self.positions)
        super().backward(ctx, tokens_N, seq_len, dx_ND, with_head)


HEAD_ROWS = 1024  # tokens whose logits are in memory at once, by default


class Head:
    """``name`` is the matrix (``vocabulary``, D), ``tied`` to the embedding or the head's own."""

    def __init__(self, name: str, vocabulary: int, norm: Norm, tied: bool) -> None:
        self.name, self.vocabulary, self.norm, self.tied = name, vocabulary, norm, tied
        self.rows = HEAD_ROWS
        self.custom_loss: Loss | None = None  # instead of the cross-entropy

    def placements(self, shard: int, shards: int) -> dict[str, Sharded]:
        table = Sharded((self.vocabulary, self.norm.size)).split("tp", 0, shard, shards)
        return ({} if self.tied else {self.name: table}) | self.norm.placements()

    def normed(self, ctx: PassContext, x_nD: Array, statistics: Array | None = None) -> Array:
        """The input of the product, of all ranks' rows."""
        normed_nD = self.norm.normed(ctx, x_nD, ctx.arena, statistics)
        return ctx.tp.gather(normed_nD, ctx.arena)

    def logits(self, ctx: PassContext, normed: Array) -> Array:
        """This rank's part of the logits of some rows."""
        logits = ctx.arena.take((len(normed), len(ctx.weights[self.name])), normed.dtype)
        ctx.ops.of_head.linear(normed, ctx.ops.matrix(ctx.weights, self.name), logits)
        return logits

    def _chunks(self, ctx: PassContext, count: int) -> list[list[slice]]:
        """Of each piece of ``count`` rows the chunks whose logits are in memory at once."""
        of_piece = count // ctx.ops.pieces
        most, ends = ctx.ops.head_rows(of_piece, self.rows), range(of_piece, count + 1, of_piece)
        return [[slice(at, min(at + most, end)) for at in range(end - of_piece, end, most)] for end in ends]

    def _losses(
        self, ctx: PassContext, logits_Nv: Array, rows: slice, losses_N: Array, count: Array | None = None
    ) -> None:
        """The losses of some rows; with ``count`` the logits become the gradient of sum(losses) / count."""
        assert ctx.batch is not None
        batch, ops = ctx.batch.rows(rows), ctx.ops.innermost().inner
        targets_N, weights_N, divisor = batch.targets, batch.weights, None
        if self.custom_loss is None:
            self._cross_entropy(ctx, logits_Nv, targets_N, losses_N, count)
            if weights_N is None:
                return
        else:
            ops.custom_loss(self.custom_loss, logits_Nv, batch, losses_N, count is not None)
            weights_N, divisor = None, count
        ops.scale_rows(losses_N.reshape(-1, 1), targets_N, weights_N, None)
        if count is not None:
            ops.scale_rows(logits_Nv, targets_N, weights_N, divisor)

    def _cross_entropy(
        self, ctx: PassContext, logits_Nv: Array, targets_N: Array, losses_N: Array, count: Array | None = None
    ) -> None:
        """``_losses`` of the cross-entropy."""
        ops, tp, arena = ctx.ops.of_head, ctx.tp, ctx.arena
        if tp.size * ops.parts == 1:
            ops.cross_entropy(logits_Nv, targets_N, count, losses_N, arena)
            return
        with arena.scope():
            mine = arena.take((ops.parts, 3, len(targets_N)), losses_N.dtype)
            of_all = mine if tp.size == 1 else arena.take((tp.size * ops.parts, *mine.shape[1:]), mine.dtype)
            ops.statistics_of_parts(logits_Nv, targets_N, tp.first, mine, arena)
            if tp.size > 1:
                tp.axis.comm.all_gather(mine, of_all)
            ops.cross_entropy_of_parts(logits_Nv, targets_N, tp.first, of_all, count, losses_N, arena)

    def losses(self, ctx: PassContext, x_nD: Array, losses_N: Array) -> None:
        """The losses of all tokens; 0 where the loss leaves a target out."""
        normed_ND = self.normed(ctx, x_nD)
        for rows in chain(*self._chunks(ctx, len(losses_N))):
            with ctx.arena.scope():
                logits = self.logits(ctx, normed_ND[rows])
                self._losses(ctx, logits, rows, losses_N[rows])

    def loss(self, ctx: PassContext, x_nD: Array, targets_N: Array, loss: Array, count: Array | None) -> None:
        """The mean loss, to ``loss`` (1,), float64. ``count`` (1,) divides the sum; None: the number of targets."""
        losses_N, count = self._loss_arrays(ctx, targets_N, x_nD.dtype, count)
        self.losses(ctx, x_nD, losses_N)
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
            alone = ctx.tp.size == 1
            d_normed_nD = d_normed_ND = arena.take(x_nD.shape, x_nD.dtype) if alone else ctx.tp.empty_terms(x_nD, arena)
            self._gradients(ctx, normed_ND, targets_N, count, losses_N, d_normed_ND)
            if not (self.tied and with_embedding) or LOOKUPS in of:
                final(self.name)
            ctx.ops.zero(dx_nD)
            if not alone:
                d_normed_nD = arena.take(x_nD.shape, x_nD.dtype)
                ctx.tp.start_sum(d_normed_ND, d_normed_nD)()
            self.norm.backward(ctx, d_normed_nD, x_nD, statistics_n, dx_nD)
            ctx.cp.mean_loss(losses_N, count, loss, arena)

    def _gradients(
        self, ctx: PassContext, normed: Array, targets_N: Array, count: Array, losses_N: Array, d_normed: Array
    ) -> None:
        """The losses, and the gradients of the matrix, unless it is frozen, and of its input, chunk by chunk."""
        (of, accumulate, _), ops, table = ctx.into, ctx.ops.of_head, ctx.ops.matrix(ctx.weights, self.name)
        pieces, d_weight = self._chunks(ctx, len(targets_N)), of.get(self.name)

        def of_piece(piece: int, d_table: Array | None) -> None:
            for number, rows in enumerate(pieces[piece]):
                with ctx.arena.scope():
                    logits, add = self.logits(ctx, normed[rows]), accumulate or number > 0
                    self._losses(ctx, logits, rows, losses_N[rows], count)
                    d_logits = ops.gradient(logits, None if d_table is None else ctx.arena)
                    ops.linear_input_gradient(d_logits, table, d_normed[rows])
                    if d_table is not None:
                        d_matrix = ops.matrix({self.name: d_table}, self.name)
                        ops.linear_weight_gradient(d_logits, normed[rows], d_matrix, add, ctx.arena)

        if d_weight is None:
            for piece in range(len(pieces)):
                of_piece(piece, None)
            return
        wide = ops.statistics_dtype(normed.dtype)
        in_place = sum(map(len, pieces)) == 1 or d_weight.dtype == wide
        sum_vD = d_weight if in_place else ctx.arena.take(d_weight.shape, wide)  # rounded once, not for each chunk
        if accumulate and not in_place:
            ops.copy(d_weight, sum_vD)
        ctx.ops.sum_pieces(of_piece, sum_vD)
        if not in_place:
            ops.copy(sum_vD, d_weight)
