"""PyTorch's own tensor and context parallelism for ``benchmarks.torch_llama``, for kos's ``--tp`` and ``--cp``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.torch_llama import TorchLlama, TorchTraining, draw_weights
from kos.errors import ConfigError
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset
from kos.train.device.choose import layout_of
from kos.train.model.llama import LlamaConfig
from kos.train.ops.parameters import Parameters
from kos.train.parallel.mesh import AXES


def make_training(config: TrainConfig, model: LlamaConfig, data: Dataset, variant: str) -> TorchTraining:
    """The training by PyTorch in the layout of ``config``. ConfigError for pipelines and for more than one axis."""
    layout = layout_of(config, int(os.environ["WORLD_SIZE"]))
    axes = [axis for axis in AXES if getattr(layout, axis) > 1]
    if len(axes) > 1 or "pp" in axes:
        raise ConfigError(f"--compare torch: expected one axis of dp, tp and cp, got {' '.join(axes)}")
    kind = {"tp": TensorParallel, "cp": ContextParallel}.get("".join(axes), TorchTraining)
    return kind(config, model, data, variant)


def compile_parts(model: TorchLlama) -> None:
    """Compile each block and the loss. The blocks share one compilation."""
    torch._dynamo.config.recompile_limit = 2 * len(model.blocks) + 8  # beyond it, blocks would silently run eager
    for block in model.blocks:
        block.compile()
    model.loss = torch.compile(model.loss)  # type: ignore[method-assign]


class TensorParallel(TorchTraining):
    """``parallelize_module`` with sequence parallelism and loss parallelism; each block and the loss are compiled.

    With ``async`` in ``variant``, collectives overlap matrix products (``_micro_pipeline_tp``, symmetric memory). The
    optimizer and the norm of the gradients use plain tensors, which take less CPU time than DTensors.
    """

    axis = "tp"

    def _make_model(self, shape: LlamaConfig, words: set[str]) -> TorchLlama:
        with torch.device("meta"):
            model = TorchLlama(shape)
        self.mesh = mesh = init_device_mesh(self.device.type, (self.size,))
        for block in model.blocks:
            block.heads, block.kv_heads = block.heads // self.size, block.kv_heads // self.size
            plan: dict[str, Any] = {"input_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
            plan |= dict.fromkeys(("qkv", "gate_up"), ColwiseParallel(input_layouts=Shard(1)))
            plan |= dict.fromkeys(("o", "down"), RowwiseParallel(output_layouts=Shard(1)))
            parallelize_module(block, mesh, plan)
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, mesh, ends)
        model.embedding.register_forward_hook(lambda *call: call[-1].clone())  # waits; compiled blocks do not
        if shape.tie_word_embeddings:
            model.head.weight = model.embedding.weight
        model.to_empty(device=self.device)
        local = shape.local(self.rank, self.size)  # rows of q, k and v, or gate and up, of a rank are neighbours
        weights = Parameters(shape.parameter_shapes(local), groups=shape.fused_groups(local))
        for name, part in draw_weights(shape, self.config.seed, weights, local):
            weights[name][...] = part.numpy()
        for name, parameter in model.names().items():
            self._local(parameter.data, parameter).copy_(torch.from_numpy(weights[name]))
        return model

    def _prepare(self, words: set[str]) -> None:
        self.model.make_tables(self.config.seq_len, self.device)
        if "async" in words:
            from torch._inductor import config
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            config._micro_pipeline_tp = True
            enable_symm_mem_for_group(self.mesh.get_group().group_name)
        if "eager" not in words:
            compile_parts(self.model)
        self.run_model = lambda tokens, targets: self.model(tokens, targets).to_local()

    def _local(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, DTensor) and isinstance(parameter, DTensor)
        return tensor.redistribute(placements=parameter.placements).to_local()  # sums partial gradients

    def _around(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        return loss_parallel()

    def _clip(self) -> None:
        grads = [p.grad for p in self.trained]
        squares = torch.stack(torch._foreach_norm(grads)).square()  # type: ignore[arg-type]
        sharded = torch.tensor([p.dim() > 1 for p in self.trained])
        total = squares[sharded].sum()
        dist.all_reduce(total)
        norm = (total + squares[~sharded].sum()).sqrt()
        torch._foreach_mul_(grads, (self.config.grad_clip / (norm + 1e-6)).clamp(max=1.0))  # type: ignore[arg-type]


class ContextParallel(TorchTraining):
    """``context_parallel``: each rank has all weights and a part of each sequence, balanced for the causal mask.

    Keys and values are gathered. With ``alltoall`` in ``variant`` they pass from rank to rank. DDP or FSDP2 averages
    the gradients.
    """

    axis = "cp"

    def _prepare(self, words: set[str]) -> None:
        torch._dynamo.config.optimize_ddp = False  # each block is compiled alone: do not split it by DDP's buckets
        if not {"eager", "fsdp"} & words:
            compile_parts(self.model)
        super()._prepare(words | {"eager"})
        self.layout = f"{self.axis}{self.size}"
        self.mesh = init_device_mesh(self.device.type, (self.size,))
        set_rotate_method("alltoall" if "alltoall" in words else "allgather")

    def _around(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        buffers = [tokens, targets, self.model.cos, self.model.sin]
        return context_parallel(
            self.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0, 0], no_restore_buffers={tokens, targets}
        )
