"""Ranks that are processes of an MPI job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from kos.comm.failures import Ledger
from kos.comm.rendezvous import mpi_job
from kos.comm.rendezvous.base import Rendezvous
from kos.errors import BackendUnavailable, RankLost, RendezvousError

T = TypeVar("T")


class MPIRendezvous(Rendezvous):
    """Ranks are the processes of an MPI communicator (COMM_WORLD unless given).

    ``process_hooks`` is that of ``kos.init``.
    """

    def __init__(
        self, comm: Any = None, timeout: float = 120.0, process_hooks: bool = True, ledger: Ledger | None = None
    ) -> None:
        MPI = mpi_job.load_mpi(process_hooks)
        self._MPI, self.timeout, self._ledger = MPI, timeout, ledger
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
        self.barrier()  # a rank that does not come is named; MPI_Comm_split waits without a limit, so in a thread
        color = self._MPI.UNDEFINED if color is None else color
        split = lambda: mpi_job.in_thread(lambda: self.mpi_comm.Split(color, key), self.timeout)  # noqa: E731
        parts = wait_for_all(self, "split", self.mpi_comm, split)
        if color == self._MPI.UNDEFINED:
            return None
        part = parts[0]
        child = MPIRendezvous(part, self.timeout, False, self._ledger_of(part))
        child.news = self.news
        part.Free()
        return child

    def check_shrink(self) -> None:
        if not mpi_job.fault_tolerant():
            raise BackendUnavailable("shrink: expected a job that outlives its ranks: mpirun --with-ft ulfm")

    def shrink(self) -> Rendezvous:
        self.check_shrink()
        self.mpi_comm.Revoke()
        part = mpi_job.shrink(self.mpi_comm, self.timeout, self._unreported)
        if part is None:
            if (gone := self._unreported()) is not None:
                why = "its process exited with an error code, which Open MPI does not report to the others"
                raise self.ledger.lost(gone, why, "shrink", None, 0.0)
            came = f"not all ranks that are left came within {self.timeout:g} s"
            raise RendezvousError(f"shrink: {came}{mpi_job.last_loss()}")
        return MPIRendezvous(part, self.timeout, False, self._ledger_of(part))

    def _unreported(self) -> int | None:
        """A rank that is gone and that MPI takes for alive, or None: MPI_Comm_shrink waits for it for ever.

        Open MPI 5.0.11 reports a rank that a signal killed or that exits with 0, and no other.
        """
        board, world = self.ledger.board, self.ledger.world
        gone = {rank for rank in range(self.size) if board.ended(world[rank])}
        return min(gone - set(mpi_job.failed_ranks(self.mpi_comm)), default=None)

    def _ledger_of(self, part: Any) -> Ledger:
        """The ledger of a group of some of these ranks."""
        ranks = self._MPI.Group.Translate_ranks(part.Get_group(), list(range(part.size)), self.mpi_comm.Get_group())
        return self.ledger.of(ranks, part.rank)

    def _free(self, orderly: bool, code: int | None) -> None:
        comm, self.mpi_comm = self.mpi_comm, None
        if orderly and comm is not None and not self._MPI.Is_finalized():
            comm.Free()  # collective: not where ranks may be gone
        if self._is_job and code is not None:
            mpi_job.abandon(code)

    def _wait(self, request: Any, what: str, comm: Any) -> None:
        wait_for_all(self, what, comm, lambda: mpi_job.wait_request(request, self.timeout))


def wait_for_all(rendezvous: Rendezvous, what: str, comm: Any, wait: Callable[[], T]) -> T:
    """What ``wait()`` returns once all ranks have come; it is false at the timeout.

    Raises what is known of the ranks that did not come, or failed: the error names the rank that failed first.
    """
    ledger, rank, size = rendezvous.ledger, rendezvous.rank, rendezvous.size
    with rendezvous.waiting():
        try:
            if outcome := wait():
                return outcome
        except mpi_job.load_mpi().Exception as error:
            gone = mpi_job.failed_ranks(comm) or ledger.suspects()
            why = f"{what}: MPI: {error.Get_error_string()}"
            if not gone:
                raise RankLost(f"rendezvous: {why}") from error
            raise ledger.lost(gone[0], why, "rendezvous") from error
        others = [each for each in range(size) if each != rank]
        named = ledger.names(others, False) if size == 2 else f"all other {size - 1} ranks"
        waited = f"{ledger.names([rank], False)} waited {rendezvous.timeout:g} s for {named}"
        raise ledger.overdue(others, f"rendezvous: {what}", None, waited, RendezvousError)
