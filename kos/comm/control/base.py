"""ControlPlane: how the ranks of a group find each other and exchange small messages."""

from __future__ import annotations

import json
import platform
import struct
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from kos.comm import timeouts
from kos.comm.control.identity import release
from kos.comm.control.notices import Channel
from kos.comm.failures import FailureLog, PendingRanks
from kos.comm.prepared import shortened
from kos.cuda.devices import process_numa_node
from kos.errors import (
    BackendUnavailable,
    CollectiveError,
    KosError,
    OutOfMemory,
    RankLost,
    RendezvousError,
    by_handler,
    from_record,
    to_record,
)
from kos.memory.ipc import boot_id, pretended_host

HOST_CHARACTERS = 64  # of a name in KOS_HOST, at most
_HEAD = struct.Struct("!IH")  # of a message: the number of the exchange, and the length of the call's name


class Location(NamedTuple):
    """Where a rank runs."""

    machine: str
    host: str  # of KOS_HOST, "" for the machine's own
    numa_node: int | None  # to which the rank is bound

    @property
    def identity(self) -> str:
        """Of the host; it names the machine too, as ranks of several machines may have one ``KOS_HOST``."""
        return f"{self.machine} {self.host}" if self.host else self.machine

    @property
    def name(self) -> str:
        """Of the host, in errors."""
        name = self.host or self.machine.partition(" ")[0]
        return name if name.startswith("host") else f"host {name}"


