"""Communicator: a group of ranks, from ``kos.init`` to ``close``."""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NoReturn

import numpy as np

from kos.comm import watchdog
from kos.comm.arguments import check_bool, check_int, check_shape, check_timeout
from kos.comm.batch import Batch
from kos.comm.call_guards import interruptible, interruption, one_thread
from kos.comm.collectives import Operations
from kos.comm.contract import Probe
from kos.comm.control.base import ControlPlane
from kos.comm.gpu.backend import GPUBackend
from kos.comm.groups import Groups
from kos.comm.host.host_backend import HostBackend
from kos.comm.operation import CORE_OPERATIONS, Operation, Options
from kos.comm.progress import ProgressThread
from kos.comm.recorder import Group, Recorder, tracing
from kos.comm.work import Work, forked_from, record_start
from kos.errors import (
    CollectiveError,
    InvalidArgument,
    KosError,
    RankLost,
)
from kos.memory import Array, as_buffer
from kos.memory.array import Shape, as_dtype


class Communicator(Groups):
    """A group of ranks and the backend that connects them.

    All ranks of the group call the same collectives in the same order.  Arrays are C-contiguous, of any dtype of
    ``kos.dtypes`` and any shape, zero elements included: NumPy arrays, ``kos.memory.Array``, and arrays with DLPack or
    ``__cuda_array_interface__``.  Operations work in place unless ``out`` is given, and return the array that holds
    the result.

    Arrays on a GPU: a backend for GPUs queues an operation and returns.  The operation is ordered with the other work
    on ``stream``: a raw handle, or a stream of ``kos.cuda``, torch or CuPy.  The default is the array's own stream
    (``Array.stream``, torch's or CuPy's current one), else the legacy default stream.  With ``async_op=True`` the
    operation runs on a stream of the communicator, and ``Work.wait()`` makes ``stream`` wait for it.  The host waits in
    ``Work.wait(timeout)``, ``Work.synchronize()``, ``synchronize()``, ``barrier()`` without a stream, and ``close()``.
    Backends for host memory refuse GPU arrays.

    Common keywords: ``async_op=True`` returns a Work at once, whose ``wait()`` returns the result of the call.
    ``timeout`` in seconds replaces the communicator's own.  ``deterministic=True`` adds in rank order, so that results
    are bit-identical from run to run and between backends.  ``algorithm`` names a schedule of ``kos.comm.schedules``
    ("auto" lets the backend choose).  Sums are always bit-identical on all ranks.  16-bit and 8-bit floats accumulate
    in fp32 and round once (except in NCCL's own sums).

    Raises InvalidArgument for wrong arguments, before anything is sent; CollectiveMismatch if ranks made different
    calls; CollectiveTimeout; RankLost.  After a collective has failed the ranks are out of step, and further calls
    raise CollectiveError.
    """

    __slots__ = ("_active",)  # the core reads and writes it

    def __init__(
        self, backend: GPUBackend | HostBackend, rendezvous: ControlPlane, probes: Mapping[str, Probe], timeout: float,
        group: Group | None = None, host: HostBackend | None = None,
    ) -> None:  # fmt: skip
        """``host`` runs the operations on host memory, if ``backend`` runs those of a GPU."""
        self.backend: Any = backend
        self.host = backend if isinstance(backend, HostBackend) else host
        """What runs operations on host memory, including those of ``split`` and ``all_gather_bytes``."""
        self._parts = tuple(dict.fromkeys(each for each in (backend, self.host) if each is not None))
        self.backend_name = "+".join(dict.fromkeys("+".join(each.name for each in self._parts).split("+")))
        self.device, self._store = backend.device, backend.store
        self.rendezvous = rendezvous
        self.probes = probes
        self._defaults = Options(timeout)
        self._collectives, self._messages, self._splits = itertools.count(), itertools.count(), itertools.count()
        self.rank, self.size, self._suffix = rendezvous.rank, rendezvous.size, rendezvous.failures.group_suffix
        self.local_rank, self.local_size = rendezvous.local_rank, rendezvous.local_size
        self._active: Any = None  # a thread, and the collective that it is in; of the core, the collective
        self._batch: Batch | None = None
        self._groups: weakref.WeakSet[Communicator] = weakref.WeakSet()  # split from this one
        self._closed, self._why_closed = False, " is closed"
        self._progress: ProgressThread | None = None
        self._group = group or Group(
            Recorder(self.rank, self.size, rendezvous.job), "world", [*range(self.size)], self.rank, self.backend_name
        )
        self.recorder = self._group.recorder  # shared with the communicators split from this one
        self.name = self._group.name
        rendezvous.failures.owner = weakref.ref(self)
        if group is None:
            rendezvous.failures.status.publish_last_call(self.recorder.last_call)
        self._tracing = tracing(self.recorder, on_gpu=self.device is not None)
        if self.host is not None:
            self.host.tracing = self._tracing
        core, self._eager_calls = (None, None) if self._tracing is not None else backend.core_calls()
        self._core_group: Any = core if core is not None and self._bind(core) else None
        if self._core_group is not None:
            self._use_core()
        _communicators.add(self)

    def _bind(self, core: Any) -> bool:
        """Give the core what the operations use.

        Returns False if NumPy's arrays are not as the core expects, or if it makes those of another communicator.
        """
        example, failures, recorder = np.zeros((2, 3)), self.rendezvous.failures, self.recorder
        bound: bool = core.bind(
            example, example.ctypes.data, self, failures, self._eager_calls, failures.status,
            self.backend.engine.active, recorder.counter, recorder.slots, self._collectives, self._messages,
        )  # fmt: skip
        return bound

    def _use_core(self) -> None:
        """Have the core make the operations that subclasses have not changed."""
        for name in CORE_OPERATIONS:
            if getattr(type(self), name) is (function := getattr(Operations, name)):
                start = functools.partial(self._start_uncached, function.__wrapped__)
                setattr(self, name, self._core_group.method(name, start, function.__doc__ or ""))
        self._store.core = self._core_group

    def _open_batch(self, batch: Batch | None) -> None:
        """Calls from now on join ``batch``."""
        self._batch = batch
        if self._core_group is not None:
            self._core_group.off = batch is not None

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<Communicator {self._label}{closed}>"

    @property
    def _label(self) -> str:
        return f"{self.name}: rank {self.rank} of {self.size} on {self.backend_name}"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be copied or pickled: each process makes its own by kos.init")

    @property
    def world_ranks(self) -> list[int]:
        """The world rank of each rank; the world is the communicator that ``kos.init`` returned."""
        return list(self._group.ranks)

    @property
    def failure(self) -> KosError | None:
        """The error that further calls raise, since this communicator has failed; None if it has not."""
        return self.rendezvous.failures.first

    @property
    def timeout(self) -> float:
        """The default timeout of every wait, in seconds.

        It may be set, to the same value on all ranks; groups split from this one afterwards inherit it.
        """
        assert self._defaults.timeout is not None
        return self._defaults.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        seconds = self.rendezvous.timeout = check_timeout(seconds)
        if self.device is not None:
            self.backend.set_timeout(seconds)
        self._defaults = Options(seconds)
        self._store.clear()

    @interruptible
    def batch(self, *, async_op: bool = False) -> Batch:
        """Check the operations called in ``with comm.batch() as batch:`` at once and launch them together.

        They start when the block ends, which waits for them unless ``async_op``; if the block raises, none starts.  An
        operation may not use memory that another one writes: InvalidArgument is raised when the block ends.

            with comm.batch():
                comm.send(mine, dst=right)
                comm.recv(theirs, src=left)
        """
        return Batch(self, check_bool("async_op", async_op))

    @property
    def abort_flags(self) -> list[int]:
        """Addresses of 64-bit flags in page-locked memory that kernels can read.  Not collective.

        A flag is set (not 0) when an operation on the GPU is ended early, before its stream continues.  A later kernel
        on the stream, also in a graph, can check whether the results so far are complete.  Empty without a GPU.
        """
        return [] if self.device is None else list(self.backend.abort_flags)

    @interruptible
    def synchronize(
        self, timeout: float | None = None, stream: Any = None, *, until: Callable[[], bool] | None = None
    ) -> None:
        """Wait on the host for all operations of this communicator, at most ``timeout`` seconds for each.

        Raises the error of a failed operation, unless it was raised before; raises the first failure of the
        communicator each time.  Failures on a GPU are raised here, in the waits of a Work, and in the next call.
        ``stream``: wait for all work on that stream instead, including replays of captured graphs.  ``until``: wait
        until that function, such as an event's ``done``, returns True.

            comm.all_reduce(x, async_op=True)
            comm.synchronize()
        """
        limit = self.timeout if timeout is None else check_timeout(timeout)
        handle = None if stream is None else self._handle(stream)
        self.rendezvous.failures.refuse("synchronize")
        if until is not None:
            if self.device is None or not callable(until):
                raise InvalidArgument(f"until: expected None, or a function where GPUs are used, got {until!r}")
            return self.backend.synchronize(limit, handle, until)
        for work in self.backend.engine.works_of(self._parts):
            work.wait(timeout)
        self.backend.synchronize(limit, handle)

    @interruptible
    def allocate(self, shape: Shape, dtype: Any) -> Any:
        """An uninitialised array in the memory that the backend moves fastest.  Collective; ranks pass the same size.

        ``shape`` is in elements.  ``dtype`` is one of NumPy or torch, or a name such as "bfloat16".
        With nccl, the array lies in a symmetric window on this rank's GPU.  If one rank passes such an array to a
        reduction, all_gather, all_to_all or broadcast, all ranks must do so, else that call raises CollectiveMismatch.
        With host memory, it is an ndarray, in memory that the ranks share if they are on one host.  ``views`` gives the
        arrays of the other ranks.  Raises InvalidArgument for a wrong shape or dtype; CollectiveMismatch if the ranks
        pass different ones; OutOfMemory, CollectiveTimeout, RankLost.

            gradients = comm.allocate((1024, 1024), "bfloat16")
        """
        self._check_open()
        shape, kind = check_shape(shape), as_dtype(dtype)
        call = f"allocate of {kind.name}{list(shape)}"
        self._agree(Operation("barrier", self.rank, self._defaults._replace(purpose=call)), call)
        if self.device is not None:
            return self.backend.allocate(shape, kind.numpy)
        made = list[Any]()

        def make() -> bytes:
            made.append(self.backend.allocate(shape, kind.numpy))
            return b""

        with self._exchange(call):
            self.rendezvous.together(make, call)
        return made[0]

    def views(self, x: Any) -> list[Any]:
        """Every rank's memory at the place of ``x``, an array of ``allocate`` or ``register``, or a part of one.

        Element r of the list has the shape and dtype of ``x``, and lies in the memory of rank r.  Writing to it is a
        put, and reading from it is a get.  No other rank takes part.  A ``barrier`` (on a GPU ``barrier(stream=)``)
        orders the writes of one rank and the later accesses of another.  The views are ndarrays, or
        ``kos.memory.Array`` on the stream of ``x``, also if ``x`` is of another library, such as a tensor of torch.  On
        a GPU, they are invalid after ``close``.

        Raises InvalidArgument for other arrays, BackendUnavailable on ``nccl`` and between hosts.

            x = comm.allocate(4, np.float32)
            comm.views(x)[(comm.rank + 1) % comm.size][:] = comm.rank
            comm.barrier()                               # x holds the number of the rank before
        """
        self._check_open()
        return self.backend.views(as_buffer(x, "x", writable=False))

    @interruptible
    def register(self, x: Any) -> Array:
        """Register ``x`` for zero-copy transfers, as memory of ``allocate`` is.  Collective.

        ``x`` is an array on this rank's GPU that the program has allocated.  It has the same number of bytes on all
        ranks.  Returns a ``kos.memory.Array`` of the same memory, which keeps ``x`` alive.  The registration lasts
        until this array, and the last captured graph that uses it, are gone.  Calls on ``x`` and on this array are
        equally fast.  nccl requires memory of ncclMemAlloc or cuMemCreate, and peer requires memory of cudaMalloc.
        Waits for the collectives in flight.  Raises InvalidArgument on all ranks for other memory, such as expandable
        segments of torch, and on backends for host memory; PeerMemoryError if CUDA's IPC cannot map the memory.

            buffer = comm.register(gradients)
        """
        self._check_open()
        buffer = as_buffer(x, "x", True)
        if self.device is not None:
            if buffer.device != self.device:
                raise InvalidArgument(f"x: expected memory of cuda:{self.device}, got memory of {buffer.place}")
            self._settle("register")
            self._store.clear()
            call = f"register of {buffer.nbytes} bytes"
            self._agree(Operation("barrier", self.rank, self._defaults._replace(purpose=call)), call)
        return self.backend.register(buffer)

    def on_failure(self, callback: Callable[[KosError], None]) -> None:
        """Call ``callback(error)`` once when this communicator has failed, at once if it has failed already.

        The watchdog's thread calls it within half a second, whatever the program does meanwhile.  On GPUs, the
        operations in flight have been aborted by then, and their results are undefined.  In host memory, the next call
        or wait ends them.  A rank counts as lost when its process ends, unless it has closed the communicator before.
        On ``mpi``, the loss of a rank of another host is reported only after the next call.  ``callback`` must return
        soon, and may use nothing of this communicator but ``abort``.  Raises InvalidArgument if ``callback`` is not
        callable.

            comm.on_failure(lambda error: print(f"lost: {error.ranks}"))
        """
        if not callable(callback):
            raise InvalidArgument(f"callback: expected a function of the error, got {callback!r}")
        watchdog.on_failure(self.backend, callback)

    def explain(self) -> str:
        """A table of the backends, with the reason where one is unusable, and a table of routes by operation.

        Describes this rank.  Not collective; raises nothing.

            print(comm.explain())
        """
        rows: list[tuple[str, ...]] = [("backend", "usable", "why")]
        for name, probe in self.probes.items():
            chosen = "in use" if name in self.backend_name.split("+") else "yes" if probe.usable else "no"
            rows.append((name, chosen, probe.reason))
        rows += dict.fromkeys(row for part in reversed(self._parts) for row in part.details())
        places = (" on GPUs", " on hosts") if self._parts[1:] else ("",)
        routes = [row for part, place in zip(self._parts, places, strict=True) for row in _route_table(part, place)]
        return "\n".join([*_columns(rows), *_columns(routes)])

    def close(self) -> None:
        """Wait for the operations in flight and free all resources.  Collective; a second call does nothing.

        Groups split from it stay open.  Raises the error of an operation in flight.  A communicator that has failed is
        aborted instead.

            with kos.init() as comm:                     # closes it, or aborts it after an exception
                comm.barrier()
        """
        if self._closed:
            return
        if (failure := self.failure) is not None:
            self._end(str(failure))  # ranks out of step cannot close together
            self.rendezvous.abort(None)
            return
        self.recorder.close(self._group)
        self._store.clear()
        self.synchronize()
        self._closed, self.rendezvous.call = True, "close"
        self._end_thread()
        try:
            with self.backend.engine.paused(), ExitStack() as rest:  # closes all, even if one fails
                for part in reversed(self._parts):
                    rest.callback(part.close)  # that for host memory comes last: it reports the end
        finally:
            self.rendezvous.close()

    def abort(self, code: int = 1, reason: str = "it aborted the communicator") -> None:
        """End the operations in flight without waiting for other ranks, and close the communicator.

        The groups split from it are aborted, too.  Ranks that wait for this one raise RankLost with the ``reason``, or
        end when this process exits, with ``code`` as the job's exit status (mpi).  Raises InvalidArgument for a
        ``code`` that is no whole number; a second call does nothing.

            comm.abort(reason="the data of this rank are damaged")
        """
        code = check_int("code", code)
        if not self._closed:
            self._signal_end(str(reason))
            self._abort_groups(str(reason))
            self._end(str(reason))
            self.rendezvous.abort(code)

    def _end(self, reason: str) -> None:
        self._closed = True
        self._store.clear()
        self._end_thread()
        engine = self.backend.engine
        with engine.paused():
            if self.device is not None:
                self.backend.signal_end(reason)
            for part in reversed(self._parts):
                part.abort(reason)  # that for host memory comes first: it reports the reason to other ranks at once
            for work in engine.works_of(self._parts):
                work.cancel(CollectiveError("the communicator was aborted", call=work))
        self.recorder.close(self._group, f"aborted: {reason}")

    def _signal_end(self, reason: str) -> None:
        """Begin to end this communicator and what was split from it: on a GPU each end waits for all of them."""
        if not self._closed and self.device is not None:
            self.backend.signal_end(reason)
        for group in list(self._groups):
            group._signal_end(reason)

    def _abort_groups(self, reason: str) -> None:
        """Abort what was split from this communicator: ranks wait there for this one."""
        for group in list(self._groups):
            group._abort_groups(reason)
            if not group._closed:
                group._end(reason)
                group.rendezvous.abort(None)

    def _end_thread(self) -> None:
        thread, self._progress = self._progress, None
        if thread is not None:
            thread.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        if value is None or (isinstance(value, SystemExit) and not value.code):
            self.close()
        else:
            code = value.code if isinstance(value, SystemExit) else 1
            self.abort(code if isinstance(code, int) else 1, f"{type(value).__name__}: {value}".removesuffix(": "))

    # Launching operations.

    def _start_all(self, works: list[Work[Any]], overlap: bool) -> None:
        """Start the checked calls of a batch together."""
        self._check_open()
        first = next((work for work in works if work.collective), None)
        with nullcontext() if first is None else one_thread(self, first):
            if self.device is not None:
                works = self.backend.in_order(works)  # the order of their start: ranks compare sequence numbers
                self.backend.check_start(works)
            for work in works:
                record_start(self, work)
            with nullcontext() if self._tracing is None or not works else self._tracing(works, True, overlap):
                for backend, several in itertools.groupby(works, lambda work: work.backend):
                    each = list(several)
                    if backend.on_gpu:
                        backend.start_all(each, overlap)
                        continue
                    if self.device is not None:
                        self.backend.confirm(each[0])
                    backend.start_all(each)

    def _interrupted(self, call: str, error: BaseException) -> None:
        """Abort this communicator if the handler of a signal raised ``error`` in ``call``; a group of one goes on.

        So are other communicators of this rank of which it has ended a step half-way.  Raises what the handler raised
        if kos has raised ``error`` because of that.
        """
        raised = interruption(error)
        if raised is None:
            return
        what = f"{call} was interrupted by {type(raised).__name__}: {raised}".removesuffix(": ")
        cut_short = self.rendezvous.failures.status.cut_short
        halved = {log.owner() for log in (cut_short.pop() for _ in range(len(cut_short)))} - {None}
        for comm in {self, *halved}:
            comm._end_interrupted(what)
        if raised is not error:
            raise raised

    def _end_interrupted(self, what: str) -> None:
        if self.size == 1:  # the call has ended
            self._active = None
            for work in self.backend.engine.works_of(self._parts):
                self.backend.engine.remove(work)
        elif not self._closed:
            failures = self.rendezvous.failures
            me = failures.names([self.rank], False)  # posted for a rank that sees only the end of a connection
            failures.status.post_failure(RankLost(f"{me} is gone: {what}", ranks=failures.in_world([self.rank])))
            self.abort(reason=what)

    def _check_open(self) -> None:
        if self._closed:
            raise CollectiveError(f"<Communicator {self._label}>{self._why_closed}")


