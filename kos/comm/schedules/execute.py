"""Executes one rank's part of a schedule over a transport: the sends, receives, copies and sums of its rounds.

``execute`` is a generator: it runs all instructions that are ready, and yields when all others wait for messages.
All ranks of the group run it with the same schedule and sizes, each over its own buffers.

A schedule's steps are compiled into instructions, which are steps on elements instead of chunks, once for a schedule,
rank, size and dtype width; the cache holds 256.  Messages over 256 KiB are split into segments, at most 64 of a
message.  An instruction runs as soon as those before it that touch the same elements are done.  So one segment is added
while the next is in flight, and a segment is forwarded before later ones have arrived.

There is no deadlock, even if a send is done only when it is received.  Messages between two ranks are posted in the
schedule's order on both sides.  An instruction waits only for earlier ones, and a round's sends never wait for its
receives.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import numpy as np

from kos.comm.schedules.schedule import Schedule, Step

SEGMENT_BYTES = 256 << 10
"""The smallest segment of a long message; two operands of this size fit a core's cache."""
MAX_SEGMENTS = 64
"""The most segments of a message, which bounds the number of instructions."""
STAGING_SLOTS = 8
"""Segments that may be in flight or arrived and not yet reduced."""


def execute(schedule: Schedule, rank: int, transport: Any, buffers: Mapping[str, np.ndarray],
            reduce: Callable[[np.ndarray, np.ndarray], None], tag: int = 0,
            empty: Callable[..., np.ndarray] = np.empty) -> Iterator[None]:
    """Execute ``rank``'s steps; yields None whenever all remaining instructions wait for messages.

    Args:
        schedule: the same on all ranks, with as many ranks as the transport connects.
        rank: this rank, from 0 to ``schedule.ranks - 1``.
        transport: has ``isend``, ``irecv`` and ``cancel`` of ``kos.comm.contract.Backend``; ``peer`` is
            a rank of the schedule.
        buffers: a contiguous 1-D array for each space in ``schedule.spaces(rank)``, all of one dtype.  ``data`` is
            reduced or filled in place; after a ``reduce`` its contents are undefined on all ranks but the root.
            ``input`` is only read, ``output`` only written.  The array of a space of ``units`` units has the shape
            ``(units * n,)``, n elements per unit.  Input and output do not overlap, except that the input of an
            all_gather or a gather may be this rank's block of the output.
        reduce: ``reduce(dst, src)`` does dst = op(dst, src) in place, on two arrays of one length.
        tag: of all messages; the transport keeps it apart from the tags of other calls.
        empty: ``empty(elements, dtype)`` allocates scratch memory, uninitialised.

    Raises:
        ScheduleError: the schedule is not made of valid moves.
        KeyError: ``buffers`` lacks a space.
        KosError: raised by the transport's ``isend``, ``irecv`` or ``done``, for example for a lost rank.  Requests
            may then still be in flight: the caller cancels them by ``transport.cancel``.

    Sizes are not checked here.  The caller checks them, since it knows the operation.
    """
    space = next(each for each in schedule.units if each in buffers)
    elements, dtype = buffers[space].size // schedule.units[space], buffers[space].dtype
    program = _compile(schedule, rank, elements, dtype.itemsize)
    spaces = dict(buffers)
    for space, length in program.scratch.items():
        spaces[space] = empty(length, dtype)

    instructions, after_post, after_done = program.instructions, program.after_post, program.after_done
    waits = [events + 1 for events in program.waits]  # one more for the start
    messages: deque[int] = deque()
    local: deque[int] = deque()
    active: defaultdict[tuple[str, int], deque[tuple[Any, int]]] = defaultdict(deque)  # messages, by kind and peer

    over: Iterable[int] = range(len(waits))  # the instructions for which one event more is over
    while True:
        for i in over:
            waits[i] -= 1
            if not waits[i]:
                (messages if instructions[i].peer >= 0 else local).append(i)
        if messages:
            i = messages.popleft()
            kind, space, start, span, peer, *_ = instructions[i]
            post = transport.isend if kind == "send" else transport.irecv
            active[kind, peer].append((post(spaces[space][start : start + span], peer, tag), i))
            over = after_post[i]
        elif local:
            i = local.popleft()
            kind, space, start, span, _, source_space, source = instructions[i]
            target, operand = spaces[space][start : start + span], spaces[source_space][source : source + span]
            if kind == "reduce":
                reduce(target, operand)
            else:
                np.copyto(target, operand)
            over = after_done[i]
        elif active:
            done: list[int] = []
            for key, queue in list(active.items()):
                while queue and queue[0][0].done():  # those of a pair complete in order, so one poll is enough
                    done.append(queue.popleft()[1])
                if not queue:
                    del active[key]
            over = chain.from_iterable(map(after_done.__getitem__, done))
            if not done:
                yield
        else:
            return


