"""The tcp backend: host memory over sockets, for jobs that no MPI started.

Operations that do not use shared memory run as schedules over ``tcp_messages``.  Between hosts a rank sends a
description of its call to the others when it finds another call, or has waited for long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from kos.comm.backend import UNMADE, Probe
from kos.comm.control.base import Rendezvous
from kos.comm.failures import WHY_CLOSED, again
from kos.comm.host.backend import HostBackend, at_exit
from kos.comm.host.fingerprints import Fingerprints
from kos.comm.host.tcp_messages import ABORT, CLOSE, Mesh, Poller
from kos.comm.operation import COLLECTIVE_TAGS
from kos.comm.work import Engine, Idle, Steps, Work
from kos.errors import KosError

_DESCRIBE_SECONDS = 0.05  # seconds of waiting in a collective before a rank describes its call


class TCPBackend(HostBackend):
    """Serves a group whose ranks found each other over TCP."""

    name = "tcp"

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None, poller: Poller | None = None) -> None:
        self._poller = poller or Poller()
        mesh = Mesh(rendezvous, self._poller)
        try:
            super().__init__(rendezvous, engine)
        except BaseException:
            mesh.close(ABORT, UNMADE, None)
            raise
        self._mesh = mesh
        if self._node is None:
            self.transport = mesh
        self.fingerprints = self.fingerprints or Fingerprints()
        at_exit(self)

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        if rendezvous.connect is None:
            how = "start with torchrun, srun, or RANK, WORLD_SIZE, …"
            return Probe(False, f"the ranks did not connect over TCP ({how})")
        return Probe(True, "sockets between the ranks")

    def idle(self) -> Idle:
        return super().idle() if self.shares_memory else self._poller

    def split(self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0) -> TCPBackend | None:
        return None if rendezvous is None else TCPBackend(rendezvous, self.engine, self._poller)

    def close(self) -> None:
        super().close()
        with self.engine.lock:
            self._poller.progress()  # reads the descriptions of ranks that wait in another call
        self._disconnect(CLOSE, WHY_CLOSED, self.ledger.closing())
        if self._mesh.mismatched and self.ledger.failure is not None:  # of a call that was complete on this rank
            raise again(self.ledger.failure[1])

    def find_failure(self) -> KosError | None:
        if self.engine.lock.acquire(blocking=False):  # else the program reads
            try:
                self._poller.progress()
            finally:
                self.engine.lock.release()
        return super().find_failure() or self._mesh.find_failure()

    def report_end(self, reason: str) -> None:
        super().report_end(reason)
        self._disconnect(CLOSE, reason, self.cause())

    def abort(self, reason: str) -> None:
        self._aborting = True  # before the connections close
        self._disconnect(ABORT, str(self.broken or reason), self.cause())
        super().abort(reason)

    def _disconnect(self, kind: int, why: str, cause: KosError | None) -> None:
        with self.engine.lock:  # the watchdog, or a thread that uses a group of this communicator, may read from these
            self._mesh.close(kind, why, cause)

    def _tag(self, work: Work[Any]) -> int:
        return COLLECTIVE_TAGS + work.sequence  # needs no wrap-around, unlike MPI's tags

    def agree(self, work: Work[Any]) -> Callable[[], bool] | None:
        """Between hosts ranks do not wait to agree: messages and descriptions of another call raise."""
        local_poll, mesh = super().agree(work), self._mesh
        if self.one_host:
            return local_poll
        tag, describe_at = self._tag(work), time.monotonic() + _DESCRIBE_SECONDS
        mesh.begin(work, tag)

        def all_arrived() -> bool:
            nonlocal describe_at
            if time.monotonic() > describe_at:
                describe_at = math.inf
                for rank in mesh.peers:
                    mesh.describe(rank, tag)
            if mesh.ledger.failure is not None:
                mesh.ledger.check(work.sequence)
            if local_poll is None or local_poll():
                return True
            self._poller.progress()  # a rank that waits for one of its host hears what other hosts report
            return False

        return all_arrived

    def _run_over_transport(self, work: Work[Any], all_arrived: Callable[[], bool] | None = None) -> Steps:
        yield from super()._run_over_transport(work, all_arrived)
        if not self.one_host:
            self._mesh.complete(self._tag(work))

    def report_failure(self, failure: KosError, sequence: int) -> None:
        self._mesh.fail(COLLECTIVE_TAGS + sequence, failure)
