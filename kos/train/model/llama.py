"""The shape of a LLaMA: its configuration, its tensors and their names, the part that a rank holds, its cost.

Field names, tensor names and layouts (linears are (out, in)) are Hugging Face's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Any, ClassVar, NamedTuple, Self

from kos.errors import SettingError
from kos.memory.sharded import Sharded
from kos.train.layers.attention import Attention, Rope
from kos.train.layers.linear import ColumnLinear, RowLinear
from kos.train.layers.lora import Lora, is_adapter, module_of
from kos.train.layers.mlp import MLP
from kos.train.layers.norm import Norm
from kos.train.layers.sublayer import Sublayer
from kos.train.layers.vocabulary import Embedding, Head
from kos.train.model import option_of
from kos.train.model.shape import ModelShape
from kos.train.ops import attended_pairs

Stages = tuple[tuple[int, ...], ...]
"""Of each rank of a pipeline, the stages of the model that it holds."""


class Local(NamedTuple):
    """One rank's part: its stage's layers, and of each layer its tensor-parallel part.

    ``vocabulary`` are rows of the embedding and the head.
    """

    layers: range
    vocabulary: range
    first: bool = True
    """Whether this stage looks up the tokens."""

    last: bool = True
    """Whether this stage makes the logits."""

    shard: int = 0
    """Which of the ``shards``, the tensor-parallel parts, this is."""

    shards: int = 1


@cache
def split_layers(layers: int, stages: Stages, head: float = 0.0) -> tuple[range, ...]:
    """The layers of each stage of a pipeline, such that the busiest rank has as little work as possible.

    ``stages``: the stages of each rank. The last stage also has the head, which takes as long as ``head`` layers. It
    may have no layer; every other stage has at least one. Each layer in turn goes to the rank that has the least work,
    and there to the shortest stage. Among equals, the last stage comes first, then the others in order.
    """
    ranks = {stage: held for held in stages for stage in held}
    last = len(ranks) - 1
    sizes, costs = [1] * last + [0], [1.0] * last + [head]

    def load(stage: int) -> tuple[float, float, bool, int]:
        return sum(costs[each] for each in ranks[stage]), costs[stage], stage < last, stage

    for _ in range(layers - last):
        shortest = min(ranks, key=load)
        sizes[shortest] += 1
        costs[shortest] += 1
    return tuple(range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))


HEAD = 0.7
"""The time of the head, as a fraction of the time of layers whose matrix products have as many flops.

