"""Context parallelism with ``--deterministic`` on GPUs: the pieces of ``fixed.py``, each in consecutive rows.

Every product, norm and attention runs on one piece at a time, in the same shapes in every layout. Sums over tokens are
a tree over the pieces. Attention is that of ``context.py`` with a piece in place of a rank: to its own keys with the
causal mask, then to those of every other piece, in a fixed order. Features are not split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from kos.memory.arena import Arena
from kos.train.ops import Array
from kos.train.parallel.context import seen
from kos.train.parallel.fixed import FixedContext, FixedOrder, FixedTensor
from kos.train.parallel.tensor import Half

LEAST_ROWS_CHUNK = 4096  # tokens: shorter chunks make matrix products and attention slow


class RowOrder(FixedOrder):
    """Sums over the pieces of this rank, then over the ranks of cp."""

    def each(self, rows: int) -> list[slice]:
        """The rows of each piece, of so many in all."""
        n = rows // self.pieces
        return [slice(start, start + n) for start in range(0, rows, n)]

    def weight_gradient(
        self, d_out: Array, x: Array, d_weight: Array, arena: Arena, stacked: Sequence[slice] | None
    ) -> None:
        rows = self.each(len(x))

        def of_piece(piece: int, out: Array) -> None:
            self.ops.linear_weight_gradient(d_out[rows[piece]], x[rows[piece]], out, False, arena)

        self.tree(of_piece, d_weight, arena)
        self.over_ranks(self.cp, d_weight, arena)

    def rms_norm_backward(
        self, d_out: Array, x: Array, weight: Array, rstd: Array, dx: Array, d_weight: Array, arena: Arena
    ) -> None:
        rows = self.each(len(x))

        def of_piece(piece: int, out: Array) -> None:
            d_out_n, x_n, rstd_n, dx_n = (each[rows[piece]] for each in (d_out, x, rstd, dx))
            self.ops.rms_norm_backward(d_out_n, x_n, weight, rstd_n, dx_n, out, False, arena)

        self.tree(of_piece, d_weight, arena)
        self.over_ranks(self.cp, d_weight, arena)


class RowTensor(FixedTensor):
    """The layers' products, a piece at a time; this rank has all features."""

    order: RowOrder

    def column_linear(self, weights: Mapping[str, Array], name: str, x: Array, out: Array) -> None:
        for rows in self.order.each(len(x)):
            self.ops.linear(x[rows], weights[name], out[rows])

    def column_linear_backward(
        self, weights: Mapping[str, Array], name: str, d_out: Array, dx: Array, arena: Arena,
        beside: Callable[[], None],
    ) -> None:  # fmt: skip
        self.row_linear_backward(weights, name, d_out, dx)
        beside()

    def row_linear(
        self, weights: Mapping[str, Array], name: str, x: Array, term: Array, out: Array, residual: Array, half: Half,
        arena: Arena,
    ) -> Callable[[], None]:  # fmt: skip
        for rows in self.order.each(len(x)):
            self.ops.linear(x[rows], weights[name], out[rows], residual[rows])
        return lambda: None

    def row_linear_backward(self, weights: Mapping[str, Array], name: str, d_out: Array, dx: Array) -> None:
        for rows in self.order.each(len(d_out)):
            self.ops.linear_input_gradient(d_out[rows], weights[name], dx[rows])

    def logits(self, x: Array, table: Array, out: Array) -> None:
        self.ops.linear(x, table, out)

    def logits_backward(
        self, d_logits: Array, x: Array, table: Array, dx: Array, d_table: Array, accumulate: bool, arena: Arena
    ) -> None:
        self.ops.linear_input_gradient(d_logits, table, dx)
        self.ops.linear_weight_gradient(d_logits, x, d_table, accumulate, arena)

    def cross_entropy(
        self, logits: Array, targets: Array, losses: Array, arena: Arena, count: Array | None = None
    ) -> None:
        super(FixedTensor, self).cross_entropy(logits, targets, losses, arena, count)


