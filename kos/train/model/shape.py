"""``ModelShape``: the settings of a model, each declared once; and the scalings of its rotary frequencies.

The command line imports this module, so it imports neither NumPy nor a layer.
"""

# ruff: noqa: RUF009 - declare returns a field
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
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


def declare(
    about: str = "", default: Any = MISSING, unset: str | None = None, *, of_run: Any = MISSING,
    changes: str = "bits", gpt2: str = "", optional: bool = False, **bounds: Any,
) -> Any:  # fmt: skip
    """A setting of a model.

    - ``about``: the help of its flag. Without it, there is no flag.
    - ``default``: that of a model. ``of_run`` is that of a run's settings, if it is another.
    - ``unset``: what it means if a run's settings leave it open.
    - ``changes``: as ``option`` of ``kos.train.config``.
    - ``gpt2``: its key in a GPT-2's ``config.json``, if that is not a LLaMA's.
    - ``optional``: whether only some families have it (``LlamaConfig.takes``).
    - ``bounds``: those of pydantic's ``Field``.
    """
    if of_run is MISSING:
        of_run = None if unset is not None else ... if default is MISSING else default
    about_it = {"about": about, "unset": unset or "", "of_run": of_run, "changes": changes, "gpt2": gpt2}
    return field(default=default, metadata={**about_it, "optional": optional, "bounds": bounds})


@dataclass(frozen=True)
class ModelShape:
    """The settings of a model, with the keys that Hugging Face's ``config.json`` has for a LLaMA.

    From them follow the section ``model`` of a run's settings, the flags and their help, and ``config.json``.
    """

    vocab_size: int = declare("Rows of the embedding.", unset="as many as the tokenizer has tokens", ge=1, lt=2**63)
    hidden_size: int = declare("Width of the residual stream.", gpt2="n_embd", ge=2, lt=2**63)
    intermediate_size: int = declare("Width of the MLP.", gpt2="n_inner", ge=1, lt=2**63)
    num_hidden_layers: int = declare("Number of decoder layers.", gpt2="n_layer", ge=1, le=100_000)
    num_attention_heads: int = declare("Number of query heads.", gpt2="n_head", ge=1, lt=2**63)
    num_key_value_heads: int = declare("Number of key/value heads.", unset="as many as query heads", ge=1)
    head_dim: int = declare("Width of a head.", unset="hidden size / query heads", ge=2, lt=2**63)
    max_position_embeddings: int = declare(
        "Longest context in tokens.", 2048, "--seq-len", changes="nothing", gpt2="n_positions", ge=1
    )
    rms_norm_eps: float = declare("Epsilon of the norms.", 1e-5, gpt2="layer_norm_epsilon", gt=0)
    rope_theta: float = declare("Base of the rotary frequencies.", 10_000.0, gt=0)
    rope_scaling: RopeScaling | None = declare("", None)
    tie_word_embeddings: bool = declare("Use one matrix for embedding and head.", False, of_run=True)
    initializer_range: float = declare("Standard deviation of the initial weights.", 0.02, changes="nothing", gt=0)
    attention_bias: bool = declare(
        "Add biases to attention's matrices (llama, olmo2, qwen3, smollm3).", False, optional=True
    )
    mlp_bias: bool = declare("Add biases to the matrices of the MLP (llama, smollm3).", False, optional=True)
    sliding_window: int | None = declare(
        "Tokens that a token attends to at most, including itself (mistral, qwen2, qwen3, smollm3).",
        None, "no window", optional=True, ge=1,
    )  # fmt: skip
    layer_types: tuple[str, ...] = declare("", (), optional=True)
    no_rope_layers: tuple[int, ...] = declare("", (), of_run=None, optional=True)
    pad_token_id: int | None = declare(
        "Padding token: its row of the embedding starts as zeros, and lookups do not train this row.",
        None, "none", ge=-(2**63), lt=2**63,
    )  # fmt: skip
