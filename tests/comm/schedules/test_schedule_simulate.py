"""The model against a slow one that walks every step, against arithmetic, and against what was measured."""

from collections import Counter
from math import inf

import numpy as np
import pytest

import kos.comm.schedules.simulate as simulator
from kos.comm.schedules import Schedule, algorithms, build, collectives
from kos.comm.schedules.schedule import Moves, Pairs
from kos.comm.schedules.simulate import Level, Topology, calibration, cost, simulate, topology
from kos.errors import InvalidArgument

CASES = [(c, a) for c in collectives() for a in algorithms(c)]
ODD = Topology("odd", (Level(1, 1e-6, 100e9, 80e9), Level(3, 4e-6, 50e9, 45e9), Level(6, 9e-6, 20e9, 15e9)),
               launch=2e-6, message=3e-7, memory_bandwidth=1e12)


def walk(schedule, topology, nbytes):
    """The same model, one step at a time."""
    chunk = nbytes / schedule.parts / max(schedule.units.values())
    total = topology.launch
    for steps in schedule.rounds:
        latency, memory, posted = 0.0, Counter(), Counter()
        messages, load = Counter(), Counter()
        for rank, mine in enumerate(steps):
            for s in mine:
                if s.kind in ("copy", "recv_reduce", "reduce"):
                    memory[rank] += s.span * chunk * (2 if s.kind == "copy" else 3)
                if s.kind != "send":
                    continue
                posted["send", rank] += 1
                posted["recv", s.peer] += 1
                for level in topology.levels:
                    a, b = rank // level.ranks, s.peer // level.ranks
                    if a != b:
                        latency = max(latency, level.latency)
                        for link in ((level, "up", a), (level, "down", b)):
                            messages[link] += 1
                            load[link] += s.span * chunk
        slowest = max((load[x] / (x[0].bandwidth_to_many if messages[x] > 1 else x[0].bandwidth) for x in load),
                      default=0.0)
        total += (latency + topology.message * max(posted.values(), default=0) + slowest
                  + max(memory.values(), default=0.0) / topology.memory_bandwidth)
    return total


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_equals_the_slow_walk(collective, algorithm):
    for ranks, local, chunks in ((1, 1, 1), (2, 1, 3), (5, 5, 1), (12, 3, 2), (13, 1, 1), (16, 4, 3)):
        schedule = build(collective, algorithm, ranks, chunks, ranks // 2, ranks_per_node=local)
        for nbytes in (0, 1000, 10**8):
            assert simulate(schedule, ODD, nbytes) == pytest.approx(walk(schedule, ODD, nbytes), rel=1e-12)


def test_moves_of_ones_own_equal_the_slow_walk():
    r = np.arange(13)
    rounds = [[Pairs(r[2:, None], r[:8], 0, to_space="scratch", count=3, reduce=True)], [Moves(3, 9, 1, r[:4])],
              [Moves(r % 5, r, 1, lambda: r + 4, count=r % 3)], [Moves(4, 4, r[:4], 5)]]
    schedule = Schedule("all_reduce", "own", 13, 4, 0, False, lambda: rounds)
    assert simulate(schedule, ODD, 10**8) == pytest.approx(walk(schedule, ODD, 10**8), rel=1e-12)


def test_shared_links_slow_down_what_goes_through_them():
    """Eight ranks of one node that all send to another node share its one link."""
    two_nodes = Topology("two", (Level(1, 1e-6, 100e9, 100e9), Level(8, 1e-6, 100e9, 100e9)))
    ring, exchange = build("all_gather", "ring", 16), build("all_to_all", "pairwise", 16)
    assert cost(ring, two_nodes)[1] == pytest.approx(15 / 16 / 100e9)
    assert cost(exchange, two_nodes)[1] == pytest.approx(8 * 8 / 16 / 100e9, rel=1e-6)


def test_calibration_is_near_what_was_measured():
    """NCCL's ring on 8 GPUs: every measured point within a quarter, though only latency was fitted."""
    measured = calibration()["h200"]["measured"]["all_reduce"]
    ring = build("all_reduce", "ring", 8)
    for nbytes, seconds in measured:
        assert simulate(ring, topology("h200"), nbytes) == pytest.approx(seconds, rel=0.25), nbytes


@pytest.mark.parametrize(("collective", "algorithm", "rounds"), [
    ("all_reduce", "ring", 32766), ("all_reduce", "double_tree", 28), ("all_reduce", "halving_doubling", 28),
    ("all_reduce", "hierarchical", 14 + 2 * 2047), ("all_reduce", "one_shot", 1), ("all_reduce", "two_shot", 2),
    ("all_to_all", "pairwise", 16383), ("broadcast", "ring", 16383), ("reduce_scatter", "ring", 16383)])
def test_16384_ranks(collective, algorithm, rounds, before_call):
    """Rounds that cost the same are evaluated once."""
    evaluated = []
    before_call(simulator, "_round", lambda *_: evaluated.append(1))
    schedule, second_a_round = build(collective, algorithm, 16384), Topology("", (Level(1, 1.0, inf, inf),))
    assert simulate(schedule, second_a_round, 1) == rounds
    whole = 2 if collective == "all_reduce" else 1  # of the bytes, through the link of a node
    assert cost(schedule, topology("h200-cluster"))[1] * 400e9 > whole * 16383 / 16384 / 1.01
    assert len(evaluated) < 600, "expected fewer evaluations than a chain of 16384 ranks has rounds"


def test_every_topology_says_where_its_numbers_come_from():
    for name, entry in calibration().items():
        assert {"hardware", "versions", "date", "method"} <= entry["provenance"].keys()
        assert topology(name).levels[0].ranks == 1
    with pytest.raises(InvalidArgument, match="unknown topology 'h300', expected one of h200"):
        topology("h300")
    for sizes in ((), (8,), (1, 8, 8), (1, 8, 12)):
        with pytest.raises(InvalidArgument, match=r"levels must grow from 1 rank, each a multiple .*, got \["):
            Topology("bad", tuple(Level(size, 0.0, 1.0, 1.0) for size in sizes))
