"""Transport: moves messages between the ranks of a group in host memory, and knows what becomes of these ranks.

``HostBackend`` (``host/backend.py``) runs every operation over one.  The transports of kos are ``tcp``, ``mpi`` and
``mock``.  A transport has ``name``, ``probe`` and three methods for messages; all others have a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from kos.comm.backend import Probe
from kos.comm.control.base import Rendezvous
from kos.comm.control.mpi_job import Backoff
from kos.comm.operation import AUTO, COLLECTIVE_TAGS, Operation
from kos.comm.work import Engine, Idle, Steps, Work
from kos.errors import CollectiveError, KosError

Array = np.ndarray[Any, Any]

# The schedule of each collective. Those of ``_ORDERED`` add in rank order.
_DEFAULTS = {
    "all_reduce": "ring", "reduce": "tree", "reduce_scatter": "ring", "scan": "chain", "exscan": "chain",
    "broadcast": "tree", "all_gather": "ring", "all_to_all": "pairwise", "gather": "direct", "scatter": "direct",
}  # fmt: skip
_ORDERED = {**_DEFAULTS, "all_reduce": "two_shot", "reduce": "one_shot", "reduce_scatter": "one_shot"}
_SMALL = 32 * 1024  # bytes up to which latency, not bandwidth, decides between schedules


class Request(Protocol):
    """A send or receive in flight.  Those of a transport have the ``tag`` of their message, too."""

    def done(self) -> bool:
        """Whether the buffer may be reused (send) or read (receive).  Never blocks; raises.

        It advances all messages of this rank, since a wait may poll only one request.  A send is done only if its
        message arrives without further calls of this rank, which may compute for a long time.  Bytes that wait in a
        buffer of the transport are not sent yet.
        """


class Transport(ABC):
    """Non-blocking messages; those of one pair of ranks under one tag arrive in the order they were sent."""

    name: str
    """The name in errors and in ``Communicator.backend_name``."""
    processes: ClassVar[bool] = False
    """Whether the ranks are processes that share memory within a host, where that is possible."""
    on_gpu: ClassVar[bool] = False

    def __init__(self, rendezvous: Rendezvous, engine: Engine) -> None:
        """Connects the ranks of ``rendezvous``.  Collective."""
        self.rank, self.size, self.ledger, self.engine = rendezvous.rank, rendezvous.size, rendezvous.ledger, engine

    @classmethod
    @abstractmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        """Whether it can serve this group, as far as this rank can see.  Never raises."""

    @abstractmethod
    def isend(self, array: Array, peer: int, tag: int) -> Request:
        """Begin to send a contiguous 1-D array, which stays unchanged until the request is done."""

    @abstractmethod
    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        """Begin to receive into a contiguous 1-D array."""

    @abstractmethod
    def cancel(self, cancelled: Callable[[Any], bool]) -> None:
        """Cancel those requests; their memory is free afterwards."""

    # Optional: how it runs.

    def open(self, backend: Any) -> None:  # noqa: B027
        """Called once ``backend``, a HostBackend, has opened the memory that ranks share.  Collective."""

    def idle(self) -> Idle:
        """How a wait polls or sleeps."""
        return Backoff()

    def check_threads(self) -> None:  # noqa: B027
        """Raise BackendUnavailable if only the program's thread may advance operations."""

    def tag(self, sequence: int) -> int:
        """The tag of the messages of a collective."""
        return COLLECTIVE_TAGS + sequence % COLLECTIVE_TAGS

    def choose(self, o: Operation, collective: str, nbytes: int) -> str:
        """The schedule of a call."""
        if o.options.algorithm != AUTO:
            return o.options.algorithm
        if collective == "all_reduce" and nbytes <= _SMALL and not o.options.deterministic:
            return "halving_doubling"
        return (_ORDERED if o.options.deterministic else _DEFAULTS)[collective]

    def native(self, work: Work[Any], spaces: Mapping[str, Array], collective: str) -> Steps | None:
        """The library's own call for one staged collective, or None to run a schedule."""
        return None

    def is_native(self, collective: str, nbytes: int) -> bool:
        """Whether ``native`` runs a call on float32, for ``Communicator.explain``."""
        return False

    def launch(self, work: Work[Any], run: Callable[[Work[Any]], Steps]) -> Steps:
        """The steps of ``work``, which ``run(work)`` returns."""
        return run(work)

    def synchronize(self, backend: Any) -> None:  # noqa: B027
        """The program waits for all operations of ``backend``."""

    def successor(self, rendezvous: Rendezvous) -> Callable[[Rendezvous, Engine], Transport]:
        """What makes the transport of a group of these ranks; after a loss, of the survivors."""
        return type(self)

    # Optional: which ranks are late, and whether calls match.

    def agree(self, work: Work[Any], local: Callable[[], bool] | None) -> Callable[[], bool] | None:
        """Compare this collective with the other ranks' collectives of the same sequence number.

        Returns a function that polls whether every rank has arrived, and raises CollectiveMismatch if their calls
        differ.  ``local`` is that function for the ranks of this host, where they share memory.  Returns None if calls
        cannot be compared.
        """
        return local

    def complete(self, work: Work[Any]) -> None:  # noqa: B027
        """A collective that ``agree`` compared is complete on this rank."""

    def absent(self, work: Work[Any]) -> list[int]:
        """The ranks that are known not to have begun a collective."""
        return []

    def awaited(self, tag: int) -> list[int]:
        """The peers of the messages in flight with that tag."""
        return []

    def in_flight(self, rank: int, tag: int, receives: bool) -> bool:
        """Whether a message with that tag from or to that rank is in flight; the default takes a send for received."""
        return receives

    def report_two_threads(self, error: CollectiveError) -> bool:
        """As in ``Backend``."""
        return True

    # Optional: failures.

    def explain(self, work: Work[Any], error: Exception) -> Exception:
        """The error of kos for ``error`` of ``work``."""
        return error

    def find_failure(self) -> KosError | None:
        """The failure of this group, if it can be found without a call.  Called by the watchdog's thread."""
        return None

    def report_failure(self, failure: KosError, sequence: int) -> None:  # noqa: B027
        """Make the other ranks raise the failure from collective ``sequence`` on."""

    def report_end(self, sequence: int, reason: str, cause: KosError | None) -> None:  # noqa: B027
        """Report that this rank begins no operation from collective ``sequence`` on, why, and what caused that."""

    def abort(self, reason: str, failure: KosError | None, cause: KosError | None) -> str:
        """End all messages without the other ranks; returns the reason as ``report_end``, which follows, reports it.

        ``failure`` is the first one of this group, ``cause`` what caused the end.
        """
        return reason

    def close(self, begun: int, failed: bool) -> None:  # noqa: B027
        """Free the resources after ``begun`` collectives, with the other ranks unless one has ``failed``."""
