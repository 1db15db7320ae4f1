"""Tensor parallelism: heads, columns and vocabulary split over ranks; between the products, the tokens.

A pair of matrices is split by the output features of the first (column-parallel: q, k, v; gate, up) and by the
input features of the second (row-parallel: o; down), so that a rank goes from one to the other alone and the second
gives a term of a sum over ranks (Shoeybi et al. 2019, arXiv:1909.08053). That sum is a reduce-scatter: a rank keeps
``n = N / tp`` of the N tokens in the residual stream and works out norms and additions on those only; an all-gather
before the first matrix brings all N together again (sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198).

On a GPU collectives overlap matrix products. In the forward the tokens are split into two *halves*: the collective of
one half overlaps the products of the other (``Model``). In the backward, collectives overlap gradients of weights
(``Sublayer.backward``). A rank's n rows are its rows of the first half, then its rows of the second half.

The embedding and the head are split by vocabulary. No rank has all logits of a token: three numbers of each rank's
part, the statistics of ``Ops.logit_statistics``, give the loss and its gradient.

A step of generation has as few tokens as sequences, so ``PlainTensorParallel`` does not split them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kos.memory.arena import Arena
from kos.train.ops import Array
from kos.train.ops.protocol import Ops
from kos.train.parallel.fixed_order import equal_parts, scatter_sum, start_scatter_sum
from kos.train.parallel.mesh import ALONE, Axis

if TYPE_CHECKING:
    from kos.comm.work import Work


class Half(NamedTuple):
    """A half of a micro-batch, or all of it: ``rows`` among the N tokens, and ``own`` among this rank's n rows."""

    rows: slice
    own: slice


ComputeTerms = Callable[[slice, Array], None]
"""Writes this rank's terms of the given slice of the N rows to an array that has as many rows as the slice."""


