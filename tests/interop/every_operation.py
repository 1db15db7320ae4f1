"""Every operation of a communicator on the arrays of any library, with the results that NumPy expects.

A ``Library`` makes arrays and reads them; the same table runs on the host and on GPUs.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

import kos

COUNT = 6  # elements of a shard


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
    n, r, make, out = comm.size, comm.rank, library.make, library.out
    right, left = (r + 1) % n, (r - 1) % n
    everyone = [np.arange(n * count, dtype=np.float32) + 10 * k for k in range(n)]
    x, total = everyone[r], sum(everyone)
    counts = [count + k for k in range(n)]
    starts = np.cumsum([0, *counts])
    uneven = [np.arange(starts[-1], dtype=np.float32) + 10 * k for k in range(n)]
    to = [[1 + (i + j) % 2 for j in range(n)] for i in range(n)]  # elements from rank i to rank j

    def piece(i: int, j: int) -> np.ndarray:
        return everyone[i][sum(to[i][:j]) : sum(to[i][: j + 1])]

    def shard(values: np.ndarray) -> np.ndarray:
        return values[r * count : (r + 1) * count]

    def in_place(name: str, *arguments: Any) -> Any:
        options = {"out": out(x.shape)} if library.immutable else {}
        return getattr(comm, name)(make(x), *arguments, **options)

    def all_to_all_v() -> Any:
        given, got = to[r], [to[i][r] for i in range(n)]
        sent = make(np.ascontiguousarray(x[: sum(given)]))
        return comm.all_to_all_v(sent, given, got), np.concatenate([piece(i, r) for i in range(n)])

    def all_gather_v() -> Any:
        mine = np.ascontiguousarray(uneven[r][: counts[r]])
        return comm.all_gather_v(make(mine), counts), np.concatenate([uneven[k][: counts[k]] for k in range(n)])

    def messages() -> Any:
        target = out(x.shape)
        if n == 1:
            return None
        if r % 2 == 0 and r + 1 < n:
            comm.send(make(x), right)
        elif r % 2:
            return comm.recv(target, left), everyone[left]
        return None

    def send_recv() -> Any:
        return None if n == 1 else (comm.send_recv(make(x), out(x.shape), right, left), everyone[left])

    def only_on(root: int, result: Any, expected: np.ndarray) -> Any:
        return (result, expected) if r == root else None

    return {
        "all_reduce": lambda: (in_place("all_reduce"), total),
        "reduce": lambda: only_on(n - 1, in_place("reduce", n - 1), total),
        "broadcast": lambda: (in_place("broadcast", n - 1), everyone[n - 1]),
        "reduce_scatter": lambda: (comm.reduce_scatter(make(x)), shard(total)),
        "reduce_scatter_v": lambda: (
            comm.reduce_scatter_v(make(uneven[r]), counts), sum(uneven)[starts[r] : starts[r + 1]]
        ),
        "all_gather": lambda: (comm.all_gather(make(x)), np.stack(everyone)),
        "all_gather_v": all_gather_v,
        "all_to_all": lambda: (comm.all_to_all(make(x)), np.concatenate([shard(each) for each in everyone])),
        "all_to_all_v": all_to_all_v,
        "gather": lambda: only_on(0, comm.gather(make(x), 0), np.stack(everyone)),
        "scatter": lambda: (comm.scatter(make(x) if r == 0 else None, out((count,)), 0), shard(everyone[0])),
        "send, recv": messages,
        "send_recv": send_recv,
    }  # fmt: skip


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
