"""Context parallelism: the tokens of a sequence split over ranks; attention alone looks at more than a rank's own."""

from __future__ import annotations

from collections.abc import Sequence

from kos.memory.arena import Arena
from kos.train.ops import Array, Ops
from kos.train.parallel.mesh import Axis
from kos.train.parallel.tensor import ALONE


class ContextParallel:
    """Attention of the tokens that this rank of ``axis`` holds. With one rank: the plain operations."""

    def __init__(self, ops: Ops, axis: Axis = ALONE) -> None:
        self.ops, self.axis, self.size = ops, axis, axis.size

    def positions(self, tokens: int) -> Sequence[int]:
        """Where in the whole sequence the ``tokens`` of this rank stand."""
        return range(tokens)

    def take(self, tokens: Array) -> Array:
        """This rank's tokens of (B, T)."""
        return tokens

    def attention(self, qkv: Array, heads: int, kv_heads: int, out: Array, log_sum_exp: Array, arena: Arena) -> None:
        """As ``Ops.attention``, over the keys and values of all ranks."""
        self.ops.attention(qkv, heads, kv_heads, out, log_sum_exp, arena)

    def attention_backward(
        self, d_out: Array, qkv: Array, out: Array, log_sum_exp: Array, heads: int, kv_heads: int, d_qkv: Array,
        arena: Arena,
    ) -> None:  # fmt: skip
        """As ``Ops.attention_backward``."""
        self.ops.attention_backward(d_out, qkv, out, log_sum_exp, heads, kv_heads, d_qkv, arena)
