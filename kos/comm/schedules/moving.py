"""The algorithms that only move bytes, without those on trees: broadcast, all_gather, all_to_all, gather, scatter.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005);
Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems"
(1997).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kos.comm.schedules.patterns import Round, doubling, fold, ring_gather, wrapped
from kos.comm.schedules.registry import algorithm
from kos.comm.schedules.schedule import Moves, Rounds, moves


@algorithm("broadcast", "one_shot")
def one_shot_broadcast(n: int, c: int, root: int) -> Iterator[Round]:
    """The root sends everything to everybody."""
    yield [moves(root, (root + np.arange(1, n)) % n, 0, count=c)]


@algorithm("broadcast", "two_shot", parts=lambda n, c: n * c)
def two_shot_broadcast(n: int, c: int, root: int) -> Iterator[Round]:
    """The root scatters blocks, then all send theirs to all.  After van de Geijn's scatter and all-gather."""
    r = np.arange(n)
    others = r[r != root]
    yield [moves(root, others, others * c, count=c)]
    yield [moves(r, to, r * c, count=np.where(to == root, 0, c)) for to in ((r + s) % n for s in range(1, n))]


def _own(r: np.ndarray, c: int) -> Moves:
    return moves(r, r, 0, r * c, count=c, space="input", to_space="output")


@algorithm("all_gather", "ring")
def ring_all_gather(n: int, c: int) -> Iterator[Round]:
    """n - 1 rounds round a ring, one block each."""
    r = np.arange(n)
    yield [_own(r, c)]
    yield from ring_gather(r, (r + 1) % n, r, n, width=c, space="output")


@algorithm("all_gather", "halving_doubling")
def doubling_all_gather(n: int, c: int) -> Iterator[Round]:
    """Recursive doubling; other rank counts fold to a power of two.  Thakur, Rabenseifner, Gropp (2005)."""
    r = np.arange(n)
    member, edge = fold(n)
    odd = 2 * np.arange(n - len(member)) + 1
    yield [_own(r, c), moves(odd, odd - 1, 0, odd * c, count=c, space="input", to_space="output")]
    yield from doubling(member, edge * c, "output")
    yield [moves(odd - 1, odd, 0, count=n * c, space="output")]


@algorithm("all_gather", "bruck")
def bruck_all_gather(n: int, c: int) -> Iterator[Round]:
    """ceil(log2 n) rounds for any rank count: send the first 2^k blocks held to the rank 2^k before.

    Bruck (1997).
    """
    r = np.arange(n)
    yield [_own(r, c)]
    distance = 1
    while distance < n:
        yield wrapped(r, (r - distance) % n, r, min(distance, n - distance), n, c, space="output")
        distance *= 2


@algorithm("all_gather", "one_shot")
def one_shot_all_gather(n: int, c: int) -> Iterator[Round]:
    """Everybody sends its block to everybody at once."""
    r = np.arange(n)
    yield [moves(r, (r + s) % n, 0, r * c, count=c, space="input", to_space="output") for s in range(n)]


@algorithm("all_gather", "hierarchical")
def hierarchical_all_gather(n: int, c: int, local: int) -> Iterator[Round]:
    """A ring across nodes of equal places, then one in the node, so that each block enters a node once."""
    r = np.arange(n)
    node, place, nodes = r // local, r % local, n // local
    beside, across = node * local + (place + 1) % local, (r + local) % n
    yield [_own(r, c)]
    for step in range(nodes - 1):
        yield [moves(r, across, ((node - step) % nodes * local + place) * c, count=c, space="output")]
    for step in range(local - 1):
        block = np.arange(nodes) * local + (place[:, None] - step) % local
        yield [moves(r[:, None], beside[:, None], block * c, count=c, space="output")]


def _exchange(r: np.ndarray, shift: int, n: int, c: int) -> Moves:
    to = (r + shift) % n
    return moves(r, to, to * c, r * c, count=c, space="input", to_space="output")


@algorithm("all_to_all", "pairwise")
def pairwise_all_to_all(n: int, c: int) -> Iterator[Round]:
    """n - 1 rounds: in round s every rank sends to the one s after it and receives from the one s before."""
    r = np.arange(n)
    for shift in range(n):
        yield [_exchange(r, shift, n, c)]


