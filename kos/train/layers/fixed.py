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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kos.errors import ConfigError
from kos.memory.arena import Arena
from kos.train.layers.products import Products, Stacked
from kos.train.ops import Array, Mask
from kos.train.parallel.context import ContextParallel, Masks
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


class FixedProducts(Products):
    """Products and sums in the order of ``split``, for one rank of tp and of ``cp``."""

    ops: Any
    bias_after_sum = by_piece = True

    def __init__(self, ops: Any, tp: TensorParallel, arena: Arena, split: Split, cp: Axis) -> None:
        super().__init__(ops, tp, arena)
        self.split, self.cp = split, cp
        self.parts, self.pieces = split.features // tp.size, split.tokens // cp.size

    # --- sums ------------------------------------------------------------------------------------------

    def tree(self, leaf: Callable[[int, Array], None], out: Array, first: int = 0, count: int = 0) -> None:
        """The sum over this rank's pieces of what ``leaf(piece, out)`` writes."""
        count = count or self.pieces
        if count == 1:
            leaf(first, out)
            return
        self.tree(leaf, out, first, count // 2)
        with self.arena.scope():
            right = self.arena.take(out.shape, out.dtype)
            self.tree(leaf, right, first + count // 2, count // 2)
            self.ops.add(out, right, out)

    def sum_pieces(self, leaf: Callable[[int, Array], None], out: Array) -> None:
        self.tree(leaf, out)
        self.over_ranks(self.cp, out)

    def over_ranks(self, axis: Axis, x: Array) -> None:
        """x = the sum over the ranks of ``axis``."""
        if axis.size > 1:
            with self.arena.scope():
                terms = self.arena.take((axis.size, *x.shape), x.dtype)
                axis.comm.all_gather(x, terms)
                self.ops.add_tree(terms, x)

    def scatter_over_ranks(self, axis: Axis, x: Array, out: Array) -> None:
        """out = this rank's part (first dimension) of the sum over ``axis``; with one rank it is ``x``."""
        if axis.size > 1:
            with self.arena.scope():
                terms = self.arena.take((axis.size, *out.shape), out.dtype)
                axis.comm.all_to_all(x, terms)
                self.ops.add_tree(terms, out)

    def start_sum(self, term_ND: Array, out_nD: Array, halves: Sequence[Half] | None) -> Callable[[], None]:
        """All at once: nothing overlaps."""
        self.scatter_over_ranks(self.tp.axis, term_ND, out_nD)
        return lambda: None

    def sum_of_products(self, a: Array, b: Array, out: Array) -> None:
        """out (n, m) = the sum of a[i] b[i]."""
        if len(a) == 1:
            self.ops.product(a[0], b[0], out)
            return
        with self.arena.scope():
            terms = self.arena.take((len(a), *out.shape), out.dtype)
            self.ops.product(a, b, terms)
            self.ops.add_tree(terms, out)

    def columns(self, x: Array, parts: int | None = None) -> Array:
        """(N, F) of ``empty_columns`` as (parts, F / parts, pieces, N / pieces)."""
        return x.T.reshape(parts or self.parts, -1, self.pieces, len(x) // self.pieces)

    def rows(self, x: Array) -> Array:
        """(N, D) as (pieces, N / pieces, D)."""
        return x.reshape(self.pieces, -1, x.shape[-1])

    # --- Linear and Norm -------------------------------------------------------------------------------

    def linear(
        self, weight: Array, x: Array, out: Array, stacked: Stacked, residual: Array | None = None,
        bias: Array | None = None, transposed: Any = None,
    ) -> None:  # fmt: skip
        if stacked is None:
            columns, w = self.columns(x), self._by_columns(weight)
            for piece, of_piece in enumerate(self.rows(out)):
                self.sum_of_products(columns[:, :, piece].swapaxes(1, 2), w, of_piece)
            for more in (residual, bias):
                if more is not None:
                    self.ops.add(out, more, out)
            return
        x = self.rows(x).swapaxes(1, 2)[:, None]
        for rows in stacked:  # of each part and piece (f, D) times (D, n)
            w = weight[rows].reshape(self.parts, -1, weight.shape[1])
            self.ops.product(w, x, self.columns(out[:, rows]).transpose(2, 0, 1, 3))
        if bias is not None:
            self.ops.add(out, bias, out)

    def input_gradient(self, weight: Array, d_out: Array, dx: Array, stacked: Stacked) -> None:
        if stacked is None:
            d = self.rows(d_out).swapaxes(1, 2)[:, None]
            self.ops.product(self._by_columns(weight), d, self.columns(dx).transpose(2, 0, 1, 3))
            return
        parts = self.parts

        def of_part(x: Array, out: Array) -> None:
            """The rows of ``x`` by part: (parts, rows / parts, columns), each with its rows of every stacked matrix."""
            for rows in stacked:
                self.ops.copy(x[rows].reshape(parts, -1, x.shape[1]), out[:, rows.start // parts : rows.stop // parts])

        with self.arena.scope():
            w = self.arena.take((parts, len(weight) // parts, weight.shape[1]), weight.dtype)
            of_part(weight, w)
            by_piece = d_out.T.reshape(len(weight), self.pieces, -1)
            d = self.arena.take((parts, len(weight) // parts, by_piece.shape[2]), d_out.dtype)
            for piece, out in enumerate(self.rows(dx)):
                of_part(by_piece[:, piece], d)
                self.sum_of_products(d.swapaxes(1, 2), w, out)

    def weight_gradient(self, d_out: Array, x: Array, d_weight: Array, accumulate: bool, stacked: Stacked) -> None:
        for rows in stacked or ():
            f = (rows.stop - rows.start) // self.parts
            for start in range(rows.start, rows.stop, f):
                d = self.columns(d_out[:, start : start + f], 1)[0].transpose(1, 0, 2)
                self.sum_of_products(d, self.rows(x), d_weight[start : start + f])
        if stacked is None:
            f = x.shape[1] // self.parts
            for part, columns in enumerate(self.columns(x)):
                into = d_weight[:, part * f : (part + 1) * f]
                self.sum_of_products(self.rows(d_out).swapaxes(1, 2), columns.transpose(1, 2, 0), into)
        self.over_ranks(self.cp, d_weight)

    def bias_gradient(self, d_out: Array, d_bias: Array, accumulate: bool, stacked: Stacked) -> None:
        """Part by part of column-parallel features; of a row-parallel matrix all, on every rank."""
        n, parts = len(d_out) // self.pieces, 1 if stacked is None else self.parts

        def of_piece(piece: int, out: Array) -> None:
            for rows in stacked or [slice(0, len(d_bias))]:
                f = (rows.stop - rows.start) // parts
                for at in range(rows.start, rows.stop, f):
                    of_part = d_out[piece * n : (piece + 1) * n, at : at + f]
                    self.ops.sum_rows(of_part, out[at : at + f], False, self.arena)

        self.sum_pieces(of_piece, d_bias)

    def norm_backward(
        self, d_out: Array, x: Array, weight: Array, rstd: Array, dx: Array, d_weight: Array, accumulate: bool
    ) -> None:  # fmt: skip
        """With the whole ``d_weight`` on every rank."""
        tp = self.tp.axis
        rows = len(x) * tp.size // self.pieces
        parts = self.pieces * math.gcd(self.split.features, rows) // tp.size
        self.ops.rms_norm_backward(d_out, x, weight, rstd, dx, d_weight, False, self.arena, parts)
        for axis in (tp, self.cp):
            self.over_ranks(axis, d_weight)

    def head_norm_backward(
        self, raw: Array, weight: Array, eps: float, heads: slice, dx: Array, d_weight: Array, accumulate: bool
    ) -> None:
        """With the whole ``d_weight`` on every rank: a tree over the parts, of trees over the pieces."""
        count = heads.stop - heads.start
        parts = math.gcd(self.parts, count)  # one if all heads have one norm
        n, of_part = len(raw) // self.pieces, count // parts

        def of_piece(piece: int, terms: Array) -> None:
            rows = slice(piece * n, (piece + 1) * n)
            for part, term in enumerate(terms):
                start = heads.start + part * of_part
                some = slice(start, start + of_part)
                self.ops.head_norm_backward(raw[rows], weight, eps, some, dx[rows], term, False, self.arena)

        with self.arena.scope():
            terms = self.arena.take((parts, *d_weight.shape), d_weight.dtype)
            self.sum_pieces(of_piece, terms)
            self.ops.add_tree(terms, d_weight)
        self.over_ranks(self.tp.axis, d_weight)

    def _by_columns(self, weight: Array) -> Array:
        """(D, F) as (parts, F / parts, D)."""
        return weight.reshape(len(weight), self.parts, -1).transpose(1, 2, 0)

    # --- Embedding and Head ----------------------------------------------------------------------------

    def embedding_backward(self, d_out_ND: Array, tokens_N: Array, d_table_vD: Array, accumulate: bool) -> None:
        """Of the tokens of all ranks, on each that holds the rows."""
        cp = self.cp
        with self.arena.scope():
            if cp.size > 1:
                mine = tokens_N, d_out_ND
                tokens_N, d_out_ND = (self.arena.take((cp.size * len(x), *x.shape[1:]), x.dtype) for x in mine)
                cp.comm.all_gather(mine[0], tokens_N)
                cp.comm.all_gather(mine[1], d_out_ND)
            super().embedding_backward(d_out_ND, tokens_N, d_table_vD, accumulate)

    def chunks(self, rows: int, most: int) -> list[list[slice]]:
        """Equal ones."""
        of_piece = rows // self.pieces
        size = next(n for n in range(min(most, of_piece), 0, -1) if of_piece % n == 0)
        return [
            [slice(at, at + size) for at in range(start, start + of_piece, size)] for start in range(0, rows, of_piece)
        ]

    def _by_vocabulary(self, logits_nv: Array) -> Array:
        """(n, v) as (parts, n, v / parts)."""
        return logits_nv.reshape(len(logits_nv), self.parts, -1).swapaxes(0, 1)

    def logits(self, x: Array, table_vD: Array, out_nv: Array) -> None:
        table = table_vD.reshape(self.parts, -1, table_vD.shape[1])
        self.ops.product(x, table.swapaxes(1, 2), self._by_vocabulary(out_nv))

    def logits_backward(
        self, d_logits_nv: Array, x: Array, table_vD: Array, dx: Array, d_table_vD: Array, accumulate: bool
    ) -> None:  # fmt: skip
        table, d = table_vD.reshape(self.parts, -1, table_vD.shape[1]), self._by_vocabulary(d_logits_nv)
        self.sum_of_products(d, table, dx)
        with self.arena.scope():
            fresh = self.arena.take(table.shape, table.dtype) if accumulate else d_table_vD.reshape(table.shape)
            self.ops.product(d.swapaxes(1, 2), x, fresh)
            if accumulate:
                self.ops.add(fresh.reshape(d_table_vD.shape), d_table_vD, d_table_vD)

    def cross_entropy(self, logits_Nv: Array, targets_N: Array, losses_N: Array, count: Array | None = None) -> None:
        tp, width = self.tp, logits_Nv.shape[1] // self.parts
        with self.arena.scope():
            mine = self.arena.take((self.parts, 3, len(targets_N)), losses_N.dtype)
            of_all = mine if tp.size == 1 else self.arena.take((tp.size * self.parts, *mine.shape[1:]), mine.dtype)
            for part in range(self.parts):
                columns = logits_Nv[:, part * width : (part + 1) * width]
                self.ops.logit_statistics(columns, targets_N, tp.first + part * width, mine[part], self.arena)
            if tp.size > 1:
                tp.axis.comm.all_gather(mine, of_all)
            self.ops.cross_entropy_of_parts(logits_Nv, targets_N, tp.first, of_all, count, losses_N, self.arena)


class FixedContext(ContextParallel):
    """``ContextParallel`` in a fixed order: a rank's queries see gathered keys, chunk by chunk."""

    ops: Any

    def __init__(self, sums: FixedProducts) -> None:
        super().__init__(sums.ops, sums.cp, sums.pieces)
        self.sums = sums

    def mean_loss(self, losses: Array, count: Array, out: Array, arena: Arena) -> None:
        """Of the tokens of all ranks, on the first; 0 on the others."""
        with arena.scope():
            terms = arena.take((self.pieces, 1), out.dtype)
            for piece, of_piece in enumerate(losses.reshape(self.pieces, -1)):
                self.ops.mean_loss(of_piece, count, terms[piece])
            self.ops.add_tree(terms, out)
            self.sums.over_ranks(self.axis, out)
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

    def _masks(self, starts: Array | None, window: int | None, samples: int, length: int, arena: Arena) -> Masks:
        """One mask of all pieces, for the keys of the whole sequence in their order."""
        if self.chunks == 2:
            return super()._masks(starts, window, samples, length, arena)
        whole = np.arange(length * self.chunks // 2, dtype=np.int32)
        first_key = arena.take((self.pieces * samples, length), whole.dtype)
        last_query = arena.take((self.pieces * samples, len(whole)), whole.dtype)
        for index, piece in enumerate(self.mine):
            rows = slice(index * samples, (index + 1) * samples)
            of_piece = None if starts is None else starts.reshape(-1, length)[rows]
            mask = Mask(first_key[rows], last_query[rows])
            self.ops.attention_mask(of_piece, window, mask, self.places(piece, length), whole)
        return [[Mask(first_key, last_query)]]

    def attention(
        self, qkv: Array, heads: int, kv_heads: int, out: Array, log_sum_exp: Array, arena: Arena, masks: Masks = None
    ) -> None:
        mask = masks and masks[0][0]
        if self.chunks == 2:
            self.ops.attention(qkv, heads, kv_heads, out, log_sum_exp, arena, mask)
            return
        with arena.scope():
            kv = self._whole(qkv, heads, kv_heads, len(log_sum_exp) // self.pieces, arena)
            for chunks in self._each(log_sum_exp):
                for chunk in chunks:
                    self.ops.attention_after(qkv, kv, heads, kv_heads, *chunk, out, log_sum_exp, arena, mask)

    def attention_backward(
        self, d_out: Array, qkv: Array, out: Array, log_sum_exp: Array, heads: int, kv_heads: int, d_qkv: Array,
        arena: Arena, masks: Masks = None,
    ) -> None:  # fmt: skip
        mask = masks and masks[0][0]
        if self.chunks == 2:
            self.ops.attention_backward(d_out, qkv, out, log_sum_exp, heads, kv_heads, d_qkv, arena, mask)
            return
        ops, samples = self.ops, len(log_sum_exp) // self.pieces
        each = self._each(log_sum_exp)

        def of_piece(piece: int, d_kv: Array) -> None:
            ops.zero(d_kv)
            for here, queries, before in each[piece]:
                ops.attention_after_backward(
                    d_out, qkv, kv, out, log_sum_exp, heads, kv_heads, here, queries, before, d_qkv, d_kv, True, arena,
                    mask,
                )  # fmt: skip

        with arena.scope():
            kv = self._whole(qkv, heads, kv_heads, samples, arena)
            d_kv = arena.take(kv.shape, kv.dtype)
            self.sums.tree(of_piece, d_kv)
            d_mine = ops.keys_and_values(d_qkv, heads, kv_heads, arena)
            terms = arena.take((self.size, *d_mine.shape), d_mine.dtype)
            for chunk, held in self._chunks(d_kv, terms, samples):
                ops.copy(chunk, held)
            if self.size == 1:
                ops.copy(terms[0], d_mine)
            else:
                self.sums.scatter_over_ranks(self.axis, terms, d_mine)
