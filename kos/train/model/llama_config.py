"""The shape of a LLaMA: its configuration, its tensors and their names, its cost.

Field names, tensor names and layouts (linears are (out, in)) are Hugging Face's.
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from kos.errors import ConfigError
from kos.train.model.parameters import Parameters
from kos.train.model.shapes import Local, split_layers

DRAWN = 1 << 26  # initial weights that have a random generator of their own: half a second of one core


class Section(BaseModel):
    """A table of a configuration: its values are of the types that are said, its keys those that are known."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class RopeScaling(Section):
    """LLaMA-3's stretching of the rotary frequencies, with Hugging Face's key names and LLaMA-3's values."""

    rope_type: Literal["llama3"] = "llama3"
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(1.0, gt=0)
    high_freq_factor: float = Field(4.0, gt=0)
    original_max_position_embeddings: int = Field(8192, ge=1)

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
    noncausal: float


class LayerNames(NamedTuple):
    """What a model reads of a layer: four matrices, of which two may be groups, and the norms before them."""

    input_norm: str
    qkv: str
    o: str
    post_attention_norm: str
    gate_up: str
    down: str


class _Block(NamedTuple):
    """Initial weights that one random generator draws."""

    name: str  # of the tensor
    number: int  # among the blocks of that
    start: int  # in the layout of ``parameter_shapes``
    size: int
    constant: bool


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model, in Hugging Face's field names.  ConfigError where it cannot be."""

    model_type: ClassVar[str] = "llama"
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    final_norm: ClassVar[str] = "model.norm.weight"
    lookups: ClassVar[tuple[str, ...]] = (embedding,)  # tables whose rows are read, not multiplied
    residual: ClassVar[tuple[str, ...]] = (".o_proj.weight", ".down_proj.weight")  # ends of what adds to the stream

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
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ConfigError(
                f"num_attention_heads: expected a multiple of num_key_value_heads = {kv_heads}, got {heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: expected an even number, as rotary embeddings need, got {self.head_dim}")

    @property
    def head(self) -> str:
        """The matrix that makes the logits."""
        return self.embedding if self.tie_word_embeddings else "lm_head.weight"

    @property
    def up_size(self) -> int:
        """Columns of what the activation function takes."""
        return 2 * self.intermediate_size

    def layer_names(self, layer: int) -> LayerNames:
        prefix = f"model.layers.{layer}."
        names = ("input_layernorm", "self_attn.qkv_proj", "self_attn.o_proj", "post_attention_layernorm",
                 "mlp.gate_up_proj", "mlp.down_proj")  # fmt: skip
        return LayerNames(*(f"{prefix}{name}.weight" for name in names))

    def local(self, tp_rank: int = 0, tp: int = 1, pp_rank: int = 0, pp: int = 1) -> Local:
        """The part of one rank of ``tp`` times ``pp``; the whole model unless told otherwise.

        ConfigError where heads, intermediate size or vocabulary do not divide, or a stage would have no layer.
        """
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
            if (got := getattr(self, name)) % tp:
                raise ConfigError(f"--tp {tp}: expected {name} to be a multiple of {tp}, got {got}")
        if pp > self.num_hidden_layers:
            raise ConfigError(f"--pp {pp}: expected at most a stage a layer, {self.num_hidden_layers}, got {pp}")
        rows = self.vocab_size // tp
        return Local(
            split_layers(self.num_hidden_layers, pp, pp_rank),
            self.num_attention_heads // tp, self.num_key_value_heads // tp,
            self.intermediate_size // tp, self.up_size // tp,
            range(tp_rank * rows, (tp_rank + 1) * rows), pp_rank == 0, pp_rank == pp - 1,
        )  # fmt: skip

    def parameter_shapes(self, *parts: Local) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order in which the backward finishes the gradients: of the whole, or of parts."""
        if len(parts) > 1:
            return {name: shape for part in reversed(parts) for name, shape in self.parameter_shapes(part).items()}
        local = parts[0] if parts else self.local()
        D, F, rows = self.hidden_size, local.intermediate, len(local.vocabulary)
        A, kv = local.heads * self.head_dim, local.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        if local.last:
            shapes |= {} if self.tie_word_embeddings else {self.head: (rows, D)}
            shapes[self.final_norm] = (D,)
        groups = self.fused_groups(local)
        for layer in reversed(local.layers):
            names = self.layer_names(layer)
            shapes[names.down] = (D, F)
            shapes |= dict.fromkeys(groups[names.gate_up], (F, D))
            shapes[names.post_attention_norm] = (D,)
            shapes[names.o] = (D, A)
            shapes |= zip(groups[names.qkv], ((A, D), (kv, D), (kv, D)), strict=True)
            shapes[names.input_norm] = (D,)
        if local.first or (local.last and self.tie_word_embeddings):
            shapes[self.embedding] = (rows, D)
        return shapes

    def fused_groups(self, *parts: Local) -> dict[str, tuple[str, ...]]:
        """Group name -> neighbours in ``parameter_shapes`` that the model reads as one matrix."""
        groups: dict[str, tuple[str, ...]] = {}
        for layer in (layer for part in parts or (self.local(),) for layer in part.layers):
            names = self.layer_names(layer)
            groups[names.gate_up] = tuple(names.gate_up.replace("gate_up", part) for part in ("gate", "up"))
            groups[names.qkv] = tuple(names.qkv.replace("qkv", part) for part in "qkv")
        return groups

    def num_parameters(self, *parts: Local) -> int:
        """A tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes(*parts).values())

    def flops_per_token(self, seq_len: int) -> FlopsPerToken:
        """6 N + 6 L A T (causal) and 6 N + 12 L A T; N counts what multiplies: no lookup, no norms."""
        shapes = self.parameter_shapes()
        matmul = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name not in self.lookups)
        if self.tie_word_embeddings:
            matmul += math.prod(shapes[self.embedding])
        scores = self.num_hidden_layers * self.num_attention_heads * self.head_dim * seq_len
        return FlopsPerToken(6.0 * (matmul + scores), 6.0 * (matmul + 2 * scores))

    def rope_frequencies(self) -> list[float]:
        """The d / 2 rotary frequencies, in radians a token."""
        d = self.head_dim
        frequencies = [self.rope_theta ** (-2 * i / d) for i in range(d // 2)]
        return [self.rope_scaling.scale(f) for f in frequencies] if self.rope_scaling else frequencies

    def init_weights(self, weights: Parameters, seed: int) -> None:
        """Norms at 1, biases at 0, the rest normal(0, initializer_range), ``residual`` over sqrt(2 L), as GPT-2.

        A tensor's values depend on ``seed``, its name and its shape alone; blocks of ``DRAWN`` are drawn side by side.
        """
        self._draw(weights.flat, 0, seed, min(64, os.cpu_count() or 1))

    def shares(self, ranks: int) -> list[slice]:
        """The layout in one run of whole blocks for each rank, about equally long."""
        ends, whole = [0] * (ranks + 1), self.num_parameters()
        for block in self._blocks():  # goes to the rank in whose equal part its middle lies
            rank = (2 * block.start + block.size) * ranks // (2 * whole)
            ends[rank + 1 :] = [block.start + block.size] * (ranks - rank)
        return [slice(*ends[rank : rank + 2]) for rank in range(ranks)]

    def draw_share(self, share: slice, seed: int, threads: int, unwanted: threading.Event | None = None) -> np.ndarray:
        """What ``init_weights`` puts there, in fp32; not all of it once it is ``unwanted``."""
        values = np.empty(share.stop - share.start, np.float32)
        self._draw(values, share.start, seed, threads, unwanted)
        return values

    def _blocks(self) -> list[_Block]:
        found, start = [], 0
        for name, shape in self.parameter_shapes().items():
            size = math.prod(shape)
            for number, at in enumerate(range(0, size, DRAWN)):
                found.append(_Block(name, number, start + at, min(DRAWN, size - at), len(shape) == 1))
            start += size
        return found

    def _draw(
        self, into: np.ndarray, first: int, seed: int, threads: int, unwanted: threading.Event | None = None
    ) -> None:
        """Fill ``into``, which is whole blocks of the layout from ``first`` on."""

        def draw(block: _Block) -> None:
            if unwanted is not None and unwanted.is_set():
                return
            flat = into[block.start - first :][: block.size]
            if block.constant:
                flat[...] = not block.name.endswith(".bias")
                return
            std = self.initializer_range
            if block.name.endswith(self.residual):
                std /= math.sqrt(2 * self.num_hidden_layers)
            rng = np.random.default_rng([seed, zlib.crc32(block.name.encode()), block.number])
            rng.standard_normal(out=flat, dtype=np.float32)
            flat *= std

        blocks = [block for block in self._blocks() if first <= block.start < first + into.size]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(draw, sorted(blocks, key=lambda block: -block.size)))
