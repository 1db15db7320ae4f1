"""The peer of ``benchmarks.train``: the same LLaMA in PyTorch, written to be fast there, and its training step.

q, k, v and gate, up are one matrix product each; attention, RMSNorm and AdamW are torch's fused kernels.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset
from kos.train.model.initial import InitialWeights, init_weights
from kos.train.model.llama import LlamaConfig, Local
from kos.train.ops.parameters import Parameters
from kos.train.parallel.data import shard_batch

RECIPES = {"tensorwise", "rowwise"}  # of torchao.float8


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        D, F_, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.input_norm, self.mlp_norm = nn.RMSNorm(D, eps), nn.RMSNorm(D, eps)
        self.qkv = nn.Linear(D, (self.heads + 2 * self.kv_heads) * self.d, bias=False)
        self.o = nn.Linear(self.heads * self.d, D, bias=False)
        self.gate_up = nn.Linear(D, 2 * F_, bias=False)
        self.down = nn.Linear(F_, D, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        H, K, d = self.heads, self.kv_heads, self.d
        qkv = self.qkv(self.input_norm(x))
        B, T, _ = qkv.shape
        qkv = qkv.view(B, T, H + 2 * K, d).transpose(1, 2)
        qk, v = qkv[:, : H + K], qkv[:, H + K :]
        a, b = qk.chunk(2, -1)
        qk = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(v)
        y = F.scaled_dot_product_attention(qk[:, :H], qk[:, H:], v, is_causal=True, enable_gqa=H != K)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, H * d))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class TorchLlama(nn.Module):
    """``forward(tokens, targets) -> loss``."""

    checkpoint = False  # recompute each block in the backward

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def names(self) -> dict[str, nn.Parameter]:
        """The parameters by kos' names, q, k, v and gate, up as one."""
        config = self.config
        found = {config.embedding: self.embedding.weight, config.final_norm: self.norm.weight}
        found |= {config.head: self.head.weight}
        for layer, block in enumerate(self.blocks):
            parts = (block.input_norm, block.qkv, block.o, block.mlp_norm, block.gate_up, block.down)
            ours = (part for each in config.layers([layer])[0] for part in (each.norm, each.column, each.row))
            found |= {our.name: m.weight for our, m in zip(ours, parts, strict=True)}
        return found

    def make_tables(self, seq_len: int, device: torch.device) -> None:
        """cos and sin of RoPE, in float32."""
        angles = torch.outer(torch.arange(seq_len), torch.tensor(self.config.rope_frequencies())).to(device)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpoint:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        return self.loss(x, targets)

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def draw_weights(
    shape: LlamaConfig, seed: int, names: Iterable[str], *part: Local
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each of ``names`` with its initial weights: the whole tensor, or the part of it that ``part`` holds."""
    placements, names = shape.placements(*part), list(names)
    drawn = InitialWeights(shape, seed, names, torch.get_num_threads())
    for name in names:
        yield name, torch.from_numpy(drawn.read(name, placements[name].rows(0, placements[name].local[0])))
    drawn.close()


def make_optimizer(config: TrainConfig, parameters: list[torch.Tensor]) -> torch.optim.AdamW:
    """Fused AdamW, without weight decay for norms."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def in_8_bits(model: TorchLlama, recipe: str) -> None:
    """Replace the linear layers of the blocks by torchao's, whose products are in 8 bits; their weights stay."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model.blocks, config=config)


class TorchTraining:
    """Training as ``config`` says, from the weights that kos begins with, on this rank's share of the batches.

    Words of ``variant``: ``flash`` or ``cudnn`` attention; ``autocast`` of fp32 weights, ``master`` (bf16 weights
    with an fp32 copy) or ``fsdp`` (FSDP2, bf16 with sharded fp32 weights); ``graphs`` (compiled with CUDA graphs)
    or ``eager``, else compiled; ``whole``: no micro-batches; ``checkpoint``: the backward recomputes each block;
    ``tensorwise`` or ``rowwise``: the blocks' products in 8 bits, by this recipe of torchao.
    """

    axis = "dp"  # the axis of the layout along which the ranks lie

    def __init__(self, config: TrainConfig, model: LlamaConfig, data: Dataset, variant: str) -> None:
        self.config, self.data, self.schedule = config, data, config.learning_rate()
        words = set(variant.split("-"))
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.cuda = config.device == "cuda"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.cuda else torch.device("cpu")
        self.layout = f"{self.axis}{self.size}"
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.backends.cuda.enable_flash_sdp("flash" in words)
            torch.backends.cuda.enable_cudnn_sdp("cudnn" in words)
            torch.backends.cuda.enable_mem_efficient_sdp(config.dtype == "float32")
            torch.backends.cuda.enable_math_sdp(False)
        else:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if self.size > 1:
            torch.distributed.init_process_group("nccl" if self.cuda else "gloo")
        self.replica = (self.rank, self.size) if self.axis == "dp" else (0, 1)  # the part, and of how many
        self.model, self.masters = self._make_model(model, words), []
        self.model.checkpoint = "checkpoint" in words
        for recipe in RECIPES & words:
            in_8_bits(self.model, recipe)
        trained = list(self.model.parameters())
        if "master" in words or self.axis == "tp":
            self.masters = [self._local(p.detach(), p).float().requires_grad_() for p in trained]
            for master in self.masters:
                master.grad = torch.zeros_like(master)
            trained = self.masters
        if "master" in words:
            self.model.to(torch.bfloat16)
        self.autocast: Callable[[], Any] = nullcontext
        if "autocast" in words:
            self.autocast = lambda: torch.autocast(self.device.type, torch.bfloat16)
        self.run_model: Any = self.model
        self.parallel: Any = None
        self._prepare(words)
        assert config.micro_batch_size is not None
        self.micro_batches = shard_batch(config.batch_size, config.micro_batch_size, *self.replica)
        if "whole" in words:
            self.micro_batches = [[row for rows in self.micro_batches for row in rows]]
        self.optimizer = make_optimizer(config, trained)
        self.trained = trained

    def _prepare(self, words: set[str]) -> None:
        """Compile the model, and wrap it so that gradients are averaged over the ranks."""
        self.model.make_tables(self.config.seq_len, self.device)
        if self.size > 1 and "fsdp" not in words:
            self.run_model = self.parallel = nn.parallel.DistributedDataParallel(
                self.model, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        if not {"eager", "fsdp"} & words:
            self.run_model = torch.compile(self.run_model, mode="reduce-overhead" if "graphs" in words else None)

    def _local(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``tensor``: the value or the gradient of ``parameter``."""
        return tensor

    def _around(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        """The context in which the forward and backward of a micro-batch run."""
        return nullcontext()

    def _clip(self) -> None:
        nn.utils.clip_grad_norm_(self.trained, self.config.grad_clip, foreach=True)

    def _make_model(self, shape: LlamaConfig, words: set[str]) -> TorchLlama:
        """With rank 0's weights, where the device computes."""
        weights: Parameters | None = None
        if self.rank == 0:
            weights = Parameters(shape.parameter_shapes(), groups=shape.fused_groups())
            init_weights(shape, weights, self.config.seed)
        sharded = "fsdp" in words
        with torch.device("meta" if sharded else self.device):
            model = TorchLlama(shape)
        if sharded:
            self._shard(model)
        for name, parameter in model.names().items():
            here = torch.from_numpy(weights[name]) if weights is not None else torch.empty(parameter.shape)
            if not sharded:
                parameter.data.copy_(here)
                if self.size > 1:
                    torch.distributed.broadcast(parameter.data, 0)
                continue
            from torch.distributed.tensor import distribute_tensor

            parts = distribute_tensor(here.to(self.device), parameter.device_mesh, parameter.placements)
            parameter.to_local().data.copy_(parts.to_local())
        return model

    def _shard(self, model: TorchLlama) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.layout = f"fsdp{self.size}"
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            block.compile()
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model.to_empty(device=self.device)

    def _batch(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        micro_batches = [self.data.rows(step, rows) for rows in self.micro_batches]
        return [tuple(torch.from_numpy(a).long().to(self.device) for a in parts[:2]) for parts in micro_batches]  # type: ignore[misc]

    def _step(self, step: int, batch: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(step)
        total = torch.zeros((), device=self.device)
        for index, (tokens, targets) in enumerate(batch):
            if self.parallel is not None:
                self.parallel.require_backward_grad_sync = index + 1 == len(batch)
            with self._around(tokens, targets):
                with self.autocast():
                    loss = self.run_model(tokens, targets) / len(batch)
                loss.backward()
            total += loss.detach()
        parameters = list(self.model.parameters())
        if self.masters:
            torch._foreach_copy_([m.grad for m in self.masters], [self._local(p.grad, p) for p in parameters])  # type: ignore[arg-type]
        if self.config.grad_clip:
            self._clip()
        self.optimizer.step()
        if self.masters:
            with torch.no_grad():
                torch._foreach_copy_([self._local(p, p) for p in parameters], self.masters)
        self.model.zero_grad(set_to_none=True)
        return total

    def run(self, first: int, count: int) -> tuple[list[float], list[float]]:
        """The seconds and losses of ``count`` steps, whose batches are on the device before the first begins."""
        batches = [self._batch(step) for step in range(first, first + count)]
        losses, marks = [], []

        def mark() -> None:
            if self.cuda:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
            else:
                marks.append(time.perf_counter())

        if self.size > 1:
            torch.distributed.barrier()
        mark()
        for step, batch in enumerate(batches, first):
            losses.append(self._step(step, batch))
            mark()
        mean = torch.stack(losses) / self.size
        if self.size > 1:
            torch.distributed.all_reduce(mean)
        values = mean.tolist()  # waits for the device
        return [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairwise(marks)], values

    def peak_memory(self) -> int | None:
        """Bytes that torch's allocator has handed out at once."""
        return torch.cuda.max_memory_allocated() if self.cuda else None
