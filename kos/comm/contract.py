"""The contract of a backend, the class through which kos runs its operations over a communication library.

A backend subclasses ``Backend``, sets ``name``, and defines ``probe`` and the methods for each memory that it moves:

=========================  ===================================  =======================================================
memory                     the class must define                what kos builds on them
=========================  ===================================  =======================================================
host (``on_host = True``)  ``isend``, ``irecv``, ``cancel``     every operation, by schedules of messages
                                                                (``host/host_backend.py``)
GPU (``on_gpu = True``)    ``exchange``                         every operation, by exchanges and by kernels of kos
                                                                (``gpu/backend.py``)
=========================  ===================================  =======================================================

All other methods are optional.  Their defaults do nothing, leave the work to kos, or raise an error that names the
method and the backend.  kos makes one instance per group and kind of memory, so each instance moves one kind.

``mpi``, ``tcp`` and ``mock`` are such classes for host memory, and ``nccl`` and ``peer`` for GPUs.  A communicator on
GPUs has one ``GPUBackend``.  It queues the calls, orders the streams, watches the other ranks, and aborts calls in
flight after a failure.  Its routes are backends of this contract: it chooses one of them for each signature.

Which thread calls which method:

- The thread of the program that makes, splits or closes a communicator calls ``probe``, ``__init__``, ``open``,
  ``successor`` and ``close``.  The thread that calls ``Communicator.register`` or ``views`` calls these methods.
- In host memory, any thread of the program that polls, and the thread ``kos-progress``, call the other methods, and
  ``done()`` of a request.  The caller holds ``Engine.lock``, so two calls never overlap.
- On GPUs, the thread of the program that starts an operation calls the methods that prepare or queue it.  This thread
  may be capturing a CUDA graph.
- Any thread calls ``report_failure``, ``report_end`` and ``abort``, even while another thread is in a method.
- The thread ``kos-watchdog``, and any thread that waits for a call, call ``find_failure``, ``inspect``,
  ``kernel_waits`` and ``end_waits``: on GPUs without a lock, and perhaps at the same time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

import numpy as np

from kos.comm.control.base import ControlPlane
from kos.comm.matching import Envelope
from kos.comm.operation import AUTO, COLLECTIVE_TAGS, Operation
from kos.comm.tuning import Table
from kos.comm.waits import Backoff
from kos.comm.work import Engine, Steps, Work
from kos.cuda import Kernel, driver, load_kernel
from kos.cuda.kernels import Plan, resolved
from kos.errors import BackendUnavailable, InvalidArgument, KosError
from kos.memory import Array as GPUArray
from kos.memory import Buffer
from kos.memory.windows import Run

CHANGES = "it changes the membership"
UNMADE = "its communicator could not be made"
"""Reasons that ``abort`` and ``report_end`` get: why a survivor has closed the old communicator; why a new one ends."""

Array = np.ndarray[Any, Any]
Message = tuple[int, int, int]
"""A message in GPU memory: the other rank, the address, and the number of bytes, which is not 0."""
Piece = tuple[Any, int]
"""The address and the bytes of a part of GPU memory.  The address may be an ``Address``, relative to an array of a
launch."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend can serve a group.  ``reason`` says why it cannot, or what it uses."""

    usable: bool
    reason: str
    claim: str = ""
    """A resource that only one rank of the group may use, such as a GPU."""


class Request(Protocol):
    """A send or receive in flight.  If ``Backend.cancel`` passes it on, it also has the ``tag`` of its message."""

    def done(self) -> bool:
        """Whether a send no longer needs its array, or the array of a receive holds the message.  Never blocks.

        It also advances all other messages of this rank, because kos may poll one request until that one is done.  A
        send is done only if its message will arrive without further calls of this rank, because the program may then
        compute for a long time.  So a send whose bytes still wait in a buffer of the backend is not done.

        Raises the failure of the group, and CollectiveMismatch if the message has another length or dtype.
        """


