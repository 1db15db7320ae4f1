"""The model of ``kos.testing.conformance`` with small whole numbers, of which every order of additions gives the same.

For tests that run any operation, of any dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

import kos
from kos import ReduceOp
from kos.testing.conformance import model
from kos.testing.conformance.model import MOVING, REDUCING, arguments
from tests.comm.ranks import assert_bits

__all__ = ["NAMES", "REDUCING", "arguments"]

OPS: dict[ReduceOp, Callable[[Any, Any], Any]] = {
    ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum
}  # fmt: skip
NAMES = (*REDUCING, *MOVING[:-1], "barrier", "send_recv")


@dataclass(frozen=True)
class Step(model.Step):
    group: int = 0
    mode: str = "call"  # call, async, batch or persistent


def inputs(seed: int, number: int, step: Step, members: list[int]) -> list[np.ndarray]:
    """What each member of the group gives."""
    return [
        np.random.default_rng([seed, number, rank]).integers(0, 5, length).astype(step.dtype)
        for rank, length in zip(members, model.lengths(step, len(members)), strict=True)
    ]


def result(step: Step, xs: list[np.ndarray], me: int) -> np.ndarray | None:
    """What member ``me`` gets."""
    parts = model.parts(step, xs, me)
    if parts is None:
        return None
    return reduce(OPS[step.op], parts) if step.name in REDUCING else np.concatenate(parts)


def prepare(
    comm: kos.Communicator, step: Step, seed: int, number: int = 0, members: list[int] | None = None
) -> tuple[list[Any], dict[str, Any], Callable[[], None]]:
    """What to call it with, and a check of what came of it."""
    xs = inputs(seed, number, step, members or list(range(comm.size)))
    before = xs[comm.rank]
    x, expected = before.copy(), result(step, xs, comm.rank)
    size = (x if expected is None else expected).size

    def arrays(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out = np.full(size, 99, step.dtype)
        return model.in_place(step, len(xs), comm.rank, x, out) if step.in_place else (x, out)

    (x, out), (kept, part) = arrays(x), arrays(before)
    if expected is not None:
        part[...] = expected

    def check() -> None:
        assert_bits(out, part, str(step))
        assert_bits(x, kept, f"the input of {step}")

    return *arguments(comm, step, x, out), check


def run(comm: kos.Communicator, step: Step, seed: int) -> None:
    """Call it and check what it did."""
    given, options, check = prepare(comm, step, seed)
    getattr(comm, step.name)(*given, **options)
    check()


def call(step: Step, comm: kos.Communicator, new: Callable[[int, Any], Any]) -> Any:
    """Make the call on arrays of its own, each ``new(count, dtype)``."""
    xs = inputs(0, 0, step, list(range(comm.size)))
    expected = result(step, xs, comm.rank)
    out = None if expected is None else new(expected.size, step.dtype)
    return model.call(comm, step, new(xs[comm.rank].size, step.dtype), out)
