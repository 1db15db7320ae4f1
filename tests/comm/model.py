"""A serial model of every operation, and what it is called with: for tests that run all of them.

Numbers are small and whole, so that every order of additions gives the same bits in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

import kos
from kos import ReduceOp
from kos.comm.schedules import algorithms, collectives
from tests.comm.ranks import assert_bits

OPS: dict[ReduceOp, Callable[[Any, Any], Any]] = {
    ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum
}  # fmt: skip
NAMES = (
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v", "broadcast", "all_gather", "all_gather_v",
    "all_to_all", "all_to_all_v", "gather", "scatter", "barrier", "send_recv",
)  # fmt: skip
REDUCING = NAMES[:3]


@dataclass(frozen=True)
class Step:
    """One operation; what depends on the size of its group is taken modulo that."""

    name: str
    group: int = 0
    count: int = 6
    dtype: Any = np.float32
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    algorithm: int = 0  # 0: auto
    deterministic: bool = False
    in_place: bool = False
    mode: str = "call"  # call, async, batch or persistent


def inputs(seed: int, number: int, step: Step, members: list[int]) -> list[np.ndarray]:
    """What each member of the group gives."""
    n, count = len(members), step.count
    lengths = {
        "reduce_scatter": [count * n] * n, "all_to_all": [count * n] * n, "scatter": [count * n] * n,
        "reduce_scatter_v": [sum(uneven(step, n))] * n, "all_gather_v": uneven(step, n),
        "all_to_all_v": [sum(pairs(step, n)[i]) for i in range(n)],
    }.get(step.name, [count] * n)  # fmt: skip
    return [
        np.random.default_rng([seed, number, rank]).integers(0, 5, length).astype(step.dtype)
        for rank, length in zip(members, lengths, strict=True)
    ]


def uneven(step: Step, n: int) -> list[int]:
    return [(step.count + i) % 4 for i in range(n)]


def pairs(step: Step, n: int) -> list[list[int]]:
    return [[(step.count + 2 * i + j) % 3 for j in range(n)] for i in range(n)]


def result(step: Step, xs: list[np.ndarray], me: int) -> np.ndarray | None:
    """What member ``me`` gets."""
    n, root = len(xs), step.root % len(xs)
    total = reduce(OPS[step.op], xs) if step.name.startswith(("all_reduce", "reduce")) else None
    cuts = np.cumsum(uneven(step, n))[:-1]
    if step.name == "all_reduce":
        return total
    if step.name == "reduce":
        return total if me == root else None
    if step.name == "reduce_scatter":
        return total.reshape(n, -1)[me]
    if step.name == "reduce_scatter_v":
        return np.split(total, cuts)[me]
    if step.name == "broadcast":
        return xs[root]
    if step.name in ("all_gather", "all_gather_v"):
        return np.concatenate(xs)
    if step.name == "all_to_all":
        return np.concatenate([x.reshape(n, -1)[me] for x in xs])
    if step.name == "all_to_all_v":
        return np.concatenate([np.split(x, np.cumsum(pairs(step, n)[i])[:-1])[me] for i, x in enumerate(xs)])
    if step.name == "gather":
        return np.concatenate(xs) if me == root else None
    if step.name == "scatter":
        return xs[root].reshape(n, -1)[me]
    return xs[(me - 1) % n] if step.name == "send_recv" else None


def arguments(comm: kos.Communicator, step: Step, x: Any, out: Any) -> tuple[list[Any], dict[str, Any]]:
    """What the operation is called with."""
    n, me, root = comm.size, comm.rank, step.root % comm.size
    options: dict[str, Any] = {}
    if step.name in REDUCING:
        options = {"op": step.op, "deterministic": step.deterministic}
    if step.name in collectives() and step.algorithm:
        known = algorithms(step.name, ordered=True if options.get("deterministic") else None)
        options["algorithm"] = known[step.algorithm % len(known)]
    if step.name in ("all_reduce", "reduce", "broadcast") and not step.in_place:
        options["out"] = out
    return {
        "all_reduce": [x], "reduce": [x, root], "reduce_scatter": [x, out], "broadcast": [x, root],
        "reduce_scatter_v": [x, uneven(step, n), out, step.op], "all_gather": [x, out],
        "all_gather_v": [x, uneven(step, n), out], "all_to_all": [x, out],
        "all_to_all_v": [x, pairs(step, n)[me], [pairs(step, n)[i][me] for i in range(n)], out],
        "gather": [x, root, out if me == root else None], "scatter": [x if me == root else None, out, root],
        "barrier": [], "send_recv": [x, out, (me + 1) % n, (me - 1) % n],
    }[step.name], options  # fmt: skip


def prepare(
    comm: kos.Communicator, step: Step, seed: int, number: int = 0, members: list[int] | None = None
) -> tuple[list[Any], dict[str, Any], Callable[[], None]]:
    """What to call it with, and a check of what came of it."""
    xs = inputs(seed, number, step, members or list(range(comm.size)))
    before = xs[comm.rank]
    x, expected = before.copy(), result(step, xs, comm.rank)
    in_place = step.in_place and step.name in ("all_reduce", "reduce", "broadcast")
    out = x if in_place or expected is None else np.full(expected.size, 99, step.dtype)

    def check() -> None:
        if expected is not None:
            assert_bits(out.reshape(-1), expected, str(step))
        if out is not x or expected is None:
            assert_bits(x, before, f"the input of {step}")

    return *arguments(comm, step, x, out), check


def run(comm: kos.Communicator, step: Step, seed: int) -> None:
    """Call it and check what it did."""
    given, options, check = prepare(comm, step, seed)
    getattr(comm, step.name)(*given, **options)
    check()
