"""MLPs: SwiGLU and GELU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kos.train.layers import PassContext
from kos.train.layers.sublayer import Activations, Sublayer
from kos.train.ops import Array
from kos.train.parallel.tensor import Half


class MLP(Sublayer):
    """``column`` makes gate and up, ``row`` takes silu(gate) up."""

    recomputed = True

    def inner_of(self, ctx: PassContext, columns_NW: Array) -> Any:
        return None if self.row.adapters else ctx.ops.gated(columns_NW)

    def core(self, ctx: PassContext, saved: Activations, half: Half, last: bool) -> Iterator[None]:
        if saved.inner_NF is not None and self.inner_of(ctx, saved.columns_NW) is None:
            self.activate(ctx, saved.columns_NW[half.rows], saved.inner_NF[half.rows])
            yield

    def activate(self, ctx: PassContext, columns_NW: Array, inner_NF: Array) -> None:
        ctx.ops.swiglu(columns_NW, inner_NF, ctx.arena)

    def core_backward(
        self, ctx: PassContext, saved: Activations, inner: Array, d_inner: Array, d_columns: Array
    ) -> None:
        ctx.ops.swiglu_backward(d_inner, saved.columns_NW, inner, d_columns, ctx.arena)

    def column_gradient(self, ctx: PassContext, saved: Activations, inner: Any, d_inner: Array) -> Any:
        written = self.column.bias or self.column.adapters or self.inner_of(ctx, saved.columns_NW) is None
        d_columns = None if written else ctx.ops.gated_gradient(d_inner, saved.columns_NW)
        if d_columns is None:
            return super().column_gradient(ctx, saved, inner, d_inner)
        return self.quantized_gradient(ctx, d_columns)

    def fused_gradient(self, ctx: PassContext, saved: Activations, d_out: Any) -> Any:
        operands = d_out, ctx.ops.matrix(ctx.weights, self.row.name), saved.columns_NW
        if self.row.adapters or not ctx.ops.fuses_swiglu(*operands, ctx.arena):
            return None
        d_columns = self.empty_gradient(ctx, saved)
        ctx.ops.linear_swiglu_backward(*operands, d_columns, ctx.arena)
        return self.quantized_gradient(ctx, d_columns)


class GeluMLP(MLP):
    """``row`` takes gelu(column)."""

    def inner_of(self, ctx: PassContext, columns_NW: Array) -> None:
        """None: its output is written."""

    def activate(self, ctx: PassContext, columns_NW: Array, inner_NF: Array) -> None:
        ctx.ops.gelu(columns_NW, inner_NF, ctx.arena)

    def fused_gradient(self, ctx: PassContext, saved: Activations, d_out: Any) -> None:
        """None, because there is no such kernel."""

    def core_backward(
        self, ctx: PassContext, saved: Activations, inner: Array, d_inner: Array, d_columns: Array
    ) -> None:
        ctx.ops.gelu_backward(d_inner, saved.columns_NW, d_columns, ctx.arena)
