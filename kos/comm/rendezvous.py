"""Rendezvous: how the ranks of a group find each other and swap small bytes."""

from __future__ import annotations

import json
import platform
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from kos.comm import mpi_job
from kos.comm.faults import FaultPlan
from kos.cuda.devices import process_numa_node
from kos.errors import BackendUnavailable, KosError, RankLost, RendezvousError

T = TypeVar("T")


class Rendezvous(ABC):
    """The control plane of a group.  Every method is collective: all ranks call it, in the same order.

    What a backend may ask of it, by capability and never by type: ``threads`` (the ranks are threads of this
    process and hold this object in common), ``mpi_comm`` (an MPI communicator over the same ranks) and
    ``connect`` (makes a connection over TCP to every other rank: each calls those below it, and lets in those above).
    """

    rank: int
    size: int
    timeout: float
    job: str = ""  # the same on all ranks, and no other job's
    threads: ThreadGroup | None = None
    mpi_comm: Any = None
    news: Any = None  # what a backend keeps there for the groups split from this one too
    connect: Callable[[], dict[int, Any]] | None = None
    device: int | None = None
    """The GPU that this rank was told to use, by its number in this process."""
    _near: dict[int, int | None] | None = None

    @abstractmethod
    def allgather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes (of any length), in rank order.

        Raises RendezvousError when a rank does not come within ``timeout`` seconds.
        """

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Rendezvous | None:
        """The group of the ranks of the same ``color``, ordered by (key, rank); None for color None."""

    def check_shrink(self) -> None:  # noqa: B027
        """Raise BackendUnavailable, with the reason, if a rank that is gone is the end of this group."""

    @abstractmethod
    def shrink(self) -> Rendezvous:
        """The group of the ranks that are not gone, in their order; all of them call it."""

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.allgather(b"")

    def close(self) -> None:  # noqa: B027 -- nothing to do unless a rendezvous holds something
        """Give back what the group holds; safe to call when other ranks are gone."""

    def abandon(self, code: int | None) -> None:  # noqa: B027
        """Let go of a group that the others may not leave together with this rank.

        ``code`` is the exit code of a rank that leaves by an error, None where that was dealt with.
        """

    @property
    def local_rank(self) -> int:
        """Index of this rank among the group's ranks on the same host.  Collective on first use."""
        return list(self._neighbours).index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of the group's ranks on the same host.  Collective on first use."""
        return len(self._neighbours)

    @property
    def local_nodes(self) -> list[int | None]:
        """The NUMA node that each of the group's ranks on the same host is bound to.  Collective on first use."""
        return list(self._neighbours.values())

    def _alike(self, color: int | None, key: int) -> list[int]:
        """The ranks of the same color, in the order of a split."""
        wishes = [json.loads(wish) for wish in self.allgather(json.dumps([color, key]).encode())]
        ranks = [r for r in range(self.size) if color is not None and wishes[r][0] == color]
        return sorted(ranks, key=lambda r: (wishes[r][1], r))

    @property
    def _neighbours(self) -> dict[int, int | None]:
        """The group's ranks on this host, and the NUMA node of each."""
        if self._near is None:  # no cached_property, whose lock ranks that are threads would share in Python 3.11
            mine = json.dumps([host_id(), process_numa_node()])
            ranks = [json.loads(data) for data in self.allgather(mine.encode())]
            self._near = {rank: node for rank, (host, node) in enumerate(ranks) if host == ranks[self.rank][0]}
        return self._near


