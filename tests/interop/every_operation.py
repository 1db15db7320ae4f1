"""Every operation of a communicator on the arrays of any library, with the results of the conformance suite's model.

A ``Library`` makes arrays and reads them; the same table runs on the host and on GPUs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

import kos
from kos.testing.conformance.model import IN_PLACE, MOVING, REDUCING, Step, call, contributions, result

COUNT = 6  # elements of a shard
OUT = ("scatter", "scatter_v", "send_recv")
"""Operations that make no array for their result."""


class Library(Protocol):
    """How a test makes and reads the arrays of one library."""

    immutable: bool
    """Whether its arrays cannot be written: operations in place then write to an array of ``out``."""

    def make(self, values: np.ndarray) -> Any:
        """An array of the library with these values."""

    def out(self, shape: tuple[int, ...]) -> Any:
        """A float32 array that kos may write, beside those of ``make``."""

    def values(self, x: Any) -> np.ndarray:
        """The values of an array, of the library or of kos."""


def operations(comm: kos.Communicator, library: Library, count: int = COUNT) -> dict[str, Callable[[], Any]]:
    """By name: a function that calls the operation and returns (result, expected), or None on a rank without one."""
    n, me = comm.size, comm.rank
    uneven = tuple(count + rank for rank in range(n))
    pairs = tuple(tuple(1 + (i + j) % 2 for j in range(n)) for i in range(n))  # elements from rank i to rank j

    def called(name: str) -> Any:
        in_place, counts = name in IN_PLACE and not library.immutable, pairs if name == "all_to_all_v" else uneven
        step = Step(name, count, root=n - 1, in_place=in_place, counts=counts, values="whole")
        xs = contributions(0, step, n)
        expected, given = result(step, xs, me), name in (*OUT, *IN_PLACE)
        out = library.out(expected.shape if expected is not None else xs[me].shape) if given else None
        got = call(comm, step, library.make(xs[me]), out)
        if expected is None:
            return None
        return got, expected.reshape(n, -1) if name in ("all_gather", "gather") else expected

    def messages() -> Any:
        x, target = np.full(count, me, np.float32), library.out((count,))
        if me % 2 == 0 and me + 1 < n:
            comm.send(library.make(x), me + 1)
        elif me % 2:
            return comm.recv(target, me - 1), x - 1
        return None

    names = (*REDUCING, *MOVING) if n > 1 else (*REDUCING, *MOVING[:-1])  # send_recv takes another rank
    return {"send, recv": messages, **{name: partial(called, name) for name in names}}


def check(library: Library, name: str, result: Any) -> None:
    """Fail unless an entry of ``operations`` returned what it expects."""
    if result is not None:
        got, expected = library.values(result[0]), np.asarray(result[1])
        assert got.shape == expected.shape, f"{name}: expected shape {expected.shape}, got {got.shape}"
        wrong = got != expected
        assert not wrong.any(), f"{name}: {wrong.sum()} of {wrong.size} are wrong, such as {got[wrong][:4]}"


class OnlyDLPack:
    """An array of a library that kos does not know: it has nothing but DLPack."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()
