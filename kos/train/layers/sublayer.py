"""A branch of the residual stream: norm, column-parallel product, core, row-parallel product, norm, addition.

Most families have the first norm alone, some the last (``NoNorm`` is the first, then).

Attention and MLP differ in the core. A forward is gather_in, compute, reduce_out. The first and the last begin the
collectives of tensor parallelism, and ``Model`` runs the other half of the tokens while they are under way.

Suffixes name dimensions: N = B T tokens, n those of them in this rank's residual stream, D hidden, W columns of the
first product, F features of the core's output; W and F count what this rank computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from kos.memory.arena import Arena
from kos.memory.sharded import Sharded
from kos.train.layers import PassContext
from kos.train.layers.linear import ColumnLinear, RowLinear
from kos.train.layers.lora import Lora
from kos.train.layers.norm import Norm
from kos.train.ops import Array
from kos.train.parallel.tensor import Half


class Branch(NamedTuple):
    """The input of the norm at the end of a branch, and the statistics of its rows."""

    x_nD: Array
    statistics_n: Array


class Activations(NamedTuple):
    """The arrays that a forward writes and its backward reads. The backward recomputes those that are None."""

    x_nD: Array
    statistics_n: Array
    normed_nD: Array | None
    columns_NW: Array
    inner_NF: Array | None
    of_core: Any = None
    normed_8: Any = None
    """In place of ``normed_nD``: transposed, in 8 bits (``LinearOps.empty_transposed``)."""

    inner_8: Any = None
    """The same of ``inner_NF``."""

    branch: Branch | None = None
    """If there is a norm at its end."""

    column_lora_hidden: Sequence[Array] = ()
    """Of the first product's adapters."""

    row_lora_hidden: Sequence[Array] = ()


