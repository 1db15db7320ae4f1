"""MLPs: SwiGLU and GELU."""

from __future__ import annotations

from collections.abc import Iterator

from kos.train.layers.context import PassContext
from kos.train.layers.sublayer import Saved, Sublayer
from kos.train.ops import Array
from kos.train.parallel.tensor import Half


class MLP(Sublayer):
    """``column`` makes gate and up, ``row`` takes silu(gate) up."""

    cheap = True

    def core(self, ctx: PassContext, saved: Saved, half: Half, last: bool) -> Iterator[None]:
        if saved.inner_NF is not None:
            self.activate(ctx, saved.columns_NW[half.rows], saved.inner_NF[half.rows])
            yield

    def again(self, ctx: PassContext, saved: Saved, inner_NF: Array) -> None:
        self.activate(ctx, saved.columns_NW, inner_NF)

    def activate(self, ctx: PassContext, columns_NW: Array, inner_NF: Array) -> None:
        ctx.ops.swiglu(columns_NW, inner_NF, ctx.arena)

    def core_backward(self, ctx: PassContext, saved: Saved, inner: Array, d_inner: Array, d_columns: Array) -> None:
        out = None if ctx.products.fp8 else inner  # in fp8 it need not be there: the same bits whether it is or not
        ctx.ops.swiglu_backward(d_inner, saved.columns_NW, out, d_columns, ctx.arena)


class GeluMLP(MLP):
    """``row`` takes gelu(column)."""

    def activate(self, ctx: PassContext, columns_NW: Array, inner_NF: Array) -> None:
        ctx.ops.gelu(columns_NW, inner_NF, ctx.arena)

    def core_backward(self, ctx: PassContext, saved: Saved, inner: Array, d_inner: Array, d_columns: Array) -> None:
        ctx.ops.gelu_backward(d_inner, saved.columns_NW, d_columns, ctx.arena)
