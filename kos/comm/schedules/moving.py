"""The algorithms that only move bytes, without those on trees: broadcast, all_gather, all_to_all, gather, scatter.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005);
Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems"
(1997).
"""

from __future__ import annotations

import numpy as np

from kos.comm.schedules.patterns import doubling, fold, ring
from kos.comm.schedules.registry import algorithm
from kos.comm.schedules.schedule import Moves, Pairs, Repeat, Rounds


@algorithm("broadcast", "one_shot")
def one_shot_broadcast(n: int, c: int, root: int) -> Rounds:
    """The root sends everything to everybody."""
    yield [Moves(root, (root + np.arange(1, n)) % n, 0, count=c)]


@algorithm("broadcast", "two_shot", parts=lambda n, c: n * c)
def two_shot_broadcast(n: int, c: int, root: int) -> Rounds:
    """The root scatters blocks, then all send theirs to all.  After van de Geijn's scatter and all-gather."""
    r = np.arange(n)
    others = r[r != root]
    yield [Moves(root, others, others * c, count=c)]
    yield [Pairs(r[:, None], others, r[:, None] * c, count=c)]


def _own(r: np.ndarray, c: int) -> Moves:
    return Moves(r, r, 0, r * c, count=c, space="input", to_space="output")


@algorithm("all_gather", "ring")
def ring_all_gather(n: int, c: int) -> Rounds:
    """n - 1 rounds round a ring, one block each."""
    r = np.arange(n)
    yield [_own(r, c)]
    yield from ring(r, (r + 1) % n, r, n, width=c, space="output")


@algorithm("all_gather", "halving_doubling")
def doubling_all_gather(n: int, c: int) -> Rounds:
    """Recursive doubling; other rank counts fold to a power of two.  Thakur, Rabenseifner, Gropp (2005)."""
    r = np.arange(n)
    member, edge = fold(n)
    odd = 2 * np.arange(n - len(member)) + 1
    yield [_own(r, c), Moves(odd, odd - 1, 0, odd * c, count=c, space="input", to_space="output")]
    yield from doubling(member, edge * c, "output")
    yield [Moves(odd - 1, odd, 0, count=n * c, space="output")]


@algorithm("all_gather", "one_shot")
def one_shot_all_gather(n: int, c: int) -> Rounds:
    """Everybody sends its block to everybody at once."""
    r = np.arange(n)
    yield [_own(r, c), Pairs(r[:, None], r, 0, r[:, None] * c, count=c, space="input", to_space="output")]


@algorithm("all_to_all", "pairwise")
def pairwise_all_to_all(n: int, c: int) -> Rounds:
    """n - 1 rounds: in round s every rank sends to the one s after it and receives from the one s before."""
    r = np.arange(n)

    def send(to: np.ndarray) -> Moves:
        return Moves(r, to, to * c, r * c, count=c, space="input", to_space="output")

    yield [send(r)]
    yield Repeat(n - 1, lambda k: [[send((r + k + 1) % n)]], shifts=True)


@algorithm("all_to_all", "bruck")
def bruck_all_to_all(n: int, c: int) -> Rounds:
    """ceil(log2 n) rounds of n / 2 blocks: a block that has j ranks to go travels 2^k where j has bit k.

    Scratch holds the blocks by their way j, then what is packed to be sent, then what came.  Bruck (1997).
    """
    r = np.arange(n)
    yield [Moves(r, r, r * c, 0, count=(n - r) * c, space="input", to_space="scratch"),
           Moves(r, r, 0, (n - r) * c, count=r * c, space="input", to_space="scratch")]
    distance = 1
    while distance < n:
        way = np.flatnonzero(np.arange(n) & distance)
        packed, arrived = n + np.arange(len(way)), 2 * n + np.arange(len(way))
        yield [Moves(r[:, None], r[:, None], way * c, packed * c, count=c, space="scratch")]
        yield [Moves(r, (r + distance) % n, n * c, 2 * n * c, count=len(way) * c, space="scratch")]
        yield [Moves(r[:, None], r[:, None], arrived * c, way * c, count=c, space="scratch")]
        distance *= 2
    yield [Moves(r[:, None], r[:, None], r * c, lambda: (r[:, None] - r) % n * c, count=c, space="scratch",
                 to_space="output")]


@algorithm("gather", "direct")
def direct_gather(n: int, c: int, root: int) -> Rounds:
    """All send their block to the root."""
    r = np.arange(n)
    yield [Moves(r, root, 0, r * c, count=c, space="input", to_space="output")]


@algorithm("scatter", "direct")
def direct_scatter(n: int, c: int, root: int) -> Rounds:
    """The root sends every rank its block."""
    r = np.arange(n)
    yield [Moves(root, r, r * c, 0, count=c, space="input", to_space="output")]
