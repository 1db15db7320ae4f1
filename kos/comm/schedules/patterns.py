"""Patterns that several algorithms share: rings, recursive halving and doubling.  All ranks at once, by NumPy."""

from __future__ import annotations

import numpy as np

from kos.comm.schedules.schedule import Moves, Repeat, Rounds


def ring(rank: np.ndarray, after: np.ndarray, position: np.ndarray, size: int, *, base: np.ndarray | int = 0,
         width: int = 1, space: str = "data", reduce: bool = False) -> Rounds:
    """All-gather round a ring, from position p with block p on; or reduce-scatter in place.

    That ends with block (p + 1) % size complete at p; block b is added from position b on: ((x_b + x_b+1) + ...).
    A block is ``width`` chunks from ``base`` on.
    """
    yield Repeat(size - 1, lambda step: [[Moves(rank, after, base + (position - step) % size * width, count=width,
                                                space=space, reduce=reduce)]])


def fold(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Participants of a power-of-two algorithm: (their ranks, first rank that each speaks for, then n).

    The first n - 2^k odd ranks are spoken for by the even rank before them.
    """
    q = np.arange(p := 1 << n.bit_length() - 1)
    member = q + np.minimum(q, n - p)
    return member, np.append(member, n)


def halving(member: np.ndarray, edge: np.ndarray, space: str = "data") -> Rounds:
    """Recursive halving: participant q ends with chunks edge[q]..edge[q+1] complete, in place."""
    q = np.arange(p := len(member))
    for distance in (p >> k for k in range(1, p.bit_length())):
        theirs = (q ^ distance) // distance * distance
        yield [Moves(member, member[q ^ distance], edge[theirs], count=edge[theirs + distance] - edge[theirs],
                     space=space, reduce=True)]


def doubling(member: np.ndarray, edge: np.ndarray, space: str = "data") -> Rounds:
    """Recursive doubling: participant q begins with chunks edge[q]..edge[q+1], all end with all."""
    q = np.arange(p := len(member))
    for distance in (1 << k for k in range(p.bit_length() - 1)):
        mine = q // distance * distance
        yield [Moves(member, member[q ^ distance], edge[mine], count=edge[mine + distance] - edge[mine], space=space)]
