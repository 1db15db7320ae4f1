"""The nccl backend: GPU memory by NCCL, through its raw binding on addresses that are resolved beforehand.

Data movement uses bytes and supports every dtype.  NCCL reduces where its results equal those of other backends:
float32 and float64, integers, complex numbers as pairs.  It also adds 16-bit floats, fast, but rounds to 16 bits at
each rank; ``deterministic=True`` adds them in fp32 and in rank order.  A kernel of kos between two exchanges
(``composed``) does that, and the reductions that NCCL lacks: 8-bit floats, int16, bit operations, minima that keep
NaN.  Results are bit-identical on all ranks in each case.

The ranks join NCCL's communicator on a thread, which takes seconds.  The first call on a GPU waits for that, also if
another route runs the call.  It waits at most for the timeout of the communicator, and raises NCCL's error.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod
from mmap import PAGESIZE
from typing import Any

from kos.comm import timeouts
from kos.comm.contract import Backend, Message, Piece, Probe, messages_of
from kos.comm.control.base import ControlPlane
from kos.comm.failures import EndedEarly, PendingRanks
from kos.comm.gpu import nccl_binding as binding
from kos.comm.gpu.devices import device_of
from kos.comm.gpu.gpu_work import unstarted
from kos.comm.gpu.memory import MESSAGES, Scratch, Windows, as_messages, exchange_of, stage, windows_of
from kos.comm.gpu.nccl_binding import BYTE, CODE_OF, SUM, launch_of, launches_in_group
from kos.comm.operation import AUTO, Operation
from kos.comm.reduction import ReduceOp, Reduction
from kos.comm.waits import start_in_thread, wait_at_exit
from kos.comm.work import Engine, Work
from kos.cuda import driver
from kos.cuda.driver import relaxed_capture
from kos.cuda.kernels import NOTHING, RECV, SEND, Address, Launch, Plan, copy_launch
from kos.dtypes import DTYPES
from kos.errors import BackendUnavailable, CollectiveError, CollectiveTimeout, CudaError, InvalidArgument, KosError
from kos.memory import Buffer
from kos.memory.array import Array, Shape, as_dtype
from kos.memory.libraries import expandable
from kos.memory.windows import WindowMemory, keep_in_graph

log = logging.getLogger(__name__)

_Kind = tuple[str, int, str]
"""The properties that decide whether NCCL must connect ranks first: operation, size, and function with its peers."""
_PLAIN = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX)
_FREE_SECONDS = 1.0
_POLL_SECONDS = 0.02  # between two checks of the other ranks while a call of NCCL has not returned


class NCCLBackend(Backend):
    """Serves a group whose ranks have a GPU each."""

    name = "nccl"
    on_host, on_gpu = False, True
    sets_device, by_capture = True, MESSAGES
    device: int

    def __init__(self, rendezvous: ControlPlane, engine: Engine, device: int | None = None, comm: Any = None) -> None:
        """``comm`` is an NCCL communicator for this group, if there is one already."""
        super().__init__(rendezvous, engine, device)
        self._nccl = binding.library()
        self._handle = comm
        self._joining = self._join(rendezvous) if comm is None else None
        self._ending: Future[Any] | None = None  # the abort of the communicator, once begun
        self._lock = threading.RLock()  # of that; reentrant: the garbage collector may run meanwhile
        self._connected: set[_Kind | tuple[int, frozenset[_Kind]]] = set()  # for batches: number of calls, and kinds
        self._token = Scratch(4, self.device)
        self._windows = Windows(rendezvous, self.device, self._free_window, self._has_ended)
        self._part = 1  # of staging memory, for the next exchange

    @classmethod
    def probe(cls, rendezvous: ControlPlane) -> Probe:
        try:
            device = device_of(rendezvous)
            about = f"NCCL {binding.version()} on {device.name}"
        except KosError as error:
            return Probe(False, str(error).removeprefix("CUDA: "))
        if rendezvous.threads is not None and rendezvous.size > 1:
            return Probe(False, "the ranks are threads of one process, which share its GPU")
        claim = f"GPU {device.uuid} {rendezvous.pretended_host}".rstrip()  # NCCL allows it to ranks of several hosts
        return Probe(True, about, claim="" if binding.ranks_may_share_a_gpu() else claim)

    def _join(self, rendezvous: ControlPlane) -> Future[Any]:
        """Begin to create the communicator of all ranks, on a thread because it takes seconds."""
        if rendezvous.pretended_host:  # NCCL reads it once, when it makes its first communicator
            os.environ.setdefault("NCCL_HOSTID", rendezvous.host_identity)
        identities = rendezvous.allgather(binding.unique_id() if self.rank == 0 else b"")
        join = partial(binding.join, self.size, identities[0], self.rank, "kos", rendezvous.nccl)
        return self._begin(join, "nccl: init")

    @property
    def _comm(self) -> Any:
        """NCCL's communicator, once all ranks have joined it; None after its end."""
        self.connect()
        return self._handle

    @_comm.setter
    def _comm(self, comm: Any) -> None:
        self._handle, self._joining = comm, None

    def connect(self) -> None:
        if (joining := self._joining) is not None:
            comm = self._named(lambda: self._finish(joining, "nccl: init", self.backend.timeout), "nccl: init")
            with self._lock:
                if self._joining is joining:  # else it was aborted meanwhile
                    self._comm = comm

    def _begin(self, function: Callable[[], Any], what: str) -> Future[Any]:
        """Begin a call of NCCL on a thread, because it may wait for other ranks without a limit."""

        def run() -> Any:
            with driver.on_device(self.device), relaxed_capture():  # another thread may be capturing a graph
                return function()

        return start_in_thread(run, what)

    def _finish(self, begun: Future[Any], what: str, timeout: float | None) -> Any:
        """The result of a call that ``_begin`` has begun; CollectiveTimeout after ``timeout`` seconds.

        Meanwhile this rank reports that it waits, and afterwards its failure.
        """
        began = time.monotonic()
        try:
            while not wait([begun], _POLL_SECONDS).done:
                self._check_others(what, timeout is not None and time.monotonic() - began > timeout, timeout)
            return begun.result()
        except KosError as error:
            self.failures.status.post_failure(error)
            raise
        finally:
            if self.failures.first is None:
                self.failures.show_wait(None)

    def _check_others(self, what: str, late: bool, timeout: float | None) -> None:
        """Raise what has failed on another rank, or if ``late`` a CollectiveTimeout that names late ranks."""
        if self.failures.first is not None:
            raise self.failures.first.copy()
        text = f"{what}: {timeouts.unbegun(timeout)}" if late else ""
        if late and self.size == 1:
            raise CollectiveTimeout(text)
        backend = self.backend
        backend.shared.confirm()
        last = backend.shared.last or unstarted(what, backend)
        if late:
            known = backend.late(last)
            raise self.failures.timeout_error(PendingRanks(known.ranks or known.others, absent=known.absent), text)
        self.failures.show_wait(backend.late(last))

    def bounded(self, function: Callable[[], Any], timeout: float | None, what: str) -> Any:
        """The result of a call of NCCL that may wait for other ranks, for at most ``timeout`` seconds."""
        return self._finish(self._begin(function, what), what, timeout)

    def _bounded(self, function: Callable[[], Any], what: str) -> Any:
        """As ``bounded``, with the communicator's timeout.  Errors of NCCL become errors of kos."""
        return self._named(lambda: self.bounded(function, self.backend.timeout, what), what)

    def _named(self, function: Callable[[], Any], what: str) -> Any:
        """The result of ``function()``; NCCL's errors become errors of kos that name ``what``."""
        try:
            return function()
        except Exception as error:
            named = binding.error_of(error, what)
            if named is None:
                raise
            if isinstance(named, EndedEarly):
                named = self.backend.shared.cause(unstarted(what, self.backend), named)
            raise named from error

    def split(self, rendezvous: ControlPlane | None, color: int | None, key: int) -> Callable[..., Backend] | None:
        comm = self._comm
        if self.backend.messages_queued:  # NCCL splits no communicator that has operations in flight
            return None if rendezvous is None else type(self)
        if comm is not None:  # else it is aborted, and the remaining ranks make a new one
            options = {} if rendezvous is None else rendezvous.nccl
            begun = self._begin(partial(binding.split, comm, color, key, "kos", options), "nccl: init")
            try:
                comm = self._named(lambda: self._finish(begun, "nccl: init", self.backend.timeout), "nccl: init")
            except KosError:
                begun.add_done_callback(self._abort_joined)
                raise
        return None if rendezvous is None else partial(type(self), comm=comm)

    def close(self, begun: int) -> None:
        try:
            comm = self._comm
        except KosError as error:  # no call has needed it
            log.warning("rank %d: %s", self.rank, error)
            self.abort(str(error))
            comm = None
        with ExitStack() as rest:  # runs all steps even if one fails
            rest.callback(self._token.close)
            rest.callback(self._free_own_unused)
            if comm is not None:
                destroy = partial(self._nccl.comm_destroy, comm)
                rest.callback(self._bounded, destroy, "nccl: close (NCCL waits for CUDA graphs)")
            rest.callback(setattr, self, "_comm", None)
            self._free_own_unused()

    def abort(self, reason: str) -> str:
        """Begin to abort the communicator, on a thread.

        An abort frees memory, for which CUDA waits for the kernels of every communicator of the GPU.
        """
        with self._lock:
            comm, joining, self._comm = self._handle, self._joining, None
            self._ending = self._ending if comm is None else self._abort_comm(comm)
        if joining is not None:  # NCCL may still complete the communicator
            joining.add_done_callback(self._abort_joined)
        return reason

    def _abort_comm(self, comm: Any) -> Future[Any]:
        ending = self._begin(partial(self._nccl.comm_abort, comm), "nccl: abort")
        ending.add_done_callback(self._aborted)
        wait_at_exit(ending)  # which would free memory in use: the process would end by SIGSEGV
        return ending

    def _abort_joined(self, joining: Future[Any]) -> None:
        """Abort a communicator that NCCL has completed too late."""
        if joining.exception() is None and (comm := joining.result()) is not None:
            self._abort_comm(comm)

    def drained(self, final: bool) -> None:
        """Wait for NCCL to free its memory, but only briefly: NCCL waits for all graphs that hold its kernels."""
        wait([self._ending] if self._ending else [], _FREE_SECONDS)

    def _aborted(self, ending: Future[Any]) -> None:
        """Log the error of an abort, and free the windows that it has left without arrays."""
        error = ending.exception()
        if error is not None and not isinstance(self.failures.first, CudaError):  # else this error follows from it
            log.warning("rank %d: abort of NCCL: %s", self.rank, error)
        self._windows.free(self._windows.unused() if self._has_ended() else ())  # a split may have come too late

    def _has_ended(self) -> bool:
        """Whether NCCL no longer uses memory of this communicator."""
        return self._handle is None and (self._ending is None or self._ending.done())

    def inspect(self, work: Work[Any]) -> None:
        problem = binding.async_error(self._handle) if self._handle is not None else None
        if problem is not None:
            error = EndedEarly(f"{work}: {problem}")  # usually because another rank has ended
            error.unexplained = CollectiveError
            raise error

    def explain(self, work: Work[Any], error: Exception) -> Exception:
        return binding.error_of(error, str(work)) or error

    # Registered memory.

    def allocate(self, shape: Shape, dtype: Any) -> Array:
        """An array in a symmetric window: memory that all ranks map, for NCCL's fastest kernels.  Collective.

        First frees the windows without arrays and graphs on any rank, after queued work has run.
        """
        shape, dtype = (shape,) if isinstance(shape, int) else tuple(shape), as_dtype(dtype)
        nbytes, comm = max(prod(shape) * dtype.itemsize, 1), self._comm
        self._free_unused()
        with driver.on_device(self.device):
            pointer = self._named(lambda: self._nccl.mem_alloc(nbytes), f"nccl: allocate {nbytes:,} bytes")
        window = self._bounded(lambda: binding.register(comm, pointer, nbytes), "nccl: window")
        return self._windows.add(pointer, nbytes, window, shape, dtype)

    def register(self, buffer: Buffer) -> Array:
        """A symmetric window in the program's memory, which NCCL requires to be of the driver's virtual memory."""
        comm, obstacle = self._comm, ""
        if expandable(buffer.array):
            obstacle = "expected memory that stays mapped, got a tensor in an expandable segment of torch"
        elif not binding.is_virtual(buffer.pointer):
            obstacle = "expected memory of ncclMemAlloc or cuMemCreate, got memory of cudaMalloc or of a pool"
        elif buffer.pointer % binding.WINDOW_ALIGNMENT:
            obstacle = f"expected an address that is a multiple of {binding.WINDOW_ALIGNMENT}, got 0x{buffer.pointer:x}"
        self._free_unused()

        def make() -> Any:
            window = self._bounded(lambda: binding.register(comm, buffer.pointer, buffer.nbytes), "nccl: window")
            if not window:
                raise BackendUnavailable(f"register: NCCL {binding.version()} has no windows on this machine")
            return window

        return self._windows.register(buffer, obstacle, make)

    def _free_unused(self) -> None:
        """Free the windows that no rank uses, once queued work has run.  Collective."""
        self._windows.free(self._windows.unused_everywhere(self.backend))
        self.backend.store.clear()

    def _free_own_unused(self) -> None:
        if self._handle is not None or self._has_ended():
            self._windows.free(self._windows.unused())

    def _free_window(self, memory: WindowMemory) -> None:
        try:
            if self._handle is not None:
                deregister = partial(self._nccl.comm_window_deregister, self._handle, memory.handle)
                self._named(deregister, "nccl: window")
        finally:
            if memory.owner is None:
                binding.free(memory.pointer)

    # The operations.

    def resolve(self, o: Operation) -> Plan:
        if o.options.algorithm != AUTO:
            raise InvalidArgument(f"algorithm: expected 'auto' for {o.name} on nccl, got {o.options.algorithm!r}")
        if o.options.compress:
            plan, how = self.backend.by_exchanges(self, o), o.options.compress
        else:
            plan, how = (self._movement if o.reduction is None else self._reduction)(o)
        buffer, message = o.send or o.recv, o.message
        # NCCL connects ranks at the first call of a kind, which depends on size and peer.
        sent = "messages" if o.name in MESSAGES else how  # by its own function and by kos over the same connections
        kind = o.name, buffer.nbytes.bit_length() if buffer else 0, f"{sent} {o.root} {message.dst} {message.src}"
        connected = kind in self._connected
        name = windows_of(o, self._windows, how) if self._windows.memories else None
        return replace(plan, name=name, cacheable=connected, about=None if connected else kind)

    def start(self, plan: Plan, stream: int, send: int = 0, recv: int = 0) -> None:
        """Queue a plan.  At the first of its kind NCCL may connect to the other ranks, and wait for them."""
        queue = partial(super().start, plan, stream, send, recv)
        if plan.about is None or plan.about in self._connected:
            return queue()
        last = self.backend._last
        self.bounded(queue, last.operation.options.timeout, str(last))
        self._connected.add(plan.about)

    def queue(self, works: Sequence[Work[Any]], stream: int | None) -> None:
        """Launch NCCL's own operations as one group.  Operations that also launch kernels of kos follow one by one."""
        alone = [work for work in works if work.prepared.plan.kernels]
        together = [work for work in works if work not in alone]
        if not together or (not alone and len(together) < 2):  # with both kinds, all ranks need the same order
            return self.backend.queue_each(works, stream)
        kinds = frozenset(kind for work in together if (kind := work.prepared.plan.about) is not None)
        if kinds and (len(together), kinds) not in self._connected:  # the group connects all of its kinds
            queue = partial(self._queue_group, together, stream)
            self.bounded(queue, together[0].operation.options.timeout, str(together[0]))
            self._connected.add((len(together), kinds))
        else:
            self._queue_group(together, stream)
        self.backend.queue_each(alone, stream)

    def _queue_group(self, works: Sequence[Work[Any]], stream: int | None) -> None:
        """Queue the steps of several plans in one group of NCCL.  Copies out of staging memory follow the group."""
        start, end = launches_in_group([])
        afterwards: list[Callable[[], None]] = []
        start(0)
        try:
            for self._part, work in enumerate(works, 1):
                plan, at = work.prepared.plan, work.stream if stream is None else stream
                keep_in_graph(plan.memories, at)
                steps = plan.on(at, (work.send, work.recv))
                ends = [number for number, each in enumerate(steps, 1) if getattr(each, "closes", 0)]
                cut = ends[-1] if ends else len(steps)
                afterwards.append(partial(Plan(steps[cut:]), at, work.send, work.recv))
                Plan(steps[:cut])(at, work.send, work.recv)
        finally:
            self._part = 1
            end(0)
        for each in afterwards:
            each()

    def _reduction(self, o: Operation) -> tuple[Plan, str]:
        """The plan of a reduction, and what runs it."""
        reduction, send, recv = o.reduction, o.send, o.recv
        assert reduction is not None and send is not None
        known = None if o.name in ("scan", "exscan") else binding.native(reduction.op, reduction.dtype)
        any_order = reduction.dtype.kind not in ("float", "complex")
        if not any_order and o.options.deterministic:
            known = None
        if o.name == "reduce_scatter_v":
            # NCCL chooses the order of additions, which does not matter for integers, nor for two ranks.
            if known is not None and reduction.op in _PLAIN and (any_order or self.size == 2):
                return self._reduces(o, *known), "reduces"
            known = None
        if known is None:
            return self.backend.by_exchanges(self, o), "ordered"
        count = recv.count if o.name == "reduce_scatter" and recv is not None else send.count
        if count == 0:
            return NOTHING, ""
        code, op, per = known  # NCCL's dtype, its op (-1: created at the call), its elements per element
        last = () if o.root is None else (o.root,)
        comm = self._comm
        if op < 0:
            function = getattr(self._nccl, o.name)
            return Plan((partial(self._premultiplied, function, count * per, reduction, last),)), "premultiplied"
        return Plan((launch_of((o.name, SEND, RECV, count * per, code, op, *last, comm)),)), "native"

    def _reduces(self, o: Operation, code: int, op: int, per: int) -> Plan:
        """A reduce_scatter_v as a group of reduces, one for each rank, whose root is that rank.

        NCCL's reduce does not use registered memory, so arrays in windows need no staging memory.
        """
        assert o.send is not None and o.send_counts is not None
        send, recv, size = o.send.pointer, 0 if o.recv is None else o.recv.pointer, o.send.dtype.itemsize
        parts = zip(accumulate(o.send_counts, initial=0), o.send_counts, strict=False)
        return Plan(launches_in_group([
            ("reduce", send + start * size, recv, count * per, code, op, root, self._comm)
            for root, (start, count) in enumerate(parts) if count
        ]))  # fmt: skip

    def _premultiplied(
        self, function: Callable[..., None], count: int, reduction: Reduction, root: tuple[int, ...], stream: int,
        send: int, recv: int,
    ) -> None:  # fmt: skip
        dtype = binding.real_type(reduction.dtype)
        op = binding.premultiplied_sum(self._comm, reduction.factor, dtype)
        try:
            function(send, recv, count, CODE_OF[dtype], op, *root, self._comm, stream)
        finally:
            self._nccl.red_op_destroy(op, self._comm)

    def _movement(self, o: Operation) -> tuple[Plan, str]:
        """The plan of an operation without a reduction, and what runs it."""
        comm, root = self._comm, () if o.root is None else (o.root,)
        by_messages = as_messages(o, self._windows)
        x_bytes, out_bytes = (0 if end is None else end.nbytes for end in (o.send, o.recv))
        match o.name:
            case "barrier":
                token = self._token.pointer
                call = "all_reduce", token, token, 1, CODE_OF[DTYPES["int32"]], SUM, comm
                return Plan((launch_of(call),)), "native"
            case "broadcast" | "scatter":
                nbytes = out_bytes
            case "all_gather" | "gather":
                nbytes = x_bytes
            case "all_to_all":
                nbytes = x_bytes // self.size
            case _:
                by_messages = True
        if by_messages:
            return self.bind_exchange(*exchange_of(o, self.rank, self.size)), "exchange"
        if not nbytes:
            return NOTHING, ""
        return Plan((launch_of((o.name, SEND, RECV, nbytes, BYTE, *root, comm)),)), "native"

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], stream: int) -> None:
        Plan(self._exchange(sends, recvs, stream))(stream)

    def _exchange(self, sends: Sequence[Message], recvs: Sequence[Message], stream: int) -> list[Launch]:
        """The copies before an exchange, its calls, and the copies after it."""
        places = self._windows, self.backend.scratch, self._part
        sends, recvs, before, after = stage(sends, recvs, self.rank, *places, stream)
        messages = [("send", *each) for each in sends] + [("recv", *each) for each in recvs]
        calls = [(name, pointer, nbytes, BYTE, peer, self._comm) for name, peer, pointer, nbytes in messages]
        first, last = ([copy_launch(*each, self.device) for each in copies] for copies in (before, after))
        return [*first, *launches_in_group(calls), *last]

    def bind_exchange(self, sends: Sequence[Piece], recvs: Sequence[Piece]) -> Plan:
        return Plan(partial(self._exchange_steps, sends, recvs))

    def _exchange_steps(
        self, sends: Sequence[Piece], recvs: Sequence[Piece], stream: int, arrays: Sequence[Any]
    ) -> Sequence[Any]:
        # The rest of the last page of the program's registered memory counts as registered, and may have other arrays:
        # what to stage is then known only with the arrays of a call.
        registered = [each for each in list(self._windows.memories.values()) if each.owner is not None]
        if type(arrays[0]) is Address and any(each.nbytes % PAGESIZE for each in registered):
            return (self._exchange,)
        return self._exchange(messages_of(sends, arrays), messages_of(recvs, arrays), stream)

    def bind_collect(self, send: Any, recv: Any, nbytes: int) -> Plan:
        return Plan((launch_of(("all_gather", send, recv, nbytes, BYTE, self._comm)),))
