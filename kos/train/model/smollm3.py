"""SmolLM3: LLaMA of which some layers have no rotary positions (every fourth, by default)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kos.train.model.llama import LlamaConfig


def rotated_layers(layers: int, every: int) -> tuple[int, ...]:
    """``no_rope_layers`` if one layer in ``every`` has no rotary positions; 0: all have them. () if all have them."""
    flags = tuple(int(not every or (layer + 1) % every != 0) for layer in range(layers))
    return () if all(flags) else flags


@dataclass(frozen=True)
class SmolLM3Config(LlamaConfig):
    """Bakouch et al. 2025, huggingface.co/blog/smollm3; layers without positions: arXiv:2501.18795."""

    model_type: ClassVar[str] = "smollm3"
    architecture: ClassVar[str] = "SmolLM3ForCausalLM"
    takes: ClassVar[frozenset[str]] = frozenset(
        {"attention_bias", "mlp_bias", "sliding_window", "layer_types", "no_rope_layers"}
    )
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 32_768, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0, "use_sliding_window": False, "no_rope_layer_interval": 4,
    }  # fmt: skip
