"""The model of a rank's stage: in the order of sums that is the same in every layout, or the fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kos.comm.compression import BLOCK
from kos.errors import SettingError
from kos.memory.arena import Arena
from kos.train.config.options import TrainConfig
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import Model
from kos.train.model.shapes import Local
from kos.train.ops import fixed_order
from kos.train.ops.fixed_order import LEAST_CHUNK, FixedOrder, Split
from kos.train.ops.fp8 import Fp8Ops, check_sizes, linears
from kos.train.ops.linear import LinearOps
from kos.train.parallel.context import ContextParallel
from kos.train.parallel.fixed_context import FixedContext
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.parallel.tensor import FixedTensorParallel, TensorParallel


def split_of(config: TrainConfig, model: LlamaConfig, mesh: Mesh) -> Split | None:
    """How the sums within a layer are split, in every layout.  None: not split, as in a family with dp alone.

    On GPUs only long sequences are split, and features are not.  ConfigError if a rank would not hold whole subtrees.
    """
    if not config.deterministic or model.axes == ("dp",):
        return None
    tp, cp, sizes = mesh.tp.size, mesh.cp.size, (model.num_attention_heads, model.num_key_value_heads)
    if config.device == "cpu" and config.dtype != "fp8":
        split = Split.of((*sizes, model.intermediate_size, model.vocab_size), config.seq_len)
        split.check(tp, cp, config.seq_len)
        return split
    where, least = ("on GPUs", fixed_order.LEAST_CHUNK_ON_GPUS) if config.device != "cpu" else ("in fp8", LEAST_CHUNK)
    if tp > 1:
        why = "where sums over features are not split"
        raise SettingError("--deterministic", f"--tp 1 {where}, {why}", tp, also=["tp"])
    split = Split.of((1,), config.seq_len, least)
    split.check(1, cp, config.seq_len, least)
    return split if split.tokens > 1 else None


def check_blocks(config: TrainConfig, model: LlamaConfig, layout: Layout) -> None:
    """ConfigError if ``--compress`` would give the ranks of tp, or both ends of a pipeline, different gradients.

    Codes depend on the other elements of a block.  So where one tensor is held beside different ones, no block may have
    two tensors.
    """
    tied = model.tie_word_embeddings and layout.pp > 1
    if config.compress == "none" or layout.dp * layout.cp == 1 or not (tied or layout.tp > 1):
        return
    for name, shape in model.parameter_shapes(model.local(0, layout.tp)).items():
        if (size := math.prod(shape)) % BLOCK:
            axis, where = ("tp", "--tp") if layout.tp > 1 else ("pp", "--pp and a tied embedding")
            expected = f"tensors of a multiple of {BLOCK} elements with {where}"
            raise SettingError("--compress", expected, f"{name} of {size}", also=[axis])


def check_fp8(config: TrainConfig, model: LlamaConfig, mesh: Mesh, parts: Sequence[Local]) -> None:
    """ConfigError if cuBLASLt has no product in 8 bits of a size that passes through ``parts`` have."""
    if config.dtype != "fp8" or config.device == "cpu":
        return
    split = split_of(config, model, mesh)
    pieces = (2 * mesh.tp.size if mesh.tp.size > 1 else 1) * (split.tokens if split else mesh.cp.size)
    tokens = {f"--seq-len {config.seq_len} / {pieces}": config.seq_len // pieces}
    check_sizes([layer for part in parts for layer in model.layers(part.layers)], mesh.tp.size, tokens)


def make_stage(
    config: TrainConfig, model: LlamaConfig, ops: Any, local: Local, mesh: Mesh, arena: Arena | None = None,
    **options: Any,
) -> Model:  # fmt: skip
    """The model of ``local``; ``options`` are those of ``Model``, ``arena`` its scratch memory."""
    copies, first = mesh.copies(max(1, mesh.tp.size // model.num_key_value_heads)), local.vocabulary.start
    arena, base = arena or ops.make_arena(), LinearOps(ops)
    tensor, context = TensorParallel(base, mesh.tp, first, copies), ContextParallel(base, mesh.cp)
    in_8 = Fp8Ops(base, arena, mesh.tp.size == 1) if config.dtype == "fp8" else None
    wrapped: Any = in_8 or base
    if (split := split_of(config, model, mesh)) is not None:
        matrices = {model.head: (0, [slice(0, len(local.vocabulary))])}
        for linear in linears(model.layers(local.layers)):
            matrices |= linear.splits(mesh.tp.size)
        wrapped = FixedOrder(wrapped, arena, split, mesh.tp, mesh.cp, matrices)
        tensor = FixedTensorParallel(base, mesh.tp, first, copies, arena)
        context = FixedContext(base, mesh.cp, split)
    stage = Model(model, wrapped, local=local, tensor=tensor, context=context, arena=arena, **options)
    stage.fp8 = in_8
    return stage