class Backend(ABC):
    """Moves the data of one group with one library.  Arrays are contiguous and 1-D; tags are integers."""

    name: str
    """The name of the backend in errors and in ``Communicator.backend_name``."""
    on_host: ClassVar[bool] = True
    """Whether it moves host memory."""
    on_gpu: ClassVar[bool] = False
    """Whether it moves GPU memory."""
    processes: ClassVar[bool] = False
    """Whether ranks are processes.  If so, kos moves data within a host through shared memory where it can."""
    exact_group_size: int = 1
    """On a GPU, how many ranks with consecutive numbers add exactly before this backend compresses."""

    @classmethod
    @abstractmethod
    def probe(cls, rendezvous: ControlPlane) -> Probe:
        """Whether the backend can serve this group, as far as this rank can see.  Never raises."""

    def __init__(self, rendezvous: ControlPlane, engine: Engine, device: int | None = None) -> None:
        """Connects the ranks of ``rendezvous``.  Collective.  Raises BackendUnavailable on all ranks, or on none.

        ``device`` is the index, in this process, of the GPU whose memory the backend moves, or None for host memory.
        """
        self.rank, self.size, self.failures, self.engine = rendezvous.rank, rendezvous.size, rendezvous.failures, engine
        self.ranks_per_host, self.device = rendezvous.ranks_per_host, device
        self.backend: Any = None
        """The GPUBackend that has this backend as a route.  kos assigns it before ``open``.  None for host memory."""

    # Required for host memory.

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        """Begin to send an array.  kos does not change it until the request is done.

        Messages between two ranks with one tag arrive in the order in which they were sent.
        """
        self._lacks("isend")

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        """Begin to receive into an array."""
        self._lacks("irecv")

    def cancel(self, cancelled: Callable[[Any], bool]) -> None:
        """Cancel the requests for which ``cancelled(request)`` is true; their arrays are no longer used afterwards."""
        self._lacks("cancel")

    # Required for GPU memory.

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], stream: int) -> None:
        """Queue these messages on a CUDA stream, given by its handle.  No message may wait for another one to complete.

        Two ranks match the messages between them by their order.  A rank may send to itself.  A backend that waits for
        other ranks on the host, instead of on the stream, calls ``wait_until`` for that.
        """
        self._lacks("exchange")

    # Optional for host memory: messages from any rank, or of any length.

    check_seconds: ClassVar[float] = 0.0
    """The least number of seconds between two calls of ``end_of`` for a rank; set it if these calls are slow."""
    last_checks: ClassVar[int] = 0
    """How many calls of ``end_of`` may report the end of a rank before the last messages of that rank have arrived."""

    finds_any_tag: ClassVar[bool] = False
    """Whether ``arrived`` finds messages of any tag; else receives of any tag raise BackendUnavailable."""

    def arrived(self, ranks: Sequence[int], tag: int) -> Envelope | None:
        """The envelope of a message with that tag from one of ``ranks``, or None.  Never blocks.

        The message has arrived, and the next ``irecv`` from its rank with that tag gets it.  Without this method,
        ``recv`` from any rank, ``recv_bytes`` and ``probe`` raise BackendUnavailable.  If ``finds_any_tag``, ``tag``
        may be ANY: the first message of a rank counts whose tag is below COLLECTIVE_TAGS.
        """
        self._lacks("arrived")

    def end_of(self, rank: int) -> KosError | None:
        """The error to raise in a receive from a rank that sends no more messages; None if it may send more.

        ``orderly`` of the error is True if the rank closed its communicator.
        """
        return None

    def open(self, backend: Any) -> None:  # noqa: B027
        """kos calls this once ``backend``, which runs the operations, has opened the shared memory of the host.

        It is a HostBackend (``host/host_backend.py``) or a GPUBackend (``gpu/backend.py``).  Collective.
        """

    # Optional for host memory: how it runs.

    def waiter(self) -> Any:
        """An object that decides how a wait sleeps between two polls.

        Before a poll, kos calls its method ``mark()``, which returns a token.  After the poll, ``pause(mark, seconds)``
        waits until an event has occurred since that token, for at most ``seconds`` (None: without a limit).

        Another thread of this rank may end the operation, by a timeout or an abort.  kos then calls ``engine.wake()``
        in that thread, which holds the lock of the engine.  A backend whose ``pause`` may sleep for long replaces the
        attribute ``wake`` of its engine by a function that ends this sleep.
        """
        return Backoff()

    def check_threads(self) -> None:  # noqa: B027
        """Raise BackendUnavailable if only the program's thread may advance operations."""

    def tag(self, sequence: int) -> int:
        """The tag of the messages of a collective."""
        return COLLECTIVE_TAGS + sequence % COLLECTIVE_TAGS

    def choose(self, o: Operation, collective: str, nbytes: int) -> str | None:
        """The schedule of a call whose algorithm is "auto", or None to let kos choose."""
        return None

    def native(self, work: Work[Any], spaces: Mapping[str, Array], collective: str) -> Steps | None:
        """The steps of the library's own call for a collective, or None to run a schedule of messages.

        ``spaces`` has its arrays, "data" or "input" and "output", whose 16-bit floats are converted to float32.
        """
        return None

    def is_native(self, collective: str, nbytes: int) -> bool:
        """Whether ``native`` runs a call on float32.  ``Communicator.explain`` shows it."""
        return False

    def launch(self, work: Work[Any], run: Callable[[Work[Any]], Steps]) -> Steps | None:
        """Begin ``work``.  Returns its steps, which ``run(work)`` makes, or None if the work is already complete."""
        return run(work)

    def synchronize(self, backend: Any) -> None:  # noqa: B027
        """kos calls this when the program calls ``synchronize`` on ``backend``, the HostBackend."""

    # Optional for host memory: which ranks are late, and whether calls match.

    def agree(self, work: Work[Any], local: Callable[[], bool] | None) -> Callable[[], bool] | None:
        """Compare this collective with the collectives of the same sequence number on the other ranks.

        Returns a function that polls whether all ranks have begun it, and raises CollectiveMismatch if their calls
        differ.  ``local`` is such a function for the ranks of this host, if they share memory.  Returns None if calls
        cannot be compared.
        """
        return local

    def complete(self, work: Work[Any]) -> None:  # noqa: B027
        """kos calls this when a collective that ``agree`` compared is complete on this rank."""

    def absent(self, work: Work[Any]) -> list[int]:
        """The ranks that have not begun a collective, as far as this rank knows.  A timeout names them."""
        return []

    def awaited(self, tag: int) -> list[int]:
        """The peers of the messages in flight with that tag.  A timeout names them."""
        return []

    def in_flight(self, rank: int, tag: int, receives: bool) -> bool:
        """Whether a receive from that rank (``receives``), or a send to it, with that tag is in flight.

        The default assumes that sends are complete, and receives are not.
        """
        return receives

    # Optional for GPU memory: how it runs.

    def native_on_gpu(self, o: Operation) -> Callable[[int, int, int], None] | None:
        """The function that queues operations like ``o`` by the library's own call, or None to use ``exchange``.

        kos calls the function with a stream and two addresses: those of the input and of the output.  All ranks must
        decide alike, so decide by what is equal on all ranks.  A reduction must give the same bits on all ranks.
        """
        return None

    def collect(self, send: int, recv: int, nbytes: int, stream: int) -> None:
        """Queue an all-gather: ``nbytes`` at the address ``send`` of each rank go to ``recv``, in rank order."""
        sends = [(rank, send, nbytes) for rank in range(self.size)]
        self.exchange(sends, [(rank, recv + rank * nbytes, nbytes) for rank in range(self.size)], stream)

    def allocate(self, shape: Any, dtype: Any) -> GPUArray:
        """See ``Communicator.allocate``."""
        assert self.device is not None
        return GPUArray.empty(shape, dtype, self.device)

    def register(self, buffer: Buffer) -> GPUArray:
        """See ``Communicator.register``."""
        self._lacks("register")

    def views(self, x: Buffer) -> list[Any]:
        """See ``Communicator.views``.  ``x`` is in GPU memory."""
        self._lacks("views")

    def wait_until(self, over: Callable[[], bool]) -> None:
        """Wait on the host until ``over()`` is true.  Raises CollectiveTimeout, and failures of other ranks.

        Do not define this method.  kos assigns it, and ``exchange`` and ``collect`` may call it.
        """
        raise NotImplementedError

    # Optional for GPU memory: kernels, and the choice between routes.  ``nccl`` and ``peer`` define these.

    table: Table | None = None
    """The measured table by which ``auto`` chooses a route, if this backend knows one."""
    watched: ClassVar[bool] = True
    """Whether kos watches the deadlines of its calls.  False if its kernels have deadlines of their own."""
    sets_device: ClassVar[bool] = False
    """Whether its launches make the GPU current themselves.  If not, kos makes it current before each launch."""
    serial: bool = False
    """Whether the kernels of each call must run after those of the previous call, even on another stream."""
    failed: Sequence[int] = (0,)
    """Memory whose first word becomes non-zero when a kernel ends early."""
    failed_word: int = 0
    """The address of the first word of ``failed``; 0 if there is none."""
    by_capture: ClassVar[tuple[str, ...]] = ()
    """The operations that run differently while a CUDA graph is captured."""

    @property
    def abort_flags(self) -> list[int]:
        """The addresses of its flags for ``Communicator.abort_flags``."""
        return []

    def carries(self, o: Operation) -> bool:
        """Whether a tuning table may choose this backend for ``o``.  The answer must be the same on all ranks."""
        return True

    def is_symmetric(self, o: Operation) -> bool:
        """Whether all buffers of the operation are in symmetric memory, which every rank can access directly."""
        return False

    def overlapped(self, o: Operation) -> bool:
        """Whether the backend runs this overlapped operation without using multiprocessors."""
        return False

    def route_of(self, name: str, nbytes: int, symmetric: bool, graph: bool) -> str:
        """The route that ``Communicator.explain`` shows for calls with inputs of ``nbytes``."""
        return self.name

    def details(self) -> list[tuple[str, str, str]]:
        """More rows for ``Communicator.explain``: a resource, whether it is used, and why."""
        return []

    def set_timeout(self, seconds: float) -> None:  # noqa: B027
        """kos calls this when the timeout of the communicator changes."""

    def resolve(self, o: Operation) -> Plan | None:
        """How calls like ``o`` run here; its buffers have no memory.  None: kos builds them on ``exchange``."""
        if o.options.algorithm != AUTO:
            raise InvalidArgument(f"algorithm: expected 'auto' on {self.name}, got {o.options.algorithm!r}")
        ordered = o.options.deterministic and o.reduction is not None
        launch = None if o.options.compress or ordered else self.native_on_gpu(o)
        return None if launch is None else Plan((launch,))

    def bind_exchange(self, sends: Sequence[Piece], recvs: Sequence[Piece]) -> Run:
        """A step that sends piece j to rank j, also to itself, and receives piece j from it.  It skips empty pieces."""

        def run(stream: int, *arrays: int) -> None:
            self.exchange(messages_of(sends, arrays), messages_of(recvs, arrays), stream)

        return run

    def bind_collect(self, send: Any, recv: Any, nbytes: int) -> Run:
        """A step of an all-gather of ``nbytes`` from each rank."""

        def run(stream: int, *arrays: int) -> None:
            self.collect(resolved(send, arrays), resolved(recv, arrays), nbytes, stream)

        return run

    def connect(self) -> None:  # noqa: B027
        """Return once the backend is connected to the other ranks.

        kos calls this before it prepares a call on a GPU, perhaps from several threads.
        """

    def load(self, path: Path, name: str, **macros: Any) -> Kernel:
        """A kernel of kos for this GPU."""
        assert self.device is not None
        return load_kernel(path, name, self.device, **macros)

    def start(self, plan: Plan, stream: int, send: int = 0, recv: int = 0) -> None:
        """Queue a plan of this route.  A copy, and a kernel on a default stream, need a current device."""
        if self.sets_device and not plan.kernels:
            return plan(stream, send, recv)
        assert self.device is not None
        with driver.on_device(self.device):
            plan(stream, send, recv)

    def room(self, plan: Plan) -> tuple[int, int, int] | None:
        """When the compiled core may repeat a plan of this route: the address of two words, and two bounds.

        The first word must be at least the first bound, and the second word at most the second bound; the address is 0
        if there are no such words.  None if it may never.
        """
        return 0, 0, 0

    def queue(self, works: Sequence[Work[Any]], stream: int | None) -> None:
        """Queue Works of this route together on ``stream``, or each on its own stream."""
        self.backend.queue_each(works, stream)

    def entered(self, stream: int) -> None:  # noqa: B027
        """kos calls this after it has ordered ``stream`` behind earlier launches, before the next launch on it."""

    def inspect(self, work: Work[Any]) -> None:
        """Raise an error of ``work`` if the library or a kernel has reported a failure.  Never waits."""
        if (failure := self.find_failure()) is not None:
            raise failure

    def kernel_waits(self) -> list[int]:
        """The ranks for which a kernel has waited since the last call of this method, as far as known."""
        return []

    def end_waits(self) -> str:
        """End the waits of kernels.  Returns what the last kernel waited for, which a timeout names; "" if unknown."""
        return ""

    def drained(self, final: bool) -> None:  # noqa: B027
        """kos calls this after ``abort``, when the GPU is idle or cannot become idle.

        ``final``: the communicator is aborted.  Otherwise it has failed, and ``close`` or another ``abort`` follows.
        """

    # Optional: failures and teardown.

    def explain(self, work: Work[Any], error: Exception) -> Exception:
        """The error to raise for ``error``, which this backend raised during ``work``."""
        return error

    def find_failure(self) -> KosError | None:
        """The failure of this group, if the library knows one.  Never waits."""
        return None

    def report_failure(self, failure: KosError, sequence: int) -> None:  # noqa: B027
        """Make the other ranks raise ``failure`` in collective ``sequence`` and in all later ones."""

    def report_end(self, sequence: int, reason: str, cause: KosError | None) -> None:  # noqa: B027
        """Report to the other ranks that this rank begins neither collective ``sequence`` nor a later operation.

        ``reason`` says why, and ``cause`` is the failure that led to it, if any.
        """

    def successor(self, rendezvous: ControlPlane) -> Callable[..., Backend]:
        """The function that makes the backend of a new group; it takes the arguments of ``__init__``.

        kos calls this on the members of the new group, which is a split of this one, or the survivors of a failure.
        """
        return type(self)

    def split(self, rendezvous: ControlPlane | None, color: int | None, key: int) -> Callable[..., Backend] | None:
        """As ``successor``, but kos calls it on every rank of this group.

        ``rendezvous`` is None on ranks that are not members of a new group.

        Define it instead of ``successor`` if the library splits groups itself.  kos does not call it for host memory.
        """
        return None if rendezvous is None else self.successor(rendezvous)

    def abort(self, reason: str) -> str:
        """End all messages without waiting for other ranks.  Returns the reason to pass to ``report_end``.

        On GPUs, it begins to abort the queued work, and does not wait for the GPU.
        """
        return reason

    def close(self, begun: int) -> None:  # noqa: B027
        """Free the resources.  Collective, unless the group has failed.

        ``begun`` is the number of collectives that this rank has begun.
        """

    def _lacks(self, method: str) -> NoReturn:
        raise BackendUnavailable(f"{method}: expected a backend that defines it, got {self.name}, which does not")


def messages_of(pieces: Sequence[Piece], arrays: Sequence[Any]) -> list[Message]:
    """The messages for the pieces of each rank, with addresses on the arrays of a launch."""
    return [(rank, resolved(place, arrays), nbytes) for rank, (place, nbytes) in enumerate(pieces) if nbytes]


REQUIRED = {"on_host": ("isend", "irecv", "cancel"), "on_gpu": ("exchange",)}
"""The methods that a class must define for each kind of memory."""


def lacking(kind: type[Backend]) -> list[str]:
    """The names of the methods that a class must define but does not."""
    needed = [name for memory, names in REQUIRED.items() if getattr(kind, memory) for name in names]
    missing = [name for name in needed if getattr(kind, name) is getattr(Backend, name)]
    return sorted({*kind.__abstractmethods__, *missing})
