"""Context parallelism with ``--deterministic``: attention of this rank's pieces to the pieces of all ranks.

Attention is that of ``context.py`` with a piece of a sequence (``kos.train.ops.fixed_order``) in place of a rank: to
its own keys with the causal mask, then to those of every other piece, in a fixed order, with the same shapes in every
layout. The gradients of keys and values are a tree over the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kos.memory.arena import Arena
from kos.train.ops import Array, Attend, Mask
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

    def attention(self, attend: Attend, arena: Arena, masks: Masks = None) -> None:
        ops, pieces = self.ops, self._pieces(attend)
        with arena.scope():
            kv = self._keys_and_values(pieces, arena)
            for piece, of_piece in zip(self.mine, pieces, strict=True):
                ops.attention(replace(of_piece, mask=self._mask(masks, piece, piece)), arena)
            merged = replace(attend, out=self._widen(attend.out, arena))
            for piece, of_piece in zip(self.mine, self._pieces(merged), strict=True):
                for _, to_others in self._others(piece, of_piece, kv, masks):
                    ops.attention(to_others, arena)
            if merged.out is not attend.out:
                ops.copy(merged.out, attend.out)

    def attention_backward(
        self, attend: Attend, d_out: Array, d_qkv: Array, arena: Arena, masks: Masks = None
    ) -> None:
        ops, pieces, rows = self.ops, self._pieces(attend), self._split(len(d_out))
        with arena.scope():
            kv = self._keys_and_values(pieces, arena)
            for piece, of_piece, n in zip(self.mine, pieces, rows, strict=True):
                ops.attention_backward(
                    replace(of_piece, mask=self._mask(masks, piece, piece)), d_out[n], d_qkv[n], arena
                )
            total = self._widen(d_qkv, arena)

            def term(index: int, d_kv: Array) -> None:
                piece, n = self.mine[index], rows[index]
                ops.zero(d_kv[self._place(piece)])
                for owner, to_others in self._others(piece, pieces[index], kv, masks):
                    ops.attention_backward(to_others, d_out[n], total[n], arena, d_kv[self._place(owner)])

            d_kv = arena.take((len(kv), *kv[0].shape), ops.statistics_dtype(d_qkv.dtype))
            sum_tree(ops, arena, term, d_kv, self.pieces)
            for index, n in enumerate(rows):
                d_mine, of_ranks = d_kv[index * self.size], d_kv[index * self.size : (index + 1) * self.size]
                if self.size > 1:
                    d_mine = arena.take(d_mine.shape, d_kv.dtype)
                    scatter_sum(ops, arena, self.axis, of_ranks, d_mine)
                ops.add_keys_and_values(d_mine, total[n])
            if total is not d_qkv:
                ops.copy(total, d_qkv)

    def _keys_and_values(self, pieces: Sequence[Attend], arena: Arena) -> list[Array]:
        """Those of all pieces, by ``_place``."""
        found = []
        for of_piece in pieces:
            mine = self.ops.keys_and_values(of_piece, arena)
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

    def _pieces(self, attend: Attend) -> list[Attend]:
        """The attention of each of this rank's pieces to its own keys."""
        rows, samples = self._split(len(attend.qkv)), self._split(len(attend.log_sum_exp))
        return [attend.of(*each) for each in zip(rows, samples, strict=True)]

    def _others(
        self, piece: int, of_piece: Attend, kv: Sequence[Array], masks: Masks
    ) -> Iterator[tuple[int, Attend]]:
        """Every other piece, with the attention of ``piece`` to its keys."""
        for owner in range(self.chunks // 2):
            if owner != piece:
                where = seen(owner, piece, of_piece.length)
                yield owner, of_piece.to(kv[self._place(owner)], *where, self._mask(masks, piece, owner))
