"""Norms of the residual stream: RMSNorm, LayerNorm, none."""

from __future__ import annotations

from typing import Any

from kos.memory.arena import Arena
from kos.memory.sharded import Sharded
from kos.train.layers import PassContext
from kos.train.ops import Array, Normalize
from kos.train.ops.linear import bias_of


class Norm:
    """RMSNorm of rows (n, ``size``), or of the heads of q or k.

    ``options`` are the fields of ``Normalize`` that are the same in every call, such as ``eps``.
    """

    def __init__(self, name: str, size: int, **options: Any) -> None:
        self.name, self.size, self.options = name, size, options
        self.written = False
        """Whether something besides the next product reads the normed rows."""

    def placements(self) -> dict[str, Sharded]:
        return {self.name: Sharded((self.size,), initial=1.0)}

    def spec(self, ctx: PassContext) -> Normalize:
        """What this norm asks of the operations."""
        return Normalize(ctx.weights[self.name], **self.options)

    def statistics(self, ctx: PassContext, x_nD: Array, arena: Arena) -> Array:
        """Memory for what the backward needs of a row."""
        return arena.take((len(x_nD),), ctx.ops.statistics_dtype(x_nD.dtype))

    def empty(self, x_nD: Array, arena: Arena) -> Array:
        """Memory for the normed rows."""
        return arena.take(x_nD.shape, x_nD.dtype)

    def forward(self, ctx: PassContext, x_nD: Array, out_nD: Array, statistics: Array, rows: slice) -> None:
        """Write ``rows`` of ``out_nD`` and ``statistics``."""
        ctx.ops.normalize(x_nD[rows], self.spec(ctx), out_nD[rows], statistics[rows])

    def fused(self, ctx: PassContext, x_nD: Array, statistics: Array) -> Any:
        """The normed rows where a product computes them, with the ``statistics``; None: ``forward`` does."""
        return None if self.written else ctx.ops.normed(x_nD, self.spec(ctx), statistics)

    def normed(self, ctx: PassContext, x_nD: Array, arena: Arena, statistics: Array | None = None) -> Array:
        """The normed rows of ``x_nD``, in ``arena``."""
        statistics = self.statistics(ctx, x_nD, ctx.arena) if statistics is None else statistics
        out_nD = self.empty(x_nD, arena)
        self.forward(ctx, x_nD, out_nD, statistics, slice(0, len(x_nD)))
        return out_nD

    def backward(self, ctx: PassContext, d_out: Array, x: Array, statistics: Array, dx: Array) -> None:
        """Add to ``dx``; overwrite ``d_out``."""
        (_, accumulate, final), names = ctx.into, [*self.placements()]
        d_weight, *d_bias = map(ctx.gradient, names)
        ctx.ops.normalize_backward(d_out, x, self.spec(ctx), statistics, dx, d_weight, accumulate, ctx.arena, *d_bias)
        for name in names:
            final(name)

    def forward_heads(self, ctx: PassContext, x_NW: Array, heads: slice, raw: Array) -> None:
        """Norm ``heads``, counted in ``size``, in place. ``raw`` gets what they were."""
        ctx.ops.head_norm(x_NW, self.spec(ctx), heads, raw)

    def backward_heads(self, ctx: PassContext, raw: Array, heads: slice, dx_NW: Array) -> None:
        """The gradient of ``heads``, in place."""
        _, accumulate, final = ctx.into
        ctx.ops.head_norm_backward(raw, self.spec(ctx), heads, dx_NW, ctx.gradient(self.name), accumulate, ctx.arena)
        final(self.name)


class LayerNorm(Norm):
    """With a bias. For one rank of tp alone."""

    def fused(self, ctx: PassContext, x_nD: Array, statistics: Array) -> None:
        """None."""

    def placements(self) -> dict[str, Sharded]:
        return super().placements() | {bias_of(self.name): Sharded((self.size,), initial=0.0)}

    def spec(self, ctx: PassContext) -> Normalize:
        return super().spec(ctx)._replace(bias=ctx.weights[bias_of(self.name)])

    def statistics(self, ctx: PassContext, x_nD: Array, arena: Arena) -> Array:
        return arena.take((2, len(x_nD)), ctx.ops.statistics_dtype(x_nD.dtype))

    def forward(self, ctx: PassContext, x_nD: Array, out_nD: Array, statistics: Array, rows: slice) -> None:
        ctx.ops.normalize(x_nD, self.spec(ctx), out_nD, statistics)


class NoNorm(Norm):
    """The rows as they are. For one rank of tp alone."""

    def __init__(self) -> None:
        super().__init__("", 0)

    def placements(self) -> dict[str, Sharded]:
        return {}

    def statistics(self, ctx: PassContext, x_nD: Array, arena: Arena) -> None:
        """None."""

    def empty(self, x_nD: Array, arena: Arena) -> None:
        """None."""

    def fused(self, ctx: PassContext, x_nD: Array, statistics: Array) -> Array:
        return x_nD

    def backward(self, ctx: PassContext, d_out: Array, x: Array, statistics: Array, dx: Array) -> None:
        ctx.ops.add(dx, d_out, dx)
