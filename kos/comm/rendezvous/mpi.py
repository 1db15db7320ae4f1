"""Ranks that are processes of an MPI job."""

from __future__ import annotations

from typing import Any

import numpy as np

from kos.comm.rendezvous import mpi_job
from kos.comm.rendezvous.base import Rendezvous
from kos.errors import BackendUnavailable, RankLost, RendezvousError


class MPIRendezvous(Rendezvous):
    """Ranks are the processes of an MPI communicator (COMM_WORLD unless given).

    ``process_hooks`` is that of ``kos.init``.
    """

    def __init__(self, comm: Any = None, timeout: float = 120.0, process_hooks: bool = True) -> None:
        MPI = mpi_job.load_mpi(process_hooks)
        self._MPI, self.timeout = MPI, timeout
        if process_hooks:
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

    def _exchange(self, message: bytes) -> list[bytes]:
        sizes = np.empty(self.size, np.int64)
        self._wait(self.mpi_comm.Iallgather(np.array([len(message)], np.int64), sizes), "allgather", self.mpi_comm)
        gathered = np.empty(int(sizes.sum()), np.uint8)
        send = np.frombuffer(message, np.uint8)
        request = self.mpi_comm.Iallgatherv([send, self._MPI.BYTE], [gathered, sizes.tolist(), self._MPI.BYTE])
        self._wait(request, "allgather", self.mpi_comm)
        return [part.tobytes() for part in np.split(gathered, np.cumsum(sizes)[:-1])]

    def split(self, color: int | None, key: int = 0) -> Rendezvous | None:
        self.barrier()  # first, with a timeout: MPI_Comm_split waits without a limit
        part = self.mpi_comm.Split(self._MPI.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        child = MPIRendezvous(part, self.timeout, process_hooks=False)
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
        return MPIRendezvous(part, self.timeout, process_hooks=False)

    def _free(self, orderly: bool, code: int | None) -> None:
        comm, self.mpi_comm = self.mpi_comm, None
        if orderly and comm is not None and not self._MPI.Is_finalized():
            comm.Free()  # collective: not where ranks may be gone
        if self._is_job and code is not None:
            mpi_job.abandon(code)

    def _wait(self, request: Any, what: str, comm: Any) -> None:
        try:
            came = mpi_job.wait_request(request, self.timeout)
        except self._MPI.Exception as error:
            lost = f"; ranks {gone} failed" if (gone := mpi_job.failed_ranks(comm)) else ""
            raise RankLost(f"rendezvous: {what}: MPI: {error.Get_error_string()}{lost}") from error
        if not came:
            others = f"rank {1 - self.rank}" if self.size == 2 else f"all other {self.size - 1} ranks"
            raise RendezvousError(f"rendezvous: {what}: rank {self.rank} waited {self.timeout:g} s for {others}")
