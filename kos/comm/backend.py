"""Backend: the trait behind a Communicator.

``ScheduledBackend`` (scheduled.py) carries every operation over messages, ``DeviceBackend`` (gpu/) by kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np

from kos.comm.cached import CallCache
from kos.comm.failures import again
from kos.comm.operation import Call
from kos.comm.recorder import failed
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.work import Engine, Idle, Work
from kos.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    Interrupted,
    KosError,
    RankLost,
)


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend can carry a group; ``reason`` is why not, or what it uses."""

    usable: bool
    reason: str
    claim: str = ""
    """What only one rank of the group may use, such as a GPU."""


_UNNAMED = (CollectiveMismatch, CollectiveTimeout, RankLost)  # raised where the call is not known, by a transport

SHRINKS = "it shrinks the communicator"  # why a survivor has closed the old one

_SHOWN = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
_SHOWN_BYTES = {"1 KB": 1 << 10, "32 KB": 1 << 15, "1 MB": 1 << 20, "32 MB": 1 << 25, "1 GB": 1 << 30}
_BUFFERS = {"": (False, False), "symmetric": (True, False), "graph": (False, True), "symmetric, graph": (True, True)}


class Backend(ABC):
    """One way to carry operations.  Subclasses give ``name``, ``probe``, ``prepare`` and ``start``."""

    name: str
    on_gpu: ClassVar[bool] = False
    """Whether it carries arrays on GPUs, and no others.  Of those, ``auto`` uses kos's own alone."""
    device: int | None = None
    """The GPU whose memory it moves, by its number in this process; None for memory of the host."""

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None) -> None:
        self.rank, self.size, self.ledger = rendezvous.rank, rendezvous.size, rendezvous.ledger
        self.timeout = rendezvous.timeout  # seconds, where no operation has one; follows the communicator's
        self.engine = engine or Engine()
        self.cache = CallCache()
        self.broken: KosError | None = None  # the first failure of a collective: the ranks are out of step

    @classmethod
    @abstractmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        """Can this backend carry this group, as far as this rank can see?  Never raises."""

    @abstractmethod
    def idle(self) -> Idle:
        """How one wait of this backend waits."""

    def split(self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0) -> Backend | None:
        """The backend of a split, whose operations progress with this one's; None where ``rendezvous`` and color are.

        Called on every rank, as ``Communicator.split`` was.
        """
        return None if rendezvous is None else type(self)(rendezvous, self.engine)

    def revoke(self, reason: str) -> None:
        """``abort`` before ``shrink``, which may build upon what this leaves."""
        self.abort(reason)

    def shrink(self, rendezvous: Rendezvous) -> Backend:
        """The backend of the ranks of ``rendezvous``, the survivors of this one's.  Collective, after ``revoke``."""
        backend = self.split(rendezvous, 0, rendezvous.rank)
        assert backend is not None
        return backend

    def close(self) -> None:  # noqa: B027 -- nothing to do unless a backend holds something
        """Free what the backend holds.  Collective; nothing may be in flight."""

    def abort(self, reason: str) -> None:  # noqa: B027
        """End everything in flight without waiting for other ranks; they are notified of the reason where possible."""

    def synchronize(  # noqa: B027
        self, timeout: float | None = None, stream: int | None = None, until: Callable[[], bool] | None = None
    ) -> None:
        """Wait on the host for what is queued on a GPU."""

    def allocate(self, shape: Any, dtype: Any) -> Any:
        """An array in the memory that this backend moves best.  Collective."""
        return np.empty(shape, dtype)

    @abstractmethod
    def prepare(self, call: Call) -> None:
        """Refuse, before anything is sent, what this backend cannot carry; find what can be found beforehand.

        Raises InvalidArgument, for memory of a GPU for one.
        """

    def check_threads(self) -> None:  # noqa: B027
        """Raise BackendUnavailable where operations may not be moved by another thread than the program's."""

    @property
    def carries_host(self) -> bool:
        """Whether it carries operations on memory of the host, those of ``split`` and ``all_gather_bytes`` included."""
        return not self.on_gpu

    def details(self) -> list[tuple[str, str, str]]:
        """Rows for ``Communicator.explain``: what it uses, whether, and why."""
        return []

    def owns(self, work: Work[Any]) -> bool:
        """Whether it started ``work``; splits share an engine."""
        return work.backend is self

    def raise_failure(self, what: object) -> None:
        """Raise the first failure of this communicator, if there was one, from ``what``, which is called now."""
        if self.broken is not None:
            raise again(self.broken, f"{what}: the communicator failed before: {self.broken}")

    def refuse(self, call: Call) -> NoReturn:
        """Raise the first failure of this communicator from ``call``, which is on record already."""
        try:
            self.raise_failure(call.name)
        except KosError as error:
            failed(call, error)
            raise
        raise AssertionError(f"{call}: refused without a reason")

    @abstractmethod
    def start(self, call: Call) -> Work[Any] | None:
        """Launch a prepared call; None where it is queued on its stream and needs no wait."""

    def in_order(self, calls: Sequence[Call]) -> Sequence[Call]:
        """The calls of a batch in the order in which ``start_all`` begins them, the same on all ranks."""
        return calls

    def start_all(self, calls: Sequence[Call], overlap: bool) -> list[Work[Any]]:
        """Launch the calls of a batch together; with ``overlap`` beside the streams of their arrays."""
        return [work for work in map(self.start, calls) if work is not None]

    def queued(self, call: Call) -> Work[Any] | None:
        """What waits for a prepared call where ``start`` returns None; None where ``start`` returns a Work."""
        return None

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        """By which backend and algorithm an operation on float32 goes; ``nbytes`` are those that a rank brings."""
        return self.name

    def routes(self, place: str = "") -> list[tuple[str, ...]]:
        """``route_of`` the usual operations as the rows of a table, for ``Communicator.explain``."""
        rows: list[tuple[str, ...]] = [(f"float32{place}", *_SHOWN_BYTES)]
        for name in _SHOWN if self.size > 1 else ():
            alike: dict[tuple[str, ...], list[str]] = {}
            for kind, how in _BUFFERS.items():
                cells = tuple(self.route_of(name, nbytes, *how) for nbytes in _SHOWN_BYTES.values())
                alike.setdefault(cells, []).append(kind)
            labels = (name if "" in kinds else f"{name} ({'; '.join(kinds)})" for kinds in alike.values())
            rows += [(label, *cells) for label, cells in zip(labels, alike, strict=True)]
        return rows if rows[1:] else []

    def missing(self, call: Call) -> str:
        """At a timeout: which ranks did not arrive, as far as known."""
        if call.collective:
            return "which ranks did not arrive is not known"
        message = call.operation.message
        if message.src is None:
            return f"rank {message.dst} did not receive"
        return f"rank {message.src} sent nothing with tag {message.recv_tag}"

    def timed_out(self, call: Call, seconds: float | None) -> KosError:
        """The error of an operation that took too long."""
        return CollectiveTimeout(f"{call}: not complete after {seconds} s; {self.missing(call)}")

    def report_wait(self, call: Call | None) -> None:  # noqa: B027
        """This rank has waited for ``call`` for a while, and still does; None: no longer."""

    def failed(self, call: Call, error: Exception) -> KosError:
        """What to raise for an error in an operation, whose memory may be freed afterwards."""
        if not isinstance(error, KosError):
            cause, error = error, CollectiveError(f"{call}: {type(error).__name__}: {error}")
            error.__cause__ = cause
        elif isinstance(error, _UNNAMED) and f"{call.name} #" not in str(error):
            error = again(error, f"{call}: {error}")
        if ends_group(call, error) and self.broken is None:
            self.broken = again(error)
        return error


def ends_group(call: Call, error: Exception) -> bool:
    """Whether its ranks are out of step after that error.

    They are after a collective, after a send that may still be received, and after any call that a Ctrl-C cut short.
    """
    if isinstance(error, Interrupted):
        return True
    sends = call.operation.message.dst is not None
    return call.collective or (sends and not isinstance(error, CollectiveMismatch | RankLost))
