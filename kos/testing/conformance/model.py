"""A serial model of every operation: its arguments, and the parts of each rank's result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kos.comm import Communicator, ReduceOp
from kos.comm.schedules import algorithms, collectives
from kos.testing.conformance.values import inputs

Array = np.ndarray[Any, Any]

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v", "scan", "exscan")
MOVING = (
    "broadcast", "all_gather", "all_gather_v", "all_to_all", "all_to_all_v", "gather", "gather_v", "scatter",
    "scatter_v", "send_recv",
)  # fmt: skip
IN_PLACE = ("all_reduce", "reduce", "scan", "exscan", "broadcast")
GATHERING = ("all_gather", "all_gather_v", "gather", "gather_v")
SCATTERING = ("reduce_scatter", "reduce_scatter_v", "scatter", "scatter_v")
ROOTED = ("reduce", "broadcast", "gather", "gather_v", "scatter", "scatter_v")


@dataclass(frozen=True)
class Step:
    """One call; values that depend on the size of the group are taken modulo that size."""

    name: str
    count: int = 6  # elements
    dtype: Any = np.float32
    op: Any = ReduceOp.SUM
    root: int = 0
    algorithm: int = 0  # 0: auto; else by number
    deterministic: bool = False
    in_place: bool = False
    sized: bool = field(default=True, kw_only=True)  # whether a form with counts gets them

    def __str__(self) -> str:
        """The call as text, such as ``broadcast of 7 x float32, root 1``."""
        shown = {"op": self.op if self.name in REDUCING else None, "root": self.root if self.name in ROOTED else None}
        shown |= {name: getattr(self, name) or None for name in ("algorithm", "deterministic")}
        words = [f"{name} {value}" for name, value in shown.items() if value is not None]
        return ", ".join([f"{self.name} of {self.count} x {np.dtype(self.dtype)}", *words])


def uneven(step: Step, n: int) -> list[int]:
    """The elements of each rank in a form with one list of counts."""
    return [(step.count + rank) % 4 for rank in range(n)]


def pairs(step: Step, n: int) -> list[list[int]]:
    """The elements from each rank (row) to each (column) in an all_to_all_v."""
    return [[(step.count + 2 * row + column) % 3 for column in range(n)] for row in range(n)]


def lengths(step: Step, n: int) -> list[int]:
    """The elements of each rank's input."""
    if step.name in ("reduce_scatter", "all_to_all", "scatter"):
        return [step.count * n] * n
    if step.name == "all_to_all_v":
        return [sum(row) for row in pairs(step, n)]
    counts = uneven(step, n)
    if step.name in ("reduce_scatter_v", "scatter_v"):
        return [sum(counts)] * n
    return counts if step.name in ("all_gather_v", "gather_v") else [step.count] * n


def in_place(step: Step, n: int, me: int, x: Array, out: Array) -> tuple[Array, Array]:
    """The arrays of the call in place, which hold what ``x`` does: the same one twice, or one is a part of the other.

    Those given, for an operation that has no such form or a rank that passes one array.
    """
    counts = uneven(step, n) if step.name.endswith("_v") else [step.count] * n
    part, is_root = slice(sum(counts[:me]), sum(counts[: me + 1])), me == step.root % n
    if step.name in IN_PLACE:
        return x, x
    if step.name in GATHERING and (is_root or step.name.startswith("all")):
        out[part] = x
        return out[part], out
    return (x, x[part]) if step.name in SCATTERING and (is_root or step.name.startswith("reduce")) else (x, out)


def contributions(seed: int, step: Step, n: int) -> list[Array]:
    """The input of each rank: random values of the dtype."""
    return [inputs(seed + rank, 1, length, step.dtype)[0] for rank, length in enumerate(lengths(step, n))]


def parts(step: Step, xs: list[Array], me: int) -> list[Array] | None:
    """The parts of rank ``me``'s result, to be reduced or concatenated; None if it has no result."""
    n, root = len(xs), step.root % len(xs)
    if step.name in ("reduce", "gather", "gather_v") and me != root:
        return None
    if step.name in ("scan", "exscan"):
        return xs[: me + (step.name == "scan")] or None
    if step.name in ("reduce_scatter", "all_to_all"):
        return [x.reshape(n, -1)[me] for x in xs]
    if step.name == "reduce_scatter_v":
        return [np.split(x, np.cumsum(uneven(step, n))[:-1])[me] for x in xs]
    if step.name == "all_to_all_v":
        return [np.split(x, np.cumsum(row)[:-1])[me] for x, row in zip(xs, pairs(step, n), strict=True)]
    if step.name == "scatter":
        return [xs[root].reshape(n, -1)[me]]
    if step.name == "scatter_v":
        return [np.split(xs[root], np.cumsum(uneven(step, n))[:-1])[me]]
    if step.name in ("broadcast", "send_recv"):
        return [xs[root if step.name == "broadcast" else me - 1]]
    return xs if step.name != "barrier" else None


def arguments(comm: Communicator, step: Step, x: Any, out: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the call; without ``out`` it makes an array, or works in place."""
    n, me, root = comm.size, comm.rank, step.root % comm.size
    options: dict[str, Any] = {}
    if step.name in REDUCING[:3]:
        options = {"op": step.op, "deterministic": step.deterministic}
    if step.name in collectives() and step.algorithm:
        known = algorithms(step.name, ordered=True if options.get("deterministic") else None)
        options["algorithm"] = known[step.algorithm % len(known)]
    if step.name in IN_PLACE and not step.in_place:
        options["out"] = out
    counts, table = uneven(step, n) if step.sized else None, pairs(step, n)
    from_each = [row[me] for row in table] if step.sized else None
    return {
        "all_reduce": [x], "scan": [x, step.op], "exscan": [x, step.op],
        "reduce": [x, root], "reduce_scatter": [x, out], "broadcast": [x, root],
        "reduce_scatter_v": [x, counts, out, step.op], "all_gather": [x, out], "all_gather_v": [x, counts, out],
        "all_to_all": [x, out], "all_to_all_v": [x, table[me], from_each, out],
        "gather": [x, root, out if me == root else None], "scatter": [x if me == root else None, out, root],
        "gather_v": [x, counts, root, out if me == root else None],
        "scatter_v": [x if me == root else None, counts, out, root],
        "barrier": [], "send_recv": [x, out, (me + 1) % n, (me - 1) % n],
    }[step.name], options  # fmt: skip


def call(comm: Communicator, step: Step, x: Any, out: Any) -> Any:
    """Make the call; returns its result."""
    given, options = arguments(comm, step, x, out)
    return getattr(comm, step.name)(*given, **options)
