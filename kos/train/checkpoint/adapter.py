"""Adapters in files: folders in the format of the library peft, their base model, and the two merged.

Such a folder has ``adapter_config.json`` and ``adapter_model.safetensors``. A checkpoint of a run with ``--lora`` is
such a folder too. Its manifest also has the path of the base and the SHA-256 of the base's weights.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kos.errors import CheckpointError, SettingError, raised_as
from kos.train.checkpoint import huggingface
from kos.train.checkpoint.state import Tensors
from kos.train.data.tokenizers import has_tokenizer
from kos.train.layers.lora import A, B, is_adapter
from kos.train.model import peft
from kos.train.model.huggingface import read_config
from kos.train.model.llama import LlamaConfig
from kos.train.ops.parameters import Shape

WEIGHTS = "adapter_model.safetensors"


def shapes_of(model: LlamaConfig) -> dict[str, Shape]:
    """The shapes of the adapters' tensors of ``model``, by name."""
    return {name: shape for name, shape in model.parameter_shapes().items() if is_adapter(name)}


def files_of(folder: Path, model: LlamaConfig) -> huggingface.TensorFiles:
    """The tensors of the adapters in ``folder``.  Checks that they are the adapters of ``model``."""
    return huggingface.TensorFiles(
        folder, [WEIGHTS], shapes_of(model), lambda name, shapes: name.removeprefix(huggingface.PEFT)
    )


# --- the base -------------------------------------------------------------------------------------------


def tokenizer_folder(init_from: str | None) -> str | None:
    """The folder with the tokenizer for ``--init-from``.  If a folder of adapters has none, it is the base's."""
    folder = Path(init_from or "")
    if init_from is None or not peft.is_folder(folder) or has_tokenizer(folder):
        return init_from
    return str(peft.read(folder).base)


def find_base(lora: int | None, init_from: str | None) -> dict[str, str] | None:
    """The ``path`` of a run's base model, and the ``sha256`` of its weights; None without adapters.

    Raises SettingError if the run has adapters but no ``--init-from``.
    """
    if lora is None:
        return None
    if init_from is None:
        raise SettingError("--lora", "--init-from with the folder of the model to adapt", "none").about("lora")
    folder = peft.base_of(Path(init_from))
    return {"path": os.path.abspath(folder), "sha256": fingerprint(folder)}


def fingerprint(folder: Path) -> str:
    """The SHA-256 of the concatenated SHA-256 digests of the weight files in ``folder``, in their order."""
    huggingface.check_weights(folder)
    paths = [folder / name for name in huggingface.shards(folder)]
    with raised_as(CheckpointError, f"{folder}: expected weights that can be read"), ThreadPoolExecutor() as pool:
        digests = (bytes.fromhex(each["sha256"]) for each in pool.map(huggingface.fingerprint, paths))
        return hashlib.sha256(b"".join(digests)).hexdigest()


def check_base(path: Path, described: Mapping[str, Any], sha256: str, base: str | Path) -> None:
    """Raise CheckpointError if the checkpoint at ``path``, whose run is ``described``, has adapters of another base."""
    theirs = described.get("base") or {}
    if theirs.get("sha256", sha256) != sha256:
        expected = f"the base of its run, {theirs.get('path')} ({theirs['sha256'][:12]})"
        raise CheckpointError(f"{path}: expected {expected}, got {base} ({sha256[:12]})").about("init_from")


# --- base and adapters together -------------------------------------------------------------------------


class Joined:
    """The tensors of a model with adapters: the tensors of its ``base``, and of the adapters, each unchanged."""

    def __init__(self, base: Tensors, adapters: Tensors) -> None:
        self._base, self._adapters = base, adapters

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a tensor, or a slice of it."""
        return (self._adapters if is_adapter(name) else self._base).read(name, index)


def whole_model(folder: Path) -> tuple[LlamaConfig, Tensors]:
    """The model in ``folder`` and its weights, with adapters added to their base.  CheckpointError as ``Merged``."""
    if peft.is_folder(folder):
        merged = Merged(folder)
        return merged.model, merged
    model = read_config(folder)
    return model, huggingface.weight_files(folder, model.parameter_shapes())


class Merged:
    """The tensors of the base that ``folder`` names, with the adapters in ``folder`` added: W + alpha / rank B A."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if ``folder`` is a checkpoint and its base is not the base of its run."""
        model, self.base = peft.model_of(folder), peft.read(folder).base
        assert model.lora is not None
        self.model, self._scale, self._adapters = model.base, model.lora.scale, files_of(folder, model)
        self._adapted = {name.removesuffix(A) + "weight" for name in shapes_of(model) if name.endswith(A)}
        if run := peft.run_of(folder):
            check_base(folder, run, fingerprint(self.base), self.base)
        self._weights = huggingface.weight_files(self.base, self.model.parameter_shapes())

    def by_file(self) -> dict[str, list[str]]:
        """The names of the tensors in each file of the base."""
        return self._weights.by_file()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a tensor or a slice of it.  A tensor with an adapter is returned in float32."""
        tensor = self._weights.read(name, index)
        if name not in self._adapted:
            return tensor
        rows, columns = index or (slice(None), slice(None))
        a, b = (self._adapters.read(name.removesuffix("weight") + each).astype(np.float32) for each in (A, B))
        return np.asarray(tensor.astype(np.float32) + np.float32(self._scale) * (b[rows] @ a[:, columns]))
