"""Weights and configurations as Hugging Face transformers writes and reads them.

``config.json`` of a ``LlamaForCausalLM`` or ``GPT2LMHeadModel`` both ways, in the spelling of transformers v4
(``rope_theta``, ``rope_scaling``, ``torch_dtype``) and of v5 (``rope_parameters``, ``dtype``); weights from
``model.safetensors`` or its shards.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kos.errors import CheckpointError
from kos.train.gpt2 import TRANSPOSED, GPT2Config
from kos.train.llama_config import LlamaConfig, RopeScaling, default_head_dim
from kos.train.parameters import Parameters

INDEX = "model.safetensors.index.json"
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_REQUIRED = {
    "llama": ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"),
}
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # ends of the names of what is no weight


def to_huggingface(config: LlamaConfig) -> dict[str, Any]:
    """The ``config.json`` of this model."""
    common = {"bos_token_id": None, "eos_token_id": None, "dtype": "float32", "torch_dtype": "float32"}
    if isinstance(config, GPT2Config):
        return config.to_huggingface() | common
    settings = dataclasses.asdict(config)  # their names are ours
    scaling = settings["rope_scaling"] and {"rope_type": "llama3", **settings["rope_scaling"]}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **settings,
        **_FIXED,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
    } | common


def from_huggingface(settings: Mapping[str, Any], source: str = "config.json") -> LlamaConfig:
    """The model that a ``config.json`` describes; ``source`` names it in errors."""
    kind = settings.get("model_type")
    if kind not in _REQUIRED:
        raise CheckpointError(f"{source}: expected model_type 'llama' or 'gpt2', got {kind!r}")
    for key in _REQUIRED[kind]:
        if not isinstance(settings.get(key), int):
            raise CheckpointError(f"{source}: expected an integer {key}, got {settings.get(key)!r}")
    if kind == "gpt2":
        return GPT2Config.from_huggingface(settings)
    given = {key: value for key, value in settings.items() if value is not None}
    for key, value in _FIXED.items():
        if given.get(key, value) != value:
            raise CheckpointError(f"{source}: expected {key} {value!r}, got {given[key]!r}")
    heads = given["num_attention_heads"]
    values = {"rms_norm_eps": 1e-6, "num_key_value_heads": heads}
    values |= {field.name: given[field.name] for field in dataclasses.fields(LlamaConfig) if field.name in given}
    if "head_dim" not in values:
        values["head_dim"] = default_head_dim(given["hidden_size"], heads)
    rope = given.get("rope_parameters", {})
    values["rope_theta"] = float(rope.get("rope_theta", given.get("rope_theta", 10_000.0)))
    scaling = rope if rope.get("rope_type", "default") != "default" else given.get("rope_scaling")
    return LlamaConfig(**values | {"rope_scaling": _rope_scaling(scaling, source)})


def _rope_scaling(settings: Mapping[str, Any] | None, source: str) -> RopeScaling | None:
    kind = settings.get("rope_type", settings.get("type")) if settings else "default"
    if not settings or kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"{source}: expected rope_type 'llama3' or 'default', got {kind!r}")
    try:
        return RopeScaling(**{field.name: settings[field.name] for field in dataclasses.fields(RopeScaling)})
    except KeyError as error:
        raise CheckpointError(f"{source}: expected {error} of the RoPE scaling, got none") from None


def read_config(directory: Path) -> LlamaConfig:
    """The model described by ``directory/config.json``."""
    path = directory / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a Hugging Face config.json, got {error}") from error
    return from_huggingface(settings, str(path))


def tensors_of(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights as transformers has them."""
    return {
        name: np.ascontiguousarray(array.T) if name.endswith(TRANSPOSED) else array for name, array in weights.items()
    }


def read_weights(directory: Path, weights: Parameters) -> None:
    """Fill ``weights`` (converted to their dtype) from the safetensors of ``directory``, whole or sharded."""
    index = directory / INDEX
    shards = ["model.safetensors"]
    try:
        if index.exists():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{index}: expected an index of safetensors, got {error}") from error
    if elsewhere := next((shard for shard in shards if Path(shard).name != shard), None):
        raise CheckpointError(f"{index}: expected file names, got {elsewhere!r}")
    tensors = read_tensors(directory / shard for shard in shards)
    fill(weights, _named_as_ours(tensors, weights), directory)


def _named_as_ours(tensors: Iterable[tuple[str, np.ndarray]], weights: Parameters) -> Iterator[tuple[str, np.ndarray]]:
    for name, tensor in tensors:
        name = name.removeprefix("_orig_mod.")
        if name.endswith(_BUFFERS) or (name == "lm_head.weight" and name not in weights):
            continue
        if name not in weights and f"transformer.{name}" in weights:
            name = f"transformer.{name}"
        yield name, tensor.T if name.endswith(TRANSPOSED) else tensor


def fill(targets: Mapping[str, np.ndarray], tensors: Iterable[tuple[str, np.ndarray]], source: Path) -> None:
    """Copy each tensor into the target of its name.  CheckpointError unless names and shapes are the same."""
    missing = dict.fromkeys(targets)
    for name, tensor in tensors:
        if name not in targets:
            raise CheckpointError(f"{source}: expected the tensors of this model, got an unknown {name!r}")
        if tensor.shape != targets[name].shape:
            raise CheckpointError(f"{source}: {name}: expected shape {targets[name].shape}, got {tensor.shape}")
        targets[name][...] = tensor
        missing.pop(name, None)
    if missing:
        raise CheckpointError(f"{source}: expected {len(targets)} tensors, got none named {next(iter(missing))!r}")


def read_tensors(paths: Iterable[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """The named tensors of safetensors files, one at a time."""
    from safetensors import SafetensorError, safe_open

    for path in paths:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (a safe_open is no mapping)
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: expected readable safetensors, got {error}") from error
