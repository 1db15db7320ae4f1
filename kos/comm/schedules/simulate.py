"""How long a schedule takes, by a latency-bandwidth model with contention for links.

A topology is a tree of levels: ranks in nodes, nodes in pods.  Every group of a level has one link up and
one down; a message crosses the links of each level on which its ends lie in different groups, and its latency
is that of the highest such level.  A round takes its longest latency, a fixed time for each message that the
busiest rank sends or receives, the bytes of the fullest link over its bandwidth, and the bytes that the busiest
rank copies or reduces in its own memory.  Rounds follow one another, so pipelining shows only as far as the
schedule spells it out in chunks.

All of it is linear in the message size: ``cost`` walks the rounds once, with NumPy over all ranks of a round
(16,384 ranks in seconds), and ``simulate`` evaluates a line.  After Hockney (1994), LogGP (Alexandrov et al.,
1995) and Thakur et al. (2005).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

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
    memory_bandwidth: float = float("inf")

    def __post_init__(self) -> None:
        sizes = [level.ranks for level in self.levels]
        if not sizes or sizes[0] != 1 or sizes != sorted(set(sizes)):
            raise InvalidArgument(f"levels must grow from 1 rank, got {sizes}")


@dataclass(frozen=True)
class Cost:
    """A schedule's time on a topology: ``seconds + seconds_per_byte * bytes``."""

    seconds: float
    seconds_per_byte: float
    rounds: int


def calibration() -> dict[str, Any]:
    """The calibration table: topologies by name, with provenance and measured points."""
    text = resources.files("kos.comm.schedules").joinpath("calibration.json").read_text()
    return dict(json.loads(text))


@lru_cache
def topology(name: str) -> Topology:
    """A topology of the calibration table.  Raises InvalidArgument for a name that is not in it."""
    table = calibration()
    if name not in table:
        raise InvalidArgument(f"unknown topology {name!r}, expected one of {', '.join(table)}")
    entry = table[name]
    return Topology(name, tuple(Level(**level) for level in entry["levels"]), entry["launch"],
                    entry["message"], entry["memory_bandwidth"])


def simulate(schedule: Schedule, topology: Topology, nbytes: float) -> float:
    """Seconds for ``nbytes`` of the rank's whole vector: its larger buffer, as nccl-tests counts them."""
    line = cost(schedule, topology)
    return line.seconds + line.seconds_per_byte * nbytes


@lru_cache(maxsize=256)
def cost(schedule: Schedule, topology: Topology) -> Cost:
    """The time of ``schedule`` as a line over the message size."""
    chunk = 1 / (schedule.parts * max(schedule.units.values()))  # of the whole
    seconds, share, rounds = topology.launch, 0.0, 0
    meter = _Meter(schedule.ranks, topology)
    for families in schedule.moves():
        fixed, chunks = meter.round(families)
        seconds, share, rounds = seconds + fixed, share + chunks * chunk, rounds + (fixed > 0 or chunks > 0)
    return Cost(seconds, share, rounds)


@dataclass(frozen=True)
class _Load:
    """What one family of moves puts on ranks and links, in messages and chunks."""

    latency: float
    links: tuple[tuple[np.ndarray, np.ndarray], ...]  # (messages, chunks) by link; two (up, down) a level
    memory: np.ndarray | int  # chunks read and written by each rank, of its own accord

    def seconds(self, topology: Topology) -> tuple[float, float]:
        """(fixed seconds, seconds times bytes of a chunk)."""
        slowest = 0.0
        for k, (messages, chunks) in enumerate(self.links):
            level = topology.levels[k // 2]
            bandwidth = np.where(messages > 1, level.bandwidth_to_many, level.bandwidth)
            slowest = max(slowest, float((chunks / bandwidth).max(initial=0)))
        busiest = max((float(messages.max()) for messages, _ in self.links[:2]), default=0.0)
        return (self.latency + topology.message * busiest,
                slowest + float(np.max(self.memory)) / topology.memory_bandwidth)


class _Meter:
    """Measures rounds; remembers the last family and the last round, as rings repeat the same one."""

    def __init__(self, ranks: int, topology: Topology) -> None:
        self.ranks, self.topology = ranks, topology
        self.last_moves: Moves | None = None
        self.last_load: _Load | None = None
        self.last_round: tuple[_Load, tuple[float, float]] | None = None

    def round(self, families: Iterable[Moves]) -> tuple[float, float]:
        """(fixed seconds, seconds times bytes of a chunk) of one round."""
        total: _Load | None = None
        for family in families:
            load = self._load(family)
            total = load if total is None else _together(total, load)
        if total is None:
            return 0.0, 0.0
        if self.last_round is None or self.last_round[0] is not total:
            self.last_round = total, total.seconds(self.topology)
        return self.last_round[1]

    def _load(self, m: Moves) -> _Load:
        last = self.last_moves
        if last is None or self.last_load is None or not (
                m.src is last.src and m.dst is last.dst and m.count is last.count and m.reduce == last.reduce
                and np.shape(m.chunk) == np.shape(last.chunk)):
            self.last_moves, self.last_load = m, self._measure(m)
        return self.last_load

    def _measure(self, m: Moves) -> _Load:
        # Ranks and counts are spread out against one another only; what chunks add to the shape is a factor.
        src, dst, count = (a.ravel() for a in np.broadcast_arrays(m.src, m.dst, m.count))
        shape = np.broadcast_shapes(*(np.shape(a) for a in (m.src, m.dst, m.chunk, m.to_chunk, m.count)))
        copies = int(np.prod(shape)) // max(len(src), 1)
        even = np.ndim(m.count) == 0
        if not even and not count.all():
            src, dst, count = src[count > 0], dst[count > 0], count[count > 0]
        memory: np.ndarray | int = 0
        if m.reduce:  # reads two and writes one
            memory = _sums(dst, count, self.ranks, even)[1] * 3 * copies
        away = src != dst
        if not away.all():
            if not m.reduce:
                memory = _sums(dst[~away], count[~away], self.ranks, even)[1] * 2 * copies
            src, dst, count = src[away], dst[away], count[away]
        links, latency = [], 0.0
        for level in self.topology.levels:
            up, down = (src, dst) if level.ranks == 1 else (src // level.ranks, dst // level.ranks)
            away = up != down
            if not away.all():
                src, dst, up, down, count = src[away], dst[away], up[away], down[away], count[away]
            if not len(up):
                break
            latency = max(latency, level.latency)
            groups = -(-self.ranks // level.ranks)
            for group in (up, down):
                messages, chunks = _sums(group, count, groups, even)
                links.append((messages * copies, chunks * copies))
        return _Load(latency, tuple(links), memory)


def _sums(group: np.ndarray, count: np.ndarray, size: int, even: bool) -> tuple[np.ndarray, np.ndarray]:
    """(messages, chunks) of each group; ``even`` if all messages have the same count."""
    messages = np.bincount(group, minlength=size)
    if even:
        return messages, messages * (count[0] if len(count) else 0)
    return messages, np.bincount(group, weights=count, minlength=size)


def _together(a: _Load, b: _Load) -> _Load:
    """Two families in one round."""
    longer, shorter = (a.links, b.links) if len(a.links) >= len(b.links) else (b.links, a.links)
    links = [(m + n, c + d) for (m, c), (n, d) in zip(longer, shorter, strict=False)]
    return _Load(max(a.latency, b.latency), (*links, *longer[len(links):]),
                 a.memory + b.memory)
