"""The settings of adapters in a folder: ``adapter_config.json`` of the library peft.

A checkpoint of a run with ``--lora`` is such a folder too. Its manifest also has the path of the base.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from kos.errors import CheckpointError, SettingError, raised_as
from kos.train.layers.lora import Lora, is_pattern
from kos.train.model.huggingface import ADAPTER_CONFIG, read_config, whole
from kos.train.model.llama import LlamaConfig

CONFIG = ADAPTER_CONFIG
IGNORED = """
    task_type auto_mapping peft_version revision inference_mode fan_in_fan_out layers_pattern megatron_config
    megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size runtime_config
    ensure_weight_tying r lora_alpha target_modules lora_dropout base_model_name_or_path
    use_rslora layers_to_transform
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
    with whole(path, "the settings of LoRA adapters"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha, base = settings["r"], settings["lora_alpha"], settings.get("base_model_name_or_path")
        targets, others = settings["target_modules"], settings.keys() - {*IGNORED}
        rslora, layers = settings.get("use_rslora", False), settings.get("layers_to_transform")
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
    with whole(folder / "manifest.json"):
        asked = run_of(folder).get("config", {})
        of_run = asked.get("lora_alpha") or 2.0 * rank if asked.get("lora") else alpha
    if alpha != of_run:
        how = "kos export writes a folder that may be edited"
        raise CheckpointError(f"{path}: lora_alpha: expected {of_run}, which the run had, got {alpha}; {how}")
    if type(rslora) is not bool:
        raise CheckpointError(f"{path}: use_rslora: expected true or false, got {rslora!r}")
    layers = [] if layers is None else [layers] if isinstance(layers, int) else layers
    if not isinstance(layers, list) or not all(type(number) is int for number in layers):
        raise CheckpointError(f"{path}: layers_to_transform: expected numbers of layers, got {layers!r}")
    pattern = isinstance(targets, str) and is_pattern(targets) and targets != "all-linear"
    if pattern:
        with raised_as(CheckpointError, f"{path}: target_modules: expected a regular expression", re.error):
            re.compile(targets)
        targets = [targets]
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise CheckpointError(f"{path}: target_modules: expected a list of names, got {targets!r}")
    if not isinstance(base, str) or (has_base and not os.path.isdir(base)):
        how = "kos downloads no models; set it to the folder of the base"
        raise CheckpointError(f"{path}: base_model_name_or_path: expected a folder, got {base!r}; {how}")
    if has_base and not pattern and any("." in name for name in targets):
        targets = _last_parts({*targets}, Path(base), path, layers)
    return Found(Lora(int(rank), float(alpha), tuple(sorted(targets)), rslora, tuple(sorted({*layers}))), Path(base))


def _last_parts(targets: set[str], base: Path, path: Path, layers: Sequence[int]) -> set[str]:
    """The last parts of ``targets``, which are longer ends of modules' names, as peft writes them for "all-linear".

    A target that names no matrix of the layers is returned as it is.  Raises CheckpointError if an adapted matrix has
    no adapter in another layer of the model in ``base``.
    """
    model, ends = read_config(base), dict[str, set[str]]()
    for each in chain(*model.layers(layers or range(model.num_hidden_layers))):
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
        return read_config(base).adapted(*lora)
    except SettingError as error:
        setting = "layers_to_transform" if error.key == "--lora-layers" else "target_modules"
        text = f"{folder / CONFIG}: {setting}: expected {error.expected}, got {error.got}"
        raise CheckpointError(text) from None


def to_peft(model: LlamaConfig, base: str) -> dict[str, Any]:
    """The contents of ``adapter_config.json`` for the adapters of ``model``."""
    lora = model.lora
    assert lora is not None
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": lora.pattern or [*lora.targets],
        "use_rslora": lora.rslora, "layers_to_transform": [*lora.layers] or None,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": model.model_type == "gpt2", "init_lora_weights": True,
    }  # fmt: skip


def run_of(folder: Path) -> dict[str, Any]:
    """The run that wrote the checkpoint ``folder``, as its manifest describes it.  Empty for any other folder."""
    path = folder / "manifest.json"
    with whole(path):
        return dict(json.loads(path.read_text(encoding="utf-8"))["config"]) if path.exists() else {}


def base_of(folder: Path) -> Path:
    """The folder of the whole model for ``--init-from``: ``folder`` itself, or the base if it has adapters."""
    return read(folder).base if is_folder(folder) else folder
