"""Collectives of the ranks of one host through their segment, in stages of a slot each.

A stage has up to three steps, and every rank a word that counts each of them.  PUT: it has copied what
others need to its slot.  REDUCED: it has reduced its own part of all ranks' slots to the result slot.  GOT:
it has copied what it wants, and reads nothing more of this stage.  A slot is filled again when every rank
has got what it wanted of the stage DEPTH before.  So data crosses the memory bus once each way and all
else stays in the caches (Jain et al., "Framework for Scalable Intra-Node Collective Operations using Shared
Memory", SC 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import sched_yield
from typing import Any

import numpy as np

from kos.comm.operation import Operation
from kos.comm.reduction import Reduction
from kos.comm.shared.calls import Calls, Wait
from kos.comm.shared.plans import Plan, Plans
from kos.comm.shared.segment import DEPTH, GOT, PUT, REDUCED
from kos.comm.work import Steps

Array = np.ndarray[Any, Any]
Came = Callable[[], bool]

SPINS, CROWDED_SPINS = 300, 2
"""Polls of a word (50 ns each) before a wait goes back to the engine, and where ranks outnumber cores: there a
rank that spins keeps the one it waits for from running, so each of these polls gives the core away."""


class SharedCollectives:
    """Carries whole operations, from the user's input to the user's output."""

    def __init__(self, calls: Calls, crowded: bool) -> None:
        segment = calls.segment
        self._calls, self._words, self._plans = calls, segment.words, Plans(segment)
        self.rank, self.size = segment.rank, segment.size
        self._lines = [segment.layout.line(rank) for rank in range(self.size)]
        self._mine = self._lines[self.rank]
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        self._crowded, self._spins = crowded, CROWDED_SPINS if crowded else SPINS
        self._issued = self._served = 0  # operations that asked for the slots, that are done with them
        self._stage = 0
        self._awaited: tuple[int, int, Sequence[int]] = (PUT, 0, ())  # the word, its value, the ranks last waited for

    def start(self, o: Operation) -> Steps | None:
        """Say that this rank begins ``o``, and how it goes on; None if it is not carried here."""
        if o.name == "all_reduce" and o.algorithm == "auto":
            assert o.send is not None and o.recv is not None and o.reduction is not None
            if o.send.flat.nbytes <= self._plans.block and o.reduction.is_plain:
                self._calls.announce(o)
                return self._once(o, o.send.flat, o.recv.flat, o.reduction)
        plan = self._plans.make(o)
        return self._run(o, self._calls.publish(o), plan) if plan is not None else None

    def behind(self) -> list[int]:
        """The ranks that the operation which has the slots waits for."""
        word, value, awaited = self._awaited
        words, lines, ranks = self._words, self._lines, self._calls.segment.ranks
        return [ranks[rank] for rank in awaited if words[lines[rank] + word] < value]

    def _run(self, o: Operation, came: Came, plan: Plan) -> Steps:
        count, per_stage, sources, put, reduce, get = plan
        words, mine, spins, crowded = self._words, self._mine, self._spins, self._crowded
        # Operations use the slots one after another, in the order of their launch, equal on all ranks.
        turn, self._issued = self._issued, self._issued + 1
        while self._served != turn:
            came()
            yield
        first, stages = self._stage, -(-count // per_stage)
        self._stage += stages
        filled = start = 0
        for stage in range(first, first + stages):
            while put is not None and filled < min(stages, stage - first + DEPTH):
                waiting = self._laggard(GOT, first + filled + 1 - DEPTH, self._peers) is not None
                if waiting and first + filled > stage:
                    break  # no need to wait for it yet
                if waiting and not self._reached(GOT, first + filled + 1 - DEPTH, self._peers):
                    yield from self._until(o, GOT, first + filled + 1 - DEPTH, self._peers)
                at = filled * per_stage
                put((first + filled) % DEPTH, at, min(at + per_stage, count))
                filled += 1
                words[mine + PUT] = first + filled
            if stage == first:
                # One's own slot may be filled before, the others' are read once all calls agree.
                while not came():
                    spins -= 1
                    if spins < 0:
                        yield
                    elif crowded:
                        sched_yield()
            slot, end = stage % DEPTH, min(start + per_stage, count)
            if not self._reached(PUT, stage + 1, sources):
                yield from self._until(o, PUT, stage + 1, sources)
            if reduce is not None:
                reduce(slot, start, end)
                words[mine + REDUCED] = stage + 1
                if not self._reached(REDUCED, stage + 1, self._peers):
                    yield from self._until(o, REDUCED, stage + 1, self._peers)
            if get is not None:
                get(slot, start, end)
            words[mine + GOT] = stage + 1
            start = end
        if not stages:
            while not came():
                yield
        self._served += 1

    def _once(self, o: Operation, x: Array, out: Array, reduction: Reduction) -> Steps:
        """A plain all_reduce of one stage, as ``_run`` would do it, with little between the lines."""
        words, mine, peers = self._words, self._mine, self._peers
        turn, self._issued = self._issued, self._issued + 1
        while self._served != turn:
            self._calls.raise_failure(o.sequence)
            yield
        stage = self._stage
        self._stage = stage + 1
        own, puts, contributions, result, gets = self._plans.parts(reduction, x.size)[stage % DEPTH]
        if not self._reached(GOT, stage + 1 - DEPTH, peers):
            yield from self._until(o, GOT, stage + 1 - DEPTH, peers)
        for view, where in puts:
            view[...] = x[where]
        words[mine + PUT] = stage + 1
        contributions = contributions.copy()
        contributions[self.rank] = part = x[own]
        if out is not x:
            part = out[own]
        if not self._reached(PUT, stage + 1, peers):
            yield from self._until(o, PUT, stage + 1, peers)
        self._calls.check(o)
        self._plans.sum(reduction, contributions, part)
        if result is not None:
            result[...] = part
            words[mine + REDUCED] = stage + 1
            if not self._reached(REDUCED, stage + 1, peers):
                yield from self._until(o, REDUCED, stage + 1, peers)
            for view, where in gets:
                out[where] = view
        words[mine + GOT] = stage + 1
        self._served = turn + 1

    def _reached(self, word: int, value: int, ranks: Sequence[int]) -> bool:
        """Spin for a while until that word of those ranks has reached ``value``: whether it has."""
        words, lines, spins, crowded = self._words, self._lines, self._spins, self._crowded
        for rank in ranks:
            at = lines[rank] + word
            while words[at] < value:
                if spins == 0:
                    return False
                spins -= 1
                if crowded:
                    sched_yield()
        return True

    def _laggard(self, word: int, value: int, ranks: Sequence[int]) -> int | None:
        """The first of those ranks whose word has not reached ``value``."""
        words, lines = self._words, self._lines
        for rank in ranks:
            if words[lines[rank] + word] < value:
                return rank
        return None

    def _until(self, o: Operation, word: int, value: int, ranks: Sequence[int]) -> Steps:
        """Wait until that word of those ranks has reached ``value``."""
        self._awaited = word, value, ranks
        wait = Wait(self._calls, o)
        while (rank := self._laggard(word, value, ranks)) is not None:
            wait.look(rank)
            yield
