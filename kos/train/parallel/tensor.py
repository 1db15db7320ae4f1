"""Tensor parallelism: heads, columns and vocabulary split over ranks; between the products, the tokens.

A pair of matrices is split by the output features of the first (column-parallel: q, k, v; gate, up) and by the
input features of the second (row-parallel: o; down), so that a rank goes from one to the other alone and the second
gives a term of a sum over ranks (Shoeybi et al. 2019, arXiv:1909.08053). That sum is a reduce-scatter: a rank keeps
``n = N / tp`` of the N tokens in the residual stream and works out norms and additions on those only; an all-gather
before the first matrix brings all N together again (sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198).

On a GPU collectives overlap matrix products. In the forward the tokens are split into two *halves*: the collective of
one half overlaps the products of the other (``Llama._forward``). In the backward, collectives overlap gradients of
weights (``Llama.block_backward``). A rank's n rows are its rows of the first half, then its rows of the second half.

The embedding and the head are split by vocabulary. No rank has all logits of a token: three numbers of each rank's
part, the statistics of ``Ops.logit_statistics``, give the loss and its gradient.

With one rank every function is the plain operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kos.memory.arena import Arena
from kos.train.ops import Array, Ops
from kos.train.parallel.mesh import Axis

ALONE = Axis(0, 1, None)


class Half(NamedTuple):
    """A half of a micro-batch, or all of it: ``rows`` among the N tokens, and ``own`` among this rank's n rows."""

    rows: slice
    own: slice


