"""The ``model`` section of a configuration: the shape of the model, with Hugging Face's key names; and the presets.

To read the command line, only the names of settings are needed.  So model families are imported later.  Both
sections of a configuration use ``option``, a field that is also a flag, and ``one_line``, the text of an error.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_type_hints

from pydantic import Field, ValidationError, create_model, field_validator, model_validator
from pydantic.fields import FieldInfo

from kos.errors import ConfigError, SettingError
from kos.train.model.shape import ModelShape, Section

if TYPE_CHECKING:
    from kos.train.model.llama import LlamaConfig
from collections.abc import Iterable
from difflib import get_close_matches

from kos.train.config.optimizers import OPTIMIZERS

KINDS = "text, .jsonl, .csv, .tsv, .parquet, .json, a folder of kos tokenize, or token files"
"""The kinds of data that kos reads, for help and errors."""

HOLD_OUT = 0.1
"""The fraction that is held out for validation: of a file, or of the files of a folder."""

EXPECTED = {"path_type": "a path", "model_type": "a table of keys"}
"""Of the types of pydantic's errors that have no such word in their text."""


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


Changes = Literal["bits", "nothing", "rate", "order", "layout", "data", "state"]
"""What another value of an option changes in a run that is resumed (``warn_of_changes`` of ``checkpoint.resume``):

bits    the results of steps
nothing no result of a step
rate    the learning rates of the remaining steps
order   the order in which ranks add, unless the run is deterministic
layout  the number of ranks on an axis
data    the data that is read; the fingerprint of the data detects a change
state   which tensors have optimizer state, or the kind of this state: the checkpoint is refused
"""


class Option(NamedTuple):
    """What a field declares of its flag, besides its type, its bounds, and its help, which is the field's docstring."""

    unset: str = ""
    """What a default of None, or an empty default, means."""

    changes: Changes = "bits"
    metavar: str = ""
    """By default it follows from the type."""

    title: str = ""
    """The title of the group of ``--help`` that begins with this flag."""

    several: bool = False
    """Whether the flag can be repeated."""

    path: bool = False
    """Whether a value may be a path, which is found from another folder too."""

    same: Callable[[Any], Any] = lambda value: value
    """Two values with equal results of this function give the same bits."""

    idle: Callable[[Any], str] = lambda config: ""
    """The setting of a configuration because of which the flag has no effect, or ""."""


def option(default: Any = ..., unset: str = "", changes: Changes = "bits", **declared: Any) -> Any:
    """A field that is also a flag; without ``default`` the preset gives the value.

    ``declared`` are fields of ``Option``, and bounds and other arguments of pydantic's ``Field``.
    """
    of_flag = {name: declared.pop(name) for name in Option._fields if name in declared}
    extra: Any = {"option": Option(unset, changes, **of_flag)}
    return Field(default, json_schema_extra=extra, **declared)


def option_of(field: FieldInfo) -> Option | None:
    """What a field declares of its flag; None if it is not a flag."""
    extra: Any = field.json_schema_extra
    return extra["option"] if isinstance(extra, dict) else None


def changes_of(field: FieldInfo) -> Changes:
    """What another value of this field changes: ``bits`` if the field is not a flag."""
    return (option_of(field) or Option()).changes


def _shape_fields() -> dict[str, Any]:
    """The fields of ``ModelSection``: those of ``ModelShape``, which a run's settings may leave open."""
    families = "Family of the model: llama, gpt2, mistral, olmo2, qwen2, qwen3, smollm3."
    title = "Shape of the model (a preset or --init-from gives it)"
    found: dict[str, Any] = {"model_type": (str, option("llama", title=title, description=families))}
    kinds = get_type_hints(ModelShape)
    for each in dataclasses.fields(ModelShape):
        about, default = each.metadata, each.metadata["of_run"]
        kind = kinds[each.name] | None if default is None else kinds[each.name]
        declared = option(default, about["unset"], about["changes"], description=about["about"], **about["bounds"])
        found[each.name] = (kind, declared if about["about"] else default)
    return found


_SHAPE: Any = create_model("_SHAPE", __base__=Section, **_shape_fields())


class ModelSection(_SHAPE):
    """The settings of a run's model: those of ``ModelShape``, of which some may be left open."""

    @field_validator("layer_types", "no_rope_layers", mode="before")
    @classmethod
    def _tuple(cls, given: Any) -> Any:
        return tuple(given) if isinstance(given, list) else given

    def resolve(self, vocab_size: int, context: int) -> LlamaConfig:
        """The model's shape; sizes that were left open follow from the tokenizer's vocabulary and the run's context."""
        from kos.train.model.families import FAMILIES, rotated_layers

        width, heads, family = self.hidden_size, self.num_attention_heads, FAMILIES[self.model_type]
        interval = family.defaults.get("no_rope_layer_interval", 0)
        if self.head_dim is None and width % heads:
            raise SettingError("hidden_size", f"a multiple of {heads}", width, "num_attention_heads")
        values: dict[str, Any] = {
            "vocab_size": vocab_size, "max_position_embeddings": context,
            "num_key_value_heads": heads, "head_dim": width // heads, "rope_scaling": self.rope_scaling,
            "no_rope_layers": rotated_layers(self.num_hidden_layers, interval),
        }  # fmt: skip
        values |= self.model_dump(exclude={"model_type", "rope_scaling"}, exclude_none=True)
        return family(**values)

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        from kos.train.model.families import FAMILIES

        if self.model_type not in FAMILIES:
            near = closest(self.model_type, FAMILIES)
            raise SettingError("model_type", f"one of {', '.join(FAMILIES)}{near}", self.model_type)
        self.resolve(2**63, 1)  # refuses a shape that cannot be
        return self


class GroupSection(Section):
    """A table of ``[[groups]]``: settings of the tensors whose names match ``pattern``, and no pattern before it.

    ``lr`` is the peak learning rate; the schedule is that of all tensors. A setting that is None is that of the run.
    """

    pattern: str = Field(min_length=1)
    lr: float | None = Field(None, gt=0)
    weight_decay: float | None = Field(None, ge=0)


def one_line(error: ValidationError, labels: Mapping[str, str] = MappingProxyType({})) -> str:
    """The first error that pydantic found, as ``where: expected X, got Y``.

    ``labels`` gives the name of each key that the text has.
    """
    first = error.errors()[0]
    kind, got, path = first["type"], first["input"], [x for x in first["loc"] if isinstance(x, str)]
    if kind == "value_error":
        wrong, names = first["ctx"]["error"], {key.rpartition(".")[2]: label for key, label in labels.items()}
        key, because_of = (names.get(key, key) for key in (wrong.key, wrong.because_of))
        return str(SettingError(key, wrong.expected, wrong.got, because_of))
    depth = 2 if path[0] == "model" else 1
    key = ".".join(path[:depth])
    where = ".".join([labels.get(key, key), *path[depth:]])
    if kind == "missing":
        return f"{where}: expected a value, got none"
    if kind == "extra_forbidden":
        near = "" if path[depth:] else suggestion(key, [x for x in labels if x != key])
        return f"{where}: expected a known key{near}, got {path[-1]!r}"
    expected = EXPECTED.get(kind) or first["msg"].partition(" should ")[2].removeprefix("be ").removeprefix("have ")
    return f"{where}: expected {'a number ' * kind.startswith(('greater', 'less'))}{expected}, got {reprlib.repr(got)}"


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


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`` (closest: X)``, or nothing if the similarity of all, from 0 to 1, is below ``cutoff``."""
    near = get_close_matches(word, known, n=1, cutoff=cutoff)
    return f" (closest: {near[0]})" if near else ""
