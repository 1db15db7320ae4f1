"""The algorithms: ring, direct, halving and doubling, hierarchical; and those on trees.

Reductions have bit-identical results on all ranks: one rank finishes an element and the others copy it, or (one-shot)
all ranks add in the same order.  "In rank order" means ((x0 + x1) + x2) + ...

On trees, chunks flow up (reduce), down (broadcast), or up and down again (all_reduce).  Going up, a parent adds its
children's sums to its own contribution, first child first.  Each of m trees has an m-th of the vector, so that the
order of additions depends on an element's position, not on the number of chunks.
Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005);
Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms" (2009) for the ring.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from kos.comm.schedules.registry import algorithm
from kos.comm.schedules.schedule import Moves, Pairs, Repeat, Rounds


def ring(rank: np.ndarray, after: np.ndarray, position: np.ndarray, size: int, *, base: np.ndarray | int = 0,
         width: int = 1, stride: int = 0, space: str = "data", reduce: bool = False) -> Rounds:
    """All-gather on a ring, in which position p starts with block p; or reduce-scatter in place.

    The reduce-scatter ends with block (p + 1) % size complete at p; block b is added as ((x_b + x_b+1) + ...).
    A block is ``width`` chunks; the first is at ``base``, and each next one ``stride`` (default: ``width``) later.
    """
    yield Repeat(size - 1, lambda step: [[Moves(rank, after, base + (position - step) % size * (stride or width),
                                                count=width, space=space, reduce=reduce)]])


def in_rank_order(r: np.ndarray, chunk: np.ndarray, n: int, *, stride: int, count: int, space: str = "data",
                  to: np.ndarray | int | None = None, to_space: str | None = None) -> Rounds:
    """Ranks ``r`` fetch ``chunk`` of every rank at once, add the n contributions in rank order, and store.

    Contribution j is stored in scratch at j * stride + chunk; the sum replaces contribution 0.
    """
    every = np.arange(n)[:, None]
    yield [Pairs(every, r, chunk, lambda: chunk + every * stride, count=count, space=space, to_space="scratch"),
           Moves(0, 0, chunk[r == 0], count=count, space=space, to_space="scratch")]

    def add(j: int) -> list[Moves]:
        fetched = chunk[r != j]
        return [Moves(r[r != j], r[r != j], fetched + j * stride, fetched, count=count, space="scratch", reduce=True),
                Moves(j, j, chunk[r == j], count=count, space=space, to_space="scratch", reduce=True)]

    yield Repeat(n - 1, lambda k: [add(k + 1)])
    yield [Moves(r, r, chunk, to, count=count, space="scratch", to_space=to_space or space)]


@algorithm("all_reduce", "ring", parts=lambda n, c: n * c)
def ring_all_reduce(n: int, c: int) -> Rounds:
    """Reduce-scatter, then all-gather round one ring: 2 (n - 1) rounds of 1 / n of the bytes.

    Block b is added in ring order from rank b on.  Patarasuk, Yuan (2009).
    """
    r = np.arange(n)
    after = (r + 1) % n
    yield from ring(r, after, r, n, width=c, reduce=True)
    yield from ring(r, after, r + 1, n, width=c)


@algorithm("all_reduce", "halving_doubling", parts=lambda n, c: c << n.bit_length() - 1)
def halving_doubling_all_reduce(n: int, c: int) -> Rounds:
    """Recursive halving, then recursive doubling: 2 log2(n) rounds; other rank counts fold to a power of two.

    Of n = p + k ranks, p a power of two, the even rank before it stands in for each of the first k odd ranks.
    Partners are added furthest first (distance p/2, ..., 2, 1), after the folded neighbour.
    Rabenseifner, "Optimization of collective reduction operations" (2004).
    """
    q = np.arange(p := 1 << n.bit_length() - 1)
    member = q + np.minimum(q, n - p)  # the rank of participant q
    odd = 2 * np.arange(n - p) + 1
    yield [Moves(odd, odd - 1, 0, count=p * c, reduce=True)]
    for distance in (p >> k for k in range(1, p.bit_length())):
        theirs = (q ^ distance) // distance * distance
        yield [Moves(member, member[q ^ distance], theirs * c, count=distance * c, reduce=True)]
    for distance in (1 << k for k in range(p.bit_length() - 1)):
        yield [Moves(member, member[q ^ distance], q // distance * distance * c, count=distance * c)]
    yield [Moves(odd - 1, odd, 0, count=p * c)]


@algorithm("all_reduce", "one_shot", ordered=True)
def one_shot_all_reduce(n: int, c: int) -> Rounds:
    """Every rank sends everything to every other and adds in rank order.  One round of messages."""
    r = np.arange(n)
    yield from in_rank_order(r, r * 0, n, stride=c, count=c)


@algorithm("all_reduce", "two_shot", parts=lambda n, c: n * c, ordered=True)
def two_shot_all_reduce(n: int, c: int) -> Rounds:
    """Rank b fetches block b of every rank, adds in rank order, sends the sum to all: two shots."""
    r = np.arange(n)
    yield from in_rank_order(r, r * c, n, stride=n * c, count=c)
    yield [Pairs(r[:, None], r, r[:, None] * c, count=c)]


@algorithm("all_reduce", "hierarchical", parts=lambda n, c: n * c)
def hierarchical_all_reduce(n: int, c: int, local: int) -> Rounds:
    """Rings: reduce-scatter in the node, all-reduce of each rank's part across nodes, all-gather in the node.

    Added in ring order in the node, then in ring order of nodes.  As in Cho et al., "BlueConnect" (2019).
    """
    r = np.arange(n)
    node, place, nodes = r // local, r % local, n // local
    beside, across = node * local + (place + 1) % local, (r + local) % n
    mine = (place + 1) % local * nodes * c
    yield from ring(r, beside, place, local, width=nodes * c, reduce=True)
    yield from ring(r, across, node, nodes, base=mine, width=c, reduce=True)
    yield from ring(r, across, node + 1, nodes, base=mine, width=c)
    yield from ring(r, beside, place + 1, local, width=nodes * c)


@algorithm("reduce", "one_shot", ordered=True)
def one_shot_reduce(n: int, c: int, root: int) -> Rounds:
    """All send to the root, which adds in rank order."""
    yield from in_rank_order(np.array([root]), np.array([0]), n, stride=c, count=c)


@algorithm("reduce_scatter", "ring")
def ring_reduce_scatter(n: int, c: int) -> Rounds:
    """n - 1 rounds round a ring; block b is added in ring order from rank b + 1 on.

    Partial sums alternate between two scratch blocks; input is only read.
    """
    r = np.arange(n)
    if n == 1:
        yield [Moves(r, r, 0, count=c, space="input", to_space="output")]

    def step(k: int) -> Iterator[list[Moves]]:
        space, chunk = ("scratch", (k - 1) % 2 * c) if k else ("input", (r - 1) % n * c)
        to_space, to = ("scratch", k % 2 * c) if k < n - 2 else ("output", 0)
        yield [Moves(r, (r + 1) % n, chunk, to, count=c, space=space, to_space=to_space)]
        yield [Moves(r, r, (r - k - 2) % n * c, to, count=c, space="input", to_space=to_space, reduce=True)]

    yield Repeat(n - 1, step)


@algorithm("reduce_scatter", "one_shot", ordered=True)
def one_shot_reduce_scatter(n: int, c: int) -> Rounds:
    """Rank b fetches block b of every rank and adds in rank order.  One round of messages."""
    r = np.arange(n)
    yield from in_rank_order(r, r * c, n, stride=n * c, count=c, space="input", to=r * 0, to_space="output")


def _hops(n: int, c: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The senders of each round of a chain, c chunks behind one another, and the chunk that each sends on."""
    for time in range(n + c - 2):
        rank = np.arange(max(0, time - c + 1), min(time, n - 2) + 1)
        yield rank, time - rank


