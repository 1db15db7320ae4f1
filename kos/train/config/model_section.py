"""The ``model`` section of a configuration: the shape of the LLaMA, with Hugging Face's key names.

Both sections of a configuration use ``option``, a field that is also a flag, and ``one_line``, the text of an error.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from kos.errors import ConfigError
from kos.train.model.gpt2 import GPT2Config
from kos.train.model.llama_config import LlamaConfig, RopeScaling, Section


def option(about: str, default: Any = ..., unset: str = "", **constraints: Any) -> Any:
    """A field that is also a flag; without ``default`` the preset gives the value.

    ``about`` is a sentence. ``unset`` says what the default of None, or an empty one, stands for.
    """
    return Field(default, description=about, json_schema_extra={"unset": unset}, **constraints)


class ModelSection(Section):
    """Shape of the model, with the key names that Hugging Face's config.json has for a LLaMA."""

    # fmt: off
    model_type: Literal["llama", "gpt2"] = option("Kind of model: llama, or gpt2 (LayerNorm, GELU and biases)", "llama")
    vocab_size: int | None = option(
        "Rows of the embedding", None, "as many as the tokenizer has tokens", ge=1, lt=2**63)
    hidden_size: int = option("Width of the residual stream", ge=2, lt=2**63)
    num_hidden_layers: int = option("Number of decoder layers", ge=1, le=100_000)
    num_attention_heads: int = option("Number of query heads", ge=1, lt=2**63)
    num_key_value_heads: int | None = option("Number of key/value heads", None, "as many as query heads", ge=1)
    head_dim: int | None = option("Width of a head", None, "hidden size / query heads", ge=2, lt=2**63)
    intermediate_size: int = option("Width of the MLP", ge=1, lt=2**63)
    max_position_embeddings: int | None = option("Longest context in tokens", None, "--seq-len", ge=1)
    rms_norm_eps: float = option("Epsilon of the norms", 1e-5, gt=0)
    rope_theta: float = option("Base of the rotary frequencies", 10_000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = option("Use one matrix for embedding and head", True)
    initializer_range: float = option("Standard deviation of the initial weights", 0.02, gt=0)
    # fmt: on

    def resolve(self, vocab_size: int, context: int) -> LlamaConfig:
        """The model's shape; sizes that were left open follow from the tokenizer's vocabulary and the run's context."""
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


def one_line(error: ValidationError, label: Mapping[str, str] = MappingProxyType({})) -> str:
    """The first error that pydantic found, as ``where: expected X, got Y``.

    ``label`` maps a key to the name that the text gives it.
    """
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path[: 2 if path[:1] == ["model"] else 1])
    if first["type"] == "value_error":  # of several values: the message names them
        return str(first["ctx"]["error"])
    where = ".".join([label.get(key, key), *path[key.count(".") + 1 :]])
    if first["type"] == "missing":
        return f"{where}: expected a value, got none"
    if first["type"] == "extra_forbidden":
        return f"{where}: expected a known key, got {path[-1]!r}"
    expected = re.sub(r"^(Input|String) should (be |have )?", "", first["msg"])
    expected = re.sub(r"^Input is not a valid path.*", "a path", expected)
    expected = re.sub(r"valid dictionary or instance of \w+", "table of keys", expected)
    number = "a number " if expected.startswith(("greater", "less")) else ""
    return f"{where}: expected {number}{expected}, got {reprlib.repr(first['input'])}"
