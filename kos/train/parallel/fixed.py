"""``--deterministic`` within a layer: the same bits for every number of tensor- and context-parallel ranks.

A sum's bits depend on its order, and a matrix product's also on its shape. So one rank computes what many would:

- *features*: heads, intermediate features and the vocabulary are split in ``Split.features`` equal parts. A product is
  computed part by part. A sum over features is ``Ops.add_tree``, a binary tree over the parts.
- *tokens*: a sequence is split in chunks, and chunks i and last - i are a piece (the zigzag of ``parallel.context``).
  A micro-batch of N tokens is held piece by piece: (pieces, samples, 2, chunk), so that a rank's tokens are a run of
  rows. Products are computed piece by piece, and a sum over tokens is a tree over the pieces.

A rank of tp or cp holds a power of two of the parts or pieces, one after another: a whole subtree. Ranks exchange the
sums of their subtrees, and each adds the rest of the tree. The same shapes give the same bits: OpenBLAS's matrix
products depend neither on alignment nor on strides, as long as there is one thread.
Numerical reproducibility by a fixed reduction tree: Villa et al. 2009 (Cray User Group).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kos.errors import ConfigError
from kos.memory.arena import Arena
from kos.train.ops import Array
from kos.train.parallel.context import ContextParallel
from kos.train.parallel.mesh import Axis
from kos.train.parallel.tensor import Half, TensorParallel

PARTS = 8
LEAST_CHUNK = 64  # tokens: shorter ones make products and blocks of queries small


class Split(NamedTuple):
    """The numbers of parts of features, and of pieces of a sequence: powers of two."""

    features: int = 1
    tokens: int = 1

    @classmethod
    def of(cls, sizes: Sequence[int], seq_len: int, least: int = LEAST_CHUNK) -> Split:
        """For a model whose ``sizes`` tensor parallelism divides; depends on no layout."""
        pieces = (n for n in (8, 4, 2) if seq_len % (2 * n) == 0 and seq_len // (2 * n) >= least)
        return cls(math.gcd(PARTS, *sizes), next(pieces, 1))

    def check(self, tp: int, cp: int, seq_len: int, least: int = LEAST_CHUNK) -> None:
        """ConfigError if a rank would not hold whole subtrees."""
        if self.features % tp:
            why = "the largest of 8, 4, 2 and 1 that divides heads, key/value heads, intermediate size and vocabulary"
            raise ConfigError(f"--deterministic --tp {tp}: expected a divisor of {self.features}, {why}, got {tp}")
        if self.tokens % cp:
            length = f"--seq-len to be a multiple of {2 * cp} and at least {2 * cp * least}, got {seq_len}"
            expected = length if cp in (2, 4, 8) else f"--cp 1, 2, 4 or 8, got {cp}"
            raise ConfigError(f"--deterministic --cp {cp}: expected {expected}")


class FixedOrder:
    """Sums and products in the order of ``split``, for one rank of ``tp`` and ``cp``."""

    def __init__(self, ops: Any, split: Split, tp: Axis, cp: Axis) -> None:
        self.ops, self.split, self.tp, self.cp = ops, split, tp, cp
        self.parts, self.pieces = split.features // tp.size, split.tokens // cp.size

    def tree(
        self, leaf: Callable[[int, Array], None], out: Array, arena: Arena, first: int = 0, count: int = 0
    ) -> None:
        """The sum over this rank's pieces of what ``leaf(piece, out)`` writes."""
        count = count or self.pieces
        if count == 1:
            leaf(first, out)
            return
        self.tree(leaf, out, arena, first, count // 2)
        with arena.scope():
            right = arena.take(out.shape, out.dtype)
            self.tree(leaf, right, arena, first + count // 2, count // 2)
            self.ops.add(out, right, out)

    def over_ranks(self, axis: Axis, x: Array, arena: Arena) -> None:
        """x = the sum over the ranks of ``axis``."""
        if axis.size > 1:
            with arena.scope():
                terms = arena.take((axis.size, *x.shape), x.dtype)
                axis.comm.all_gather(x, terms)
                self.ops.add_tree(terms, x)

    def scatter_over_ranks(self, axis: Axis, x: Array, out: Array, arena: Arena) -> None:
        """out = this rank's part (first dimension) of the sum over ``axis``; with one rank it is ``x``."""
        if axis.size > 1:
            with arena.scope():
                terms = arena.take((axis.size, *out.shape), out.dtype)
                axis.comm.all_to_all(x, terms)
                self.ops.add_tree(terms, out)

    def sum_of_products(self, a: Array, b: Array, out: Array, arena: Arena) -> None:
        """out (n, m) = the sum of a[i] b[i]."""
        if len(a) == 1:
            self.ops.product(a[0], b[0], out)
            return
        with arena.scope():
            terms = arena.take((len(a), *out.shape), out.dtype)
            self.ops.product(a, b, terms)
            self.ops.add_tree(terms, out)

    def columns(self, x: Array, parts: int | None = None) -> Array:
        """(N, F) of ``empty_columns`` as (parts, F / parts, pieces, N / pieces)."""
        return x.T.reshape(parts or self.parts, -1, self.pieces, len(x) // self.pieces)

    def rows(self, x: Array) -> Array:
        """(N, D) as (pieces, N / pieces, D)."""
        return x.reshape(self.pieces, -1, x.shape[-1])

    def weight_gradient(
        self, d_out: Array, x: Array, d_weight: Array, arena: Arena, stacked: Sequence[slice] | None
    ) -> None:
        """``Ops.linear_weight_gradient``.  ``stacked``: the rows of each matrix of a group; None: split by columns."""
        for rows in stacked or ():
            f = (rows.stop - rows.start) // self.parts
            for start in range(rows.start, rows.stop, f):
                d = self.columns(d_out[:, start : start + f], 1)[0].transpose(1, 0, 2)
                self.sum_of_products(d, self.rows(x), d_weight[start : start + f], arena)
        if stacked is None:
            f = x.shape[1] // self.parts
            for part, columns in enumerate(self.columns(x)):
                into = d_weight[:, part * f : (part + 1) * f]
                self.sum_of_products(self.rows(d_out).swapaxes(1, 2), columns.transpose(1, 2, 0), into, arena)
        self.over_ranks(self.cp, d_weight, arena)

    def rms_norm_backward(
        self, d_out: Array, x: Array, weight: Array, rstd: Array, dx: Array, d_weight: Array, arena: Arena
    ) -> None:
        """``Ops.rms_norm_backward``, with the whole ``d_weight`` on every rank."""
        rows = len(x) * self.tp.size // self.pieces
        parts = self.pieces * math.gcd(self.split.features, rows) // self.tp.size
        self.ops.rms_norm_backward(d_out, x, weight, rstd, dx, d_weight, False, arena, parts)
        for axis in (self.tp, self.cp):
            self.over_ranks(axis, d_weight, arena)


class FixedTensor(TensorParallel):
    """``TensorParallel`` in a fixed order.  ``stacked[name]`` are the rows of each matrix in the group ``name``."""

    ops: Any

    def __init__(self, order: FixedOrder, first_row: int, stacked: Mapping[str, Sequence[slice]]) -> None:
        super().__init__(order.ops, order.tp, first_row)
        self.order, self.parts, self.stacked = order, order.parts, stacked

    def column_linear(self, weights: Mapping[str, Array], name: str, x_ND: Array, out_NF: Array) -> None:
        """Of each part and piece (f, D) times (D, n)."""
        x, weight = self.order.rows(x_ND).swapaxes(1, 2)[:, None], weights[name]
        for rows in self.stacked[name]:
            w = weight[rows].reshape(self.parts, -1, weight.shape[1])
            self.ops.product(w, x, self.order.columns(out_NF[:, rows]).transpose(2, 0, 1, 3))

    def column_linear_backward(
        self, weights: Mapping[str, Array], name: str, d_out_NF: Array, dx_nD: Array, arena: Arena,
        beside: Callable[[], None],
    ) -> None:  # fmt: skip
        P, weight = self.parts, weights[name]

        def of_part(x: Array, out: Array) -> None:
            """The rows of ``x`` by part: (P, rows / P, columns), each with its rows of every stacked matrix."""
            for rows in self.stacked[name]:
                self.ops.copy(x[rows].reshape(P, -1, x.shape[1]), out[:, rows.start // P : rows.stop // P])

        with arena.scope():
            term_ND = dx_nD if self.size == 1 else self.empty_rows(dx_nD, arena)
            w = arena.take((P, len(weight) // P, weight.shape[1]), weight.dtype)
            of_part(weight, w)
            by_piece = d_out_NF.T.reshape(len(weight), self.order.pieces, -1)
            d = arena.take((P, len(weight) // P, by_piece.shape[2]), d_out_NF.dtype)
            for piece, out in enumerate(self.order.rows(term_ND)):
                of_part(by_piece[:, piece], d)
                self.order.sum_of_products(d.swapaxes(1, 2), w, out, arena)
            self.order.scatter_over_ranks(self.axis, term_ND, dx_nD, arena)
        beside()

    def row_linear(
        self, weights: Mapping[str, Array], name: str, x_NF: Array, term_ND: Array, out_nD: Array, residual_nD: Array,
        half: Half, arena: Arena,
    ) -> Callable[[], None]:  # fmt: skip
        with arena.scope():
            term_ND = out_nD if self.size == 1 else term_ND
            x, w = self.order.columns(x_NF), self._by_columns(weights[name])
            for piece, out in enumerate(self.order.rows(term_ND)):
                self.order.sum_of_products(x[:, :, piece].swapaxes(1, 2), w, out, arena)
            self.order.scatter_over_ranks(self.axis, term_ND, out_nD, arena)
            self.ops.add(out_nD, residual_nD, out_nD)
        return lambda: None

    def row_linear_backward(self, weights: Mapping[str, Array], name: str, d_out_ND: Array, dx_NF: Array) -> None:
        d = self.order.rows(d_out_ND).swapaxes(1, 2)[:, None]
        self.ops.product(self._by_columns(weights[name]), d, self.order.columns(dx_NF).transpose(2, 0, 1, 3))

    def weight_gradient(self, name: str, d_out: Array, x: Array, into: Any, arena: Arena) -> None:
        self.order.weight_gradient(d_out, x, into.of[name], arena, self.stacked.get(name))
        into.final(name)

    def _by_columns(self, weight: Array) -> Array:
        """(D, F) as (parts, F / parts, D)."""
        return weight.reshape(len(weight), self.parts, -1).transpose(1, 2, 0)

    def scatter_sum(self, term_ND: Array, out_nD: Array, arena: Arena) -> None:
        self.order.scatter_over_ranks(self.axis, term_ND, out_nD, arena)

    # --- vocabulary ------------------------------------------------------------------------------------

    def _by_vocabulary(self, logits_nv: Array) -> Array:
        """(n, v) as (parts, n, v / parts)."""
        return logits_nv.reshape(len(logits_nv), self.parts, -1).swapaxes(0, 1)

    def logits(self, x_nD: Array, table_vD: Array, out_nv: Array) -> None:
        table = table_vD.reshape(self.parts, -1, table_vD.shape[1])
        self.ops.product(x_nD, table.swapaxes(1, 2), self._by_vocabulary(out_nv))

    def logits_backward(
        self, d_logits_nv: Array, x_nD: Array, table_vD: Array, dx_nD: Array, d_table_vD: Array, accumulate: bool,
        arena: Arena,
    ) -> None:  # fmt: skip
        """This rank's term of ``dx_nD``; the rows are of one piece."""
        table, d = table_vD.reshape(self.parts, -1, table_vD.shape[1]), self._by_vocabulary(d_logits_nv)
        self.order.sum_of_products(d, table, dx_nD, arena)
        with arena.scope():
            fresh = arena.take(table.shape, table.dtype) if accumulate else d_table_vD.reshape(table.shape)
            self.ops.product(d.swapaxes(1, 2), x_nD, fresh)
            if accumulate:
                self.ops.add(fresh.reshape(d_table_vD.shape), d_table_vD, d_table_vD)

    def embedding_backward(
        self, d_out_ND: Array, tokens_N: Array, d_table_vD: Array, accumulate: bool, arena: Arena
    ) -> None:
        """Of the tokens of all ranks, on each that holds the rows."""
        cp = self.order.cp
        with arena.scope():
            if cp.size > 1:
                mine = tokens_N, d_out_ND
                tokens_N, d_out_ND = (arena.take((cp.size * len(x), *x.shape[1:]), x.dtype) for x in mine)
                cp.comm.all_gather(mine[0], tokens_N)
                cp.comm.all_gather(mine[1], d_out_ND)
            super().embedding_backward(d_out_ND, tokens_N, d_table_vD, accumulate, arena)

    def cross_entropy(
        self, logits_Nv: Array, targets_N: Array, losses_N: Array, arena: Arena, count: Array | None = None
    ) -> None:
        width = logits_Nv.shape[1] // self.parts
        with arena.scope():
            mine = arena.take((self.parts, 3, len(targets_N)), losses_N.dtype)
            of_all = mine if self.size == 1 else arena.take((self.size * self.parts, *mine.shape[1:]), mine.dtype)
            for part in range(self.parts):
                columns = logits_Nv[:, part * width : (part + 1) * width]
                self.ops.logit_statistics(columns, targets_N, self._first + part * width, mine[part], arena)
            if self.size > 1:
                self.axis.comm.all_gather(mine, of_all)
            self.ops.cross_entropy_of_parts(logits_Nv, targets_N, self._first, of_all, count, losses_N, arena)


class FixedContext(ContextParallel):
    """``ContextParallel`` in a fixed order: a rank's queries see gathered keys, chunk by chunk."""

    ops: Any

    def __init__(self, order: FixedOrder) -> None:
        super().__init__(order.ops, order.cp, order.pieces)
        self.order = order

    def mean_loss(self, losses: Array, count: Array, out: Array, arena: Arena) -> None:
        """Of the tokens of all ranks, on the first; 0 on the others."""
        with arena.scope():
            terms = arena.take((self.pieces, 1), out.dtype)
            for piece, of_piece in enumerate(losses.reshape(self.pieces, -1)):
                self.ops.mean_loss(of_piece, count, terms[piece])
            self.ops.add_tree(terms, out)
            self.order.over_ranks(self.axis, out, arena)
        if self.axis.rank > 0:
            self.ops.zero(out)

    def _each(self, log_sum_exp: Array) -> list[list[tuple[slice, slice, int]]]:
        """Of each piece its two chunks, the later one first: samples, queries, how many keys come before."""
        samples, c = len(log_sum_exp) // self.pieces, log_sum_exp.shape[-1] // 2
        found = []
        for index, p in enumerate(self.mine):
            here = slice(index * samples, (index + 1) * samples)
            found.append([(here, slice(c, 2 * c), (self.chunks - 1 - p) * c), (here, slice(0, c), p * c)])
        return found

    def _chunks(self, whole: Array, of_ranks: Array, samples: int) -> Iterator[tuple[Array, Array]]:
        """Each chunk twice: in ``whole`` (2 K d, samples T), in the order of the sequence, and as a rank holds it."""
        whole = whole.reshape(len(whole), samples, self.chunks, -1)
        of_ranks = of_ranks.reshape(self.size, len(whole), self.pieces, samples, 2, -1)
        for piece in range(self.size * self.pieces):
            held = of_ranks[piece // self.pieces, :, piece % self.pieces]
            yield whole[:, :, piece], held[:, :, 0]
            yield whole[:, :, self.chunks - 1 - piece], held[:, :, 1]

    def _whole(self, qkv: Array, heads: int, kv_heads: int, samples: int, arena: Arena) -> Array:
        """Keys and values of all ranks in the order of the sequence."""
        kv = self.ops.keys_and_values(qkv, heads, kv_heads, arena)
        whole = arena.take((len(kv), self.size * kv.shape[1]), kv.dtype)
        with arena.scope():
            of_all = kv[None] if self.size == 1 else arena.take((self.size, *kv.shape), kv.dtype)
            if self.size > 1:
                self.axis.comm.all_gather(kv, of_all)
            for chunk, held in self._chunks(whole, of_all, samples):
                self.ops.copy(held, chunk)
        return whole

    def attention(self, qkv: Array, heads: int, kv_heads: int, out: Array, log_sum_exp: Array, arena: Arena) -> None:
        if self.chunks == 2:
            self.ops.attention(qkv, heads, kv_heads, out, log_sum_exp, arena)
            return
        with arena.scope():
            kv = self._whole(qkv, heads, kv_heads, len(log_sum_exp) // self.pieces, arena)
            for chunks in self._each(log_sum_exp):
                for chunk in chunks:
                    self.ops.attention_after(qkv, kv, heads, kv_heads, *chunk, out, log_sum_exp, arena)

    def attention_backward(
        self, d_out: Array, qkv: Array, out: Array, log_sum_exp: Array, heads: int, kv_heads: int, d_qkv: Array,
        arena: Arena,
    ) -> None:  # fmt: skip
        if self.chunks == 2:
            self.ops.attention_backward(d_out, qkv, out, log_sum_exp, heads, kv_heads, d_qkv, arena)
            return
        ops, samples = self.ops, len(log_sum_exp) // self.pieces
        each = self._each(log_sum_exp)

        def of_piece(piece: int, d_kv: Array) -> None:
            ops.zero(d_kv)
            for here, queries, before in each[piece]:
                ops.attention_after_backward(
                    d_out, qkv, kv, out, log_sum_exp, heads, kv_heads, here, queries, before, d_qkv, d_kv, True, arena
                )

        with arena.scope():
            kv = self._whole(qkv, heads, kv_heads, samples, arena)
            d_kv = arena.take(kv.shape, kv.dtype)
            self.order.tree(of_piece, d_kv, arena)
            d_mine = ops.keys_and_values(d_qkv, heads, kv_heads, arena)
            terms = arena.take((self.size, *d_mine.shape), d_mine.dtype)
            for chunk, held in self._chunks(d_kv, terms, samples):
                ops.copy(chunk, held)
            if self.size == 1:
                ops.copy(terms[0], d_mine)
            else:
                self.order.scatter_over_ranks(self.axis, terms, d_mine, arena)
