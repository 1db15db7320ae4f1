"""Running one test function on every rank of a group, whoever carries the group.

A failed assertion on one rank must not leave the others waiting: ``run`` catches it, all ranks tell each
other how they fared, and every rank of the test fails, with the messages of all ranks that did.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kos
from kos.comm.rendezvous.threads import ThreadRendezvous
from kos.errors import CollectiveTimeout
from kos.testing import spawn

TIMEOUT = 30.0  # seconds

SUMS_IN_16_BITS = ContextVar("SUMS_IN_16_BITS", default=False)
"""Whether the sum under test, of 16-bit floats, is rounded at every rank: those that NCCL itself adds are."""

FLOATS = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
FLOAT8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
INTS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
COMPLEX = [np.complex64, np.complex128]
ALL_DTYPES = [np.dtype(d) for d in (*FLOATS, *FLOAT8, *INTS, *COMPLEX, np.bool_)]

SIZES = [0, 1, 2, 7, 997]  # elements; the large sizes have tests of their own


class MockRanks:
    """Ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, fn: Callable[[kos.Communicator], Any]) -> list[Any]:
        """What ``fn(comm)`` returned on each rank."""
        return spawn(fn, self.size, timeout=TIMEOUT)


class MPIRanks:
    """The ranks of the mpirun that runs this pytest."""

    def __init__(self, world: kos.Communicator) -> None:
        self._world = world
        self.size = world.size

    def run(self, fn: Callable[[kos.Communicator], Any]) -> list[Any]:
        """``fn(comm)`` of this rank in its place; what is compared across ranks goes through the group."""
        # Its own communicator: a failure leaves the world's fit for the next test.
        comm = self._world.duplicate()
        comm.timeout = comm.rendezvous.timeout = TIMEOUT
        result, failure = None, b""
        try:
            result = fn(comm)
        except BaseException:
            failure = traceback.format_exc().encode()
            comm.abort()
        failures = self._world.rendezvous.allgather(failure)
        if any(failures):  # all of them: the lowest may only have waited for one that failed
            told = ((rank, text.decode()) for rank, text in enumerate(failures) if text)
            raise AssertionError("\n".join(f"rank {rank} of {self.size} failed:\n{text}" for rank, text in told))
        comm.close()
        results = [None] * self.size
        results[self._world.rank] = result
        return results


def time_is_up(monkeypatch: pytest.MonkeyPatch, state: Callable[[], bool]) -> None:
    """The timeout of ``spawn`` passes when this state is reached, and not before; its ranks have none of their own."""
    asked = itertools.count()

    def monotonic() -> float:
        until = time.monotonic() + 30
        if not next(asked):
            return 0.0
        while not state():
            assert time.monotonic() < until
            time.sleep(0.001)
        return 1e6

    def patient(backend: str, rendezvous: ThreadRendezvous, timeout: float) -> kos.Communicator:
        rendezvous.timeout = TIMEOUT
        return kos.init(backend, rendezvous=rendezvous, timeout=TIMEOUT)

    monkeypatch.setattr("kos.testing.time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr("kos.testing.init", patient)
    monkeypatch.setattr("kos.testing.LAST_WORDS_SECONDS", TIMEOUT)


def inputs(seed: int, size: int, count: int, dtype: Any) -> list[np.ndarray]:
    """Every rank's random contribution; any rank can make all of them."""
    rng = np.random.default_rng([seed, size, count])
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return [rng.random(count) < 0.5 for _ in range(size)]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return [rng.integers(info.min, info.max, count, dtype, endpoint=True) for _ in range(size)]
    if dtype.kind == "c":
        return [(rng.normal(size=count) + 1j * rng.normal(size=count)).astype(dtype) for _ in range(size)]
    return [rng.normal(size=count).astype(dtype) for _ in range(size)]


def poison(shape: Any, dtype: Any) -> np.ndarray:
    """An array of values that no result has: NaN, or a bit pattern."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = 0xFF if np.dtype(dtype) != np.bool_ else 1
    return array


def assert_bits(got: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    """The same shape, dtype and bytes."""
    assert got.dtype == expected.dtype, f"{what}: {got.dtype} instead of {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    same = got.reshape(-1).view(np.uint8) == np.ascontiguousarray(expected).reshape(-1).view(np.uint8)
    assert same.all(), f"{what}: {(~same).sum()} of {same.size} bytes differ; {got} instead of {expected}"


def assert_same_on_all_ranks(comm: kos.Communicator, got: np.ndarray, what: str = "") -> None:
    """Every rank holds the same bytes; compared by the rendezvous, not by what is being tested."""
    everyone = comm.rendezvous.allgather(got.tobytes())
    assert len(set(everyone)) == 1, f"{what}: ranks hold {len(set(everyone))} different results"


def roots(comm: kos.Communicator) -> Iterator[int]:
    yield from range(comm.size)


def time_out_beside_others(comm: kos.Communicator) -> None:
    """A message that times out takes no other with it, of its tag or of another, to or from whichever rank."""
    x, y, given_up, much = np.zeros(4), np.zeros(70000), np.zeros(4), np.arange(70000.0)
    if comm.rank == 0:
        works = [
            comm.recv(x, 1, 0, async_op=True),
            comm.recv(y, 1, 3, async_op=True),
            comm.send(much, 1, 0, async_op=True),
        ]
        for tag in (5, 0, 3):
            with pytest.raises(CollectiveTimeout, match=f"from rank 1 with .* rank 1 sent nothing with tag {tag}$"):
                comm.recv(given_up, 1, tag, timeout=0.05)
    comm.barrier()
    if comm.rank == 1:
        z = np.zeros(70000)
        comm.send(np.ones(4), 0, 0)
        comm.send(much, 0, 3)
        assert (comm.recv(z, 0, 0) == much).all()
    if comm.rank == 0:
        for work in works:
            work.wait()
        assert (x == 1).all() and (y == much).all() and (given_up == 0).all()
    comm.barrier()
