"""``--dtype fp8``: the products of linear layers in 8 bits.

What it is in place of: torchao's Float8Linear, or Transformer Engine with its recipe "current scaling". The forward's
product and both of the backward take their two operands in 8 bits; sums, outputs and everything else stay as they are.

- *Formats*: E4M3 for activations and weights, E5M2 for gradients (Micikevicius et al. 2022, arXiv:2209.05433).
- *Scales*: one power of two a tensor, from that tensor alone. A step does not depend on an earlier one's scales, and no
  number saturates.
- *Transposed copies*: on Hopper both operands of an 8-bit product lie along the sum (TN). A product and those of its
  backward sum over features, outputs and tokens, so most tensors are needed twice: ``rows`` and, transposed,
  ``columns``. One pass writes both.
- *Weights* are quantized when a step first reads them (``Fp8Weights``), so with ZeRO-1 a weight's gather is waited for
  as late as without.

Another choice of scales, such as one a row or a block, changes ``Quantized.scale``'s shape and the two operations of
``Ops``: ``quantize`` and ``scaled_product``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kos.errors import ConfigError
from kos.memory.arena import Arena
from kos.train.layers.context import Weights
from kos.train.layers.products import Products
from kos.train.ops import Array, Ops

FORWARD = np.dtype(ml_dtypes.float8_e4m3fn)
"""The format of activations and weights."""

BACKWARD = np.dtype(ml_dtypes.float8_e5m2)
"""The format of gradients."""

SCALE = np.dtype(np.float32)
WEIGHTS, INPUT, GRADIENT = "the weights", "the input", "the gradient of the output"
MULTIPLE = 16
"""cuBLASLt's 8-bit products take only sizes that are multiples of it."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix (N, F) in 8 bits: ``rows`` times ``scale`` (1,), and the same transposed in ``columns`` (F, N)."""

    rows: Any
    columns: Any
    scale: Array
    raw: Any = None
    """What was quantized, where something reads it."""

    name: str = ""
    """Of a weight."""

    def __getitem__(self, rows: slice) -> Quantized:
        return Quantized(self.rows[rows], None, self.scale)


@dataclass(frozen=True, slots=True)
class Gated:
    """SwiGLU's output (N, F) of ``gate_up`` (N, 2F), computed where it is quantized.

    With ``d_out`` (N, F), the gradient of that output, it is the gradient of ``gate_up``.
    """

    gate_up: Array
    d_out: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        n, f = self.gate_up.shape
        return n, f // 2 if self.d_out is None else f

    def __getitem__(self, rows: slice) -> Gated:
        return Gated(self.gate_up[rows], self.d_out if self.d_out is None else self.d_out[rows])


