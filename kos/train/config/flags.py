"""The command line of ``python -m kos.train``, made from the fields of ``TrainConfig``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import glob
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, get_args

from pydantic.fields import FieldInfo

from kos.commands import program
from kos.errors import ConfigError
from kos.reporting import Parser
from kos.train.config import (
    PRESETS,
    by_source,
    flag_of,
    flatten,
    not_of,
    of_0_2,
    preset_values,
    suggestion,
    unique_keys,
)
from kos.train.config.options import KEYS, Layer, TrainConfig, configure, with_model
from kos.train.model import option_of

NO_PATHS = (None, "stdlib", "auto", "bytes")
"""Values of options with a ``path`` that are no paths."""


class _Once(argparse.Action):
    """Stores the value of a flag.  ConfigError if the flag is given twice: a user may expect both values to count."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise ConfigError(f"{option_string}: expected one value, got {getattr(namespace, self.dest)} and {values}")
        setattr(namespace, self.dest, values)


def _type_of(field: FieldInfo) -> Any:
    """``int | None`` -> ``int``."""
    return next((t for t in get_args(field.annotation) if t is not NoneType), field.annotation)


def _value(field: FieldInfo, text: str) -> Any:
    """The number in ``text`` if the field is a number, otherwise ``text``, which validation refuses."""
    with contextlib.suppress(ValueError):
        return _type_of(field)(text) if _type_of(field) in (int, float) else text
    return text


def _help(field: FieldInfo, default: Any) -> str:
    """The docstring of the field and its default."""
    default = (option_of(field).unset or "none") if default in (None, "", ()) else default
    shown = {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)
    return " ".join(f"{field.description} Default: {shown}.".split()).replace("%", "%%")


def add_plan(group: Any) -> None:
    """Add the flags of ``--plan`` that are not settings of a run."""
    about = "Train nothing: list the layouts of --ranks N, with memory, bytes sent and predicted time of a step."
    group.add_argument("--plan", action="store_true", help=f"{about} Default: train.")
    group.add_argument("--ranks", type=int, metavar="N", help="Ranks to plan for. Default: none, --plan needs it.")
    group.add_argument("--hosts", type=int, metavar="N", help="Plan for ranks on N hosts, as many on each. Default: 1.")
    rate = "Gbit/s that leave each host, to plan for --hosts. Default: none, --hosts needs it."
    group.add_argument("--network", type=float, metavar="X", help=rate)
    group.add_argument("--gpu", metavar="NAME", help="Plan for H200, H100 or A100. Default: the GPU here, else H200.")


def add_flag(group: Any, key: str, default: Any, text: str | None = None) -> None:
    """Add the flag of the setting ``key``.  Its help is ``text``, or else that of the field with the ``default``."""
    field, kind = KEYS[key], dict[str, Any](action=argparse.BooleanOptionalAction)
    if field.annotation is not bool:
        declared = option_of(field)
        metavar = declared.metavar or {int: "N", float: "X", Path: "DIR"}.get(_type_of(field), "NAME")
        action = "append" if declared.several else _Once if key == "val_data" else "store"
        kind = {"metavar": metavar, "type": functools.partial(_value, field), "action": action}
        kind |= {"nargs": "?", "const": "1"} if key == "elastic" else {}
    group.add_argument(flag_of(key), dest=key, help=text or _help(field, default), **kind)


