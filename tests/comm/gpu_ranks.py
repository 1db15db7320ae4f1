"""Ranks with a GPU each, for tests written for NumPy: arrays go to the GPU before a call and come back after it."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import kos
from kos import ReduceOp
from kos.comm.gpu.routes import PHASES
from kos.comm.operation import AUTO
from kos.testing.conformance.model import SUMS_IN_16_BITS
from kos.testing.conformance.on_gpu import OnGPU


def engine_of(comm: kos.Communicator) -> Any:
    """The engine of ``peer``, which is the first route of the communicator."""
    return comm.backend.routes[0]._engine


def windows_of(comm: kos.Communicator) -> Any:
    """The windows of the first route, by number."""
    return comm.backend.routes[0]._windows.memories


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


def prepared_of(comm: kos.Communicator, call: Callable[[], Any]) -> Any:
    """The Prepared of a ``call``, which is made in a batch."""
    with comm.batch() as batch:
        call()
    return batch.works[0].prepared


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
                native = work.prepared.route.name in ("nccl", PHASES) and not o.options.deterministic
                SUMS_IN_16_BITS.set(native and o.options.algorithm == AUTO)
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
