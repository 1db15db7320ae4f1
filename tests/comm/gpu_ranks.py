"""Ranks with a GPU each, for tests written for NumPy: arrays go to the GPU before a call and come back after it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import kos
from kos import ReduceOp
from kos.comm.operation import AUTO
from kos.memory.array import Array
from tests.comm.ranks import SUMS_IN_16_BITS

OPERATIONS = {
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v", "scan", "exscan", "broadcast", "all_gather",
    "all_gather_v", "all_to_all", "all_to_all_v", "gather", "gather_v", "scatter", "scatter_v", "send", "recv",
    "send_recv", "feed_back",
}  # fmt: skip


class OnGPU:
    """A communicator whose operations take and give ndarrays and run on copies of them on the GPU.

    Views of one ndarray are views of one copy, so that what is in place here is in place there.
    """

    def __init__(self, comm: kos.Communicator) -> None:
        self.comm = comm

    @property
    def timeout(self) -> float:
        return self.comm.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.comm.timeout = seconds

    def duplicate(self) -> OnGPU:
        return OnGPU(self.comm.duplicate())

    def __enter__(self) -> OnGPU:
        return self

    def __exit__(self, *failed: Any) -> None:
        self.comm.__exit__(*failed)

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATIONS:
            return getattr(self.comm, name)
        return lambda *arguments, **options: self._call(name, arguments, options)

    def _call(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name != "all_reduce" or "peer" not in self.comm.backend_name:
            options.pop("algorithm", None)  # peer alone has some, of its own
        copies: dict[int, tuple[np.ndarray, Array]] = {}
        pairs: list[tuple[np.ndarray, Array]] = []

        def there(x: Any) -> Any:
            if not isinstance(x, np.ndarray):
                return x
            whole = x
            while isinstance(whole.base, np.ndarray) and whole.base.dtype == x.dtype:
                whole = whole.base
            if id(whole) not in copies:
                copies[id(whole)] = whole, Array.from_numpy(whole.reshape(-1), self.comm.device)
            start = (address(x) - address(whole)) // x.itemsize
            view = copies[id(whole)][1][start : start + x.size].reshape(x.shape)
            pairs.append((x, view))
            return view

        counts = {"all_to_all_v": (1, 2)}.get(name, (1,) if name.endswith("_v") else ())
        given = [x if index in counts else there(x) for index, x in enumerate(arguments)]
        result = getattr(self.comm, name)(*given, **{key: there(x) for key, x in options.items()})
        for whole, copy in copies.values():
            if whole.flags.writeable:
                whole.reshape(-1)[...] = copy.numpy()
        for x, view in pairs:
            if result is view:
                return x
        return result.numpy() if isinstance(result, Array) else result


class Prepared(list[str]):
    """The operations that a communicator prepared, and not only repeated."""

    def __init__(self, comm: kos.Communicator) -> None:
        prepare = comm.backend.prepare

        def noting(o: Any) -> Any:
            self.append(o.name)
            return prepare(o)

        comm.backend.prepare = noting

    def by(self, call: Callable[[], Any]) -> bool:
        """Whether ``call`` prepares anything."""
        self.clear()
        call()
        return bool(self)


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


@contextmanager
def noting_who_adds(comm: kos.Communicator) -> Iterator[None]:
    """SUMS_IN_16_BITS tells of the last addition that ``comm`` started whether it is NCCL's own."""

    @contextmanager
    def noting(works: Sequence[Any], *_: bool) -> Iterator[None]:
        for work in works:
            o = work.operation
            if o.name.endswith("scan"):
                SUMS_IN_16_BITS.set(False)
            elif o.reduction is not None and o.reduction.op not in (ReduceOp.MIN, ReduceOp.MAX):
                native = work.backend.name == "nccl" and o.options.algorithm == AUTO and not o.options.deterministic
                SUMS_IN_16_BITS.set(native)
        yield

    comm._tracing = noting
    token = SUMS_IN_16_BITS.set(False)
    try:
        yield
    finally:
        SUMS_IN_16_BITS.reset(token)
        comm._tracing = None


class GPURanks:
    """``run(fn)`` runs ``fn(comm)`` on every rank; ``comm`` takes ndarrays, ``comm.comm`` is the communicator."""

    def __init__(self, world: kos.Communicator, control: kos.Communicator) -> None:
        self.comm, self._control, self.size = world, control, world.size

    def run(self, fn: Callable[[Any], Any]) -> None:
        failure, skipped = b"", None
        try:
            with noting_who_adds(self.comm):
                fn(OnGPU(self.comm))
            self.comm.synchronize()
        except pytest.skip.Exception as reason:  # the same on all ranks
            skipped = reason
        except BaseException:
            failure = traceback.format_exc().encode()
        for rank, text in enumerate(self._control.rendezvous.allgather(failure)):
            if text:
                raise AssertionError(f"rank {rank} of {self.size} failed:\n{text.decode()}")
        if skipped is not None:
            raise skipped
