"""GPT-2 (Radford et al. 2019): LayerNorm, biases, GELU and learned positions where LLaMA has others.

Names and settings are those of Hugging Face's ``GPT2LMHeadModel``; matrices are (out, in) here as everywhere, and
turned around when they are read from or written for transformers, whose ``Conv1D`` has them (in, out).
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from kos.errors import SettingError
from kos.train.layers.attention import Rope
from kos.train.layers.linear import ColumnLinear, RowLinear
from kos.train.layers.mlp import GeluMLP
from kos.train.layers.norm import LayerNorm, Norm
from kos.train.layers.sublayer import Sublayer
from kos.train.layers.vocabulary import PositionEmbedding
from kos.train.model.llama import LlamaConfig

POSITIONS = "transformer.wpe.weight"
TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")  # ends of the names of Conv1D's matrices


class GPT2Config(LlamaConfig):
    """The shape of a GPT-2; ``rms_norm_eps`` is LayerNorm's."""

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
