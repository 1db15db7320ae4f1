"""How long a schedule takes, by a latency-bandwidth model with contention for links.

A topology is a tree of levels: ranks in nodes, nodes in pods.  Every group of a level has one link up and
one down; a message crosses the links of each level on which its ends lie in different groups, and its latency
is that of the highest such level.  A round takes its longest latency, a fixed time for each message that the
busiest rank sends or receives, the bytes of the fullest link over its bandwidth, and the bytes that the busiest
rank copies or reduces in its own memory.  Rounds follow one another, so pipelining shows only as far as the
schedule spells it out in chunks.

All of it is linear in the message size: ``cost`` walks the rounds once, with NumPy over all ranks of a round
(16,384 ranks in seconds).  After Hockney (1994), LogGP (Alexandrov et al., 1995) and Thakur et al. (2005).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from kos.comm.schedules.schedule import Moves, Schedule
from kos.errors import InvalidArgument


@dataclass(frozen=True)
class Level:
    """Links of groups of ``ranks`` consecutive ranks: seconds, and bytes/s each way.

    ``bandwidth_to_many`` holds where a group has more than one message under way in the same direction.
    """

    ranks: int
    latency: float
    bandwidth: float
    bandwidth_to_many: float


@dataclass(frozen=True)
class Topology:
    """Levels from the single rank outwards, and what a rank itself costs (seconds, bytes/s read + written).

    ``message`` is the time that a rank needs for each message besides the first's latency.
    """

    name: str
    levels: tuple[Level, ...]
    launch: float = 0.0
    message: float = 0.0
    memory_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        sizes = [level.ranks for level in self.levels]
        if not sizes or sizes[0] != 1 or sizes != sorted(set(sizes)):
            raise InvalidArgument(f"levels must grow from 1 rank, got {sizes}")


FEW = 8
"""Rounds of fewer families are kept to compare the next with; those of large one-shot rounds are gigabytes."""


class Cost(NamedTuple):
    """A schedule's time on a topology: ``seconds + seconds_per_byte * bytes``."""

    seconds: float
    seconds_per_byte: float
    rounds: int


def calibration() -> dict[str, Any]:
    """The calibration table: topologies by name, with provenance and measured points."""
    return dict(json.loads(resources.files("kos.comm.schedules").joinpath("calibration.json").read_text()))


@lru_cache
def topology(name: str) -> Topology:
    """A topology of the calibration table.  Raises InvalidArgument for a name that is not in it."""
    table = calibration()
    if name not in table:
        raise InvalidArgument(f"unknown topology {name!r}, expected one of {', '.join(table)}")
    entry = table[name]
    levels = tuple(Level(**level) for level in entry["levels"])
    return Topology(name, levels, entry["launch"], entry["message"], entry["memory_bandwidth"])


def simulate(schedule: Schedule, topology: Topology, nbytes: float) -> float:
    """Seconds for ``nbytes`` of the rank's whole vector: its larger buffer, as nccl-tests counts them."""
    line = cost(schedule, topology)
    return line.seconds + line.seconds_per_byte * nbytes


@lru_cache(maxsize=256)
def cost(schedule: Schedule, topology: Topology) -> Cost:
    """The time of ``schedule`` as a line over the message size."""
    chunk = 1 / (schedule.parts * max(schedule.units.values()))  # of the whole
    seconds, share, rounds = topology.launch, 0.0, 0
    former: list[Moves] | None = None
    fixed = chunks = 0.0
    for families in map(iter, schedule.moves()):
        first = list(islice(families, FEW))
        if former is None or not _alike(first, former):
            fixed, chunks = _round(chain(first, families), schedule.ranks, topology)
        former = first if len(first) < FEW else None
        seconds, share, rounds = seconds + fixed, share + chunks * chunk, rounds + (fixed > 0 or chunks > 0)
    return Cost(seconds, share, rounds)


def _alike(families: Sequence[Moves], former: Sequence[Moves]) -> bool:
    """Whether two rounds cost the same, as those of a ring do."""
    return len(families) == len(former) and all(
        m.src is o.src and m.dst is o.dst and m.count is o.count and m.reduce == o.reduce
        and np.shape(m.chunk) == np.shape(o.chunk) for m, o in zip(families, former, strict=True))


def _round(families: Iterable[Moves], ranks: int, topology: Topology) -> tuple[float, float]:
    """(fixed seconds, seconds times bytes of a chunk) of one round."""
    memory, latency = np.zeros(ranks), 0.0  # chunks that each rank reads and writes of its own accord
    groups = [-(-ranks // level.ranks) for level in topology.levels]
    messages, chunks = ([np.zeros((2, n)) for n in groups] for _ in range(2))  # up and down, by group of a level
    for m in families:
        # Ranks and counts are spread out against one another only; what chunks add to the shape is a factor.
        src, dst, counts = (a.ravel() for a in np.broadcast_arrays(m.src, m.dst, m.count))
        shape = np.broadcast_shapes(*map(np.shape, (m.src, m.dst, m.chunk, m.to_chunk, m.count)))
        copies = math.prod(shape) // max(len(src), 1)
        count: Any = m.count  # one for all is summed faster
        if np.ndim(count):
            src, dst, count = _where(counts > 0, src, dst, counts)
        here, added = (dst, count) if m.reduce else _where(src == dst, dst, count)
        memory += (3 if m.reduce else 2) * copies * _sums(here, added, ranks)
        for k, level in enumerate(topology.levels):
            up, down = src // level.ranks, dst // level.ranks
            up, down, src, dst, count = _where(up != down, up, down, src, dst, count)
            if not len(src):
                break
            latency = max(latency, level.latency)
            for way, group in enumerate((up, down)):
                number = np.bincount(group, minlength=groups[k]) * copies
                messages[k][way] += number
                chunks[k][way] += _sums(group, count, groups[k]) * copies if np.ndim(count) else number * count
    slowest = max(float((c / np.where(n > 1, level.bandwidth_to_many, level.bandwidth)).max())
                  for level, n, c in zip(topology.levels, messages, chunks, strict=True))
    return (latency + topology.message * float(messages[0].max()),
            slowest + float(memory.max()) / topology.memory_bandwidth)


def _where(mask: np.ndarray, *arrays: Any) -> tuple[Any, ...]:
    """The entries of arrays that ``mask`` selects; a single number stands for all of them."""
    return arrays if mask.all() else tuple(a[mask] if np.ndim(a) else a for a in arrays)


def _sums(groups: np.ndarray, count: Any, size: int) -> np.ndarray:
    """By group, the sum of what ``count`` has for its entries."""
    return np.bincount(groups, count, size) if np.ndim(count) else np.bincount(groups, minlength=size) * count
