"""Scalings of the rotary frequencies, which extend a model's context; the formulas are those of transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A section of a configuration, with typed values; unknown keys are refused.

    Its validator is built at the first use, because ``--help`` does not need it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )


KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
"""The settings that a type of scaling has."""


class RopeScaling(Section):
    """A scaling, with Hugging Face's key names; without a type LLaMA-3's, with its values."""

    rope_type: Literal["llama3", "linear", "dynamic", "yarn"] = "llama3"
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(1.0, gt=0)
    high_freq_factor: float = Field(4.0, gt=0)
    original_max_position_embeddings: int = Field(8192, ge=1)
    attention_factor: float | None = Field(None, gt=0)
    beta_fast: float = Field(32.0, gt=0)
    beta_slow: float = Field(1.0, gt=0)
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def settings(self) -> dict[str, Any]:
        """Those of this type, for a ``config.json``."""
        values = self.model_dump(exclude_none=True)
        return {key: values[key] for key in ("rope_type", *KEYS[self.rope_type]) if key in values}

    def scale(self, frequencies: Sequence[float], theta: float) -> list[float]:
        """The d / 2 frequencies, in radians a token.

        ``dynamic`` changes sequences beyond the model's context only, which kos has not.
        """
        if self.rope_type == "dynamic":
            return [*frequencies]
        if self.rope_type == "linear":
            return [frequency / self.factor for frequency in frequencies]
        if self.rope_type == "llama3":
            return [self._llama3(frequency) for frequency in frequencies]
        return self._yarn(frequencies, theta)

    def length(self) -> float:
        """What multiplies rotated queries and keys: 1, but for yarn."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def stretch(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return stretch(self.mscale) / stretch(self.mscale_all_dim)
        return stretch(1.0)

    def _llama3(self, frequency: float) -> float:
        """Long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""
        wavelength = 2 * math.pi / frequency
        rotations = self.original_max_position_embeddings / wavelength
        if rotations < self.low_freq_factor:
            return frequency / self.factor
        if rotations > self.high_freq_factor:
            return frequency
        smooth = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * frequency / self.factor + smooth * frequency

    def _yarn(self, frequencies: Sequence[float], theta: float) -> list[float]:
        """As LLaMA-3's, interpolated along the dimensions (Peng et al. 2023, arXiv:2309.00071)."""
        d = 2 * len(frequencies)

        def dimension(rotations: float) -> float:
            """The one that makes so many rotations in the original context."""
            wavelength = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return d * math.log(wavelength) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        width = high - low or 0.001
        stretched = [min(max((i - low) / width, 0.0), 1.0) for i in range(d // 2)]
        each = zip(frequencies, stretched, strict=True)
        return [part * frequency / self.factor + (1 - part) * frequency for frequency, part in each]
