"""OLMo 2: LLaMA with norms after attention and MLP in place of those before, and norms of all of q and of k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kos.train.layers.attention import Attention, Rope
from kos.train.layers.mlp import MLP
from kos.train.layers.norm import NoNorm
from kos.train.layers.sublayer import Sublayer
from kos.train.model.llama import LlamaConfig


@dataclass(frozen=True)
class Olmo2Config(LlamaConfig):
    """OLMo team 2025, arXiv:2501.00656. A norm of all heads of q or k needs them on one rank of tp."""

    model_type: ClassVar[str] = "olmo2"
    architecture: ClassVar[str] = "Olmo2ForCausalLM"
    takes: ClassVar[frozenset[str]] = frozenset({"attention_bias"})
    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5}
    axes: ClassVar[tuple[str, ...]] = ("dp", "pp", "cp")

    def layer(self, number: int, rope: Rope) -> list[Sublayer]:
        H, K, d, at = self.num_attention_heads, self.num_key_value_heads, self.head_dim, f"model.layers.{number}."
        qkv, o, gate_up, down = self.linears(at)
        norms = [self.norm(f"{at}self_attn.{each}_norm.weight", heads * d) for each, heads in (("q", H), ("k", K))]
        after, last = (self.norm(f"{at}post_{each}_layernorm.weight") for each in ("attention", "feedforward"))
        attention = Attention(NoNorm(), qkv, o, H, K, d, rope, norms=norms, after=after)
        return [attention, MLP(NoNorm(), gate_up, down, last)]
