"""``--dtype fp8``: the products of linear layers in 8 bits.

What it is in place of: torchao's Float8Linear, or Transformer Engine with its recipe "Float8BlockScaling". The product
of the forward and both of the backward take their two operands in 8 bits; sums, outputs and everything else stay as
they are.

- *Formats*: E4M3 for activations and weights, E5M2 for gradients (Micikevicius et al. 2022, arXiv:2209.05433).
- *Scales*: one power of two for each 128 x 128 numbers, from these alone (DeepSeek-V3, arXiv:2412.19437, 3.3.2, has
  finer ones for activations). A step does not depend on an earlier one's scales, and no number saturates. One pass over
  a tensor is enough: a thread block sees all that its scale depends on. cuBLASLt multiplies these on Hopper alone: on
  others a tensor has one scale (``Ops.one_scale``), for which it is read twice.
- *Transposed copies*: on Hopper both operands of an 8-bit product lie along the sum (TN). A product and those of its
  backward sum over features, outputs and tokens, so most tensors are needed twice: ``rows`` and, transposed,
  ``columns``. One pass writes both.
- *Weights* are quantized when a step first reads them (``fp8_weights``), so with ZeRO-1, a step waits for
  the all-gather of a weight as late as it does without fp8. The base of adapters never changes: it is quantized
  when it is loaded, and not held in 16 bits (``Step.quantized``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kos.errors import SettingError
from kos.memory.arena import Arena
from kos.train.ops import SCALE_BLOCK, Array, Normalize, Scaled, scales_shape
from kos.train.ops.linear import Wrapper
from kos.train.ops.parameters import OnFirstRead, Shape
from kos.train.ops.protocol import Ops

Take = Callable[[Any, Any], Any]

FORWARD = np.dtype(ml_dtypes.float8_e4m3fn)
"""The format of activations and weights."""

BACKWARD = np.dtype(ml_dtypes.float8_e5m2)
"""The format of gradients."""

SCALE = np.dtype(np.float32)
MULTIPLE = 16
"""cuBLASLt's 8-bit products take only sizes that are multiples of it."""

OF_HEAD = " of the head"
"""Suffix of the name of the head's matrix in 8 bits.  Without it, the name may be that of the embedding, in 16 bits."""


class Role(NamedTuple):
    """What a tensor is to a linear layer: in words, its format, and of which products it is the first operand.

    ``rows`` and ``columns``: whether the copy that is not, or is transposed, is a first operand; else it is a second.
    """

    name: str
    dtype: Any
    rows: bool
    columns: bool


WEIGHTS = Role("the weights", FORWARD, rows=False, columns=False)
INPUT = Role("the input", FORWARD, rows=True, columns=False)
GRADIENT = Role("the gradient of the output", BACKWARD, rows=True, columns=True)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix (N, F) in 8 bits: ``rows``, and the same transposed, (F, N), in ``columns``."""

    rows: Scaled | None
    columns: Scaled | None
    raw: Any = None
    """What was quantized, where something reads it."""

    name: str = ""
    """Of a weight."""

    members: Sequence[str] = ()
    """The names of the tensors that are stacked in a weight; its own name if none are."""

    @classmethod
    def empty(
        cls, shape: tuple[int, int], role: Role, ops: Ops, rows: Take | None, columns: Take | None, parts: int = 1,
        raw: Any = None, name: str = "",
    ) -> Quantized:  # fmt: skip
        """Memory of ``rows(shape, dtype)`` and ``columns(shape, dtype)`` for each copy that is given.

        ``parts``: how many parts of the rows are multiplied apart.
        """

        def copy(take: Take | None, shape: tuple[int, int], first: bool, parts: int) -> Scaled | None:
            scales = scales_shape(*shape, first, parts, ops.one_scale)
            return take and Scaled(take(shape, role.dtype), take(scales, SCALE))

        (n, f) = shape
        return cls(copy(rows, (n, f), role.rows, parts), copy(columns, (f, n), role.columns, 1), raw, name)

    def of(self, x: Any) -> Quantized:
        """``x`` as an input of ``linear``, which saves its transposed copy in this memory."""
        return replace(self, raw=x)

    def __getitem__(self, rows: slice) -> Quantized:
        """The part of these rows."""
        assert self.rows is not None
        values, scales = self.rows
        if len(scales.shape) == 3:
            scales = scales[rows.start // scales.shape[2]]
        return Quantized(Scaled(values[rows], scales), None)

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.rows is not None
        return tuple(self.rows.values.shape)

    @property
    def nbytes(self) -> int:
        """Of both copies."""
        return sum(int(x.nbytes) for copy in (self.rows, self.columns) for x in copy or ())


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A matrix (N, F) that is computed where it is quantized. ``of_rows`` gives the function that does it for rows."""

    shape: tuple[int, int]
    of_rows: Callable[[slice], Callable[..., None]]

    def __getitem__(self, rows: slice) -> Unwritten:
        return Unwritten((rows.stop - rows.start, self.shape[1]), lambda every: self.of_rows(rows))


