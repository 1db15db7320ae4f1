"""Which all-reduce kernel of ``kos.comm.peer`` is launched how, by size: data that a tuning table may replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """An algorithm and how it is launched; 0 blocks: as many as the packets need."""

    algorithm: str
    blocks: int = 0
    threads: int = 512
    unroll: int = 1  # of direct
    tile: int = 8192  # bytes; of bulk
    stages: int = 3  # of bulk
    pieces: int = 1  # of copies


Rows = Sequence[tuple[float, Launch]]
"""(bytes up to which, launch), sorted; the last row has no end."""


@dataclass(frozen=True)
class Launches:
    """The launches of a group: where both buffers are symmetric, and elsewhere."""

    symmetric: Rows
    ordinary: Rows

    def pick(self, nbytes: int, symmetric: bool) -> Launch:
        rows = self.symmetric if symmetric else self.ordinary
        return next(launch for limit, launch in rows if nbytes <= limit)

    def as_json(self) -> dict[str, Any]:
        """A limit of None has no end."""
        return {
            kind: [[None if limit == _END else limit, asdict(launch)] for limit, launch in getattr(self, kind)]
            for kind in _KINDS
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Launches:
        """The reverse of ``as_json``."""
        rows = ([(_END if limit is None else limit, Launch(**row)) for limit, row in data[kind]] for kind in _KINDS)
        return Launches(*rows)


_KINDS = ("symmetric", "ordinary")
_END = float("inf")
_PACKETS = Launch("one_shot", threads=128)

# H200, NVSwitch, driver 580, 2026-11-20: benchmarks/results/peer_kernels_4xH200.json.
DEFAULT = Launches(
    symmetric=(
        (192 << 10, _PACKETS),
        (384 << 10, Launch("two_shot", threads=128)),
        (1 << 20, Launch("direct", blocks=32)),
        (6 << 20, Launch("direct", blocks=64)),
        (128 << 20, Launch("push", blocks=128)),
        (_END, Launch("copies", pieces=2)),
    ),
    ordinary=(
        (192 << 10, _PACKETS),
        (768 << 10, Launch("two_shot", threads=128)),
        (2 << 20, Launch("two_shot", threads=256)),
        (_END, Launch("push", blocks=128)),
    ),
)