Measured: 0.67 in benchmarks/results/profile-1b-h200-1.txt, 0.76 in profile-8b-h200-8.txt."""


class FlopsPerToken(NamedTuple):
    """Forward and backward, by the two conventions of the field."""

    causal: float
    noncausal: float


FULL, SLIDING = "full_attention", "sliding_attention"
FAMILY_SETTINGS = tuple(name for name, field in ModelShape.model_fields.items() if option_of(field).optional)
"""Settings that only some families have (``LlamaConfig.takes``)."""


class LlamaConfig(ModelShape):
    """The shape of a model, with every size.  ConfigError if it is impossible.

    With a ``sliding_window`` all layers have it, or those that ``layer_types`` names.  In ``no_rope_layers`` a 0 is a
    layer without rotary positions; by default none is.
    """

    kind: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"
    takes: ClassVar[frozenset[str]] = frozenset({"attention_bias", "mlp_bias"})
    """The optional settings of ``config.json`` that this family supports, of FAMILY_SETTINGS and of ``fixed``."""
    defaults: ClassVar[dict[str, Any]] = {}
    """What transformers takes for a setting that a ``config.json`` lacks, where it is not a LLaMA's."""
    qkv_bias: ClassVar[bool] = False  # whatever ``attention_bias`` says of all four matrices
    qk_norm: ClassVar[bool] = False  # a norm of each head of q and k
    norm_class: ClassVar[type[Norm]] = Norm
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    final_norm: ClassVar[str] = "model.norm.weight"
    tables: ClassVar[tuple[str, ...]] = (embedding,)  # whose rows are read, not multiplied
    residual: ClassVar[tuple[str, ...]] = (".o_proj.weight", ".down_proj.weight")  # ends of what adds to the stream
    stacked: ClassVar[tuple[str, ...]] = ()  # ends of tensors that are q, k and v one below another
    may_differ: ClassVar[frozenset[str]] = frozenset({"max_position_embeddings", "initializer_range", "pad_token_id"})
    """Fields in which a run may differ from the model whose weights it starts from."""
    axes: ClassVar[tuple[str, ...]] = ("dp", "tp", "pp", "cp")
    """The axes of a layout on which this family can have several ranks; ``layout_of`` refuses the others."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Settings that have one value in this family, whatever the preset gives to a LLaMA; ``config.json`` lacks them."""

    vocab_size: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    no_rope_layers: tuple[int, ...] = ()
    lora: Lora | None = None
    """The adapters of the layers; ``base`` is the model without them."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values | {"model_type": self.kind})
        self.check()

    def check(self) -> None:
        """SettingError if this shape is impossible."""
        for name in FAMILY_SETTINGS:
            if (got := getattr(self, name)) and name not in self.takes:
                raise SettingError(name, f"none in a model of type {self.model_type}", got)
        for name, values in (("layer_types", (FULL, SLIDING)), ("no_rope_layers", (0, 1))):
            each = getattr(self, name)
            if each and (len(each) != self.num_hidden_layers or not {*each} <= {*values}):
                wanted = f"{self.num_hidden_layers} of {' and '.join(map(str, values))}"
                raise SettingError(name, wanted, list(each), "num_hidden_layers")
        if self.sliding_window is None and SLIDING in self.layer_types:
            raise SettingError("sliding_window", "a number of tokens", None, "layer_types")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise SettingError("num_attention_heads", f"a multiple of {kv_heads}", heads, "num_key_value_heads")
        if self.head_dim % 2:
            raise SettingError("head_dim", "an even number, as rotary embeddings need", self.head_dim)
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            expected = f"none, or a row of the embedding, 0 to {self.vocab_size - 1}"
            raise SettingError("pad_token_id", expected, self.pad_token_id, "vocab_size")

    def replace(self, **changes: Any) -> Self:
        """The same with some settings changed, and checked."""
        return type(self)(**{**dict(self), **changes})

    @property
    def head(self) -> str:
        """The matrix that makes the logits."""
        return self.embedding if self.tie_word_embeddings else "lm_head.weight"

    @property
    def padding(self) -> int | None:
        """The row of ``pad_token_id``, which counts from the end if it is negative, as in torch's ``nn.Embedding``."""
        return None if self.pad_token_id is None else self.pad_token_id % self.vocab_size

    @property
    def base(self) -> Self:
        """The model without adapters."""
        return self.replace(lora=None)

    def adapted(
        self, rank: int, alpha: float, targets: Sequence[str] = (), rslora: bool = False, layers: Sequence[int] = ()
    ) -> Self:
        """The model with adapters of all matrices of its layers; or of ``targets``, in ``layers``, if these are given.

        SettingError if the layers have no matrix of such a name, or the model has no such layer.
        """
        if missing := [number for number in layers if not 0 <= number < self.num_hidden_layers]:
            raise SettingError("--lora-layers", f"numbers from 0 to {self.num_hidden_layers - 1}", missing[0])
        (layer,) = self.layers([0])
        known = list(dict.fromkeys(
            module_of(name) for each in layer for linear in (each.column, each.row) for name in linear.members
        ))  # fmt: skip
        lora = Lora(rank, alpha, tuple(targets), rslora, tuple(sorted({*layers})))
        if lora.pattern is None:
            if unknown := [name for name in targets if name not in known]:
                raise SettingError("--lora-targets", f"some of {', '.join(known)}", unknown[0])
            lora = lora._replace(targets=tuple(name for name in known if name in (targets or known)))
        adapted = self.replace(lora=lora)
        if not any(map(is_adapter, adapted.parameter_shapes())):
            expected = f"a regular expression that matches matrices, such as {next(iter(layer[0].column.members))}"
            raise SettingError("--lora-targets", expected.removesuffix(".weight"), lora.pattern)
        return adapted

    def first_layers(self, layers: int) -> Self:
        """The same model with its first layers only."""
        each = {name: getattr(self, name)[:layers] for name in ("layer_types", "no_rope_layers")}
        return self.replace(num_hidden_layers=min(layers, self.num_hidden_layers), **each)

    # --- the model as a list of sublayers --------------------------------------------------------------

    def embed(self) -> Embedding:
        shape = self.vocab_size, self.hidden_size
        return Embedding(self.embedding, *shape, self.tie_word_embeddings, self.padding)

    def layers(self, numbers: Iterable[int]) -> list[list[Sublayer]]:
        """The sublayers of each of these layers."""
        length = self.rope_scaling.length() if self.rope_scaling else 1.0
        rope = Rope(self.rope_frequencies(), length)
        made = [self.layer(number, rope) for number in numbers]
        if self.lora is not None:
            for sublayer in chain(*made):
                sublayer.adapt(self.lora)
        return made

    def layer(self, number: int, rope: Rope) -> list[Sublayer]:
        """The sublayers of a layer, in the order of the forward. Several matrices stacked in one are read as one."""
        qkv, o, gate_up, down = self.linears(at := f"model.layers.{number}.")
        rotated = self.no_rope_layers[number] if self.no_rope_layers else True
        before, window = self.norm(f"{at}input_layernorm.weight"), self.window(number)
        norms = [self.norm(f"{at}self_attn.{each}_norm.weight", self.head_dim) for each in "qk" if self.qk_norm]
        attention = self.attention(before, qkv, o, rope if rotated else None, window=window, norms=norms)
        return [attention, MLP(self.norm(f"{at}post_attention_layernorm.weight"), gate_up, down)]

    def attention(self, norm: Norm, qkv: ColumnLinear, o: RowLinear, rope: Rope | None, **more: Any) -> Attention:
        """The attention of a layer: what all families have alike, and ``more`` that is the layer's own."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        return Attention(norm, qkv, o, heads, kv_heads, self.head_dim, rope, **more)

    def window(self, number: int) -> int | None:
        """The size of the sliding window of a layer, in tokens; None if its attention has no window."""
        return None if self.layer_types and self.layer_types[number] == FULL else self.sliding_window

    def norm(self, name: str, size: int | None = None) -> Norm:
        """By default of the residual stream."""
        return self.norm_class(name, size or self.hidden_size, eps=self.rms_norm_eps)

    def linears(self, at: str) -> tuple[ColumnLinear, RowLinear, ColumnLinear, RowLinear]:
        """The products of the layer whose names begin with ``at``: q, k and v; o; gate and up; down."""
        D, F, d = self.hidden_size, self.intermediate_size, self.head_dim
        H, K, biased = self.num_attention_heads, self.num_key_value_heads, self.attention_bias

        def column(part: str, whole: str, biased: bool, **rows: int) -> ColumnLinear:
            """A matrix for each of ``rows``, stacked in ``whole``."""
            members = {f"{at}{part.format(name)}.weight": size for name, size in rows.items()}
            most = {name: K for name in members if name.endswith((".k_proj.weight", ".v_proj.weight"))}
            return ColumnLinear(f"{at}{part.format(whole)}.weight", D, members=members, biased=biased, most=most)

        qkv = column("self_attn.{}_proj", "qkv", biased or self.qkv_bias, q=H * d, k=K * d, v=K * d)
        o = RowLinear(f"{at}self_attn.o_proj.weight", H * d, D, biased=biased)
        gate_up = column("mlp.{}_proj", "gate_up", self.mlp_bias, gate=F, up=F)
        return qkv, o, gate_up, RowLinear(f"{at}mlp.down_proj.weight", F, D, biased=self.mlp_bias)

    def make_head(self) -> Head:
        return Head(self.head, self.vocab_size, self.norm(self.final_norm), self.tie_word_embeddings)

    # --- the part of a rank ----------------------------------------------------------------------------

    def local(self, tp_rank: int = 0, tp: int = 1, stage: int = 0, stages: Stages = ((0,),)) -> Local:
        """The part of rank ``tp_rank`` of ``tp`` in stage ``stage`` of the pipeline; by default the whole model.

        ConfigError if the family has no tensor parallelism, or ``tp`` does not divide the heads, the intermediate size
        or the vocabulary. If there are fewer kv heads than ranks, several ranks hold a copy of the same head.
        """
        if tp > 1 and "tp" not in self.axes:
            expected = f"1 in a model of type {self.model_type}, which supports {', '.join(self.axes)} only"
            raise SettingError(f"--tp {tp}", expected, tp, also=["model_type"])
        if (name := self._undivided(tp)) is not None:
            expected = f"a multiple {'or a divisor ' * (name == 'num_key_value_heads')}of {tp}"
            works = [str(n) for n in range(1, self.num_attention_heads + 1) if self._undivided(n) is None]
            hint = f"{' or '.join(filter(None, [', '.join(works[:-1]), works[-1]]))} would do"
            raise SettingError(f"--tp {tp}", f"{name} to be {expected}", getattr(self, name), hint=hint, also=[name])
        rows = self.vocab_size // tp
        return Local(
            split_layers(self.num_hidden_layers, stages, self._head_cost())[stage],
            range(tp_rank * rows, (tp_rank + 1) * rows), stage == 0, stage == sum(map(len, stages)) - 1, tp_rank, tp,
        )  # fmt: skip

    def _undivided(self, tp: int) -> str | None:
        """The first size that ``tp`` ranks cannot split; None: they can split all."""
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
            got = getattr(self, name)
            if got % tp and not (name == "num_key_value_heads" and tp % got == 0):
                return name
        return None

    def _head_cost(self) -> float:
        """The time that the head takes, in layers."""
        (layer,) = self.layers([0])
        return HEAD * self.vocab_size / sum(each.column.rows + each.row.columns for each in layer)

    def parts(self, tp_rank: int, tp: int, pp_rank: int, stages: Stages) -> tuple[Local, ...]:
        """The part of a rank in each of its stages. ConfigError if a stage would be empty, and as in ``local``."""
        count, pp, most = sum(map(len, stages)), len(stages), self.num_hidden_layers + 1
        if count > most:
            chunks = f" x {count // pp} stages a rank (--pp-schedule)" * (count > pp)
            also = ["pp_schedule"] if chunks else []
            raise SettingError(f"--pp {pp}{chunks}", f"at most {most} stages (layers + 1)", count, also=also)
        return tuple(self.local(tp_rank, tp, stage, stages) for stage in stages[pp_rank])

    def placements(self, *parts: Local) -> dict[str, Sharded]:
        """Name -> where a rank's part of the tensor lies, in the order in which the backward finishes the gradients.

        ``parts`` are the chunks of layers that the rank holds; without any, it holds the whole model.
        Column-parallel matrices are sharded by rows, which are outputs, row-parallel ones by columns (Megatron-LM:
        Shoeybi et al. 2019, arXiv:1909.08053).
        """
        parts = parts or (self.local(),)
        shard = parts[0].shard, parts[0].shards
        first, last = (any(getattr(part, end) for part in parts) for end in ("first", "last"))
        found = self.make_head().placements(*shard) if last else {}
        numbers = sorted((number for part in parts for number in part.layers), reverse=True)
        for sublayer in chain(*map(reversed, self.layers(numbers))):
            found |= sublayer.placements(*shard)
        return found | (self.embed().placements(*shard) if first or (last and self.tie_word_embeddings) else {})

    def parameter_shapes(self, *parts: Local) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order of ``placements``: of the whole, or of a rank's parts."""
        return {name: placement.local for name, placement in self.placements(*parts).items()}

    def fused_groups(self, *parts: Local) -> dict[str, tuple[str, ...]]:
        """Group name -> neighbours in ``parameter_shapes`` that the model reads as one matrix."""
        numbers = [number for part in parts or (self.local(),) for number in part.layers]
        linears = (linear for each in chain(*self.layers(numbers)) for linear in (each.row, each.column))
        groups = chain(*(linear.groups().items() for linear in linears))
        return {name: members for name, members in groups if len(members) > 1}

    def num_parameters(self, *parts: Local) -> int:
        """The number of parameters; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes(*parts).values())

    def flops_per_token(self, seq_len: int) -> FlopsPerToken:
        """6 N + 6 L A T (causal) and 6 N + 12 L A T; N counts what multiplies: no lookup, no norms.

        With adapters it is 4 N of the other weights, of which no gradient is computed.  A layer with a sliding window
        of W < T tokens counts W (2 - W / T) instead of T in the first, W in the second.
        """
        shapes = self.parameter_shapes()
        each = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name not in self.tables}
        trained = sum(size for name, size in each.items() if not self.lora or is_adapter(name))
        matmul = trained + (sum(each.values()) - trained) * 2 / 3
        if self.tie_word_embeddings:
            matmul += math.prod(shapes[self.embedding]) * (2 / 3 if self.lora else 1)
        windows = [self.window(number) or seq_len for number in range(self.num_hidden_layers)]
        width = self.num_attention_heads * self.head_dim
        causal = width * sum(2 * attended_pairs(seq_len, window) / seq_len for window in windows)
        full = width * sum(min(window, seq_len) for window in windows)
        return FlopsPerToken(6.0 * (matmul + causal), 6.0 * (matmul + 2 * full))

    def rope_frequencies(self) -> list[float]:
        """The d / 2 rotary frequencies, in radians a token."""
        d = self.head_dim
        frequencies = [self.rope_theta ** (-2 * i / d) for i in range(d // 2)]
        return self.rope_scaling.scale(frequencies, self.rope_theta) if self.rope_scaling else frequencies
