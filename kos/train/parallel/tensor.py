"""Tensor parallelism: heads, columns and vocabulary split over ranks; between the products, the tokens.

A pair of matrices is split by the output features of the first (``column_linear``: q, k, v; gate, up) and by the
input features of the second (``row_linear``: o; down), so that a rank goes from one to the other alone and the second
gives a term of a sum over ranks (Shoeybi et al. 2019, arXiv:1909.08053). That sum is a reduce-scatter: a rank keeps
``n = N / tp`` of the N tokens in the residual stream and works out norms and additions on those only; an all-gather
before the first matrix brings all N together again (sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198).

The embedding and the head are split by vocabulary. No rank has all logits of a token: three numbers of each rank's
part, the statistics of ``Ops.logit_statistics``, give the loss and its gradient.

With one rank every function is the plain operation.
"""

from __future__ import annotations

from collections.abc import Callable

from kos.memory.arena import Arena
from kos.train.ops import Array, Ops
from kos.train.parallel.mesh import Axis

ALONE = Axis(0, 1, None)


class TensorParallel:
    """The operations of a layer that are split over the ranks of ``axis``.

    A suffix ``_nD`` names the rows of this rank, ``_ND`` those of all ranks. ``first_row`` is where this rank's part
    of the vocabulary begins.
    """

    def __init__(self, ops: Ops, axis: Axis = ALONE, first_row: int = 0) -> None:
        self.ops, self.axis, self.size = ops, axis, axis.size
        self._first = first_row

    def rows(self, tokens: int) -> int:
        """How many of ``tokens`` rows are this rank's."""
        return tokens // self.size

    def gather(self, x_nD: Array, arena: Arena) -> Array:
        """The rows of all ranks, in ``arena``."""
        if self.size == 1:
            return x_nD
        x_ND = arena.take((len(x_nD) * self.size, *x_nD.shape[1:]), x_nD.dtype)
        self.axis.comm.all_gather(x_nD, x_ND)
        return x_ND

    def sum_rows(self, term_ND: Array, out_nD: Array) -> None:
        """This rank's rows of the sum of all ranks' terms."""
        self.axis.comm.reduce_scatter(term_ND, out_nD)

    def column_linear(self, x_nD: Array, weight: Array, out_NF: Array, arena: Arena) -> None:
        """out_NF = x_ND weight^T: this rank's features of all rows."""
        with arena.scope():
            self.ops.linear(self.gather(x_nD, arena), weight, out_NF)

    def column_linear_backward(
        self, d_out_NF: Array, x_nD: Array, weight: Array, dx_nD: Array, keep: Arena, arena: Arena,
        weight_gradient: Callable[[Array], None],
    ) -> None:  # fmt: skip
        """Writes ``dx_nD``; ``weight_gradient`` gets x_ND, in ``keep``.

        The gather of x_ND runs beside the product of ``dx``, its sum over ranks beside ``weight_gradient``.
        """
        if self.size == 1:
            self.ops.linear_input_gradient(d_out_NF, weight, dx_nD)
            weight_gradient(x_nD)
            return
        x_ND = keep.take((len(x_nD) * self.size, *x_nD.shape[1:]), x_nD.dtype)
        with arena.scope():
            term_ND = arena.take(x_ND.shape, dx_nD.dtype)
            gathered = self.axis.comm.all_gather(x_nD, x_ND, async_op=True)
            self.ops.linear_input_gradient(d_out_NF, weight, term_ND)
            gathered.wait()
            summed = self.axis.comm.reduce_scatter(term_ND, dx_nD, async_op=True)
            weight_gradient(x_ND)
            summed.wait()

    def row_linear(self, x_NF: Array, weight: Array, out_nD: Array, residual_nD: Array, arena: Arena) -> None:
        """out_nD = residual_nD + this rank's rows of x weight^T, summed over the ranks' features."""
        if self.size == 1:
            self.ops.linear(x_NF, weight, out_nD, residual_nD)
            return
        with arena.scope():
            term_ND = arena.take((len(x_NF), *out_nD.shape[1:]), out_nD.dtype)
            self.ops.linear(x_NF, weight, term_ND)
            self.sum_rows(term_ND, out_nD)
            self.ops.add(out_nD, residual_nD, out_nD)

    def row_linear_backward(self, d_out_nD: Array, weight: Array, dx_NF: Array, keep: Arena) -> Array:
        """Writes ``dx_NF``; returns d_out_ND, in ``keep``, for the gradient of ``weight``."""
        d_out_ND = self.gather(d_out_nD, keep)
        self.ops.linear_input_gradient(d_out_ND, weight, dx_NF)
        return d_out_ND

    # --- vocabulary ------------------------------------------------------------------------------------

    def embedding(self, tokens_N: Array, table_vD: Array, out_nD: Array, arena: Arena) -> None:
        """This rank's rows of the embeddings of all tokens."""
        if self.size == 1:
            self.ops.embedding(tokens_N, table_vD, out_nD)
            return
        with arena.scope():
            term_ND = arena.take((len(tokens_N), *out_nD.shape[1:]), out_nD.dtype)
            self.ops.embedding(tokens_N, table_vD, term_ND, self._first)
            self.sum_rows(term_ND, out_nD)

    def embedding_backward(
        self, d_out_nD: Array, tokens_N: Array, d_table_vD: Array, accumulate: bool, arena: Arena
    ) -> None:
        """The gradient of this rank's part of the table."""
        with arena.scope():
            d_out_ND = self.gather(d_out_nD, arena)
            first = None if self.size == 1 else self._first
            self.ops.embedding_backward(d_out_ND, tokens_N, d_table_vD, accumulate, arena, first)

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
