"""Patterns that several algorithms share: rings, trees, recursive halving.  All ranks at once, by NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kos.comm.schedules.schedule import Moves, moves

Round = list[Moves]


def ring_reduce(rank: np.ndarray, after: np.ndarray, position: np.ndarray, size: int, *,
                base: np.ndarray | int = 0, width: int = 1) -> Iterator[Round]:
    """Reduce-scatter round a ring in place; position p ends with block (p + 1) % size complete.

    A block is ``width`` chunks from ``base`` on.  Added from position b on: ((x_b + x_b+1) + ...), block b.
    """
    for step in range(size - 1):
        yield [moves(rank, after, base + (position - step) % size * width, count=width, reduce=True)]


def ring_gather(rank: np.ndarray, after: np.ndarray, position: np.ndarray, size: int, *,
                base: np.ndarray | int = 0, width: int = 1, space: str = "data") -> Iterator[Round]:
    """All-gather round a ring; position p begins with block p."""
    for step in range(size - 1):
        yield [moves(rank, after, base + (position - step) % size * width, count=width, space=space)]


def binary_tree(n: int) -> np.ndarray:
    """Parent of every node of the balanced tree in heap order; node 0 is the root, its own parent."""
    return np.maximum((np.arange(n) - 1) // 2, 0)


def two_trees(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Two binary trees below node 0 in which no other node is an inner node of both.

    Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009).
    The first is the in-order tree on 1..n-1 (odd nodes are leaves); the second is its mirror image, or
    the same shifted by one where mirroring would keep the parity.
    """
    node = np.arange(n)
    low = node & -node
    first = (node ^ low) | (low << 1)
    first = np.where(first < n, first, node ^ low)
    rename = np.where(node == 0, 0, n - node if n % 2 else node % max(n - 1, 1) + 1)
    second = np.empty_like(first)
    second[rename] = rename[first]
    return first, second


def node_tree(n: int, local: int, root: int) -> tuple[np.ndarray, np.ndarray]:
    """A binary tree of nodes, a binary tree inside each: (parents, ranks in the tree's order, root first)."""
    v = np.arange(n)
    node, place = v // local, v % local
    parent = np.where(place == 0, np.maximum((node - 1) // 2, 0) * local, node * local + (place - 1) // 2)
    name = (node + root // local) % (n // local) * local + (place + root) % local
    return parent, name


def levels(parent: np.ndarray) -> np.ndarray:
    """Distance of every node from node 0."""
    level = np.zeros_like(parent)
    node = parent.copy()
    while node.any():
        level += node != 0
        node = parent[node]
    level[1:] += 1
    return level


def up_tree(parent: np.ndarray, name: np.ndarray, chunks: np.ndarray, *, level: np.ndarray,
            depth: int, time: int) -> Moves:
    """What children send up at ``time`` when chunks leave one after the other; node v is rank name[v]."""
    child = np.arange(1, len(parent))
    k = time - (depth - level[1:])
    child, k = child[on := (k >= 0) & (k < len(chunks))], k[on]
    return moves(name[child], name[parent[child]], chunks[k], reduce=True)


def down_tree(parent: np.ndarray, name: np.ndarray, chunks: np.ndarray, *, level: np.ndarray,
              time: int) -> Moves:
    """What parents send down at ``time``."""
    child = np.arange(1, len(parent))
    k = time - (level[1:] - 1)
    child, k = child[on := (k >= 0) & (k < len(chunks))], k[on]
    return moves(name[parent[child]], name[child], chunks[k])


def pipeline(trees: list[tuple[np.ndarray, np.ndarray]], name: np.ndarray, *, up: bool, down: bool
             ) -> Iterator[Round]:
    """Chunks flow up and/or down the (parent, chunks) trees, one chunk a round entering each tree."""
    flows = [(parent, chunks, levels(parent)) for parent, chunks in trees]
    depth = max(int(level.max()) for *_, level in flows)
    longest = max(len(chunks) for _, chunks, _ in flows)
    for time in range(depth * (up + down) + longest - 1):
        families = []
        for parent, chunks, level in flows:
            if up:
                families.append(up_tree(parent, name, chunks, level=level, depth=depth, time=time))
            if down:
                families.append(down_tree(parent, name, chunks, level=level, time=time - depth * up))
        yield families


def fold(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Participants of a power-of-two algorithm: (their ranks, first rank that each speaks for, then n).

    The first n - 2^k odd ranks are spoken for by the even rank before them.
    """
    p = 1 << n.bit_length() - 1
    q = np.arange(p)
    member = q + np.minimum(q, n - p)
    return member, np.append(member, n)


def halving(member: np.ndarray, edge: np.ndarray, space: str = "data") -> Iterator[Round]:
    """Recursive halving: participant q ends with chunks edge[q]..edge[q+1] complete, in place."""
    q = np.arange(p := len(member))
    distance = p // 2
    while distance:
        theirs = (q ^ distance) // distance * distance
        yield [moves(member, member[q ^ distance], edge[theirs], count=edge[theirs + distance] - edge[theirs],
                     space=space, reduce=True)]
        distance //= 2


def doubling(member: np.ndarray, edge: np.ndarray, space: str = "data") -> Iterator[Round]:
    """Recursive doubling: participant q begins with chunks edge[q]..edge[q+1], all end with all."""
    q = np.arange(p := len(member))
    distance = 1
    while distance < p:
        mine = q // distance * distance
        yield [moves(member, member[q ^ distance], edge[mine], count=edge[mine + distance] - edge[mine],
                     space=space)]
        distance *= 2


def wrapped(src: np.ndarray, dst: np.ndarray, start: np.ndarray, count: np.ndarray | int, n: int, width: int,
            *, space: str, to_space: str | None = None) -> Round:
    """Move ``count`` blocks of ``width`` chunks from block ``start`` on, going on at 0 after block n - 1."""
    first = np.minimum(count, n - start)
    return [moves(src, dst, start * width, count=first * width, space=space, to_space=to_space),
            moves(src, dst, 0 * start, count=(count - first) * width, space=space, to_space=to_space)]
