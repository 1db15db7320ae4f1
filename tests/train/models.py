"""The small LLaMA that tests have in common."""

from __future__ import annotations

from typing import Any

from kos.train.model.llama_config import LlamaConfig, RopeScaling

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


def small(**changes: Any) -> LlamaConfig:
    """Three layers of grouped-query attention, 24 wide, of odd sizes where they may be odd."""
    shape: dict[str, Any] = {
        "vocab_size": 37,
        "hidden_size": 24,
        "intermediate_size": 29,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 512,
    }
    return LlamaConfig(**shape | changes)


def queue(optimizer: Any, gradients: Any, average: float = 1.0, add_up: Any = None) -> None:
    """One update of a ``CudaAdamW``."""
    optimizer.queue_norm(gradients, add_up)
    optimizer.queue_update(gradients, average)
