"""Adapters in files: folders in the format of the library peft, their base model, and the two merged.

Such a folder has ``adapter_config.json`` and ``adapter_model.safetensors``. A checkpoint of a run with ``--lora`` is
such a folder too. Its manifest also has the path of the base and the SHA-256 of the base's weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.errors import CheckpointError, SettingError, raised_as
from kos.train.checkpoint import huggingface
from kos.train.checkpoint.state import Tensors
from kos.train.data.tokenizers import has_tokenizer
from kos.train.layers.lora import A, B, Lora, is_adapter
from kos.train.model.llama import LlamaConfig
from kos.train.ops.parameters import Shape

CONFIG, WEIGHTS = huggingface.ADAPTER_CONFIG, "adapter_model.safetensors"
IGNORED = """
    task_type auto_mapping peft_version revision inference_mode fan_in_fan_out layers_pattern megatron_config
    megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size runtime_config
    ensure_weight_tying r lora_alpha target_modules lora_dropout base_model_name_or_path
""".split()  # noqa: SIM905
"""Settings of peft that change no result, or that other code checks.  Any other unknown setting must be off."""


class Found(NamedTuple):
    """The adapters in a folder: ``lora``, with the targets that the file names, and the folder of the base."""

    lora: Lora
    base: Path


def is_folder(folder: Path) -> bool:
    """Whether ``folder`` is a folder of adapters in the format of peft."""
    return os.path.isfile(folder / CONFIG)


def read(folder: Path, trains: bool = False, has_base: bool = True) -> Found:
    """Read the settings of the adapters in ``folder``.  With ``trains``, settings of training are checked too.

    Raises CheckpointError if the file cannot be read, if it has a setting that kos does not support, or if the folder
    of the base does not exist.  The last is checked only with ``has_base``.
    """
    path = folder / CONFIG
    with huggingface.whole(path, "the settings of LoRA adapters"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha, base = settings["r"], settings["lora_alpha"], settings.get("base_model_name_or_path")
        targets, others = settings["target_modules"], settings.keys() - {*IGNORED}
    if type(rank) is not int or rank < 1:
        raise CheckpointError(f"{path}: r: expected an integer of at least 1, got {rank!r}")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise CheckpointError(f"{path}: lora_alpha: expected a number greater than 0, got {alpha!r}")
    fixed: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(sorted(others), ("none", None, False, [], {}, "")), "peft_type": ("LORA",), "bias": ("none",),
        "init_lora_weights": (True, False, "gaussian"), **dict.fromkeys(["lora_dropout"] * trains, (0,)),
    }  # fmt: skip
    for name, values in fixed.items():
        if (got := settings.get(name, values[0])) not in values:
            expected = False if got is True else values[0]
            raise CheckpointError(f"{path}: {name}: expected {expected}, got {got!r}")
    with huggingface.whole(folder / "manifest.json"):
        asked = run_of(folder).get("config", {})
        of_run = asked.get("lora_alpha") or 2.0 * rank if asked.get("lora") else alpha
    if alpha != of_run:
        how = "kos export writes a folder that may be edited"
        raise CheckpointError(f"{path}: lora_alpha: expected {of_run}, which the run had, got {alpha}; {how}")
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise CheckpointError(f"{path}: target_modules: expected a list of names, got {targets!r}")
    if not isinstance(base, str) or (has_base and not os.path.isdir(base)):
        how = "kos downloads no models; set it to the folder of the base"
        raise CheckpointError(f"{path}: base_model_name_or_path: expected a folder, got {base!r}; {how}")
    if has_base and any("." in name for name in targets):
        targets = _last_parts({*targets}, Path(base), path)
    return Found(Lora(int(rank), float(alpha), tuple(sorted(targets))), Path(base))


def _last_parts(targets: set[str], base: Path, path: Path) -> set[str]:
    """The last parts of ``targets``, which are longer ends of modules' names, as peft writes them for "all-linear".

    A target that names no matrix of the layers is returned as it is.  Raises CheckpointError if an adapted matrix has
    no adapter in another layer of the model in ``base``.
    """
    model, ends = huggingface.read_config(base), dict[str, set[str]]()
    for each in chain(*model.layers(range(model.num_hidden_layers))):
        for parts in (name.split(".")[:-1] for linear in (each.column, each.row) for name in linear.members):
            ends[".".join(parts)] = {".".join(parts[at:]) for at in range(len(parts))}
    found = {module.rpartition(".")[2] for module in ends if ends[module] & targets}
    for module in ends:
        if (last := module.rpartition(".")[2]) in found and not ends[module] & targets:
            raise CheckpointError(f"{path}: target_modules: expected {last} of all layers, got it without {module}")
    return found | (targets - set().union(*ends.values()))


def model_of(folder: Path) -> LlamaConfig:
    """The configuration of the model with the adapters in ``folder``."""
    lora, base = read(folder)
    try:
        return huggingface.read_config(base).adapted(*lora)
    except SettingError as error:
        text = f"{folder / CONFIG}: target_modules: expected {error.expected}, got {error.got}"
        raise CheckpointError(text) from None


def to_peft(model: LlamaConfig, base: str) -> dict[str, Any]:
    """The contents of ``adapter_config.json`` for the adapters of ``model``."""
    assert model.lora is not None
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": model.lora.rank, "lora_alpha": model.lora.alpha, "target_modules": [*model.lora.targets],
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": model.model_type == "gpt2", "init_lora_weights": True,
    }  # fmt: skip


def run_of(folder: Path) -> dict[str, Any]:
    """The run that wrote the checkpoint ``folder``, as its manifest describes it.  Empty for any other folder."""
    path = folder / "manifest.json"
    with huggingface.whole(path):
        return dict(json.loads(path.read_text(encoding="utf-8"))["config"]) if path.exists() else {}


def shapes_of(model: LlamaConfig) -> dict[str, Shape]:
    """The shapes of the adapters' tensors of ``model``, by name."""
    return {name: shape for name, shape in model.parameter_shapes().items() if is_adapter(name)}


