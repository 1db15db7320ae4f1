"""The contract of a backend: what a class defines so that kos runs its operations by the library behind that class.

A class subclasses ``Backend``, sets ``name``, and defines ``probe`` and the methods of the memory that it moves:

=========================  ===================================  =======================================================
memory                     the class must define                what kos makes of it
=========================  ===================================  =======================================================
host (``on_host = True``)  ``isend``, ``irecv``, ``cancel``     every operation, by schedules of messages
                                                                (``host/backend.py``)
GPU (``on_gpu = True``)    ``exchange``                         every operation, by exchanges and by kernels of kos
                                                                (``gpu/library.py``)
=========================  ===================================  =======================================================

Everything else is optional.  A default does nothing, leaves the work to kos, or raises an error that names the method
and the backend.  kos makes one instance for each group and each kind of memory, so an instance moves one kind.

Threads that call it:

- The thread that makes, splits or closes a communicator calls ``probe``, ``__init__``, ``open``, ``successor``,
  ``allocate``, ``views``, ``register`` and ``close``.
- In host memory, any thread of the program that polls, and ``kos-progress``, call the methods of messages, collectives
  and late ranks, and ``done()`` of a request.  They hold ``Engine.lock``, so two calls never overlap.
- On GPUs, the thread of the program that makes a call calls ``native_on_gpu``, ``exchange`` and ``collect``; it may be
  capturing a graph.
- Any thread calls ``report_failure``, ``report_end`` and ``abort``, also while another thread is in a method.
- The watchdog's thread calls ``find_failure``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol

import numpy as np

from kos.comm.control.base import Rendezvous
from kos.comm.matching import Envelope
from kos.comm.operation import COLLECTIVE_TAGS, Operation
from kos.comm.waits import Backoff
from kos.comm.work import Engine, Steps, Work
from kos.errors import BackendUnavailable, KosError
from kos.memory import Buffer

Array = np.ndarray[Any, Any]
Message = tuple[int, int, int]
"""A message in GPU memory: the other rank, the address, and the number of bytes, which is not 0."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend can serve a group; ``reason`` is why not, or what it uses."""

    usable: bool
    reason: str
    claim: str = ""
    """A resource that only one rank of the group may use, such as a GPU."""


class Request(Protocol):
    """A send or receive in flight.  It has the ``tag`` of its message, too."""

    def done(self) -> bool:
        """Whether the buffer may be reused (send) or read (receive).  Never blocks; raises failures.

        It advances all messages of this rank, since a wait may poll only one request.  A send is done only if its
        message arrives without further calls of this rank, which may compute for a long time.  Bytes that wait in a
        buffer of the backend are not sent yet.
        """


