"""``--deterministic`` within a layer: the same bits for every number of tensor- and context-parallel ranks.

A sum's bits depend on its order, and a matrix product's also on its shape. So one rank computes what many would:

- *features*: heads, intermediate features and the vocabulary are split in ``Split.features`` equal parts. A sum over
  features is a binary tree over the parts, in float32 on GPUs. Other products are computed part by part too, unless the
  parts have the same bits in one product (``Ops.bits_of_parts``).
- *tokens*: a sequence is split in chunks, and chunks i and last - i are a piece (the zigzag of ``parallel.context``).
  A micro-batch of N tokens is held piece by piece: (pieces, samples, 2, chunk), so that a rank's tokens are a run of
  rows. Everything is computed piece by piece, and a sum over tokens is a tree over the pieces. On a GPU with parts of
  features, a weight gradient's sum over the tokens of a piece is itself a tree (``PartsOps.parts_of_tokens``).

A rank of tp or cp holds a power of two of the parts or pieces, one after another: a whole subtree. Ranks exchange the
sums of their subtrees, and each adds the rest of the tree. The same shapes give the same bits: OpenBLAS's matrix
products depend neither on alignment nor on strides, as long as there is one thread, and ``cublaslt.Matmul`` chooses an
algorithm for a shape alone.
Numerical reproducibility by a fixed reduction tree: Villa et al. 2009 (Cray User Group).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kos.errors import SettingError
from kos.memory.arena import Arena
from kos.train.ops import Array, Normalize
from kos.train.ops.linear import LinearOps, bias_of
from kos.train.parallel.mesh import ALONE, Axis

ORDER = 3
"""The number of this order on CPUs. It is another after a change of the bits: then older runs cannot be resumed."""

PARTS = 8
LEAST_CHUNK = 64  # tokens: shorter ones make products and blocks of queries small
LEAST_CHUNK_ON_GPUS = 4096  # tokens: shorter ones make matrix products and attention slow


class Split(NamedTuple):
    """The numbers of parts of features, and of pieces of a sequence: powers of two."""

    features: int = 1
    tokens: int = 1

    @classmethod
    def of(cls, features: int, seq_len: int, least: int = LEAST_CHUNK) -> Split:
        """With so many parts of features; depends on no layout."""
        pieces = (n for n in (8, 4, 2) if seq_len % (2 * n) == 0 and seq_len // (2 * n) >= least)
        return cls(features, next(pieces, 1))

    def check(self, tp: int, cp: int, seq_len: int, least: int = LEAST_CHUNK) -> None:
        """ConfigError if a rank would not hold whole subtrees."""
        if self.features % tp:
            key, expected = f"--deterministic --tp {tp}", f"--deterministic-parts to be a multiple of {tp}"
            raise SettingError(key, expected, self.features, also=["tp", "deterministic_parts"])
        if self.tokens % cp:
            length = f"--seq-len to be a multiple of {2 * cp} and at least {2 * cp * least}"
            expected, got = (length, seq_len) if cp in (2, 4, 8) else ("--cp 1, 2, 4 or 8", cp)
            raise SettingError(f"--deterministic --cp {cp}", expected, got, also=["cp", "seq_len"])


def most_parts(sizes: Sequence[int]) -> int:
    """The most parts of features of a model whose ``sizes`` tensor parallelism divides: 8, 4, 2 or 1."""
    return math.gcd(PARTS, *sizes)


Leaf = Callable[[int, Array], None]
"""Writes the term of a number of a sum to an array."""


def sum_tree(ops: Any, arena: Arena, leaf: Leaf, out: Array, count: int, first: int = 0) -> None:
    """out = the sum of the ``count`` terms from ``first`` on, a power of two, as a binary tree."""
    if count == 1:
        leaf(first, out)
        return
    sum_tree(ops, arena, leaf, out, count // 2, first)
    with arena.scope():
        right = arena.take(out.shape, out.dtype)
        sum_tree(ops, arena, leaf, right, count // 2, first + count // 2)
        ops.add(out, right, out)


def sum_over_ranks(ops: Any, arena: Arena, axis: Axis, x: Array) -> None:
    """x = the sum over the ranks of ``axis``, as a binary tree."""
    if axis.size > 1:
        with arena.scope():
            terms = arena.take((axis.size, *x.shape), x.dtype)
            axis.comm.all_gather(x, terms)
            ops.add_tree(terms, x)


def start_scatter_sum(ops: Any, arena: Arena, axis: Axis, x: Array, out: Array) -> Callable[[], Array]:
    """Start the sum of ``x`` over the ranks of ``axis``, as a binary tree. ``out``: this rank's part (first dimension).

    The terms are added in the dtype of ``x``, and the sum is rounded once to the dtype of ``out``. The returned
    function waits for the terms, adds them, and returns ``out``. Until then, the terms occupy memory of ``arena``.
    """
    terms = arena.take((axis.size, *out.shape), x.dtype)
    work = axis.comm.all_to_all(x, terms, async_op=True)

    def wait() -> Array:
        work.wait()
        ops.add_tree(terms, out)
        return out

    return wait


def scatter_sum(ops: Any, arena: Arena, axis: Axis, x: Array, out: Array) -> None:
    """As ``start_scatter_sum``, but ``out`` is complete on return."""
    with arena.scope():
        terms = arena.take((axis.size, *out.shape), x.dtype)
        axis.comm.all_to_all(x, terms)
        ops.add_tree(terms, out)


class Matrix(NamedTuple):
    """A matrix (out, in) whose ``parts`` are multiplied apart: slices along ``dim``, one of each stacked matrix.

    ``biased``: whether there is a bias. One rank of tp adds it, but all ranks have to choose the same kernels.
    """

    array: Array
    dim: int
    parts: list[list[slice]]
    biased: bool

    def slices(self) -> list[slice]:
        return [each for part in self.parts for each in part]


class FixedOrder(LinearOps):
    """``inner`` in the order of ``split``, for one rank of ``tp`` and of ``cp``.

    ``matrices``: by name the dimension of a matrix that ranks of tp split, and this rank's slice of each matrix that is
    stacked in it. ``arena`` is scratch memory.
    """

    def __init__(
        self, inner: Any, arena: Arena, split: Split, tp: Axis, cp: Axis,
        matrices: Mapping[str, tuple[int, Sequence[slice]]],
    ) -> None:  # fmt: skip
        super().__init__(inner)
        self.arena, self.split, self.tp, self.cp, self.matrices = arena, split, tp, cp, matrices
        self.parts, self.pieces = split.features // tp.size, split.tokens // cp.size

    @property
    def of_head(self) -> FixedOrder:
        of_piece = self.split._replace(tokens=1)
        return FixedOrder(self.inner.of_head, self.arena, of_piece, self.tp, ALONE, self.matrices)

    @property
    def of_adapters(self) -> FixedOrder:
        return FixedOrder(self.inner.of_adapters, self.arena, self.split, self.tp, self.cp, self.matrices)

    def matrix(self, of: Mapping[str, Array], name: str) -> Any:
        if self.split.features == 1 or name not in self.matrices:
            return self.inner.matrix(of, name)
        dim, members = self.matrices[name]
        each = [equal_parts(member, self.parts) for member in members]
        return Matrix(of[name], dim, [[*part] for part in zip(*each, strict=True)], bias_of(name) in of)

    def rows(self, count: int) -> list[slice]:
        """The rows of each piece, of ``count`` in all."""
        return equal_parts(slice(0, count), self.pieces)

    def head_rows(self, count: int, most: int) -> int:
        """The largest divisor of ``count`` up to ``most``; a multiple of ``head_multiple`` if ``count`` is one."""
        step = math.gcd(self.inner.head_multiple, count)
        return next(n for n in range(min(most, count) // step * step, 0, -step) if count % n == 0)

    def sum_pieces(self, leaf: Leaf, out: Array) -> None:
        sum_tree(self.inner, self.arena, leaf, out, self.pieces)
        sum_over_ranks(self.inner, self.arena, self.cp, out)

    # --- linear layers -----------------------------------------------------------------------------------

    def linear(
        self, x: Array, weight: Any, out: Array, residual: Array | None = None, bias: Array | None = None
    ) -> None:
        """``Ops.linear``. The first part of a sum over features has the bias."""
        for n in self.rows(len(x)):
            self._linear(x[n], weight, out[n], None if residual is None else residual[n], bias)

    def _linear(self, x: Array, weight: Any, out: Array, residual: Array | None, bias: Array | None) -> None:
        ops, w = self.inner, _array(weight)
        if self._at_once(weight, 1):
            ops.linear(x, w, out, residual, bias)
        elif weight.dim == 0:
            for f in weight.slices():
                ops.linear(x, w[f], self._columns(out, f), None, None if bias is None else bias[f])
        else:

            def product(k: slice, term: Array, add: bool, more: Array | None) -> None:
                x_k, w_k = self._columns(x, k), self._columns(w, k)
                if add:
                    ops.low_rank(x_k, w_k, term, True, 1.0, True, self.arena)
                else:
                    ops.linear(x_k, w_k, term, None, more)

            if weight.biased or not ops.product_of_parts(x, w, out, True, weight.parts, self.arena):
                self._sum(weight, out, product, bias)
            if residual is not None:
                ops.add(out, residual, out)

    def linear_input_gradient(self, d_out: Array, weight: Any, dx: Array) -> None:
        """``Ops.linear_input_gradient``."""
        for n in self.rows(len(d_out)):
            self._input_gradient(d_out[n], weight, dx[n])

    def _input_gradient(self, d_out: Array, weight: Any, dx: Array) -> None:
        ops, w = self.inner, _array(weight)
        if self._at_once(weight, 0):
            ops.linear_input_gradient(d_out, w, dx)
        elif weight.dim == 0:

            def product(f: slice, term: Array, add: bool, _: None) -> None:
                ops.low_rank(self._columns(d_out, f), w[f], term, False, 1.0, add, self.arena)

            if not ops.product_of_parts(d_out, w, dx, False, weight.parts, self.arena):
                self._sum(weight, dx, product)
        else:
            for k in weight.slices():
                ops.linear_input_gradient(d_out, self._columns(w, k), self._columns(dx, k))

    def _sum(
        self, weight: Matrix, out: Array, product: Callable[[slice, Array, bool, Any], None], bias: Array | None = None
    ) -> None:
        """out = the sum of what ``product(slice, term, add, bias)`` writes, or adds: a tree over parts; in a part, one
        by one.

        The first term has the ``bias``, in the dtype of the terms, the others None.
        """

        def of_part(part: int, term: Array, add: bool) -> None:
            first, *others = weight.parts[part]
            with self.arena.scope():
                more = None if part else bias
                if more is not None and more.dtype != term.dtype:
                    more = self.arena.take(more.shape, term.dtype)
                    self.inner.copy(bias, more)
                product(first, term, add, more)
            for each in others:
                product(each, term, True, None)

        self._sum_parts(of_part, out, len(weight.parts[0]) == 1)

    def _sum_parts(self, leaf: Callable[[int, Array, bool], None], out: Array, pairs: bool, over: Axis = ALONE) -> None:
        """out = the sum of this rank's parts, and of those of the ranks of ``over``: in float32 on GPUs, rounded once.

        ``leaf(part, term, add)`` writes the term of a part.  With ``pairs`` it adds that of every second part.
        """
        wide, pairs = self.inner.statistics_dtype(out.dtype), pairs and self.parts > 1
        count = self.parts // 2 if pairs else self.parts
        with self.arena.scope():
            total = out if out.dtype == wide else self.arena.take(out.shape, wide)
            terms = [total] if count == 1 else self.arena.take((count, *out.shape), wide)
            for part in range(self.parts):
                leaf(part, terms[part * count // self.parts], pairs and part % 2 == 1)
            if count > 1:
                self.inner.add_tree(terms, total)
            sum_over_ranks(self.inner, self.arena, over, total)
            if total is not out:
                self.inner.copy(total, out)

    def _at_once(self, weight: Any, dim: int | None = None) -> bool:
        """Whether a product with ``weight`` is computed at once; ``dim`` is that of its sum, None if it cuts none."""
        if not isinstance(weight, Matrix):
            return True
        return weight.dim != dim and self.inner.bits_of_parts(weight.array.dtype)

    def _columns(self, x: Array, columns: slice) -> Array:
        return self.inner.columns_of(x, columns)

    def linear_weight_gradient(self, d_out: Array, x: Array, d_weight: Any, accumulate: bool, arena: Arena) -> None:
        """``Ops.linear_weight_gradient``; of all ranks of cp."""
        ops, rows = self.inner, self.rows(len(x))

        def of_piece(piece: int, out: Array) -> None:
            d_n, x_n = d_out[rows[piece]], x[rows[piece]]
            if not isinstance(d_weight, Matrix) or ops.bits_of_parts(x.dtype):
                outputs = out.size * (self.tp.size if isinstance(d_weight, Matrix) else 1)
                ops.linear_weight_gradient(d_n, x_n, out, accumulate, arena, outputs)
                return
            for each in d_weight.slices():
                if d_weight.dim == 0:
                    ops.linear_weight_gradient(self._columns(d_n, each), x_n, out[each], accumulate, arena)
                else:
                    x_k, out_k = self._columns(x_n, each), self._columns(out, each)
                    ops.linear_weight_gradient(d_n, x_k, out_k, accumulate, arena)

        self.sum_pieces(of_piece, _array(d_weight))

    def low_rank(
        self, x: Array, weight: Any, out: Array, transposed: bool, factor: float, accumulate: bool, arena: Arena
    ) -> None:
        """``Ops.low_rank``. A sum over features is over those of all ranks of tp, and complete on each of them."""
        w, how = _array(weight), (transposed, factor, accumulate, arena)
        for n in self.rows(len(x)):
            x_n, out_n = x[n], out[n]

            def of_part(part: int, term: Array, _: bool, x_n: Array = x_n) -> None:
                (each,) = weight.parts[part]
                of_w = self._columns(w, each) if transposed else w[each]
                self.inner.low_rank(self._columns(x_n, each), of_w, term, *how)

            if self._at_once(weight, transposed):
                self.inner.low_rank(x_n, w, out_n, *how)
            elif weight.dim == transposed:
                self._sum_parts(of_part, out_n, False, self.tp)
            else:
                for each in weight.slices():
                    of_w = w[each] if transposed else self._columns(w, each)
                    self.inner.low_rank(x_n, of_w, self._columns(out_n, each), *how)

    def fuses_swiglu(self, d_out: Array, weight: Any, gate_up: Array, arena: Arena) -> bool:
        """``Ops.fuses_swiglu``."""
        return self._at_once(weight, 0) and bool(self.inner.fuses_swiglu(d_out, _array(weight), gate_up, arena))

    def linear_swiglu_backward(self, d_out: Array, weight: Any, gate_up: Array, d_gate_up: Array, arena: Arena) -> None:
        """``Ops.linear_swiglu_backward``."""
        self.inner.linear_swiglu_backward(d_out, _array(weight), gate_up, d_gate_up, arena)

    def sum_rows(self, x: Array, out: Any, accumulate: bool, arena: Arena) -> None:
        """``Ops.sum_rows``; of all ranks of cp."""
        rows = self.rows(len(x))

        def of_piece(piece: int, term: Array) -> None:
            if not isinstance(out, Matrix):
                self.inner.sum_rows(x[rows[piece]], term, accumulate, arena)
                return
            for f in out.slices():
                self.inner.sum_rows(self._columns(x[rows[piece]], f), term[f], accumulate, arena)

        self.sum_pieces(of_piece, _array(out))

    # --- norms -------------------------------------------------------------------------------------------

    def normalize_backward(
        self, d_out: Array, x: Array, norm: Normalize, rstd: Array, dx: Array, d_weight: Array, accumulate: bool,
        arena: Arena,
    ) -> None:  # fmt: skip
        """``Ops.normalize_backward`` of RMSNorm; d_weight of all ranks' rows."""
        of_piece = len(x) * self.tp.size // self.pieces
        rows = equal_parts(slice(0, len(x)), self.pieces * math.gcd(self.split.features, of_piece) // self.tp.size)

        def of_rows(index: int, term: Array) -> None:
            d_out_n, x_n, rstd_n, dx_n = (each[rows[index]] for each in (d_out, x, rstd, dx))
            self.inner.normalize_backward(d_out_n, x_n, norm, rstd_n, dx_n, term, accumulate, arena)

        sum_tree(self.inner, arena, of_rows, d_weight, len(rows))
        for axis in (self.tp, self.cp):
            sum_over_ranks(self.inner, arena, axis, d_weight)

    def head_norm_backward(
        self, raw: Array, norm: Normalize, heads: slice, dx: Array, d_weight: Array, accumulate: bool, arena: Arena
    ) -> None:
        """``Ops.head_norm_backward``; d_weight of all ranks' heads: a tree over parts, of trees over pieces."""
        rows = self.rows(len(raw))
        parts = equal_parts(heads, math.gcd(self.parts, heads.stop - heads.start))  # one if all heads have one norm

        def of_piece(piece: int, terms: Array) -> None:
            raw_n, dx_n = raw[rows[piece]], dx[rows[piece]]
            for part, term in zip(parts, terms, strict=True):
                self.inner.head_norm_backward(raw_n, norm, part, dx_n, term, accumulate, arena)

        with arena.scope():
            terms = arena.take((len(parts), *d_weight.shape), d_weight.dtype)
            self.sum_pieces(of_piece, terms)
            self.inner.add_tree(terms, d_weight)
        sum_over_ranks(self.inner, arena, self.tp, d_weight)

    # --- embedding and loss ------------------------------------------------------------------------------

    def embedding_backward(
        self, d_out: Array, tokens: Array, d_table: Array, accumulate: bool, arena: Arena, first: int | None = None,
        padding: int | None = None,
    ) -> None:  # fmt: skip
        """``Ops.embedding_backward``, of the tokens of all ranks of cp, on each that holds the rows."""
        with arena.scope():
            if self.cp.size > 1:
                mine = tokens, d_out
                tokens, d_out = (arena.take((self.cp.size * len(x), *x.shape[1:]), x.dtype) for x in mine)
                for x, of_all in zip(mine, (tokens, d_out), strict=True):
                    self.cp.comm.all_gather(x, of_all)
            self.inner.embedding_backward(d_out, tokens, d_table, accumulate, arena, first, padding)

    def statistics_of_parts(self, logits: Array, targets: Array, first: int, out: Array, arena: Arena) -> None:
        if self.parts == 1:
            super().statistics_of_parts(logits, targets, first, out, arena)
            return
        for part, columns in zip(out, equal_parts(slice(0, logits.shape[1]), self.parts), strict=True):
            of_part = self._columns(logits, columns)
            self.inner.logit_statistics(of_part, targets, first + columns.start, part, arena)


def _array(matrix: Any) -> Array:
    return matrix.array if isinstance(matrix, Matrix) else matrix


def equal_parts(whole: slice, count: int) -> list[slice]:
    """``count`` slices of equal size."""
    size = (whole.stop - whole.start) // count
    return [slice(at, at + size) for at in range(whole.start, whole.start + size * count, max(1, size))]
