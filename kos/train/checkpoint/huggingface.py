"""Weights and configurations as Hugging Face transformers writes and reads them.

``config.json`` of a model of ``kos.train.model.families`` both ways, in the spelling of transformers v4
(``rope_theta``, ``rope_scaling``, ``torch_dtype``) and of v5 (``rope_parameters``, ``dtype``); weights from
``model.safetensors`` or its shards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from errno import EISDIR, ENOENT, ENOTDIR, ESTALE
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from pydantic import ValidationError

from kos.commands import python_code
from kos.errors import CheckpointError, raised_as
from kos.files import OpenFile
from kos.train.config import ModelSection, closest, one_line
from kos.train.layers.lora import is_adapter
from kos.train.model.families import FAMILIES, rotated_layers
from kos.train.model.gpt2 import TRANSPOSED, GPT2Config
from kos.train.model.llama import FAMILY_SETTINGS, FULL, SLIDING, LlamaConfig
from kos.train.model.shape import KEYS, ModelShape
from kos.train.ops.parameters import Shape

DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
"""The dtypes that can be read: their names in safetensors, and in NumPy."""

READ = 4 << 20  # bytes read at once, if only some columns of a tensor are needed


def fingerprint(path: Path) -> dict[str, Any]:
    """The size of a file in ``bytes``, and its ``sha256``."""
    with open(path, "rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


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


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file (https://github.com/huggingface/safetensors), from byte ``start`` of ``file`` on.

    kos reads the file itself.  The library safetensors maps files into memory, so a file that another program truncates
    would end the process with SIGBUS.
    """

    file: OpenFile
    dtype: str
    shape: Shape
    start: int

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The tensor, or a slice of it.  Raises OSError if the file cannot be read, or another program changed it."""
        length, *row = self.shape
        rows, *columns = index or (slice(None),)
        start, stop, _ = rows.indices(length)
        dtype, whole = DTYPES[self.dtype], all(x.indices(n)[:2] == (0, n) for x, n in zip(columns, row, strict=False))
        size = dtype.itemsize * math.prod(row)
        step = max(1, stop - start if whole else READ // size)
        parts = []
        for at in range(start, max(stop, start + 1), step):
            part = np.empty((max(0, min(at + step, stop) - at), *row), dtype)
            self.file.read(self.start + at * size, part.reshape(-1).view(np.uint8).data)
            parts.append(part[(slice(None), *columns)])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors in a file whose header has been checked."""
    file, first = OpenFile(path), bytearray(8)
    file.read(0, memoryview(first))
    header = bytearray(int.from_bytes(first, "little"))
    file.read(8, memoryview(header))
    tensors = json.loads(header)
    tensors.pop("__metadata__", None)
    return {
        name: StoredTensor(file, each["dtype"], tuple(each["shape"]), 8 + len(header) + each["data_offsets"][0])
        for name, each in tensors.items()
    }


INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, PEFT = "adapter_config.json", "base_model.model."
"""The library peft's file of settings, and what it writes before the name of an adapter's tensor."""
HEAD = "lm_head.weight"
_GPT2 = {each.name: each.metadata["gpt2"] for each in dataclasses.fields(ModelShape) if each.metadata["gpt2"]}
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
_OTHER_WEIGHTS = (".gguf", ".pth", ".safetensors")
_ROWS = 4096  # of a matrix, read at once
_POINTER = b"version https://git-lfs"
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # ends of the names of what is no weight


def _has(family: type[LlamaConfig], name: str) -> bool:
    """Whether the ``config.json`` of this family has the setting ``name`` of ours."""
    return name in family.takes or name not in (*FAMILY_SETTINGS, *family.fixed)


def to_huggingface(config: LlamaConfig) -> dict[str, Any]:
    """The ``config.json`` of this model."""
    kind, settings = config.model_type, dataclasses.asdict(config.base)  # their names are a LLaMA's
    del settings["lora"]
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
        names = {name: _GPT2.get(name, name) for name in ModelSection.model_fields if _has(GPT2Config, name)}
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
        return ModelSection.model_validate({**shape, "model_type": kind}).resolve(0, 0)
    except ValidationError as error:
        raise CheckpointError(f"{source}: {one_line(error)}") from None


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
    names = [name for name in ModelSection.model_fields if _has(family, name)]
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


def as_saved(name: str, array: np.ndarray) -> np.ndarray:
    """A weight as transformers has it."""
    return array.T if name.endswith(TRANSPOSED) else array


def name_as_saved(name: str) -> str:
    return PEFT + name if is_adapter(name) else name


def shape_as_saved(name: str, shape: Shape) -> Shape:
    return tuple(shape)[::-1] if name.endswith(TRANSPOSED) else tuple(shape)


def check_weights(directory: Path) -> None:
    """CheckpointError if ``directory`` has no safetensors; it names the weights of torch that are there instead."""
    if any((directory / name).exists() for name in ("model.safetensors", INDEX)):
        return
    got = "none" if directory.is_dir() else "no such folder"
    if found := sorted(path.name for path in directory.glob("pytorch_model*.bin")):
        code = "import sys; from transformers import AutoModelForCausalLM as M; M.from_pretrained(sys.argv[1])"
        how = python_code(f"{code}.save_pretrained(sys.argv[1])", directory)
        got = f"{found[0]}; to convert it, run: {how}"
    elif found := sorted(path.name for path in directory.glob("*.*") if path.suffix in _OTHER_WEIGHTS):
        why = f" without {INDEX}" if found[0].startswith("model-0") else ", which kos does not read"
        got = f"{found[0]}{why}"
    raise CheckpointError(f"{directory}: expected model.safetensors, got {got}")