@algorithm("reduce_scatter", "hierarchical")
def hierarchical_reduce_scatter(n: int, c: int, local: int) -> Rounds:
    """Rings: in each node for the blocks of every node, its own last; then the node's sums across nodes.

    Added in ring order in the node, then in ring order of nodes.  Partial sums alternate between two scratch blocks.
    """
    if local in (1, n):
        yield from ring_reduce_scatter(n, c)
        return
    r = np.arange(n)
    node, place, nodes = r // local, r % local, n // local
    beside, across, last = node * local + (place + 1) % local, (r + local) % n, local % 2 * c

    def step(theirs: np.ndarray, k: int) -> Iterator[list[Moves]]:
        block, to = theirs * local + (place - k - 1) % local, theirs * 2 * c + k % 2 * c
        space, chunk = ("scratch", theirs * 2 * c + (k - 1) % 2 * c) if k else ("input", block * c)
        yield [Moves(r, beside, chunk, to, count=c, space=space, to_space="scratch")]
        mine = theirs * local + (place - k - 2) % local
        yield [Moves(r, r, mine * c, to, count=c, space="input", to_space="scratch", reduce=True)]

    for nearer in range(nodes):
        yield Repeat(local - 1, partial(step, (node - 1 - nearer) % nodes))
    yield from ring(r, across, node - 1, nodes, base=last, width=c, stride=2 * c, space="scratch", reduce=True)
    yield [Moves(r, r, node * 2 * c + last, 0, count=c, space="scratch", to_space="output")]


