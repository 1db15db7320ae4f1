"""The peer of ``benchmarks.train --compare picotron``: a clone of Hugging Face's picotron, from kos' initial weights.

Its model, wrappers and steps run as they are. Replaced are its data, its metrics, and flash-attn if not installed.
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

from benchmarks.torch_llama import TorchTraining
from kos.errors import ConfigError
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset
from kos.train.engine.choose import layout_of
from kos.train.model.initial import InitialWeights
from kos.train.model.llama_config import LlamaConfig


@torch.compile(disable=not torch.cuda.is_available())
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    (a, b), cos, sin = x.chunk(2, -1), cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)


FLASH_ATTN = {  # what picotron calls of flash-attn, by PyTorch's kernels
    "flash_attn_interface": {"flash_attn_func": attend},
    "layers.rotary": {"apply_rotary_emb": rotate},
    "ops.triton.layer_norm": {"layer_norm_fn": lambda x, w, bias, eps, **_: F.rms_norm(x, w.shape, w, eps)},
}


class PicotronTraining(TorchTraining):
    """Training with picotron's bf16 weights, of which it has no fp32 copy. ConfigError for a tied head and for clipping.

    Word ``fused``: picotron's path with flash-attn, else that without. Both attend by PyTorch's flash kernel.
    """

    def __init__(self, config: TrainConfig, shape: LlamaConfig, data: Dataset, variant: str, path: str) -> None:
        if shape.tie_word_embeddings or config.grad_clip:
            raise ConfigError("--compare picotron: expected --no-tie-word-embeddings --grad-clip 0")
        self.split, self.dtype = layout_of(config, int(os.environ["WORLD_SIZE"])), torch.bfloat16
        if config.device == "cpu":
            self.dtype, torch.cuda.synchronize = torch.float32, lambda *_: None  # its pipeline calls it on CPUs too
        os.environ |= {"DEVICE": config.device, "DTYPE": str(self.dtype).removeprefix("torch.")}
        os.environ |= {"FLASH_ATTEN": str(int("fused" in variant)), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        sys.path.insert(0, path)
        sys.modules |= {name: MagicMock() for name in ("wandb", "transformers", "picotron.data")}
        if importlib.util.find_spec("flash_attn") is None:
            sys.modules |= {f"flash_attn.{name}": SimpleNamespace(**held) for name, held in FLASH_ATTN.items()}  # type: ignore[misc]
        self.script: Any = importlib.import_module("train")  # picotron's
        super().__init__(config, shape, data, variant)
        self.layout = " ".join(f"{axis}{n}" for axis in ("dp", "tp", "pp") if (n := getattr(self.split, axis)) > 1)

    def _make_model(self, shape: LlamaConfig, words: set[str]) -> Any:
        self.width, length, split, script = shape.hidden_size, self.config.seq_len, self.split, self.script
        script.setup_process_group_manager(split.tp, split.cp, split.pp, split.dp)
        self.mesh = script.pgm.process_group_manager
        config = SimpleNamespace(**vars(shape) | {"max_position_embeddings": length})
        with script.init_model_with_dematerialized_weights():
            model = script.Llama(config)
            model = script.apply_tensor_parallel(model) if split.tp > 1 else model
            model = script.PipelineParallel(model, config) if split.pp > 1 else model
        model.to(self.dtype).to_empty(device=self.device)
        placements, parameters = (
            shape.placements(shape.local(self.mesh.tp_rank, split.tp)),
            dict(model.named_parameters()),
        )
        name_of: Any = sys.modules["picotron.checkpoint"].InitializationManager.convert_safetensors_to_hf_name
        held = {name: theirs for name in placements if (theirs := name_of(None, name)) in parameters}
        drawn = InitialWeights(shape, self.config.seed, held, torch.get_num_threads())
        for name, theirs in held.items():
            part = drawn.read(name, placements[name].rows(0, placements[name].local[0]))
            parameters[theirs].data.copy_(torch.from_numpy(part))
        drawn.close()
        angles = torch.outer(torch.arange(length), torch.tensor(shape.rope_frequencies())).repeat(1, 2)
        tables = [table.to(self.device, self.dtype) for table in (angles.cos(), angles.sin())]
        for module in model.modules():
            if hasattr(module, "attention"):
                module.cos, module.sin = tables
        return script.DataParallelBucket(model) if split.dp > 1 else model

    def _prepare(self, words: set[str]) -> None:
        """Nothing: picotron's model is ready."""

    def _replica(self) -> tuple[int, int]:
        return self.mesh.dp_rank, self.split.dp

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next micro-batch, as picotron's steps take it from their loader."""
        tokens, targets = next(self.batches)
        return {"input_ids": tokens, "target_ids": targets, "position_ids": tokens}  # no positions: nothing reads them

    def _step(self, step: int, batch: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(step)
        self.batches, self.grad_acc_steps = iter(batch), len(batch)
        self.optimizer.zero_grad()
        if self.split.pp > 1:
            shapes = (*batch[0][0].shape, self.width)
            loss = self.script.train_step_pipeline_1f1b(self.model, self, shapes, self.device, self.dtype)
        else:
            loss = self.script.train_step(self.model, self, self.device)
        loss = self.script.average_loss_across_dp_cp_ranks(loss, self.device)
        self.optimizer.step()
        if self.split.dp > 1:
            self.model.reset()
        return torch.tensor(loss * self.split.pp, device=self.device)  # 0 but on the last stage