def make_parser() -> argparse.ArgumentParser:
    """One flag per field, grouped; no flag has a default here, so that only the given ones are known."""
    parser = Parser(
        prog=program("kos.train"),
        usage=f"[mpirun -n RANKS] {program('kos.train')} [--preset NAME] [--config FILE] [flags]",
        description="Train a LLaMA. A preset gives the settings, a --config file overrides it, flags override both.",
        epilog="\n".join(["Presets (above: those of tiny):", *(f"  {x:<10} {y.about}" for x, y in PRESETS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups, preset = dict[str, Any](), flatten("preset", preset_values(KEYS["preset"].default))
    for key, field in KEYS.items():
        if not (declared := option_of(field)).flag:
            continue
        if declared.title:
            groups[key] = group = parser.add_argument_group(declared.title)
        add_flag(group, key, preset.get(key, field.default))
    config = "Read settings from a TOML or JSON file, or from the config.json of a run. Default: none."
    groups["preset"].add_argument("--config", action=_Once, metavar="FILE", help=config)
    add_plan(groups["device"])
    return parser


def parse(argv: Sequence[str]) -> TrainConfig:
    """The configuration of a command line. Raises SystemExit after ``--help``.

    ConfigError: an unknown flag, key or preset, or a value of the wrong type or out of range.
    """
    layers = read_command_line(argv)
    preset = next((values["preset"] for _, values in reversed(layers) if "preset" in values), "tiny")
    return configure(preset, layers)


def read_command_line(argv: Sequence[str]) -> list[Layer]:
    """The layers of a command line: the values of ``--config``'s file, the flags, the model of ``--init-from``."""
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].partition("=")[0]
        flags = [flag_of(key) for key, field in KEYS.items() if option_of(field).flag]
        near = suggestion(word, [*flags, "--config"])
        raise ConfigError(f"expected a flag that --help lists{near}, got {word!r}")
    given = vars(arguments)
    if lost := {"plan", "ranks", "gpu", "hosts", "network"} & given.keys():
        how = "; a run has the ranks that its launcher starts: mpirun -n N" if "ranks" in lost else ""
        raise ConfigError(f"--{max(lost)}: expected only together with --plan, got no --plan{how}")
    layers: list[Layer] = []
    if (path := given.pop("config", None)) is not None:
        layers.append((path, read_config_file(Path(path))))
    return with_model([*layers, ("flags", given)])


def overrides(argv: Sequence[str], settings: Sequence[str]) -> str:
    """The end of an error's line: which of its ``settings`` the ``--config`` file sets, and the flags that override it.

    Empty if each of them was typed or has its default.
    """
    layers = read_command_line(argv)
    (source, values), typed = layers[0], dict(layers)["flags"]
    of_file = [key for key, value in flatten(source, values).items() if value is not None and key not in typed]
    keys = [key for name in settings for key in of_file if key.rpartition(".")[2] == name]
    wanted = " ".join(map(_typed, keys))
    return f"; {source} sets {' and '.join(map(flag_of, keys))}: type {wanted} to override it" if keys else ""


def _typed(key: str) -> str:
    """The flag of a setting with its default, or with … for a value that only the user knows."""
    field, flag = KEYS[key], flag_of(key)
    if isinstance(default := field.default, bool):
        return flag if default else flag.replace("--", "--no-", 1)
    known_to_the_user = field.is_required() or default in (None, ()) or field.annotation in (str, str | tuple[str, ...])
    return f"{flag} {'…' if known_to_the_user else default}"


def read_config_file(path: Path) -> Mapping[str, Any]:
    """A TOML or JSON file of configuration keys; also a run's own config.json (its ``config`` part)."""
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"--config: expected a .toml or .json file, got {str(path)!r}")
    try:
        text = path.read_text("utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=unique_keys)
    except OSError as error:
        raise ConfigError(f"--config: expected a readable file, got {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of TOML, JSON and UTF-8
        raise ConfigError(f"--config: expected {path.suffix[1:].upper()}, got {path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config: expected a table of keys, got {path}: {type(values).__name__}")
    return _of_run(path, values) if isinstance(values.get("config"), dict) else values


def _found(folder: str, value: Any) -> Any:
    """The path below the ``folder`` if it is there, else the value."""
    there = os.path.join(folder, str(value))
    return there if value not in NO_PATHS and (os.path.exists(there) or glob.glob(there)) else value


def _of_run(path: Path, run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings in a run's config.json that a run from it has.

    If the folder ``checkpoints`` is beside the file, ``out`` is the folder of the file: it may have been moved.  Files
    that are in the folder in which the run was started are found from any other; the rest may have been moved too.
    """
    if version := of_0_2(run):
        raise ConfigError(f"--config {path}: expected a run of kos 0.3 or later, got one of {version}")
    values, folder = dict(run["config"]), str(run.get("cwd", "."))
    elsewhere = not (os.path.isdir(folder) and os.path.samefile(folder, "."))
    for key in (key for key, field in KEYS.items() if elsewhere and option_of(field).path):
        if isinstance(several := values.get(key), list):
            parts = (str(each).rpartition(":") for each in several)
            values[key] = ["".join([_found(folder, name), *weight]) for name, *weight in parts]
        else:
            values[key] = _found(folder, several)
    if elsewhere:
        named = (str(each).partition("=") for each in values.get("eval_data", ()))
        values["eval_data"] = [f"{name}={_found(folder, source)}" for name, _, source in named]
        fields = by_source(values.get("text_field")).items()
        values["text_field"] = [f"{_found(folder, name)}={field}" if name else field for name, field in fields] or None
    if values.get("resume") != "auto":
        values.pop("resume", None)  # the checkpoint from which that run resumed
    if values.get("epochs") is not None:
        values.pop("steps", None)  # those of its epochs
    for key in not_of(values.get("optimizer", KEYS["optimizer"].default)):
        values.pop(key, None)  # without effect in that run
    if os.path.isdir(path.parent / "checkpoints"):
        values["out"] = str(path.parent)
    return values


def without_effect(
    config: TrainConfig, asked: Mapping[str, Any], ignored: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """The flags that were given but have no effect because of another setting or the data, each with the reason.

    ``ignored`` has the settings that do not apply to the data.
    """
    reasons = {key: reason for key, field in KEYS.items() if (reason := option_of(field).idle(config))} | dict(ignored)
    given = [name for name in reasons if asked[name] not in (KEYS[name].default, [])]
    return [f"{flag_of(name)} ({reasons[name]})" for name in given]
