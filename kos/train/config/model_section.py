"""The ``model`` section of a configuration: the shape of the LLaMA, with Hugging Face's key names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kos.errors import ConfigError
from kos.train.model.gpt2 import GPT2Config
from kos.train.model.llama_config import LlamaConfig, RopeScaling, Section


def option(group: str, about: str, default: Any = ..., **constraints: Any) -> Any:
    """A field that is also a flag; without ``default`` the preset gives the value."""
    return Field(default, description=about, json_schema_extra={"group": group}, **constraints)


class ModelSection(Section):
    """Shape of the model, with the key names that Hugging Face's config.json has for a LLaMA."""

    model_type: Literal["llama", "gpt2"] = option("Model", "llama, or gpt2: LayerNorm, GELU, biases", "llama")
    vocab_size: int | None = option("Model", "rows of the embedding; default: the tokenizer's", None, ge=1, lt=2**63)
    hidden_size: int = option("Model", "width of the residual stream", ge=2, lt=2**63)
    num_hidden_layers: int = option("Model", "decoder layers", ge=1, le=100_000)
    num_attention_heads: int = option("Model", "query heads", ge=1, lt=2**63)
    num_key_value_heads: int | None = option("Model", "key/value heads; default: as many as query heads", None, ge=1)
    head_dim: int | None = option("Model", "width of a head; default: hidden size / heads", None, ge=2, lt=2**63)
    intermediate_size: int = option("Model", "width of the MLP", ge=1, lt=2**63)
    max_position_embeddings: int | None = option("Model", "longest context, tokens; default: --seq-len", None, ge=1)
    rms_norm_eps: float = option("Model", "epsilon of the norms", 1e-5, gt=0)
    rope_theta: float = option("Model", "base of the rotary frequencies", 10_000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = option("Model", "one matrix for embedding and head", True)
    initializer_range: float = option("Model", "standard deviation of initial weights", 0.02, gt=0)

    def resolve(self, vocab_size: int, context: int) -> LlamaConfig:
        """The model's shape; what was left open is the tokenizer's vocabulary and the run's context."""
        width, heads = self.hidden_size, self.num_attention_heads
        if self.head_dim is None and width % heads:
            raise ConfigError(f"hidden_size: expected a multiple of num_attention_heads = {heads}, got {width}")
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
