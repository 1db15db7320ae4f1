"""The algorithms of each collective, and ``build``."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from kos.comm.schedules.schedule import IN_PLACE, ROOTED, Rounds, Schedule
from kos.comm.schedules.verify import verify
from kos.errors import InvalidArgument

Algorithm = tuple[Callable[..., Rounds], Callable[[int, int], int], bool]
"""The rounds of an algorithm, the chunks of a unit, and whether it adds in rank order."""

_REGISTRY: dict[str, dict[str, Algorithm]] = defaultdict(dict)


def algorithm(collective: str, name: str, *, parts: Callable[[int, int], int] = lambda n, c: c,
              ordered: bool = False) -> Callable[[Callable[..., Rounds]], Callable[..., Rounds]]:
    """Register a pure function of n ranks, c chunks and, if it names them, root and local (ranks a node).

    ``parts(n, c)`` is the number of chunks of a unit; ``Moves`` number the chunks of a unit.  The default is c.  A unit
    is the whole vector for collectives in place (all_reduce, reduce, broadcast, scan, exscan), else one rank's block.
    An all_reduce that splits the vector into one block for each rank has ``parts=lambda n, c: n * c``.

    ``ordered`` promises that contributions are added in rank order, ((x0 + x1) + x2) + ...; ``verify`` proves it.
    Calls with ``deterministic=True`` accept only such schedules.

    It replaces an earlier registration of the program under that name.  Raises InvalidArgument for a collective
    without schedules, the name of an algorithm of kos, and other parameters.
    """

    def register(rounds: Callable[..., Rounds]) -> Callable[..., Rounds]:
        if not _is_builtin(rounds):
            known = algorithms(collective)
            taken = ["auto", *(other for other in known if _is_builtin(_REGISTRY[collective][other][0]))]
            if not isinstance(name, str) or not name or name in taken:
                raise InvalidArgument(f"algorithm: expected a name other than {', '.join(taken)}, got {name!r}")
            if unknown := set(inspect.signature(rounds).parameters) - {"n", "c", "root", "local"}:
                names = ", ".join(sorted(unknown))
                raise InvalidArgument(f"{name}: expected a function of n, c, root and local, got one of {names}")
        _REGISTRY[collective][name] = rounds, parts, ordered
        build.cache_clear()
        runnable.cache_clear()
        return rounds
    return register


def _is_builtin(rounds: Callable[..., Rounds]) -> bool:
    return rounds.__module__.startswith("kos.comm.schedules.")


def collectives() -> tuple[str, ...]:
    """The collectives that have schedules."""
    return tuple(_REGISTRY)


def algorithms(collective: str, *, ordered: bool | None = None) -> tuple[str, ...]:
    """Names of the algorithms for ``collective``; with ``ordered``, only those that do (or do not) add in rank order.

    Raises InvalidArgument for an unknown collective.
    """
    if collective not in _REGISTRY:
        raise InvalidArgument(f"unknown collective {collective!r}, expected one of {', '.join(_REGISTRY)}")
    return tuple(name for name, (_, _, adds) in _REGISTRY[collective].items() if ordered in (None, adds))


def describe(collective: str, name: str) -> str:
    """The algorithm's docstring: its steps, its order of additions, its source.

    Raises InvalidArgument for an unknown collective or algorithm.
    """
    return inspect.getdoc(_find(collective, name)[0]) or ""


def _find(collective: str, name: str) -> Algorithm:
    known = algorithms(collective)
    if name not in known:
        raise InvalidArgument(f"unknown algorithm {name!r} for {collective}, expected one of {', '.join(known)}")
    return _REGISTRY[collective][name]


@lru_cache(maxsize=256)
def build(collective: str, algorithm: str, ranks: int, chunks: int = 1, root: int = 0, *,
          ranks_per_node: int | None = None) -> Schedule:
    """The schedule of one algorithm.

    ``chunks`` is the number of pipelined chunks of each of the algorithm's blocks (``execute`` also splits long
    messages).  ``root`` applies to broadcast, reduce, gather and scatter; ``ranks_per_node`` to hierarchical
    algorithms (default: the largest divisor of ``ranks`` up to 8).  Raises InvalidArgument for an unknown name,
    listing the known ones, and for numbers out of range.
    """
    rounds, parts, ordered = _find(collective, algorithm)
    for what, number in (("ranks", ranks), ("chunks", chunks), ("root", root), ("ranks_per_node", ranks_per_node or 1)):
        if not isinstance(number, int | np.integer):
            raise InvalidArgument(f"{what} must be a whole number, got {number!r}")
    local = next(d for d in range(8, 0, -1) if ranks % d == 0) if ranks_per_node is None else ranks_per_node
    for right, problem in (
        (ranks >= 1, f"ranks must be at least 1, got {ranks}"),
        (chunks >= 1, f"chunks must be at least 1, got {chunks}"),
        (0 <= root < ranks, f"root must be in 0..{ranks - 1}, got {root}"),
        (local >= 1 and ranks % local == 0, f"ranks must be a multiple of ranks_per_node, got {ranks} and {local}"),
    ):
        if not right:
            raise InvalidArgument(problem)
    given = {"n": ranks, "c": chunks, "root": root if collective in ROOTED else 0, "local": local}
    arguments = {name: given[name] for name in inspect.signature(rounds).parameters}
    return Schedule(collective, algorithm, ranks, parts(ranks, chunks), given["root"], ordered,
                    lambda: () if ranks == 1 and collective in IN_PLACE else rounds(**arguments))


@lru_cache(maxsize=256)
def runnable(collective: str, algorithm: str, ranks: int, root: int = 0, ranks_per_node: int | None = None) -> Schedule:
    """``build`` for backends: verifies the user's own algorithms.  Raises ScheduleError for an incorrect one."""
    schedule = build(collective, algorithm, ranks, root=root, ranks_per_node=ranks_per_node)
    if not _is_builtin(_REGISTRY[collective][algorithm][0]):
        verify(schedule)
    return schedule
