"""The ``model`` section of a configuration: the shape of the LLaMA, with Hugging Face's key names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kos.errors import ConfigError
from kos.train.model.gpt2 import GPT2Config
from kos.train.model.llama_config import LlamaConfig, RopeScaling, Section

SHAPE = "Shape of the model (a preset or --init-from gives it)"


def option(group: str, about: str, default: Any = ..., unset: str = "", **constraints: Any) -> Any:
    """A field that is also a flag, in a group of the help; without ``default`` the preset gives the value.

    ``about`` is a sentence. ``unset`` says what the default of None, or an empty one, stands for.
    """
    return Field(default, description=about, json_schema_extra={"group": group, "unset": unset}, **constraints)


class ModelSection(Section):
    """Shape of the model, with the key names that Hugging Face's config.json has for a LLaMA."""

    model_type: Literal["llama", "gpt2"] = option(
        SHAPE, "Kind of model: llama, or gpt2 (LayerNorm, GELU and biases)", "llama"
    )
    vocab_size: int | None = option(
        SHAPE, "Rows of the embedding", None, "as many as the tokenizer has tokens", ge=1, lt=2**63
    )
    hidden_size: int = option(SHAPE, "Width of the residual stream", ge=2, lt=2**63)
    num_hidden_layers: int = option(SHAPE, "Number of decoder layers", ge=1, le=100_000)
    num_attention_heads: int = option(SHAPE, "Number of query heads", ge=1, lt=2**63)
    num_key_value_heads: int | None = option(SHAPE, "Number of key/value heads", None, "as many as query heads", ge=1)
    head_dim: int | None = option(SHAPE, "Width of a head", None, "hidden size / query heads", ge=2, lt=2**63)
    intermediate_size: int = option(SHAPE, "Width of the MLP", ge=1, lt=2**63)
    max_position_embeddings: int | None = option(SHAPE, "Longest context in tokens", None, "--seq-len", ge=1)
    rms_norm_eps: float = option(SHAPE, "Epsilon of the norms", 1e-5, gt=0)
    rope_theta: float = option(SHAPE, "Base of the rotary frequencies", 10_000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = option(SHAPE, "Use one matrix for embedding and head", True)
    initializer_range: float = option(SHAPE, "Standard deviation of the initial weights", 0.02, gt=0)

    def resolve(self, vocab_size: int, context: int) -> LlamaConfig:
        """The model's shape; what was left open is the tokenizer's vocabulary and the run's context."""
        width, heads = self.hidden_size, self.num_attention_heads
        if self.head_dim is None and width % heads:
            raise ConfigError(f"hidden_size: expected a multiple of {heads} (num_attention_heads), got {width}")
        values: dict[str, Any] = {
            "vocab_size": vocab_size, "max_position_embeddings": context,
            "num_key_value_heads": heads, "head_dim": width // heads, "rope_scaling": self.rope_scaling,
        }  # fmt: skip
        values |= self.model_dump(exclude={"model_type", "rope_scaling"}, exclude_none=True)
        return (GPT2Config if self.model_type == "gpt2" else LlamaConfig)(**values)

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        self.resolve(1, 1)  # refuses a shape that cannot be
        return self
