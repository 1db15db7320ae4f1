"""HostBackend: runs the operations of a group on host memory, over a transport and through shared memory.

The **transport** moves messages between any two ranks (``kos.comm.transport``).  The **shared** is the shared memory of
this rank's host.  If all ranks are there, it runs their operations in the compiled core; else it carries the messages
of collectives within the host.  Ranks that share memory compare their calls in it, and detect missing and dead ranks.
Between hosts the transport compares calls and reports failures.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import numpy as np

from kos._core import native
from kos.comm import timeouts
from kos.comm.contract import UNMADE, Backend
from kos.comm.control.base import ControlPlane
from kos.comm.failures import PendingRanks
from kos.comm.host.shared import (
    FingerprintRing,
    Segment,
    SharedArrays,
    SharedMemoryTransport,
    await_transports,
    open_segment,
)
from kos.comm.matching import Envelope
from kos.comm.operation import ANY, AUTO, Operation
from kos.comm.prepared import Fingerprints, Prepared, Store, without_memory
from kos.comm.recorder import Tracer
from kos.comm.schedules import runnable
from kos.comm.transport import ScheduledCalls
from kos.comm.waits import Backoff
from kos.comm.work import Engine, Steps, Work, raising
from kos.errors import (
    BackendUnavailable,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgument,
    KosError,
    RankLost,
)
from kos.memory import Array, Buffer


class HostBackend:
    """Runs the operations of a group over the transport that ``make(rendezvous, engine)`` returns."""

    on_gpu: ClassVar[bool] = False
    device: ClassVar[int | None] = None
    work: ClassVar[type[Work[Any]]] = Work
    """The class of what its calls start."""
    gpu_array_hint = "nccl, peer and auto support it"
    """The end of the error for an array on a GPU."""
    tracing: Tracer | None = None
    """What traces the launch of each operation of a batch."""

    def __init__(
        self, rendezvous: ControlPlane, make: Callable[[ControlPlane, Engine], Backend], engine: Engine | None = None
    ) -> None:
        self.rank, self.size, self.failures = rendezvous.rank, rendezvous.size, rendezvous.failures
        self.group_suffix = self.failures.group_suffix  # follows the number of a rank in texts
        self.engine, self.store = engine or Engine(), Store()
        self.transport = make(rendezvous, self.engine)
        self.name = self.transport.name
        self._segment: Segment | None = None
        self.shared_memory = "a group of one"  # the segment's description, or why none is shared
        self.calls: FingerprintRing | None = None
        """The comparison of calls between the ranks of this host, shared with GPU backends of the communicator."""
        self.fingerprints = Fingerprints() if self.transport.processes else None  # None: this rank compares no calls
        self._shared_memory: SharedMemoryTransport | None = None  # the shared memory of this host
        self.shared: SharedMemoryTransport | None = None  # the same, if all ranks are on this host: it runs the calls
        self.arrays: SharedArrays | None = None
        self.crowded, self.one_host = False, self.size == 1
        self._aborting = False
        self._slept_at: Any = 0  # the mark of the transport's waiter at the last sleep
        self.failures.reporters.append(self.transport)
        try:
            self._share_memory(rendezvous)
            self.transport.open(self)
        except BaseException:
            self.transport.abort(UNMADE)
            self.failures.report_end(UNMADE, 0)
            if self.calls is not None:
                self.calls.close()
            if self._segment is not None:
                self._segment.close()
            raise
        self.scheduled = ScheduledCalls(self.transport, self._shared_memory)
        if self.shared is not None:
            self.shared.waiting = self.scheduled.matching.waiting
        self.has_envelopes = self.shared is not None or type(self.transport).arrived is not Backend.arrived
        """Whether it offers ``recv`` from any rank, ``send_bytes``, ``recv_bytes`` and ``probe``."""
        self.finds_any_tag = self.shared is not None or self.transport.finds_any_tag
        """Whether receives and probes may take messages of any tag."""
        if self.transport.processes:
            at_exit(self)

    def _share_memory(self, rendezvous: ControlPlane) -> None:
        """Open what the ranks of this host share.  Collective."""
        if self.size > 1 and self.transport.processes:
            self._segment, self.shared_memory = open_segment(rendezvous)
        if self._segment is not None:
            self.calls = self.fingerprints = FingerprintRing(self._segment, self.failures)
            self.crowded = self._segment.size > (os.cpu_count() or 1)
            self.one_host = self._segment.size == self.size
            self._shared_memory = shared = SharedMemoryTransport(self.calls, self.engine, rendezvous)
            self.shared = shared if self.one_host else None
            if not shared.one_copy:
                self.shared_memory += "; process_vm_readv is not permitted, so large arrays are copied twice"
        elif self.size > 1 and self.transport.processes:
            await_transports(rendezvous)
        if rendezvous.local_size == self.size:
            self.arrays = SharedArrays(rendezvous)

    def split(self, rendezvous: ControlPlane) -> HostBackend:
        """The backend of a group of these ranks.  Waiting for its operations also advances those of this backend."""
        made = HostBackend(rendezvous, self.transport.successor(rendezvous), self.engine)
        made.gpu_array_hint = self.gpu_array_hint
        return made

    def core_calls(self) -> tuple[Any, None]:
        """The core's Group for the calls of a communicator, or None.  Nothing else has to describe calls to it."""
        return None if self.calls is None else self.calls.core, None

    @property
    def shares_memory(self) -> bool:
        """Whether this rank has a segment with others of its host; ``shared_memory`` says why not."""
        return self._segment is not None and self._segment.size > 1

    def details(self) -> list[tuple[str, str, str]]:
        """Rows for ``Communicator.explain``: a resource, whether it is used, and why."""
        if not self.transport.processes:
            return []
        return [("shared memory", "in use" if self.shares_memory else "no", self.shared_memory)]

    def allocate(self, shape: Any, dtype: Any) -> Any:
        """An array that the other ranks map, if all are on one host."""
        return np.empty(shape, dtype) if self.arrays is None else self.arrays.allocate(shape, dtype)

    def register(self, buffer: Buffer) -> Array:
        """Raise InvalidArgument: only memory of GPUs is registered."""
        raise InvalidArgument(f"register: expected a backend for GPUs, got {self.name}, which moves any host memory")

    def views(self, x: Buffer) -> list[Any]:
        """The memory of each rank that corresponds to ``x``, which is an array of ``allocate`` or a part of one."""
        if self.arrays is None:
            raise BackendUnavailable(f"views: expected ranks that share memory, got {self.name} on several hosts")
        return list(self.arrays.views(x))

    def exact_group_size(self) -> int:
        """See ``Communicator.exact_group_size``."""
        return self.scheduled.local

    # How operations run.

    def waiter(self) -> Any:
        """Shared memory has no events: a wait polls, unless it waits only for other hosts."""
        outside = self.transport.waiter()
        if not self.shares_memory:
            return outside
        has_events = not self.one_host and type(outside) is not Backoff
        return Backoff(self.crowded, partial(self._sleep, outside) if has_events else None)

    def _sleep(self, outside: Any, seconds: float | None, polled: bool) -> bool:
        """Wait for an event of the transport if the operation in flight waits for other hosts.  Returns whether it did.

        Messages within the host have no events: a wait for both kinds polls first, and sleeps a millisecond at most.
        """
        inside = self._shared_memory is not None and bool(self._shared_memory.active)
        if self.scheduled.arriving or len(self.engine.active) != 1 or (inside and not polled):
            return False
        mark, self._slept_at = self._slept_at, outside.mark()
        outside.pause(mark, 0.001 if inside else seconds)  # returns at once after an event since the last sleep
        return True

    def prepare(self, o: Operation) -> Prepared:
        """How calls like ``o`` run, on any arrays; sends nothing.  Raises InvalidArgument for one that cannot run."""
        options, buffer = o.options, o.send or o.recv
        if buffer is not None and buffer.device is not None:
            raise InvalidArgument(
                f"x: expected memory of the host (backend {self.name}), got {type(buffer.array).__name__} in memory of "
                f"{buffer.place}; {self.gpu_array_hint}"
            )
        if options.algorithm != AUTO and self.size > 1:
            runnable(o.name, options.algorithm, self.size, root=o.root or 0)
        prepared = Prepared(without_memory(o), self, self.scheduled.start)
        if self.fingerprints is not None:
            self.fingerprints.add(prepared)
        if (shared := self.shared) is not None:
            shared.bind(prepared)
        return prepared

    def poll_message(self, src: int, tag: int) -> Envelope | None:
        """The envelope of the next message from ``src``, a rank or ANY, None if none has arrived; raises failures."""
        try:
            with self.engine.lock:
                self.engine.poll()  # receives that are posted come first
                return self.scheduled.matching.poll(src, tag)
        except RankLost as error:  # if this rank then aborts, other ranks name this error as the cause
            self.failures.status.post_failure(error)
            raise

    def resume(self, work: Work[Any]) -> Steps | None:
        """The steps of ``work``, which the core has begun; None if it is complete."""
        with self.engine.lock:
            self.engine.remove(work)  # the core waits for it alone
            shared, left, steps = self.shared, work.core_work, work.steps
        if steps is not None or left is None:  # another thread has advanced it meanwhile
            return steps
        return raising(self._aborted(work)) if shared is None else shared.start(work, left)

    def steps_of(self, work: Work[Any], left: Any) -> Steps:
        """The steps of ``work``, of which the core has begun ``left``."""
        shared = self.shared
        return raising(self._aborted(work)) if shared is None else shared.steps(work, left)

    def _aborted(self, work: Work[Any]) -> KosError:
        """The error of ``work``, whose communicator another thread has aborted."""
        return CollectiveError("the communicator was aborted", call=work)

    def start_all(self, works: Sequence[Work[Any]]) -> None:
        """Launch the Works of a batch together."""
        shared = self.shared
        if shared is not None:
            shared.batch = True
        try:
            for work in works:
                if self.failures.first is not None:
                    work.refuse()
                with nullcontext() if self.tracing is None else self.tracing((work,), False, False):
                    steps = work.prepared.launch(work)
                if steps is not None:
                    self.engine.begin(work, steps)
        finally:
            if shared is not None:
                shared.batch = False

    def route_of(self, name: str, nbytes: int, *_: bool) -> str:
        """The backend and algorithm of an operation on float32; ``nbytes`` is the size of each rank's input."""
        if self.shared is not None:
            return f"{self.name} shared memory"
        if self.transport.is_native(name, nbytes):
            return f"{self.name} native"
        return f"{self.name} {self.scheduled.schedule(Operation(name, self.rank), name, nbytes)}"

    def synchronize(
        self, timeout: float | None = None, stream: int | None = None, until: Callable[[], bool] | None = None
    ) -> None:
        """All operations that the program has not waited for are complete."""
        self.transport.synchronize(self)

    # Which ranks are late.

    def may_sleep(self, work: Work[Any]) -> bool:
        """Whether polling for ``work`` can move no data until another rank begins the call."""
        return work.collective and self.calls is not None and bool(self.calls.missing(work))

    def late(self, work: Work[Any]) -> PendingRanks:
        """Which ranks ``work`` waits for, as far as known, and how an error says that."""
        if self._aborting:  # another thread frees what is read here
            return PendingRanks(words=timeouts.UNKNOWN)
        names, left = self.failures.names, work.core_work  # of a collective in shared memory
        if not work.collective:
            return self._late_in_message(work)
        if late := self.transport.absent(work) if self.calls is None else self.calls.missing(work):
            return PendingRanks(late, timeouts.late(names(late)), absent=True)
        if late := [] if left is None else [rank for rank in range(self.size) if left.missing(rank)]:
            return PendingRanks(late, timeouts.stuck(names(late)))
        if late := self.scheduled.awaited(self.scheduled.tag(work)):
            return PendingRanks(late, timeouts.awaited(names(late)))
        # kos cannot see for which ranks a native call of the transport waits, or its comparison of calls.
        arriving, in_native = work.sequence in self.scheduled.arriving, work.sequence in self.scheduled.native
        others = [rank for rank in range(self.size) if rank != self.rank] if arriving or in_native else []
        return PendingRanks(words=timeouts.UNKNOWN, others=others, all_wait=True, may_be_complete=in_native)

    def _in_flight(self, work: Work[Any], rank: int, receives: bool) -> bool:
        """Whether this end of a message is not complete."""
        if work.core_work is not None:
            return bool(work.core_work.missing(rank) & (native.AWAITS_MESSAGE if receives else native.AWAITS_READ))
        message = work.operation.message
        tag: int = message.recv_tag if receives else message.tag
        waits = receives and self.scheduled.matching.awaits(rank, tag)
        return waits or bool(self.scheduled.messages.in_flight(rank, tag, receives))

    def _late_in_message(self, work: Work[Any]) -> PendingRanks:
        message = work.operation.message
        src, dst = ([] if rank is None else [rank] for rank in (message.src, message.dst))
        if message.src == ANY:
            others = [rank for rank in range(self.size) if rank != self.rank]
            begun = [rank for rank in others if self._in_flight(work, rank, receives=True)]
            src = [rank for rank in begun or others if self.scheduled.messages.end_of(rank) is None]
        if src and dst:
            src = [rank for rank in src if self._in_flight(work, rank, receives=True)]
            dst = [rank for rank in dst if self._in_flight(work, rank, receives=False)]
        names = self.failures.names
        words = [timeouts.unsent(names(src, False), message.recv_tag)] if src or not dst else []
        words += [timeouts.unreceived(names(dst, False))] if dst else []
        ranks = [*src, *(rank for rank in dst if rank not in src)]
        return PendingRanks(ranks, " and ".join(words))

    # Failures.

    def to_error(self, work: Work[Any], error: Exception) -> KosError:
        """The error to raise for a failed operation, whose memory may be freed afterwards."""
        error = self.transport.explain(work, error)
        if self._aborting:  # another thread frees what it uses
            return self._aborted(work)
        ends = ends_group(work, error)
        if ends and work.collective and self.calls is not None and isinstance(error, KosError):
            try:
                self.calls.check(work)
            except KosError as known:  # the failure recorded in shared memory names the cause
                error, known.__context__ = known.with_traceback(None), None
        failure = self.failures.named(work, error)
        if ends:
            self.failures.report(work, failure, self.begun)
        elif isinstance(failure, RankLost | CollectiveTimeout):
            self.failures.status.post_failure(failure)
        return failure

    @property
    def begun(self) -> int:
        """The number of collectives begun on this rank, which is the sequence number of the next."""
        return self.scheduled.begun if (calls := self.calls) is None else calls.begun

    def stops_at(self) -> int:
        """The first collective that this rank does not complete if it ends now."""
        mine = (work for work in self.engine.outstanding() if work.backend is self and work.collective)
        return min((work.sequence for work in mine), default=self.begun)

    def find_failure(self) -> KosError | None:
        """The failure of this communicator, if it can be found without a call.  Called by the watchdog's thread."""
        return self.failures.find()

    def report_end(self, reason: str) -> None:
        """Report to the other ranks that this one begins no more operations, and why."""
        self.failures.report_end(reason, self.stops_at())

    def abort(self, reason: str) -> None:
        """End everything in flight without waiting for other ranks; report the reason to them."""
        self._aborting = True  # operations that end from now on are not reported
        reason = self.transport.abort(reason)
        self.report_end(reason)
        self.failures.first = self.failures.first or CollectiveError(reason)
        self._free()

    def close(self) -> None:
        """Free the resources.  Collective; nothing may be in flight."""
        self._free()
        self.transport.close(self.scheduled.begun)

    def _free(self) -> None:
        closed(self)
        with self.engine.lock:  # held by a thread that waits while it uses these
            calls, self.calls, self.shared = self.calls, None, None
            self.scheduled.calls = None
            if calls is not None:
                calls.close()


def ends_group(work: Work[Any], error: Exception) -> bool:
    """Whether the ranks of the group are out of step after that error.

    This is so after a collective, and after a send that may still be received.
    """
    sends = work.operation.message.dst is not None
    return work.collective or (sends and not isinstance(error, CollectiveMismatch | RankLost))


_open: weakref.WeakSet[Any] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # the end of a forked process is not that of the rank


def at_exit(backend: Any) -> None:
    """Make ``backend`` report, by ``report_end(reason)``, the end of the process if it is still open then."""
    if not _open:
        atexit.register(_report_ends)  # registered late, to run before the hook of ``mpi_job``, which waits
    _open.add(backend)


def closed(backend: Any) -> None:
    """Undo ``at_exit``: ``backend`` is closed."""
    _open.discard(backend)


def _report_ends() -> None:
    """Report the end of this process to the ranks of all groups that it has not closed."""
    for backend in list(_open):
        backend.report_end("its process ended")
