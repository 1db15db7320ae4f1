"""torchft over kos: the ``ProcessGroup`` of a ``torchft.Manager``, whose replicas may be lost, or join between steps.

    manager = torchft.Manager(pg=TorchftProcessGroup(), ...)

The Manager configures the group again for each quorum.  When a replica is lost, operations in flight fail at once, and
``errored`` of the survivors names it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torchft.process_group import ProcessGroupWrapper

from kos.interop.torch.group import Options, ProcessGroupKos

_Wrapper: Any = ProcessGroupWrapper


class TorchftProcessGroup(_Wrapper):
    """A group of torchft over ``ProcessGroupKos``; ``timeout`` bounds its connections and operations.

    ``options`` choose the backend for GPUs.  ``configure`` raises ``dist.DistBackendError``, which names a replica that
    does not connect.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), options: Options | None = None) -> None:
        super().__init__(timeout)
        self._options = options or Options()
        self._failure: Exception | None = None

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroupKos:
        self._failure = None
        return ProcessGroupKos(store, rank, world_size, self._timeout, range(world_size), self._options)

    def abort(self, errored: bool = True) -> None:
        """Abort the operations in flight, and the group until ``configure``; the other replicas raise."""
        if errored:
            self._failure = self.errored() or RuntimeError("kos: the process group was aborted")
        super().abort(errored)

    def shutdown(self) -> None:
        """Wait for the operations in flight, and free the group."""
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()

    def errored(self) -> Exception | None:
        """The failure after which the group must be configured again, or None.  Does not wait."""
        return self._failure or (None if self._pg is None else self._pg.errored())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls, which is the same on all replicas."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def getBackendName(self) -> str:
        return "torchft-kos"