@algorithm("scan", "chain", ordered=True)
def chain_scan(n: int, c: int) -> Rounds:
    """Rank r gets the sum of the ranks before it from rank r - 1, adds its own, and sends that on.

    Sanders, Träff, "Parallel prefix (scan) algorithms for MPI" (2006), the linear pipeline.
    """
    for rank, chunk in _hops(n, c):
        after = rank + 1
        yield [Moves(rank, after, chunk, to_space="scratch")]
        yield [Moves(after, after, chunk, to_space="scratch", reduce=True)]
        yield [Moves(after, after, chunk, space="scratch", to_space="data")]


@algorithm("exscan", "chain", ordered=True)
def chain_exscan(n: int, c: int) -> Rounds:
    """As the chain of scan; rank r keeps what it gets, and sends on the sum with its own."""
    for rank, chunk in _hops(n, c):
        after, first = rank + 1, rank == 0
        yield [Moves(rank[first], after[first], chunk[first], to_space="scratch"),
               Moves(rank[~first], after[~first], chunk[~first] + c, chunk[~first], space="scratch")]
        yield [Moves(after, after, chunk, chunk + c, space="scratch")]
        yield [Moves(after, after, chunk, chunk + c, to_space="scratch", reduce=True)]
        yield [Moves(after, after, chunk, space="scratch", to_space="data")]


@algorithm("broadcast", "one_shot")
def one_shot_broadcast(n: int, c: int, root: int) -> Rounds:
    """The root sends everything to every rank."""
    yield [Moves(root, (root + np.arange(1, n)) % n, 0, count=c)]


@algorithm("broadcast", "two_shot", parts=lambda n, c: n * c)
def two_shot_broadcast(n: int, c: int, root: int) -> Rounds:
    """The root scatters blocks, then all send theirs to all.  After van de Geijn's scatter and all-gather."""
    r = np.arange(n)
    others = r[r != root]
    yield [Moves(root, others, others * c, count=c)]
    yield [Pairs(r[:, None], others, r[:, None] * c, count=c)]


@algorithm("all_gather", "ring")
def ring_all_gather(n: int, c: int) -> Rounds:
    """n - 1 rounds round a ring, one block each."""
    r = np.arange(n)
    yield [Moves(r, r, 0, r * c, count=c, space="input", to_space="output")]
    yield from ring(r, (r + 1) % n, r, n, width=c, space="output")


@algorithm("all_gather", "hierarchical")
def hierarchical_all_gather(n: int, c: int, local: int) -> Rounds:
    """Rings: a rank's block to the ranks with its local rank in other nodes, then all blocks within each node."""
    r = np.arange(n)
    node, place, nodes = r // local, r % local, n // local
    beside, across = node * local + (place + 1) % local, (r + local) % n
    yield [Moves(r, r, 0, r * c, count=c, space="input", to_space="output")]
    yield from ring(r, across, node, nodes, base=place * c, width=c, stride=local * c, space="output")
    for further in range(nodes):
        theirs = (node - further) % nodes * local
        yield from ring(r, beside, place, local, base=theirs * c, width=c, space="output")


@algorithm("all_gather", "one_shot")
def one_shot_all_gather(n: int, c: int) -> Rounds:
    """Every rank sends its block to every other at once."""
    r = np.arange(n)
    yield [Moves(r, r, 0, r * c, count=c, space="input", to_space="output"),
           Pairs(r[:, None], r, 0, r[:, None] * c, count=c, space="input", to_space="output")]


