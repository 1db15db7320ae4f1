"""The model of a rank's stage: in the order of sums that is the same in every layout, or the fastest."""

from __future__ import annotations

from typing import Any

from kos.train.config.options import TrainConfig
from kos.train.model.fixed import FixedLlama
from kos.train.model.gpt2 import GPT2Config, make_model
from kos.train.model.llama import Llama
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.shapes import Local
from kos.train.parallel.context import ContextParallel
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.tensor import TensorParallel


def fixes_order(config: TrainConfig, model: LlamaConfig) -> bool:
    """Whether the sums within a layer have a fixed order: on CPUs. Elsewhere, and in a GPT-2, only dp has ranks."""
    return config.deterministic and config.device == "cpu" and not isinstance(model, GPT2Config)


def make_stage(config: TrainConfig, model: LlamaConfig, ops: Any, local: Local, mesh: Mesh, **options: Any) -> Llama:
    """The model of ``local``; ``options`` are those of ``Llama``."""
    if fixes_order(config, model):
        return FixedLlama(model, ops, seq_len=config.seq_len, local=local, tp=mesh.tp, cp=mesh.cp, **options)
    tensor, context = TensorParallel(ops, mesh.tp, local.vocabulary.start), ContextParallel(ops, mesh.cp)
    return make_model(model, ops, local=local, tensor=tensor, context=context, **options)
