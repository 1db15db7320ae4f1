"""The algorithms on trees: chunks flow up (reduce), down (broadcast), or up and down again (all_reduce).

Going up, a parent adds its children's sums to its own contribution, first child first.  Each of m trees has an m-th
of the vector, so that the order of additions depends on an element's position, not on the number of chunks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np

from kos.comm.schedules.registry import algorithm
from kos.comm.schedules.schedule import Moves, Rounds

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
