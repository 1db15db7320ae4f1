"""Operations launched otherwise than one call at a time: together (Batch) or again and again (Persistent)."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from kos.comm.operation import Operation
from kos.comm.work import Work
from kos.errors import InvalidArgument

if TYPE_CHECKING:
    from kos.comm.communicator import Communicator


class Persistent:
    """An operation checked once and started many times, always on the same arrays."""

    def __init__(self, comm: Communicator, operation: Operation) -> None:
        comm.backend.prepare(operation)
        self._comm, self._operation = comm, operation
        self._work: Work | None = None

    def start(self) -> Work:
        """Launch it once more.  Raises InvalidArgument if the previous start is still in flight.

        On a GPU starts queue up behind one another, on the stream of the arrays.
        """
        if self._work is not None and self._operation.launch is None and not self._work.done():
            raise InvalidArgument(f"start: expected the previous start to be done, got {self._operation}")
        self._work = self._comm._launch(self._operation, depth=3)
        return self._work


class Batch:
    """Operations that are launched together; see ``Communicator.batch``."""

    def __init__(self, comm: Communicator, async_op: bool) -> None:
        self._comm, self._async_op = comm, async_op
        self.operations: list[Operation] = []
        self.works: list[Work] = []

    def __enter__(self) -> Batch:
        if self._comm._batch is not None:
            raise InvalidArgument("batch: expected no other batch to be open, got one inside another")
        self._comm._batch = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._comm._batch = None
        if value is None:
            self._comm._launch_all(self.operations, self._async_op, self.works)
            if not self._async_op:
                self.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every operation; ``timeout`` in seconds holds for each of them."""
        for work in self.works:
            work.wait(timeout)
