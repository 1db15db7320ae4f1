"""``ModelShape``: the settings of a model, each declared once; and the scalings of its rotary frequencies.

The command line imports this module, so it imports neither NumPy nor a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from kos.train.model import Section, option

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


class ModelShape(Section, use_attribute_docstrings=True):
    """The settings of a model: the section ``model`` of a run's settings, in which sizes may be left open.

    The keys are those of Hugging Face's ``config.json`` for a LLaMA. The flags, their help and ``config.json`` follow
    from the fields. ``resolve`` of ``kos.train.model.families`` makes the family's ``LlamaConfig`` of them, which has
    the same fields, none of them open.
    """

    model_type: str = option("llama", title="Shape of the model (a preset or --init-from gives it)")
    """Family of the model: llama, gpt2, mistral, olmo2, qwen2, qwen3, smollm3."""
    vocab_size: int | None = option(None, "as many as the tokenizer has tokens", ge=1, lt=2**63)
    """Rows of the embedding."""
    hidden_size: int = option(gpt2="n_embd", ge=2, lt=2**63)
    """Width of the residual stream."""
    intermediate_size: int = option(gpt2="n_inner", ge=1, lt=2**63)
    """Width of the MLP."""
    num_hidden_layers: int = option(gpt2="n_layer", ge=1, le=100_000)
    """Number of decoder layers."""
    num_attention_heads: int = option(gpt2="n_head", ge=1, lt=2**63)
    """Number of query heads."""
    num_key_value_heads: int | None = option(None, "as many as query heads", ge=1)
    """Number of key/value heads."""
    head_dim: int | None = option(None, "hidden size / query heads", ge=2, lt=2**63)
    """Width of a head."""
    max_position_embeddings: int | None = option(None, "--seq-len", changes="nothing", gpt2="n_positions", ge=1)
    """Longest context in tokens."""
    rms_norm_eps: float = option(1e-5, gpt2="layer_norm_epsilon", gt=0)
    """Epsilon of the norms."""
    rope_theta: float = option(10_000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = option(True)
    """Use one matrix for embedding and head."""
    initializer_range: float = option(0.02, changes="nothing", gt=0)
    """Standard deviation of the initial weights."""
    attention_bias: bool = option(False, optional=True)
    """Add biases to attention's matrices (llama, olmo2, qwen3, smollm3)."""
    mlp_bias: bool = option(False, optional=True)
    """Add biases to the matrices of the MLP (llama, smollm3)."""
    sliding_window: int | None = option(None, "no window", optional=True, ge=1)
    """Tokens that a token attends to at most, including itself (mistral, qwen2, qwen3, smollm3)."""
    layer_types: tuple[str, ...] = option((), flag=False, optional=True)
    no_rope_layers: tuple[int, ...] | None = option(None, flag=False, optional=True)
    pad_token_id: int | None = option(None, "none", ge=-(2**63), lt=2**63)
    """Padding token: its row of the embedding starts as zeros, and lookups do not train this row."""

    @field_validator("layer_types", "no_rope_layers", mode="before")
    @classmethod
    def _tuple(cls, given: Any) -> Any:
        return tuple(given) if isinstance(given, list) else given
