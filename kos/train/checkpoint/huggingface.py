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
from pydantic import ValidationError

from kos.errors import CheckpointError
from kos.train.config.model_section import ModelSection
from kos.train.config.validation import one_line
from kos.train.model.gpt2 import TRANSPOSED
from kos.train.model.llama_config import LlamaConfig, RopeScaling
from kos.train.model.parameters import Parameters

INDEX = "model.safetensors.index.json"
_GPT2 = {  # their settings and ours
    "vocab_size": "vocab_size", "n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "rms_norm_eps",
    "initializer_range": "initializer_range", "tie_word_embeddings": "tie_word_embeddings",
}  # fmt: skip
_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    "gpt2": {"activation_function": ("gelu_new", "gelu_pytorch_tanh")},
}
_REQUIRED = {
    "llama": ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"),
}
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # ends of the names of what is no weight


def to_huggingface(config: LlamaConfig) -> dict[str, Any]:
    """The ``config.json`` of this model."""
    kind, settings = config.model_type, dataclasses.asdict(config)  # their names are a LLaMA's
    if kind == "gpt2":
        settings = {theirs: settings[ours] for theirs, ours in _GPT2.items()}
    else:
        scaling = config.rope_scaling and config.rope_scaling.model_dump()
        rope = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
        settings |= {"rope_scaling": scaling, "rope_parameters": rope}
    return {
        "architectures": ["GPT2LMHeadModel" if kind == "gpt2" else "LlamaForCausalLM"],
        "model_type": kind,
        **{key: values[0] for key, values in _FIXED[kind].items()},
        **settings,
        **dict.fromkeys(("dtype", "torch_dtype"), "float32"),
    }


def from_huggingface(settings: Any, source: str = "config.json") -> LlamaConfig:
    """The model that a ``config.json`` describes; ``source`` names it in errors.  Raises CheckpointError."""
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise CheckpointError(f"{source}: expected model_type 'llama' or 'gpt2', got {kind!r}")
    for key in _REQUIRED[kind]:
        if not isinstance(settings.get(key), int):
            raise CheckpointError(f"{source}: expected an integer {key}, got {settings.get(key)!r}")
    given = {key: value for key, value in settings.items() if value is not None}
    for key, values in _FIXED[kind].items():
        if given.get(key, values[0]) not in values:
            raise CheckpointError(f"{source}: expected {key} {values[0]!r}, got {given[key]!r}")
    if kind == "gpt2":
        shape = {"intermediate_size": 4 * given["n_embd"]}
        shape |= {ours: given[theirs] for theirs, ours in _GPT2.items() if theirs in given}
    else:
        shape = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False}
        shape |= {name: given[name] for name in ModelSection.model_fields if name in given} | _rope(given, source)
    try:
        return ModelSection.model_validate({**shape, "model_type": kind}).resolve(0, 0)
    except ValidationError as error:
        raise CheckpointError(f"{source}: {one_line(error)}") from None


def _rope(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` in either spelling."""
    rope, scaling = given.get("rope_parameters", {}), given.get("rope_scaling", {})
    for settings in (rope, scaling):
        if not isinstance(settings, dict):
            raise CheckpointError(f"{source}: expected a table of RoPE's parameters, got {settings!r}")
    theta = {"rope_theta": rope.get("rope_theta", given.get("rope_theta", 10_000.0))}
    scaling = rope if rope.get("rope_type", "default") != "default" else scaling
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta | {"rope_scaling": None}
    if kind != "llama3":
        raise CheckpointError(f"{source}: expected rope_type 'llama3' or 'default', got {kind!r}")
    names = [name for name in RopeScaling.model_fields if name != "rope_type"]
    if missing := [name for name in names if name not in scaling]:
        raise CheckpointError(f"{source}: expected {missing[0]} of the RoPE scaling, got none")
    return theta | {"rope_scaling": {name: scaling[name] for name in names}}


def read_config(directory: Path) -> LlamaConfig:
    """The model described by ``directory/config.json``."""
    path = directory / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
        if not (directory / shards[0]).exists() and index.exists():  # in this order, as transformers looks
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        elsewhere = next((shard for shard in shards if Path(shard).name != shard), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: expected an index of safetensors, got {error}") from error
    if elsewhere is not None:
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
        if tensor.dtype.kind in "biuc":
            raise CheckpointError(f"{source}: {name}: expected floating-point numbers, got {tensor.dtype}")
        targets[name][...] = tensor
        missing.pop(name, None)
    if missing:
        raise CheckpointError(f"{source}: expected {len(targets)} tensors, got none named {next(iter(missing))!r}")


def read_tensors(paths: Iterable[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """The named tensors of safetensors files, one at a time."""
    from safetensors import SafetensorError, safe_open

    for path in paths:
        try:
            path.open("rb").close()  # whose errors say more
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (a safe_open is no mapping)
                    try:
                        tensor = file.get_tensor(name)
                    except AttributeError as error:
                        got = file.get_slice(name).get_dtype()
                        expected = "expected a dtype that NumPy has"
                        raise CheckpointError(f"{path}: {name}: {expected}, got {got}") from error
                    yield name, tensor
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{path}: expected readable safetensors, got {error}") from error
