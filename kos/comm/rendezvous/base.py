"""Rendezvous: how the ranks of a group find each other and exchange small messages."""

from __future__ import annotations

import json
import platform
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kos.comm import timeouts
from kos.comm.failures import Ledger, StoppedRanks, again
from kos.comm.rendezvous.notices import Notices
from kos.cuda.devices import process_numa_node
from kos.errors import BackendUnavailable, CollectiveError, CollectiveMismatch, KosError, RendezvousError

_HEAD = struct.Struct("!IH")  # of a message: the number of the exchange, and the length of the call's name


class Rendezvous(ABC):
    """The control plane of a group.  Every method is collective: all ranks call it, in the same order.

    A backend checks its capabilities and never its type: ``threads`` (the ranks are threads of this process and share
    this object), ``mpi_comm`` (an MPI communicator over the same ranks, made on first use) and ``connect`` (opens a TCP
    connection to every other rank, or to those given: each rank calls those below it and accepts those above it).

    A subclass implements ``_exchange`` and ``_free``.  Every exchange carries ``call`` and a number, so that ranks that
    make different calls all raise CollectiveMismatch.  After the first failure the ranks are out of step, so every
    later exchange raises that failure again.
    """

    rank: int
    size: int
    timeout: float
    job: str = ""  # unique to the job, the same on all ranks
    threads: Any = None
    connect: Callable[..., dict[int, Any]] | None = None
    device: int | None = None
    """The index in this process of the requested GPU."""
    nccl: Mapping[str, Any] = MappingProxyType({})
    """The options of NCCL for this group, the same on all ranks."""
    _near: dict[int, int | None] | None = None
    call = "exchange"  # the program's call, with its arguments; the same on all ranks
    usual: float | None = None
    """The communicator's timeout, where ``timeout`` is that of a call.  It limits the wait for a stopped rank."""
    failure: KosError | None = None  # the first
    _exchanges = 0  # begun by this rank
    _ledger: Ledger | None = None

    @property
    def mpi_comm(self) -> Any:
        return None

    @property
    def ledger(self) -> Ledger:
        """The known failures in this group."""
        if self._ledger is None:
            self._ledger = Ledger(range(self.size), self.rank, timeout=self.timeout)
        return self._ledger

    def allgather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes (of any length), in rank order.

        Raises CollectiveMismatch if ranks make different calls, RendezvousError if a rank does not arrive within
        ``timeout`` seconds, RankLost if one is lost; every later call raises that failure again.
        """
        if self.failure is not None:
            raise again(self.failure)
        if self.ledger.board.last is not None:
            self.ledger.board.clear_failure()
        self._exchanges += 1
        name = self.call.encode()
        head = _HEAD.pack(self._exchanges, len(name)) + name
        message = head + bytes(data)
        try:
            parts = self._exchange(message) if self.size > 1 else [message]
            if not all(part.startswith(head) for part in parts):
                raise CollectiveMismatch(_difference(parts, self.ledger))
        except KosError as error:
            self.failure = self.failure or again(error)  # a copy: the frames of ``error`` would keep this group alive
            raise
        except BaseException as error:
            self._cut_short(error)
            raise
        return [part[len(head) :] for part in parts]

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """A context whose exceptions the other ranks raise in their exchanges, in which they would wait for this rank.

        BackendUnavailable is not reported: ranks that refuse a backend raise it together.
        """
        try:
            yield
        except BackendUnavailable:
            raise
        except BaseException as error:
            if self.failure is None:
                self._exchanges += 1  # the first that this rank does not join
                self._cut_short(error)
            raise

    def _cut_short(self, error: BaseException) -> None:
        """Keep ``error``, such as Ctrl-C, as the failure of this rank, and report it."""
        me = self.ledger.names([self.rank], False)
        if isinstance(error, CollectiveError | RendezvousError):
            self.failure = again(error, None if error.ranks else f"{me}: {error}")
        else:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self.failure = RendezvousError(f"rendezvous: {self.call} was interrupted on {me} by {what}")
        self.failure.ranks = self.failure.ranks or (self.ledger.world[self.rank],)
        if self.size > 1:
            self._report(self.failure)

    def _report(self, failure: KosError) -> None:  # noqa: B027 -- not every kind can
        """Report to the other ranks that this one joins no more exchanges."""

    def look_for_stopped(self) -> Callable[[], None] | None:
        """The check that raises if ranks are stopped, for a call whose timeout is longer than the usual one."""
        if self.usual is None or self.usual >= self.timeout:
            return None
        return partial(StoppedRanks(self.ledger, self.usual).check, "rendezvous")

    @abstractmethod
    def _exchange(self, message: bytes) -> list[bytes]:
        """Every rank's message, in rank order; the group has two ranks or more.  Raises RendezvousError, RankLost."""

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Rendezvous | None:
        """The group of the ranks of the same ``color``, ordered by (key, rank); None for color None."""

    def open_notices(self, ranks: Collection[int], any_thread: bool = True) -> Notices | None:
        """Notices to and from these ranks, each of which names this one; None where ranks have none.

        ``any_thread``: threads other than the program's use them too.
        """
        return None

    def check_shrink(self) -> None:  # noqa: B027
        """Raise BackendUnavailable, with the reason, if this group cannot continue without a rank."""

    @abstractmethod
    def shrink(self) -> Rendezvous:
        """The group of the surviving ranks, in their order; all of them call it."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Post to the ranks of this host that this one waits for the others of this group."""
        ledger = self.ledger
        ledger.board.post_wait(rank for rank in ledger.world if rank != ledger.world[self.rank])
        try:
            yield
        except KosError as error:  # posted before the wait ends: a rank with neither would be named as the cause
            ledger.board.post_failure(error)
            raise
        finally:
            ledger.board.post_wait(None)

    def absent(
        self, ranks: Sequence[int], what: str = "rendezvous", verb: str = timeouts.ARRIVE, several: bool = True
    ) -> KosError:
        """The error of ``what``, in which those ranks are missing at the timeout."""
        text = timeouts.late(self.ledger.names(ranks, several), verb, self.timeout)
        return self.ledger.overdue(ranks, what, None, text, RendezvousError)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.allgather(b"")

    def close(self) -> None:
        """Free the resources of the group; safe to call when other ranks are lost."""
        self._free(self.failure is None and self.ledger.closing() is None, None)
        self.failure = self.failure or RendezvousError(f"rendezvous: rank {self.rank} closed the group")

    def abort(self, code: int | None) -> None:
        """Free the resources of the group without waiting for the other ranks.

        ``code`` is the exit code of a rank that ends by an error, None for an error that was handled.
        """
        self._free(False, code)
        self.failure = self.failure or RendezvousError(f"rendezvous: rank {self.rank} aborted the group")

    def _free(self, orderly: bool, code: int | None) -> None:  # noqa: B027 -- not every kind holds something
        """Free the resources: together with the other ranks if ``orderly``, else without waiting for them."""

    @property
    def local_rank(self) -> int:
        """Index of this rank among the group's ranks on the same host.  Collective on first use."""
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of the group's ranks on the same host.  Collective on first use."""
        return len(self._neighbours)

    @property
    def local_ranks(self) -> list[int]:
        """The group's ranks on the same host as this one, ascending.  Collective on first use."""
        return list(self._neighbours)

    @property
    def local_nodes(self) -> list[int | None]:
        """The NUMA node that each of the group's ranks on the same host is bound to.  Collective on first use."""
        return list(self._neighbours.values())

    def _alike(self, color: int | None, key: int) -> list[int]:
        """The ranks of the same color, in the order of a split."""
        wanted = [json.loads(each) for each in self.allgather(json.dumps([color, key]).encode())]
        ranks = [r for r in range(self.size) if color is not None and wanted[r][0] == color]
        return sorted(ranks, key=lambda r: (wanted[r][1], r))

    @property
    def _neighbours(self) -> dict[int, int | None]:
        """The group's ranks on this host, and the NUMA node of each."""
        if self._near is None:  # not a cached_property: in Python 3.11 threads would share its lock
            places = self.allgather(json.dumps(self._own_place()).encode())
            self._set_neighbours([json.loads(place) for place in places])
        assert self._near is not None
        return self._near

    def _own_place(self) -> list[Any]:
        """The host of this rank, and the NUMA node that it is bound to."""
        return [host_id(), process_numa_node()]

    def _set_neighbours(self, places: Sequence[list[Any]]) -> None:
        """Set the ranks on this host, given the place of each rank."""
        here = places[self.rank][0]
        self._near = {rank: node for rank, (host, node) in enumerate(places) if host == here}


def _difference(messages: list[bytes], ledger: Ledger) -> str:
    """A text that names two ranks whose calls differ, and both calls."""
    calls = []
    for message in messages:
        number, length = _HEAD.unpack_from(message)
        calls.append(f"{message[_HEAD.size : _HEAD.size + length].decode(errors='replace')} (exchange {number})")
    other = next(rank for rank, call in enumerate(calls) if call != calls[0])
    first, second = (ledger.names([rank], False) for rank in (0, other))
    return f"{first} called {calls[0]} but {second} called {calls[other]}"


def host_id() -> str:
    """An identity of this host, equal for processes exactly if they run on the same host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node() + (boot.read_text().strip() if boot.exists() else "")
