"""The families of models besides LLaMA, and ``FAMILIES``: all, by their ``kind`` (``model_type``)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from kos.errors import SettingError
from kos.train.layers.attention import Rope
from kos.train.layers.linear import ColumnLinear, RowLinear
from kos.train.layers.mlp import MLP, GeluMLP
from kos.train.layers.norm import LayerNorm, NoNorm, Norm
from kos.train.layers.sublayer import Sublayer
from kos.train.layers.vocabulary import PositionEmbedding
from kos.train.model import closest
from kos.train.model.llama import LlamaConfig
from kos.train.model.shape import ModelShape

POSITIONS = "transformer.wpe.weight"
TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")  # ends of the names of Conv1D's matrices


class MistralConfig(LlamaConfig):
    """LLaMA with a sliding window in every layer, or without one (Jiang et al. 2023, arXiv:2310.06825)."""

    kind: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    takes: ClassVar[frozenset[str]] = frozenset({"sliding_window"})
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096,
    }  # fmt: skip


class Olmo2Config(LlamaConfig):
    """LLaMA with norms after attention and MLP in place of those before, and norms of all of q and of k.

    OLMo team 2025, arXiv:2501.00656. A norm of all heads of q or k needs them on one rank of tp.
    """

    kind: ClassVar[str] = "olmo2"
    architecture: ClassVar[str] = "Olmo2ForCausalLM"
    takes: ClassVar[frozenset[str]] = frozenset({"attention_bias"})
    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5, "pad_token_id": 1}
    axes: ClassVar[tuple[str, ...]] = ("dp", "pp", "cp")

    def layer(self, number: int, rope: Rope) -> list[Sublayer]:
        H, K, d, at = self.num_attention_heads, self.num_key_value_heads, self.head_dim, f"model.layers.{number}."
        qkv, o, gate_up, down = self.linears(at)
        norms = [self.norm(f"{at}self_attn.{each}_norm.weight", heads * d) for each, heads in (("q", H), ("k", K))]
        after, last = (self.norm(f"{at}post_{each}_layernorm.weight") for each in ("attention", "feedforward"))
        attention = self.attention(NoNorm(), qkv, o, rope, norms=norms, after=after)
        return [attention, MLP(NoNorm(), gate_up, down, last)]


class Qwen2Config(LlamaConfig):
    """LLaMA with biases of q, k and v, also of Qwen2.5 (Yang et al. 2024, arXiv:2407.10671)."""

    kind: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    takes: ClassVar[frozenset[str]] = frozenset({"sliding_window", "layer_types"})
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28,
        "use_sliding_window": False,
    }  # fmt: skip
    qkv_bias: ClassVar[bool] = True


class Qwen3Config(Qwen2Config):
    """LLaMA with norms of each head of q and k (Yang et al. 2025, arXiv:2505.09388)."""

    kind: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    takes: ClassVar[frozenset[str]] = Qwen2Config.takes | {"attention_bias"}
    defaults: ClassVar[dict[str, Any]] = {**Qwen2Config.defaults, "head_dim": 128}
    qkv_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = True


def rotated_layers(layers: int, every: int) -> tuple[int, ...]:
    """``no_rope_layers`` if one layer in ``every`` has no rotary positions; 0: all have them. () if all have them."""
    flags = tuple(int(not every or (layer + 1) % every != 0) for layer in range(layers))
    return () if all(flags) else flags


class SmolLM3Config(LlamaConfig):
    """LLaMA of which some layers have no rotary positions, every fourth by default.

    Bakouch et al. 2025, huggingface.co/blog/smollm3; layers without positions: arXiv:2501.18795.
    """

    kind: ClassVar[str] = "smollm3"
    architecture: ClassVar[str] = "SmolLM3ForCausalLM"
    takes: ClassVar[frozenset[str]] = frozenset(
        {"attention_bias", "mlp_bias", "sliding_window", "layer_types", "no_rope_layers"}
    )
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 32_768, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0, "use_sliding_window": False, "no_rope_layer_interval": 4, "pad_token_id": 128_004,
    }  # fmt: skip


class GPT2Config(LlamaConfig):
    """GPT-2 (Radford et al. 2019): LayerNorm, biases, GELU and learned positions where LLaMA has others.

    Names and settings are those of Hugging Face's ``GPT2LMHeadModel``; ``rms_norm_eps`` is LayerNorm's. Matrices are
    (out, in) here as everywhere, and transposed when they are read or written: transformers' ``Conv1D`` has (in, out).
    """

    kind: ClassVar[str] = "gpt2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    takes: ClassVar[frozenset[str]] = frozenset({"tie_word_embeddings"})
    norm_class: ClassVar[type[Norm]] = LayerNorm
    embedding: ClassVar[str] = "transformer.wte.weight"
    final_norm: ClassVar[str] = "transformer.ln_f.weight"
    tables: ClassVar[tuple[str, ...]] = (embedding, POSITIONS)
    residual: ClassVar[tuple[str, ...]] = (".c_proj.weight",)
    stacked: ClassVar[tuple[str, ...]] = (".c_attn.weight",)
    may_differ: ClassVar[frozenset[str]] = frozenset({"initializer_range"})
    axes: ClassVar[tuple[str, ...]] = ("dp",)
    fixed: ClassVar[tuple[str, ...]] = (
        "num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta", "rope_scaling", "pad_token_id"
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        heads = self.num_attention_heads
        for name, expected in zip(
            self.fixed, (heads, self.hidden_size / heads, True, 10_000.0, None, None), strict=True
        ):
            if (got := getattr(self, name)) != expected:
                wanted = "none" if expected is None else expected if isinstance(expected, bool) else f"{expected:g}"
                raise SettingError(name, f"{wanted} in a GPT-2", got)

    # --- the model as a list of sublayers --------------------------------------------------------------

    def embed(self) -> PositionEmbedding:
        shape = self.vocab_size, self.hidden_size
        return PositionEmbedding(self.embedding, *shape, True, POSITIONS, self.max_position_embeddings)

    def layer(self, number: int, rope: Rope) -> list[Sublayer]:
        D, F = self.hidden_size, self.intermediate_size

        def name(end: str) -> str:
            return f"transformer.h.{number}.{end}.weight"

        column, row = partial(ColumnLinear, biased=True), partial(RowLinear, biased=True)
        qkv, o = column(name("attn.c_attn"), D, 3 * D), row(name("attn.c_proj"), D, D)
        return [
            self.attention(self.norm(name("ln_1")), qkv, o, None),
            GeluMLP(self.norm(name("ln_2")), column(name("mlp.c_fc"), D, F), row(name("mlp.c_proj"), F, D)),
        ]


FAMILIES: dict[str, type[LlamaConfig]] = {
    family.kind: family
    for family in (LlamaConfig, GPT2Config, MistralConfig, Olmo2Config, Qwen2Config, Qwen3Config, SmolLM3Config)
}


def resolve(shape: ModelShape, vocab_size: int, context: int) -> LlamaConfig:
    """The model of these settings; open sizes follow from the tokenizer's vocabulary and the run's context.

    Raises SettingError if the family is unknown, or if its models cannot have this shape.
    """
    if shape.model_type not in FAMILIES:
        near = closest(shape.model_type, FAMILIES)
        raise SettingError("model_type", f"one of {', '.join(FAMILIES)}{near}", shape.model_type)
    width, heads, family = shape.hidden_size, shape.num_attention_heads, FAMILIES[shape.model_type]
    if shape.head_dim is None and width % heads:
        raise SettingError("hidden_size", f"a multiple of {heads}", width, "num_attention_heads")
    values: dict[str, Any] = {
        "vocab_size": vocab_size, "max_position_embeddings": context,
        "num_key_value_heads": heads, "head_dim": width // heads,
        "no_rope_layers": rotated_layers(shape.num_hidden_layers, family.defaults.get("no_rope_layer_interval", 0)),
    }  # fmt: skip
    return family(**values | {name: value for name, value in shape if value is not None})
