"""The ``model`` section of a configuration: the shape of the model, with Hugging Face's key names; and the presets.

To read the command line, only the names of settings are needed.  So model families are imported later.  Both
sections of a configuration use ``option``, a field that is also a flag, and ``one_line``, the text of an error.
"""

from __future__ import annotations

import re
import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from kos.errors import ConfigError, SettingError
from kos.train.model.rope import RopeScaling, Section

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


def unset_of(field: FieldInfo) -> Any:
    """What a default of None, or an empty default, means."""
    return field.json_schema_extra["unset"] if isinstance(field.json_schema_extra, dict) else "none"


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


def option(default: Any = ..., unset: str = "", changes: Changes = "bits", **constraints: Any) -> Any:
    """A field that is also a flag; without ``default`` the preset gives the value.

    The field's docstring is the help of the flag. ``unset`` says what a default of None, or an empty default, means.
    """
    return Field(default, json_schema_extra={"unset": unset, "changes": changes}, **constraints)


def changes_of(field: FieldInfo) -> Changes:
    """What another value of this field changes: ``bits`` if the field is not a flag."""
    declared: Any = field.json_schema_extra
    return declared["changes"] if isinstance(declared, dict) else "bits"


class ModelSection(Section, use_attribute_docstrings=True):
    """Shape of the model, with the key names that Hugging Face's config.json has for a LLaMA."""

    model_type: str = option("llama")
    """Family of the model: llama, gpt2, mistral, olmo2, qwen2, qwen3, smollm3."""
    vocab_size: int | None = option(None, "as many as the tokenizer has tokens", ge=1, lt=2**63)
    """Rows of the embedding."""
    hidden_size: int = option(ge=2, lt=2**63)
    """Width of the residual stream."""
    num_hidden_layers: int = option(ge=1, le=100_000)
    """Number of decoder layers."""
    num_attention_heads: int = option(ge=1, lt=2**63)
    """Number of query heads."""
    num_key_value_heads: int | None = option(None, "as many as query heads", ge=1)
    """Number of key/value heads."""
    head_dim: int | None = option(None, "hidden size / query heads", ge=2, lt=2**63)
    """Width of a head."""
    intermediate_size: int = option(ge=1, lt=2**63)
    """Width of the MLP."""
    max_position_embeddings: int | None = option(None, "--seq-len", changes="nothing", ge=1)
    """Longest context in tokens."""
    rms_norm_eps: float = option(1e-5, gt=0)
    """Epsilon of the norms."""
    rope_theta: float = option(10_000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = option(True)
    """Use one matrix for embedding and head."""
    initializer_range: float = option(0.02, changes="nothing", gt=0)
    """Standard deviation of the initial weights."""
    attention_bias: bool = option(False)
    """Add biases to attention's matrices (llama, olmo2, qwen3, smollm3)."""
    mlp_bias: bool = option(False)
    """Add biases to the matrices of the MLP (llama, smollm3)."""
    sliding_window: int | None = option(None, "no window", ge=1)
    """Tokens that a token attends to at most, including itself (mistral, qwen2, qwen3, smollm3)."""
    pad_token_id: int | None = option(None, "none", ge=-(2**63), lt=2**63)
    """Padding token: its row of the embedding starts as zeros, and lookups do not train this row."""
    layer_types: tuple[str, ...] = ()
    no_rope_layers: tuple[int, ...] | None = None

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
