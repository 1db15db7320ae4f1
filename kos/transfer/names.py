"""Placements of a model's parameters by their names, from files of rules (``rules/*.toml``).

A file of rules has patterns of names.  They say which parameters ranks of tensor parallelism split along rows or
columns, which are stacked from several tensors (``fused``), which are the transpose of a tensor (``transposed``), and
which have their rows padded to a multiple of a number (``padded``).  Tensors in ``copied`` may be
split into fewer parts than there are ranks; neighbouring ranks then hold the same part.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from kos.comm.arguments import check_rank
from kos.errors import InvalidArgument, raised_as
from kos.transfer.arguments import check_at_least, check_expression, check_kind, check_shapes
from kos.transfer.placement import Placement
from kos.transfer.scales import BlockScales

SCALES = "_scale_inv"
"""How the names of scales end in DeepSeek-V3 and vLLM: ``weight_scale_inv`` has the scales of ``weight``."""
_SHOWN = 3  # names of tensors in an error
_EXPRESSIONS, _TABLES = ("rows", "columns", "copied", "transposed"), ("padded", "fused")


def read_rules(name: str) -> Mapping[str, Any]:
    """The rules of a file: "huggingface", "vllm", or the path of a .toml file of your own.  Raises InvalidArgument."""
    path, folder = Path(f"{name}"), resources.files("kos.transfer") / "rules"
    known = sorted(each.name.removesuffix(".toml") for each in folder.iterdir())
    if path.suffix != ".toml" and name not in known:
        raise InvalidArgument(f"rules: expected one of {', '.join(known)} or the path of a .toml file, got {name!r}")
    with raised_as(InvalidArgument, f"{name}: expected a file of rules in TOML", OSError, ValueError):
        text = (folder / f"{name}.toml" if name in known else path).read_text(encoding="utf-8")
        rules = tomllib.loads(text)
    _check_rules(f"{name}", rules)
    return rules


def _check_rules(path: str, rules: Mapping[str, Any]) -> None:
    for key, value in rules.items():
        if key in _EXPRESSIONS:
            check_expression(f"{path}: {key}", value)
        elif key not in _TABLES:
            expected = ", ".join((*_EXPRESSIONS, *_TABLES))
            raise InvalidArgument(f"{path}: expected one of the keys {expected}, got {key}")
        else:
            check_kind(f"{path}: {key}", value, dict, "a table of regular expression = value")
            for pattern, found in value.items():
                where, expression = f"{path}: {key}: {pattern}", check_expression(f"{path}: {key}", pattern)
                if key == "padded":
                    check_at_least(where, found, 1)
                elif not isinstance(found, list) or not found or not all(isinstance(each, str) for each in found):
                    raise InvalidArgument(f"{where}: expected a list of the names of tensors, got {found!r}")
                else:
                    with raised_as(InvalidArgument, f"{where}: expected names with the pattern's groups", re.error):
                        for each in found:
                            expression.sub(each, "")


def placements(
    parameters: Mapping[str, Sequence[int]], tensors: Mapping[str, Sequence[int]], rules: str = "huggingface",
    rank: int = 0, ranks: int = 1,
) -> dict[str, Placement | BlockScales]:  # fmt: skip
    """Where the parameters of rank ``rank`` of ``ranks`` (tensor parallelism) lie in the publisher's tensors.

    ``parameters`` are this rank's names and shapes, ``tensors`` the names and whole shapes of the publisher
    (``read_catalogue(address).offers.shapes``).  A parameter X_scale_inv that the publisher does not have holds the
    scales of X: one for each row if its shape is (rows, 1), otherwise one for each block of 128 x 128.  A placement has
    the shape of the parameter, without the rows that pad it.

    Raises InvalidArgument if a shape does not follow from the rules.
    """
    ranks = check_at_least("ranks", ranks, 1)
    rank = check_rank("rank", rank, ranks)
    parameters, tensors = check_shapes("parameters", parameters), check_shapes("tensors", tensors)
    read, found = read_rules(rules), dict[str, Placement | BlockScales]()
    for name, shape in parameters.items():
        scaled = parameters.get(name.removesuffix(SCALES)) if name.endswith(SCALES) and name not in tensors else None
        if scaled is None:
            found[name] = _placement(name, shape, tensors, read, rank, ranks)
        else:
            of, by_row = name.removesuffix(SCALES), len(scaled) == 2 and shape == (scaled[0], 1)
            found[name] = BlockScales(of, (1, scaled[1])) if by_row else BlockScales(of)
    return found


def only_adapters(tensors: Collection[str]) -> bool:
    """Whether all of these are the A and B of adapters, by their names in peft's files."""
    return bool(tensors) and all(re.search(r"(^|\.)lora_[AB]\.weight$", name) for name in tensors)


def _offered(tensors: Mapping[str, Sequence[int]]) -> str:
    names = ", ".join(list(tensors)[:_SHOWN]) + ", ..." * (len(tensors) > _SHOWN)
    why = "; these are adapters only: --publish-merged publishes the merged model" * only_adapters(tensors)
    return f"it has {len(tensors)} tensors: {names}{why}"


def _placement(
    name: str, shape: tuple[int, ...], tensors: Mapping[str, tuple[int, ...]], rules: Mapping[str, Any],
    rank: int, ranks: int,
) -> Placement:  # fmt: skip
    for pattern, multiple in rules.get("padded", {}).items():
        if re.fullmatch(pattern, name) and shape and (held := tensors.get(name)):
            padded, first = -(-held[0] // multiple) * multiple, min(rank * shape[0], held[0])
            if padded > held[0] and (shape[0] * ranks, *shape[1:]) == (padded, *held[1:]):
                return Placement.cut(held, 0, first, min(shape[0], held[0] - first), name)
    sources = [name]
    for pattern, several in rules.get("fused", {}).items():
        if (match := re.fullmatch(pattern, name)) and name not in tensors:
            sources = [match.expand(each) for each in several]
    if missing := [source for source in sources if source not in tensors]:
        who = f"{name}: " if missing[0] != name else ""
        expected = f"expected the publisher to have {missing[0]}"
        raise InvalidArgument(f"{who}{expected}, got no such tensor; {_offered(tensors)}")
    axis = next((at for at, key in enumerate(("rows", "columns")) if _matches(rules, key, name)), None)
    turned = _matches(rules, "transposed", name)
    rows, left = shape[0] if shape else 1, len(sources)
    found = []
    for source in sources:
        whole, most = tensors[source], None
        if axis is None or ranks == 1:
            part = Placement.whole(whole, source)
        else:
            along = len(whole) - 1 - axis if turned else axis
            if axis == 0 and whole and _matches(rules, "copied", source):  # the parts follow from the rank's rows
                most = max(1, whole[along] // max(1, rows // left))
            part = Placement.shard(whole, along, rank, ranks, source, most)
        part = part.transposed if turned else part
        rows, left = rows - (part.shape[0] if part.shape else 1), left - 1
        found.append(part)
    made = found[0] if len(found) == 1 else Placement.joined(found)
    if made.shape != shape:
        how = f"{' + '.join(sources)} on rank {rank} of {ranks}"
        why = ", the transpose, which needs the rule `transposed`" * (shape == made.shape[::-1])
        raise InvalidArgument(f"{name}: expected shape {made.shape} of {how}, got {shape}{why}")
    return made


def _matches(rules: Mapping[str, Any], key: str, name: str) -> bool:
    return key in rules and re.search(f"(^|\\.)({rules[key]})$", name) is not None