_SHOWN = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
_SHOWN_BYTES = {"1 KB": 1 << 10, "32 KB": 1 << 15, "1 MB": 1 << 20, "32 MB": 1 << 25, "1 GB": 1 << 30}
_BUFFERS = {"": (False, False), "symmetric": (True, False), "graph": (False, True), "symmetric, graph": (True, True)}


def _route_table(part: GPUBackend | HostBackend, place: str) -> list[tuple[str, ...]]:
    """The routes of the usual operations as the rows of a table."""
    rows: list[tuple[str, ...]] = [(f"float32{place}", *_SHOWN_BYTES)]
    for name in _SHOWN if part.size > 1 else ():
        alike: dict[tuple[str, ...], list[str]] = {}
        for kind, how in _BUFFERS.items():
            cells = tuple(part.route_of(name, nbytes, *how) for nbytes in _SHOWN_BYTES.values())
            alike.setdefault(cells, []).append(kind)
        labels = (name if "" in kinds else f"{name} ({'; '.join(kinds)})" for kinds in alike.values())
        rows += [(label, *cells) for label, cells in zip(labels, alike, strict=True)]
    return rows if rows[1:] else []


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _forked() -> None:
    """A forked process is not a rank: it reports nothing on behalf of the rank, and ends none of its operations."""
    for comm in _communicators:
        comm.backend.engine.disown()
        if not comm._closed:
            comm._closed, comm._why_closed = True, f": {forked_from(comm.rank)}"


os.register_at_fork(after_in_child=_forked)
