"""Causal self-attention with rotary positions, and the KV cache. Context parallelism lives here
(``kos.train.parallel.context``).

H query heads, K kv heads and A = H d count what this rank computes; W = (H + 2K) d.

A prompt is processed in one forward of all its tokens, one sequence at a time, with the attention of training. Each
later forward has one token of each sequence, whose query attends to the keys that are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kos.memory.arena import Arena
from kos.memory.sharded import Sharded
from kos.train.layers import PassContext
from kos.train.layers.linear import ColumnLinear, RowLinear
from kos.train.layers.norm import Norm
from kos.train.layers.sublayer import Activations, Sublayer
from kos.train.ops import Array, Attend
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
        if ctx.cache is not None and seq_len == 1:
            return ctx.cache.angles[self]
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
    for one rank of tp alone of all heads together, whichever their size is. ``options`` are fields of ``Attend`` that
    are the same in every call.
    """

    recomputed = False

    def __init__(
        self, norm: Norm, qkv: ColumnLinear, o: RowLinear, heads: int, kv_heads: int, head_dim: int, rope: Rope | None,
        window: int | None = None, norms: Sequence[Norm] = (), after: Norm | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(norm, qkv, o, after)
        self.window, self.norms, self.options = window, norms, options
        self.heads, self.kv_heads, self.head_dim, self.rope = heads, kv_heads, head_dim, rope

    def heads_of(self, shards: int) -> tuple[int, int]:
        """The heads and kv heads of one of ``shards`` ranks.  Neighbouring ranks hold the same kv head if there are too
        few."""
        return self.heads // shards, max(1, self.kv_heads // shards)

    def _heads(self, ctx: PassContext) -> tuple[int, int]:
        return self.heads_of(ctx.tp.size)

    def core_placements(self) -> dict[str, Sharded]:
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

    def attend(self, heads: tuple[int, int], qkv_NW: Array, out_NA: Array, lse_BHT: Array) -> Attend:
        """What this layer asks of the operations, of so many query and kv heads."""
        return Attend(qkv_NW, *heads, out_NA, lse_BHT, **self.options)

    def core(self, ctx: PassContext, saved: Activations, half: Half, last: bool) -> Iterator[None]:
        """The halves attend apart. If a sample is in both, the last attends for both."""
        rows, raw, masks = half.rows, saved.of_core.raw, ctx.masks.get(self.window)
        assert saved.inner_NF is not None
        attend = self.attend(self._heads(ctx), saved.columns_NW, saved.inner_NF, saved.of_core.lse_BHT)
        samples = slice(rows.start // attend.length, rows.stop // attend.length)
        apart = (samples.stop - samples.start) * attend.length == rows.stop - rows.start
        if not apart:
            if last:
                self._attend(ctx, attend, raw, masks)
            yield
        yield
        if apart:
            of_half = masks and [[mask.of_samples(samples) for mask in each] for each in masks]
            self._attend(ctx, attend.of(rows, samples), None if raw is None else raw[rows], of_half)

    def _attend(self, ctx: PassContext, attend: Attend, raw: Array | None, masks: Masks) -> None:
        """qkv = rope(norm(qkv)), out = attention(qkv)."""
        qkv_NW = attend.qkv
        for norm, heads in self._normed(ctx):
            norm.forward_heads(ctx, qkv_NW, heads, raw)
        self._rotate(ctx, ctx.ops.rope, qkv_NW, attend.length)
        if ctx.cache is not None:
            ctx.cache.attention(self, ctx, attend, masks)
        else:
            ctx.cp.attention(attend, ctx.arena, masks)

    def core_backward(
        self, ctx: PassContext, saved: Activations, inner: Array, d_inner: Array, d_columns: Array
    ) -> None:
        """The same backwards: d_qkv from the gradient of out, then through rope and norms, in place."""
        raw, masks = saved.of_core.raw, ctx.masks.get(self.window)
        attend = self.attend(self._heads(ctx), saved.columns_NW, inner, saved.of_core.lse_BHT)
        ctx.cp.attention_backward(attend, d_inner, d_columns, ctx.arena, masks)
        self._rotate(ctx, ctx.ops.rope_backward, d_columns, attend.length)
        for norm, heads in self._normed(ctx):
            norm.backward_heads(ctx, raw, heads, d_columns)

    def _rotate(self, ctx: PassContext, rope: Callable[..., None], qkv_NW: Array, seq_len: int) -> None:
        """``rope`` is forward or backward."""
        if self.rope is not None:
            tables = self.rope.tables(ctx, seq_len, len(qkv_NW), qkv_NW.dtype)
            rope(qkv_NW, tables, self.head_dim, sum(self._heads(ctx)), ctx.arena)


class Cache:
    """The keys and values of all tokens so far, in one contiguous buffer per layer.

    It is for ``positions.shape[0]`` sequences of up to ``capacity`` tokens.

    ``positions`` (B,), int32, has the position of each sequence's first token in the next forward: 0 for a prompt.
    ``buffers`` have the format of ``Ops.empty_cache``.  Their keys are the names of the matrices that compute queries,
    keys and values.
    """

    def __init__(self, buffers: Mapping[str, Array], positions: Array, capacity: int) -> None:
        self.buffers, self.positions, self.capacity = buffers, positions, capacity
        self.angles: dict[Rope, tuple[Array, Array]] = {}
        """The cosines and sines at ``positions``, for a forward of one token per sequence."""

    def of(self, sequences: slice, positions: Array) -> Cache:
        """A view of the cache for these sequences, with their ``positions``."""
        buffers = {name: buffer[sequences] for name, buffer in self.buffers.items()}
        return Cache(buffers, positions, self.capacity)

    def turn(self, ctx: PassContext, ropes: set[Rope], dtype: Any) -> None:
        """Fill ``angles``, in memory that stays allocated during the whole forward."""
        for rope in ropes:
            tables = rope.tables(ctx._replace(cache=None), self.capacity, self.capacity, dtype)
            shape = len(self.positions), tables[0].shape[1]
            cos, sin = (ctx.arena.take(shape, table.dtype) for table in tables)
            for table, out in zip(tables, (cos, sin), strict=True):
                ctx.ops.embedding(self.positions, table, out)
            self.angles[rope] = cos, sin

    def attention(self, of: Attention, ctx: PassContext, attend: Attend, masks: Masks) -> None:
        """Cache keys and values, then attend: within a prompt, or from one query per sequence to all cached keys."""
        buffer = self.buffers[of.column.name]
        ctx.ops.append_to_cache(attend, buffer, self.positions)
        if attend.length > 1:
            ctx.cp.attention(attend, ctx.arena, masks)
        else:
            ctx.ops.attention_to_cache(attend, buffer, self.positions, of.window, ctx.arena)


def make_cache(
    ops: Any, attentions: list[Attention], positions: Array, capacity: int, dtype: Any, shards: int = 1
) -> Cache:
    """An empty cache for the kv heads of one of ``shards`` ranks."""
    buffers = {
        each.column.name: ops.empty_cache(len(positions), each.heads_of(shards)[1], each.head_dim, capacity, dtype)
        for each in attentions
    }
    return Cache(buffers, positions, capacity)
