"""Mistral: LLaMA with a sliding window in every layer, or without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kos.train.model.llama import LlamaConfig


@dataclass(frozen=True)
class MistralConfig(LlamaConfig):
    """Jiang et al. 2023, arXiv:2310.06825."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    takes: ClassVar[frozenset[str]] = frozenset({"sliding_window"})
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096,
    }  # fmt: skip
