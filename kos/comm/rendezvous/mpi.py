"""Ranks that are processes of an MPI job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kos.comm.failures import Ledger
from kos.comm.rendezvous import mpi_job
from kos.comm.rendezvous.base import Rendezvous
from kos.errors import BackendUnavailable, KosError, RankLost, RendezvousError


class MPIRendezvous(Rendezvous):
    """Ranks are the processes of an MPI communicator (COMM_WORLD unless given)."""

    def __init__(self, comm: Any = None, timeout: float = 120.0, ledger: Ledger | None = None) -> None:
        MPI = mpi_job.load_mpi()
        self._MPI, self.timeout, self._ledger = MPI, timeout, ledger
        mpi_job.guard_job()
        self._is_job = comm is None
        parent = MPI.COMM_WORLD if comm is None else comm
        self.rank, self.size = parent.rank, parent.size
        begun = None  # by an attempt before to which not all ranks came: MPI matches calls by their order
        if self._is_job:
            begun, mpi_job.starting = mpi_job.starting, None
        self.mpi_comm, request = begun or parent.Idup()
        try:
            self._wait(request, "start", parent)
        except RendezvousError:
            if self._is_job:
                mpi_job.starting = self.mpi_comm, request
            raise

    def allgather(self, data: bytes) -> list[bytes]:
        sizes = np.empty(self.size, np.int64)
        self._wait(self.mpi_comm.Iallgather(np.array([len(data)], np.int64), sizes), "allgather", self.mpi_comm)
        gathered = np.empty(int(sizes.sum()), np.uint8)
        send = np.frombuffer(data, np.uint8)
        request = self.mpi_comm.Iallgatherv([send, self._MPI.BYTE], [gathered, sizes.tolist(), self._MPI.BYTE])
        self._wait(request, "allgather", self.mpi_comm)
        return [part.tobytes() for part in np.split(gathered, np.cumsum(sizes)[:-1])]

    def split(self, color: int | None, key: int = 0) -> Rendezvous | None:
        self.barrier()  # a rank that does not come is named; MPI_Comm_split waits without a limit, so in a thread
        color = self._MPI.UNDEFINED if color is None else color
        parts = self._bounded("split", lambda: self.mpi_comm.Split(color, key))
        if color == self._MPI.UNDEFINED:
            return None
        part = parts[0]
        child = MPIRendezvous(part, self.timeout, self._ledger_of(part))
        child.news = self.news
        part.Free()
        return child

    def check_shrink(self) -> None:
        if not mpi_job.fault_tolerant():
            raise BackendUnavailable("shrink: expected a job that outlives its ranks: mpirun --with-ft ulfm")

    def shrink(self) -> Rendezvous:
        self.check_shrink()
        self.mpi_comm.Revoke()
        part = mpi_job.shrink(self.mpi_comm, self.timeout)
        if part is None:
            came = f"not all ranks that are left came within {self.timeout:g} s"
            raise RendezvousError(f"shrink: {came}{mpi_job.last_loss()}")
        return MPIRendezvous(part, self.timeout, self._ledger_of(part))

    def _ledger_of(self, part: Any) -> Ledger:
        """The ledger of a group of some of these ranks."""
        ranks = self._MPI.Group.Translate_ranks(part.Get_group(), list(range(part.size)), self.mpi_comm.Get_group())
        return self.ledger.of(ranks, part.rank)

    def close(self) -> None:
        if self.mpi_comm is not None and not self._MPI.Is_finalized():
            self.mpi_comm.Free()
        self.mpi_comm = None

    def abandon(self, code: int | None) -> None:
        self.mpi_comm = None  # not freed: MPI_Comm_free is collective
        if self._is_job and code is not None:
            mpi_job.abandon(code)

    def _wait(self, request: Any, what: str, comm: Any) -> None:
        came = False
        with self._failing(what, comm):
            came = mpi_job.wait_request(request, self.timeout)
        if not came:
            raise self._overdue(what)

    def _bounded(self, what: str, call: Callable[[], Any]) -> list[Any]:
        """What a call of MPI returned that waits without a limit: in a thread, which is left behind at the timeout."""
        with self._failing(what, self.mpi_comm):
            outcome = mpi_job.in_thread(call, self.timeout)
        if not outcome:
            raise self._overdue(what)
        return outcome

    @contextmanager
    def _failing(self, what: str, comm: Any) -> Iterator[None]:
        """Errors of MPI as those of kos, which name the rank that failed first."""
        try:
            with self._waiting():
                yield
        except self._MPI.Exception as error:
            gone = mpi_job.failed_ranks(comm) or self.ledger.suspects()
            why = f"{what}: MPI: {error.Get_error_string()}"
            if not gone:
                raise RankLost(f"rendezvous: {why}") from error
            raise self.ledger.lost(gone[0], why, "rendezvous") from error

    def _overdue(self, what: str) -> KosError:
        others = [rank for rank in range(self.size) if rank != self.rank]
        named = f"rank {others[0]}" if self.size == 2 else f"all other {self.size - 1} ranks"
        waited = f"rank {self.rank} waited {self.timeout:g} s for {named}"
        return self.ledger.overdue(others, f"rendezvous: {what}", None, waited, RendezvousError)
