"""LLaMA in a fixed order of sums, for ``--deterministic``: the parts outside ``kos.train.parallel.fixed``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from kos.train.model.llama import Gradients, Llama, Weights
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.shapes import Local
from kos.train.ops import Array
from kos.train.parallel.fixed import FixedContext, FixedOrder, FixedTensor, Split
from kos.train.parallel.fixed_rows import RowContext, RowOrder, RowTensor
from kos.train.parallel.mesh import Axis


class FixedLlama(Llama):
    """A rank's part of ``Llama``, with the same bits in every layout; gradients are written, never added to.

    ``by_rows``: use the products and the attention of ``fixed_rows``.
    """

    tensor: FixedTensor
    context: FixedContext

    def __init__(
        self, config: LlamaConfig, ops: Any, *, split: Split, local: Local, tp: Axis, cp: Axis, by_rows: bool,
        **options: Any,
    ) -> None:  # fmt: skip
        kinds = (RowOrder, RowTensor, RowContext) if by_rows else (FixedOrder, FixedTensor, FixedContext)
        self.order, shapes = kinds[0](ops, split, tp, cp), config.parameter_shapes(local)
        stacked: dict[str, list[slice]] = {}  # by group: the rows of each of its matrices
        for name, members in config.fused_groups(local).items():
            ends = [0, *accumulate(shapes[member][0] for member in members)]
            stacked[name] = [*map(slice, ends, ends[1:])]
        tensor, context = kinds[1](self.order, local.vocabulary.start, stacked), kinds[2](self.order)
        super().__init__(config, ops, local=local, tensor=tensor, context=context, **options)

    def _head_gradients(
        self, weights: Weights, normed_ND: Array, targets_N: Array, count: Array, losses_N: Array, d_normed_ND: Array,
        into: Gradients,
    ) -> None:  # fmt: skip
        arena, name, chunks = self.arena, self.config.head, self._chunks(len(targets_N))
        each = len(chunks) // self.order.pieces

        def of_piece(piece: int, d_table: Array) -> None:
            for number, rows in enumerate(chunks[piece * each : (piece + 1) * each]):
                with arena.scope():
                    logits = self._logits(weights, normed_ND[rows])
                    self.tensor.cross_entropy(logits, targets_N[rows], losses_N[rows], arena, count)
                    self.tensor.logits_backward(
                        logits, normed_ND[rows], weights[name], d_normed_ND[rows], d_table, number > 0, arena
                    )

        self.order.tree(of_piece, into.of[name], arena)
        self.order.over_ranks(self.context.axis, into.of[name], arena)

    def _norm_backward(
        self, weights: Weights, name: str, d_out: Array, x: Array, rstd: Array, dx: Array, into: Gradients
    ) -> None:
        self.order.rms_norm_backward(d_out, x, weights[name], rstd, dx, into.of[name], self.arena)
        into.final(name)

    def _apply_rope(self, rope: Callable[..., None], qkv_NW: Array, seq_len: int) -> None:
        """All rows as one sample, whose positions are those of its pieces."""
        heads, rows = self.local.heads + self.local.kv_heads, len(qkv_NW)
        key = rows, (seq_len, qkv_NW.dtype)
        if key not in self._tables:
            pieces, tokens = self.order.pieces, seq_len if self.context.chunks == 2 else seq_len * self.order.pieces
            of_piece = tokens // pieces
            positions = self.context.positions(tokens)
            of_rows = [at for piece in range(pieces) for at in [*positions[piece * of_piece :][:of_piece]] *
                       (rows // tokens)]  # fmt: skip
            self._tables[key] = self.ops.rope_tables(self.config.rope_frequencies(), of_rows, qkv_NW.dtype)
        rope(qkv_NW, self._tables[key], self.config.head_dim, heads, self.arena)

    def _chunks(self, rows: int) -> list[slice]:
        """Equal ones of each piece, of at most ``head_rows``."""
        of_piece = rows // self.order.pieces
        size = next(n for n in range(min(self.head_rows, of_piece), 0, -1) if of_piece % n == 0)
        return [slice(start, start + size) for start in range(0, rows, size)]
