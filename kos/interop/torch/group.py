"""ProcessGroupKos: what torch.distributed calls.

``operations.py`` has the operations.  ``ProcessGroupKos._launch`` runs one (``launch.py``).
On host memory it returns a Work that a wait advances.  On a GPU, without ``async_op``, it runs on the current stream
and returns None.  With ``async_op`` it runs on the group's stream ``side``, after the current stream, and returns a
Work.  An event after it is recorded only if its Work is polled, or still alive when the next operation begins.  A
single operation on tensors that need no conversion is one call of the communicator.

torch lets Python replace a whole ProcessGroup, but not one of its backends: one group serves all devices.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import kos
from kos.comm import timeouts
from kos.comm.arguments import check_timeout
from kos.comm.control.bootstrap import store_rendezvous
from kos.comm.operation import ANY
from kos.errors import CollectiveError, CollectiveTimeout, InvalidArgument, KosError
from kos.interop.torch.launch import Call, Recording, run
from kos.interop.torch.reconfigure import Reconfigurable
from kos.interop.torch.tensors import Tensor, as_array, check_dense, is_plain
from kos.interop.torch.works import NONE, CoalescedWork, DeviceMessage, DeviceWork, HostWork, PooledEvent
from kos.memory.libraries import torch_stream

log = logging.getLogger(__name__)

_C: Any = torch._C
_profiled = _C._autograd._profiler_enabled  # whether torch profiles


@dataclass(frozen=True, slots=True)
class Options:
    """The ``pg_options`` of a group.  Raises InvalidArgument for another backend."""

    gpu: str = "auto"
    """The backend of kos for tensors on a GPU: "auto", "nccl" or "peer"."""

    def __post_init__(self) -> None:
        if self.gpu not in ("auto", "nccl", "peer"):
            raise InvalidArgument(f"gpu: expected auto, nccl or peer, got {self.gpu!r}")


class ProcessGroupKos(Reconfigurable):
    """A process group of torch over communicators of kos: one for host memory, one for the GPU of this rank.

    An operation returns a Work, whose ``wait`` raises too.  Failures raise ``dist.DistBackendError`` with the text of
    kos, wrong arguments ``kos.errors.InvalidArgument``, which is a ValueError and a RuntimeError.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, ranks: Sequence[int], options: Options,
        connects: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(rank, size)
        self._timeout = check_timeout(timeout.total_seconds())
        self._store, self._ranks, self.options = store, list(ranks), options
        self._name = ""
        self.lock = threading.RLock()  # hooks of DDP may call from the thread that completes futures
        self._sequence = 0
        self._gpu: kos.Communicator | None = None
        self.device: Any = None  # of the GPU
        self.side: Any = None  # its stream for operations with async_op
        self.events: list[Any] = []  # of torch, that nobody uses
        self._last: Callable[[], DeviceWork | None] = lambda: None  # the last Work on ``side``, if alive
        self._streams: dict[int, Any] = {}  # torch's streams by their handle
        self._messages: list[DeviceMessage] = []  # on the GPU, to be launched together
        self._scalars: deque[Any] = deque(maxlen=16)  # keeps Works alive of which DDP's join() holds only the C++ part
        self._coalesced: list[Any] | None = None  # the Works of a coalescing context
        self._host: Any = None
        if connects:
            self.connect()

    @classmethod
    def create(cls, given: Any, options: Options | None = None) -> ProcessGroupKos:
        """What ``Backend.register_backend(extended_api=True)`` expects; ``given`` is torch's description of a group."""
        ranks = given.global_ranks_in_group or range(given.group_size)
        if not isinstance(options, Options | None):
            raise InvalidArgument(f"pg_options: expected kos.interop.torch.Options or None, got {options!r}")
        late = getattr(given, "enable_reconfigure", False)  # of torch 2.14: ``reconfigure`` connects
        own = options or Options()
        return cls(given.store, given.group_rank, given.group_size, given.timeout, ranks, own, not late)

    def _connect(self, backend: str, purpose: str, seconds: float | None = None, **keywords: Any) -> kos.Communicator:
        store = torch._C._distributed_c10d.PrefixStore(f"{self.prefix}{purpose}/", self._store)
        try:
            rendezvous = store_rendezvous(store, self.rank(), self.size(), seconds or self._timeout, self._ranks)
            comm = kos.init(backend, rendezvous=rendezvous, timeout=self._timeout, **keywords)
        except KosError as error:
            raise self.translated(error) from error
        comm.timeout = self._timeout
        return comm

    def _forget(self) -> None:
        """Clear the state of connections that were aborted."""
        self._messages, self._coalesced, self._last = [], None, lambda: None
        self._scalars.clear()

    def _connect_gpu(self, device: Any, seconds: float | None = None) -> kos.Communicator:
        """The communicator of this rank's GPU; the first call connects all ranks of the group, within ``seconds``."""
        self._use_gpu(device)
        if self._gpu is None:
            self.check_connected()
            self._gpu = self._connect(self.options.gpu, "gpu", seconds, device=device.index)
        return self._gpu

    def _use_gpu(self, device: Any) -> None:
        """Make ``device`` the GPU of this rank.  InvalidArgument if an earlier call used another one."""
        if self.device is None:
            self.device, self._index, self.side = device, device.index, torch.cuda.Stream(device)
            self._side_ids = self.side.stream_id, self.side.device_index, self.side.device_type
            with torch.cuda.stream(self.side):
                self._side_options = {"stream": torch_stream(device.index)}  # kept: the cache key has its identity
            event: Any = super(torch.cuda.Event, torch.cuda.Event())  # without the methods in Python
            self._record, self._wait = event.record, event.wait
        elif device != self.device:
            raise InvalidArgument(f"tensors: expected memory of {self.device}, as in earlier calls, got {device}")

    def translated(self, error: Exception) -> Exception:
        """The error that torch's users expect."""
        if isinstance(error, InvalidArgument) or not isinstance(error, KosError):
            return error
        what = "caught collective operation timeout" if isinstance(error, CollectiveTimeout) else "failure"
        failure = dist.DistBackendError(f"kos: {what} in process group {self._name or 'default'}: {error}")
        failure.__cause__ = error
        return failure

    def check(self) -> None:
        """Raise the failure of the GPU's communicator, if it has failed."""
        failure = None if self._gpu is None else self._gpu.failure
        if failure is not None:
            raise self.translated(failure)

    def wait_on_host(self, event: Any, seconds: float) -> None:
        """Wait until the GPU has reached the event."""
        if self._gpu is None:  # there were only messages to this rank itself, which are copies
            deadline = time.monotonic() + seconds
            while not event.query():
                if time.monotonic() > deadline:
                    raise self.translated(CollectiveTimeout(f"message to this rank: {timeouts.incomplete(seconds)}"))
                time.sleep(1e-4)
            return
        try:
            self._gpu.synchronize(seconds, until=event.query)
        except KosError as error:
            raise self.translated(error) from error

    # What torch asks of a group, and of its backends, all of which are this object.

    supports_splitting = supports_coalescing = True
    supports_time_estimate = supports_shrinking = False

    def getBackendName(self) -> str:
        return "kos"

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    group_name, _set_group_name = property(getGroupName), setGroupName

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, device: Any) -> ProcessGroupKos:
        return self

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def eager_connect_single_device(self, device: Any) -> None:
        """Connect the GPU now: ``init_process_group(device_id=...)``.  Raises DistBackendError, InvalidArgument."""
        self.bound_device_id = device
        self._use_gpu(device)
        if self._host is not None:
            self._connect_gpu(device)

    def perform_nocolor_split(self, device: Any) -> None:
        """Nothing: ranks outside of a new group take no part in making it."""

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls, which is the same on all ranks; above 0, else raises InvalidArgument."""
        for comm in filter(None, (self._host, self._gpu)):
            comm.timeout = timeout.total_seconds()
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroupKos | None:
        """The group of ``ranks`` of this one; None on other ranks, which need not call it.

        ``timeout`` None is this group's.  Raises DistBackendError if a rank is missing.
        """
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self._name}:split:{','.join(map(str, ranks))}"
        store = torch._C._distributed_c10d.PrefixStore(f"{self.prefix}{name}/", self._store)
        world, limit = [self._ranks[rank] for rank in ranks], timeout or timedelta(seconds=self._timeout)
        me, options = ranks.index(self.rank()), opts or self.options
        group = type(self)(store, me, len(ranks), limit, world, options)
        group.setGroupName(name)
        group._set_group_desc(group_desc or "undefined")
        if self._gpu is not None:
            group.eager_connect_single_device(self.device)
        return group

    def shutdown(self) -> None:
        """Wait for the operations in flight, and free all resources; other ranks may do it later.  Raises nothing."""
        self.send_all()
        self._scalars.clear()
        if self._host is not None:
            for work in self._host.backend.engine.works_of(self._host._parts):
                if work.operation.message.src == ANY:  # nobody need send for it
                    work.cancel(CollectiveError("recv: the process group was closed"))
        for comm in filter(None, (self._gpu, self._host)):
            try:
                comm.close()
            except KosError as error:
                log.warning("%s: closed after a failure: %s", self._name, error)

    def abort(self) -> None:
        """End the operations in flight; the other ranks raise DistBackendError.  Raises nothing."""
        for comm in filter(None, (self._gpu, self._host)):
            comm.abort(reason="it aborted the process group")

    # Launching.

    def _launch(self, call: Call, tensors: Sequence[Tensor], opts: Any, what: str, batch: bool = False) -> Any:
        """Launch ``call`` on ``tensors``; ``opts`` are torch's options.

        With ``batch``, ``call`` is a function that calls several operations of kos.  Returns None for a call on a
        GPU without ``async_op``, as ProcessGroupNCCL does: there is nothing to wait for.
        """
        timeout, overlap = NONE if opts is None else opts.timeout, getattr(opts, "asyncOp", True)
        launch = self._launch_on_gpu if tensors[0].is_cuda else self._launch_on_host
        if _profiled():
            launch = torch.profiler.record_function(f"kos:{what}")(launch)
        try:
            work = launch(call, tensors, overlap, timeout, what, batch)
        except KosError as error:
            raise self.translated(error) from error
        if overlap and tensors[0].numel() == 1 == len(tensors):
            self._scalars.append(work)
        if work is not None and self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _options(self, timeout: timedelta) -> dict[str, Any]:
        """kos's keywords for a timeout of torch, which is below 0 if none was set."""
        if timeout <= NONE or (seconds := timeout.total_seconds()) == self._timeout:
            return {}
        return {"timeout": seconds}

    def _begin(self) -> None:
        self._sequence += 1
        if self._messages:
            self.send_all()

    def _launch_on_gpu(
        self, call: Any, tensors: Sequence[Tensor], overlap: bool, timeout: Any, what: str, batch: bool
    ) -> DeviceWork | None:
        with self.lock:  # ``plain``: no conversion, so that the compiled core can make the cached call
            plain = self._gpu is not None and type(call) is list and len(call) == 1
            for tensor in tensors:
                plain = plain and is_plain(tensor, self._index)
            if not plain:
                check_dense(tensors, what)
                self._connect_gpu(tensors[0].device)
            self._begin()
            caller_stream = self._follow_current() if overlap else None
            options = self._options(timeout)
            if plain:
                name, args = call[0]  # the call site: finding the program's line would take 1 us
                getattr(self._gpu, name)(*args, **({**self._side_options, **options} if overlap else options))
            else:
                self._run_on_gpu(call, overlap, options, batch)
            if not overlap:
                return None
            work = DeviceWork(self, tensors, caller_stream)
            self._last = weakref.ref(work)
            return work

    def _run_on_gpu(self, call: Any, overlap: bool, options: Any, batch: bool) -> None:
        """Run ``call`` on the stream of the group, or on the current one."""
        comm: Any = self._gpu

        def launch() -> None:
            run(call, comm, options, False, batch).copy()

        if overlap:
            self._on_side(launch)
        else:
            launch()

    def _follow_current(self) -> Any:
        """Make the stream of the group wait for the current stream, after an event for the last Work on it.

        Returns the current stream.
        """
        last, current = self._last(), self.current_stream()
        if last is not None:
            last.recorded()
        self._record(current)
        self._wait(self.side)
        return current

    def follow(self, work: DeviceWork) -> Any:
        """Make the current stream wait for an operation on the stream of the group; returns the current stream."""
        with self.lock:
            current = self.current_stream()
            if work.event is None:  # it is the last one there
                self._record(self.side)
                self._wait(current)
            else:
                work.event.wait(current)
            return current

    def complete_aside(self, future: Any, result: Any) -> None:
        """Complete a Future on the stream of the group."""
        self._on_side(lambda: future.set_result(result))

    def _on_side(self, function: Callable[[], None]) -> None:
        """Call ``function`` while the stream of the group is the current one."""
        if _C._cuda_getDevice() != self._index:
            with torch.cuda.stream(self.side):
                return function()
        former = _C._cuda_getCurrentStream(self._index)  # a tenth of the time of torch.cuda.stream
        _C._cuda_setStream(*self._side_ids)
        try:
            function()
        finally:
            _C._cuda_setStream(*former)

    def current_stream(self) -> Any:
        """torch's current stream; those of its pool are cached, for to make their objects takes a microsecond."""
        handle = _C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = torch.cuda.current_stream(self.device)
            if not handle or stream.stream_id != handle:  # else an ExternalStream: its owner may destroy it
                self._streams[handle] = stream
        return stream

    def _launch_on_host(
        self, call: Any, tensors: Sequence[Tensor], overlap: bool, timeout: Any, what: str, batch: bool
    ) -> HostWork:
        check_dense(tensors, what)
        self.check_connected()
        waits = not overlap and self._coalesced is None
        with self._host.backend.engine.paused() if waits else nullcontext():  # this thread polls
            with self.lock:
                self._begin()
                launch = run(call, self._host, self._options(timeout), True, batch)
            work = HostWork(self, launch.works, launch, tensors)
            if waits:
                work.wait()
        return work

    # Messages and coalescing.

    def _post(self, tensors: list[Tensor], name: str, peer: int) -> DeviceMessage:
        """Keep a message of the GPU until a wait or another operation: those that are kept are launched together.

        So the messages of ``batch_isend_irecv``, and of ranks that all send first, do not wait for each other.
        """
        with self.lock:
            # A message to this rank needs no connection, and other ranks may not take part in one.
            use = self._use_gpu if peer == self.rank() else self._connect_gpu
            use(tensors[0].device)
            self._messages.append(message := DeviceMessage(self, tensors, self._follow_current(), name, peer))
        if self._coalesced is not None:
            self._coalesced.append(message)
        return message

    def send_all(self) -> None:
        """Launch the messages of the GPU that were kept."""
        with self.lock:
            messages, self._messages = self._messages, []
            if not messages:
                return

            def call(launch: Recording) -> None:
                for message in others:
                    tensor = message.tensors[0]
                    x = as_array(tensor) if message.name == "send" else launch.output(tensor)
                    launch(message.name, x, message.peer)

            others = [message for message in messages if message.peer != self.rank()]
            self._copy_own([message for message in messages if message.peer == self.rank()])
            try:
                if others:
                    self._run_on_gpu(call, True, {}, True)
            except KosError as error:
                raise self.translated(error) from error
            event = PooledEvent(self.events, self.side)
            for message in messages:
                message.event = event

    def _copy_own(self, messages: Sequence[DeviceMessage]) -> None:
        """Copy what this rank sends to itself, the k-th message into the k-th receive, as NCCL's groups allow."""
        sends, recvs = ([m.tensors[0] for m in messages if m.name == name] for name in ("send", "recv"))
        if len(sends) != len(recvs):
            counts = f"{len(sends)} sends and {len(recvs)} receives"
            raise InvalidArgument(f"messages to this rank: expected as many sends as receives in a batch, got {counts}")
        with torch.cuda.stream(self.side):
            for sent, received in zip(sends, recvs, strict=True):
                expected, got = (sent.numel(), sent.dtype), (received.numel(), received.dtype)
                if got != expected:
                    raise InvalidArgument(f"message to this rank: expected {expected} to be received, got {got}")
                received.detach().copy_(sent.detach().view_as(received))

    def _start_coalescing(self, device_type: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device_type: Any) -> CoalescedWork:
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # the names of newer torch
