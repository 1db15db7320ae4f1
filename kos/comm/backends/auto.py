"""AutoBackend: what ``auto`` uses where ranks have GPUs: arrays on the GPU by one backend, host arrays by another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kos.comm.backend import Backend, Probe
from kos.comm.backends.device import DeviceBackend
from kos.comm.operation import Operation
from kos.comm.rendezvous import Rendezvous
from kos.comm.work import Idle, Work


class AutoBackend(Backend):
    """Two backends over the same ranks; where the arrays of an operation lie decides."""

    def __init__(self, rendezvous: Rendezvous, host: Backend, gpu: DeviceBackend) -> None:
        self.host, self.gpu = host, gpu
        super().__init__(rendezvous, host.engine)
        self.name = f"{gpu.name}+{host.name}"
        self.device = gpu.device

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        return Probe(False, "stands for two others")

    @property
    def broken(self) -> str | None:
        """The first failure of either."""
        return self.host.broken or self.gpu.broken

    @broken.setter
    def broken(self, reason: str | None) -> None:
        pass  # each keeps its own

    @property
    def timeout(self) -> float:
        """Of both."""
        return self.gpu.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.host.timeout = self.gpu.timeout = seconds

    def of(self, o: Operation) -> Backend:
        """The backend that carries this operation; a barrier goes by the GPUs if a stream is to wait."""
        buffer = o.send or o.recv
        on_gpu = o.stream if buffer is None else buffer.device is not None
        return self.gpu if on_gpu else self.host

    def owns(self, work: Work) -> bool:
        return work.backend in (self.host, self.gpu)

    def idle(self) -> Idle:
        return self.host.idle()

    def prepare(self, operation: Operation) -> None:
        self.of(operation).prepare(operation)

    def start(self, operation: Operation) -> Work:
        return self.of(operation).start(operation)

    def start_all(self, operations: Sequence[Operation]) -> list[Work]:
        together = [o for o in operations if self.of(o) is self.gpu]
        queued = iter(self.gpu.start_all(together) if together else ())
        return [next(queued) if self.of(o) is self.gpu else self.host.start(o) for o in operations]

    def synchronize(self, timeout: float | None = None, stream: int | None = None) -> None:
        self.gpu.synchronize(timeout, stream)

    def allocate(self, shape: Any, dtype: Any) -> Any:
        return self.gpu.allocate(shape, dtype)

    def split(self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0) -> Backend | None:
        host = self.host.split(rendezvous, color, key)
        gpu = self.gpu.split(rendezvous, color, key)
        if rendezvous is None or host is None or not isinstance(gpu, DeviceBackend):
            return None
        return AutoBackend(rendezvous, host, gpu)

    def close(self) -> None:
        self.gpu.close()
        self.host.close()

    def abort(self, reason: str) -> None:
        self.gpu.abort(reason)
        self.host.abort(reason)