class TensorParallel:
    """The operations of a layer that are split over the ranks of ``axis``.

    A suffix ``_nD`` names the rows of this rank, ``_ND`` those of all ranks. ``first_row`` is where this rank's part
    of the vocabulary begins. A product uses the matrix ``weights[name]``.
    """

    def __init__(self, ops: Ops, axis: Axis = ALONE, first_row: int = 0) -> None:
        self.ops, self.axis, self.size = ops, axis, axis.size
        self._first = first_row

    def rows(self, tokens: int) -> int:
        """How many of ``tokens`` rows are this rank's."""
        return tokens // self.size

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
        works = [gather(x_nD[half.own], x_ND[half.rows], async_op=True) for half in halves]

        def wait() -> Array:
            for work in works:
                work.wait()
            return x_ND

        return wait

    def gather(self, x_nD: Array, arena: Arena) -> Array:
        """The rows of all ranks, in ``arena``."""
        return self.start_gather(x_nD, self.empty_rows(x_nD, arena))()

    def empty_rows(self, x_nD: Array, arena: Arena) -> Array:
        """Memory for the rows of all ranks. None with one rank, which needs no such memory."""
        return None if self.size == 1 else arena.take((len(x_nD) * self.size, *x_nD.shape[1:]), x_nD.dtype)

    def start_sum(self, term_ND: Array, out_nD: Array, halves: Sequence[Half] | None = None) -> Callable[[], None]:
        """Begin to sum all ranks' terms of ``halves`` (None: all) for this rank's rows. The returned function waits."""
        scatter = self.axis.comm.reduce_scatter
        halves = self.halves(len(term_ND)) if halves is None else halves
        works = [scatter(term_ND[half.rows], out_nD[half.own], async_op=True) for half in halves]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def scatter_sum(self, term_ND: Array, out_nD: Array, arena: Arena) -> None:
        """out_nD = the sum of all ranks' terms, for this rank's rows."""
        self.start_sum(term_ND, out_nD)()

    # --- products ----------------------------------------------------------------------------------------

    def column_linear(self, weights: Mapping[str, Array], name: str, x_ND: Array, out_NF: Array) -> None:
        """out_NF = x_ND weight^T, for this rank's rows of the weight."""
        self.ops.linear(x_ND, weights[name], out_NF)

    def row_linear(
        self, weights: Mapping[str, Array], name: str, x_NF: Array, term_ND: Array, out_nD: Array, residual_nD: Array,
        half: Half, arena: Arena,
    ) -> Callable[[], None]:  # fmt: skip
        """For ``half``: out_nD = residual_nD + this rank's rows of x weight^T, summed over the ranks' features.

        The returned function completes ``out_nD``. Until then the product is in ``term_ND``.
        """
        rows, own = half
        if self.size == 1:
            self.ops.linear(x_NF, weights[name], out_nD, residual_nD)
            return lambda: None
        self.ops.linear(x_NF[rows], weights[name], term_ND[rows])
        wait = self.start_sum(term_ND, out_nD, [half])

        def complete() -> None:
            wait()
            self.ops.add(out_nD[own], residual_nD[own], out_nD[own])

        return complete

    def row_linear_backward(self, weights: Mapping[str, Array], name: str, d_out_ND: Array, dx_NF: Array) -> None:
        """dx_NF = d_out_ND weight."""
        self.ops.linear_input_gradient(d_out_ND, weights[name], dx_NF)

    def column_linear_backward(
        self, weights: Mapping[str, Array], name: str, d_out_NF: Array, dx_nD: Array, arena: Arena,
        beside: Callable[[], None],
    ) -> None:  # fmt: skip
        """Write ``dx_nD``. Its sum over ranks overlaps the second half of the product and what ``beside`` queues."""
        if self.size == 1:
            self.ops.linear_input_gradient(d_out_NF, weights[name], dx_nD)
            beside()
            return
        with arena.scope():
            term_ND = self.empty_rows(dx_nD, arena)
            waits = []
            for half in self.halves(len(term_ND)):
                self.ops.linear_input_gradient(d_out_NF[half.rows], weights[name], term_ND[half.rows])
                waits.append(self.start_sum(term_ND, dx_nD, [half]))
            beside()
            for wait in waits:
                wait()

    def weight_gradient(self, name: str, d_out: Array, x: Array, into: Any, arena: Arena) -> None:
        """Compute the gradient of a matrix, or of a group, and report it as final to the ``Gradients`` ``into``."""
        self.ops.linear_weight_gradient(d_out, x, into.of[name], into.accumulate, arena)
        into.final(name)

    # --- vocabulary ------------------------------------------------------------------------------------

    def embedding(self, tokens_N: Array, table_vD: Array, out_nD: Array, arena: Arena) -> None:
        """This rank's rows of the embeddings of all tokens."""
        if self.size == 1:
            self.ops.embedding(tokens_N, table_vD, out_nD)
            return
        with arena.scope():
            term_ND = arena.take((len(tokens_N), *out_nD.shape[1:]), out_nD.dtype)
            self.ops.embedding(tokens_N, table_vD, term_ND, self._first)
            self.start_sum(term_ND, out_nD)()

    def embedding_backward(
        self, d_out_ND: Array, tokens_N: Array, d_table_vD: Array, accumulate: bool, arena: Arena
    ) -> None:
        """The gradient of this rank's part of the table."""
        first = None if self.size == 1 else self._first
        self.ops.embedding_backward(d_out_ND, tokens_N, d_table_vD, accumulate, arena, first)

    def logits(self, x_ND: Array, table_vD: Array, out_Nv: Array) -> None:
        """out_Nv = x_ND table^T: the logits of this rank's part of the vocabulary."""
        self.ops.linear(x_ND, table_vD, out_Nv)

    def cross_entropy(
        self, logits_Nv: Array, targets_N: Array, losses_N: Array, arena: Arena, count: Array | None = None
    ) -> None:
        """The losses of all tokens; with ``count`` the logits become the gradient of sum(losses) / count."""
        if self.size == 1:
            self.ops.cross_entropy(logits_Nv, targets_N, count, losses_N, arena)
            return
        with arena.scope():
            mine = arena.take((3, len(targets_N)), losses_N.dtype)
            of_all = arena.take((self.size, *mine.shape), mine.dtype)
            self.ops.logit_statistics(logits_Nv, targets_N, self._first, mine, arena)
            self.axis.comm.all_gather(mine, of_all)
            self.ops.cross_entropy_of_parts(logits_Nv, targets_N, self._first, of_all, count, losses_N, arena)

    def sum_replicated(self, gradient: Array) -> None:
        """The gradient of a weight that all ranks hold whole, from the terms of their rows."""
        if self.size > 1:
            self.axis.comm.all_reduce(gradient)
