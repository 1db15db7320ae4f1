"""The model of ``kos.testing.conformance``, for small whole numbers, whose sum is the same in every order.

It is for tests that run any operation on any dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import kos
from kos import ReduceOp
from kos.testing.conformance import model
from kos.testing.conformance.model import MOVING, REDUCING, Trial, arguments, contributions, lengths, result

__all__ = ["NAMES", "REDUCING", "arguments", "result"]

OPS = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX)
NAMES = (*REDUCING, *MOVING[:-1], "barrier", "send_recv")


@dataclass(frozen=True, kw_only=True)
class Step(model.Step):
    group: int = 0
    mode: str = "call"  # call, async or batch
    values: str = "whole"


def inputs(seed: int, number: int, step: Step, members: list[int]) -> list[np.ndarray]:
    """What each member of the group gives."""
    return contributions(seed + 1000 * number, step, len(members))


def ramps(step: model.Step, n: int, start: int = 0) -> list[np.ndarray]:
    """What each rank gives in the float32 call of a campaign of faults, whose time may not go into random numbers."""
    return [np.arange(count, dtype=np.float32) % 64 + start + rank for rank, count in enumerate(lengths(step, n))]


def run(comm: kos.Communicator, step: Step, seed: int) -> None:
    """Call it and check what it did."""
    Trial(comm, step, seed).run()


def call(step: Step, comm: kos.Communicator, new: Callable[[int, Any], Any]) -> Any:
    """Make the call on arrays of its own, each ``new(count, dtype)``."""
    xs = contributions(0, step, comm.size)
    expected = result(step, xs, comm.rank)
    out = None if expected is None else new(expected.size, step.dtype)
    return model.call(comm, step, new(xs[comm.rank].size, step.dtype), out)
