"""``config.json`` of Hugging Face for a model of ``kos.train.model.families``, both ways.

It is in the spelling of transformers v4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and of v5
(``rope_parameters``, ``dtype``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from errno import EISDIR, ENOENT, ENOTDIR, ESTALE
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kos.errors import CheckpointError, SettingError
from kos.train.model import closest, one_line, option_of
from kos.train.model.families import FAMILIES, GPT2Config, resolve, rotated_layers
from kos.train.model.llama import FAMILY_SETTINGS, FULL, SLIDING, LlamaConfig
from kos.train.model.shape import KEYS, ModelShape

ADAPTER_CONFIG = "adapter_config.json"
"""The library peft's file of settings."""

_GPT2 = {name: key for name, field in ModelShape.model_fields.items() if (key := option_of(field).gpt2)}
"""The keys that a GPT-2 has for settings of ours, where they are not a LLaMA's."""
_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    **{kind: {"hidden_act": ("silu",)} for kind in FAMILIES},
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
}  # fmt: skip
_REQUIRED = {
    **dict.fromkeys(
        FAMILIES, ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    ),
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"),
}
_KINDS = {"no_rope_layers": list, "layer_types": list, "no_rope_layer_interval": int, "max_window_layers": int}
_NAMED = {list: "a list", int: "an integer"}
_LLAMAS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False, "pad_token_id": None}
"""What transformers takes for settings that are not there."""
_MAY_BE_NULL = ("num_key_value_heads", "sliding_window", "pad_token_id")
"""Settings for which null differs from a missing setting."""


@contextmanager
def whole(path: Path, expected: str = "a complete checkpoint") -> Iterator[None]:
    """A context that raises CheckpointError for any error caused by a damaged file or folder at ``path``."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        expected = "files that can be read" if is_unreadable(error) else expected
        raise CheckpointError(f"{path}: expected {expected}, got {type(error).__name__}: {error}") from error


def is_unreadable(error: BaseException | None) -> bool:
    """Whether a file cannot be read, for example for lack of permission.  It may be undamaged."""
    return isinstance(error, OSError) and error.errno not in (None, ENOENT, ENOTDIR, EISDIR, ESTALE)


def _has(family: type[LlamaConfig], name: str) -> bool:
    """Whether the ``config.json`` of this family has the setting ``name`` of ours."""
    return name in family.takes or name not in (*FAMILY_SETTINGS, *family.fixed)


def to_huggingface(config: LlamaConfig) -> dict[str, Any]:
    """The ``config.json`` of this model."""
    kind, settings = config.model_type, config.model_dump(exclude={"lora", "model_type"})  # their names are a LLaMA's
    if kind == "gpt2":
        settings = {_GPT2.get(key, key): value for key, value in settings.items() if _has(type(config), key)}
    else:
        scaling = config.rope_scaling and config.rope_scaling.settings()
        rope = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
        settings |= {"rope_scaling": scaling, "rope_parameters": rope}
        layers, window = config.num_hidden_layers, config.sliding_window
        types = config.layer_types or (FULL if window is None else SLIDING,) * layers
        settings |= {"layer_types": [*types], "no_rope_layers": [*(config.no_rope_layers or [1] * layers)]}
        settings = {key: value for key, value in settings.items() if _has(type(config), key)}
        settings |= {"use_sliding_window": window is not None} if "layer_types" in config.takes else {}
    return {
        "architectures": [config.architecture],
        "model_type": kind,
        **{key: values[0] for key, values in _FIXED[kind].items()},
        **settings,
        **dict.fromkeys(("dtype", "torch_dtype"), "float32"),
    }


def from_huggingface(settings: Any, source: str = "config.json") -> LlamaConfig:
    """The model that a ``config.json`` describes; ``source`` names it in errors.  Raises CheckpointError."""
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if not isinstance(kind, str) or kind not in _REQUIRED:
        near = closest(kind, _REQUIRED) if isinstance(kind, str) else ""
        known = f"one of {', '.join(_REQUIRED)}{near or ' (closest: llama)'}"
        raise CheckpointError(f"{source}: expected model_type {known}, got {kind!r}")
    for key in _REQUIRED[kind]:
        if not isinstance(settings.get(key), int):
            raise CheckpointError(f"{source}: expected an integer {key}, got {settings.get(key)!r}")
    given = {key: value for key, value in settings.items() if value is not None}
    for key, expected in _KINDS.items():
        if not isinstance(given.get(key, expected()), expected):
            raise CheckpointError(f"{source}: expected {key} to be {_NAMED[expected]}, got {given[key]!r}")
    if (interval := given.get("no_rope_layer_interval", 1)) < 1:
        raise CheckpointError(f"{source}: expected no_rope_layer_interval of at least 1, got {interval}")
    for key, values in _FIXED[kind].items():
        if given.get(key, values[0]) not in values:
            raise CheckpointError(f"{source}: expected {key} {values[0]!r}, got {given[key]!r}")
    if kind == "gpt2":
        theirs = {"n_inner": 4 * given["n_embd"], **given}
        names = {name: _GPT2.get(name, name) for name in ModelShape.model_fields if _has(GPT2Config, name)}
        shape = {ours: theirs[name] for ours, name in names.items() if name in theirs}
    else:
        null = {key: settings[key] for key in _MAY_BE_NULL if key in settings}
        defaults = _LLAMAS | FAMILIES[kind].defaults
        if defaults["pad_token_id"] not in range(given["vocab_size"]):  # transformers could not create such a model
            del defaults["pad_token_id"]
        shape = _of_family(FAMILIES[kind], {**defaults, **null, **given})
        shape |= _rope({**FAMILIES[kind].defaults, **given}, shape["max_position_embeddings"], source)
    types, only = given.get("layer_types", []), FULL if shape.get("sliding_window") is None else SLIDING
    if kind == "mistral" and any(each != only for each in types):  # which transformers 5 takes for a Ministral
        raise CheckpointError(f"{source}: layer_types: expected {only} alone in a model of type mistral, got {types}")
    try:
        return resolve(ModelShape.model_validate({**shape, "model_type": kind}), 0, 0)
    except (ValidationError, SettingError) as error:
        text = one_line(error) if isinstance(error, ValidationError) else error
        raise CheckpointError(f"{source}: {text}") from None


def _of_family(family: type[LlamaConfig], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model section; which layers have a window and rotary positions as transformers works it out."""
    layers = range(settings["num_hidden_layers"])
    if "no_rope_layers" in family.takes:
        flags = settings.get("no_rope_layers") or rotated_layers(len(layers), settings["no_rope_layer_interval"])
        flags = flags[: len(layers)]
        settings["no_rope_layers"] = [] if all(flags) and len(flags) in (0, len(layers)) else flags
    if "layer_types" in family.takes:
        window = settings.get("sliding_window") if settings["use_sliding_window"] else None
        first = settings["max_window_layers"] if "max_window_layers" in family.defaults else 0
        rotated = settings.get("no_rope_layers")
        windowed = [layer >= first and (rotated is None or not all(rotated[layer : layer + 1])) for layer in layers]
        types = settings.get("layer_types") or [SLIDING if each and window else FULL for each in windowed]
        alike = isinstance(types, list) and len(set(map(str, types))) == 1 and types[0] in (FULL, SLIDING)
        settings["sliding_window"] = None if alike and types[0] == FULL else window
        settings["layer_types"] = [] if alike and len(types) == len(layers) and (window or types[0] == FULL) else types
    names = [name for name in ModelShape.model_fields if _has(family, name)]
    return {name: settings[name] for name in names if settings.get(name) is not None}


