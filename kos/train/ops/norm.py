"""``Normalize``: what a layer asks of the operations of norms."""

from __future__ import annotations

from typing import Any, NamedTuple


class Normalize(NamedTuple):
    """A norm: its weights, and the settings that say how it computes.

    RMSNorm, LayerNorm, the norms of heads and the norms in 8 bits take this record, on CPUs and GPUs.
    """

    weight: Any
    """(D,), an array of the dialect."""

    eps: float
    bias: Any = None
    """(D,), of LayerNorm."""
