"""Which all-reduce kernel of ``kos.comm.gpu.peer.engine`` is launched how, by size: a part of a tuning table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from kos.errors import InvalidArgument

PACKETS = ("one_shot", "two_shot", "ring", "tree")
ALGORITHMS = (*PACKETS, "direct", "push", "specialized", "copies")
T = TypeVar("T")
_RANGES = {"blocks": (0, 128), "threads": (32, 1024), "tile": (256, 65536), "pieces": (1, 8)}
_KINDS = ("symmetric", "ordinary")


@dataclass(frozen=True)
class Launch:
    """An algorithm and how it is launched; 0 blocks: as many as the packets need."""

    algorithm: str
    blocks: int = 0
    threads: int = 512
    tile: int = 8192  # bytes; of specialized
    pieces: int = 1  # of copies

    def as_json(self) -> dict[str, Any]:
        """Without what is as it always is."""
        usual = asdict(Launch(self.algorithm))
        return {name: value for name, value in asdict(self).items() if name == "algorithm" or value != usual[name]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Launch:
        """Raises InvalidArgument for what no kernel can be launched with."""
        launch = Launch(**data)
        if launch.algorithm not in ALGORITHMS:
            raise InvalidArgument(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {launch.algorithm!r}")
        for name, (least, most) in _RANGES.items():
            value = getattr(launch, name)
            if type(value) is not int or not least <= value <= most:
                raise InvalidArgument(f"{launch.algorithm}: {name}: expected {least} to {most}, got {value!r}")
        if launch.threads % 32:
            raise InvalidArgument(f"{launch.algorithm}: threads: expected a multiple of 32, got {launch.threads}")
        return launch


Rows = Sequence[tuple[int | None, T]]
"""(bytes up to which, something), sorted; the last row has no end: None."""


@dataclass(frozen=True)
class Launches:
    """The launches of a group: where both buffers are symmetric, and elsewhere."""

    symmetric: Rows[Launch]
    ordinary: Rows[Launch]

    def pick(self, nbytes: int, symmetric: bool) -> Launch:
        """Where packets are as fast as what reaches into symmetric buffers, it does not matter where buffers lie."""
        launch = pick(self.symmetric, nbytes) if symmetric else None
        return pick(self.ordinary, nbytes) if launch is None or launch.algorithm in PACKETS else launch

    def as_json(self) -> dict[str, Any]:
        return {kind: [[limit, launch.as_json()] for limit, launch in getattr(self, kind)] for kind in _KINDS}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Launches:
        """The reverse of ``as_json``.  Raises InvalidArgument for anything else."""
        symmetric, ordinary = (
            tuple((limit, Launch.from_json(row)) for limit, row in by_size(kind, data[kind])) for kind in _KINDS
        )
        return Launches(symmetric, ordinary)


def pick(rows: Rows[T], nbytes: int) -> T:
    """What the rows hold for so many bytes."""
    return next(value for limit, value in rows if limit is None or nbytes <= limit)


def by_size(name: str, rows: Any) -> list[tuple[int | None, Any]]:
    """The rows, if they grow up to one without end; raises InvalidArgument for others."""
    limits = [limit for limit, _ in rows]
    whole = all(type(limit) is int and 0 < limit < 1 << 63 for limit in limits[:-1])
    if limits[-1:] != [None] or not whole or sorted(set(limits[:-1])) != limits[:-1]:
        raise InvalidArgument(f"{name}: expected bytes that grow, the last null, got {limits}")
    return [(limit, value) for limit, value in rows]


TABLES = Path(__file__).parents[2] / "tuning" / "tables"
DEFAULT = Launches.from_json(json.loads((TABLES / "nvidia-h200-4.json").read_text())["launches"])
"""What is taken where nothing was measured."""