class Sublayer:
    """x + after(row(core(column(norm(x))))). A subclass has the core. ``after``: a norm, for one rank of tp alone."""

    recomputed: ClassVar[bool]
    """Whether the core's output is cheap to compute again (``activate``)."""

    def __init__(self, norm: Norm, column: ColumnLinear, row: RowLinear, after: Norm | None = None) -> None:
        self.norm, self.column, self.row, self.after = norm, column, row, after

    def adapt(self, lora: Lora) -> None:
        """Add the adapters of both products that ``lora`` names."""
        for linear in (self.column, self.row):
            linear.adapt(lora)
        self.norm.written = self.column.adapters is not None

    @property
    def adapted(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the matrices in both products that have adapters."""
        return tuple(tuple(each.adapters.members if each.adapters else ()) for each in (self.column, self.row))

    def placements(self, shard: int, shards: int) -> dict[str, Sharded]:
        """Of each tensor, in the order in which the backward finishes their gradients."""
        found = (self.after.placements() if self.after else {}) | self.core_placements()
        for linear in (self.row, self.column):
            found |= linear.placements(shard, shards)
        return found | self.norm.placements()

    # --- the core ------------------------------------------------------------------------------------------

    def core_placements(self) -> dict[str, Sharded]:
        """Of the core's own tensors, as in ``placements``."""
        return {}

    def save_core(self, ctx: PassContext, tokens: int, seq_len: int, dtype: Any, arena: Arena) -> Any:
        """Memory for what the core's backward needs besides its input and output."""

    def core(self, ctx: PassContext, saved: Activations, half: Half, last: bool) -> Iterator[None]:
        """Write ``inner_NF`` of a half, if it is there. Yields where a turn ends. ``last``: this is the last half."""
        raise NotImplementedError

    def activate(self, ctx: PassContext, columns_NW: Array, inner_NF: Array) -> None:
        """Write the output of a ``recomputed`` core.  A backward calls it too, to compute the output again."""
        raise NotImplementedError

    def core_backward(self, ctx: PassContext, saved: Activations, inner: Any, d_inner: Array, d_columns: Array) -> None:
        """Write the gradient of the core's input. ``inner``: None if only its copy in 8 bits was saved."""
        raise NotImplementedError

    def inner_of(self, ctx: PassContext, columns_NW: Array) -> Any:
        """The core's output as the second product takes it without memory of its own; None: it needs memory."""

    def column_gradient(self, ctx: PassContext, saved: Activations, inner: Any, d_inner: Array) -> Any:
        """The gradient of the first product's output, as ``LinearOps.gradient`` gives it to both of the backward."""
        d_columns = self.empty_gradient(ctx, saved)
        self.core_backward(ctx, saved, inner, d_inner, d_columns)
        return self.quantized_gradient(ctx, d_columns)

    def fused_gradient(self, ctx: PassContext, saved: Activations, d_out: Any) -> Any:
        """``column_gradient``, computed in the same kernel as the second matmul's backward; None where this is not
        faster."""

    def empty_gradient(self, ctx: PassContext, saved: Activations) -> Array:
        """Memory for the gradient of the first matmul's output."""
        arena = ctx.keep_for(self.column) if ctx.ops.reads_16(self.column.bias) else ctx.arena
        return self._empty_columns(ctx, len(saved.columns_NW), saved.columns_NW.dtype, arena)

    def quantized_gradient(self, ctx: PassContext, d_columns: Any) -> Any:
        """``LinearOps.gradient`` of the first product's output, whose halves are multiplied apart."""
        keep = ctx.keep if ctx.trains(self.column) else None
        return ctx.ops.gradient(d_columns, keep, len(ctx.tp.halves(d_columns.shape[0])))

    # --- forward -------------------------------------------------------------------------------------------

    def save(self, ctx: PassContext, x_nD: Array, seq_len: int, arena: Arena, recomputed: Arena | None) -> Activations:
        """Memory for what a forward writes: in ``arena``; what is cheap to compute again in ``recomputed``, if any."""
        tokens, dtype = ctx.tp.tokens(len(x_nD)), x_nD.dtype
        widths = (self.column, self.column.columns), (self.row, self.row.columns // ctx.tp.size)
        eight = [ctx.ops.empty_transposed((tokens, f), recomputed) if recomputed and not linear.adapters else None
                 for linear, f in widths]  # fmt: skip
        lora_hidden = [each.adapters.empty(ctx, tokens, dtype, arena) if each.adapters else () for each, _ in widths]
        of_normed, of_inner = (None if made else recomputed for made in eight)
        of_inner, columns = of_inner if self.recomputed else arena, self._empty_columns(ctx, tokens, dtype, arena)
        inner = self.inner_of(ctx, columns) or (of_inner and self.empty_inner(ctx, tokens, dtype, of_inner))
        branch = None
        if self.after is not None:
            branch = Branch(arena.take(x_nD.shape, dtype), self.after.statistics(ctx, x_nD, arena))
        return Activations(
            x_nD, self.norm.statistics(ctx, x_nD, arena), of_normed and self.norm.empty(x_nD, of_normed), columns,
            inner, self.save_core(ctx, tokens, seq_len, dtype, arena), eight[0], eight[1], branch, lora_hidden[0],
            lora_hidden[1],
        )  # fmt: skip

    def _empty_columns(self, ctx: PassContext, tokens: int, dtype: Any, arena: Arena) -> Array:
        return ctx.ops.empty_columns(arena, tokens, self.column.features(ctx.tp.size), dtype)

    def empty_inner(self, ctx: PassContext, tokens: int, dtype: Any, arena: Arena) -> Array:
        """Memory for the core's output."""
        return ctx.ops.empty_columns(arena, tokens, self.row.columns // ctx.tp.size, dtype)

    def gather_in(self, ctx: PassContext, saved: Activations, exchange_ND: Array, half: Half) -> Callable[[], Array]:
        """Norm, and begin to gather the rows of all ranks. The returned function waits for them."""
        if (fused := self.norm.fused(ctx, saved.x_nD, saved.statistics_n)) is not None:
            return lambda: fused
        self.norm.forward(ctx, saved.x_nD, saved.normed_nD, saved.statistics_n, half.own)
        return ctx.tp.start_gather(saved.normed_nD, exchange_ND, [half])

    def compute(self, ctx: PassContext, saved: Activations, x_ND: Array, half: Half, last: bool) -> Iterator[None]:
        """The first product and the core. Yields where a turn ends."""
        x_ND = x_ND[half.rows] if saved.normed_8 is None else saved.normed_8.of(x_ND)
        self.column.forward(ctx, x_ND, saved.columns_NW[half.rows], saved.column_lora_hidden, half)
        yield from self.core(ctx, saved, half, last)

    def reduce_out(
        self, ctx: PassContext, saved: Activations, terms_ND: Array, out_nD: Array | None, half: Half
    ) -> Callable[[], None]:
        """The second product, and begin its sum over ranks. The returned function waits, and adds to the stream.

        ``out_nD``: None if only what is saved is needed.
        """
        inner_NF = saved.inner_NF if saved.inner_8 is None else saved.inner_8.of(saved.inner_NF)
        if saved.branch is None:
            return self.row.forward(ctx, inner_NF, terms_ND, out_nD, saved.x_nD, half, saved.row_lora_hidden)
        (branch_nD, statistics), after = saved.branch, self.after
        assert after is not None
        self.row.forward(ctx, inner_NF, terms_ND, branch_nD, None, half, saved.row_lora_hidden)()

        def complete() -> None:
            with ctx.arena.scope():
                normed_nD = after.normed(ctx, branch_nD, ctx.arena, statistics)
                if out_nD is not None:
                    ctx.ops.add(saved.x_nD, normed_nD, out_nD)

        return complete

    # --- backward ------------------------------------------------------------------------------------------

    def backward(
        self, ctx: PassContext, saved: Activations, dx_nD: Array, d_out_ND: Array, dx_ND: Array, more: bool
    ) -> Array:
        """Replaces the gradient of the output in ``dx_nD`` by the gradient of the input.

        ``d_out_ND`` is the gradient of the output for all ranks' rows. Returns that of the input, in ``dx_ND``, if
        ``more`` of the backward needs it. The gradient of the second matrix can overlap the sum of the first's input
        gradient, that of the first the gather of ``dx_nD``.
        """
        tp, arena, finished = ctx.tp, ctx.arena, list[str]()
        with arena.scope():
            if saved.branch is not None:
                d_out_ND = self._branch_gradient(ctx, saved.branch, dx_nD)
            normed, inner = self._operands(ctx, saved)
            d_out = ctx.ops.gradient(d_out_ND, ctx.keep if ctx.trains(self.row) else None)
            d_columns, d_lora_hidden = self.fused_gradient(ctx, saved, d_out), list[Array]()
            if d_columns is None:
                d_inner_NF = self.empty_inner(ctx, len(saved.columns_NW), dx_nD.dtype, arena)
                self.row.backward(ctx, d_out, d_out_ND, d_inner_NF, inner, saved.row_lora_hidden)
                d_columns = self.column_gradient(ctx, saved, inner, d_inner_NF)
            if self.column.adapters:
                d_lora_hidden = self.column.adapters.empty(ctx, len(saved.columns_NW), dx_nD.dtype, arena)
                self.column.adapters.backward(ctx, ctx.ops.read_16(d_columns), saved.column_lora_hidden, d_lora_hidden)
            with arena.scope():
                d_normed_nD = arena.take(dx_nD.shape, dx_nD.dtype)
                with arena.scope():
                    summed = self.column.backward(ctx, d_columns, d_normed_nD, d_lora_hidden)
                    ctx.weight_gradient(self.row, d_out, saved.inner_8 or inner)
                    summed()
                of_norm = ctx.into._replace(final=finished.append)  # final after the matrix, in their order in memory
                self.norm.backward(ctx._replace(into=of_norm), d_normed_nD, saved.x_nD, saved.statistics_n, dx_nD)
            arrived = tp.start_gather(dx_nD, dx_ND, None if more else [])
            x_ND = normed()
            ctx.weight_gradient(self.column, d_columns, x_ND)
            if self.column.adapters:
                self.column.adapters.gradient_of_a(ctx, d_lora_hidden, x_ND)
            for name in finished:
                ctx.into.final(name)
            return arrived()

    def _operands(self, ctx: PassContext, saved: Activations) -> tuple[Callable[[], Any], Any]:
        """The inputs of both products, as they were saved or computed again; the first waits for all ranks' rows."""
        x_nD, statistics, normed, inner = saved.x_nD, saved.statistics_n, saved.normed_nD, saved.inner_NF
        unread, keep = not ctx.reads_input(self.column), ctx.keep_for(self.column)
        if normed is None and not (saved.normed_8 or unread):
            normed = self.norm.fused(ctx, x_nD, statistics)
            normed = self.norm.normed(ctx, x_nD, keep, statistics) if normed is None else normed
        if saved.normed_8 or unread:
            gathered: Callable[[], Any] = lambda: saved.normed_8  # noqa: E731
        else:
            gathered = ctx.tp.start_gather(normed, ctx.tp.empty_rows(normed, keep))
        if inner is None and not saved.inner_8:
            inner = self.empty_inner(ctx, len(saved.columns_NW), x_nD.dtype, ctx.keep_for(self.row))
            self.activate(ctx, saved.columns_NW, inner)
        return gathered, inner

    def _branch_gradient(self, ctx: PassContext, branch: Branch, dx_nD: Array) -> Array:
        """The gradient of the second product's output, where a norm follows it."""
        assert self.after is not None
        d_branch_nD = ctx.keep.take(dx_nD.shape, dx_nD.dtype)
        ctx.ops.zero(d_branch_nD)
        with ctx.arena.scope():
            d_out_nD = ctx.arena.take(dx_nD.shape, dx_nD.dtype)
            ctx.ops.copy(dx_nD, d_out_nD)
            self.after.backward(ctx, d_out_nD, *branch, d_branch_nD)
        return d_branch_nD
