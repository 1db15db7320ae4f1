"""``benchmarks.train --compare picotron``: training by a clone of Hugging Face's picotron, from kos' initial weights.

Its model, wrappers and steps run unchanged. This file replaces its data, its metrics, and flash-attn if that is not
installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F

from benchmarks.torch_llama import TorchTraining, draw_weights
from kos.errors import ConfigError
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset
from kos.train.device.choose import layout_of
from kos.train.model.llama import LlamaConfig


@torch.compile(disable=not torch.cuda.is_available())
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    (a, b), cos, sin = x.chunk(2, -1), cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


FLASH_ATTN: dict[str, dict[str, Any]] = {  # flash-attn's functions that picotron calls, over PyTorch's kernels
    "flash_attn_interface": {"flash_attn_func": lambda q, k, v, causal: F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal).transpose(1, 2)},
    "layers.rotary": {"apply_rotary_emb": rotate},
    "ops.triton.layer_norm": {"layer_norm_fn": lambda x, w, bias, eps, **_: F.rms_norm(x, w.shape, w, eps)},
}  # fmt: skip


class PicotronTraining(TorchTraining):
    """Training of picotron's weights in ``config.dtype``, without an fp32 copy. ConfigError for a tied head, clipping.

    With ``fused`` in ``variant`` picotron takes its path with flash-attn. Without flash-attn, both paths use PyTorch's
    flash attention.
    """

    def __init__(self, config: TrainConfig, shape: LlamaConfig, data: Dataset, variant: str, path: str) -> None:
        if shape.tie_word_embeddings or config.grad_clip:
            raise ConfigError("--compare picotron: expected --no-tie-word-embeddings --grad-clip 0")
        self.split, self.dtype = layout_of(config, int(os.environ["WORLD_SIZE"])), getattr(torch, config.dtype)
        if config.device == "cpu":
            torch.cuda.synchronize = lambda *_: None  # picotron calls it on CPUs too
        os.environ |= {"DEVICE": config.device, "DTYPE": config.dtype}
        os.environ |= {"FLASH_ATTEN": str(int("fused" in variant)), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        sys.path.insert(0, path)
        sys.modules |= {name: MagicMock() for name in ("wandb", "transformers", "picotron.data")}
        if importlib.util.find_spec("flash_attn") is None:
            sys.modules |= {f"flash_attn.{name}": SimpleNamespace(**held) for name, held in FLASH_ATTN.items()}  # type: ignore[misc]
        self.script: Any = importlib.import_module("train")  # picotron's
        del sys.modules["transformers"]  # torch.compile inspects this module, here a mock
        super().__init__(config, shape, data, variant)
        self.layout = " ".join(f"{axis}{n}" for axis in ("dp", "tp", "pp") if (n := getattr(self.split, axis)) > 1)

    def _make_model(self, shape: LlamaConfig, words: set[str]) -> Any:
        length, split, script = self.config.seq_len, self.split, self.script
        if self.size == 1:  # for which TorchTraining creates no group
            torch.distributed.init_process_group("nccl" if self.cuda else "gloo")
        script.setup_process_group_manager(split.tp, split.cp, split.pp, split.dp)
        mesh = script.pgm.process_group_manager
        self.replica, self.shapes = (mesh.dp_rank, split.dp), (self.config.micro_batch_size, length, shape.hidden_size)
        config = SimpleNamespace(**vars(shape) | {"max_position_embeddings": length})
        with script.init_model_with_dematerialized_weights():
            model = script.Llama(config)
            model = script.apply_tensor_parallel(model) if split.tp > 1 else model
            model = script.PipelineParallel(model, config) if split.pp > 1 else model
        model.to(self.dtype).to_empty(device=self.device)
        name_of: Any = sys.modules["picotron.checkpoint"].InitializationManager.convert_safetensors_to_hf_name
        parameters, local = dict(model.named_parameters()), shape.local(mesh.tp_rank, split.tp)
        held = {name: theirs for name in shape.placements(local) if (theirs := name_of(None, name)) in parameters}
        for name, part in draw_weights(shape, self.config.seed, held, local):
            parameters[held[name]].data.copy_(part)
        angles = torch.outer(torch.arange(length), torch.tensor(shape.rope_frequencies())).repeat(1, 2).to(self.device)
        for layer in (module for module in model.modules() if hasattr(module, "attention")):
            layer.cos, layer.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return script.DataParallelBucket(model) if split.dp > 1 else model

    def _prepare(self, words: set[str]) -> None:
        """Nothing: picotron's model is ready."""

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next micro-batch, in the form of picotron's data loader."""
        tokens, targets = next(self.batches)
        return {"input_ids": tokens, "target_ids": targets, "position_ids": tokens}  # its model reads no positions

    def _step(self, step: int, batch: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(step)
        self.batches, self.grad_acc_steps = iter(batch), len(batch)
        self.optimizer.zero_grad()
        if self.split.pp > 1:
            loss = self.script.train_step_pipeline_1f1b(self.model, self, self.shapes, self.device, self.dtype)
        else:
            loss = self.script.train_step(self.model, self, self.device)
        loss = self.script.average_loss_across_dp_cp_ranks(loss, self.device)
        self.optimizer.step()
        if self.split.dp > 1:
            self.model.reset()
        return torch.tensor(loss * self.split.pp, device=self.device)  # 0 except on the last stage
