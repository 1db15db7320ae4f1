"""``Normalize``: what a layer asks of the operations of norms. A variant of the norms is added here."""

from __future__ import annotations

from typing import Any, NamedTuple


class Normalize(NamedTuple):
    """A norm: its weights, and the settings that say how it computes.

    RMSNorm, LayerNorm, the norms of heads and the norms in 8 bits take this record, on CPUs and GPUs. A variant of the
    norms is one more field, and what this field changes in the methods. On GPUs its formula is in ``norm_scale.cuh``.
    """

    weight: Any
    """(D,), an array of the dialect."""

    eps: float
    bias: Any = None
    """(D,), of LayerNorm."""

    @property
    def scale(self) -> Any:
        """What multiplies the normalized rows on CPUs: (D,), as ``scale_of`` of ``norm_scale.cuh`` gives it on GPUs."""
        return self.weight

    @property
    def initial(self) -> float:
        """The elements of a new weight."""
        return 1.0

    def macros(self) -> dict[str, int]:
        """The macros of ``norm_scale.cuh``."""
        return {}
