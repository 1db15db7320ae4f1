"""Causal self-attention with rotary positions. Context parallelism lives here (``kos.train.parallel.context``).

H query heads, K kv heads and A = H d count what this rank computes; W = (H + 2K) d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kos.memory.arena import Arena
from kos.train.layers.context import PassContext
from kos.train.layers.linear import ColumnLinear, RowLinear
from kos.train.layers.norm import Norm
from kos.train.layers.placement import Placement
from kos.train.layers.sublayer import Saved, Sublayer
from kos.train.ops import Array
from kos.train.parallel.context import Masks
from kos.train.parallel.tensor import Half


class Rope:
    """Rotary positions of these ``frequencies``, in radians a token; the tables are shared by all layers.

    ``length`` multiplies what is rotated.
    """

    def __init__(self, frequencies: Sequence[float], length: float = 1.0) -> None:
        self.frequencies, self.length = frequencies, length
        self._tables: dict[tuple[int, int, Any], tuple[Array, Array]] = {}

    def tables(self, ctx: PassContext, seq_len: int, rows: int, dtype: Any) -> tuple[Array, Array]:
        """cos and sin of each token of a sample of ``seq_len``, or of all ``rows`` where a rank has several pieces.

        They are rows of a longer table: sampling uses every length, and a captured pass keeps reading its table.
        """
        cp, samples, tokens = ctx.cp, 1, seq_len
        if cp.pieces > 1:
            samples, tokens = rows // (seq_len * cp.pieces), rows
        elif cp.size == 1:
            seq_len = 1 << (seq_len - 1).bit_length()
        key = seq_len, samples, dtype
        if key not in self._tables:
            positions = cp.positions_of_rows(seq_len, samples)
            self._tables[key] = ctx.ops.rope_tables(self.frequencies, positions, dtype, self.length)
        cos, sin = self._tables[key]
        return cos[:tokens], sin[:tokens]


class OfCore(NamedTuple):
    """What a forward saves for the backward: the logarithms of the sums of exponentials, q and k before their norms."""

    lse_BHT: Array
    raw: Array | None


class Attention(Sublayer):
    """``column`` makes q, k and v, ``row`` takes the heads. ``heads`` and ``kv_heads`` are those of all ranks.

    With a ``window`` a query sees as many keys, its own included. ``norms`` are those of q and of k: of each head, or
    for one rank of tp alone of all heads together, whichever their size is.
    """

    cheap = False

    def __init__(
        self, norm: Norm, qkv: ColumnLinear, o: RowLinear, heads: int, kv_heads: int, head_dim: int, rope: Rope | None,
        window: int | None = None, norms: Sequence[Norm] = (), after: Norm | None = None,
    ) -> None:  # fmt: skip
        super().__init__(norm, qkv, o, after)
        self.window, self.norms = window, norms
        self.heads, self.kv_heads, self.head_dim, self.rope = heads, kv_heads, head_dim, rope

    def _heads(self, ctx: PassContext) -> tuple[int, int]:
        """Those of this rank; of fewer kv heads than ranks it holds one, and so do its neighbours."""
        return self.heads // ctx.tp.size, max(1, self.kv_heads // ctx.tp.size)

    def core_placements(self) -> dict[str, Placement]:
        return {name: placement for norm in self.norms for name, placement in norm.placements().items()}

    def save_core(self, ctx: PassContext, tokens: int, seq_len: int, dtype: Any, arena: Arena) -> OfCore:
        shape, columns = (tokens // seq_len, self._heads(ctx)[0], seq_len), sum(self._heads(ctx)) * self.head_dim
        raw = ctx.ops.empty_columns(arena, tokens, columns, dtype) if self.norms else None
        return OfCore(arena.take(shape, ctx.ops.statistics_dtype(dtype)), raw)

    def _normed(self, ctx: PassContext) -> Iterator[tuple[Norm, slice]]:
        """The norms of q and k with what they norm, counted in their sizes: heads, or once all of them."""
        q, k = (heads * self.head_dim for heads in self._heads(ctx))
        for norm, (start, stop) in zip(self.norms, ((0, q), (q, q + k)), strict=False):
            yield norm, slice(start // norm.size, stop // norm.size)

    def core(self, ctx: PassContext, saved: Saved, half: Half, last: bool) -> Iterator[None]:
        """The halves attend apart. If a sample is in both, the last attends for both."""
        rows, qkv, (lse, raw), heads = half.rows, saved.columns_NW, saved.of_core, saved.inner_NF
        assert heads is not None
        masks = ctx.masks.get(self.window)
        start, stop = (row // lse.shape[-1] for row in (rows.start, rows.stop))  # samples
        apart = (stop - start) * lse.shape[-1] == rows.stop - rows.start
        if not apart:
            if last:
                self._attend(ctx, qkv, OfCore(lse, raw), heads, masks)
            yield
        yield
        if apart:
            of_half = masks and [[mask.of_samples(slice(start, stop)) for mask in each] for each in masks]
            kept = OfCore(lse[start:stop], None if raw is None else raw[rows])
            self._attend(ctx, qkv[rows], kept, heads[rows], of_half)

    def _attend(self, ctx: PassContext, qkv_NW: Array, kept: OfCore, heads_NA: Array, masks: Masks) -> None:
        lse_BHT, raw = kept
        for norm, heads in self._normed(ctx):
            ctx.ops.head_norm(qkv_NW, ctx.weights[norm.name], norm.eps, heads, raw)
        self._rotate(ctx, ctx.ops.rope, qkv_NW, lse_BHT.shape[-1])
        ctx.cp.attention(qkv_NW, *self._heads(ctx), heads_NA, lse_BHT, ctx.arena, masks)

    def core_backward(self, ctx: PassContext, saved: Saved, inner: Array, d_inner: Array, d_columns: Array) -> None:
        (lse, raw), masks = saved.of_core, ctx.masks.get(self.window)
        operands = d_inner, saved.columns_NW, inner, lse, *self._heads(ctx), d_columns, ctx.arena
        ctx.cp.attention_backward(*operands, masks)
        self._rotate(ctx, ctx.ops.rope_backward, d_columns, lse.shape[-1])
        of, accumulate, final = ctx.into
        for norm, heads in self._normed(ctx):
            weight, d_weight = ctx.weights[norm.name], of[norm.name]
            ctx.ops.head_norm_backward(raw, weight, norm.eps, heads, d_columns, d_weight, accumulate, ctx.arena)
            final(norm.name)

    def _rotate(self, ctx: PassContext, rope: Callable[..., None], qkv_NW: Array, seq_len: int) -> None:
        """``rope`` is forward or backward."""
        if self.rope is not None:
            tables = self.rope.tables(ctx, seq_len, len(qkv_NW), qkv_NW.dtype)
            rope(qkv_NW, tables, self.head_dim, sum(self._heads(ctx)), ctx.arena)
