"""The shape of a LLaMA: its configuration, its tensors and their names, its cost.

Field names, tensor names and layouts (linears are (out, in)) are Hugging Face's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from kos.errors import ConfigError
from kos.train.model.shapes import Local, Placement, Stages, split_layers

HEAD = 0.7
"""The time of the head, as a fraction of the time of layers whose matrix products have as many flops.

Measured: 0.67 in benchmarks/results/profile-1b-h200-1.txt, 0.76 in profile-8b-h200-8.txt."""


class Section(BaseModel):
    """A section of a configuration, with typed values; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class RopeScaling(Section):
    """LLaMA-3's scaling of the rotary frequencies, with Hugging Face's key names and LLaMA-3's values."""

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
    """The weights of a layer as a model reads them: four matrices, two of which may be groups, and their norms."""

    input_norm: str
    qkv: str
    o: str
    post_attention_norm: str
    gate_up: str
    down: str


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model, in Hugging Face's field names.  ConfigError if it is impossible."""

    model_type: ClassVar[str] = "llama"
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    final_norm: ClassVar[str] = "model.norm.weight"
    tables: ClassVar[tuple[str, ...]] = (embedding,)  # whose rows are read, not multiplied
    residual: ClassVar[tuple[str, ...]] = (".o_proj.weight", ".down_proj.weight")  # ends of what adds to the stream
    may_differ: ClassVar[frozenset[str]] = frozenset({"max_position_embeddings", "initializer_range"})
    """Fields in which a run may differ from the model whose weights it starts from."""

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
            expected = f"a multiple of {kv_heads} (num_key_value_heads)"
            raise ConfigError(f"num_attention_heads: expected {expected}, got {heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: expected an even number, as rotary embeddings need, got {self.head_dim}")

    @property
    def head(self) -> str:
        """The matrix that makes the logits."""
        return self.embedding if self.tie_word_embeddings else "lm_head.weight"

    @property
    def up_size(self) -> int:
        """The number of columns of the activation function's input."""
        return 2 * self.intermediate_size

    def layer_names(self, layer: int) -> LayerNames:
        prefix = f"model.layers.{layer}."
        names = ("input_layernorm", "self_attn.qkv_proj", "self_attn.o_proj", "post_attention_layernorm",
                 "mlp.gate_up_proj", "mlp.down_proj")  # fmt: skip
        return LayerNames(*(f"{prefix}{name}.weight" for name in names))

    def local(self, tp_rank: int = 0, tp: int = 1, stage: int = 0, stages: Stages = ((0,),)) -> Local:
        """The part of rank ``tp_rank`` of ``tp`` in stage ``stage`` of the pipeline; by default the whole model.

        ConfigError if ``tp`` does not divide the heads, the intermediate size or the vocabulary.
        """
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
            if (got := getattr(self, name)) % tp:
                raise ConfigError(f"--tp {tp}: expected {name} to be a multiple of {tp}, got {got}")
        rows = self.vocab_size // tp
        return Local(
            split_layers(self.num_hidden_layers, stages, self._head_cost())[stage],
            self.num_attention_heads // tp, self.num_key_value_heads // tp,
            self.intermediate_size // tp, self.up_size // tp,
            range(tp_rank * rows, (tp_rank + 1) * rows), stage == 0, stage == sum(map(len, stages)) - 1, tp_rank, tp,
        )  # fmt: skip

    def _head_cost(self) -> float:
        """The time that the head takes, in layers."""
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        return HEAD * self.vocab_size / (heads + self.up_size + self.intermediate_size)

    def parts(self, tp_rank: int, tp: int, pp_rank: int, stages: Stages) -> tuple[Local, ...]:
        """The part of a rank in each of its stages. ConfigError if a stage would be empty, and as in ``local``."""
        count, pp, most = sum(map(len, stages)), len(stages), self.num_hidden_layers + 1
        if count > most:
            chunks = f" x {count // pp} stages a rank (--pp-schedule, --pp-chunks)" * (count > pp)
            raise ConfigError(f"--pp {pp}{chunks}: expected at most {most} stages (layers + 1), got {count}")
        return tuple(self.local(tp_rank, tp, stage, stages) for stage in stages[pp_rank])

    def placements(self, *parts: Local) -> dict[str, Placement]:
        """Name -> where a rank's part of the tensor lies, in the order in which the backward finishes the gradients.

        ``parts`` are the chunks of layers that the rank holds; without any, it holds the whole model.
        Column-parallel matrices are sharded by rows, which are outputs, row-parallel ones by columns (Megatron-LM:
        Shoeybi et al. 2019, arXiv:1909.08053).
        """
        parts = parts or (self.local(),)
        shard, shards = parts[0].shard, parts[0].shards

        def split(dim: int, *shape: int) -> Placement:
            size = shape[dim] // shards
            return Placement(shape, dim, shard * size, size)

        D, F = self.hidden_size, self.intermediate_size
        A, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        table, norm = split(0, self.vocab_size, D), Placement((D,))
        found: dict[str, Placement] = {}
        last = any(part.last for part in parts)
        if last:
            found |= {} if self.tie_word_embeddings else {self.head: table}
            found[self.final_norm] = norm
        groups = self.fused_groups(*parts)
        for layer in sorted((layer for part in parts for layer in part.layers), reverse=True):
            names = self.layer_names(layer)
            found[names.down] = split(1, D, F)
            found |= dict.fromkeys(groups[names.gate_up], split(0, F, D))
            found[names.post_attention_norm] = norm
            found[names.o] = split(1, D, A)
            found |= zip(groups[names.qkv], (split(0, rows, D) for rows in (A, kv, kv)), strict=True)
            found[names.input_norm] = norm
        if any(part.first for part in parts) or (last and self.tie_word_embeddings):
            found[self.embedding] = table
        return found

    def parameter_shapes(self, *parts: Local) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order of ``placements``: of the whole, or of a rank's parts."""
        return {name: placement.local for name, placement in self.placements(*parts).items()}

    def fused_groups(self, *parts: Local) -> dict[str, tuple[str, ...]]:
        """Group name -> neighbours in ``parameter_shapes`` that the model reads as one matrix."""
        groups: dict[str, tuple[str, ...]] = {}
        for layer in (layer for part in parts or (self.local(),) for layer in part.layers):
            names = self.layer_names(layer)
            groups[names.gate_up] = tuple(names.gate_up.replace("gate_up", part) for part in ("gate", "up"))
            groups[names.qkv] = tuple(names.qkv.replace("qkv", part) for part in "qkv")
        return groups

    def num_parameters(self, *parts: Local) -> int:
        """The number of parameters; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes(*parts).values())

    def flops_per_token(self, seq_len: int) -> FlopsPerToken:
        """6 N + 6 L A T (causal) and 6 N + 12 L A T; N counts what multiplies: no lookup, no norms."""
        shapes = self.parameter_shapes()
        matmul = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name not in self.tables)
        if self.tie_word_embeddings:
            matmul += math.prod(shapes[self.embedding])
        scores = self.num_hidden_layers * self.num_attention_heads * self.head_dim * seq_len
        return FlopsPerToken(6.0 * (matmul + scores), 6.0 * (matmul + 2 * scores))

    def rope_frequencies(self) -> list[float]:
        """The d / 2 rotary frequencies, in radians a token."""
        d = self.head_dim
        frequencies = [self.rope_theta ** (-2 * i / d) for i in range(d // 2)]
        return [self.rope_scaling.scale(f) for f in frequencies] if self.rope_scaling else frequencies