@algorithm("all_to_all", "one_shot")
def one_shot_all_to_all(n: int, c: int) -> Iterator[Round]:
    """All blocks at once."""
    r = np.arange(n)
    yield [_exchange(r, shift, n, c) for shift in range(n)]


@algorithm("all_to_all", "bruck")
def bruck_all_to_all(n: int, c: int) -> Iterator[Round]:
    """ceil(log2 n) rounds of n / 2 blocks: a block that has j ranks to go travels 2^k where j has bit k.

    Scratch holds the blocks by their way j, then what is packed to be sent, then what came.  Bruck (1997).
    """
    r = np.arange(n)
    yield [moves(r, r, (r + j) % n * c, j * c, count=c, space="input", to_space="scratch") for j in range(n)]
    distance = 1
    while distance < n:
        way = np.flatnonzero(np.arange(n) & distance)
        packed, arrived = n + np.arange(len(way)), 2 * n + np.arange(len(way))
        yield [moves(r[:, None], r[:, None], way * c, packed * c, count=c, space="scratch")]
        yield [moves(r, (r + distance) % n, n * c, 2 * n * c, count=len(way) * c, space="scratch")]
        yield [moves(r[:, None], r[:, None], arrived * c, way * c, count=c, space="scratch")]
        distance *= 2
    yield [moves(r, r, j * c, (r - j) % n * c, count=c, space="scratch", to_space="output") for j in range(n)]


@algorithm("all_to_all", "hierarchical")
def hierarchical_all_to_all(n: int, c: int, local: int) -> Iterator[Round]:
    """In the node first, to the rank in the receiver's place; then across nodes, ``local`` blocks a message.

    The two-step all-to-all of MSCCL (Cowan et al., "MSCCLang", 2023).
    """
    r = np.arange(n)
    node, place, nodes = r // local, r % local, n // local
    every = np.arange(nodes) * local
    yield [moves(r[:, None], (r - place + to)[:, None], (every + to[:, None]) * c,
                 (every + place[:, None]) * c, count=c, space="input", to_space="scratch")
           for to in ((place + s) % local for s in range(local))]
    yield [moves(r, to * local + place, to * local * c, node * local * c, count=local * c, space="scratch",
                 to_space="output")
           for to in ((node + s) % nodes for s in range(nodes))]


@algorithm("gather", "direct")
def direct_gather(n: int, c: int, root: int) -> Iterator[Round]:
    """All send their block to the root."""
    r = np.arange(n)
    yield [moves(r, root, 0, r * c, count=c, space="input", to_space="output")]


@algorithm("gather", "tree")
def tree_gather(n: int, c: int, root: int) -> Iterator[Round]:
    """Up a binomial tree, blocks collecting on the way: ceil(log2 n) rounds.

    Thakur, Rabenseifner, Gropp (2005).
    """
    v = np.arange(n)
    rank = (v + root) % n
    yield [moves(root, root, 0, root * c, count=c, space="input", to_space="output"),
           moves(rank[1:], rank[1:], 0, rank[1:] * c, count=c, space="input", to_space="scratch")]
    for distance in (1 << k for k in range((n - 1).bit_length())):
        last, inner = np.split(v[v % (2 * distance) == distance], [1])
        yield [m for src, to_space in ((last, "output"), (inner, "scratch"))
               for m in wrapped(rank[src], rank[src - distance], rank[src], np.minimum(distance, n - src),
                                n, c, space="scratch", to_space=to_space)]


def backwards(rounds: Rounds) -> Iterator[Round]:
    """The same transfers the other way, the last first: of a gather, a scatter."""
    mirror = {"input": "output", "output": "input", "scratch": "scratch"}
    for families in reversed(list(rounds)):
        yield [moves(m.dst, m.src, m.to_chunk, m.chunk, count=m.count, space=mirror[m.to_space],
                     to_space=mirror[m.space]) for m in families]


@algorithm("scatter", "direct")
def direct_scatter(n: int, c: int, root: int) -> Iterator[Round]:
    """The root sends every rank its block."""
    return backwards(direct_gather(n, c, root))


@algorithm("scatter", "tree")
def tree_scatter(n: int, c: int, root: int) -> Iterator[Round]:
    """Down a binomial tree, each message half as long as the one before.

    Thakur, Rabenseifner, Gropp (2005).
    """
    return backwards(tree_gather(n, c, root))
