"""Rendezvous: how the ranks of a group find each other and swap small bytes."""

from __future__ import annotations

import json
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kos.comm.failures import Ledger
from kos.cuda.devices import process_numa_node
from kos.errors import KosError


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
    threads: Any = None
    mpi_comm: Any = None
    news: Any = None  # what a backend keeps there for the groups split from this one too
    connect: Callable[[], dict[int, Any]] | None = None
    device: int | None = None
    """The GPU that this rank was told to use, by its number in this process."""
    _near: dict[int, int | None] | None = None
    _ledger: Ledger | None = None

    @property
    def ledger(self) -> Ledger:
        """What is known of failures in this group, whose ranks it knows as ranks of the world."""
        if self._ledger is None:
            self._ledger = Ledger(range(self.size), self.rank, timeout=self.timeout)
        return self._ledger

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

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Show the ranks of this host that this one waits for the others of this group."""
        ledger = self.ledger
        ledger.board.post_wait(rank for rank in ledger.world if rank != ledger.world[self.rank])
        try:
            yield
        except KosError as error:  # before it waits no longer: a rank that does neither is to blame
            ledger.board.post_failure(error)
            raise
        finally:
            ledger.board.post_wait(None)

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