class Backend(ABC):
    """The operations of one group by one library.  Arrays are contiguous and 1-D, tags are whole numbers."""

    name: str
    """The name in errors and in ``Communicator.backend_name``."""
    on_host: ClassVar[bool] = True
    """Whether it moves host memory."""
    on_gpu: ClassVar[bool] = False
    """Whether it moves the memory of GPUs."""
    processes: ClassVar[bool] = False
    """Whether the ranks of a host are processes: kos then moves their data in shared memory where it can."""

    @classmethod
    @abstractmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        """Whether it can serve this group, as far as this rank can see.  Never raises."""

    def __init__(self, rendezvous: Rendezvous, engine: Engine, device: int | None = None) -> None:
        """Connects the ranks of ``rendezvous``.  Collective.  Raises BackendUnavailable on all ranks, or on none.

        ``device`` is the index in this process of the GPU whose memory it moves, None for host memory.
        """
        self.rank, self.size, self.failures, self.engine = rendezvous.rank, rendezvous.size, rendezvous.failures, engine
        self.ranks_per_host, self.device = rendezvous.ranks_per_host, device

    # Required for host memory.

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        """Begin to send an array, which stays unchanged until the request is done.

        Messages between two ranks under one tag arrive in the order in which they were sent.
        """
        self._lacks("isend")

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        """Begin to receive into an array."""
        self._lacks("irecv")

    def cancel(self, cancelled: Callable[[Any], bool]) -> None:
        """Cancel the requests for which ``cancelled(request)`` is true; their memory is free afterwards."""
        self._lacks("cancel")

    # Required for GPU memory.

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], stream: int) -> None:
        """Queue messages on a stream of this GPU, all of them at once: none waits for another one of them.

        Messages between two ranks match in their order.  This rank may be among the ranks.  A backend that cannot
        queue, and waits for other ranks on the host, waits in ``wait_until``.
        """
        self._lacks("exchange")

    # Optional for host memory: messages from any rank, or of any length.

    check_seconds: ClassVar[float] = 0.0
    """Seconds between two calls of ``end_of`` for a rank, if they take long."""
    last_polls: ClassVar[int] = 0
    """Polls in which the last messages of a rank arrive whose end is known."""

    def arrived(self, ranks: Sequence[int], tag: int) -> Envelope | None:
        """The envelope of a message with that tag that has arrived from one of ``ranks``, and that no receive takes.

        It is the first such message of its rank, which the next ``irecv`` from it gets.  Never blocks.  Without it
        the backend has no ``recv`` from any rank, no ``recv_bytes`` and no ``probe``.
        """
        self._lacks("arrived")

    def end_of(self, rank: int) -> KosError | None:
        """Why that rank sends no more messages: a failure, or its end, with ``orderly``."""
        return None

    # Optional for host memory: how it runs.

    def open(self, backend: Any) -> None:  # noqa: B027
        """Called once ``backend``, a HostBackend, has opened the memory that ranks share.  Collective."""

    def idle(self) -> Any:
        """How a wait polls or sleeps.

        Its ``mark()`` returns a token before a poll.  Its ``pause(mark, seconds)`` waits for an event since then, at
        most ``seconds`` (None: as long as it likes).
        """
        return Backoff()

    def sleep(self, seconds: float | None) -> bool:
        """Wait for an event of a message, for at most ``seconds``; False if there are no events."""
        return False

    def check_threads(self) -> None:  # noqa: B027
        """Raise BackendUnavailable if only the program's thread may advance operations."""

    def tag(self, sequence: int) -> int:
        """The tag of the messages of a collective."""
        return COLLECTIVE_TAGS + sequence % COLLECTIVE_TAGS

    def choose(self, o: Operation, collective: str, nbytes: int) -> str | None:
        """The schedule of a call whose algorithm is "auto"; None: kos chooses."""
        return None

    def native(self, work: Work[Any], spaces: Mapping[str, Array], collective: str) -> Steps | None:
        """The library's own call for one staged collective, or None to run a schedule."""
        return None

    def is_native(self, collective: str, nbytes: int) -> bool:
        """Whether ``native`` runs a call on float32, for ``Communicator.explain``."""
        return False

    def launch(self, work: Work[Any], run: Callable[[Work[Any]], Steps]) -> Steps | None:
        """The steps of ``work``, which ``run(work)`` returns; None if it is complete."""
        return run(work)

    def synchronize(self, backend: Any) -> None:  # noqa: B027
        """The program waits for all operations of ``backend``."""

    # Optional for host memory: which ranks are late, and whether calls match.

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

    # Optional for GPU memory.

    def native_on_gpu(self, o: Operation) -> Callable[[int, int, int], None] | None:
        """What queues calls like ``o`` by the library's own function, or None: kos makes them of ``exchange``.

        It is called with a stream, and the addresses of what is sent and received.  It is chosen by what is equal on
        all ranks.  The result of a reduction has the same bits on all ranks.
        """
        return None

    def collect(self, send: int, recv: int, nbytes: int, stream: int) -> None:
        """Queue an all-gather of ``nbytes`` from the address ``send`` of each rank."""
        sends = [(rank, send, nbytes) for rank in range(self.size)]
        self.exchange(sends, [(rank, recv + rank * nbytes, nbytes) for rank in range(self.size)], stream)

    def register(self, buffer: Buffer) -> Any:
        """As ``Communicator.register``."""
        self._lacks("register")

    def views(self, x: Buffer) -> list[Any]:
        """As ``Communicator.views``, of GPU memory."""
        self._lacks("views")

    def wait_until(self, over: Callable[[], bool]) -> None:
        """Wait on the host in ``exchange``; kos sets it.  Raises CollectiveTimeout, and failures of other ranks."""
        raise NotImplementedError

    # Optional: failures and the end.

    def explain(self, work: Work[Any], error: Exception) -> Exception:
        """The error of kos for ``error`` of ``work``."""
        return error

    def find_failure(self) -> KosError | None:
        """The failure of this group, if it can be found without a call."""
        return None

    def report_failure(self, failure: KosError, sequence: int) -> None:  # noqa: B027
        """Make the other ranks raise the failure from collective ``sequence`` on."""

    def report_end(self, sequence: int, reason: str, cause: KosError | None) -> None:  # noqa: B027
        """Report that this rank begins no operation from collective ``sequence`` on, why, and what caused that."""

    def successor(self, rendezvous: Rendezvous) -> Callable[..., Backend]:
        """What makes the backend of a group of these ranks; after a loss, of the survivors."""
        return type(self)

    def abort(self, reason: str) -> str:
        """End all messages without waiting for other ranks; returns the reason as ``report_end`` then reports it."""
        return reason

    def close(self, begun: int) -> None:  # noqa: B027
        """Free the resources after ``begun`` collectives, with the other ranks unless the group has failed."""

    def _lacks(self, method: str) -> NoReturn:
        raise BackendUnavailable(f"{method}: expected a backend that has it, got {self.name}, whose class does not")


REQUIRED = {"on_host": ("isend", "irecv", "cancel"), "on_gpu": ("exchange",)}
"""What a class must define for each kind of memory."""


def lacking(kind: type[Backend]) -> list[str]:
    """The names of the methods that a class must define and does not."""
    needed = [name for memory, names in REQUIRED.items() if getattr(kind, memory) for name in names]
    missing = [name for name in needed if getattr(kind, name) is getattr(Backend, name)]
    return sorted({*kind.__abstractmethods__, *missing})