class ControlPlane(ABC):
    """The control plane of a group.  Every method is collective: all ranks call it, in the same order.

    A backend checks its capabilities and never its type: ``threads`` (the ranks are threads of this process and share
    this object), ``mpi_comm`` (an MPI communicator over the same ranks, made on first use) and ``connect`` (opens a TCP
    connection to every other rank: each rank calls those below it and accepts those above it).

    A subclass implements ``_exchange`` and ``_free``.  Every exchange carries ``call`` and a number, so that ranks that
    make different calls all raise CollectiveMismatch.  After the first failure the ranks are out of step, so every
    later exchange raises that failure again.
    """

    rank: int
    size: int
    timeout: float
    job: str = ""  # unique to the job, the same on all ranks
    threads: Any = None
    mpi: Any = None
    """The ranks in a communicator of MPI (``MPIRanks``); None if they are not processes of an MPI job."""
    connect: Callable[..., dict[int, Any]] | None = None
    channel: Channel | None = None
    """Notices to and from all other ranks; None where ranks have no hub."""
    device: int | None = None
    """The index in this process of the requested GPU."""
    requested_gpus: Sequence[str] = ()
    """The UUID of the GPU that each rank requested, "" for none; empty before backends are compared."""
    nccl: Mapping[str, Any] = MappingProxyType({})
    """The options of NCCL for this group, the same on all ranks."""
    host: str | None = None
    """The name of the host on which this rank pretends to be; None for that of ``KOS_HOST``, "" for none."""
    _known_locations: list[Location] | None = None
    call = "exchange"  # the program's call, with its arguments; the same on all ranks
    _exchanges = 0  # begun by this rank
    _failures: FailureLog | None = None

    @property
    def mpi_comm(self) -> Any:
        return None

    @property
    def epoch(self) -> int:
        """The number of changes of the membership before this group was made."""
        return 0

    @property
    def number(self) -> int:
        """A number of this group, which no other group of the job has that was split from the same."""
        return 0

    @property
    def failures(self) -> FailureLog:
        """The known failures in this group."""
        if self._failures is None:
            self._failures = FailureLog(range(self.size), self.rank, timeout=self.timeout)
        return self._failures

    def allgather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes (of any length), in rank order.

        Raises CollectiveMismatch if ranks make different calls, RendezvousError if a rank does not arrive within
        ``timeout`` seconds, RankLost if one is lost; every later call raises that failure again.
        """
        if self.failures.over is not None:
            raise self.failures.over.copy()
        if self.failures.status.last is not None:
            self.failures.status.clear_failure()
        self._exchanges += 1
        name = shortened(self.call).encode()  # every rank gets those of all ranks
        head = _HEAD.pack(self._exchanges, len(name)) + name
        try:
            message = head + bytes(data)
            parts = self._exchange(message) if self.size > 1 else [message]
            if not all(part.startswith(head) for part in parts):
                raise _difference(parts, self.failures)
        except KosError as error:
            self.failures.over = self.failures.over or error.copy()  # ``error`` has frames that hold this group
            raise
        except BaseException as error:
            self._cut_short(error)
            raise
        return [part[len(head) :] for part in parts]

    def together(self, step: Callable[[], bytes], what: str = "rendezvous") -> list[bytes]:
        """What ``step`` returns on each rank.  If it raises on one, all ranks raise its error, and this group goes on.

        That is an error of kos, or a MemoryError, which becomes OutOfMemory of the call ``what``.
        """
        try:
            mine = b"+" + step()
        except (KosError, MemoryError) as error:
            mine = json.dumps(to_record(self.failures.as_own(error, what))).encode()
        results = self.allgather(mine)
        if (failed := next((each for each in results if each[:1] != b"+"), None)) is not None:
            raise from_record(json.loads(failed))
        return [each[1:] for each in results]

    @contextmanager
    def reporting(self, *alike: type[KosError]) -> Iterator[None]:
        """A context whose exceptions the other ranks raise in their exchanges, in which they would wait for this rank.

        Errors of the classes ``alike`` are not reported, because all ranks raise them together, nor is
        BackendUnavailable, because ranks that refuse a backend raise it together.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, (BackendUnavailable, *alike)):
                raise
            if self.failures.over is None:
                self._exchanges += 1  # the first that this rank does not join
                self._cut_short(error)
            if isinstance(error, MemoryError) and not isinstance(error, KosError) and self.failures.over is not None:
                raise self.failures.over.copy() from error
            raise

    @contextmanager
    def reporting_memory(self) -> Iterator[None]:
        """Like ``reporting``, but only for a lack of memory on this rank."""
        try:
            yield
        except (MemoryError, OverflowError) as error:
            if isinstance(error, KosError):
                raise
            with self.reporting():
                raise

    def _cut_short(self, error: BaseException) -> None:
        """Keep ``error``, such as Ctrl-C, as the failure of this rank, and report it."""
        me = self.failures.names([self.rank], False)
        if isinstance(error, CollectiveError | OutOfMemory | RendezvousError) and not by_handler(error):
            failure: KosError = error.copy(None if error.ranks else f"{me}: {error}")
        else:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            kind: type[KosError] = OutOfMemory if isinstance(error, MemoryError) else RendezvousError
            kind = RankLost if by_handler(error) else kind
            failure = kind(f"rendezvous: {self.call} was interrupted on {me} by {what}")
        failure.ranks = failure.ranks or (self.failures.world[self.rank],)
        self.failures.over = failure
        self.failures.status.post_failure(failure)
        if self.size > 1:
            self._report(failure)

    def _report(self, failure: KosError) -> None:  # noqa: B027 -- not every kind can
        """Report to the other ranks that this rank takes part in no more exchanges."""

    def look_while_hub_answers(self, late_at: float) -> Callable[[], None]:
        """A check for waits for the hub, which may run on a stopped rank."""
        hub = self.failures.world[0]

        def look() -> None:
            self.failures.status.receive_notices()
            if time.monotonic() > late_at and self.failures.status.halted(hub):
                raise TimeoutError

        return look

    @abstractmethod
    def _exchange(self, message: bytes) -> list[bytes]:
        """Every rank's message, in rank order; the group has two ranks or more.  Raises RendezvousError, RankLost."""

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> ControlPlane | None:
        """The group of the ranks of the same ``color``, ordered by (key, rank); None for color None."""

    def deaths(self) -> dict[int, str]:
        """The ranks whose process has ended, as far as is known, and how that was found.  Does not wait."""
        return {}

    def check_change(self, call: str) -> None:
        """Raise BackendUnavailable, with the reason, if the membership of this group cannot change by ``call``."""
        raise BackendUnavailable(f"{call}: expected ranks that can leave and join, got {type(self).__name__}")

    def change(
        self, call: str, newcomers: int | None = 0, whole: bool = False,
        terms: Mapping[str, Any] = MappingProxyType({}), began: float | None = None,
    ) -> ControlPlane:  # fmt: skip
        """The group of the live ranks, in their order, and of ``newcomers`` after them; all live ranks call it.

        ``newcomers`` None: as many as were lost.  ``whole``: raise RankLost if a rank was lost.  ``terms``, of JSON's
        types, is sent to newcomers.  If an earlier attempt lost newcomers, ``began`` (``time.monotonic``) is the time
        at which the first attempt began, from which the timeout counts.  This group is not closed.
        """
        raise NotImplementedError

    def lose_newcomers(self, ranks: Sequence[int]) -> bool:
        """Leave out the newcomers among ``ranks``, which an attempt at a change has lost.

        Returns whether all ``ranks``, at least one, are newcomers: the change can then start again without them.
        """
        return False

    def shrink(self) -> ControlPlane:
        """The group of the surviving ranks, in their order; all of them call it.  Closes this one."""
        child = self.change("shrink")
        self.close()
        return child

    @property
    def address(self) -> str:
        """Where newcomers call, "" if they cannot."""
        return ""

    def newcomers(self) -> int:
        """How many newcomers wait at this rank to join.  Does not wait."""
        return 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Post to the ranks of this host that this one waits for the others of this group."""
        failures = self.failures
        failures.status.post_wait(rank for rank in failures.world if rank != failures.world[self.rank])
        try:
            yield
        except KosError as error:  # posted before the wait ends: a rank with neither would be named as the cause
            failures.status.post_failure(error)
            raise
        finally:
            failures.status.post_wait(None)

    def absent(
        self, ranks: Sequence[int], what: str = "rendezvous", verb: str = timeouts.ARRIVE, several: bool = True
    ) -> KosError:
        """The error of ``what``, in which those ranks are missing at the timeout."""
        text = timeouts.late(self.failures.names(ranks, several), verb, self.timeout)
        late = PendingRanks(ranks, text, absent=verb == timeouts.ARRIVE)
        return self.failures.timeout_error(late, what, None, RendezvousError)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.allgather(b"")

    def close(self) -> None:
        """Free the resources of the group; safe to call when other ranks are lost."""
        self._free(self.failures.over is None and self.failures.closing() is None, None)
        release(self)
        self.failures.over = self.failures.over or RendezvousError(f"rendezvous: rank {self.rank} closed the group")

    def abort(self, code: int | None) -> None:
        """Free the resources of the group without waiting for the other ranks.

        ``code`` is the exit code of a rank that ends by an error, None for an error that was handled.
        """
        self._free(False, code)
        release(self)
        self.failures.over = self.failures.over or RendezvousError(f"rendezvous: rank {self.rank} aborted the group")

    def _free(self, orderly: bool, code: int | None) -> None:  # noqa: B027 -- not every kind holds something
        """Free the resources: together with the other ranks if ``orderly``, else without waiting for them."""

    @property
    def local_rank(self) -> int:
        """Index of this rank among the group's ranks on the same host.  Collective on first use."""
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of the group's ranks on the same host.  Collective on first use."""
        return len(self.local_ranks)

    @property
    def local_ranks(self) -> list[int]:
        """The group's ranks on the same host as this one, ascending.  Collective on first use."""
        mine = self.host_identity
        return [rank for rank, place in enumerate(self._locations) if place.identity == mine]

    @property
    def ranks_per_host(self) -> int | None:
        """The number of ranks per host if there are several hosts with equally many ranks, numbered host by host.

        Else None.  Collective on first use.
        """
        hosts = [place.identity for place in self._locations]
        size = hosts.count(hosts[0])
        alike = len({*hosts}) * size == len(hosts) and all(
            len({*hosts[i : i + size]}) == 1 for i in range(0, len(hosts), size)
        )
        return size if alike and size < len(hosts) else None

    @property
    def host_identity(self) -> str:
        """An identity of this rank's host, pretended hosts included.  Collective on first use."""
        return self._locations[self.rank].identity

    @property
    def pretended_host(self) -> str:
        """The name of the host on which this rank pretends to be; "" for none.  Collective on first use."""
        return self._locations[self.rank].host

    @property
    def place_on_machine(self) -> int:
        """Index of this rank among the group's ranks on the same machine.  Collective on first use."""
        return [rank for rank, _ in self.on_machine].index(self.rank)

    @property
    def on_machine(self) -> list[tuple[int, int | None]]:
        """The group's ranks on the same machine, ascending, and the NUMA node that each is bound to.

        Pretended hosts share the machine.  Collective on first use.
        """
        mine = self._locations[self.rank].machine
        return [(rank, place.numa_node) for rank, place in enumerate(self._locations) if place.machine == mine]

    def name_hosts(self) -> None:
        """Make errors name the hosts of ranks, if there are several.  Collective on first use of the places."""
        hosts = dict[str, tuple[str, list[int]]]()
        for rank, place in enumerate(self._locations):
            hosts.setdefault(place.identity, (place.name, []))[1].append(self.failures.world[rank])
        found = {rank: (name, tuple(ranks)) for name, ranks in hosts.values() for rank in ranks}
        self.failures.status.hosts = found if len(hosts) > 1 else {}

    def wrong_hosts(self) -> str:
        """What is wrong with the ranks' ``KOS_HOST``, the same text on all ranks, or "".  Collective on first use."""
        names = [place.host for place in self._locations]
        wrong = [rank for rank, name in enumerate(names) if len(name) > HOST_CHARACTERS or not name.isprintable()]
        if wrong:
            allowed = f"expected a name of at most {HOST_CHARACTERS} printable characters"
            return f"KOS_HOST: {allowed}, got {names[wrong[0]]!r} on {self.failures.names(wrong)}"
        without = [rank for rank, name in enumerate(names) if not name]
        if 0 < len(without) < self.size:
            return f"KOS_HOST: expected a name on all ranks or on none, got none on {self.failures.names(without)}"
        return ""

    def _alike(self, color: int | None, key: int) -> list[int]:
        """The ranks of the same color, in the order of a split."""
        wanted = [json.loads(each) for each in self.allgather(json.dumps([color, key]).encode())]
        ranks = [r for r in range(self.size) if color is not None and wanted[r][0] == color]
        return sorted(ranks, key=lambda r: (wanted[r][1], r))

    @property
    def _locations(self) -> list[Location]:
        """Where each rank runs."""
        if self._known_locations is None:  # not a cached_property: in Python 3.11 threads would share its lock
            places = self.allgather(json.dumps(self._own_location()).encode())
            self._known_locations = [Location(*json.loads(place)) for place in places]
        return self._known_locations

    def _own_location(self) -> Location:
        host = pretended_host() if self.host is None else self.host
        return Location(machine_id(), host[: HOST_CHARACTERS + 1], process_numa_node())


def _difference(messages: list[bytes], failures: FailureLog) -> KosError:
    """The error of the first two ranks whose calls differ."""
    calls = []
    for message in messages:
        number, length = _HEAD.unpack_from(message)
        calls.append(f"{message[_HEAD.size : _HEAD.size + length].decode(errors='replace')} (exchange {number})")
    other = next(rank for rank, call in enumerate(calls) if call != calls[0])
    return failures.other_calls((0, calls[0]), (other, calls[other]))


def machine_id() -> str:
    """An identity of this machine, equal for processes exactly if they run on the same one, whatever ``KOS_HOST``."""
    return f"{platform.node()} {boot_id()}".rstrip()


def __getattr__(name: str) -> Any:
    """The old name of ControlPlane, until the next release."""
    if name == "Rendezvous":
        warnings.warn("kos.comm.control.base.Rendezvous is now ControlPlane", FutureWarning, stacklevel=2)
        return ControlPlane
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
