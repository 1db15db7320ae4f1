"""What the sublayers of a rank compute with in a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kos.memory.arena import Arena
from kos.train.ops import Array, Batch
from kos.train.parallel.context import ContextParallel, Masks
from kos.train.parallel.gradients import Gradients, Weights
from kos.train.parallel.tensor import TensorParallel


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

    pending: list[Callable[[PassContext], None]] | None = None
    """The functions that compute deferred gradients of weights.  A pipeline calls them when it would be idle."""

    cache: Any = None
    """The ``kos.train.layers.attention.Cache`` of a forward that generates."""

    batch: Batch | None = None
    """The micro-batch, with fields (N,), for the loss."""

    def trains(self, linear: Any) -> bool:
        """Whether a backward computes the gradient of a ``Linear``'s matrix or bias: not if both are frozen."""
        return linear.name in self.into.of or linear.bias in self.into.of

    def reads_input(self, linear: Any) -> bool:
        """Whether the backward of a ``Linear`` reads its input."""
        return linear.adapters is not None or self.trains(linear)

    def keep_for(self, linear: Any) -> Arena:
        """The arena of what the gradients of a ``Linear`` read: those of adapters are never pending."""
        return self.keep if self.trains(linear) else self.arena

    def gradient(self, name: str) -> Array:
        """Where the gradient of a vector goes; that of a frozen one to scratch memory, which nothing reads."""
        if name in self.into.of:
            return self.into.of[name]
        weight = self.weights[name]
        unread = self.arena.take(weight.shape, weight.dtype)
        self.ops.zero(unread)
        return unread

    def weight_gradient(self, linear: Any, d_out: Array, x: Array) -> None:
        """Called where the gradient of a matrix can overlap a collective: computes it, unless it is deferred."""
        if self.pending is None:
            linear.weight_gradient(self, d_out, x)
        else:
            self.pending.append(lambda ctx: linear.weight_gradient(ctx, d_out, x))
