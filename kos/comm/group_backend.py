"""GroupBackend: the class that a Communicator calls.  It runs the operations of one group.

``HostBackend`` (host/host_backend.py) runs every operation with a ``contract.Backend`` that moves host memory.
``GPUBackend`` (gpu/backend.py) runs every operation with one of its routes, which are Backends that move GPU memory.
It has a HostBackend too if the communicator moves host memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn

import numpy as np

from kos.comm import timeouts
from kos.comm.control.base import Rendezvous
from kos.comm.failures import Late
from kos.comm.matching import Envelope
from kos.comm.operation import Operation
from kos.comm.prepared import Prepared, Store
from kos.comm.work import Engine, Work
from kos.errors import (
    BackendUnavailable,
    CollectiveMismatch,
    InvalidArgument,
    KosError,
    RankLost,
)
from kos.memory import Array, Buffer

Tracer = Callable[[Sequence[Work[Any]], bool, bool], AbstractContextManager[Any]]
"""A ``with`` block around the launch of Works; whether they are a batch, and whether with ``async_op``."""


CHANGES = "it changes the membership"  # why a survivor has closed the old one
UNMADE = "its communicator could not be made"

_SHOWN = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
_SHOWN_BYTES = {"1 KB": 1 << 10, "32 KB": 1 << 15, "1 MB": 1 << 20, "32 MB": 1 << 25, "1 GB": 1 << 30}
_BUFFERS = {"": (False, False), "symmetric": (True, False), "graph": (False, True), "symmetric, graph": (True, True)}


class GroupBackend(ABC):
    """Runs the operations of a group.  Subclasses define ``name``, ``waiter`` and ``prepare``."""

    name: str
    """The name in errors and in ``Communicator.backend_name``."""
    on_gpu: ClassVar[bool] = False
    """Whether the calls that it starts run on a GPU."""
    gpu_array_hint = "nccl, peer and auto support it"
    """The end of the error for an array on a GPU, if the backend does not accept such arrays."""
    device: int | None = None
    """The index in this process of the GPU whose memory it moves; None for host memory."""
    tracing: Tracer | None = None
    """What traces the launch of each operation of a batch."""
    work: ClassVar[type[Work[Any]]] = Work
    """The class of what its calls start."""
    inner: Sequence[GroupBackend] = ()
    """The backends that it consists of."""

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None) -> None:
        self.rank, self.size, self.failures = rendezvous.rank, rendezvous.size, rendezvous.failures
        self.group_suffix = self.failures.group_suffix  # follows the number of a rank in texts
        self.timeout = rendezvous.timeout
        """Seconds that an operation without a timeout of its own may take."""
        self.engine = engine or Engine()
        self.store = Store()

    def set_timeout(self, seconds: float) -> None:
        """Follow the communicator's timeout."""
        self.timeout = seconds
        for each in self.inner:
            each.set_timeout(seconds)

    @abstractmethod
    def waiter(self) -> Any:
        """How a wait of this backend polls or sleeps, such as ``Backoff``.

        Its ``mark()`` returns a token before a poll.  Its ``pause(mark, seconds)`` waits for an event since then, at
        most ``seconds`` (None: as long as it likes).
        """

    def split(self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0) -> GroupBackend | None:
        """The backend of a group of these ranks.  Waiting for its operations also advances those of this backend.

        Every rank calls it.  After a loss, every surviving rank does so after ``abort``.  Returns None if
        ``rendezvous`` is None.
        """
        return None if rendezvous is None else type(self)(rendezvous, self.engine)

    def close(self) -> None:  # noqa: B027 -- nothing to do unless a backend holds something
        """Free the backend's resources.  Collective; nothing may be in flight."""

    @property
    def abort_flags(self) -> list[int]:
        """As ``Communicator.abort_flags``."""
        return [flag for each in self.inner for flag in each.abort_flags]

    def signal_end(self, reason: str) -> None:  # noqa: B027
        """Phase 1 of abort.  It runs on all communicators before any teardown, as teardowns may block each other."""

    def abort(self, reason: str) -> None:  # noqa: B027
        """End everything in flight without waiting for other ranks; notify them of the reason where possible."""

    def synchronize(  # noqa: B027
        self, timeout: float | None = None, stream: int | None = None, until: Callable[[], bool] | None = None
    ) -> None:
        """Wait on the host for queued GPU work."""

    def settle(self, timeout: float) -> bool:
        """Wait on the host for collectives that are queued on the GPU; returns whether messages may still be queued.

        It does not wait for messages, nor for what is queued behind them.
        """
        return False

    def allocate(self, shape: Any, dtype: Any) -> Any:
        """An array in the memory that this backend moves fastest.  Collective."""
        return np.empty(shape, dtype)

    def views(self, x: Buffer) -> list[Any]:
        """The memory of each rank that corresponds to ``x``, which is an array of ``allocate`` or a part of one."""
        raise BackendUnavailable(f"views: expected a backend whose ranks map all arrays of allocate, got {self.name}")

    def register(self, buffer: Buffer) -> Array:
        """Register memory of the program, so that it is as fast as that of ``allocate``.  Collective."""
        raise InvalidArgument(f"register: expected a backend for GPUs, got {self.name}, which moves any host memory")

    @abstractmethod
    def prepare(self, o: Operation) -> Prepared:
        """How calls like ``o`` run, on any arrays; sends nothing.

        Raises InvalidArgument for a call that this backend cannot run, such as one on GPU memory.
        """

    def exact_group_size(self, on_gpu: bool) -> int:
        """See ``Communicator.exact_group_size``."""
        return 1

    def check_threads(self) -> None:  # noqa: B027
        """Raise BackendUnavailable if only the program's thread may advance operations."""

    @property
    def begun(self) -> int:
        """The number of collectives begun on this rank, as far as it is compared with that of others."""
        return 0

    @property
    def carries_host(self) -> bool:
        """Whether it runs operations on host memory, including those of ``split`` and ``all_gather_bytes``."""
        return not self.on_gpu

    @property
    def has_envelopes(self) -> bool:
        """Whether it offers ``recv`` from any rank, ``send_bytes``, ``recv_bytes`` and ``probe``."""
        return False

    def poll_message(self, src: int, tag: int) -> Envelope | None:
        """The envelope of the next message from ``src``, a rank or ANY, None if none has arrived; raises failures."""
        raise NotImplementedError

    def details(self) -> list[tuple[str, str, str]]:
        """Rows for ``Communicator.explain``: a resource, whether it is used, and why."""
        return []

    def core_calls(self) -> tuple[Any, Any]:
        """A ``kos._core.native.Group`` for the calls of a communicator, and the object that describes calls to it.

        Both are None if the core does not make these calls.
        """
        return None, None

    def owns(self, work: Work[Any]) -> bool:
        """Whether this backend started ``work``.  Splits share an engine."""
        return work.backend is self or work.backend in self.inner

    def refuse(self, work: Work[Any]) -> NoReturn:
        """Raise the first failure of this communicator in ``work``, whose record exists already."""
        try:
            self.failures.refuse(work.name)
        except KosError as error:
            work.record_failure(error)
            raise
        raise AssertionError(f"{work}: refused without a reason")

    def in_order(self, works: Sequence[Work[Any]]) -> Sequence[Work[Any]]:
        """The Works of a batch in the order in which ``start_all`` begins them.  It is the same on all ranks."""
        return works

    def start_all(self, works: Sequence[Work[Any]], overlap: bool) -> None:
        """Launch the Works of a batch together; with ``overlap``, on a separate stream."""
        for work in works:
            if self.failures.first is not None:
                self.refuse(work)
            with nullcontext() if self.tracing is None else self.tracing((work,), False, False):
                steps = work.prepared.launch(work)
            if steps is not None:
                self.engine.begin(work, steps)

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        """The backend and algorithm of an operation on float32; ``nbytes`` is the size of each rank's input."""
        return self.name

    def route_table(self, place: str = "") -> list[tuple[str, ...]]:
        """The routes of the usual operations as the rows of a table, for ``Communicator.explain``."""
        rows: list[tuple[str, ...]] = [(f"float32{place}", *_SHOWN_BYTES)]
        for name in _SHOWN if self.size > 1 else ():
            alike: dict[tuple[str, ...], list[str]] = {}
            for kind, how in _BUFFERS.items():
                cells = tuple(self.route_of(name, nbytes, *how) for nbytes in _SHOWN_BYTES.values())
                alike.setdefault(cells, []).append(kind)
            labels = (name if "" in kinds else f"{name} ({'; '.join(kinds)})" for kinds in alike.values())
            rows += [(label, *cells) for label, cells in zip(labels, alike, strict=True)]
        return rows if rows[1:] else []

    def late(self, work: Work[Any]) -> Late:
        """Which ranks ``work`` waits for, as far as known, and how an error says that."""
        if work.collective:
            return Late(words=timeouts.UNKNOWN)
        message = work.operation.message
        if message.src is None:
            return Late(words=timeouts.unreceived(f"rank {message.dst}"))
        return Late(words=timeouts.unsent(f"rank {message.src}", message.recv_tag))

    def find_failure(self) -> KosError | None:
        """The failure of this communicator, if it can be found without a call.  Called by the watchdog's thread."""
        return self.failures.first

    def may_sleep(self, work: Work[Any]) -> bool:
        """Whether polling for ``work`` can move no data until another rank begins the call."""
        return False

    def to_error(self, work: Work[Any], error: Exception) -> KosError:
        """The error to raise for a failed operation, whose memory may be freed afterwards."""
        failure = self.failures.named(work, error)
        if ends_group(work, failure):
            self.failures.report(work, failure, 0)
        return failure


def ends_group(work: Work[Any], error: Exception) -> bool:
    """Whether the ranks of the group are out of step after that error.

    This is so after a collective, and after a send that may still be received.
    """
    sends = work.operation.message.dst is not None
    return work.collective or (sends and not isinstance(error, CollectiveMismatch | RankLost))