def files_of(folder: Path, model: LlamaConfig) -> huggingface.TensorFiles:
    """The tensors of the adapters in ``folder``.  Checks that they are the adapters of ``model``."""
    return huggingface.TensorFiles(
        folder, [WEIGHTS], shapes_of(model), lambda name, shapes: name.removeprefix(huggingface.PEFT)
    )


# --- the base -------------------------------------------------------------------------------------------


def base_of(folder: Path) -> Path:
    """The folder of the whole model for ``--init-from``: ``folder`` itself, or the base if it has adapters."""
    return read(folder).base if is_folder(folder) else folder


def tokenizer_folder(init_from: str | None) -> str | None:
    """The folder with the tokenizer for ``--init-from``.  If a folder of adapters has none, it is the base's."""
    folder = Path(init_from or "")
    if init_from is None or not is_folder(folder) or has_tokenizer(folder):
        return init_from
    return str(read(folder).base)


def find_base(lora: int | None, init_from: str | None) -> dict[str, str] | None:
    """The ``path`` of a run's base model, and the ``sha256`` of its weights; None without adapters.

    Raises SettingError if the run has adapters but no ``--init-from``.
    """
    if lora is None:
        return None
    if init_from is None:
        raise SettingError("--lora", "--init-from with the folder of the model to adapt", "none").about("lora")
    folder = base_of(Path(init_from))
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
    if is_folder(folder):
        merged = Merged(folder)
        return merged.model, merged
    model = huggingface.read_config(folder)
    return model, huggingface.weight_files(folder, model.parameter_shapes())


class Merged:
    """The tensors of the base that ``folder`` names, with the adapters in ``folder`` added: W + alpha / rank B A."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if ``folder`` is a checkpoint and its base is not the base of its run."""
        model, self.base = model_of(folder), read(folder).base
        assert model.lora is not None
        self.model, self._scale, self._adapters = model.base, model.lora.scale, files_of(folder, model)
        self._adapted = {name.removesuffix(A) + "weight" for name in shapes_of(model) if name.endswith(A)}
        if run := run_of(folder):
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
