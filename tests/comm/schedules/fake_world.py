"""Ranks as generators over an in-memory transport that delivers in an order chosen by a seed.

Sends are synchronous: done only once received.  Which pending message moves next, and which rank runs next,
is drawn at random; only the order of one pair's messages is kept.  Used as the oracle for schedules: what a
schedule leaves in the buffers is compared with the model of the conformance suite.
"""

import dataclasses
import random
from collections import defaultdict, deque

import numpy as np

from kos.comm.schedules.execute import execute
from kos.testing.conformance import model
from kos.testing.conformance.model import Step


def with_rounds(schedule, rounds):
    """The schedule with other steps: a mutant, or one made by hand."""
    other = dataclasses.replace(schedule)
    other.__dict__["rounds"] = rounds
    return other


class Flight:
    def __init__(self, array):
        self.array, self.finished = array, False

    def done(self):
        return self.finished


class Wire:
    """All pairs' queues of posted sends and receives."""

    def __init__(self):
        self.sends, self.recvs = defaultdict(deque), defaultdict(deque)

    def endpoint(self, rank):
        return Endpoint(self, rank)

    def deliver(self, rng):
        """Complete the oldest message of one random pair; False if no pair has both sides posted."""
        able = [pair for pair, queue in self.sends.items() if queue and self.recvs[pair]]
        if not able:
            return False
        pair = rng.choice(able)
        send, recv = self.sends[pair].popleft(), self.recvs[pair].popleft()
        assert send.array.size == recv.array.size, f"{pair}: {send.array.size} sent, {recv.array.size} due"
        recv.array[...] = send.array
        send.finished = recv.finished = True
        return True


class Endpoint:
    def __init__(self, wire, rank):
        self.wire, self.rank = wire, rank

    def isend(self, array, peer, tag):
        assert array.ndim == 1 and array.flags.c_contiguous and array.size
        self.wire.sends[self.rank, peer, tag].append(flight := Flight(array))
        return flight

    def irecv(self, array, peer, tag):
        assert array.ndim == 1 and array.flags.c_contiguous and array.size
        self.wire.recvs[peer, self.rank, tag].append(flight := Flight(array))
        return flight


def run(schedule, buffers, reduce, seed=0, deliveries=1, wire=None):
    """Execute every rank to its end; ``deliveries`` messages move between two turns of ranks."""
    rng, wire = random.Random(seed), wire or Wire()
    alive = {rank: execute(schedule, rank, wire.endpoint(rank), buffers[rank], reduce, tag=3, empty=poisoned)
             for rank in range(schedule.ranks)}
    while alive:
        turn = list(alive)
        rng.shuffle(turn)
        for rank in turn:
            if next(alive[rank], "end") == "end":
                del alive[rank]
        moved = [wire.deliver(rng) for _ in range(deliveries)]
        if alive and not any(moved):
            before = len(alive)  # what was delivered last may still let somebody go on
            for rank in list(alive):
                if next(alive[rank], "end") == "end":
                    del alive[rank]
            if len(alive) == before and not wire.deliver(rng):
                raise AssertionError(f"{schedule}: ranks {list(alive)} wait for ever")
    assert not any(wire.sends.values()) and not any(wire.recvs.values()), "messages left over"


def poisoned(elements, dtype):
    array = np.empty(elements, dtype)
    array[...] = np.nan if array.dtype.kind == "f" else 77
    return array


def make_buffers(schedule, elements, rng, dtype=np.float64):
    """Random inputs and poisoned outputs for every rank, ``elements`` to the unit."""
    out = []
    for rank in range(schedule.ranks):
        mine = {}
        for space in schedule.spaces(rank):
            size = schedule.units[space] * elements
            mine[space] = poisoned(size, dtype)
            if space != "output":
                mine[space][...] = rng.standard_normal(size)
        out.append(mine)
    return out


def expected(schedule, buffers, elements):
    """What each rank's result must be, in rank order; None where it is undefined."""
    root, space = schedule.root or 0, "data" if "data" in schedule.units else "input"
    xs = [mine.get(space, buffers[root].get(space)) for mine in buffers]
    step = Step(schedule.collective, elements, xs[0].dtype, root=root)
    return [model.result(step, xs, rank) for rank in range(schedule.ranks)]


def result(schedule, buffers, rank):
    return buffers[rank].get("data" if "data" in schedule.units else "output")
