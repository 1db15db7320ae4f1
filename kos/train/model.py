"""LLaMA, forward and backward by hand, over the vocabulary of ``kos.train.ops``.

The model is a row of stages: ``embed``, ``block`` 0 … L-1, ``head``; each has a forward and a backward,
and what a forward keeps for its backward is one named tuple.  Parallelism cuts between and inside stages.

Suffixes name dimensions: N = B T tokens, D hidden, F intermediate, V vocabulary, H query heads, K kv
heads, d head_dim, A = H d, W = (H + 2K) d.  Names, shapes and conventions are Hugging Face's.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kos.errors import ConfigError, InvalidArgument
from kos.train.ops import Array, Ops

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
HEAD_ROWS = 1024  # tokens whose logits are in memory at once

Weights = Mapping[str, Array]
OnGradient = Callable[[str], None]


@dataclass(frozen=True)
class RopeScaling:
    """LLaMA-3's stretching of the rotary frequencies (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scale(self, frequency: float) -> float:
        """Long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""
        wavelength = 2 * math.pi / frequency
        rotations = self.original_max_position_embeddings / wavelength
        if rotations < self.low_freq_factor:
            return frequency / self.factor
        if rotations > self.high_freq_factor:
            return frequency
        smooth = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


class FlopsPerToken(NamedTuple):
    """Forward and backward, by the two conventions of the field."""

    causal: float
    non_causal: float


@dataclass(frozen=True)
class LayerNames:
    """The tensors of one layer: seven matrices, two norms, and the two groups read as one matrix."""

    q: str
    k: str
    v: str
    o: str
    gate: str
    up: str
    down: str
    input_norm: str
    post_attention_norm: str
    qkv: str
    gate_up: str

    @classmethod
    def of(cls, layer: int) -> LayerNames:
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return cls(
            q=f"{attention}.q_proj.weight",
            k=f"{attention}.k_proj.weight",
            v=f"{attention}.v_proj.weight",
            o=f"{attention}.o_proj.weight",
            gate=f"{mlp}.gate_proj.weight",
            up=f"{mlp}.up_proj.weight",
            down=f"{mlp}.down_proj.weight",
            input_norm=f"{prefix}.input_layernorm.weight",
            post_attention_norm=f"{prefix}.post_attention_layernorm.weight",
            qkv=f"{attention}.qkv_proj.weight",
            gate_up=f"{mlp}.gate_up_proj.weight",
        )


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model, in Hugging Face's field names.  ConfigError where it cannot be."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % heads:
            raise ConfigError(
                f"hidden_size: expected a multiple of num_attention_heads = {heads}, got {self.hidden_size}"
            )
        if heads % kv_heads:
            raise ConfigError(
                f"num_attention_heads: expected a multiple of num_key_value_heads = {kv_heads}, got {heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: expected an even number, as rotary embeddings need, got {self.head_dim}")

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order in which the backward finishes the gradients."""
        D, F = self.hidden_size, self.intermediate_size
        A, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        if not self.tie_word_embeddings:
            shapes[HEAD] = (self.vocab_size, D)
        shapes[FINAL_NORM] = (D,)
        for layer in reversed(range(self.num_hidden_layers)):
            names = LayerNames.of(layer)
            shapes[names.down] = (D, F)
            shapes[names.gate] = shapes[names.up] = (F, D)
            shapes[names.post_attention_norm] = (D,)
            shapes[names.o] = (D, A)
            shapes[names.q] = (A, D)
            shapes[names.k] = shapes[names.v] = (kv, D)
            shapes[names.input_norm] = (D,)
        shapes[EMBEDDING] = (self.vocab_size, D)
        return shapes

    def fused_groups(self) -> dict[str, tuple[str, ...]]:
        """Group name -> neighbours in ``parameter_shapes`` that the model reads as one matrix."""
        groups: dict[str, tuple[str, ...]] = {}
        for layer in range(self.num_hidden_layers):
            names = LayerNames.of(layer)
            groups[names.gate_up] = (names.gate, names.up)
            groups[names.qkv] = (names.q, names.k, names.v)
        return groups

    def num_parameters(self) -> int:
        """A tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def flops_per_token(self, seq_len: int) -> FlopsPerToken:
        """6 N + 6 L A T (causal) and 6 N + 12 L A T; N counts what multiplies: no lookup, no norms."""
        shapes = self.parameter_shapes()
        matmul = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name != EMBEDDING)
        if self.tie_word_embeddings:
            matmul += math.prod(shapes[EMBEDDING])
        scores = self.num_hidden_layers * self.num_attention_heads * self.head_dim * seq_len
        return FlopsPerToken(6.0 * (matmul + scores), 6.0 * (matmul + 2 * scores))

    def rope_frequencies(self) -> list[float]:
        """The d / 2 rotary frequencies, in radians a token."""
        d = self.head_dim
        frequencies = [self.rope_theta ** (-2 * i / d) for i in range(d // 2)]
        return [self.rope_scaling.scale(f) for f in frequencies] if self.rope_scaling else frequencies

    def init_weights(self, weights: Mapping[str, np.ndarray], seed: int) -> None:
        """Norms at 1, the rest normal(0, initializer_range); o_proj and down_proj over sqrt(2 L), as GPT-2.

        A tensor's values depend on ``seed``, its name and its shape alone.
        """
        residual = (".o_proj.weight", ".down_proj.weight")
        for name, shape in self.parameter_shapes().items():
            if len(shape) == 1:
                weights[name][...] = 1
                continue
            std = self.initializer_range
            if name.endswith(residual):
                std /= math.sqrt(2 * self.num_hidden_layers)
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            weights[name][...] = std * rng.standard_normal(shape, np.float32)


class BlockActivations(NamedTuple):
    """What a block's forward keeps for its backward."""

    x_ND: Array
    rstd_in_N: Array
    normed_in_ND: Array
    qkv_NW: Array
    lse_BHT: Array
    heads_NA: Array
    mid_ND: Array
    rstd_mid_N: Array
    normed_mid_ND: Array
    gate_up_N2F: Array
    hidden_NF: Array


