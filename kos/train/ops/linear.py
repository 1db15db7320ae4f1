"""Operations that wrap operations: a layer calls them, and does not know how a product is computed.

``LinearOps`` passes on to a dialect, and adds what layers ask besides its operations. ``kos.train.ops.fp8`` computes
the products of linear layers in 8 bits, ``kos.train.parallel.fixed_order`` all sums in an order that no layout changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kos.memory.arena import Arena
from kos.train.ops import Array, Normalize


def bias_of(name: str) -> str:
    """The name of the bias that belongs to a weight."""
    return name.removesuffix("weight") + "bias"


class Wrapper:
    """All operations of ``inner``: a dialect, or another wrapper. Operations are called by position."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def innermost(self) -> Wrapper:
        """The wrapper whose ``inner`` is a dialect."""
        return self.inner.innermost() if isinstance(self.inner, Wrapper) else self


class LinearOps(Wrapper):
    """A dialect, whose products are computed as they are asked for."""

    pieces = 1
    """Into how many pieces a rank's tokens are split; each is multiplied apart."""

    parts = 1
    """Into how many parts a rank's features are split."""

    head_multiple = 1
    """On GPUs, the number of rows in a matmul of the head must be a multiple of this."""

    @property
    def of_head(self) -> Any:
        """The operations of the head: for rows of one piece, in the dtype of their operands."""
        return self

    @property
    def of_adapters(self) -> Any:
        """The operations of adapters, in the dtype of their operands."""
        return self

    def matrix(self, of: Mapping[str, Array], name: str) -> Any:
        """The matrix or bias ``name`` as ``linear``, its gradients and ``sum_rows`` take it."""
        return of[name]

    def head_rows(self, count: int, most: int) -> int:
        """How many of ``count`` rows of a piece have their logits in memory at once, at most."""
        return most

    def sum_pieces(self, leaf: Callable[[int, Array], None], out: Array) -> None:
        """out = the sum of what ``leaf(piece, out)`` writes, over the pieces of all ranks if their order is fixed."""
        leaf(0, out)

    def statistics_of_parts(self, logits: Array, targets: Array, first: int, out: Array, arena: Arena) -> None:
        """``logit_statistics`` of each part of the columns, to ``out`` (parts, 3, N)."""
        self.inner.logit_statistics(logits, targets, first, out[0], arena)

    # --- operands of linear layers -----------------------------------------------------------------------

    def empty_transposed(self, shape: tuple[int, int], arena: Arena) -> Any:
        """Memory in which ``linear`` saves its input (N, F) for the weight's gradient; None: others save it."""

    def normed(self, x: Array, norm: Normalize, rstd: Array) -> Any:
        """RMSNorm's output as an input of ``linear`` that is never written; None: it must be written."""

    def gated(self, gate_up: Array) -> Any:
        """The same of SwiGLU's output."""

    def gated_gradient(self, d_out: Array, gate_up: Array) -> Any:
        """The gradient of SwiGLU's input as an operand of ``gradient`` that is never written; None: as above."""

    def read_16(self, d_out: Any) -> Array:
        """What ``gradient`` was given."""
        return d_out

    def reads_16(self, bias: str | None) -> bool:
        """Whether a gradient of weights, or of a ``bias``, reads its output's gradient itself."""
        return True

    def gradient(self, d_out: Any, keep: Arena | None, parts: int = 1) -> Any:
        """What both gradients take in place of ``d_out``; that of the weight reads memory of ``keep``, if it is needed.

        ``parts``: in how many equal parts the gradient of the input takes its rows.
        """
        return d_out


class FewRows(LinearOps):
    """A dialect whose products have up to ``few_rows`` rows, each with the same bits whatever the others are."""

    def linear(
        self, x: Array, weight: Any, out: Array, residual: Array | None = None, bias: Array | None = None
    ) -> None:
        """``Ops.linear_few``."""
        self.inner.linear_few(x, weight, out, residual, bias)
