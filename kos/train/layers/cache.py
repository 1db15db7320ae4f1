"""The KV cache: the keys and values of the tokens that sequences have so far, in one contiguous buffer a layer.

A prompt is a forward of all its tokens from the first on, one sequence at a time; attention is that of training then.
After it a forward has one token of each sequence, whose query sees the cached keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kos.train.layers import PassContext
from kos.train.layers.attention import Attention, Rope
from kos.train.ops import Array, Attend
from kos.train.parallel.context import Masks


class Cache:
    """Of ``positions.shape[0]`` sequences of up to ``capacity`` tokens.

    ``positions`` (B,), int32, is where the first token of the next forward goes: 0 for a prompt. ``buffers`` are the
    dialect's own (``Ops.empty_cache``), by the names of the matrices that make queries, keys and values.
    """

    def __init__(self, buffers: Mapping[str, Array], positions: Array, capacity: int) -> None:
        self.buffers, self.positions, self.capacity = buffers, positions, capacity
        self.angles: dict[Rope, tuple[Array, Array]] = {}
        """Of the forward of one token a sequence: cosines and sines at ``positions``."""

    def of(self, sequences: slice, positions: Array) -> Cache:
        """A view of these sequences."""
        buffers = {name: buffer[sequences] for name, buffer in self.buffers.items()}
        return Cache(buffers, positions, self.capacity)

    def turn(self, ctx: PassContext, ropes: set[Rope], dtype: Any) -> None:
        """Look up ``angles``, in memory that the whole forward keeps."""
        for rope in ropes:
            tables = rope.tables(ctx._replace(cache=None), self.capacity, self.capacity, dtype)
            shape = len(self.positions), tables[0].shape[1]
            cos, sin = (ctx.arena.take(shape, table.dtype) for table in tables)
            for table, out in zip(tables, (cos, sin), strict=True):
                ctx.ops.embedding(self.positions, table, out)
            self.angles[rope] = cos, sin

    def attention(self, of: Attention, ctx: PassContext, attend: Attend, masks: Masks) -> None:
        """Cache keys and values, and attend: within a prompt, or from one query a sequence to all that is cached."""
        buffer = self.buffers[of.column.name]
        ctx.ops.append_to_cache(attend, buffer, self.positions)
        if attend.length > 1:
            ctx.cp.attention(attend, ctx.arena, masks)
        else:
            ctx.ops.attention_to_cache(attend, buffer, self.positions, of.window, ctx.arena)


def make_cache(ops: Any, attentions: list[Attention], positions: Array, capacity: int, dtype: Any) -> Cache:
    """An empty one, for one rank that holds the whole model."""
    buffers = {
        each.column.name: ops.empty_cache(len(positions), each.kv_heads, each.head_dim, capacity, dtype)
        for each in attentions
    }
    return Cache(buffers, positions, capacity)
