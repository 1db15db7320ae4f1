"""What the sublayers of a rank compute with in a pass, and what a backward reports to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kos.memory.arena import Arena
from kos.train.ops import Array
from kos.train.parallel.context import ContextParallel, Masks
from kos.train.parallel.tensor import TensorParallel

Weights = Mapping[str, Array]

LOOKUPS = "lookups"
"""The name of the gradient of a tied embedding's lookups; ``--deterministic`` sums it apart from the head's."""


class Gradients(NamedTuple):
    """Where a backward puts the gradients of weights, whether it adds to them, and what it calls when one is final.

    ``final`` takes the name of a tensor or of a group, in the order in which they lie in memory.
    """

    of: Weights
    accumulate: bool
    final: Callable[[str], object]


class Pending(NamedTuple):
    """The gradient of a ``Linear``'s weights, to be computed from these two arrays."""

    linear: Any
    d_out: Array
    x: Array

    def run(self, ctx: PassContext) -> None:
        self.linear.weight_gradient(ctx, self.d_out, self.x)


class PassContext(NamedTuple):
    """A forward or a backward of a micro-batch: operations, scratch memory, the axes, weights."""

    ops: Any
    """``LinearOps``, or another wrapper of the operations of a dialect."""

    arena: Arena
    tp: TensorParallel
    cp: ContextParallel
    weights: Weights = MappingProxyType({})
    into: Gradients = Gradients(MappingProxyType({}), False, lambda name: None)
    """Of a backward."""

    keep: Any = None
    """The arena of what pending gradients need: ``arena``, or if they are deferred the micro-batch's own."""

    masks: Mapping[int | None, Masks] = MappingProxyType({})
    """Those of attention, by its window."""

    pending: list[Pending] | None = None
    """Takes the gradients of weights if they are deferred: until a pipeline has time for them."""

    def weight_gradient(self, linear: Any, d_out: Array, x: Array) -> None:
        """Called where the gradient of a matrix can overlap a collective: computes it, unless it is deferred."""
        pending = Pending(linear, d_out, x)
        if self.pending is None:
            pending.run(self)
        else:
            self.pending.append(pending)
