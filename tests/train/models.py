"""The small LLaMA that tests have in common."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from kos.train.checkpoint.huggingface import as_saved, weight_files
from kos.train.model.huggingface import to_huggingface
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import InFlight, Model
from kos.train.model.shape import RopeScaling
from kos.train.ops import Batch
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import Parameters
from kos.train.parallel.gradients import Gradients

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_scaling": SCALING, "rope_theta": 100.0, "tie_word_embeddings": True},
}


def read_weights(folder: Path, weights: Parameters) -> None:
    """Fill ``weights`` from the safetensors of ``folder``."""
    files = weight_files(folder, weights.shapes)
    for name, target in weights.items():
        target[...] = files.read(name)


class InMemory:
    """The tensors of a whole model, as a device reads them from files."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self._tensors = tensors

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        return self._tensors[name][index]


def sizes(*values: int) -> dict[str, int]:
    """The first sizes of a model, by name."""
    return dict(zip([name for name in LlamaConfig.model_fields if name != "model_type"], values, strict=False))


def small(**changes: Any) -> LlamaConfig:
    """Three layers of grouped-query attention, 24 wide, of odd sizes where they may be odd."""
    shape: dict[str, Any] = {
        "vocab_size": 37,
        "hidden_size": 24,
        "intermediate_size": 29,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 512,
    }
    return LlamaConfig(**shape | changes)


def make(variant: str, dtype: Any, seed: int = 0, **changes: Any) -> tuple[LlamaConfig, Model, Parameters, Parameters]:
    """The model, random weights (norms too), and gradients that start as NaN."""
    config = small(**VARIANTS[variant] | changes)
    weights = Parameters(config.parameter_shapes(), dtype, config.fused_groups())
    rng = np.random.default_rng(seed)
    weights.flat[:] = rng.normal(0, 0.2, weights.flat.size)
    for name, shape in weights.shapes.items():
        if len(shape) == 1:
            weights[name][:] += 1
    gradients = weights.like()
    gradients.flat[:] = np.nan
    return config, Model(config, numpy_ops), weights, gradients


def make_batch(
    config: LlamaConfig, samples: int, length: int, seed: int, ignored: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, config.vocab_size, (2, samples, length), dtype=np.int32)
    targets[rng.random(targets.shape) < ignored] = -1
    return tokens, targets


def queue_loss_and_gradients(
    model: Model, weights: Any, tokens: Any, targets: Any, gradients: Any, loss: Any, *, accumulate: bool,
    on_gradient: Callable[[str], object] = lambda name: None, count: Any = None,
) -> None:  # fmt: skip
    """Forward and backward of a whole model, as a step queues them."""
    batch = tokens if isinstance(tokens, Batch) else Batch(tokens, targets)
    out_nD = model.forward(weights, slot := InFlight(model.arena), batch)
    dx_nD = model.arena.take(out_nD.shape, out_nD.dtype)
    into = Gradients(gradients, accumulate, on_gradient)
    model.backward(weights, slot, into, dx_nD, loss=loss, count=count)


def loss_and_gradients(model: Model, weights: Any, tokens: Any, targets: Any, gradients: Any, **options: Any) -> float:
    """The mean loss; its gradients are written to ``gradients``, or added. Options as above."""
    with model.ops.step(model.arena):
        loss = model.arena.take((1,), np.dtype(np.float64))
        queue_loss_and_gradients(model, weights, tokens, targets, gradients, loss, **options)
        return float(model.ops.to_host(loss)[0])


def tensors_of(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights as transformers has them."""
    return {name: np.ascontiguousarray(as_saved(name, array)) for name, array in weights.items()}


def save_model(folder: Path, config: LlamaConfig, weights: Mapping[str, np.ndarray]) -> None:
    """A folder of Hugging Face with these weights, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors_of(weights), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_huggingface(config)))


def random_weights(
    config: LlamaConfig, rng: np.random.Generator, dtype: Any = np.float32, spread: float = 0.15
) -> Parameters:  # fmt: skip
    """Weights of norms around 1, everything else around 0; numbers that float32 holds.

    Small ones: at 0.3 each layer enlarges rounding, and float32 is off by up to 2e-6, transformers' as much as ours.
    """
    weights = Parameters(config.parameter_shapes(), dtype, config.fused_groups())
    weights.flat[:] = rng.normal(0, spread, weights.flat.size).astype(np.float32)
    for name, array in weights.items():
        if array.ndim == 1 and name.endswith(".weight"):
            array += 1
    return weights


def queue(optimizer: Any, gradients: Any, average: float = 1.0, add_up: Any = None) -> None:
    """One update of a ``Optimizer``."""
    optimizer.norm(gradients, add_up)
    optimizer.update(gradients, 1 / average)


def part_of(name: str, value: np.ndarray, config: LlamaConfig, tp: int, rank: int) -> np.ndarray:
    """What a rank of ``tp`` holds of a tensor."""
    if (adapter := name.rpartition(".lora_"))[1]:  # split as its matrix, or whole
        matrix = f"{adapter[0]}.weight"
        splits = adapter[2].startswith("A") == matrix.endswith(config.residual)
        return part_of(matrix, value, config, tp, rank) if splits else value
    if name.endswith(tuple(f".{each}_proj.{kind}" for each in "kv" for kind in ("weight", "bias"))):
        parts = min(tp, config.num_key_value_heads)  # fewer heads than ranks: neighbours hold the same one
        return np.split(value, parts)[rank * parts // tp]
    if value.ndim == 1:
        split = name.endswith(tuple(f".{each}_proj.bias" for each in ("q", "gate", "up")))
        return np.split(value, tp)[rank] if split else value
    if name.endswith(config.residual):
        return np.split(value, tp, axis=1)[rank]
    return np.split(value, tp)[rank]