class Fp8Linear:
    """The products of a linear layer, by the names that ``Ops`` has for those of ``products``.

    Weights are ``Quantized``, other operands may be.
    """

    def __init__(self, products: Products) -> None:
        self._products = weakref.proxy(products)  # in a cycle a trial's arena would outlive it
        self.watching, self.first = False, ""

    def watch(self, watching: bool) -> None:
        """While ``watching``, which waits for the device, ``first`` becomes the first operand that is not finite."""
        self.watching = watching
        self.first = "" if watching else self.first

    def _look(self, kind: str, weight: Quantized, operand: Quantized) -> None:
        if self.watching and not self.first and not np.isfinite(self._products.ops.to_host(operand.scale)[0]):
            self.first = f"{kind} of {weight.name}"

    def quantized(
        self, x: Any, dtype: Any, rows: Arena | None = None, columns: Arena | None = None
    ) -> Quantized:
        """``x`` in 8 bits: in ``rows``, and transposed in ``columns``, if they are given."""
        if isinstance(x, Quantized):
            return x
        n, f = x.shape
        of_rows, of_columns = rows and rows.take((n, f), dtype), columns and columns.take((f, n), dtype)
        scale = (columns or rows).take((1,), SCALE)  # type: ignore[union-attr]
        self._quantize(x, of_rows, of_columns, scale)
        return Quantized(of_rows, of_columns, scale, x)

    def _quantize(self, x: Any, rows: Any, columns: Any, scale: Array) -> None:
        ops, arena = self._products.ops, self._products.arena
        if not isinstance(x, Gated):
            ops.quantize(x, rows, columns, scale, arena)
        elif x.d_out is None:
            ops.quantize_swiglu(x.gate_up, rows, columns, scale, arena)
        else:
            ops.quantize_swiglu_backward(x.d_out, x.gate_up, rows, columns, scale, arena)

    def empty_transposed(self, shape: tuple[int, int], arena: Arena) -> Quantized:
        """``Products.empty_transposed``."""
        return Quantized(None, arena.take(shape[::-1], FORWARD), arena.take((1,), SCALE))

    def gated(self, gate_up: Array) -> Gated:
        """``Products.gated``."""
        return Gated(gate_up)

    def gradient(self, d_out: Any, keep: Arena) -> Quantized:
        """``Products.gradient``."""
        return self.quantized(d_out, BACKWARD, self._products.arena, keep)

    def linear(
        self, x: Array, weight: Quantized, out: Array, residual: Array | None = None, bias: Array | None = None,
        transposed: Quantized | None = None,
    ) -> None:  # fmt: skip
        """``Ops.linear``. ``transposed``: see ``Products.empty_transposed``."""
        ops, arena = self._products.ops, self._products.arena
        with arena.scope():
            if transposed is None:
                x_8 = self.quantized(x, FORWARD, arena)
            else:
                x_8 = Quantized(arena.take(tuple(x.shape), FORWARD), transposed.columns, transposed.scale)
                self._quantize(x, x_8.rows, x_8.columns, x_8.scale)
            self._look(WEIGHTS, weight, weight)
            self._look(INPUT, weight, x_8)
            ops.scaled_product(x_8.rows, x_8.scale, weight.rows, weight.scale, out, residual, bias, arena)

    def linear_input_gradient(self, d_out: Any, weight: Quantized, dx: Array) -> None:
        """``Ops.linear_input_gradient``."""
        ops, arena = self._products.ops, self._products.arena
        with arena.scope():
            d = self.quantized(d_out, BACKWARD, arena)
            self._look(GRADIENT, weight, d)
            ops.scaled_product(d.rows, d.scale, weight.columns, weight.scale, dx, None, None, arena)

    def linear_weight_gradient(self, d_out: Any, x: Any, d_weight: Array, accumulate: bool, arena: Arena) -> None:
        """``Ops.linear_weight_gradient``."""
        ops = self._products.ops
        with arena.scope():
            d, x_8 = self.quantized(d_out, BACKWARD, None, arena), self.quantized(x, FORWARD, None, arena)
            before = d_weight if accumulate else None
            ops.scaled_product(d.columns, d.scale, x_8.columns, x_8.scale, d_weight, before, None, arena, False)


class Fp8Weights(Mapping[str, Array]):
    """The weights of a step: those that ``store`` has memory for are quantized when they are first read.

    The others are those of ``weights``.
    """

    def __init__(self, weights: Weights, store: Mapping[str, Quantized], ops: Ops, arena: Arena) -> None:
        self._weights, self._store, self._ops, self._arena = weights, store, ops, arena
        self._missing = set(store)

    def __getitem__(self, name: str) -> Any:
        found = self._store.get(name)
        if found is None:
            return self._weights[name]
        if name in self._missing:
            self._missing.remove(name)
            self._ops.quantize(self._weights[name], found.rows, found.columns, found.scale, self._arena)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def linears(layers: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """The linear layers of lists of sublayers."""
    for layer in layers:
        for sublayer in layer:
            yield from (sublayer.column, sublayer.row)


def weight_store(models: Iterable[Any], weights: Weights, ops: Ops) -> dict[str, Quantized]:
    """Memory for the weights of the linear layers of ``models``, whose shapes are those of ``weights``."""
    names = [linear.name for model in models for linear in linears(model.layers)]
    shapes = {name: tuple(weights[name].shape) for name in names}
    return {
        name: Quantized(ops.zeros(shape, FORWARD), ops.zeros(shape[::-1], FORWARD), ops.zeros((1,), SCALE), name=name)
        for name, shape in shapes.items()
    }


def first_of(found: Iterable[str], layers: Iterable[Iterable[Any]]) -> str | None:
    """Of what the ranks of a model of ``layers`` have ``found``, the first in the order of a step."""
    order = [linear.name for linear in linears(layers)]

    def place(each: str) -> tuple[bool, int]:
        kind, _, name = each.rpartition(" of ")
        return kind == GRADIENT, -order.index(name) if kind == GRADIENT else order.index(name)

    return min(filter(None, found), key=place, default=None)


def store_bytes(store: Mapping[str, Quantized]) -> int:
    """The bytes of both copies of all weights."""
    return sum(int(each.rows.nbytes + each.columns.nbytes) for each in store.values())


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
            raise ConfigError(f"--dtype fp8: expected {what} to be a multiple of {MULTIPLE}, got {size}")
