"""The command line of ``python -m kos.train``, made from the fields of ``TrainConfig``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import glob
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic.fields import FieldInfo

from kos.commands import program
from kos.errors import CheckpointError, ConfigError
from kos.reporting import Parser
from kos.train.checkpoint import adapter
from kos.train.checkpoint.huggingface import read_config
from kos.train.config import PRESETS, by_source, flatten, preset_values
from kos.train.config.optimizers import not_of
from kos.train.config.options import FINE_TUNING_WARMUP, KEYS, TrainConfig, build, flag_of
from kos.train.config.other_names import suggestion

METAVARS = {
    "resume": "DIR|auto", "init_from": "DIR", "prompt": "TEXT",
    "data": "NAME|PATH[:WEIGHT]", "val_data": "NAME|PATH", "eval_data": "NAME=PATH", "tokenizer": "NAME|PATH",
    "text_field": "[SOURCE=]NAME", "encoding": "[SOURCE=]NAME", "elastic": "MIN[:MAX]", "join": "ADDRESS|FILE",
    "keep_best": "METRIC", "freeze": "PATTERN",
}  # fmt: skip


FINE_TUNING_LR = 2e-5
"""The peak learning rate with ``--init-from``.  Source: Stanford Alpaca (tatsu-lab/stanford_alpaca)."""

ADAPTERS_LR = 2e-4
"""The same with ``--lora``.  Source: QLoRA (Dettmers et al. 2023, arXiv:2305.14314), for models of up to 13b."""

FINE_TUNING_SEQ_LEN = 1024
"""The largest default of ``--seq-len`` with ``--init-from``. A model's context may be 131,072 tokens, for which few
machines have the memory. The default does not depend on the machine, so that results do not either."""

PATHS = ("data", "val_data", "tokenizer", "init_from")
NAMES = (None, "stdlib", "tinyshakespeare", "auto", "bytes", "chars")
"""Values of ``PATHS`` that are no paths."""

SEVERAL = ("data", "eval_data", "text_field", "encoding", "tracker", "lora_targets", "freeze")
"""Flags that can be repeated."""

GROUPS = {
    "preset": "Model", "data": "Data", "device": "Ranks and layout", "steps": "Length and output",
    "optimizer": "Optimizer", "lora": "Adapters and frozen weights",
    "eval_every": "Validation and sample", "dtype": "Precision", "save_every": "Checkpoints",
    "log_every": "Logging", "micro_batch_size": "Performance", "show_data": "Debugging",
    "model.model_type": "Shape of the model (a preset or --init-from gives it)",
}  # fmt: skip
"""The groups of ``--help``: the first setting of each, and its title."""


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
    default = _unset(field) if default in (None, "", ()) else default
    shown = {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)
    return " ".join(f"{field.description} Default: {shown}.".split()).replace("%", "%%")


def _unset(field: FieldInfo) -> Any:
    """What a default of None, or an empty default, means."""
    return field.json_schema_extra["unset"] if isinstance(field.json_schema_extra, dict) else "none"


def add_plan(group: Any) -> None:
    """Add the flags of ``--plan`` that are not settings of a run."""
    about = "Train nothing: list the layouts of --ranks N, with memory, bytes sent and predicted time of a step."
    group.add_argument("--plan", action="store_true", help=f"{about} Default: train.")
    group.add_argument("--ranks", type=int, metavar="N", help="Ranks to plan for. Default: none, --plan needs it.")
    group.add_argument("--hosts", type=int, metavar="N", help="Plan for ranks on N hosts, as many on each. Default: 1.")
    rate = "Gbit/s that leave each host, to plan for --hosts. Default: none, --hosts needs it."
    group.add_argument("--network", type=float, metavar="X", help=rate)
    group.add_argument("--gpu", metavar="NAME", help="Plan for H200, H100 or A100. Default: the GPU here, else H200.")


def add_flag(group: Any, key: str, default: Any) -> None:
    """Add the flag of the setting ``key``, whose help names the ``default``."""
    field, kind = KEYS[key], dict[str, Any](action=argparse.BooleanOptionalAction)
    if field.annotation is not bool:
        metavar = METAVARS.get(key, {int: "N", float: "X", Path: "DIR"}.get(_type_of(field), "NAME"))
        action = {**dict.fromkeys(SEVERAL, "append"), "val_data": _Once}.get(key, "store")
        kind = {"metavar": metavar, "type": functools.partial(_value, field), "action": action}
        kind |= {"nargs": "?", "const": "1"} if key == "elastic" else {}
    group.add_argument(flag_of(key), dest=key, help=_help(field, default), **kind)


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
    groups, defaults = dict[str, Any](), TrainConfig.from_preset()
    for key, field in KEYS.items():
        if key in GROUPS:
            groups[key] = group = parser.add_argument_group(GROUPS[key])
        if isinstance(field.json_schema_extra, dict):
            add_flag(group, key, attrgetter(key)(defaults))
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
    first = [(f"preset {preset}", preset_values(preset))]
    return build([*first, *fine_tuning([*first, *layers]), *layers])


def fine_tuning(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The defaults with ``--init-from``, above those of the preset, which are for random weights."""
    merged = {key: value for source, values in layers for key, value in flatten(source, values).items()}
    if merged.get("init_from") is None:
        return []
    steps, context = merged.get("steps"), merged.get("model.max_position_embeddings")
    values: dict[str, Any] = {"lr": FINE_TUNING_LR if merged.get("lora") is None else ADAPTERS_LR}
    if merged.get("epochs") is not None:  # of which the data say how many steps they are
        values["warmup_steps"] = None
    elif isinstance(steps, int):  # else refused by ``build``
        values["warmup_steps"] = math.ceil(FINE_TUNING_WARMUP * steps)
    if isinstance(context, int):
        values["seq_len"] = min(context, FINE_TUNING_SEQ_LEN)
    return [("preset of fine-tuning", values)]


