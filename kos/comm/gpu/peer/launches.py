"""Launches of the kernels of ``peer``: their occupancy, and those of an all-reduce by size, as in a tuning table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kos.errors import InvalidArgument

PACKETS = ("one_shot", "two_shot", "ring", "tree")
IN_RANK_ORDER = ("one_shot", "two_shot", "direct", "push", "specialized", "copies")
"""The algorithms that a tuning table may name.  They add in rank order, which ``deterministic=True`` promises."""
T = TypeVar("T")
_RANGES = {"blocks": (0, 128), "threads": (32, 1024), "tile": (256, 65536), "pieces": (1, 8)}
_KINDS = ("symmetric", "ordinary")


class Occupancy(NamedTuple):
    """The blocks of a launch, all resident at once, and how many such blocks a multiprocessor can hold."""

    blocks: int
    blocks_per_sm: int

    def merged(self, other: Occupancy) -> Occupancy:
        """The occupancy of a communicator that launches both, one after another."""
        return Occupancy(max(self.blocks, other.blocks), min(self.blocks_per_sm, other.blocks_per_sm))


NO_OCCUPANCY = Occupancy(0, 1 << 30)
"""The occupancy of a launch that has no kernels.  The occupancy of every other launch is larger."""


@dataclass(frozen=True)
class KernelConfig:
    """An algorithm and its launch parameters; 0 blocks: as many as the packets need."""

    algorithm: str
    blocks: int = 0
    threads: int = 512
    tile: int = 8192  # bytes; of specialized
    pieces: int = 1  # of copies

    def as_json(self) -> dict[str, Any]:
        """The fields that differ from the defaults."""
        defaults = asdict(KernelConfig(self.algorithm))
        return {name: value for name, value in asdict(self).items() if name == "algorithm" or value != defaults[name]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> KernelConfig:
        """Raises InvalidArgument for values that no table may have."""
        launch = KernelConfig(**data)
        if launch.algorithm not in IN_RANK_ORDER:
            raise InvalidArgument(f"algorithm: expected one of {', '.join(IN_RANK_ORDER)}, got {launch.algorithm!r}")
        for name, (least, most) in _RANGES.items():
            value = getattr(launch, name)
            if type(value) is not int or not least <= value <= most:
                raise InvalidArgument(f"{launch.algorithm}: {name}: expected {least} to {most}, got {value!r}")
        if launch.threads % 32:
            raise InvalidArgument(f"{launch.algorithm}: threads: expected a multiple of 32, got {launch.threads}")
        return launch


Rows = Sequence[tuple[int | None, T]]
"""(largest number of bytes, value), sorted; None in the last row is no limit."""


@dataclass(frozen=True)
class Launches:
    """The launches of a group: with both buffers symmetric, and otherwise."""

    symmetric: Rows[KernelConfig]
    ordinary: Rows[KernelConfig]

    def as_json(self) -> dict[str, Any]:
        return {kind: [[limit, launch.as_json()] for limit, launch in getattr(self, kind)] for kind in _KINDS}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Launches:
        """The reverse of ``as_json``.  Raises InvalidArgument for anything else."""
        symmetric, ordinary = (
            tuple((limit, KernelConfig.from_json(row)) for limit, row in by_size(kind, data[kind])) for kind in _KINDS
        )
        return Launches(symmetric, ordinary)


def pick(rows: Rows[T], nbytes: int) -> T:
    """The value of the row for ``nbytes``."""
    return next(value for limit, value in rows if limit is None or nbytes <= limit)


def by_size(name: str, rows: Any) -> list[tuple[int | None, Any]]:
    """The rows; raises InvalidArgument unless their limits increase and the last is null."""
    limits = [limit for limit, _ in rows]
    whole = all(type(limit) is int and 0 < limit < 1 << 63 for limit in limits[:-1])
    if limits[-1:] != [None] or not whole or sorted(set(limits[:-1])) != limits[:-1]:
        raise InvalidArgument(f"{name}: expected increasing sizes, the last null, got {limits}")
    return [(limit, value) for limit, value in rows]


TABLES = Path(__file__).parents[2] / "tuning" / "tables"
DEFAULT = Launches.from_json(json.loads((TABLES / "nvidia-h200-4.json").read_text())["launches"])
"""The launches of an unmeasured machine."""