class Llama:
    """The model in one dialect of ``ops``.  Holds no weights: only their shapes, and scratch memory.

    ``weights`` and ``gradients`` are mappings from names to arrays that also know the names of
    ``config.fused_groups()`` (``kos.train.parameters.Parameters``).  ``tokens`` and ``targets`` are int32
    (B, T); a target of -1 is left out of the loss.
    """

    def __init__(self, config: LlamaConfig, ops: Ops) -> None:
        self.config = config
        self.ops = ops
        self.arena = ops.make_arena()
        self._layers = [LayerNames.of(layer) for layer in range(config.num_hidden_layers)]
        self._head = EMBEDDING if config.tie_word_embeddings else HEAD
        self._tables: dict[tuple[int, Any], tuple[Array, Array]] = {}

    # --- whole passes --------------------------------------------------------------------------------

    def loss_and_gradients(
        self,
        weights: Weights,
        tokens: Array,
        targets: Array,
        gradients: Weights,
        *,
        accumulate: bool,
        on_gradient: OnGradient | None = None,
    ) -> float:
        """The mean loss over the targets, its gradients written to (``accumulate``: added to) ``gradients``.

        ``on_gradient(name)`` is called when a gradient is final, in the order of ``parameter_shapes``.
        A loss that is not finite is returned as it is.
        """
        final = on_gradient or (lambda name: None)
        tokens_N, targets_N = self._flatten(tokens, targets)
        with self.ops.step(self.arena):
            dx_ND = self._take(weights, len(tokens_N), self.config.hidden_size)
            losses_N, count = self._loss_arrays(weights, targets_N)
            x_ND = self.embed(weights, tokens_N)
            kept: list[BlockActivations] = []
            for layer in range(self.config.num_hidden_layers):
                x_ND, activations = self.block(layer, weights, x_ND, tokens.shape[1])
                kept.append(activations)
            self.head_loss_and_gradients(weights, x_ND, targets_N, count, losses_N, dx_ND, gradients, accumulate, final)
            for layer in reversed(range(self.config.num_hidden_layers)):
                activations = kept.pop()
                self.block_backward(layer, weights, activations, dx_ND, gradients, accumulate, final)
            self.embed_backward(tokens_N, dx_ND, gradients, accumulate, final)
            return self.ops.mean_loss(losses_N, count)

    def loss(self, weights: Weights, tokens: Array, targets: Array) -> float:
        """The mean loss over the targets; keeps no activations."""
        tokens_N, targets_N = self._flatten(tokens, targets)
        with self.ops.step(self.arena):
            losses_N, count = self._loss_arrays(weights, targets_N)
            normed_ND = self._final_states(weights, tokens)
            for rows in _chunks(len(tokens_N)):
                with self.arena.scope():
                    logits = self._logits(weights, normed_ND[rows])
                    self.ops.cross_entropy(logits, targets_N[rows], losses_N[rows], self.arena)
            return self.ops.mean_loss(losses_N, count)

    def logits(self, weights: Weights, tokens: Array) -> Array:
        """The logits (B, T, V), in an array of their own."""
        with self.ops.step(self.arena):
            normed_ND = self._final_states(weights, tokens)
            return self._logits(weights, normed_ND).reshape(*tokens.shape, -1).copy()

    def next_logits(self, weights: Weights, tokens: Array) -> Array:
        """The logits (V,) of what follows ``tokens`` (1, T), in an array of their own."""
        with self.ops.step(self.arena):
            normed_ND = self._final_states(weights, tokens)
            return self._logits(weights, normed_ND[-1:])[0].copy()

    def _final_states(self, weights: Weights, tokens: Array) -> Array:
        """The normed output of the last block; each block's memory is given back at its end."""
        tokens_N, _ = self._flatten(tokens, tokens)
        x_ND = self.embed(weights, tokens_N)
        for layer in range(self.config.num_hidden_layers):
            with self.arena.scope():
                out_ND, _ = self.block(layer, weights, x_ND, tokens.shape[1])
                self.ops.copy(out_ND, x_ND)
        return self._norm(weights, FINAL_NORM, x_ND)[0]

    # --- stages --------------------------------------------------------------------------------------

    def embed(self, weights: Weights, tokens_N: Array) -> Array:
        x_ND = self._take(weights, len(tokens_N), self.config.hidden_size)
        self.ops.embedding(tokens_N, weights[EMBEDDING], x_ND)
        return x_ND

    def embed_backward(
        self, tokens_N: Array, dx_ND: Array, gradients: Weights, accumulate: bool, final: OnGradient
    ) -> None:
        after_head = accumulate or self.config.tie_word_embeddings
        self.ops.embedding_backward(dx_ND, tokens_N, gradients[EMBEDDING], after_head, self.arena)
        final(EMBEDDING)

    def block(self, layer: int, weights: Weights, x_ND: Array, seq_len: int) -> tuple[Array, BlockActivations]:
        """x + attention(norm(x)), then the same with the MLP."""
        ops, arena, config, names = self.ops, self.arena, self.config, self._layers[layer]
        N, (B, T) = len(x_ND), (len(x_ND) // seq_len, seq_len)
        H, K, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim

        normed_in_ND, rstd_in_N = self._norm(weights, names.input_norm, x_ND)
        qkv_NW = ops.empty_columns(arena, N, (H + 2 * K) * d, x_ND.dtype)
        ops.linear(normed_in_ND, weights[names.qkv], qkv_NW)
        ops.rope(qkv_NW, self._rope_tables(T, x_ND.dtype), d, H + K, arena)
        heads_NA = ops.empty_columns(arena, N, H * d, x_ND.dtype)
        lse_BHT = self._take(weights, B, H, T)
        ops.attention(qkv_NW, H, K, heads_NA, lse_BHT, arena)
        mid_ND = self._take(weights, *x_ND.shape)
        ops.linear(heads_NA, weights[names.o], mid_ND)
        ops.add(mid_ND, x_ND, mid_ND)

        normed_mid_ND, rstd_mid_N = self._norm(weights, names.post_attention_norm, mid_ND)
        gate_up_N2F = ops.empty_columns(arena, N, 2 * config.intermediate_size, x_ND.dtype)
        hidden_NF = ops.empty_columns(arena, N, config.intermediate_size, x_ND.dtype)
        ops.linear(normed_mid_ND, weights[names.gate_up], gate_up_N2F)
        ops.swiglu(gate_up_N2F, hidden_NF, arena)
        out_ND = self._take(weights, *x_ND.shape)
        ops.linear(hidden_NF, weights[names.down], out_ND)
        ops.add(out_ND, mid_ND, out_ND)
        return out_ND, BlockActivations(
            x_ND,
            rstd_in_N,
            normed_in_ND,
            qkv_NW,
            lse_BHT,
            heads_NA,
            mid_ND,
            rstd_mid_N,
            normed_mid_ND,
            gate_up_N2F,
            hidden_NF,
        )

    def block_backward(
        self,
        layer: int,
        weights: Weights,
        kept: BlockActivations,
        dx_ND: Array,
        gradients: Weights,
        accumulate: bool,
        final: OnGradient,
    ) -> None:
        """``dx_ND`` comes as the gradient of the block's output and goes as that of its input."""
        ops, arena, config, names = self.ops, self.arena, self.config, self._layers[layer]
        H, K, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        T, (N, D), F = kept.lse_BHT.shape[-1], dx_ND.shape, config.intermediate_size

        def linear_backward(d_out: Array, x: Array, name: str, dx: Array) -> None:
            ops.linear_backward(d_out, x, weights[name], dx, gradients[name], accumulate, arena)

        def norm_backward(d_out: Array, x: Array, rstd: Array, name: str) -> None:
            ops.rms_norm_backward(d_out, x, weights[name], rstd, dx_ND, gradients[name], accumulate, arena)
            final(name)

        with arena.scope():
            d_hidden_NF = ops.empty_columns(arena, N, F, dx_ND.dtype)
            linear_backward(dx_ND, kept.hidden_NF, names.down, d_hidden_NF)
            final(names.down)
            d_gate_up_N2F = ops.empty_columns(arena, N, 2 * F, dx_ND.dtype)
            ops.swiglu_backward(d_hidden_NF, kept.gate_up_N2F, kept.hidden_NF, d_gate_up_N2F, arena)
            d_normed_ND = self._take(weights, N, D)
            linear_backward(d_gate_up_N2F, kept.normed_mid_ND, names.gate_up, d_normed_ND)
            final(names.gate)
            final(names.up)
            norm_backward(d_normed_ND, kept.mid_ND, kept.rstd_mid_N, names.post_attention_norm)

        with arena.scope():
            d_heads_NA = ops.empty_columns(arena, N, H * d, dx_ND.dtype)
            linear_backward(dx_ND, kept.heads_NA, names.o, d_heads_NA)
            final(names.o)
            d_qkv_NW = ops.empty_columns(arena, N, (H + 2 * K) * d, dx_ND.dtype)
            ops.attention_backward(d_heads_NA, kept.qkv_NW, kept.heads_NA, kept.lse_BHT, H, K, d_qkv_NW, arena)
            ops.rope_backward(d_qkv_NW, self._rope_tables(T, dx_ND.dtype), d, H + K, arena)
            d_normed_ND = self._take(weights, N, D)
            linear_backward(d_qkv_NW, kept.normed_in_ND, names.qkv, d_normed_ND)
            for name in (names.q, names.k, names.v):
                final(name)
            norm_backward(d_normed_ND, kept.x_ND, kept.rstd_in_N, names.input_norm)

    def head_loss_and_gradients(
        self,
        weights: Weights,
        x_ND: Array,
        targets_N: Array,
        count: Array,
        losses_N: Array,
        dx_ND: Array,
        gradients: Weights,
        accumulate: bool,
        final: OnGradient,
    ) -> None:
        """Forward and backward in one, so that only ``HEAD_ROWS`` rows of logits exist.  Writes ``dx_ND``."""
        ops, arena = self.ops, self.arena
        with arena.scope():
            normed_ND, rstd_N = self._norm(weights, FINAL_NORM, x_ND)
            d_normed_ND = self._take(weights, *x_ND.shape)
            for rows in _chunks(len(targets_N)):
                with arena.scope():
                    logits = self._logits(weights, normed_ND[rows])
                    ops.cross_entropy_with_gradient(logits, targets_N[rows], count, losses_N[rows], arena)
                    ops.linear_backward(
                        logits,
                        normed_ND[rows],
                        weights[self._head],
                        d_normed_ND[rows],
                        gradients[self._head],
                        accumulate or rows.start > 0,
                        arena,
                    )
            if self._head == HEAD:
                final(HEAD)
            ops.zero(dx_ND)
            ops.rms_norm_backward(
                d_normed_ND,
                x_ND,
                weights[FINAL_NORM],
                rstd_N,
                dx_ND,
                gradients[FINAL_NORM],
                accumulate,
                arena,
            )
            final(FINAL_NORM)

    # --- small things --------------------------------------------------------------------------------

    def _flatten(self, tokens: Array, targets: Array) -> tuple[Array, Array]:
        if len(tokens.shape) != 2 or tokens.shape != targets.shape:
            raise InvalidArgument(
                f"expected tokens and targets of one shape (B, T), got {tokens.shape} and {targets.shape}"
            )
        return tokens.reshape(-1), targets.reshape(-1)

    def _take(self, weights: Weights, *shape: int) -> Array:
        return self.arena.take(shape, weights[EMBEDDING].dtype)

    def _loss_arrays(self, weights: Weights, targets_N: Array) -> tuple[Array, Array]:
        losses_N, count = self._take(weights, len(targets_N)), self._take(weights, 1)
        self.ops.count_targets(targets_N, count)
        return losses_N, count

    def _norm(self, weights: Weights, name: str, x_ND: Array) -> tuple[Array, Array]:
        normed_ND, rstd_N = self._take(weights, *x_ND.shape), self._take(weights, len(x_ND))
        self.ops.rms_norm(x_ND, weights[name], self.config.rms_norm_eps, normed_ND, rstd_N)
        return normed_ND, rstd_N

    def _logits(self, weights: Weights, normed_ND: Array) -> Array:
        logits_NV = self._take(weights, len(normed_ND), self.config.vocab_size)
        self.ops.linear(normed_ND, weights[self._head], logits_NV)
        return logits_NV

    def _rope_tables(self, seq_len: int, dtype: Any) -> tuple[Array, Array]:
        key = (seq_len, dtype)
        if key not in self._tables:
            self._tables[key] = self.ops.rope_tables(self.config.rope_frequencies(), range(seq_len), dtype)
        return self._tables[key]


def _chunks(rows: int) -> list[slice]:
    return [slice(start, min(start + HEAD_ROWS, rows)) for start in range(0, rows, HEAD_ROWS)]
