"""Predicts the time of a schedule by a latency-bandwidth model with contention for links.

A topology is a tree of levels: ranks in nodes, nodes in pods.  Every group of a level has one link up and one down.  A
message crosses the links of each level on which its ends are in different groups, and its latency is that of the
highest such level.  The time of a round is the sum of its longest latency, a fixed time for each message of the busiest
rank, the bytes of the fullest link over its bandwidth, and the bytes that the busiest rank copies or reduces in its
memory.  Rounds do not overlap, so only pipelining by chunks is modelled.

The time is linear in the message size.  ``cost`` evaluates each different round once, with NumPy over all its ranks
(16,384 ranks in seconds).  Rounds that differ only by whole groups of the outermost level are alike.  After Hockney
(1994), LogGP (Alexandrov et al., 1995) and Thakur et al. (2005).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from typing import Any

import numpy as np

from kos.comm.schedules.schedule import Moves, Pairs, Repeat, Schedule
from kos.errors import InvalidArgument


@dataclass(frozen=True)
class Level:
    """Links of groups of ``ranks`` consecutive ranks: seconds, and bytes/s each way.

    ``bandwidth_to_many`` applies if a group has more than one message in flight in the same direction.
    """

    ranks: int
    latency: float
    bandwidth: float
    bandwidth_to_many: float


@dataclass(frozen=True)
class Topology:
    """Levels from the single rank outwards, and the costs of a rank (seconds, bytes/s read + written).

    ``message`` is the time of each message besides the first's latency.
    """

    name: str
    levels: tuple[Level, ...]
    launch: float = 0.0
    message: float = 0.0
    memory_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        sizes = [level.ranks for level in self.levels]
        if sizes[:1] != [1] or any(b <= a or b % a for a, b in pairwise(sizes)):
            raise InvalidArgument(f"levels must grow from 1 rank, each a multiple of the one below, got {sizes}")


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
    seconds, seconds_per_byte = cost(schedule, topology)
    return seconds + seconds_per_byte * nbytes


@lru_cache(maxsize=256)
def cost(schedule: Schedule, topology: Topology) -> tuple[float, float]:
    """The time of ``schedule`` as a line over the message size: seconds, and seconds per byte."""
    chunk = 1 / (schedule.parts * max(schedule.units.values()))  # of the whole
    reach = topology.levels[-1].ranks
    seconds, share = topology.launch, 0.0
    evaluated: dict[bytes, tuple[float, float]] = {}
    for block in schedule.moves():
        for families, times in _different(block, reach):
            families = list(families)
            key = _key(families, reach)
            if key not in evaluated:
                evaluated[key] = _round(families, schedule.ranks, topology)
            fixed, chunks = evaluated[key]
            seconds, share = seconds + times * fixed, share + times * chunks * chunk
    return seconds, share


def _different(block: Iterable[Moves] | Repeat, reach: int) -> Iterator[tuple[Iterable[Moves], int]]:
    """The rounds of ``block`` that differ in cost, for groups of at most ``reach`` ranks, and their numbers."""
    if not isinstance(block, Repeat):
        yield block, 1
        return
    near = min(reach - 1, block.times // 2) if block.shifts else 0
    alike = dict.fromkeys((*range(near), *range(block.times - near, block.times)), 1)
    if far := block.times - 2 * near:
        alike[near] = far
    yield from ((families, times) for k, times in alike.items() for families in block.rounds(k))


def _key(families: list[Moves], reach: int) -> bytes:
    """A key that is equal for rounds of equal cost: the same transfers, shifted by a multiple of ``reach`` ranks."""
    first = min((end.min() for m in families for end in map(np.asarray, (m.src, m.dst)) if end.size), default=0)
    digest = hashlib.blake2b()
    for m in families:
        columns = m.src - first // reach * reach, m.dst - first // reach * reach, m.count
        kinds = [(np.shape(x), np.result_type(x).char) for x in columns]
        digest.update(repr((type(m), m.reduce, m.shape, kinds)).encode())
        for column in columns:
            digest.update(np.asarray(column).tobytes())
    return digest.digest()


def _round(families: list[Moves], ranks: int, topology: Topology) -> tuple[float, float]:
    """(fixed seconds, seconds times bytes of a chunk) of one round."""
    # Chunks that each rank copies or reduces; and by level, messages and chunks of each group, up and down.
    memory = np.zeros(ranks)
    links = [(level, np.zeros((2, 2, -(-ranks // level.ranks)))) for level in topology.levels]
    for m in families:
        if isinstance(m, Pairs):
            src, dst = (np.bincount(np.ravel(end), minlength=ranks) for end in (m.src, m.dst))
            memory += 3 * m.reduce * m.count * dst * (src.sum() - src)
            for level, load in links:
                up, down = (np.add.reduceat(end, np.arange(0, ranks, level.ranks)) for end in (src, dst))
                messages = np.stack([up * (down.sum() - down), down * (up.sum() - up)])
                load += messages, messages * m.count
            continue
        src, dst, count = (x.ravel() for x in np.broadcast_arrays(m.src, m.dst, m.count))
        copies = math.prod(m.shape) // max(len(src), 1)  # chunks add to the shape, not to what differs
        if np.ndim(m.count):
            src, dst, count = (x[count > 0] for x in (src, dst, count))
        memory += copies * np.bincount(dst, count * (3 if m.reduce else 2 * (src == dst)), ranks)
        for level, load in links:
            ends = src // level.ranks, dst // level.ranks
            crossing = ends[0] != ends[1]
            for way, end in enumerate(ends):
                messages = copies * np.bincount(end[crossing], minlength=load.shape[-1])
                load[0, way] += messages
                load[1, way] += (copies * np.bincount(end[crossing], count[crossing], load.shape[-1])
                                 if np.ndim(m.count) else messages * m.count)
    latency = max(level.latency * bool(messages.any()) for level, (messages, _) in links)
    slowest = max(float((chunks / np.where(messages > 1, level.bandwidth_to_many, level.bandwidth)).max())
                  for level, (messages, chunks) in links)
    return (latency + topology.message * float(links[0][1][0].max()),
            slowest + float(memory.max()) / topology.memory_bandwidth)