class Fp8Ops(Wrapper):
    """``inner``, with the products of linear layers in 8 bits: weights are ``Quantized``, other operands may be.

    ``arena`` is scratch memory. ``alone``: one rank has all features, so that no rank needs an input in 16 bits.
    ``head``: the head's products are in 8 bits too (``--fp8-head``).
    """

    def __init__(self, inner: Any, arena: Arena, alone: bool, head: bool = False) -> None:
        super().__init__(inner)
        self.arena, self.alone, self.head, self.watching, self.first = arena, alone, head, False, ""
        self.head_multiple = MULTIPLE if head else 1

    @property
    def of_head(self) -> Any:
        return self if self.head else self.inner.of_head

    def matrix(self, of: Mapping[str, Any], name: str) -> Any:
        return of.get(name + OF_HEAD) or of[name]

    @property
    def of_adapters(self) -> Any:
        return self.inner.of_adapters

    def watch(self, watching: bool) -> None:
        """While ``watching``, which waits for the device, ``first`` becomes the first operand that is not finite."""
        self.watching = watching
        self.first = "" if watching else self.first

    def _look(self, role: Role, weight: Quantized, operand: Quantized) -> None:
        if self.watching and not self.first:
            copy = operand.rows or operand.columns
            if copy and not np.isfinite(self.inner.to_host(copy.scales)).all():
                self.first = f"{role.name} of {weight.name}"

    # --- operands ----------------------------------------------------------------------------------------

    def empty_transposed(self, shape: tuple[int, int], arena: Arena) -> Quantized | None:
        return Quantized.empty(shape, INPUT, self.inner, None, arena.take) if self.alone else None

    def normed(self, x: Array, norm: Normalize, rstd: Array) -> Unwritten | None:
        def of_rows(n: slice) -> Callable[..., None]:
            return partial(self.inner.quantize_rms_norm, x[n], norm, rstd[n])

        return Unwritten(x.shape, of_rows) if self.alone else None

    def gated(self, gate_up: Array) -> Unwritten | None:
        n, f = gate_up.shape
        return Unwritten((n, f // 2), lambda n: partial(self.inner.quantize_swiglu, gate_up[n]))

    def gated_gradient(self, d_out: Array, gate_up: Array) -> Unwritten | None:
        def of_rows(n: slice) -> Callable[..., None]:
            return partial(self.inner.quantize_swiglu_backward, d_out[n], gate_up[n])

        return None if d_out.shape[1] % SCALE_BLOCK else Unwritten(gate_up.shape, of_rows)

    def read_16(self, d_out: Quantized) -> Array:
        return d_out.raw

    def reads_16(self, bias: str | None) -> bool:
        return bias is not None

    def gradient(self, d_out: Any, keep: Arena | None, parts: int = 1) -> Quantized:
        return self.quantized(d_out, GRADIENT, self.arena, keep, parts)

    def quantized(
        self, x: Any, role: Role, rows: Arena | None = None, columns: Arena | None = None, parts: int = 1
    ) -> Quantized:
        """``x`` in 8 bits: in ``rows``, and transposed in ``columns``, if they are given."""
        if isinstance(x, Quantized):
            return x
        of_rows, of_columns = (arena.take if arena else None for arena in (rows, columns))
        made = Quantized.empty(x.shape, role, self.inner, of_rows, of_columns, parts, x)
        self._quantize(x, made)
        return made

    def _quantize(self, x: Any, made: Quantized) -> None:
        quantize = x.of_rows(slice(0, x.shape[0])) if isinstance(x, Unwritten) else partial(self.inner.quantize, x)
        quantize(made.rows, made.columns, self.arena)

    # --- operations --------------------------------------------------------------------------------------

    def linear(
        self, x: Any, weight: Quantized, out: Array, residual: Array | None = None, bias: Array | None = None
    ) -> None:
        """``Ops.linear``. Of an ``x`` in memory of ``empty_transposed`` the transposed copy is saved there."""
        x, columns = (x.raw, x.columns) if isinstance(x, Quantized) else (x, None)
        with self.arena.scope():
            made = replace(Quantized.empty(x.shape, INPUT, self.inner, self.arena.take, None), columns=columns)
            self._quantize(x, made)
            self._look(WEIGHTS, weight, weight)
            self._look(INPUT, weight, made)
            self.inner.scaled_product(made.rows, weight.rows, out, residual, bias, self.arena)

    def linear_input_gradient(self, d_out: Any, weight: Quantized, dx: Array) -> None:
        """``Ops.linear_input_gradient``."""
        with self.arena.scope():
            d = self.quantized(d_out, GRADIENT, self.arena)
            self._look(GRADIENT, weight, d)
            self.inner.scaled_product(d.rows, weight.columns, dx, None, None, self.arena)

    def linear_weight_gradient(
        self, d_out: Any, x: Any, d_weight: Array, accumulate: bool, arena: Arena, outputs: int | None = None
    ) -> None:
        """``Ops.linear_weight_gradient``."""
        with arena.scope():
            d, x_8 = self.quantized(d_out, GRADIENT, None, arena), self.quantized(x, INPUT, None, arena)
            into = d_weight, d_weight if accumulate else None, None, arena, False
            self.inner.scaled_product(d.columns, x_8.columns, *into)

    def sum_rows(self, x: Any, out: Array, accumulate: bool, arena: Arena) -> None:
        """``Ops.sum_rows``."""
        self.inner.sum_rows(x.raw if isinstance(x, Quantized) else x, out, accumulate, arena)

    def swiglu_backward(self, d_out: Array, gate_up: Array, out: Array | None, d_gate_up: Array, arena: Arena) -> None:
        """``Ops.swiglu_backward``, with the same bits whether ``out`` was saved or not."""
        self.inner.swiglu_backward(d_out, gate_up, None, d_gate_up, arena)


def fp8_weights(
    weights: Mapping[str, Array], store: Mapping[str, Quantized], ops: Ops, arena: Arena
) -> Mapping[str, Any]:
    """The weights of a step: those that ``store`` has memory for are quantized when they are first read.

    The others are those of ``weights``.
    """

    def first(name: str) -> Any:
        if (made := store.get(name)) is None:
            return weights[name]
        ops.quantize(weights[made.name], made.rows, made.columns, arena)
        return made

    return OnFirstRead(weights, first)


def linears(layers: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """The linear layers of lists of sublayers."""
    for layer in layers:
        for sublayer in layer:
            yield from (sublayer.column, sublayer.row)


def linear_names(models: Sequence[Any], head: bool) -> list[str]:
    """The weights of the linear layers of ``models``, and with ``head`` also that of the output head."""
    names = [linear.name for model in models for linear in linears(model.layers)]
    return names + [model.config.head + OF_HEAD for model in models if head and model.local.last]


def weight_store(
    names: Iterable[str], shapes: Mapping[str, Shape], stacks: Mapping[str, Sequence[str]], ops: Ops
) -> dict[str, Quantized]:
    """Memory for the weights of linear layers.  ``shapes`` are those of tensors, ``stacks`` name stacked ones."""
    store = dict[str, Quantized]()
    for name in names:
        tensor = name.removesuffix(OF_HEAD)
        members = stacks.get(tensor, (tensor,))
        shape = sum(shapes[each][0] for each in members), shapes[members[0]][1]
        store[name] = replace(Quantized.empty(shape, WEIGHTS, ops, ops.zeros, ops.zeros, name=tensor), members=members)
    return store


def first_of(found: Iterable[str], layers: Iterable[Iterable[Any]], head: str) -> str | None:
    """The first, in the order of a step, of what the ranks of a model of ``layers`` have ``found``."""
    order = [*(linear.name for linear in linears(layers)), head]

    def place(each: str) -> tuple[bool, int]:
        kind, _, name = each.rpartition(" of ")
        return kind == GRADIENT.name, -order.index(name) if kind == GRADIENT.name else order.index(name)

    return min(filter(None, found), key=place, default=None)


def check_sizes(layers: Iterable[Iterable[Any]], tp: int, tokens: Mapping[str, int]) -> None:
    """ConfigError if a product of these layers has a size that is no multiple of ``MULTIPLE``.

    ``tokens`` has by their description the numbers of tokens that a rank multiplies at once.
    """
    sizes = dict(tokens)
    for linear in linears(layers):
        split = linear.rows, linear.columns
        for dim, (size, of) in enumerate(zip(split, ("rows", "columns"), strict=True)):
            own = size if dim != linear.dim else linear.features(tp) if dim == 0 else size // tp
            sizes[f"the {of} of {linear.name}" + f" on a rank of --tp {tp}" * (own != size)] = own
    for what, size in sizes.items():
        if size % MULTIPLE:
            raise SettingError("--dtype fp8", f"{what} to be a multiple of {MULTIPLE}", size)
