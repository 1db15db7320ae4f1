"""ProcessGroupKos: what torch.distributed calls.

Each operation is a function of a ``Launch``, which gives it the communicator's methods and the tensors as arrays.
``ProcessGroupKos._launch`` runs it, or starts a cached call (``launch.py``).  On host memory it returns a Work that a
wait advances.  On a GPU it runs on the current stream, or on the group's stream ``side`` after the current stream.  An
event after it is recorded only if its Work is polled, or still alive when the next operation begins.

torch 2.11 to 2.13 let Python replace a whole ProcessGroup, not one backend of it.  So one group serves all devices.
torch's C++ calls only the operations that DDP and the functional collectives use; Python calls all.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import kos
from kos.comm import timeouts
from kos.comm.arguments import check_timeout
from kos.comm.rendezvous.foreign import StoreRendezvous
from kos.errors import CollectiveTimeout, InvalidArgument, KosError
from kos.interop.torch.anysource import AnySource, AnySourceWork
from kos.interop.torch.launch import Cache, Launch, add, cache_key, run, start
from kos.interop.torch.tensors import Arrays, Tensor, as_array, check_dense, check_parts, op_id, reduce_op, split_counts
from kos.interop.torch.works import NONE, CoalescedWork, DeviceMessage, DeviceWork, HostWork, PooledEvent

log = logging.getLogger(__name__)

_C: Any = torch._C
_profiled = _C._autograd._profiler_enabled  # whether torch profiles
_ASIDE = "side"  # the stream of a call with ``async_op``, for its cache key
_ProcessGroup: Any = dist.ProcessGroup  # whose overloads no method with one signature can override


_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}  # parameter -> field of torch's options


def _overloaded(kind: Any, other: str) -> Callable[[Any], Any]:
    """Let a method also be called as torch's other overload, whose parameters are ``other``.

    The method takes tensors, and then options of the class ``kind``.  The other overload takes the same without the
    outer lists, and then the options one by one: ``allreduce(tensor, op, timeout)``.  Both can be called by name.
    """
    names = other.split()

    def decorate(method: Any) -> Any:
        own = list(inspect.signature(method).parameters)[1:-1]  # without self and the options
        count, renamed = len(own), dict(zip(own, names, strict=False))

        @functools.wraps(method)
        def call(self: Any, *args: Any, **keywords: Any) -> Any:
            options = args[count] if len(args) > count and hasattr(args[count], "timeout") else None
            if options is not None and not keywords:
                return method(self, *args)
            values = [*args[:count], *args[count + 1 :]] if options is not None else args
            given = {**dict(zip(names, values, strict=False)), **{renamed.get(n, n): x for n, x in keywords.items()}}
            options = given.pop("opts", options)
            if len(values) > len(names) or not set(names[:count]) <= given.keys() <= set(names):
                expected = f"({', '.join([*own, 'opts'])}) or ({', '.join(names)})"
                raise TypeError(f"{method.__name__}: expected {expected}, got {len(args)} and {list(keywords)}")
            tensors = [given.pop(name) for name in names[:count]]
            if names[:count] != own and any(map(torch.is_tensor, tensors)):
                tensors = [[x] for x in tensors]
            if options is None:
                options = kind()
                for name, value in given.items():
                    if value is not None:
                        setattr(options, _FIELDS[name], value)
            return method(self, *tensors, options)

        return call

    return decorate


@dataclass(frozen=True, slots=True)
class Options:
    """The ``pg_options`` of a group.  Raises InvalidArgument for another backend."""

    gpu: str = "auto"
    """The backend of kos for tensors on a GPU: "auto", "nccl" or "peer"."""

    def __post_init__(self) -> None:
        if self.gpu not in ("auto", "nccl", "peer"):
            raise InvalidArgument(f"gpu: expected auto, nccl or peer, got {self.gpu!r}")


class ProcessGroupKos(_ProcessGroup):
    """A process group of torch over communicators of kos: one for host memory, one for the GPU of this rank.

    An operation returns a Work, whose ``wait`` raises too.  Failures raise ``dist.DistBackendError`` with the text of
    kos, wrong arguments ``kos.errors.InvalidArgument``, which is a ValueError and a RuntimeError.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, ranks: Sequence[int], options: Options
    ) -> None:
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
        self._cache: Cache = {}
        self._messages: list[DeviceMessage] = []  # on the GPU, to be launched together
        self._scalars: deque[Any] = deque(maxlen=16)  # keeps Works alive of which DDP's join() holds only the C++ part
        self._coalesced: list[Any] | None = None  # the Works of a coalescing context
        self._host = self._connect("tcp", "host", progress_thread=True)
        self._any = AnySource(self._host)

    @classmethod
    def create(cls, given: Any, options: Options | None = None) -> ProcessGroupKos:
        """What ``Backend.register_backend(extended_api=True)`` expects; ``given`` is torch's description of a group."""
        ranks = given.global_ranks_in_group or range(given.group_size)
        if not isinstance(options, Options | None):
            raise InvalidArgument(f"pg_options: expected kos.interop.torch.Options or None, got {options!r}")
        return cls(given.store, given.group_rank, given.group_size, given.timeout, ranks, options or Options())

    def _connect(self, backend: str, purpose: str, **keywords: Any) -> kos.Communicator:
        store = torch._C._distributed_c10d.PrefixStore(f"{purpose}/", self._store)
        try:
            rendezvous = StoreRendezvous(store, self.rank(), self.size(), self._timeout, self._ranks)
            return kos.init(backend, rendezvous=rendezvous, timeout=self._timeout, **keywords)
        except KosError as error:
            raise self.translated(error) from error

    def _connect_gpu(self, device: Any) -> kos.Communicator:
        """The communicator of this rank's GPU; the first call connects all ranks of the group."""
        self._use_gpu(device)
        if self._gpu is None:
            self._gpu = self._connect(self.options.gpu, "gpu", device=device.index)
        return self._gpu

    def _use_gpu(self, device: Any) -> None:
        """Make ``device`` the GPU of this rank.  InvalidArgument if an earlier call used another one."""
        if self.device is None:
            self.device, self._index, self.side = device, device.index, torch.cuda.Stream(device)
            self._side_ids = self.side.stream_id, self.side.device_index, self.side.device_type
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
        failure = None if self._gpu is None else self._gpu.backend.broken
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
        self._cache.clear()

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
        store = torch._C._distributed_c10d.PrefixStore(f"{name}/", self._store)
        world, limit = [self._ranks[rank] for rank in ranks], timeout or timedelta(seconds=self._timeout)
        me, options = ranks.index(self.rank()), opts or self.options
        group = ProcessGroupKos(store, me, len(ranks), limit, world, options)
        group.setGroupName(name)
        group._set_group_desc(group_desc or "undefined")
        if self._gpu is not None:
            group.eager_connect_single_device(self.device)
        return group

    def shutdown(self) -> None:
        """Wait for the operations in flight, and free all resources; other ranks may do it later.  Raises nothing."""
        self.send_all()
        self._cache.clear()
        self._scalars.clear()
        self._any.close()
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

    def _launch(
        self, call: Callable[[Launch], None], tensors: Sequence[Tensor], opts: Any, what: str,
        arguments: tuple[Any, ...] | None = None, batch: bool = False,
    ) -> Any:  # fmt: skip
        """Launch ``call`` on ``tensors``, or start the cached call; ``opts`` are torch's options.

        ``arguments`` are the other arguments of the call; with None it is not cached.  A ``batch`` has several
        operations of kos.
        """
        timeout, overlap = None if opts is None else opts.timeout, getattr(opts, "asyncOp", True)
        launch = self._launch_on_gpu if tensors[0].is_cuda else self._launch_on_host
        if _profiled():
            launch = torch.profiler.record_function(f"kos:{what}")(launch)
        try:
            work = launch(call, tensors, overlap, timeout, what, arguments, batch)
        except KosError as error:
            raise self.translated(error) from error
        if overlap and tensors[0].numel() == 1 == len(tensors):
            self._scalars.append(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _options(self, timeout: timedelta | None) -> dict[str, Any]:
        """kos's keywords for a timeout of torch, which is below 0 if none was set."""
        seconds = 0.0 if timeout is None else timeout.total_seconds()
        return {"timeout": seconds} if seconds > 0 and seconds != self._timeout else {}

    def _begin(self) -> None:
        self._sequence += 1
        if self._messages:
            self.send_all()

    def _launch_on_gpu(
        self, call: Any, tensors: Sequence[Tensor], overlap: bool, timeout: Any, what: str, arguments: Any, batch: bool
    ) -> DeviceWork:
        with self.lock:
            key = prepared = None
            if arguments is not None:
                stream = _ASIDE if overlap else _C._cuda_getCurrentRawStream(tensors[0].get_device())
                key = cache_key((what, timeout, stream, *arguments), tensors)
                prepared = self._cache.get(key)
            if not prepared:
                check_dense(tensors, what)
                self._connect_gpu(tensors[0].device)
            self._begin()
            if overlap:
                self._follow_current()
            if prepared:
                start(self._gpu, prepared)
            else:
                self._run_on_gpu(call, overlap, self._options(timeout), batch, key)
            work = DeviceWork(self, tensors, overlap)
            if overlap:
                for tensor in tensors:
                    tensor.record_stream(self.side)
                self._last = weakref.ref(work)
            return work

    def _run_on_gpu(self, call: Any, overlap: bool, options: Any, batch: bool, key: Any = None) -> None:
        """Run ``call`` on the stream of the group, or on the current one."""
        comm: Any = self._gpu
        with torch.cuda.stream(self.side if overlap else None):
            launch = run(call, comm, options, False, batch)
            launch.copy()
            add(self._cache, key, launch)

    def _follow_current(self) -> None:
        """Make the stream of the group wait for the current stream, after an event for the last Work on it."""
        last = self._last()
        if last is not None:
            last.recorded()
        self._record(self.current_stream())
        self._wait(self.side)

    def follow(self, work: DeviceWork) -> None:
        """Make the current stream wait for an operation on the stream of the group."""
        with self.lock:
            if work.event is None:  # it is the last one there
                self._record(self.side)
                self._wait(self.current_stream())
            else:
                work.event.wait(self.current_stream())

    def complete_aside(self, future: Any, result: Any) -> None:
        """Complete a Future on the stream of the group."""
        if _C._cuda_getDevice() != self._index:
            with torch.cuda.stream(self.side):
                return future.set_result(result)
        former = _C._cuda_getCurrentStream(self._index)
        _C._cuda_setStream(*self._side_ids)
        try:
            future.set_result(result)
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
        self, call: Any, tensors: Sequence[Tensor], overlap: bool, timeout: Any, what: str, arguments: Any, batch: bool
    ) -> HostWork:
        cached = not (overlap or batch or arguments is None)
        key = cache_key((what, timeout, *arguments), tensors) if cached else None
        with self.lock:
            prepared = self._cache.get(key)
            if not prepared:
                check_dense(tensors, what)
                self._begin()
                launch = run(call, self._host, self._options(timeout), True, batch)
                add(self._cache, key, launch)
                return HostWork(self, launch.works, launch, tensors)
            self._cache[key] = []  # until it may be started again
        with self._host.backend.engine.paused():  # this thread polls
            with self.lock:
                self._begin()
                work = prepared[0].start()
            work.wait()  # the cached call does not keep its memory alive, so it ends before this returns
        if key in self._cache:
            self._cache[key] = prepared
        return HostWork(self, (), Arrays(), tensors)

    # Collectives.

    @_overloaded(_C._distributed_c10d.AllreduceOptions, "tensor op timeout")
    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce each tensor over all ranks, in place.  Raises DistBackendError, InvalidArgument."""
        op = opts.reduceOp

        def call(launch: Launch) -> None:
            for tensor in tensors:
                launch("all_reduce", launch.in_place(tensor), reduce_op(op, tensor))

        return self._launch(call, tensors, opts, "allreduce", op_id(op), len(tensors) > 1)

    allreduce_coalesced = allreduce

    @_overloaded(_C._distributed_c10d.BroadcastOptions, "tensor root timeout")
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Copy each tensor of rank ``rootRank`` to all ranks, in place.  Raises DistBackendError, InvalidArgument."""
        root = opts.rootRank

        def call(launch: Launch) -> None:
            for tensor in tensors:
                launch("broadcast", launch.in_place(tensor), root)

        return self._launch(call, tensors, opts, "broadcast", (root,), len(tensors) > 1)

    @_overloaded(_C._distributed_c10d.ReduceOptions, "tensor root op timeout")
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce the tensor to rank ``rootRank``, in place.  Raises DistBackendError, InvalidArgument."""
        root, op = opts.rootRank, opts.reduceOp

        def call(launch: Launch) -> None:
            launch("reduce", launch.in_place(tensors[0]), root, reduce_op(op, tensors[0]))

        return self._launch(call, tensors, opts, "reduce", (root, *op_id(op)))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """``output`` receives all inputs in rank order.  Raises DistBackendError, InvalidArgument."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """``all_gather_single`` of several pairs, in one batch.  Raises DistBackendError, InvalidArgument."""
        def call(launch: Launch) -> None:
            for output, input in zip(outputs, inputs, strict=True):
                launch("all_gather", as_array(input), launch.output(output))

        count = len(inputs)
        return self._launch(call, [*outputs, *inputs], opts, "all_gather_single", (count,), count > 1)

    @_overloaded(_C._distributed_c10d.AllgatherOptions, "output_tensors input_tensor timeout")
    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> Any:
        """Gather input i of rank r to ``output_tensors[i][r]``, any size.  Raises DistBackendError, InvalidArgument."""
        for parts in output_tensors:
            check_parts(parts, self.size(), "allgather")

        def call(launch: Launch) -> None:
            for input, parts in zip(input_tensors, output_tensors, strict=True):
                sizes, joined = [part.numel() for part in parts], launch.joined_output(parts)
                if len(set(sizes)) == 1:
                    launch("all_gather", as_array(input), joined)
                else:
                    launch("all_gather_v", as_array(input), sizes, joined)

        tensors = [*(part for parts in output_tensors for part in parts), *input_tensors]
        return self._launch(call, tensors, opts, "allgather", (), len(input_tensors) > 1)

    def allgather_coalesced(self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None) -> Any:
        """``output_lists[r][i]`` receives input i of rank r.  Raises DistBackendError, InvalidArgument."""
        outputs = [list(parts) for parts in zip(*output_lists, strict=True)]
        return self.allgather(outputs, input_list, opts=opts)

    @_overloaded(_C._distributed_c10d.GatherOptions, "output_tensors input_tensor root timeout")
    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> Any:
        """``output_tensors[0][r]`` of ``rootRank`` receives input r.  Raises DistBackendError, InvalidArgument."""
        parts = output_tensors[0] if self.rank() == opts.rootRank else []
        if parts:
            check_parts(parts, self.size(), "gather")

        def call(launch: Launch) -> None:
            launch("gather", as_array(input_tensors[0]), opts.rootRank, launch.joined_output(parts) if parts else None)

        return self._launch(call, [*parts, *input_tensors], opts, "gather", (opts.rootRank,))

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        """``output`` of ``rootRank`` receives all inputs in rank order.  Raises DistBackendError, InvalidArgument."""
        outputs = [output] if self.rank() == opts.rootRank else []

        def call(launch: Launch) -> None:
            launch("gather", as_array(input), opts.rootRank, launch.output(output) if outputs else None)

        return self._launch(call, [*outputs, input], opts, "gather_single", (opts.rootRank,))

    gather_into_tensor = gather_single

    @_overloaded(_C._distributed_c10d.ScatterOptions, "output_tensor input_tensors root timeout")
    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> Any:
        """Rank r receives ``input_tensors[0][r]`` of rank ``rootRank``.  Raises DistBackendError, InvalidArgument."""
        parts = input_tensors[0] if self.rank() == opts.rootRank else []
        if parts:
            check_parts(parts, self.size(), "scatter")

        def call(launch: Launch) -> None:
            launch("scatter", launch.joined(parts) if parts else None, launch.output(output_tensors[0]), opts.rootRank)

        return self._launch(call, [*output_tensors, *parts], opts, "scatter", (opts.rootRank,))

    @_overloaded(_C._distributed_c10d.ReduceScatterOptions, "output input op timeout")
    def reduce_scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> Any:
        """Reduce ``input_tensors[0][r]`` to rank r; sizes may differ.  Raises DistBackendError, InvalidArgument."""
        output, parts, op = output_tensors[0], input_tensors[0], opts.reduceOp
        check_parts(parts, self.size(), "reduce_scatter")

        def call(launch: Launch) -> None:
            sizes = [part.numel() for part in parts]
            if len(set(sizes)) == 1:
                launch("reduce_scatter", launch.joined(parts), launch.output(output), reduce_op(op, output))
            else:
                launch("reduce_scatter_v", launch.joined(parts), sizes, launch.output(output), reduce_op(op, output))

        return self._launch(call, [output, *parts], opts, "reduce_scatter", op_id(op))

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Any:
        """Rank r receives shard r of the reduction along dimension 0.  Raises DistBackendError, InvalidArgument."""
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """``reduce_scatter_single`` of several pairs, in one batch.  Raises DistBackendError, InvalidArgument."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        count = len(inputs)

        def call(launch: Launch) -> None:
            for output, input in zip(outputs, inputs, strict=True):
                launch("reduce_scatter", as_array(input), launch.output(output), reduce_op(op, output))

        tensors, arguments = [*outputs, *inputs], (count, *op_id(op))
        return self._launch(call, tensors, opts, "reduce_scatter_single", arguments, count > 1)

    @_overloaded(_C._distributed_c10d.AllToAllOptions, "output input output_split_sizes input_split_sizes timeout")
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], opts: Any
    ) -> Any:
        """Shard r goes to rank r; splits are rows, none: equal ones.  Raises DistBackendError, InvalidArgument."""
        splits = output_splits, input_splits = tuple(output_split_sizes), tuple(input_split_sizes)

        def call(launch: Launch) -> None:
            x, out = as_array(input), launch.output(output)
            if not output_splits and not input_splits:
                launch("all_to_all", x, out)
                return
            counts = (split_counts(input, input_splits, self.size()), split_counts(output, output_splits, self.size()))
            launch("all_to_all_v", x, *counts, out)

        return self._launch(call, [output, input], opts, "all_to_all_single", splits)

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> Any:
        """``output_tensors[r]`` receives what rank r has for this one.  Raises DistBackendError, InvalidArgument."""
        for parts in (output_tensors, input_tensors):
            check_parts(parts, self.size(), "alltoall")

        def call(launch: Launch) -> None:
            send, recv = ([part.numel() for part in parts] for parts in (input_tensors, output_tensors))
            launch("all_to_all_v", launch.joined(input_tensors), send, recv, launch.joined_output(output_tensors))

        return self._launch(call, [*output_tensors, *input_tensors], opts, "alltoall", ())

    # The names of torch 2.11 and 2.12.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @_overloaded(_C._distributed_c10d.BarrierOptions, "timeout")
    def barrier(self, opts: Any) -> Any:
        """Wait for all ranks and for their current streams.  Raises DistBackendError, InvalidArgument."""
        if self._gpu is not None:
            torch.cuda.current_stream(self.device).synchronize()
        return self._launch(lambda launch: launch("barrier"), [torch.empty(0)], opts, "barrier", ())

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the first missing rank after ``timeout``, or with ``wait_all_ranks`` all of them.

        ``timeout`` None is the group's.  Raises ``dist.DistBackendError`` with the texts of ``dist.monitored_barrier``.
        """
        opts = dist.BarrierOptions()
        opts.timeout = timedelta(seconds=self._timeout) if timeout is None else timeout
        if opts.timeout <= NONE:
            after = f"after {opts.timeout.total_seconds():g} s"
            raise dist.DistBackendError(f"kos: Rank {self.rank()} timed out in monitoredBarrier {after}")
        try:
            self.barrier(opts).wait()
        except dist.DistBackendError as error:
            ranks = getattr(error.__cause__, "ranks", ())
            missing = f"Ranks {', '.join(map(str, ranks))}" if wait_all_ranks else f"Rank {min(ranks, default='?')}"
            raise dist.DistBackendError(f"{error}: {missing} failed to pass monitoredBarrier") from error.__cause__

    # Messages.

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:
        """Send one tensor; on a GPU ``tag`` is ignored.  Raises DistBackendError, InvalidArgument."""
        if tensors[0].is_cuda:
            return self._post(tensors, "send", dstRank)
        return self._launch(lambda launch: launch("send", as_array(tensors[0]), dstRank, tag), tensors, None, "send")

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:
        """Receive one tensor of the sent size and dtype, in place.  Raises DistBackendError, InvalidArgument."""
        if tensors[0].is_cuda:
            return self._post(tensors, "recv", srcRank)

        def call(launch: Launch) -> None:
            if (posted := self._any.take(srcRank, tag, tensors[0], launch)) is not None:
                launch.works.append(posted)
            else:
                launch("recv", launch.output(tensors[0]), srcRank, tag)

        return self._launch(call, tensors, None, "recv")

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive from any rank, in host memory; see ``source_rank``.  Raises DistBackendError, InvalidArgument."""
        if tensors[0].is_cuda:
            raise InvalidArgument("recv: expected a source rank for a tensor on a GPU, got any")
        return AnySourceWork(self, self._any, tensors, tag, self._timeout)

    def _post(self, tensors: list[Tensor], name: str, peer: int) -> DeviceMessage:
        """Keep a message of the GPU until a wait or another operation: those that are kept are launched together.

        So the messages of ``batch_isend_irecv``, and of ranks that all send first, do not wait for each other.
        """
        with self.lock:
            # A message to this rank needs no connection, and other ranks may not take part in one.
            use = self._use_gpu if peer == self.rank() else self._connect_gpu
            use(tensors[0].device)
            self._follow_current()
            self._messages.append(message := DeviceMessage(self, tensors, name, peer))
        if self._coalesced is not None:
            self._coalesced.append(message)
        return message

    def send_all(self) -> None:
        """Launch the messages of the GPU that were kept."""
        with self.lock:
            messages, self._messages = self._messages, []
            if not messages:
                return

            def call(launch: Launch) -> None:
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
                message.tensors[0].record_stream(self.side)
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
