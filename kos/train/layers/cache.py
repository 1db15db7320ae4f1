"""The KV cache: the keys and values of all tokens so far of each sequence, in one contiguous buffer per layer.

A prompt is processed in one forward of all its tokens, one sequence at a time, with the attention of training. Each
later forward has one token of each sequence, whose query attends to the cached keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kos.train.layers import PassContext
from kos.train.layers.attention import Attention, Rope
from kos.train.ops import Array, Attend
from kos.train.parallel.context import Masks


class Cache:
    """The cache of ``positions.shape[0]`` sequences of up to ``capacity`` tokens.

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
