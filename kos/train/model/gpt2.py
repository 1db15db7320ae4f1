"""GPT-2 (Radford et al. 2019): LayerNorm, biases, GELU and learned positions where LLaMA has others.

Names and settings are those of Hugging Face's ``GPT2LMHeadModel``; matrices are (out, in) here as everywhere, and
turned around when they are read from or written for transformers, whose ``Conv1D`` has them (in, out).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from kos.errors import ConfigError
from kos.memory.arena import Arena
from kos.train.model.llama import Gradients, Llama, Weights
from kos.train.model.llama_config import LayerNames, LlamaConfig
from kos.train.model.shapes import Local, Placement
from kos.train.ops import Array, Ops
from kos.train.parallel.tensor import Half, TensorParallel

POSITIONS = "transformer.wpe.weight"
TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")  # ends of the names of Conv1D's matrices


@dataclass(frozen=True)
class GPT2Config(LlamaConfig):
    """The shape of a GPT-2; ``rms_norm_eps`` is LayerNorm's."""

    model_type: ClassVar[str] = "gpt2"
    embedding: ClassVar[str] = "transformer.wte.weight"
    final_norm: ClassVar[str] = "transformer.ln_f.weight"
    tables: ClassVar[tuple[str, ...]] = (embedding, POSITIONS)
    residual: ClassVar[tuple[str, ...]] = (".c_proj.weight",)
    may_differ: ClassVar[frozenset[str]] = frozenset({"initializer_range"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, expected in (
            ("num_key_value_heads", self.num_attention_heads),
            ("head_dim", self.hidden_size / self.num_attention_heads),
            ("tie_word_embeddings", True),
            ("rope_theta", LlamaConfig.rope_theta),
            ("rope_scaling", None),
        ):
            if (got := getattr(self, name)) != expected:
                wanted = "none" if expected is None else expected if isinstance(expected, bool) else f"{expected:g}"
                raise ConfigError(f"{name}: expected {wanted} in a GPT-2, got {got}")

    @property
    def up_size(self) -> int:
        return self.intermediate_size

    def layer_names(self, layer: int) -> LayerNames:
        names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        return LayerNames(*(f"transformer.h.{layer}.{name}.weight" for name in names))

    def fused_groups(self, *parts: Local) -> dict[str, tuple[str, ...]]:
        return {}

    def placements(self, *parts: Local) -> dict[str, Placement]:
        D, F = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {self.final_norm: (D,), bias_of(self.final_norm): (D,)}
        for layer in reversed(range(self.num_hidden_layers)):
            of_layer = ((D,), (3 * D, D), (D, D), (D,), (F, D), (D, F))
            for name, shape in reversed([*zip(self.layer_names(layer), of_layer, strict=True)]):
                shapes |= {name: shape, bias_of(name): shape[:1]}
        shapes |= {POSITIONS: (self.max_position_embeddings, D), self.embedding: (self.vocab_size, D)}
        return {name: Placement(shape) for name, shape in shapes.items()}


def bias_of(name: str) -> str:
    return name.removesuffix("weight") + "bias"


class BiasedLinear(TensorParallel):
    """The matrix products of a layer, with biases.  For one rank: GPT-2 has no tensor parallelism."""

    def column_linear(self, weights: Weights, name: str, x_ND: Array, out_NF: Array) -> None:
        self.ops.linear(x_ND, weights[name], out_NF, None, weights[bias_of(name)])

    def row_linear(
        self, weights: Weights, name: str, x_NF: Array, term_ND: Array, out_nD: Array, residual_nD: Array, half: Half,
        arena: Arena,
    ) -> Callable[[], None]:  # fmt: skip
        self.ops.linear(x_NF, weights[name], out_nD, residual_nD, weights[bias_of(name)])
        return lambda: None

    def weight_gradient(self, name: str, d_out: Array, x: Array, into: Gradients, arena: Arena) -> None:
        super().weight_gradient(name, d_out, x, into, arena)
        self.ops.sum_rows(d_out, into.of[bias_of(name)], into.accumulate, arena)
        into.final(bias_of(name))


class GPT2(Llama):
    """The stages of ``Llama`` with GPT-2's parts instead of LLaMA's."""

    def __init__(self, config: LlamaConfig, ops: Ops, **options: Any) -> None:
        super().__init__(config, ops, **{**options, "tensor": BiasedLinear(ops)})

    def embed(self, weights: Weights, tokens_N: Array, seq_len: int, keep: Arena) -> Array:
        x_ND = super().embed(weights, tokens_N, seq_len, keep)
        for start in range(0, len(tokens_N), seq_len):
            sample = x_ND[start : start + seq_len]
            self.ops.add(sample, weights[POSITIONS][:seq_len], sample)
        return x_ND

    def embed_backward(self, tokens_N: Array, seq_len: int, dx_ND: Array, into: Gradients) -> None:
        d_positions = into.of[POSITIONS]
        if not into.accumulate:
            self.ops.zero(d_positions[seq_len:])
        samples = dx_ND.reshape(len(dx_ND) // seq_len, -1)
        self.ops.sum_rows(samples, d_positions[:seq_len].reshape(-1), into.accumulate, self.arena)
        into.final(POSITIONS)
        super().embed_backward(tokens_N, seq_len, dx_ND, into)

    def _norm_statistics(self, x_ND: Array, arena: Arena) -> Array:
        return arena.take((2, len(x_ND)), self.ops.statistics_dtype(x_ND.dtype))

    def _norm(self, weights: Weights, name: str, x_ND: Array, out_ND: Array, rstd_N: Array, rows: slice) -> None:
        """Write all rows: with one rank, ``rows`` is always all of them."""
        eps = self.config.rms_norm_eps
        self.ops.layer_norm(x_ND, weights[name], weights[bias_of(name)], eps, out_ND, rstd_N)

    def _norm_backward(
        self, weights: Weights, name: str, d_out: Array, x: Array, rstd: Array, dx: Array, into: Gradients
    ) -> None:
        bias = bias_of(name)
        self.ops.layer_norm_backward(
            d_out, x, weights[name], rstd, dx, into.of[name], into.of[bias], into.accumulate, self.arena
        )
        into.final(name)
        into.final(bias)

    def _apply_rope(self, rope: Callable[..., None], qkv_NW: Array, seq_len: int) -> None:
        pass

    def _activate(self, gate_up_N2F: Array, hidden_NF: Array) -> None:
        self.ops.gelu(gate_up_N2F, hidden_NF, self.arena)

    def _activate_backward(self, d_hidden: Array, gate_up: Array, hidden: Array, d_gate_up: Array) -> None:
        self.ops.gelu_backward(d_hidden, gate_up, d_gate_up, self.arena)


def make_model(config: LlamaConfig, ops: Ops, **options: Any) -> Llama:
    """The model of a configuration, GPT-2 or LLaMA; ``options`` are those of ``Llama``."""
    return (GPT2 if isinstance(config, GPT2Config) else Llama)(config, ops, **options)
