"""The presets, the names of settings, and the values of ``--data``, ``[[groups]]`` and ``--optimizer``.

To read the command line, only the names of settings are needed.  So model families and update rules are imported where
they are used.  A ``config`` is a ``TrainConfig``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from kos.errors import ConfigError, SettingError
from kos.train.model import Section, closest

if TYPE_CHECKING:
    from kos.train.model.llama import LlamaConfig, Local
    from kos.train.optim import Group, UpdateRule
    from kos.train.optim.adamw import AdamW

KINDS = "text, .jsonl, .csv, .tsv, .parquet, .json, a folder of kos tokenize, or token files"
"""The kinds of data that kos reads, for help and errors."""

RECORD_FIELDS = (
    "prompt", "completion", "response", "messages", "conversations", "instruction", "input", "output", "system",
    "tools", "text",
)  # fmt: skip
"""The names that ``--fields`` gives to fields of records; ``response`` is another name of ``completion``."""

HOLD_OUT = 0.1
"""The fraction that is held out for validation: of a file, or of the files of a folder."""

_WEIGHTED = re.compile(r"(.+):(\d{0,9}\.?\d{1,9})", re.DOTALL)


def weighted(data: str | Sequence[str]) -> dict[str, float]:
    """The sources of ``--data`` and their weights.  Of several, the weight is what follows the last colon.

    SettingError: one of several has no weight above 0, or is there twice."""
    if isinstance(data, str):
        return {data: 1.0}
    sources = dict[str, float]()
    for given in data:
        match = _WEIGHTED.fullmatch(str(given))
        if match is None or not float(match[2]) or match[1] in sources:
            expected = "NAME:WEIGHT or PATH:WEIGHT for each of several sources, with different names"
            example = f", such as {given}:0.7" * (":" not in str(given))
            raise SettingError("data", f"{expected}{example}", repr(given))
        sources[match[1]] = float(match[2])
    return sources


def by_source(given: str | Sequence[str] | None) -> dict[str, str]:
    """The values of a setting by source: of SOURCE=VALUE, and under "" the value for all others."""
    pairs = (each.rpartition("=") for each in ([given] if isinstance(given, str) else given or ()))
    return {source: value for source, _, value in pairs}


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The table of these keys; ValueError for a duplicate key, which TOML refuses and ``json`` silently overrides."""
    if len(table := dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return table


def of_0_2(run: Mapping[str, Any]) -> str:
    """The version of kos in the description of a run (of config.json or of a checkpoint), if it is 0.2; else ""."""
    versions = run.get("versions")
    version = str(versions.get("kos")) if isinstance(versions, dict) else ""
    return version if version.startswith("0.2.") else ""


def flag_of(key: str) -> str:
    """``model.hidden_size`` -> ``--hidden-size``."""
    return "--" + key.rpartition(".")[2].replace("_", "-")


class GroupSection(Section):
    """A table of ``[[groups]]``: settings of the tensors whose names match ``pattern``, and no pattern before it.

    ``lr`` is the peak learning rate; the schedule is that of all tensors. A setting that is None is that of the run.
    """

    pattern: str = Field(min_length=1)
    lr: float | None = Field(None, gt=0)
    weight_decay: float | None = Field(None, ge=0)


class Preset(NamedTuple):
    """One line for ``--help``, and the configuration keys with their values."""

    about: str
    values: dict[str, Any]


_TABLES = tomllib.loads(Path(__file__).with_name("presets.toml").read_text("utf-8"))
PRESETS = {name: Preset(table.pop("about"), table) for name, table in _TABLES.items()}
"""Named starting points of a run: the tables of ``presets.toml``, by the names that ``--preset`` takes."""


def preset_values(preset: Any) -> dict[str, Any]:
    """The values of a preset.  Raises ConfigError with the list of presets if no preset has that name."""
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(f"--preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    return PRESETS[preset].values


def flatten(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the keys of the nested section as ``model.hidden_size``."""
    section = values.get("model", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"{source}: model: expected a table of keys, got {section!r}")
    flat = {key: value for key, value in values.items() if key != "model"}
    return flat | {f"model.{name}": value for name, value in section.items()}


WITHOUT = "docs/guides/not-in-the-trainer.md"


def suggestion(word: str, known: Iterable[str]) -> str:
    """What an error adds about an unknown flag or key: what it is called here, that there is none, or the closest."""
    table = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text("utf-8"))
    name = word.rpartition(".")[2].lstrip("-").replace("_", "-").lower()
    if here := next((here for here, names in table["here"].items() if name in names), None):
        return f" (here: {here})"
    if name in OPTIMIZERS:
        return f" (here: --optimizer {name})"
    if any(f"{name}-".startswith(f"{none}-") for none in table["none"]["names"]):
        return f" (the trainer has none: {WITHOUT})"
    return closest(word, known, 0.75)


# --- the values of --optimizer: their update rules, and the parameter groups of a run with them --------------


def matrices_decayed(config: Any, model: LlamaConfig, parts: Sequence[Local]) -> list[Group]:
    """One rule for all weights."""
    from kos.train.optim import decay_matrices

    return decay_matrices({name: at.local for name, at in config.trained(model, parts).items()}, config.weight_decay)


def hidden_matrices_by_muon(config: Any, model: LlamaConfig, parts: Sequence[Local]) -> list[Group]:
    """Muon's are the matrices of layers."""
    from kos.train.optim import Group
    from kos.train.optim.muon import Muon

    placements = config.trained(model, parts)
    matrices = {name: at for name, at in placements.items() if len(at.shape) == 2}
    hidden = {name: at for name, at in matrices.items() if name not in (*model.tables, model.head)}
    rule = Muon(hidden, model.stacked, config.momentum)
    return [
        Group(hidden, config.weight_decay, (config.muon_lr or config.lr) / config.lr, rule),
        Group(matrices.keys() - hidden, config.weight_decay), Group(placements.keys() - matrices),
    ]  # fmt: skip


def adamw(config: Any) -> AdamW:
    from kos.train.optim.adamw import AdamW

    return AdamW((config.beta1, config.beta2), config.eps)


class Chosen(NamedTuple):
    """What a value of ``--optimizer`` stands for."""

    rule: Callable[[Any], UpdateRule]
    groups: Callable[[Any, LlamaConfig, Sequence[Local]], list[Group]]
    options: tuple[str, ...]
    """Those of its rules."""


OptimizerName = Literal["adamw", "muon"]
OF_ADAMW, OF_MUON = ("beta1", "beta2", "eps"), ("momentum", "muon_lr")
OPTIMIZERS: dict[OptimizerName, Chosen] = {
    "adamw": Chosen(adamw, matrices_decayed, OF_ADAMW),
    "muon": Chosen(adamw, hidden_matrices_by_muon, OF_ADAMW + OF_MUON),
}


def not_of(optimizer: Any) -> set[str]:
    """The options that only other optimizers have."""
    of_all = {name for each in OPTIMIZERS.values() for name in each.options}
    known = isinstance(optimizer, str) and optimizer in OPTIMIZERS
    return of_all.difference(OPTIMIZERS[optimizer].options if known else of_all)
