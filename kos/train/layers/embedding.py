"""The lookup of tokens; ranks of tp split the vocabulary."""

from __future__ import annotations

from kos.memory.arena import Arena
from kos.train.layers.context import LOOKUPS, PassContext
from kos.train.layers.placement import Placement
from kos.train.ops import Array


class Embedding:
    """A table (``vocabulary``, ``size``). ``tied``: it is the head's matrix too."""

    def __init__(self, name: str, vocabulary: int, size: int, tied: bool) -> None:
        self.name, self.shape, self.tied = name, (vocabulary, size), tied

    def placements(self, shard: int, shards: int) -> dict[str, Placement]:
        return {self.name: Placement.split(self.shape, 0, shard, shards)}

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
        adds = accumulate or (name != LOOKUPS and self.tied and with_head)
        first = None if ctx.tp.size == 1 else ctx.tp.first
        ctx.ops.embedding_backward(dx_ND, tokens_N, of[name], adds, ctx.arena, first)
        final(name)


class PositionEmbedding(Embedding):
    """With learned positions: a second table, ``positions``, of ``length`` rows. For one rank of tp and cp alone."""

    def __init__(self, name: str, vocabulary: int, size: int, tied: bool, positions: str, length: int) -> None:
        super().__init__(name, vocabulary, size, tied)
        self.positions, self.length = positions, length

    def placements(self, shard: int, shards: int) -> dict[str, Placement]:
        return {self.positions: Placement((self.length, self.shape[1])), **super().placements(shard, shards)}

    def forward(self, ctx: PassContext, tokens_N: Array, seq_len: int, keep: Arena) -> Array:
        x_ND = super().forward(ctx, tokens_N, seq_len, keep)
        for start in range(0, len(tokens_N), seq_len):
            sample = x_ND[start : start + seq_len]
            ctx.ops.add(sample, ctx.weights[self.positions][:seq_len], sample)
        return x_ND

    def backward(self, ctx: PassContext, tokens_N: Array, seq_len: int, dx_ND: Array, with_head: bool) -> None:
        of, accumulate, final = ctx.into
        d_positions, samples = of[self.positions], dx_ND.reshape(len(dx_ND) // seq_len, -1)
        if not accumulate:
            ctx.ops.zero(d_positions[seq_len:])
        ctx.ops.sum_rows(samples, d_positions[:seq_len].reshape(-1), accumulate, ctx.arena)
        final(self.positions)
        super().backward(ctx, tokens_N, seq_len, dx_ND, with_head)
