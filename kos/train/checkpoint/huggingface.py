"""Weights as Hugging Face transformers writes and reads them: ``model.safetensors`` or its shards."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kos.commands import python_code
from kos.errors import CheckpointError, raised_as
from kos.files import OpenFile
from kos.train.layers.lora import is_adapter
from kos.train.model.families import TRANSPOSED, GPT2Config
from kos.train.model.huggingface import whole
from kos.train.model.llama import LlamaConfig
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
PEFT = "base_model.model."
"""What the library peft writes before the name of an adapter's tensor."""
HEAD = "lm_head.weight"
_OTHER_WEIGHTS = (".gguf", ".pth", ".safetensors")
_ROWS = 4096  # of a matrix, read at once
_POINTER = b"version https://git-lfs"
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # ends of the names of what is no weight


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