def shards(directory: Path) -> list[str]:
    """The names of the files of the weights in ``directory``."""
    index = directory / INDEX
    names = ["model.safetensors"]
    with whole(index, "an index of safetensors"):
        if not (directory / names[0]).exists() and index.exists():  # in this order, as transformers looks
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        elsewhere = next((name for name in names if Path(name).name != name), None)
    if elsewhere is not None:
        raise CheckpointError(f"{index}: expected file names, got {elsewhere!r}")
    return names


def weight_files(directory: Path, shapes: Mapping[str, Shape]) -> TensorFiles:
    """The weights in ``directory``, checked to be those of a model of these shapes."""
    try:
        files = TensorFiles(directory, shards(directory), shapes, _as_ours, TRANSPOSED)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_quantization(directory)}") from None
    embedding = next(name for name in shapes if name.endswith((LlamaConfig.embedding, GPT2Config.embedding)))
    if not files.has_same(HEAD, embedding):
        expected = f"{HEAD} to be {embedding} (tie_word_embeddings)"
        raise CheckpointError(f"{directory}: expected {expected}, got another; remove it, or untie them in config.json")
    return files


def _quantization(directory: Path) -> str:
    """For an error of weights that cannot be read: that they are quantized, if ``config.json`` says so."""
    try:
        settings = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError, RecursionError):
        settings = None
    kind = settings.get("quant_method", "an unknown method") if isinstance(settings, dict) else None
    return f" (quantized with {kind}: take the model before quantization)" if kind else ""


def _as_ours(name: str, shapes: Mapping[str, Shape]) -> str | None:
    """Our name of a tensor; None if it is no weight."""
    name = name.removeprefix("_orig_mod.")
    if name.endswith(_BUFFERS) or (name == HEAD and name not in shapes):
        return None
    return f"transformer.{name}" if name not in shapes and f"transformer.{name}" in shapes else name


def _layers_hint(name: str, others: Iterable[str]) -> str:
    """The hint for an error about a missing or unknown tensor; empty unless its whole layer is missing on that side."""
    layer = re.match(r".*?\.\d+\.", name)
    if layer is None or any(other.startswith(layer[0]) for other in others):
        return ""
    return " (check num_hidden_layers of config.json)"


class TensorFiles:
    """The tensors of safetensors files, of which slices are read.

    ``rename(name, shapes)`` gives our name, or None for what is left out.  Matrices whose names end with ``transposed``
    are transposed.  CheckpointError: a file that cannot be read, or other tensors, shapes or dtypes than ``shapes``.
    """

    def __init__(
        self, folder: Path, files: Iterable[str], shapes: Mapping[str, Shape],
        rename: Callable[[str, Mapping[str, Shape]], str | None] = lambda name, shapes: name,
        transposed: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        from safetensors import safe_open

        self.folder, self._transposed = folder, transposed
        self._where: dict[str, tuple[Path, StoredTensor]] = {}
        self._left_out: dict[str, StoredTensor] = {}
        for path in (folder / file for file in files):
            with _reading(path):
                with path.open("rb") as opened:  # whose errors say more
                    if opened.read(len(_POINTER)) == _POINTER:
                        raise ValueError("a pointer of Git LFS; run: git lfs pull")
                safe_open(path, framework="numpy")  # which checks the header
                tensors = stored_tensors(path)
            for name, tensor in tensors.items():
                if (ours := rename(name, shapes)) is None:
                    self._left_out[name] = tensor
                else:
                    self._where[ours] = path, tensor
                    self._check(ours, shapes)
        if missing := [name for name in shapes if name not in self._where]:
            hint = _layers_hint(missing[0], self._where)
            raise CheckpointError(f"{folder}: expected {len(shapes)} tensors, got none named {missing[0]!r}{hint}")

    def _check(self, name: str, shapes: Mapping[str, Shape]) -> None:
        path, tensor = self._where[name]
        if name not in shapes:
            got = f"an unknown {name!r}{_layers_hint(name, shapes)}"
            raise CheckpointError(f"{self.folder}: expected the tensors of this model, got {got}")
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{path}: {name}: expected one of {', '.join(DTYPES)}, got {tensor.dtype}")
        shape = tensor.shape[:: -1 if name.endswith(self._transposed) else 1]
        if shape != tuple(shapes[name]):
            raise CheckpointError(f"{self.folder}: {name}: expected shape {tuple(shapes[name])}, got {shape}")

    def has_same(self, left_out: str, name: str) -> bool:
        """Whether a tensor that ``rename`` left out, if there is one, is ``name``; both are matrices."""
        if left_out not in self._left_out:
            return True
        (path, other), one = self._where[name], self._left_out[left_out]
        with _reading(path):
            pieces = ((slice(at, at + _ROWS),) for at in range(0, one.shape[0], _ROWS))
            return one.shape == other.shape and all(np.array_equal(one.read(x), other.read(x)) for x in pieces)

    def by_file(self) -> dict[str, list[str]]:
        """Our names of the tensors in each file."""
        found: dict[str, list[str]] = {}
        for name, (path, _) in self._where.items():
            found.setdefault(path.name, []).append(name)
        return found

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor, or a slice of it, in the dtype of the file."""
        path, tensor = self._where[name]
        with _reading(path):
            return tensor.read(index[::-1]).T if name.endswith(self._transposed) else tensor.read(index)


def _reading(path: Path) -> AbstractContextManager[None]:
    from safetensors import SafetensorError

    return raised_as(CheckpointError, f"{path}: expected readable safetensors", OSError, ValueError, SafetensorError)
