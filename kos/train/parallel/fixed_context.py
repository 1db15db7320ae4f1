"""Context parallelism with ``--deterministic``: attention of this rank's pieces to the pieces of all ranks.

Attention is that of ``context.py`` with a piece of a sequence (``kos.train.ops.fixed_order``) in place of a rank: to
its own keys with the causal mask, then to those of every other piece, in a fixed order, with the same shapes in every
layout. The gradients of keys and values are a tree over the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator

from kos.memory.arena import Arena
from kos.train.ops import Array, Mask
from kos.train.ops.fixed_order import Split, scatter_sum, sum_tree
from kos.train.parallel.context import ContextParallel, Masks, seen
from kos.train.parallel.mesh import Axis


class FixedContext(ContextParallel):
    """``ContextParallel`` in the order of ``split``."""

    def __init__(self, ops: object, axis: Axis, split: Split) -> None:
        super().__init__(ops, axis, split.tokens // axis.size)  # type: ignore[arg-type]

    def mean_loss(self, losses: Array, count: Array, out: Array, arena: Arena) -> None:
        """Of the tokens of all ranks, on the first; 0 on the others."""
        with arena.scope():
            of_all = losses
            if self.size > 1:
                of_all = arena.take((self.size * len(losses),), losses.dtype)
                self.axis.comm.all_gather(losses, of_all)
            self.ops.mean_loss(of_all, count, out)
        if self.axis.rank > 0:
            self.ops.zero(out)

    def attention(
        self, qkv: Array, heads: int, kv_heads: int, out: Array, log_sum_exp: Array, arena: Arena, masks: Masks = None
    ) -> None:
        ops = self.ops
        with arena.scope():
            kv = self._keys_and_values(qkv, heads, kv_heads, arena)
            for piece, rows, lse in self._pieces(qkv, log_sum_exp):
                ops.attention(qkv[rows], heads, kv_heads, out[rows], lse, arena, self._mask(masks, piece, piece))
            merged = self._widen(out, arena)
            for piece, rows, lse in self._pieces(qkv, log_sum_exp):
                for owner, queries, keys in self._others(piece, lse.shape[-1]):
                    operands = qkv[rows], kv[self._place(owner)], heads, kv_heads, queries, keys, merged[rows], lse
                    ops.attention_to(*operands, arena, self._mask(masks, piece, owner))
            if merged is not out:
                ops.copy(merged, out)

    def attention_backward(
        self, d_out: Array, qkv: Array, out: Array, log_sum_exp: Array, heads: int, kv_heads: int, d_qkv: Array,
        arena: Arena, masks: Masks = None,
    ) -> None:  # fmt: skip
        ops, pieces = self.ops, list(self._pieces(qkv, log_sum_exp))
        with arena.scope():
            kv = self._keys_and_values(qkv, heads, kv_heads, arena)
            for piece, rows, lse in pieces:
                operands = d_out[rows], qkv[rows], out[rows], lse, heads, kv_heads, d_qkv[rows], arena
                ops.attention_backward(*operands, self._mask(masks, piece, piece))
            total = self._widen(d_qkv, arena)

            def of_piece(index: int, d_kv: Array) -> None:
                piece, rows, lse = pieces[index]
                ops.zero(d_kv[self._place(piece)])
                for owner, queries, keys in self._others(piece, lse.shape[-1]):
                    at = self._place(owner)
                    ops.attention_to_backward(
                        d_out[rows], qkv[rows], kv[at], out[rows], lse, heads, kv_heads, queries, keys, total[rows],
                        d_kv[at], arena, self._mask(masks, piece, owner),
                    )  # fmt: skip

            d_kv = arena.take((len(kv), *kv[0].shape), ops.statistics_dtype(qkv.dtype))
            sum_tree(ops, arena, of_piece, d_kv, self.pieces)
            for index, (_, rows, _) in enumerate(pieces):
                d_mine, of_ranks = d_kv[index * self.size], d_kv[index * self.size : (index + 1) * self.size]
                if self.size > 1:
                    d_mine = arena.take(d_mine.shape, d_kv.dtype)
                    scatter_sum(ops, arena, self.axis, of_ranks, d_mine)
                ops.add_keys_and_values(d_mine, total[rows])
            if total is not d_qkv:
                ops.copy(total, d_qkv)

    def _keys_and_values(self, qkv: Array, heads: int, kv_heads: int, arena: Arena) -> list[Array]:
        """Those of all pieces, by ``_place``."""
        found = []
        for rows in self._split(len(qkv)):
            mine = self.ops.keys_and_values(qkv[rows], heads, kv_heads, arena)
            of_ranks = [mine] if self.size == 1 else arena.take((self.size, *mine.shape), mine.dtype)
            if self.size > 1:
                self.axis.comm.all_gather(mine, of_ranks)
            found += [of_ranks[rank] for rank in range(self.size)]
        return found

    def _place(self, piece: int) -> int:
        """Where a piece lies: the first of each rank, then the second of each."""
        rank, index = divmod(piece, self.pieces)
        return index * self.size + rank

    def _mask(self, masks: Masks, piece: int, owner: int) -> Mask | None:
        """For the queries of ``piece``, one of this rank's, and the keys of another."""
        return None if masks is None else masks[piece - self.mine[0]][owner]

    def _split(self, count: int) -> list[slice]:
        """The part of each piece, of ``count`` rows or samples."""
        n = count // self.pieces
        return [slice(at, at + n) for at in range(0, count, n)]

    def _pieces(self, qkv: Array, log_sum_exp: Array) -> Iterator[tuple[int, slice, Array]]:
        """For each piece of this rank: its number, its rows, its part of ``log_sum_exp``."""
        for piece, rows, here in zip(self.mine, self._split(len(qkv)), self._split(len(log_sum_exp)), strict=True):
            yield piece, rows, log_sum_exp[here]

    def _others(self, piece: int, length: int) -> list[tuple[int, slice, slice]]:
        """Every other piece, with the queries of ``piece`` and the keys that they attend to."""
        return [(owner, *seen(owner, piece, length)) for owner in range(self.chunks // 2) if owner != piece]
