"""OLMo 2: LLaMA with norms after attention and MLP in place of those before, and norms of all of q and of k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kos.errors import ConfigError
from kos.train.layers.attention import Attention, Rope
from kos.train.layers.linear import ColumnLinear, RowLinear
from kos.train.layers.mlp import MLP
from kos.train.layers.norm import NoNorm, Norm
from kos.train.layers.sublayer import Sublayer
from kos.train.model.llama import LlamaConfig
from kos.train.model.shapes import Local, Stages


@dataclass(frozen=True)
class Olmo2Config(LlamaConfig):
    """OLMo team 2025, arXiv:2501.00656. A norm of all heads of q or k needs them on one rank of tp."""

    model_type: ClassVar[str] = "olmo2"
    architecture: ClassVar[str] = "Olmo2ForCausalLM"
    takes: ClassVar[frozenset[str]] = frozenset({"attention_bias"})
    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5}

    def local(self, tp_rank: int = 0, tp: int = 1, stage: int = 0, stages: Stages = ((0,),)) -> Local:
        if tp > 1:
            raise ConfigError(f"--tp {tp}: expected 1 with an OLMo 2, whose norms of q and k have all heads, got {tp}")
        return super().local(tp_rank, tp, stage, stages)

    def layer(self, number: int, rope: Rope) -> list[Sublayer]:
        D, F, d, at = self.hidden_size, self.intermediate_size, self.head_dim, f"model.layers.{number}."
        heads = {"q": self.num_attention_heads, "k": self.num_key_value_heads, "v": self.num_key_value_heads}
        biased = self.attention_bias

        def norm(name: str, size: int = D) -> Norm:
            return Norm(f"{at}{name}.weight", size, self.rms_norm_eps)

        of_qkv = {f"{at}self_attn.{each}_proj.weight": count * d for each, count in heads.items()}
        qkv = ColumnLinear(f"{at}self_attn.qkv_proj.weight", D, members=of_qkv, biased=biased)
        o = RowLinear(f"{at}self_attn.o_proj.weight", heads["q"] * d, D, biased=biased)
        norms = [norm(f"self_attn.{each}_norm", heads[each] * d) for each in "qk"]
        gate_up = ColumnLinear(
            f"{at}mlp.gate_up_proj.weight", D, members={f"{at}mlp.{each}_proj.weight": F for each in ("gate", "up")}
        )
        down = RowLinear(f"{at}mlp.down_proj.weight", F, D)
        after = norm("post_attention_layernorm")
        return [
            Attention(NoNorm(), qkv, o, heads["q"], heads["k"], d, rope, norms=norms, after=after),
            MLP(NoNorm(), gate_up, down, norm("post_feedforward_layernorm")),
        ]