class _Program:
    """A rank's instructions in schedule order, with their dependencies."""

    def __init__(self, grain: int, scratch: dict[str, int]) -> None:
        self.instructions: list[Step] = []
        self.waits: list[int] = []  # the number of events that each waits for
        self.after_post: list[list[int]] = []  # instructions that wait until its message is posted
        self.after_done: list[list[int]] = []  # instructions that wait until it is done
        self.scratch = scratch  # its scratch spaces, and their elements
        self.grain = grain  # elements of a block; accesses are indexed by block
        self.touched: dict[tuple[str, int], list[tuple[int, int, int, bool]]] = defaultdict(list)
        self.last_posted: dict[tuple[str, int], int] = {}

    def add(self, instruction: Step) -> None:
        kind, space, start, span, peer, source_space, source = instruction
        i = len(self.instructions)
        self.instructions.append(instruction)
        self.after_post.append([])
        self.after_done.append([])
        before = self._conflicts(space, start, start + span, i, writes=kind != "send")
        if source_space:
            before |= self._conflicts(source_space, source, source + span, i, writes=False)
        before.discard(i)
        for j in before:
            self.after_done[j].append(i)
        self.waits.append(len(before))
        if peer >= 0:
            earlier = self.last_posted.get((kind, peer))
            self.last_posted[kind, peer] = i
            if earlier is not None:
                self.after_post[earlier].append(i)
                self.waits[i] += 1

    def _conflicts(self, space: str, start: int, stop: int, i: int, writes: bool) -> set[int]:
        """The instructions that must be done before i may touch those elements."""
        before: set[int] = set()
        for block in range(start // self.grain, (stop - 1) // self.grain + 1):
            accesses = self.touched[space, block]
            before.update(j for a, b, j, wrote in accesses if (writes or wrote) and a < stop and start < b)
            if writes:  # waiting for this instruction implies waiting for the accesses that it covers
                accesses[:] = [x for x in accesses if x[0] < start or x[1] > stop]
            accesses.append((start, stop, i, writes))
        return before


@lru_cache(maxsize=256)
def _compile(schedule: Schedule, rank: int, elements: int, itemsize: int) -> _Program:
    steps = [step for steps in schedule.rounds for step in steps[rank]]
    place, length = place_scratch(schedule, steps, elements)
    program, staged = _Program(max(1, elements // schedule.parts), {"scratch": length} if length else {}), 0

    def offset(space: str, chunk: int) -> int:
        return place[chunk] if space == "scratch" else schedule.start(chunk, elements)

    for kind, space, chunk, span, peer, source_space, source_chunk in steps:
        length = schedule.start(chunk + span, elements) - schedule.start(chunk, elements)
        segment = max(SEGMENT_BYTES // itemsize, -(-length // MAX_SEGMENTS), 1)
        for a in range(0, length, segment):
            start, size = offset(space, chunk) + a, min(segment, length - a)
            if kind == "recv_reduce":
                slot = f"staging {staged % STAGING_SLOTS}"
                staged, program.scratch[slot] = staged + 1, max(program.scratch.get(slot, 0), size)
                program.add(Step("recv", slot, 0, size, peer))
                program.add(Step("reduce", space, start, size, -1, slot, 0))
            elif source_space:
                source = offset(source_space, source_chunk) + a
                program.add(Step(kind, space, start, size, -1, source_space, source))
            else:
                program.add(Step(kind, space, start, size, peer))
    program.touched.clear()
    return program


def place_scratch(schedule: Schedule, steps: list[Step], elements: int) -> tuple[dict[int, int], int]:
    """The offset of each scratch chunk that this rank uses, without gaps; and the total."""
    used = sorted({chunk + k for step in steps for space, chunk in
                   ((step.space, step.chunk), (step.source_space, step.source_chunk)) if space == "scratch"
                   for k in range(step.span)})
    lengths = (schedule.start(chunk + 1, elements) - schedule.start(chunk, elements) for chunk in used)
    *starts, total = accumulate(lengths, initial=0)
    return dict(zip(used, starts, strict=True)), total
