"""Prove a schedule correct, without data: every chunk ends with every contribution exactly once.

A chunk is modelled by the set of its contributions and the order of their addition.  The rounds are executed once on
this model, and these properties are checked:

- every send matches a receive of the same round, in the same order on both sides, with chunks of equal length.
  No rank waits for a later event of its own round, so no order of events can deadlock, even if a send completes only
  when it is received;
- no chunk is read or written while the same round writes it, no chunk is read before it is written, no input is
  written, and all chunks lie inside their space;
- no contribution is added twice, and none to another chunk's;
- in a schedule that promises rank order, contribution k is added only to the sum of 0..k-1;
- at the end all ranks hold the result of the collective, and sums were added in the same order on every rank, so
  that results are bit-identical.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from kos.comm.operation import COLLECTIVES, PARTS
from kos.comm.schedules.schedule import Round, Schedule, ScheduleError, Step

Slot = tuple[str, int]
_ADDING, _RECEIVING = ("recv_reduce", "reduce"), ("recv", "recv_reduce")


class Value(NamedTuple):
    """The contents of a chunk."""

    chunk: int  # its original chunk
    ranks: int  # bit mask of the contributions in it
    order: int  # equal where these were added in the same order


def verify(schedule: Schedule) -> None:
    """Raise ScheduleError with rank, round and chunk unless ``schedule`` is correct."""
    for _ in contents(schedule):
        pass


def contents(schedule: Schedule) -> Iterator[list[dict[Slot, Value]]]:
    """By rank, what is in each chunk before the first round and after each round.  Verifies the schedule.

    The dicts are the same each time: copy what is needed later.
    """
    proof = _Proof(schedule)
    yield proof.held
    for number, steps in enumerate(schedule.rounds):
        proof.play(number, steps)
        yield proof.held
    proof.conclude()


class _Proof:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.orders: dict[tuple[int, int], int] = {}
        self.limits = [{space: schedule.units[space] * schedule.parts for space in schedule.spaces(rank)}
                       for rank in range(schedule.ranks)]
        self.held: list[dict[Slot, Value]] = [
            {(space, x): Value(x, 1 << rank, -1 - rank) for space, chunks in limits.items()
             if space != "output" for x in range(chunks)} for rank, limits in enumerate(self.limits)]

    def play(self, number: int, steps: Round) -> None:
        """One round: check every step, then move its chunks."""
        sent: dict[tuple[int, int], deque[Step]] = defaultdict(deque)
        for rank, mine in enumerate(steps):
            self._check_places(number, rank, mine)
            for step in mine:
                if step.kind == "send":
                    sent[rank, step.peer].append(step)
        # A round never writes a chunk that it reads, so receives may be stored before other sends.
        for rank, mine in enumerate(steps):
            for step in mine:
                source, space, chunk, span = rank, step.source_space, step.source_chunk, step.span
                if step.kind == "send":
                    continue
                if step.kind in _RECEIVING:
                    if not (queue := sent[step.peer, rank]):
                        raise self._fail(rank, number, step, f"rank {step.peer} sends nothing to it")
                    message = queue.popleft()
                    source, space, chunk, span = step.peer, message.space, message.chunk, message.span
                if span != step.span or (chunk - step.chunk) % self.schedule.parts:
                    raise self._fail(rank, number, step, f"{space} chunk {chunk} (span {span}) of rank {source} "
                                     "has another length")
                self._store(number, rank, step, [self.held[source][space, chunk + k] for k in range(span)])
        for (rank, peer), messages in sent.items():
            if messages:
                raise self._fail(rank, number, messages[0], f"rank {peer} does not receive it in this round")

    def _check_places(self, number: int, rank: int, mine: tuple[Step, ...]) -> None:
        """Check that steps stay inside their spaces and access no chunk that the round writes."""
        touched: dict[Slot, str] = {}  # read, written or added to
        for step in mine:
            message, adds = step.kind == "send" or step.kind in _RECEIVING, step.kind in _ADDING
            if message and (step.peer == rank or not 0 <= step.peer < self.schedule.ranks):
                raise self._fail(rank, number, step, f"{step.peer} is no peer")
            if step.kind != "send" and step.space == "input":
                raise self._fail(rank, number, step, "writes an input")
            slots = [(step.space, step.chunk + k) for k in range(step.span)]
            local = [(step.source_space, step.source_chunk + k) for k in range(step.span)]
            for slot in slots if step.kind == "send" else () if message else local:
                if slot not in self.held[rank]:
                    raise self._fail(rank, number, step, f"reads {slot[0]} chunk {slot[1]}, it is empty")
                if touched.setdefault(slot, "read") != "read":
                    raise self._fail(rank, number, step, f"reads {slot[0]} chunk {slot[1]} in flight")
            if step.kind == "send":
                continue
            end = step.chunk + step.span
            limit = end if step.space == "scratch" else self.limits[rank].get(step.space, 0)
            if step.chunk < 0 or step.span < 1 or end > limit:
                raise self._fail(rank, number, step, f"outside {step.space!r}, which has {limit} chunks")
            for slot in slots:
                if adds and slot not in self.held[rank]:
                    raise self._fail(rank, number, step, f"adds to chunk {slot[1]}, which is empty")
                if slot in touched and not (adds and touched[slot] == "added to"):
                    raise self._fail(rank, number, step, f"writes chunk {slot[1]} while it is in flight")
                touched[slot] = "added to" if adds else "written"

    def _store(self, number: int, rank: int, step: Step, values: list[Value]) -> None:
        for k, value in enumerate(values):
            slot = step.space, step.chunk + k
            if step.kind in _ADDING:
                try:
                    value = self._sum(self.held[rank][slot], value)
                except ValueError as problem:
                    raise self._fail(rank, number, step._replace(chunk=slot[1], span=1), str(problem)) from None
            self.held[rank][slot] = value

    def _sum(self, a: Value, b: Value) -> Value:
        """a + b; ValueError if it adds a contribution twice, mixes chunks or breaks rank order."""
        if a.chunk != b.chunk:
            raise ValueError(f"adds what began as chunk {b.chunk} to what began as chunk {a.chunk}")
        if a.ranks & b.ranks:
            raise ValueError(f"adds the contribution of rank {_ranks(a.ranks & b.ranks)} a second time")
        if self.schedule.ordered and (b.ranks != a.ranks + 1 or a.ranks & (a.ranks + 1)):  # not {k} to {0..k-1}
            raise ValueError(f"adds rank {_ranks(b.ranks)} to rank {_ranks(a.ranks)}, not in rank order")
        order = self.orders.setdefault((min(a.order, b.order), max(a.order, b.order)), len(self.orders))
        return Value(a.chunk, a.ranks | b.ranks, order)

    def conclude(self) -> None:
        """Compare the final chunks with the postcondition."""
        same: dict[int, int] = {}
        for rank, space, chunk, origin, ranks in postcondition(self.schedule):
            value = self.held[rank].get((space, chunk))
            where = f"{self.schedule}: rank {rank}, after the last round, {space} chunk {chunk}"
            if value is None or (value.chunk, value.ranks) != (origin, ranks):
                held = "nothing" if value is None else f"chunk {value.chunk} of rank {_ranks(value.ranks)}"
                raise ScheduleError(f"{where} holds {held}, expected chunk {origin} of rank {_ranks(ranks)}")
            if self.schedule.collective == "all_reduce" and same.setdefault(chunk, value.order) != value.order:
                raise ScheduleError(f"{where} was added in another order than on rank 0")

    def _fail(self, rank: int, number: int, step: Step, problem: str) -> ScheduleError:
        end = f"..{step.chunk + step.span - 1}" if step.span > 1 else ""
        return ScheduleError(f"{self.schedule}: rank {rank}, round {number}, {step.kind} of {step.space} "
                             f"chunk {step.chunk}{end}: {problem}")


def postcondition(schedule: Schedule) -> Iterator[tuple[int, str, int, int, int]]:
    """The final contents: (rank, space, chunk, original chunk, bit mask of ranks in it)."""
    n, parts, root = schedule.ranks, schedule.parts, schedule.root
    row = COLLECTIVES[schedule.collective]
    space = "data" if row.in_place else "output"
    for rank in range(n):
        sources = [1 << source for source in row.sources(rank, root, n)]
        began = rank if row.input == PARTS else 0  # the unit of the input that each unit of the result is of
        for unit, ranks in enumerate([sum(sources)] if row.reduces and sources else sources):
            yield from ((rank, space, unit * parts + x, began * parts + x, ranks) for x in range(parts))


def _ranks(mask: int) -> str:
    """Ranks of a bit mask: "3", "0-7", "0,2,5"."""
    ranks = [r for r in range(mask.bit_length()) if mask >> r & 1]
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))
