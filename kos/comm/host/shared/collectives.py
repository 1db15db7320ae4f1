"""Collectives of the ranks of one host through their segment, in stages of a slot each.

A stage has up to three steps, and every rank has a flag that counts each of them.  PUT: it has copied its input to its
slot.  REDUCED: it has reduced its own part, and stored the result over the next rank's contribution to it.  GOT: it has
copied its output, and reads no more data of this stage.  A slot is refilled when every rank has passed GOT of the
stage DEPTH before.  It is not filled earlier than its stage, since that would evict the current stage from the core's
cache.  So data crosses the memory bus once each way and all else stays in the caches (Jain et al., "Framework for
Scalable Intra-Node Collective Operations using Shared Memory", SC 2018).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from os import sched_yield
from typing import Any

import numpy as np

from kos.comm.host.shared.calls import Calls, Wait
from kos.comm.host.shared.direct import CROWDED_SPINS, ENDING_SECONDS, ONE_COPY_SPINS, SPINS, Direct, Unreadable
from kos.comm.host.shared.plans import Plan, Plans, Sum
from kos.comm.host.shared.segment import CLOSED, DEPTH, GOT, PUT, REDUCED, RING, TURNS
from kos.comm.operation import Call
from kos.comm.reduction import Reduction
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.work import Steps

Array = np.ndarray[Any, Any]


class SharedCollectives:
    """Runs whole operations, from the user's input to the user's output."""

    def __init__(
        self, calls: Calls, crowded: bool, rendezvous: Rendezvous, by_messages: Callable[[Call, Wait], Steps]
    ) -> None:
        """``by_messages`` runs an operation on arrays whose memory other ranks cannot read."""
        segment = calls.segment
        self._calls, self._words, self._plans = calls, segment.words, Plans(segment)
        self.direct, self._by_messages = Direct(rendezvous, segment, self._plans), by_messages
        self.rank, self.size = segment.rank, segment.size
        self._lines = [segment.layout.line(rank) for rank in range(self.size)]
        self._mine = self._lines[self.rank]
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        self._of_peers = [[self._lines[rank] + word for rank in self._peers] for word in range(CLOSED)]
        self._rings = [segment.layout.ring(rank) for rank in self._peers]
        self._gots, self._failure = self._of_peers[GOT], segment.layout.failure
        self._crowded, self._spins = crowded, CROWDED_SPINS if crowded else SPINS
        mine = self._mine + PUT, self._mine + GOT
        self._places: tuple[Any, ...] = (self._words, *mine, self._rings, self._failure, crowded, self._spins)
        self._issued = self._served = 0  # ticket lock of the slots: operations started, operations done
        self._stage = self._free = 0  # the next stage, and the last whose slot is known to be free
        self._awaited: tuple[int, int, Sequence[int]] = (PUT, 0, ())  # the last wait: flag, value, ranks

    def prepare(self, call: Call) -> bool:
        """Make the plan of ``call``, for all its launches; whether it is supported here."""
        call.plan = self.direct.make(call.operation) or self._plans.make(call.operation)
        return call.plan is not None

    def start(self, call: Call) -> Steps | None:
        """Publish that this rank begins ``call``, and return its steps; None if it is complete.

        One stage needs no steps if the other ranks come soon: without them it takes half the time.
        """
        plan, stage, sequence = call.plan, self._stage, call.sequence
        words, my_put, my_got, rings, failure, crowded, spins = self._places
        place, published = sequence % RING, self._calls.announce(call)
        if type(plan) is Sum:
            return self._reduce(call, *plan)
        count, per_stage, _, put, get, flags, reads_all, readers, own, one_copy = plan
        if one_copy and not crowded and not call.operation.options.overlap:
            spins = ONE_COPY_SPINS
        if (
            count > per_stage or self._issued != self._served
            or (stage > self._free and not self._reached(self._gots, stage + 1 - DEPTH))
        ):  # fmt: skip
            return self._run(call, plan)
        if count and put is not None:
            put(stage % TURNS, 0, count)
            words[my_put] = stage + 1
        for at in flags:
            while words[at] <= stage:
                if not spins:
                    return self._run(call, plan, begun=True)
                spins -= 1
                if crowded:
                    sched_yield()
        for ring in rings:
            while words[ring + place] != published:
                if not spins:
                    return self._run(call, plan, begun=True)
                spins -= 1
                if crowded:
                    sched_yield()
        if count:
            self._stage = stage + 1
            if get is not None:
                try:
                    get(stage % TURNS, 0, count)
                except OSError as error:
                    self._issued += 1
                    return self._unread(call, error)
            words[my_got] = stage + 1
            if own is not None:
                own(stage % TURNS, 0, count)
            if reads_all:  # a rank puts a stage after it got the one before
                self._free = stage + 1
            for at in readers:
                while words[at] <= stage:
                    if not spins:
                        self._issued += 1
                        return self._until_read(call, stage, readers)
                    spins -= 1
                    if crowded:
                        sched_yield()
        if words[failure]:  # a rank that has failed may have changed the data after it was read
            self._calls.raise_failure(sequence)
        return None

    def behind(self) -> list[int]:
        """The ranks that the operation that holds the slots waits for."""
        return list(self._laggards())

    def _run(self, o: Call, plan: Plan, begun: bool = False) -> Steps:
        """The steps of ``plan``; ``begun``: its only stage is put."""
        count, per_stage, sources, put, get, awaited, _, readers, own, _ = plan
        words, mine, spins, crowded = self._words, self._mine, self._spins, self._crowded
        # Operations use the slots one after another, in the order of their launch, equal on all ranks.
        ticket, self._issued = self._issued, self._issued + 1
        while self._served != ticket:
            self._calls.raise_failure(o.sequence)
            yield
        all_arrived = Wait(self._calls, o)
        first, stages = self._stage, -(-count // per_stage)
        self._stage += stages
        start = 0
        for stage in range(first, first + stages):
            slot, end = stage % TURNS, min(start + per_stage, count)
            if put is not None and not begun:
                if not self._reached(self._of_peers[GOT], stage + 1 - DEPTH):
                    yield from self._wait_for(o, GOT, stage + 1 - DEPTH, self._peers)
                put(slot, start, end)
                words[mine + PUT] = stage + 1
            if stage == first:
                # Other slots are read only after all calls agree.
                while not all_arrived():
                    spins -= 1
                    if spins < 0:
                        yield
                    elif crowded:
                        sched_yield()
            if not self._reached(awaited, stage + 1):
                yield from self._wait_for(o, PUT, stage + 1, sources)
            if get is not None:
                try:
                    get(slot, start, end)
                except OSError as error:
                    yield from self._unread(o, error)
                    return
            words[mine + GOT] = stage + 1
            if own is not None:
                own(slot, start, end)
            start = end
        if not stages:
            while not all_arrived():
                yield
        yield from self._until_read(o, first, readers)

    def _until_read(self, o: Call, stage: int, readers: Sequence[int]) -> Steps:
        """The end of an operation whose data the ``readers``, if any, read in place."""
        if not self._reached(readers, stage + 1):
            yield from self._wait_for(o, GOT, stage + 1, self._peers)
        if self._words[self._failure]:
            self._calls.raise_failure(o.sequence)
        self._served += 1

    def _unread(self, o: Call, error: OSError) -> Steps:
        """The end of an operation in which a rank's memory could not be read."""
        if isinstance(error, Unreadable):
            self._words[self._mine + GOT] = self._stage
            self._served += 1
            yield from self._by_messages(o, Wait(self._calls, o))
            return
        deadline = time.monotonic() + ENDING_SECONDS
        while time.monotonic() < deadline:
            self._calls.raise_failure(o.sequence)  # a rank whose call has failed may have freed its memory
            for rank in self._peers:
                if (end := self._calls.end_of(rank, o)) is not None:
                    self._calls.raise_everywhere(end, o.sequence)
            yield
        raise error

    def _reduce(self, o: Call, x: Array, out: Array | None, reduction: Reduction) -> Steps:
        """The steps of a Sum.

        The same as ``_run`` with one more step, written out for speed.
        """
        words, mine, peers, plans, plain = self._words, self._mine, self._of_peers, self._plans, reduction.is_plain
        ticket, self._issued = self._issued, self._issued + 1
        while self._served != ticket:
            self._calls.raise_failure(o.sequence)
            yield
        first, per_stage = self._stage, plans.block // reduction.carrier.itemsize
        stages = 1 if x.size <= per_stage else -(-x.size // per_stage)
        self._stage = first + stages
        a, b = x, out
        for stage in range(first, first + stages):
            if stages > 1:
                start = (stage - first) * per_stage
                a = x[start : start + per_stage]
                b = a if out is x else out[start : start + per_stage] if out is not None else None
            # Always the same slots: ranks write what they have read in any case.
            own, puts, contributions, result, gets = plans.parts(reduction, a.size)[stage % DEPTH]
            if not self._reached(peers[GOT], stage + 1 - DEPTH):
                yield from self._wait_for(o, GOT, stage + 1 - DEPTH, self._peers)
            for view, where in puts:
                if plain:
                    view[...] = a[where]
                else:
                    reduction.stage(a[where], view)
            words[mine + PUT] = stage + 1
            part = a[own]
            if plain:
                contributions = contributions.copy()
                contributions[self.rank] = part
            if b is not a:
                part = b[own] if b is not None else np.empty_like(part)
            if not self._reached(peers[PUT], stage + 1):
                yield from self._wait_for(o, PUT, stage + 1, self._peers)
            if stage == first:
                while self._calls.check(o) is not None:  # a slot holds data of another call
                    yield
            if b is not None or result is not None:
                plans.sum(reduction, contributions, part)
            if result is not None:
                result[...] = part
                words[mine + REDUCED] = stage + 1
                if not self._reached(peers[REDUCED], stage + 1):
                    yield from self._wait_for(o, REDUCED, stage + 1, self._peers)
                if b is not None:
                    for view, where in gets:
                        b[where] = view
            words[mine + GOT] = stage + 1
        self._served = ticket + 1

    def _reached(self, places: Sequence[int], value: int) -> bool:
        """Spin briefly until the flags at ``places`` have reached ``value``; whether they have."""
        words, spins = self._words, self._spins
        for at in places:
            while words[at] < value:
                if spins == 0:
                    return False
                spins -= 1
                if self._crowded:
                    sched_yield()
        return True

    def _laggards(self) -> Iterator[int]:
        word, value, awaited = self._awaited
        return (rank for rank in awaited if self._words[self._lines[rank] + word] < value)

    def _wait_for(self, o: Call, word: int, value: int, ranks: Sequence[int]) -> Steps:
        """Wait until the flag ``word`` of these ranks has reached ``value``."""
        self._awaited = word, value, ranks
        wait = Wait(self._calls, o)
        while (rank := next(self._laggards(), None)) is not None:
            wait.check_alive(rank)
            yield
