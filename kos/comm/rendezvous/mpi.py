"""Ranks that are processes of an MPI job."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from kos.comm import timeouts
from kos.comm.failures import Ledger
from kos.comm.rendezvous import mpi_job
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.rendezvous.notices import MPINotices, Notices
from kos.errors import BackendUnavailable, KosError, RankLost, RendezvousError

T = TypeVar("T")
_REPORT_SECONDS = 2.0  # limit for MPI's report of a rank that has ended


class MPIRendezvous(Rendezvous):
    """Ranks are the processes of an MPI communicator (default: COMM_WORLD).

    ``process_hooks`` is as in ``kos.init``.
    """

    def __init__(
        self, comm: Any = None, timeout: float = 120.0, process_hooks: bool = True, ledger: Ledger | None = None
    ) -> None:
        MPI = mpi_job.load_mpi(process_hooks)
        mpi_job.check_running(MPI)
        self._MPI, self.timeout, self._ledger = MPI, timeout, ledger
        if process_hooks:
            mpi_job.guard_job()
        self._is_job = comm is None
        parent = MPI.COMM_WORLD if comm is None else comm
        self.rank, self.size = parent.rank, parent.size
        begun = None  # the request of an earlier attempt that timed out: MPI matches calls by their order
        if self._is_job:
            begun, mpi_job.starting = mpi_job.starting, None
        self.mpi_comm, request = begun or parent.Idup()
        try:
            self._wait(request, "start", parent)
        except RendezvousError:
            if self._is_job:
                mpi_job.starting = self.mpi_comm, request
            raise
        self._notice_comm: tuple[Any, WeakValueDictionary[str, MPINotices]] | None = None  # shared with splits
        self._shrink_comm: Any = None  # on which survivors report that they shrink the group
        if mpi_job.fault_tolerant():
            self._shrink_comm, request = self.mpi_comm.Idup()
            self._wait(request, "start", self.mpi_comm)

    def _exchange(self, message: bytes) -> list[bytes]:
        sizes = np.empty(self.size, np.int64)
        self._wait(self.mpi_comm.Iallgather(np.array([len(message)], np.int64), sizes), "allgather", self.mpi_comm)
        gathered = np.empty(int(sizes.sum()), np.uint8)
        send = np.frombuffer(message, np.uint8)
        request = self.mpi_comm.Iallgatherv([send, self._MPI.BYTE], [gathered, sizes.tolist(), self._MPI.BYTE])
        self._wait(request, "allgather", self.mpi_comm)
        return [part.tobytes() for part in np.split(gathered, np.cumsum(sizes)[:-1])]

    def split(self, color: int | None, key: int = 0) -> Rendezvous | None:
        self.barrier()  # names a missing rank; MPI_Comm_split has no timeout, so it runs in a thread
        color = self._MPI.UNDEFINED if color is None else color
        split = lambda: mpi_job.in_thread(lambda: self.mpi_comm.Split(color, key), self.timeout)  # noqa: E731
        parts = wait_for_all(self, "split", self.mpi_comm, split)
        if color == self._MPI.UNDEFINED:
            return None
        part = parts[0]
        child = MPIRendezvous(part, self.timeout, False, self._ledger_of(part))
        child._notice_comm = self._notice_comm
        part.Free()
        return child

    def open_notices(self, ranks: Collection[int], any_thread: bool = True) -> Notices | None:
        allowed = not any_thread or self._MPI.Query_thread() == self._MPI.THREAD_MULTIPLE
        names = self.allgather(os.urandom(8) if allowed else b"")
        if b"" in names:
            return None
        if self._notice_comm is None:
            comm, request = self.mpi_comm.Idup()
            self._wait(request, "duplicate", self.mpi_comm)
            comm.Set_errhandler(self._MPI.ERRORS_RETURN)
            self._notice_comm = comm, WeakValueDictionary()
        comm, readers = self._notice_comm
        others = self._MPI.Group.Translate_ranks(self.mpi_comm.Get_group(), list(ranks), comm.Get_group())
        notices = MPINotices(self._MPI, comm, readers, names[0].hex(), others)
        self.barrier()  # another group's reader drops a notice for a group without one
        return notices

    def check_shrink(self) -> None:
        if not mpi_job.fault_tolerant():
            raise BackendUnavailable("shrink: expected a fault-tolerant job: mpirun --with-ft ulfm")

    def shrink(self) -> Rendezvous:
        self.check_shrink()
        self.mpi_comm.Revoke()
        self._wait_for_survivors()
        part = mpi_job.shrink(self.mpi_comm, self.timeout)
        if part is None:
            missing = timeouts.survivors(self.timeout)
            raise RendezvousError(f"shrink: {missing}{mpi_job.last_loss()}")
        return MPIRendezvous(part, self.timeout, False, self._ledger_of(part))

    def _wait_for_survivors(self) -> None:
        """Return when all live ranks have called ``shrink``, and none of them waits for a rank that is lost.

        MPI_Comm_shrink would spin without a timeout.  Open MPI 5.0.11 does not report a rank that exits with a nonzero
        code, or only to some ranks.  A rank that hears of none tells the others before it raises.
        """
        began = time.monotonic()
        arrived = self._exchange_with(sorted({*range(self.size)} - {self.rank}), began)
        self._exchange_with(arrived, began)

    def _exchange_with(self, ranks: list[int], began: float) -> list[int]:
        """Send a word to each of ``ranks``, and wait for theirs: those that are not lost.

        A word is -1, or the rank for which its sender has waited in vain: RankLost then.
        """
        board, world, word = self.ledger.board, self.ledger.world, np.array(-1)
        awaited: dict[int, tuple[Any, np.ndarray]] = {}
        for rank in ranks:
            with contextlib.suppress(self._MPI.Exception):  # the rank is known to be lost
                mpi_job.keep_unfinished(self._shrink_comm.Isend(word, rank))
                heard = np.array(-1)
                awaited[rank] = self._shrink_comm.Irecv(heard, rank), heard
        backoff, unreported_at, arrived = mpi_job.Backoff(), None, list[int]()
        with self.waiting():
            while awaited:
                for rank in [rank for rank, (request, _) in awaited.items() if mpi_job.is_over(request)]:
                    _, heard = awaited.pop(rank)
                    arrived.append(rank)
                    if heard >= 0:
                        raise self._unreported(int(heard))
                now, failed = time.monotonic(), mpi_job.failed_ranks(self._shrink_comm)
                awaited = {rank: words for rank, words in awaited.items() if rank not in failed}
                unreported = [rank for rank in awaited if board.ended(world[rank])]
                unreported_at = (unreported_at or now) if unreported else None
                if unreported_at is not None and now - unreported_at > _REPORT_SECONDS:
                    for rank in ranks:
                        with contextlib.suppress(self._MPI.Exception):
                            mpi_job.keep_unfinished(self._shrink_comm.Isend(np.array(unreported[0]), rank))
                    raise self._unreported(unreported[0])
                if awaited and now - began > self.timeout:
                    raise self.absent(sorted(awaited), "shrink")
                backoff.pause()
        return arrived

    def _unreported(self, rank: int) -> KosError:
        why = "its process exited with an error code, which Open MPI does not report to the others"
        return self.ledger.lost(rank, why, "shrink", None, 0.0)

    def _ledger_of(self, part: Any) -> Ledger:
        """The ledger of a group of some of these ranks."""
        ranks = self._MPI.Group.Translate_ranks(part.Get_group(), list(range(part.size)), self.mpi_comm.Get_group())
        return self.ledger.of(ranks, part.rank)

    def _free(self, orderly: bool, code: int | None) -> None:
        comms, self.mpi_comm, self._shrink_comm = (self.mpi_comm, self._shrink_comm), None, None
        if orderly and not self._MPI.Is_finalized():
            for comm in comms:
                if comm is not None:
                    comm.Free()  # collective: only if no rank is lost
        if self._is_job and code is not None:
            mpi_job.abort_code = code or 1

    def _wait(self, request: Any, what: str, comm: Any) -> None:
        wait_for_all(self, what, comm, lambda: mpi_job.wait_request(request, self.timeout))


def wait_for_all(rendezvous: Rendezvous, what: str, comm: Any, wait: Callable[[], T]) -> T:
    """The result of ``wait()``, which is false at the timeout.

    Raises an error that names the rank that failed first, or the missing ranks.
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
        waited = timeouts.waited(ledger.names([rank], False), rendezvous.timeout, named)
        raise ledger.overdue(others, f"rendezvous: {what}", None, waited, RendezvousError)
