"""Weights and configurations as Hugging Face transformers writes and reads them.

``config.json`` of a ``LlamaForCausalLM`` or ``GPT2LMHeadModel`` both ways, in the spelling of transformers v4
(``rope_theta``, ``rope_scaling``, ``torch_dtype``) and of v5 (``rope_parameters``, ``dtype``); weights from
``model.safetensors`` or its shards.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kos.errors import CheckpointError
from kos.train.gpt2 import TRANSPOSED, GPT2Config
from kos.train.llama_config import LlamaConfig, RopeScaling, default_head_dim
from kos.train.parameters import Parameters

INDEX = "model.safetensors.index.json"
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # ends of the names of what is no weight


def to_huggingface(config: LlamaConfig, *, bos: int | None = None, eos: int | None = None) -> dict[str, Any]:
    """The ``config.json`` of this model."""
    common = {"bos_token_id": bos, "eos_token_id": eos, "dtype": "float32", "torch_dtype": "float32"}
    if isinstance(config, GPT2Config):
        return config.to_huggingface() | common
    settings = dataclasses.asdict(config)  # their names are ours
    scaling = settings["rope_scaling"] and {"rope_type": "llama3", **settings["rope_scaling"]}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **settings,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
    } | common


def from_huggingface(settings: Mapping[str, Any], source: str = "config.json") -> LlamaConfig:
    """The model that a ``config.json`` describes; ``source`` names it in errors."""
    if settings.get("model_type") == "gpt2":
        for key in ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"):
            _required(settings, key, source)
        return GPT2Config.from_huggingface(settings)
    if settings.get("model_type") != "llama":
        got = settings.get("model_type")
        raise CheckpointError(f"{source}: expected model_type 'llama' or 'gpt2', got {got!r}")
    if settings.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{source}: expected hidden_act 'silu', got {settings['hidden_act']!r}")
    for bias in ("attention_bias", "mlp_bias"):
        if settings.get(bias):
            raise CheckpointError(f"{source}: expected {bias} false, got {settings[bias]!r}")
    rope = settings.get("rope_parameters") or {}
    scaling = rope if rope.get("rope_type", "default") != "default" else settings.get("rope_scaling")
    heads = _required(settings, "num_attention_heads", source)
    hidden = _required(settings, "hidden_size", source)
    return LlamaConfig(
        vocab_size=_required(settings, "vocab_size", source),
        hidden_size=hidden,
        intermediate_size=_required(settings, "intermediate_size", source),
        num_hidden_layers=_required(settings, "num_hidden_layers", source),
        num_attention_heads=heads,
        num_key_value_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or default_head_dim(hidden, heads),
        max_position_embeddings=settings.get("max_position_embeddings", 2048),
        rms_norm_eps=settings.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", settings.get("rope_theta", 10_000.0))),
        rope_scaling=_rope_scaling(scaling, source),
        tie_word_embeddings=settings.get("tie_word_embeddings", False),
        initializer_range=settings.get("initializer_range", 0.02),
    )


def _required(settings: Mapping[str, Any], key: str, source: str) -> int:
    if not isinstance(settings.get(key), int):
        raise CheckpointError(f"{source}: expected an integer {key}, got {settings.get(key)!r}")
    return settings[key]


def _rope_scaling(settings: Mapping[str, Any] | None, source: str) -> RopeScaling | None:
    if not settings:
        return None
    kind = settings.get("rope_type", settings.get("type"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"{source}: expected rope_type 'llama3' or 'default', got {kind!r}")
    return RopeScaling(
        factor=float(settings["factor"]),
        low_freq_factor=float(settings["low_freq_factor"]),
        high_freq_factor=float(settings["high_freq_factor"]),
        original_max_position_embeddings=int(settings["original_max_position_embeddings"]),
    )


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
    missing = dict(weights.shapes)
    for name, tensor in _tensors(directory):
        name = name.removeprefix("_orig_mod.")
        if name.endswith(_BUFFERS) or (name == "lm_head.weight" and name not in weights):
            continue
        if name not in weights and f"transformer.{name}" in weights:
            name = f"transformer.{name}"
        if name.endswith(TRANSPOSED):
            tensor = tensor.T
        if name not in weights:
            raise CheckpointError(f"{directory}: expected the tensors of this model, got an unknown {name!r}")
        if tensor.shape != weights.shapes[name]:
            raise CheckpointError(f"{directory}: {name}: expected shape {weights.shapes[name]}, got {tensor.shape}")
        weights[name][...] = tensor
        missing.pop(name, None)
    if missing:
        raise CheckpointError(f"{directory}: expected {len(weights)} tensors, got none named {next(iter(missing))!r}")


def _tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    from safetensors import SafetensorError, safe_open

    index = directory / INDEX
    try:
        shards = ["model.safetensors"]
        if index.exists():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        for shard in shards:
            if Path(shard).name != shard:
                raise CheckpointError(f"{index}: expected file names, got {shard!r}")
            with safe_open(directory / shard, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (a safe_open is no mapping)
                    yield name, file.get_tensor(name)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: expected readable safetensors, got {error}") from error