@algorithm("all_to_all", "pairwise")
def pairwise_all_to_all(n: int, c: int) -> Rounds:
    """n - 1 rounds: in round s every rank sends to the one s after it and receives from the one s before."""
    r = np.arange(n)

    def send(to: np.ndarray) -> Moves:
        return Moves(r, to, to * c, r * c, count=c, space="input", to_space="output")

    yield [send(r)]
    yield Repeat(n - 1, lambda k: [[send((r + k + 1) % n)]], shifts=True)


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


Parents = tuple[np.ndarray, ...]
"""For each tree: the parent of every node; node 0 is the root, and its own parent."""


def chain(n: int, local: int) -> Parents:
    """a chain of all ranks, chunks behind one another."""
    return (np.maximum(np.arange(n) - 1, 0),)


def binary(n: int, local: int) -> Parents:
    """a balanced binary tree, chunks behind one another."""
    return (np.maximum((np.arange(n) - 1) // 2, 0),)


def two_trees(n: int, local: int) -> Parents:
    """a binary tree for the first half, for the second another in which the inner ranks are leaves of the first.

    Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009).
    The first is the in-order tree on 1..n-1 (odd nodes are leaves); the second is its mirror image, or
    the same shifted by one where mirroring would keep the parity.  NCCL uses the same pair.
    """
    node = np.arange(n)
    low = node & -node
    first = (node ^ low) | (low << 1)
    first = np.where(first < n, first, node ^ low)
    rename = np.where(node == 0, 0, n - node if n % 2 else node % max(n - 1, 1) + 1)
    second = np.empty_like(first)
    second[rename] = rename[first]
    return first, second


def nodes_and_ranks(n: int, local: int) -> Parents:
    """a binary tree of nodes, and below each of its members a binary tree in the node."""
    node, place = np.divmod(np.arange(n), local)
    return (np.where(place == 0, np.maximum((node - 1) // 2, 0) * local, node * local + (place - 1) // 2),)


def levels(parent: np.ndarray) -> np.ndarray:
    """Distance of every node from node 0."""
    level, above = (np.arange(len(parent)) > 0).astype(int), parent  # the distance from ``above``, ever further up
    while above.any():
        level, above = level + level[above], above[above]
    return level


def flow(trees: Parents, name: np.ndarray, c: int, *, up: bool, down: bool) -> Rounds:
    """One chunk a round enters each tree; node v is rank name[v], and tree k has c chunks from k c on."""
    child = np.arange(1, len(name))
    depth = max(int(levels(parent).max()) for parent in trees)
    families = []  # (source, destination, round of the first chunk: in that order; chunks; whether they are added)
    for k, parent in enumerate(trees):
        below, above, level = name[child], name[parent[child]], levels(parent)[child]
        for src, dst, first, adds in ((below, above, depth - level, True),) * up + (
                (above, below, depth * up + level - 1, False),) * down:
            order = np.argsort(first, kind="stable")
            families.append((src[order], dst[order], first[order], k * c + np.arange(c), adds))
    for time in range(depth * (up + down) + c - 1):
        yield [Moves(src[on], dst[on], chunks[time - first[on]], reduce=adds)
               for src, dst, first, chunks, adds in families
               for on in (slice(*np.searchsorted(first, (time - c, time), "right")),)]


def _register(collective: str, name: str, trees: Callable[[int, int], Parents], way: str) -> None:
    def rounds(n: int, c: int, root: int, local: int) -> Rounds:
        inside = local if name == "hierarchical" else n
        node, place = np.divmod(np.arange(n), inside)
        names = (node + root // inside) % (n // inside) * inside + (place + root) % inside
        yield from flow(trees(n, local), names, c, up="up" in way, down="down" in way)

    rounds.__doc__ = f"{way.capitalize()} {inspect.getdoc(trees)}"
    algorithm(collective, name, parts=lambda n, c: 2 * c if trees is two_trees else c)(rounds)


for _name, _trees in (("ring", chain), ("tree", binary), ("double_tree", two_trees), ("hierarchical", nodes_and_ranks)):
    _register("reduce", _name, _trees, "up")
    _register("broadcast", _name, _trees, "down")
_register("all_reduce", "tree", binary, "up and down")
_register("all_reduce", "double_tree", two_trees, "up and down")
