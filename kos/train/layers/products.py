"""The strategy of products, and of the sums in them over tokens and ranks; here the fastest one.

``kos.train.layers.fixed`` and ``fixed_rows`` have those of ``--deterministic``, in an order that no layout changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kos.memory.arena import Arena
from kos.train.ops import Array, Ops
from kos.train.parallel.tensor import Half, TensorParallel

Stacked = Sequence[slice] | None
"""Of a column-parallel matrix: the rows of each matrix stacked in it. None: a row-parallel matrix."""


class Products:
    """Products with weights, their gradients, and losses, in whatever order is fastest."""

    pieces = 1
    """Pieces of this rank's tokens."""

    bias_after_sum = False
    """Whether the bias of a row-parallel matrix is added to the sum over ranks; else one rank's term has it."""

    fp8: Any = None
    """The products of linear layers in 8 bits (``kos.train.layers.fp8``), if they are."""

    by_piece = False
    """Whether a piece of the rows is multiplied at a time: in 8 bits it has a scale of its own then."""

    def __init__(self, ops: Ops, tp: TensorParallel, arena: Arena) -> None:
        self.ops, self.tp, self.arena = ops, tp, arena

    @property
    def of_layers(self) -> Any:
        """What has the products of linear layers: ``linear``, ``linear_input_gradient``, ``linear_weight_gradient``."""
        return self.fp8 or self.ops

    # --- operands in 8 bits --------------------------------------------------------------------------------

    @property
    def fp8_of_all(self) -> Any:
        """``fp8``, if a tensor has one set of scales for all of its rows."""
        return None if self.by_piece else self.fp8

    def empty_transposed(self, shape: tuple[int, int], arena: Arena) -> Any:
        """Memory in which ``linear`` saves its input (N, F) for the weight's gradient; None: others save it."""
        return self.fp8_of_all and self.fp8_of_all.empty_transposed(shape, arena) if self.tp.size == 1 else None

    @property
    def fuses_norm(self) -> bool:
        """Whether ``linear`` takes RMSNorm's output without it being in 16 bits (``kos.train.layers.fp8.Normed``)."""
        return self.fp8_of_all is not None and self.tp.size == 1

    def gated(self, gate_up: Array) -> Any:
        """SwiGLU's output as an input of ``linear`` that is never in 16 bits; None: it must be written."""
        return self.fp8_of_all and self.fp8_of_all.gated(gate_up)

    def reads_16(self, bias: str | None) -> bool:
        """Whether a gradient of weights, or of a ``bias``, reads its output's gradient in 16 bits."""
        return self.fp8_of_all is None or bias is not None

    def gradient(self, d_out: Any, keep: Arena, halves: bool = False) -> Any:
        """What both gradients take in place of ``d_out``; that of the weight reads memory of ``keep``.

        ``halves``: that of the input takes the rows of each half apart.
        """
        parts = len(self.tp.halves(d_out.shape[0])) if halves else 1
        return self.fp8_of_all.gradient(d_out, keep, parts) if self.fp8_of_all else d_out

    # --- Linear and Norm -----------------------------------------------------------------------------------

    def linear(
        self, weight: Array, x: Array, out: Array, stacked: Stacked, residual: Array | None = None,
        bias: Array | None = None, transposed: Any = None,
    ) -> None:  # fmt: skip
        """out = x weight^T + residual + bias, of this rank's features. ``transposed``: see ``empty_transposed``."""
        more = () if transposed is None else (transposed,)
        self.of_layers.linear(x, weight, out, residual, bias, *more)

    def input_gradient(self, weight: Array, d_out: Array, dx: Array, stacked: Stacked) -> None:
        """dx = d_out weight, of this rank's features."""
        self.of_layers.linear_input_gradient(d_out, weight, dx)

    def weight_gradient(self, d_out: Array, x: Array, d_weight: Array, accumulate: bool, stacked: Stacked) -> None:
        """d_weight = d_out^T x."""
        self.of_layers.linear_weight_gradient(d_out, x, d_weight, accumulate, self.arena)

    def bias_gradient(self, d_out: Array, d_bias: Array, accumulate: bool, stacked: Stacked) -> None:
        """d_bias = the sum of the rows of ``d_out``.

        Of a row-parallel matrix all ranks have all rows: one of them adds them up, for the sum over ranks.
        """
        if stacked is not None or self.tp.axis.rank == 0:
            self.ops.sum_rows(getattr(d_out, "raw", d_out), d_bias, accumulate, self.arena)
        elif not accumulate:
            self.ops.zero(d_bias)

    def norm_backward(
        self, d_out: Array, x: Array, weight: Array, rstd: Array, dx: Array, d_weight: Array, accumulate: bool
    ) -> None:  # fmt: skip
        """``Ops.rms_norm_backward``."""
        self.ops.rms_norm_backward(d_out, x, weight, rstd, dx, d_weight, accumulate, self.arena)

    def head_norm_backward(
        self, raw: Array, weight: Array, eps: float, heads: slice, dx: Array, d_weight: Array, accumulate: bool
    ) -> None:
        """``Ops.head_norm_backward``, of this rank's heads."""
        self.ops.head_norm_backward(raw, weight, eps, heads, dx, d_weight, accumulate, self.arena)

    def start_sum(self, term_ND: Array, out_nD: Array, halves: Sequence[Half] | None) -> Callable[[], None]:
        """Begin to sum all ranks' terms of ``halves`` (None: all) for this rank's rows. The returned function waits."""
        return self.tp.start_sum(term_ND, out_nD, halves)

    # --- Embedding and Head --------------------------------------------------------------------------------

    def embedding_backward(self, d_out_ND: Array, tokens_N: Array, d_table_vD: Array, accumulate: bool) -> None:
        """The gradient of this rank's part of the table."""
        first = None if self.tp.size == 1 else self.tp.first
        self.ops.embedding_backward(d_out_ND, tokens_N, d_table_vD, accumulate, self.arena, first)

    def chunks(self, rows: int, most: int) -> list[list[slice]]:
        """Of each piece the chunks of ``rows`` whose logits are in memory at once, of at most ``most`` rows."""
        return [[slice(start, min(start + most, rows)) for start in range(0, rows, most)]]

    def logits(self, x: Array, table_vD: Array, out_nv: Array) -> None:
        """out = x table^T: the logits of this rank's part of the vocabulary."""
        self.ops.linear(x, table_vD, out_nv)

    def logits_backward(
        self, d_logits_nv: Array, x: Array, table_vD: Array, dx: Array, d_table_vD: Array, accumulate: bool
    ) -> None:  # fmt: skip
        """This rank's term of ``dx``, and the gradient of the table; the rows are of one piece."""
        self.ops.linear_input_gradient(d_logits_nv, table_vD, dx)
        self.ops.linear_weight_gradient(d_logits_nv, x, d_table_vD, accumulate, self.arena)

    def cross_entropy(self, logits_Nv: Array, targets_N: Array, losses_N: Array, count: Array | None = None) -> None:
        """The losses of all tokens; with ``count`` the logits become the gradient of sum(losses) / count."""
        ops, tp = self.ops, self.tp
        if tp.size == 1:
            ops.cross_entropy(logits_Nv, targets_N, count, losses_N, self.arena)
            return
        with self.arena.scope():
            mine = self.arena.take((3, len(targets_N)), losses_N.dtype)
            of_all = self.arena.take((tp.size, *mine.shape), mine.dtype)
            ops.logit_statistics(logits_Nv, targets_N, tp.first, mine, self.arena)
            tp.axis.comm.all_gather(mine, of_all)
            ops.cross_entropy_of_parts(logits_Nv, targets_N, tp.first, of_all, count, losses_N, self.arena)

    def sum_pieces(self, leaf: Callable[[int, Array], None], out: Array) -> None:
        """out = the sum of what ``leaf(piece, out)`` writes, over the pieces of all ranks if their order is fixed."""
        leaf(0, out)
