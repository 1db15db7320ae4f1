"""Ranks that are processes of an MPI job: MPI carries the address and secret of the hub, and data of the mpi backend.

Where hosts cannot reach each other by TCP, MPI carries the exchanges and splits too, and ``shrink`` is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kos.comm import timeouts, waits
from kos.comm.control import mpi_job
from kos.comm.control.base import ControlPlane
from kos.comm.control.place import Place, exchange_offer, job_rendezvous, place_by, unreachable
from kos.comm.failures import FailureLog, PendingRanks
from kos.errors import BackendUnavailable, KosError, RankLost, RendezvousError
from kos.memory.ipc import pretended_host

log = logging.getLogger(__name__)
T = TypeVar("T")
NAMING_SECONDS = 1.0  # of waiting for the name of a rank that MPI reports as lost
FEW = 8  # ranks of a group whose names an error lists


class MPIRanks:
    """The ranks of a group as ranks of a communicator of MPI, which the group shares with those split from it.

    Such a group has a communicator of its own only if its backend asks for one (``comm``).
    """

    def __init__(self, shared: Any, ranks: Sequence[int], is_job: bool = False, whole: MPIRanks | None = None) -> None:
        self.shared, self.ranks, self.whole = shared, list(ranks), whole or self
        self._is_job = is_job  # all ranks of the job, which ends if one of them aborts this group
        self._own: Any = None
        if whole is None:
            self._lock = threading.Lock()  # of the next: each group may be used by a separate thread
            self._users, self._orderly = 0, True  # groups that are open; whether all closed groups closed in order
        with self.whole._lock:
            self.whole._users += 1

    def of(self, ranks: Sequence[int]) -> MPIRanks:
        """The group of these ranks of this one."""
        return MPIRanks(self.shared, [self.ranks[rank] for rank in ranks], whole=self.whole)

    def comm(self, rendezvous: ControlPlane, name: bytes) -> Any:
        """A communicator of exactly these ranks.  Collective on first use; ``name`` differs between groups."""
        if self is self.whole:  # a copy of it has a communicator of its own: each may be used by a separate thread
            return self.shared
        if self._own is None:
            tag = int.from_bytes(hashlib.sha256(name).digest()[:3], "big")
            create = partial(self.shared.Create_group, self.shared.Get_group().Incl(self.ranks), tag)
            look = look_for_lost(rendezvous)  # on a thread, because MPI_Comm_create_group has no timeout
            wait = partial(waits.call_with_timeout, create, rendezvous.timeout, look)
            self._own = wait_for_all(rendezvous, "create", wait)[0]
        return self._own

    def free(self, orderly: bool, code: int | None) -> None:
        """Free the communicators that no other group uses, if no rank is lost.  ``code`` is as in ``abort``."""
        if self._is_job and code is not None:
            mpi_job.abort_code = code or 1
        whole = self.whole
        with whole._lock:
            whole._users -= 1
            whole._orderly &= orderly
            unused = self.shared if whole._users == 0 else None
        if not mpi_job.load_mpi().Is_finalized() and whole._orderly:
            for comm in filter(None, (self._own, unused)):
                mpi_job.free_after_all(comm)


def look_for_lost(rendezvous: ControlPlane) -> Callable[[], None]:
    """The check of one wait: it raises if a rank of the group is known to have ended."""
    failures = rendezvous.failures

    def look() -> None:
        deaths = rendezvous.deaths()
        for rank in (*deaths, *failures.suspects()):
            raise failures.lost(rank, deaths.get(rank, "its process ended"), "rendezvous")

    return look


def wait_for_all(rendezvous: ControlPlane, what: str, wait: Callable[[], T | None]) -> T:
    """The result of ``wait()``, which is false at the timeout.

    Raises an error that names the rank that failed first, or the missing ranks.
    """
    failures, rank, size = rendezvous.failures, rendezvous.rank, rendezvous.size
    with rendezvous.waiting():
        try:
            if outcome := wait():
                return outcome
        except mpi_job.load_mpi().Exception as error:
            why = f"{what}: MPI: {error.Get_error_string()}"

            def find_lost() -> KosError | None:
                for gone in (*rendezvous.deaths(), *failures.suspects()):
                    return failures.lost(gone, why, "rendezvous")
                for gone in failures.status.gone():  # MPI fails too if a rank is lost that is not in the group
                    return RankLost(f"rendezvous: rank {gone} of world is gone: {why}", ranks=[gone])
                return None

            lost = waits.wait(find_lost, time.monotonic() + NAMING_SECONDS)
            raise lost or RankLost(f"rendezvous: {why}") from error
        others = [each for each in range(size) if each != rank]
        named = failures.names(others, False) if size <= FEW else f"all other {size - 1} ranks"
        waited = timeouts.waited(failures.names([rank], False), rendezvous.timeout, named)
        raise failures.timeout_error(PendingRanks(others, waited), f"rendezvous: {what}", None, RendezvousError)


def await_request(rendezvous: ControlPlane, what: str, request: Any) -> None:
    """Wait until a request of all ranks is complete.  Raises RendezvousError, RankLost."""
    look = look_for_lost(rendezvous)
    wait_for_all(rendezvous, what, partial(mpi_job.wait_request, request, rendezvous.timeout, look))


class MPIControlPlane(ControlPlane):
    """A group of ``mpi`` whose exchanges and splits MPI carries: until the hub is known, or where TCP cannot be used.

    Nothing reports a failure between hosts then: ranks of other hosts wait until their timeout.
    """

    def __init__(self, mpi: MPIRanks, rank: int, timeout: float, failures: FailureLog, host: str) -> None:
        self.mpi, self.rank, self.size, self.timeout = mpi, rank, len(mpi.ranks), timeout
        self._failures, self.host = failures, host
        self.without_tcp = ""  # why the ranks have no hub
        self._name, self._splits = b"world", 0  # the name is the same on all ranks, and of no other group

    @property
    def mpi_comm(self) -> Any:
        return self.mpi.comm(self, self._name)

    def deaths(self) -> dict[int, str]:
        failed = mpi_job.failed_ranks(self.mpi.shared)
        why = "its process ended"
        return {rank: why for rank, each in enumerate(self.mpi.ranks) if each in failed}

    def _exchange(self, message: bytes) -> list[bytes]:
        lengths, comm, BYTE = np.empty(self.size, np.int64), self.mpi_comm, mpi_job.load_mpi().BYTE
        await_request(self, "allgather", comm.Iallgather(np.array([len(message)], np.int64), lengths))
        everyone = bytearray(int(lengths.sum()))
        await_request(self, "allgather", comm.Iallgatherv([message, BYTE], [everyone, lengths.tolist(), BYTE]))
        ends = itertools.accumulate(lengths.tolist(), initial=0)
        return [bytes(everyone[start:end]) for start, end in itertools.pairwise(ends)]

    def split(self, color: int | None, key: int = 0) -> MPIControlPlane | None:
        self._splits += 1
        if not (ranks := self._alike(color, key)):
            return None
        rank = ranks.index(self.rank)
        child = MPIControlPlane(self.mpi.of(ranks), rank, self.timeout, self.failures.of(ranks, rank), self.host or "")
        child.without_tcp = self.without_tcp
        child._name = b"%s.%d:%s" % (self._name, self._splits, str(ranks).encode())
        return child

    def check_change(self, call: str) -> None:
        raise BackendUnavailable(f"{call}: expected hosts that reach each other by TCP, got: {self.without_tcp}")

    def _free(self, orderly: bool, code: int | None) -> None:
        self.mpi.free(orderly, code)


def rendezvous_of_mpi(
    comm: Any = None, timeout: float = 120.0, process_hooks: bool = True, watched: bool = True
) -> ControlPlane:
    """The rendezvous of the processes of an MPI communicator (default: COMM_WORLD).  Collective.

    MPI carries the address and the secret of rank 0's hub, to which all ranks then connect.  If a rank of another host
    cannot, MPI carries the exchanges too.  ``process_hooks`` is as in ``kos.init``.  ``watched``: if MPI does not start
    within the timeout, the process ends.
    """
    MPI = mpi_job.load_mpi(process_hooks, timeout if watched else None)
    mpi_job.check_running(MPI)
    if process_hooks:
        mpi_job.guard_job()
    mpi_job.free_closed()
    parent, is_job = (MPI.COMM_WORLD, True) if comm is None else (comm, False)
    rank, size = parent.rank, parent.size
    ranks, failures = MPIRanks(parent, range(size), is_job), FailureLog(range(size), rank, timeout=timeout)
    carrier = MPIControlPlane(ranks, rank, timeout, failures, pretended_host())
    begun = None  # the request of an earlier attempt that timed out: MPI matches calls by their order
    if is_job:
        begun, mpi_job.starting = mpi_job.starting, None
    duplicate, request = begun or parent.Idup()
    try:
        await_request(carrier, "start", request)
    except RendezvousError:
        if is_job:
            mpi_job.starting = duplicate, request
        raise
    duplicate.Set_errhandler(MPI.ERRORS_RETURN)
    ranks.shared = duplicate
    place, listener = Place(0, 1), None
    if size > 1:
        listener, offer, one_host = exchange_offer(rank, carrier.allgather)
        if not one_host and any(problems := carrier.allgather(unreachable(rank, offer).encode())):
            if listener is not None:
                listener.close()
            carrier.without_tcp = next(filter(None, problems)).decode()
            log.warning("MPI carries small messages too, as %s", carrier.without_tcp)
            return carrier
        place = place_by(rank, size, "rendezvous: rank 0", offer)
    job = job_rendezvous(place, timeout, listener, failures, carrier.host)
    job.mpi = ranks
    return job