def read_command_line(argv: Sequence[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """The layers of a command line: the values of ``--config``'s file, the flags, the model of ``--init-from``."""
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].partition("=")[0]
        flags = [flag_of(key) for key, field in KEYS.items() if isinstance(field.json_schema_extra, dict)]
        near = suggestion(word, [*flags, "--config"])
        raise ConfigError(f"expected a flag that --help lists{near}, got {word!r}")
    given = vars(arguments)
    if lost := {"plan", "ranks", "gpu", "hosts", "network"} & given.keys():
        how = "; a run has the ranks that its launcher starts: mpirun -n N" if "ranks" in lost else ""
        raise ConfigError(f"--{max(lost)}: expected only together with --plan, got no --plan{how}")
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if (path := given.pop("config", None)) is not None:
        layers.append((path, read_config_file(Path(path))))
    layers.append(("flags", given))
    merged = {key: value for _, values in layers for key, value in values.items()}
    folder, resumes = merged.get("init_from"), "model" in merged and merged.get("resume") is not None
    if not isinstance(folder, str) or (resumes and not os.path.exists(folder)):  # the run's config.json has the model
        return layers
    return [*layers, model_of(Path(folder), layers)]


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


def model_of(folder: Path, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[str, Mapping[str, Any]]:
    """The model of a Hugging Face folder as a layer above ``layers``, which may leave its shape open.

    Raises ConfigError if ``layers`` have another shape than the folder. They may have other initial weights, and for a
    LLaMA another context.
    """
    run = folder / "checkpoints"
    if os.path.isdir(run):  # else read_config says why not
        raise ConfigError(f"--init-from: expected a folder of weights, as {run / 'step-N'}, got the run {folder}")
    adapters = dict[str, Any]()
    try:
        if adapter.is_folder(folder):
            lora, folder = adapter.read(folder, trains=True)
            adapters = dict(zip(("lora", "lora_alpha", "lora_targets"), lora, strict=True))
        model = read_config(folder)
    except CheckpointError as error:
        raise ConfigError(f"--init-from: {error}") from None
    shape: dict[str, Any] = {"model_type": model.model_type, **vars(model)}
    del shape["lora"]
    shape["rope_scaling"] = model.rope_scaling and model.rope_scaling.model_dump()
    given = {key: (source, got) for source, values in layers for key, got in flatten(source, values).items()}
    for key, (source, got) in given.items():
        where = flag_of(key) if source == "flags" else f"{source}: {key}"
        if got is not None and key in adapters and (tuple(got) if isinstance(got, list) else got) != adapters[key]:
            raise ConfigError(f"{where}: expected {adapters[key]} of the adapters in --init-from, got {got}")
        name = key.removeprefix("model.")
        if name not in shape or got is None:
            continue
        expected, got = shape[name], tuple(got) if isinstance(got, list) else got  # JSON has no tuples
        if name in model.may_differ:
            del shape[name]
        elif ({**expected, **got} if isinstance(expected, dict) and isinstance(got, Mapping) else got) != expected:
            wanted = _unset(KEYS[key]) if expected is None else expected
            raise ConfigError(f"{where}: expected {wanted}, which the model in {folder} has, got {got}")
    return str(folder / "config.json"), {"model": shape, **adapters}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The table of these keys; ValueError for a duplicate key, which TOML refuses and ``json`` silently overrides."""
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"the key {twice[0]!r} twice")
    return dict(pairs)


def read_config_file(path: Path) -> Mapping[str, Any]:
    """A TOML or JSON file of configuration keys; also a run's own config.json (its ``config`` part)."""
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"--config: expected a .toml or .json file, got {str(path)!r}")
    try:
        text = path.read_text("utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=_once)
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
    return there if value not in NAMES and (os.path.exists(there) or glob.glob(there)) else value


def _of_run(path: Path, run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings in a run's config.json that a run from it has.

    If the folder ``checkpoints`` is beside the file, ``out`` is the folder of the file: it may have been moved.  Files
    that are in the folder in which the run was started are found from any other; the rest may have been moved too.
    """
    values, folder = dict(run["config"]), str(run.get("cwd", "."))
    elsewhere = not (os.path.isdir(folder) and os.path.samefile(folder, "."))
    for key in PATHS if elsewhere else ():
        if isinstance(several := values.get(key), list):
            parts = (str(each).rpartition(":") for each in several)
            values[key] = ["".join([_found(folder, name), *weight]) for name, *weight in parts]
        else:
            values[key] = _found(folder, several)
    if elsewhere:
        named = (str(each).partition("=") for each in values.get("eval_data", ()))
        values["eval_data"] = [f"{name}={_found(folder, source)}" for name, _, source in named]
        for key in ("text_field", "encoding"):
            if key in values:
                each = by_source(values[key]).items()
                values[key] = [f"{_found(folder, name)}={value}" if name else value for name, value in each] or None
    if values.get("resume") != "auto":
        values.pop("resume", None)  # the checkpoint from which that run resumed
    if values.get("epochs") is not None:
        values.pop("steps", None)  # those of its epochs
    for key in not_of(values.get("optimizer", KEYS["optimizer"].default)):
        values.pop(key, None)  # without effect in that run
    if os.path.isdir(path.parent / "checkpoints"):
        values["out"] = str(path.parent)
    return values
