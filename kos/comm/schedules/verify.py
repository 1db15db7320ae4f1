"""Prove a schedule right, without data: every chunk ends with every contribution exactly once.

Chunks hold symbols: a leaf is what one rank brought in one chunk, a sum remembers how it was added.  The
rounds are played through once, and each of these is checked on the way:

- every send meets a receive of the same round, in the same order on both sides, with chunks of equal length.
  As nobody waits for anything later in its own round, no order of events can then deadlock, even where a send
  completes only when it is received;
- no chunk is read or written while the same round writes it, nothing is read that was never written, no
  input is written, and everything lies inside its space;
- no contribution is added twice, and none to another chunk's;
- in a schedule that promises rank order, contribution k is added to the sum of 0..k-1 and to nothing else;
- at the end all hold what the collective promises, and sums were added in the same order on every rank, so
  that results are bit-identical.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kos.comm.schedules.schedule import Round, Schedule, ScheduleError, Step

Slot = tuple[str, int]


def verify(schedule: Schedule) -> None:
    """Raise ScheduleError, saying which rank, round and chunk, unless ``schedule`` is proved right."""
    _Proof(schedule).run()


class _Symbols:
    """Leaves and sums, numbered; equal symbols have equal numbers."""

    def __init__(self, ordered: bool) -> None:
        self.ordered = ordered
        self.what: list[tuple[int, int]] = []  # (chunk where it came from, bit mask of the ranks added)
        self.numbers: dict[tuple[int, int, bool], int] = {}

    def leaf(self, rank: int, chunk: int) -> int:
        """What ``rank`` brought in ``chunk``."""
        return self._number((rank, chunk, False), (chunk, 1 << rank))

    def add(self, mine: int, other: int) -> int:
        """The sum mine + other; ValueError if it counts anything twice, mixes chunks or breaks rank order."""
        (chunk, ranks), (other_chunk, other_ranks) = self.what[mine], self.what[other]
        if chunk != other_chunk:
            raise ValueError(f"adds what began as chunk {other_chunk} to what began as chunk {chunk}")
        if ranks & other_ranks:
            raise ValueError(f"adds the contribution of rank {_ranks(ranks & other_ranks)} a second time")
        if self.ordered and (other_ranks != ranks + 1 or ranks & (ranks + 1)):  # not {k} to {0..k-1}
            raise ValueError(f"adds rank {_ranks(other_ranks)} to rank {_ranks(ranks)}, not in rank order")
        return self._number((min(mine, other), max(mine, other), True), (chunk, ranks | other_ranks))

    def _number(self, key: tuple[int, int, bool], what: tuple[int, int]) -> int:
        number = self.numbers.setdefault(key, len(self.what))
        if number == len(self.what):
            self.what.append(what)
        return number


class _Proof:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.symbols = _Symbols(schedule.ordered)
        self.limits = [{space: schedule.units[space] * schedule.parts for space in schedule.spaces(rank)}
                       for rank in range(schedule.ranks)]
        self.held: list[dict[Slot, int]] = [
            {(space, x): self.symbols.leaf(rank, x) for space, chunks in self.limits[rank].items()
             if space != "output" for x in range(chunks)} for rank in range(schedule.ranks)]

    def run(self) -> None:
        """Play all rounds, then compare with the postcondition."""
        for number, steps in enumerate(self.schedule.rounds):
            if len(steps) != self.schedule.ranks:
                raise ScheduleError(f"{self.schedule}: round {number} has steps for {len(steps)} ranks")
            self._play(number, steps)
        self._conclude()

    def _fail(self, rank: int, number: int, step: Step, problem: str) -> ScheduleError:
        end = f"..{step.chunk + step.span - 1}" if step.span > 1 else ""
        return ScheduleError(f"{self.schedule}: rank {rank}, round {number}, {step.kind} of {step.space} "
                             f"chunk {step.chunk}{end}: {problem}")

    def _play(self, number: int, steps: Round) -> None:
        sent: dict[tuple[int, int], list[Step]] = defaultdict(list)
        for rank, mine in enumerate(steps):
            self._check_places(number, rank, mine)
            for step in mine:
                if step.kind == "send":
                    sent[rank, step.peer].append(step)
        # Nothing read in a round is written in it: arrivals may be stored while others are still to be sent.
        for rank, mine in enumerate(steps):
            taken: dict[int, int] = defaultdict(int)
            for step in mine:
                if step.kind == "send":
                    continue
                if step.kind in ("recv", "recv_reduce"):
                    queue, at = sent.get((step.peer, rank), []), taken[step.peer]
                    if at >= len(queue):
                        raise self._fail(rank, number, step, f"rank {step.peer} sends nothing to it")
                    message, taken[step.peer] = queue[at], at + 1
                    if message.span != step.span or (message.chunk - step.chunk) % self.schedule.parts:
                        raise self._fail(rank, number, step, f"rank {step.peer} sends {message.space} chunk "
                                         f"{message.chunk} (span {message.span}), of another length")
                    self._store(number, rank, step, step.peer, message.space, message.chunk)
                else:
                    if (step.source_chunk - step.chunk) % self.schedule.parts:
                        raise self._fail(rank, number, step, f"{step.source_space} chunk {step.source_chunk} "
                                         "has another length")
                    self._store(number, rank, step, rank, step.source_space, step.source_chunk)
            for peer, count in taken.items():
                del sent[peer, rank][:count]
        for (rank, peer), messages in sent.items():
            if messages:
                raise self._fail(rank, number, messages[0], f"rank {peer} does not receive it in this round")

    def _check_places(self, number: int, rank: int, mine: tuple[Step, ...]) -> None:
        """All inside their spaces, nothing touched that the round writes."""
        reads: set[Slot] = set()
        writes: set[Slot] = set()
        sums: set[Slot] = set()
        for step in mine:
            message = step.kind in ("send", "recv", "recv_reduce")
            if not message and step.kind not in ("copy", "reduce"):
                raise self._fail(rank, number, step, "unknown kind of step")
            if message and (step.peer == rank or not 0 <= step.peer < self.schedule.ranks):
                raise self._fail(rank, number, step, f"{step.peer} is no peer")
            if step.kind != "send" and step.space == "input":
                raise self._fail(rank, number, step, "writes an input")
            reading = _slots(step) if step.kind == "send" else () if message else _source_slots(step)
            for slot in reading:
                if slot not in self.held[rank]:
                    raise self._fail(rank, number, step, f"reads {slot[0]} chunk {slot[1]}, it is empty")
                if slot in writes or slot in sums:
                    raise self._fail(rank, number, step, f"reads {slot[0]} chunk {slot[1]} in flight")
                reads.add(slot)
            if step.kind == "send":
                continue
            end = step.chunk + step.span
            limit = end if step.space == "scratch" else self.limits[rank].get(step.space, 0)
            if step.chunk < 0 or step.span < 1 or end > limit:
                raise self._fail(rank, number, step, f"outside {step.space!r}, which has {limit} chunks")
            adds = step.kind in ("recv_reduce", "reduce")
            for slot in _slots(step):
                if adds and slot not in self.held[rank]:
                    raise self._fail(rank, number, step, f"adds to chunk {slot[1]}, which is empty")
                if slot in reads or slot in writes or (slot in sums and not adds):
                    raise self._fail(rank, number, step, f"writes chunk {slot[1]} while it is in flight")
                (sums if adds else writes).add(slot)

    def _store(self, number: int, rank: int, step: Step, source: int, space: str, chunk: int) -> None:
        adds = step.kind in ("recv_reduce", "reduce")
        mine, theirs = self.held[rank], self.held[source]
        for k in range(step.span):
            value, slot = theirs[space, chunk + k], (step.space, step.chunk + k)
            if adds:
                try:
                    value = self.symbols.add(mine[slot], value)
                except ValueError as problem:
                    raise self._fail(rank, number, step._replace(chunk=slot[1], span=1),
                                     str(problem)) from None
            mine[slot] = value

    def _conclude(self) -> None:
        same: dict[int, int] = {}
        for rank, space, chunk, origin, ranks in postcondition(self.schedule):
            value = self.held[rank].get((space, chunk))
            where = f"{self.schedule}: rank {rank}, after the last round, {space} chunk {chunk}"
            if value is None:
                raise ScheduleError(f"{where} holds nothing, expected chunk {origin} of rank {_ranks(ranks)}")
            got_origin, got_ranks = self.symbols.what[value]
            if (got_origin, got_ranks) != (origin, ranks):
                raise ScheduleError(f"{where} holds chunk {got_origin} of rank {_ranks(got_ranks)}, "
                                    f"expected chunk {origin} of rank {_ranks(ranks)}")
            if self.schedule.collective == "all_reduce" and same.setdefault(chunk, value) != value:
                raise ScheduleError(f"{where} was added in another order than on rank 0")


def postcondition(schedule: Schedule) -> Iterator[tuple[int, str, int, int, int]]:
    """What must hold at the end: (rank, space, chunk, the chunk it began as, bit mask of ranks in it)."""
    n, parts, root = schedule.ranks, schedule.parts, schedule.root
    all_ranks = (1 << n) - 1
    for rank in range(n):
        match schedule.collective:
            case "all_reduce":
                yield from ((rank, "data", x, x, all_ranks) for x in range(parts))
            case "reduce" if rank == root:
                yield from ((rank, "data", x, x, all_ranks) for x in range(parts))
            case "broadcast":
                yield from ((rank, "data", x, x, 1 << root) for x in range(parts))
            case "reduce_scatter":
                yield from ((rank, "output", x, rank * parts + x, all_ranks) for x in range(parts))
            case "scatter":
                yield from ((rank, "output", x, rank * parts + x, 1 << root) for x in range(parts))
            case "all_to_all":
                yield from ((rank, "output", s * parts + x, rank * parts + x, 1 << s)
                            for s in range(n) for x in range(parts))
            case "all_gather" | "gather" if schedule.collective == "all_gather" or rank == root:
                yield from ((rank, "output", s * parts + x, x, 1 << s)
                            for s in range(n) for x in range(parts))


def _slots(step: Step) -> Iterator[Slot]:
    return ((step.space, step.chunk + k) for k in range(step.span))


def _source_slots(step: Step) -> Iterator[Slot]:
    return ((step.source_space, step.source_chunk + k) for k in range(step.span))


def _ranks(mask: int) -> str:
    """Ranks of a bit mask: "3", "0-7", "0,2,5"."""
    ranks = [r for r in range(mask.bit_length()) if mask >> r & 1]
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))
