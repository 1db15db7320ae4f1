"""Ranks as generators over an in-memory transport that delivers in an order chosen by a seed.

Sends are synchronous: done only once received.  Which pending message moves next, and which rank runs next,
is drawn at random; only the order of one pair's messages is kept.  Used as the oracle for schedules: what a
schedule leaves in the buffers is compared with NumPy.
"""

import dataclasses
import random
from collections import defaultdict, deque

import numpy as np

from kos.comm.schedules.execute import execute


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
    """What each rank's result must be, by NumPy in rank order; None where it is undefined."""
    n, root, kind = schedule.ranks, schedule.root, schedule.collective
    if kind in ("scan", "exscan"):
        data = [b["data"] for b in buffers]
        return [rank_order_sum(data[:r + (kind == "scan")]) if r or kind == "scan" else None for r in range(n)]
    if kind in ("all_reduce", "reduce", "broadcast"):
        data = [b["data"] for b in buffers]
        result = data[root].copy() if kind == "broadcast" else rank_order_sum(data)
        return [None if kind == "reduce" and r != root else result for r in range(n)]
    inputs = [b.get("input") for b in buffers]

    def block(array, r):
        return array[r * elements:(r + 1) * elements].copy()

    if kind == "reduce_scatter":
        return [block(rank_order_sum(inputs), r) for r in range(n)]
    if kind in ("all_gather", "gather"):
        whole = np.concatenate(inputs)
        return [whole if kind == "all_gather" or r == root else None for r in range(n)]
    if kind == "scatter":
        return [block(inputs[root], r) for r in range(n)]
    return [np.concatenate([block(x, r) for x in inputs]) for r in range(n)]


def rank_order_sum(arrays):
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = total + array
    return total


def result(schedule, buffers, rank):
    return buffers[rank].get("data" if "data" in schedule.units else "output")
