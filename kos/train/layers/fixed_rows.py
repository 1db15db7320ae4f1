"""Context parallelism with ``--deterministic`` on GPUs: the pieces of ``fixed.py``, each in consecutive rows.

Every product, norm and attention runs on one piece at a time, in the same shapes in every layout. Sums over tokens are
a tree over the pieces. Attention is that of ``context.py`` with a piece in place of a rank: to its own keys with the
causal mask, then to those of every other piece, in a fixed order. Features are not split.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kos.memory.arena import Arena
from kos.train.layers.fixed import FixedContext, FixedProducts
from kos.train.layers.products import Products, Stacked
from kos.train.ops import Array, Mask
from kos.train.parallel.context import ContextParallel, Masks, seen

LEAST_ROWS_CHUNK = 4096  # tokens: shorter chunks make matrix products and attention slow


class RowProducts(FixedProducts):
    """Products a piece at a time; this rank has all features."""

    def each(self, rows: int) -> list[slice]:
        """The rows of each piece, of so many in all."""
        n = rows // self.pieces
        return [slice(start, start + n) for start in range(0, rows, n)]

    def linear(
        self, weight: Array, x: Array, out: Array, stacked: Stacked, residual: Array | None = None,
        bias: Array | None = None, transposed: Any = None,
    ) -> None:  # fmt: skip
        for rows in self.each(len(x)):
            self.of_layers.linear(x[rows], weight, out[rows], None if residual is None else residual[rows], bias)

    def input_gradient(self, weight: Array, d_out: Array, dx: Array, stacked: Stacked) -> None:
        for rows in self.each(len(d_out)):
            self.of_layers.linear_input_gradient(d_out[rows], weight, dx[rows])

    def weight_gradient(self, d_out: Array, x: Array, d_weight: Array, accumulate: bool, stacked: Stacked) -> None:
        rows = self.each(len(x))

        def of_piece(piece: int, out: Array) -> None:
            self.of_layers.linear_weight_gradient(d_out[rows[piece]], x[rows[piece]], out, False, self.arena)

        self.sum_pieces(of_piece, d_weight)

    def bias_gradient(self, d_out: Array, d_bias: Array, accumulate: bool, stacked: Stacked) -> None:
        rows = self.each(len(d_out))
        self.sum_pieces(lambda piece, out: self.ops.sum_rows(d_out[rows[piece]], out, False, self.arena), d_bias)

    def norm_backward(
        self, d_out: Array, x: Array, weight: Array, rstd: Array, dx: Array, d_weight: Array, accumulate: bool
    ) -> None:  # fmt: skip
        rows = self.each(len(x))

        def of_piece(piece: int, out: Array) -> None:
            d_out_n, x_n, rstd_n, dx_n = (each[rows[piece]] for each in (d_out, x, rstd, dx))
            self.ops.rms_norm_backward(d_out_n, x_n, weight, rstd_n, dx_n, out, False, self.arena)

        self.sum_pieces(of_piece, d_weight)

    logits, logits_backward, cross_entropy = Products.logits, Products.logits_backward, Products.cross_entropy


class RowContext(FixedContext):
    """Attention of this rank's pieces to the pieces of all ranks."""

    sums: RowProducts

    def mean_loss(self, losses: Array, count: Array, out: Array, arena: Arena) -> None:
        with arena.scope():
            of_all = losses
            if self.size > 1:
                of_all = arena.take((self.size * len(losses),), losses.dtype)
                self.axis.comm.all_gather(losses, of_all)
            self.ops.mean_loss(of_all, count, out)
        if self.axis.rank > 0:
            self.ops.zero(out)

    _masks = ContextParallel._masks

    def attention(
        self, qkv: Array, heads: int, kv_heads: int, out: Array, log_sum_exp: Array, arena: Arena, masks: Masks = None
    ) -> None:
        ops = self.ops
        with arena.scope():
            kv = self._of_all(ops.keys_and_values(qkv, heads, kv_heads, arena), arena)
            for piece, rows, lse in self._pieces(qkv, log_sum_exp):
                ops.attention(qkv[rows], heads, kv_heads, out[rows], lse, arena, self._mask(masks, piece, piece))
            merged = self._widen(out, arena)
            for piece, rows, lse in self._pieces(qkv, log_sum_exp):
                for owner, queries, keys in self._others(piece, lse.shape[-1]):
                    operands = qkv[rows], kv[owner], heads, kv_heads, queries, keys, merged[rows], lse, arena
                    ops.attention_to(*operands, self._mask(masks, piece, owner))
            if merged is not out:
                ops.copy(merged, out)

    def attention_backward(
        self, d_out: Array, qkv: Array, out: Array, log_sum_exp: Array, heads: int, kv_heads: int, d_qkv: Array,
        arena: Arena, masks: Masks = None,
    ) -> None:  # fmt: skip
        ops, pieces = self.ops, list(self._pieces(qkv, log_sum_exp))
        with arena.scope():
            mine = ops.keys_and_values(qkv, heads, kv_heads, arena)
            kv, wide = self._of_all(mine, arena), ops.statistics_dtype(qkv.dtype)
            for piece, rows, lse in pieces:
                operands = d_out[rows], qkv[rows], out[rows], lse, heads, kv_heads, d_qkv[rows], arena
                ops.attention_backward(*operands, self._mask(masks, piece, piece))
            total = self._widen(d_qkv, arena)

            def of_piece(index: int, d_kv: Array) -> None:
                piece, rows, lse = pieces[index]
                ops.zero(d_kv[piece])
                for owner, queries, keys in self._others(piece, lse.shape[-1]):
                    ops.attention_to_backward(
                        d_out[rows], qkv[rows], kv[owner], out[rows], lse, heads, kv_heads, queries, keys, total[rows],
                        d_kv[owner], arena, self._mask(masks, piece, owner),
                    )  # fmt: skip

            d_kv = arena.take(kv.shape, wide)
            self.sums.tree(of_piece, d_kv)
            d_mine = d_kv.reshape(mine.shape) if self.size == 1 else arena.take(mine.shape, wide)
            if self.size > 1:
                self.sums.scatter_over_ranks(self.axis, d_kv, d_mine)
            ops.add_keys_and_values(d_mine, total)
            if total is not d_qkv:
                ops.copy(total, d_qkv)

    def _mask(self, masks: Masks, piece: int, owner: int) -> Mask | None:
        """For the queries of ``piece``, one of this rank's, and the keys of another."""
        return None if masks is None else masks[piece - self.mine[0]][owner]

    def _pieces(self, qkv: Array, log_sum_exp: Array) -> Iterator[tuple[int, slice, Array]]:
        """For each piece of this rank: its number, its rows, its part of ``log_sum_exp``."""
        samples = self.sums.each(len(log_sum_exp))
        for piece, rows, here in zip(self.mine, self.sums.each(len(qkv)), samples, strict=True):
            yield piece, rows, log_sum_exp[here]

    def _others(self, piece: int, length: int) -> list[tuple[int, slice, slice]]:
        """Every other piece, with the queries of ``piece`` and the keys that they attend to."""
        return [(owner, *seen(owner, piece, length)) for owner in range(self.sums.split.tokens) if owner != piece]

    def _of_all(self, kv: Array, arena: Arena) -> Array:
        """Keys and values of all ranks, by piece."""
        of_all = kv
        if self.size > 1:
            of_all = arena.take((self.size * len(kv), *kv.shape[1:]), kv.dtype)
            self.axis.comm.all_gather(kv, of_all)
        return of_all.reshape(self.sums.split.tokens, -1, kv.shape[1])
