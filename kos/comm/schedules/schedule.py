"""A collective algorithm as data: rounds of steps over chunks of the ranks' buffers.

An algorithm is a pure function that yields *rounds*.  A round is a few ``Moves``, each a whole family of transfers
written with NumPy arrays (usually one entry per rank).  A ``Repeat`` describes many rounds, so that a schedule over
16,384 ranks costs little more than one over four.  ``Schedule.rounds`` expands them to ``Step``s of each rank.

Spaces ("data", "input", "output", "scratch") are split into chunks, ``parts`` to the unit.  The unit is the whole
vector for in-place collectives ("data"), and one rank's block otherwise, so "input" or "output" may be several units
long.  Chunk ``x`` begins at element ``x // parts * E + x % parts * E // parts``, where E is the elements of one unit:
any count works, chunks may be empty, and chunks that agree modulo ``parts`` have the same length.

All steps of a round start from the state before it: no step may access a slot that another step of the same round on
that rank writes.  The exception: several ``recv_reduce`` or ``reduce`` steps may add to one slot, in the order of the
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kos.comm.operation import COLLECTIVES, PARTS
from kos.errors import KosError, plural

Indices: TypeAlias = "np.ndarray | int"

IN_PLACE = tuple(name for name, row in COLLECTIVES.items() if row.in_place)
"""Collectives whose ranks all hold one vector in the space "data"; the others use "input" and "output"."""
ROOTED = tuple(name for name, row in COLLECTIVES.items() if row.rooted)


class ScheduleError(KosError):
    """A schedule is wrong; the message names rank, round and chunk."""


class Step(NamedTuple):
    """One rank's action in one round on ``span`` chunks from ``chunk`` on in ``space``.

    ``send`` reads them, ``recv`` overwrites them, ``recv_reduce`` does chunk = op(chunk, received);
    ``copy`` and ``reduce`` do the same with ``source_space[source_chunk...]`` of the same rank.
    """

    kind: str
    space: str
    chunk: int
    span: int = 1
    peer: int = -1
    source_space: str = ""
    source_chunk: int = -1


Round: TypeAlias = "tuple[tuple[Step, ...], ...]"
"""The steps of one round, indexed by rank."""


class Moves:
    """A family of transfers: ``chunk`` of ``space`` at ``src`` goes to ``to_chunk`` of ``to_space`` at ``dst``.

    The first five broadcast together.  ``src == dst`` is a local step.  A large ``to_chunk`` may be a function that
    returns it, in the common shape; predictions do not call it.
    """

    def __init__(self, src: Indices, dst: Indices, chunk: Indices,
                 to_chunk: Indices | Callable[[], Indices] | None = None, *, count: Indices = 1,
                 space: str = "data", to_space: str | None = None, reduce: bool = False) -> None:
        self.src, self.dst, self.chunk, self.count, self.space, self.reduce = src, dst, chunk, count, space, reduce
        self.to_chunk = chunk if to_chunk is None else to_chunk
        self.to_space = to_space or space
        self.shape = np.broadcast_shapes(*(np.shape(x) for x in (src, dst, chunk, self.to_chunk, count)
                                           if not callable(x)))

    def transfers(self, ranks: int) -> list[np.ndarray]:
        """src, dst, chunk, to_chunk and count of every transfer, among ``ranks`` ranks."""
        to_chunk = self.to_chunk() if callable(self.to_chunk) else self.to_chunk
        return [a.ravel() for a in np.broadcast_arrays(self.src, self.dst, self.chunk, to_chunk, self.count)]


class Pairs(Moves):
    """From every ``src`` (a column) to every other ``dst`` (a row), ``count`` chunks each, nearest rank first."""

    def transfers(self, ranks: int) -> list[np.ndarray]:
        """The transfers of Moves, ordered by the distance from src up to dst."""
        columns = super().transfers(ranks)
        distance = (columns[1] - columns[0]) % ranks
        order = np.argsort(distance, kind="stable")[np.count_nonzero(distance == 0):]
        return [column[order] for column in columns]


class Repeat(NamedTuple):
    """The rounds of ``rounds(0)``, ..., ``rounds(times - 1)``, which cost the same.

    With ``shifts``, round k sends everything k + 1 ranks ahead, modulo ``times + 1``; then all rounds that leave every
    group of a topology cost the same.
    """

    times: int
    rounds: Callable[[int], Iterable[Iterable[Moves]]]
    shifts: bool = False


Rounds: TypeAlias = "Iterable[Iterable[Moves] | Repeat]"


@dataclass(frozen=True, eq=False)
class Schedule:
    """One algorithm for one collective on ``ranks`` ranks; equal only to itself: ``build`` caches.

    ``ordered`` promises that contributions are added in rank order, ((x0 + x1) + x2) + ...
    """

    collective: str
    algorithm: str
    ranks: int
    parts: int
    root: int
    ordered: bool
    moves: Callable[[], Rounds] = field(repr=False)

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Every step, by round and rank.  Raises ScheduleError unless rounds are lists of Moves with valid ranks."""
        rounds = chain.from_iterable(
            chain.from_iterable(self._several(block.rounds(k)) for k in range(block.times))
            if isinstance(block, Repeat) else [block] for block in self._several(self.moves()))
        return tuple(self._spell_out(families, number) for number, families in enumerate(rounds))

    def _several(self, rounds: object) -> Iterable[Any]:
        if not isinstance(rounds, Iterable):
            raise ScheduleError(f"{self}: expected rounds of Moves, got {type(rounds).__name__}")
        return rounds

    def _spell_out(self, families: Iterable[Moves], number: int) -> Round:
        if not isinstance(families, Iterable):
            raise ScheduleError(f"{self}: round {number}: expected a list of Moves, got {type(families).__name__}")
        steps: list[list[Step]] = [[] for _ in range(self.ranks)]
        for m in families:
            if not isinstance(m, Moves):
                raise ScheduleError(f"{self}: round {number}: expected Moves, got {type(m).__name__}")
            columns = m.transfers(self.ranks)
            if wrong := {str(c.dtype) for c in columns if c.size and c.dtype.kind not in "iu"}:
                got = ", ".join(sorted(wrong))
                raise ScheduleError(f"{self}: round {number}: expected whole numbers in Moves, got {got}")
            for src, dst, chunk, to_chunk, count in zip(*(c.tolist() for c in columns), strict=True):
                if count == 0:
                    continue
                if not (0 <= src < self.ranks and 0 <= dst < self.ranks):
                    ends = f"expected ranks from 0 to {self.ranks - 1}, got {src} to {dst}"
                    raise ScheduleError(f"{self}: round {number}: {ends}")
                if src == dst:
                    kind = "reduce" if m.reduce else "copy"
                    steps[dst].append(Step(kind, m.to_space, to_chunk, count, -1, m.space, chunk))
                else:
                    steps[src].append(Step("send", m.space, chunk, count, dst))
                    steps[dst].append(Step("recv_reduce" if m.reduce else "recv", m.to_space, to_chunk, count, src))
        return tuple(map(tuple, steps))

    @cached_property
    def units(self) -> Mapping[str, int]:
        """The length of each user space in units; for rooted collectives, on the root."""
        if self.collective in IN_PLACE:
            return {"data": 1}
        row = COLLECTIVES[self.collective]
        return {"input": self.ranks if row.input == PARTS else 1, "output": self.ranks if row.output == PARTS else 1}

    def spaces(self, rank: int) -> tuple[str, ...]:
        """The user buffers of ``rank``: only the root has a gather's output and a scatter's input."""
        row = COLLECTIVES[self.collective]
        if rank == self.root or not row.rooted or row.in_place:
            return tuple(self.units)
        return ("output",) if row.root_gives else ("input",)

    def start(self, chunk: int, elements: int) -> int:
        """First element of ``chunk``, for ``elements`` in a unit."""
        return chunk // self.parts * elements + chunk % self.parts * elements // self.parts

    def __str__(self) -> str:
        root = f", root {self.root}" if self.collective in ROOTED else ""
        ranks, chunks = plural(self.ranks, "rank"), plural(self.parts, "chunk")
        return f"{self.collective}/{self.algorithm} on {ranks}, {chunks} a unit{root}"