class TensorParallel:
    """The tokens that the ranks of ``axis`` exchange between the products of a layer.

    A suffix ``_nD`` names the rows of this rank, ``_ND`` those of all ranks. ``first`` is the row where this rank's
    part of the vocabulary begins. ``copies`` are the ranks that hold the same kv head, if there are more ranks than kv
    heads (as Megatron-LM does it).
    """

    splits_rows: ClassVar[bool] = True
    """Whether a rank has only a part of the rows between the matmuls."""

    def __init__(self, ops: Ops, axis: Axis = ALONE, first: int = 0, copies: Axis = ALONE) -> None:
        self.ops, self.axis, self.size, self.first, self.copies = ops, axis, axis.size, first, copies
        self.in_order = False
        """Whether sums over the ranks have the order of one rank; then each rank has all of the sum of an adapter."""
        self.owns_replicated = axis.rank == 0
        """Whether this rank computes a gradient of which all ranks have all terms; one does where ranks add it up."""

    def rows(self, tokens: int) -> int:
        """How many of ``tokens`` rows are this rank's."""
        return tokens // self.size

    def tokens(self, rows: int) -> int:
        """How many rows all ranks have together, if each has ``rows``."""
        return rows * self.size

    def halves(self, tokens: int) -> list[Half]:
        """The halves of ``tokens`` rows. One half has all rows if nothing overlaps or two would be too small."""
        least = self.ops.overlap_rows
        count = 2 if self.size > 1 and least and tokens >= 2 * least and tokens % (2 * self.size) == 0 else 1
        bounds = [(half * tokens // count, (half + 1) * tokens // count) for half in range(count)]
        return [Half(slice(*each), slice(*map(self.rows, each))) for each in bounds]

    def start_gather(self, x_nD: Array, x_ND: Array, halves: Sequence[Half] | None = None) -> Callable[[], Array]:
        """Begin to gather ``halves`` (None: all) into ``x_ND``.

        The returned function waits and returns the rows of all ranks: ``x_ND``, or with one rank ``x_nD``.
        """
        if self.size == 1:
            return lambda: x_nD
        gather = self.axis.comm.all_gather
        halves = self.halves(len(x_ND)) if halves is None else halves
        return _waiting([gather(x_nD[half.own], x_ND[half.rows], async_op=True) for half in halves], x_ND)

    def gather(self, x_nD: Array, arena: Arena) -> Array:
        """The rows of all ranks, in ``arena``."""
        return self.start_gather(x_nD, self.empty_rows(x_nD, arena))()

    def empty_rows(self, x_nD: Array, arena: Arena) -> Array:
        """Memory for the rows of all ranks. None with one rank, which needs no such memory."""
        return None if self.size == 1 else arena.take((self.tokens(len(x_nD)), *x_nD.shape[1:]), x_nD.dtype)

    def empty_terms(self, x_nD: Array, arena: Arena, shared_ND: Array = None) -> Array:
        """Memory for what ``start_sum`` adds up, for the rows of all ranks: ``shared_ND`` if that serves."""
        return self.empty_rows(x_nD, arena) if shared_ND is None else shared_ND

    def start_sum(self, term_ND: Array, out_nD: Array, halves: Sequence[Half] | None = None) -> Callable[[], Array]:
        """Start to reduce-scatter ``halves`` of the rows of ``term_ND`` (None: all): the sums of this rank's rows.

        The returned function waits and returns ``out_nD``.
        """
        scatter = self.axis.comm.reduce_scatter
        halves = self.halves(len(term_ND)) if halves is None else halves
        return _waiting([scatter(term_ND[half.rows], out_nD[half.own], async_op=True) for half in halves], out_nD)

    def compute_and_start_sum(
        self, compute_terms: ComputeTerms, term_ND: Array, out_nD: Array, half: Half, arena: Arena | None = None
    ) -> Callable[[], Array]:
        """Compute the terms of ``half`` into ``term_ND``, and start their sum, as ``start_sum`` does.

        ``arena``: scratch memory, which the caller must not free before the returned function has returned. If it is
        None, a sum that needs scratch memory is already complete when this method returns.
        """
        compute_terms(half.rows, term_ND[half.rows])
        return self.start_sum(term_ND, out_nD, [half])

    def gather_logits(self, logits_Nv: Array, arena: Arena) -> Array:
        """The logits of some rows as parts of the vocabulary, (parts, N, v): here only this rank's part."""
        return logits_Nv.reshape(1, *logits_Nv.shape)

    def check(self) -> None:
        """Raise the error of a collective that ended early.  Call this when the results are on the host.

        After such a collective, a GPU continues without its data.
        """
        if self.size > 1 and (stream := getattr(self.ops, "stream", None)) is not None:
            self.axis.comm.synchronize(stream=stream)

    def add_own(self, out_nD: Array, add: Callable[[Array, slice], None], arena: Arena) -> None:
        """Add this rank's rows of what ``add(x_ND, rows)`` adds to ``x_ND``, which is in the shape of one rank."""
        with arena.scope():
            whole_ND = arena.take((len(out_nD) * self.size, *out_nD.shape[1:]), out_nD.dtype)
            self.ops.zero(whole_ND)
            add(whole_ND, slice(0, len(whole_ND)))
            own = slice(self.axis.rank * len(out_nD), (self.axis.rank + 1) * len(out_nD))
            self.ops.add(out_nD, whole_ND[own], out_nD)


class FixedTensorParallel(TensorParallel):
    """``TensorParallel`` whose sums over ranks are binary trees. ``arena`` is scratch memory.

    Each rank has one contiguous run of rows, because the sums over these rows are then a subtree. So the rows are not
    split into halves as in ``TensorParallel``. Instead, a matmul can be computed in two *blocks* of rows. Each block
    has half of the rows of every rank. The collective of the first block overlaps the matmul of the second.

    ``pieces``: the number of pieces of the rows. Each piece is a matmul of its own.
    """

    def __init__(self, ops: Ops, axis: Axis, first: int, copies: Axis, arena: Arena, pieces: int) -> None:
        super().__init__(ops, axis, first, copies)
        self.arena, self.pieces, self.owns_replicated, self.in_order = arena, pieces, True, True

    def halves(self, tokens: int) -> list[Half]:
        return [Half(slice(0, tokens), slice(0, self.rows(tokens)))]

    def empty_terms(self, x_nD: Array, arena: Arena, shared_ND: Array = None) -> Array:
        """In float32 on GPUs, so that a sum over ranks is rounded once, as on one rank."""
        wide = self.ops.statistics_dtype(x_nD.dtype)
        if self.size == 1 or wide == x_nD.dtype:
            return super().empty_terms(x_nD, arena, shared_ND)
        return arena.take((self.tokens(len(x_nD)), *x_nD.shape[1:]), wide)

    def start_sum(self, term_ND: Array, out_nD: Array, halves: Sequence[Half] | None = None) -> Callable[[], Array]:
        scatter_sum(self.ops, self.arena, self.axis, term_ND, out_nD)
        return lambda: out_nD

    def compute_and_start_sum(
        self, compute_terms: ComputeTerms, term_ND: Array, out_nD: Array, half: Half, arena: Arena | None = None
    ) -> Callable[[], Array]:
        if arena is None:
            with self.arena.scope():
                self.compute_and_start_sum(compute_terms, term_ND, out_nD, half, self.arena)()
            return lambda: out_nD
        waits, rows = list[Callable[[], Array]](), len(out_nD)
        for own in self._row_blocks(rows, out_nD.dtype):
            terms_ND, count = term_ND[own.start * self.size : own.stop * self.size], own.stop - own.start
            if count == rows:
                compute_terms(half.rows, terms_ND)
            else:
                for rank in range(self.size):
                    of_rank = slice(rank * rows + own.start, rank * rows + own.stop)
                    compute_terms(of_rank, terms_ND[rank * count : (rank + 1) * count])
            waits.append(start_scatter_sum(self.ops, arena, self.axis, terms_ND, out_nD[own]))

        def wait() -> Array:
            for each in waits:
                each()
            return out_nD

        return wait

    def _row_blocks(self, rows: int, dtype: Any) -> list[slice]:
        """The rows of each block, among the ``rows`` of a rank.

        There is one block with all rows if collectives do not overlap matmuls, if the bits of a row could depend on the
        number of rows, or if the rows are too few for two blocks or do not divide evenly.
        """
        least = self.ops.overlap_rows
        overlaps = least and self.ops.bits_of_parts(dtype) and rows >= 2 * least * self.pieces
        return equal_parts(slice(0, rows), 2 if overlaps and rows % (2 * self.pieces) == 0 else 1)


class PlainTensorParallel(TensorParallel):
    """``TensorParallel`` without sequence parallelism: every rank has all rows.  For a forward without a backward.

    The sum after a row-parallel matrix is one all-reduce, to which rank 0 adds the residual.
    """

    splits_rows = False

    def rows(self, tokens: int) -> int:
        return tokens

    def tokens(self, rows: int) -> int:
        return rows

    def halves(self, tokens: int) -> list[Half]:
        return [Half(slice(0, tokens), slice(0, tokens))]

    def start_gather(self, x_nD: Array, x_ND: Array, halves: Sequence[Half] | None = None) -> Callable[[], Array]:
        return lambda: x_nD

    def start_sum(self, term_ND: Array, out_nD: Array, halves: Sequence[Half] | None = None) -> Callable[[], Array]:
        self.axis.comm.all_reduce(term_ND, out=out_nD)
        return lambda: out_nD

    def gather_logits(self, logits_Nv: Array, arena: Arena) -> Array:
        """The logits of some rows as parts of the vocabulary, (tp, N, v): those of all ranks."""
        if self.size == 1:
            return super().gather_logits(logits_Nv, arena)
        parts = arena.take((self.size, *logits_Nv.shape), logits_Nv.dtype)
        self.axis.comm.all_gather(logits_Nv, parts)
        return parts


def _waiting(works: Sequence[Work[Any]], out: Array) -> Callable[[], Array]:
    """A function that waits for ``works`` and returns ``out``."""

    def wait() -> Array:
        for work in works:
            work.wait()
        return out

    return wait
