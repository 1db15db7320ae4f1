"""Qwen: LLaMA with biases of q, k and v (Qwen2, Qwen2.5), or with norms of each head of q and k (Qwen3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kos.train.model.llama import LlamaConfig


@dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    """Yang et al. 2024, arXiv:2407.10671."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    takes: ClassVar[frozenset[str]] = frozenset({"sliding_window", "layer_types"})
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28,
        "use_sliding_window": False,
    }  # fmt: skip
    qkv_bias: ClassVar[bool] = True


@dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """Yang et al. 2025, arXiv:2505.09388."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    takes: ClassVar[frozenset[str]] = Qwen2Config.takes | {"attention_bias"}
    defaults: ClassVar[dict[str, Any]] = {**Qwen2Config.defaults, "head_dim": 128}
    qkv_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = True