def _rope(given: Mapping[str, Any], context: Any, source: str) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` in either spelling; ``context`` is the model's."""
    scaling = given.get("rope_scaling") or given.get("rope_parameters", {})  # in this order, as transformers looks
    if not isinstance(scaling, dict):
        raise CheckpointError(f"{source}: expected a table of RoPE's parameters, got {scaling!r}")
    scaling = {key: value for key, value in scaling.items() if value is not None}
    theta = {"rope_theta": scaling.get("rope_theta", given.get("rope_theta", 10_000.0))}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if (part := scaling.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))) != 1:
        raise CheckpointError(f"{source}: expected partial_rotary_factor 1.0, got {part!r}")
    if kind == "default":
        return theta | {"rope_scaling": None}
    if not isinstance(kind, str) or kind not in KEYS:
        known = f"one of default, {', '.join(KEYS)}"
        raise CheckpointError(f"{source}: expected rope_type {known} (closest: yarn), got {kind!r}")
    if kind == "yarn":
        scaling = {"original_max_position_embeddings": context, **scaling}
    if missing := [name for name in KEYS[kind] if name not in scaling and (kind != "yarn" or name == "factor")]:
        raise CheckpointError(f"{source}: expected {missing[0]} of the RoPE scaling, got none")
    found = {name: scaling[name] for name in KEYS[kind] if name in scaling}
    return theta | {"rope_scaling": {"rope_type": kind, **found}}


def read_config(directory: Path) -> LlamaConfig:
    """The model that ``directory/config.json`` describes."""
    path = directory / "config.json"
    try:
        is_checkpoint = path.exists() and (directory / ADAPTER_CONFIG).exists()
        if not is_checkpoint and (found := sorted(each.name for each in directory.glob("adapter_model.*"))):
            raise CheckpointError(f"{directory}: expected a whole model, got the adapter {found[0]}")
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing = "file" if directory.is_dir() else "folder; kos downloads no models from hubs"
        raise CheckpointError(f"{path}: expected a Hugging Face config.json, got no such {missing}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a Hugging Face config.json, got {error}") from error
    return from_huggingface(settings, str(path))
