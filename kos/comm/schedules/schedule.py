"""A collective algorithm as data: rounds of steps over chunks of the ranks' buffers.

An algorithm (``reducing.py``, ``moving.py``) is a pure function that yields *rounds*; a round is a
few ``Moves``, each a whole family of transfers written with NumPy arrays that broadcast against one
another (one entry per rank, usually), so that a schedule over 16,384 ranks costs no more lines and
little more time than one over four.  ``Schedule.rounds`` spells the same thing out rank by rank as
``Step``s; that is what is verified and executed.

Slots.  A space ("data", "input", "output", "scratch") is cut into chunks, ``parts`` to the unit.
The unit is the whole vector where ranks hold it in place (all_reduce, broadcast, reduce: "data"), and
one rank's block elsewhere, so "input" or "output" may be several units long.  Chunk ``x`` of any space
begins at element ``(x // parts) * E + (x % parts) * E // parts``, E being the elements of one unit:
any count works, chunks may be empty, and chunks that agree modulo ``parts`` have the same length.

Rounds.  All steps of a round start from the state before it: nothing that a round writes may be
touched by another step of the same round on that rank, except that several ``recv_reduce`` or
``reduce`` steps may add to one slot; they do so in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from kos.errors import KosError

Kind: TypeAlias = Literal["send", "recv", "recv_reduce", "reduce", "copy"]
Indices: TypeAlias = "np.ndarray | int"

IN_PLACE = ("all_reduce", "broadcast", "reduce")
"""Collectives whose ranks all hold one vector in the space "data"; the others use "input" and "output"."""


ROOTED = ("broadcast", "reduce", "gather", "scatter")


class ScheduleError(KosError):
    """A schedule is wrong; the message names rank, round and chunk."""


class Step(NamedTuple):
    """What one rank does in one round with ``span`` chunks from ``chunk`` on in ``space``.

    ``send`` reads them, ``recv`` overwrites them, ``recv_reduce`` does chunk = op(chunk, received);
    ``copy`` and ``reduce`` do the same with ``source_space[source_chunk...]`` of the same rank.
    """

    kind: Kind
    space: str
    chunk: int
    span: int = 1
    peer: int = -1
    source_space: str = ""
    source_chunk: int = -1


Round: TypeAlias = "tuple[tuple[Step, ...], ...]"
"""The steps of one round, indexed by rank."""


@dataclass(frozen=True, eq=False)
class Moves:
    """A family of transfers; all fields broadcast together.  Where ``src == dst`` it is a local step."""

    src: Indices
    dst: Indices
    chunk: Indices
    to_chunk: Indices
    count: Indices
    space: str
    to_space: str
    reduce: bool


def moves(src: Indices, dst: Indices, chunk: Indices, to_chunk: Indices | None = None, *,
          count: Indices = 1, space: str = "data", to_space: str | None = None,
          reduce: bool = False) -> Moves:
    """Send (or copy) ``chunk`` of ``space`` at ``src`` to ``to_chunk`` of ``to_space`` at ``dst``."""
    return Moves(src, dst, chunk, chunk if to_chunk is None else to_chunk, count,
                 space, to_space or space, reduce)


Rounds: TypeAlias = "Iterable[Iterable[Moves]]"


@dataclass(frozen=True, eq=False)
class Schedule:
    """One algorithm for one collective on ``ranks`` ranks.

    ``chunks`` is the pipelining parameter it was built with, ``parts`` the chunks per unit (see the
    module), ``ordered`` the promise that contributions are added in rank order, ((x0 + x1) + x2) + ...
    Two schedules are equal only if they are the same object: ``build`` caches.
    """

    collective: str
    algorithm: str
    ranks: int
    chunks: int
    parts: int
    root: int
    ordered: bool
    moves: Callable[[], Rounds] = field(repr=False)

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Every step, by round and rank."""
        return tuple(_spell_out(moves, self.ranks) for moves in self.moves())

    @cached_property
    def units(self) -> Mapping[str, int]:
        """How many units long each user space is; for the rooted ones, on the root."""
        n = self.ranks
        if self.collective in IN_PLACE:
            return {"data": 1}
        return {"input": n if self.collective in ("reduce_scatter", "all_to_all", "scatter") else 1,
                "output": n if self.collective in ("all_gather", "all_to_all", "gather") else 1}

    def spaces(self, rank: int) -> tuple[str, ...]:
        """The user buffers that ``rank`` brings: a gather's output and a scatter's input are the root's."""
        absent = {"gather": "output", "scatter": "input"}.get(self.collective) if rank != self.root else None
        return tuple(space for space in self.units if space != absent)

    def start(self, chunk: int, elements: int) -> int:
        """First element of ``chunk``, for ``elements`` in a unit."""
        return chunk // self.parts * elements + chunk % self.parts * elements // self.parts

    def with_rounds(self, rounds: tuple[Round, ...]) -> Schedule:
        """This schedule with other steps (a mutant, or one made by hand)."""
        other = Schedule(self.collective, self.algorithm, self.ranks, self.chunks, self.parts, self.root,
                         self.ordered, lambda: _gather_up(rounds))
        other.__dict__["rounds"] = rounds
        return other

    def __str__(self) -> str:
        root = f", root {self.root}" if self.collective in ROOTED else ""
        return f"{self.collective}/{self.algorithm} on {self.ranks} ranks, {self.parts} chunks a unit{root}"


def _spell_out(families: Iterable[Moves], ranks: int) -> Round:
    steps: list[list[Step]] = [[] for _ in range(ranks)]
    for m in families:
        columns = np.broadcast_arrays(m.src, m.dst, m.chunk, m.to_chunk, m.count)
        for src, dst, chunk, to_chunk, count in zip(*(c.ravel().tolist() for c in columns), strict=True):
            if count == 0:
                continue
            if src == dst:
                kind: Kind = "reduce" if m.reduce else "copy"
                steps[dst].append(Step(kind, m.to_space, to_chunk, count, -1, m.space, chunk))
            else:
                kind = "recv_reduce" if m.reduce else "recv"
                steps[src].append(Step("send", m.space, chunk, count, dst))
                steps[dst].append(Step(kind, m.to_space, to_chunk, count, src))
    return tuple(map(tuple, steps))


def _gather_up(rounds: tuple[Round, ...]) -> Rounds:
    """Spelled-out steps as moves again: sends and receives of one pair are matched in order."""
    for steps in rounds:
        arriving: dict[tuple[int, int], list[Step]] = {}
        for rank, mine in enumerate(steps):
            for s in mine:
                if s.kind in ("recv", "recv_reduce"):
                    arriving.setdefault((s.peer, rank), []).append(s)
        families = []
        for rank, mine in enumerate(steps):
            for s in mine:
                if s.kind in ("copy", "reduce"):
                    families.append(moves(rank, rank, s.source_chunk, s.chunk, count=s.span,
                                          space=s.source_space, to_space=s.space, reduce=s.kind == "reduce"))
                elif s.kind == "send":
                    r = arriving[rank, s.peer].pop(0)
                    families.append(moves(rank, s.peer, s.chunk, r.chunk, count=s.span, space=s.space,
                                          to_space=r.space, reduce=r.kind == "recv_reduce"))
        yield families