class RowContext(FixedContext):
    """Attention of this rank's pieces to the pieces of all ranks."""

    order: RowOrder

    def mean_loss(self, losses: Array, count: Array, out: Array, arena: Arena) -> None:
        with arena.scope():
            of_all = losses
            if self.size > 1:
                of_all = arena.take((self.size * len(losses),), losses.dtype)
                self.axis.comm.all_gather(losses, of_all)
            self.ops.mean_loss(of_all, count, out)
        if self.axis.rank > 0:
            self.ops.zero(out)

    def attention(self, qkv: Array, heads: int, kv_heads: int, out: Array, log_sum_exp: Array, arena: Arena) -> None:
        ops = self.ops
        with arena.scope():
            kv = self._of_all(ops.keys_and_values(qkv, heads, kv_heads, arena), arena)
            for _, rows, lse in self._pieces(qkv, log_sum_exp):
                ops.attention(qkv[rows], heads, kv_heads, out[rows], lse, arena)
            merged = self._widen(out, arena)
            for piece, rows, lse in self._pieces(qkv, log_sum_exp):
                for owner, queries, keys in self._others(piece, lse.shape[-1]):
                    ops.attention_to(qkv[rows], kv[owner], heads, kv_heads, queries, keys, merged[rows], lse, arena)
            if merged is not out:
                ops.copy(merged, out)

    def attention_backward(
        self, d_out: Array, qkv: Array, out: Array, log_sum_exp: Array, heads: int, kv_heads: int, d_qkv: Array,
        arena: Arena,
    ) -> None:  # fmt: skip
        ops, pieces = self.ops, list(self._pieces(qkv, log_sum_exp))
        with arena.scope():
            mine = ops.keys_and_values(qkv, heads, kv_heads, arena)
            kv, wide = self._of_all(mine, arena), ops.statistics_dtype(qkv.dtype)
            for _, rows, lse in pieces:
                operands = d_out[rows], qkv[rows], out[rows], lse
                ops.attention_backward(*operands, heads, kv_heads, d_qkv[rows], arena)
            total = self._widen(d_qkv, arena)

            def of_piece(index: int, d_kv: Array) -> None:
                piece, rows, lse = pieces[index]
                ops.zero(d_kv[piece])
                for owner, queries, keys in self._others(piece, lse.shape[-1]):
                    ops.attention_to_backward(
                        d_out[rows], qkv[rows], kv[owner], out[rows], lse, heads, kv_heads, queries, keys, total[rows],
                        d_kv[owner], arena,
                    )  # fmt: skip

            d_kv = arena.take(kv.shape, wide)
            self.order.tree(of_piece, d_kv, arena)
            d_mine = d_kv.reshape(mine.shape) if self.size == 1 else arena.take(mine.shape, wide)
            if self.size > 1:
                self.order.scatter_over_ranks(self.axis, d_kv, d_mine, arena)
            ops.add_keys_and_values(d_mine, total)
            if total is not d_qkv:
                ops.copy(total, d_qkv)

    def _pieces(self, qkv: Array, log_sum_exp: Array) -> Iterator[tuple[int, slice, Array]]:
        """For each piece of this rank: its number, its rows, its part of ``log_sum_exp``."""
        samples = self.order.each(len(log_sum_exp))
        for piece, rows, here in zip(self.mine, self.order.each(len(qkv)), samples, strict=True):
            yield piece, rows, log_sum_exp[here]

    def _others(self, piece: int, length: int) -> list[tuple[int, slice, slice]]:
        """Every other piece, with the queries of ``piece`` and the keys that they attend to."""
        return [(owner, *seen(owner, piece, length)) for owner in range(self.order.split.tokens) if owner != piece]

    def _of_all(self, kv: Array, arena: Arena) -> Array:
        """Keys and values of all ranks, by piece."""
        of_all = kv
        if self.size > 1:
            of_all = arena.take((self.size * len(kv), *kv.shape[1:]), kv.dtype)
            self.axis.comm.all_gather(kv, of_all)
        return of_all.reshape(self.order.split.tokens, -1, kv.shape[1])