def host_id() -> str:
    """A name that processes share exactly if they run on the same host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node() + (boot.read_text().strip() if boot.exists() else "")


class ThreadWorld:
    """What all threads of one ``spawn`` share: one lock, a wake-up call per rank, and who is gone."""

    def __init__(self, size: int, faults: FaultPlan | None = None) -> None:
        self.lock = threading.RLock()
        self.faults = faults
        self.wakeup = [threading.Condition(self.lock) for _ in range(size)]
        self.events = [0] * size  # counts wake-ups, so that none is missed between a look and a wait
        self.departed: dict[int, str] = {}  # world rank -> why

    def notify(self, ranks: list[int]) -> None:
        """Wake ranks that may be waiting; the caller holds the lock."""
        for rank in ranks:
            self.events[rank] += 1
            self.wakeup[rank].notify_all()

    def depart(self, rank: int, why: str) -> None:
        """Rank ``rank`` will not communicate again."""
        with self.lock:
            self.departed.setdefault(rank, why)
            self.notify(list(range(len(self.wakeup))))


class ThreadGroup:
    """A group of ranks that are threads of this process."""

    def __init__(self, size: int, world: ThreadWorld | None = None, members: list[int] | None = None) -> None:
        self.size = size
        self.world = world or ThreadWorld(size)
        self.members = members if members is not None else list(range(size))  # world ranks
        self.failure: tuple[type[KosError], str] | None = None
        self._left: dict[int, str] = {}
        self._shared: dict[Any, Any] = {}
        self._slots: dict[int, dict[int, bytes]] = {}

    def shared(self, key: Any, make: Callable[[], T]) -> T:
        """The object of that key, the same on all ranks; the first to ask makes it."""
        with self.world.lock:
            if key not in self._shared:
                self._shared[key] = make()
            return cast(T, self._shared[key])

    def fail(self, kind: type[KosError], message: str) -> None:
        """Make every rank that waits in this group, now or later, raise ``kind(message)``."""
        with self.world.lock:
            if self.failure is None:
                self.failure = kind, message
                self.notify_all()

    def notify_all(self) -> None:
        self.world.notify(self.members)

    def survivors(self, rank: int, timeout: float) -> ThreadGroup:
        """The group of the ranks that are not gone, once all of them have called this."""
        world, deadline = self.world, time.monotonic() + timeout
        callers: list[int] = self.shared("survivors", list)
        with world.lock:
            callers.append(rank)
            self.notify_all()
            while missing := [
                r for r, member in enumerate(self.members) if r not in callers and member not in world.departed
            ]:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise RendezvousError(f"shrink: ranks {missing} did not come within {timeout:g} s")
                world.wakeup[self.members[rank]].wait(remaining)
            # The first to see that all have come says for all who they are.
            members = [self.members[r] for r in sorted(callers)]
            return self.shared("shrunk", lambda: ThreadGroup(len(members), world, members))

    def raise_failure(self) -> None:
        """Raise if the group failed; every raise is a new exception, for its own thread's traceback."""
        if self.failure is not None:
            kind, message = self.failure
            raise kind(message)

    def departed(self, rank: int) -> str | None:
        """Why group rank ``rank`` is gone, or None."""
        return self.world.departed.get(self.members[rank]) or self._left.get(rank)

    def leave(self, rank: int, why: str) -> None:
        """Rank ``rank`` does nothing more in this group; what it has done so far stays."""
        with self.world.lock:
            self._left.setdefault(rank, why)
            self.notify_all()

    def exchange(self, rank: int, turn: int, data: bytes, timeout: float) -> list[bytes]:
        """All ranks' bytes of one turn."""
        world, deadline = self.world, time.monotonic() + timeout
        with world.lock:
            slots = self._slots.setdefault(turn, {})
            slots[rank] = data
            self.notify_all()
            while len(slots) < self.size:
                self.raise_failure()
                missing = [r for r in range(self.size) if r not in slots]
                for r in missing:
                    if self.departed(r) is not None:
                        raise RankLost(f"rendezvous: rank {r} is gone: {self.departed(r)}")
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise RendezvousError(f"rendezvous: ranks {missing} did not come within {timeout:g} s")
                world.wakeup[self.members[rank]].wait(remaining)
            # Everybody of the previous turn has left it, or they could not be in this one.
            self._slots.pop(turn - 1, None)
            return [slots[r] for r in range(self.size)]


class ThreadRendezvous(Rendezvous):
    """Ranks are threads of one process (the mock backend, users' tests)."""

    def __init__(self, group: ThreadGroup, rank: int, timeout: float = 120.0) -> None:
        self.rank, self.size, self.timeout = rank, group.size, timeout
        self.threads: ThreadGroup = group
        self._turn = 0

    def allgather(self, data: bytes) -> list[bytes]:
        self._turn += 1
        return self.threads.exchange(self.rank, self._turn, bytes(data), self.timeout)

    def split(self, color: int | None, key: int = 0) -> Rendezvous | None:
        ranks = self._alike(color, key)
        if not ranks:
            return None
        parent = self.threads
        members = [parent.members[r] for r in ranks]
        child = parent.shared(("split", self._turn, color), lambda: ThreadGroup(len(ranks), parent.world, members))
        return ThreadRendezvous(child, ranks.index(self.rank), self.timeout)

    def shrink(self) -> Rendezvous:
        group = self.threads.survivors(self.rank, self.timeout)
        return ThreadRendezvous(group, group.members.index(self.threads.members[self.rank]), self.timeout)


class SingleRendezvous(ThreadRendezvous):
    """A group of one."""

    def __init__(self, timeout: float = 120.0) -> None:
        super().__init__(ThreadGroup(1), 0, timeout)


class MPIRendezvous(Rendezvous):
    """Ranks are the processes of an MPI communicator (COMM_WORLD unless given)."""

    def __init__(self, comm: Any = None, timeout: float = 120.0) -> None:
        MPI = mpi_job.load_mpi()
        self._MPI, self.timeout = MPI, timeout
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
        # MPI_Comm_split blocks without a limit, so all ranks first meet where a timeout applies.
        self.barrier()
        part = self.mpi_comm.Split(self._MPI.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        child = MPIRendezvous(part, self.timeout)
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
        return MPIRendezvous(part, self.timeout)

    def close(self) -> None:
        if self.mpi_comm is not None and not self._MPI.Is_finalized():
            self.mpi_comm.Free()
        self.mpi_comm = None

    def abandon(self, code: int | None) -> None:
        self.mpi_comm = None  # not freed: MPI_Comm_free is collective
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


def default_rendezvous(timeout: float, *, by_mpi: bool = False) -> Rendezvous:
    """MPI under mpirun; else by the environment where it says which rank this is; else a group of one (of MPI's)."""
    from kos.comm.env_rendezvous import EnvRendezvous, Place  # which stands on this file

    if mpi_job.under_mpirun():
        return MPIRendezvous(timeout=timeout)
    if Place.told():
        return EnvRendezvous(timeout)
    return MPIRendezvous(timeout=timeout) if by_mpi else SingleRendezvous(timeout)
