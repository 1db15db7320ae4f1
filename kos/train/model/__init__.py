"""How a setting is declared: ``Section``, ``option``, a field that is also a flag, and ``one_line``, an error's text.

The settings of a model (``kos.train.model.shape``) and those of a run (``kos.train.config``) are such sections.  The
command line imports this module, so it imports neither NumPy nor a layer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from kos.errors import SettingError


class Section(BaseModel):
    """A section of a configuration, with typed values; unknown keys are refused.

    Its validator is built at the first use, because ``--help`` does not need it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )


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
    """What a field declares of itself, besides its type, its bounds, and its help, which is the field's docstring."""

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

    flag: bool = True
    """Whether there is a flag; else only files have the setting."""

    optional: bool = False
    """Of a model: whether only some families have the setting (``LlamaConfig.takes``)."""

    gpt2: str = ""
    """Of a model: the key in a GPT-2's ``config.json``, if that is not a LLaMA's."""


def option(default: Any = ..., unset: str = "", changes: Changes = "bits", **declared: Any) -> Any:
    """A field that is also a flag; without ``default`` the preset gives the value.

    ``declared`` are fields of ``Option``, and bounds and other arguments of pydantic's ``Field``.
    """
    of_flag = {name: declared.pop(name) for name in Option._fields if name in declared}
    extra: Any = {"option": Option(unset, changes, **of_flag)}
    return Field(default, json_schema_extra=extra, **declared)


def option_of(field: FieldInfo) -> Option:
    """What a field declares of itself; a field that is not an ``option`` has no flag."""
    extra: Any = field.json_schema_extra
    return extra["option"] if isinstance(extra, dict) else Option(flag=False)


EXPECTED = {"path_type": "a path", "model_type": "a table of keys"}
"""Of the types of pydantic's errors that have no such word in their text."""


def one_line(
    error: ValidationError, labels: Mapping[str, str] = MappingProxyType({}),
    near: Callable[[str, Iterable[str]], str] = lambda word, known: "",
) -> str:  # fmt: skip
    """The first error that pydantic found, as ``where: expected X, got Y``.

    ``labels`` gives the name of each key that the text has, ``near`` a hint about an unknown key.
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
        hint = "" if path[depth:] else near(key, [x for x in labels if x != key])
        return f"{where}: expected a known key{hint}, got {path[-1]!r}"
    expected = EXPECTED.get(kind) or first["msg"].partition(" should ")[2].removeprefix("be ").removeprefix("have ")
    return f"{where}: expected {'a number ' * kind.startswith(('greater', 'less'))}{expected}, got {reprlib.repr(got)}"


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`` (closest: X)``, or nothing if the similarity of all, from 0 to 1, is below ``cutoff``."""
    near = get_close_matches(word, known, n=1, cutoff=cutoff)
    return f" (closest: {near[0]})" if near else ""
