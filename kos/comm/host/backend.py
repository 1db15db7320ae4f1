"""HostBackend: the base of backends whose ranks are processes, which a transport connects.

Ranks that share memory compare their calls in it, and detect missing and dead ranks.  If the whole group is on one
host, its collectives run through that memory.  Between hosts the transport compares calls and reports failures.
A new transport is a subclass: ``tcp.py`` with ``tcp_messages.py`` is the example.  Its name goes to ``registry.py``.
"""

from __future__ import annotations

import atexit
import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kos.comm import timeouts, watchdog
from kos.comm.backend import UNMADE, ends_group
from kos.comm.control.base import Rendezvous
from kos.comm.control.mpi_job import Backoff
from kos.comm.host.fingerprints import Fingerprints
from kos.comm.host.shared import ABORTED, CallRing, Node, Segment, SharedArrays, open_segment
from kos.comm.operation import Operation
from kos.comm.prepared import Prepared
from kos.comm.scheduled import ScheduledBackend
from kos.comm.schedules.execute import Transport
from kos.comm.work import Engine, Idle, Steps, Work
from kos.errors import BackendUnavailable, CollectiveError, CollectiveTimeout, KosError, RankLost
from kos.memory import Buffer

AWAITS_READ, AWAITS_MESSAGE = 1, 2
"""What a message waits for, as in ``core.h``: its receipt by a rank, or one from it."""


class NamingTransport(Transport, Protocol):
    """A transport that names the messages in flight."""

    def awaited(self, tag: int) -> list[int]:
        """The peers of the messages in flight with that tag."""

    def in_flight(self, rank: int, tag: int, receives: bool) -> bool:
        """Whether a message with that tag from or to that rank is in flight."""


class MessagingBackend(ScheduledBackend):
    """Names the ranks that a call waits for, and shares the arrays of ``allocate`` between the ranks of one host."""

    transport: NamingTransport
    arrays: SharedArrays | None = None

    def allocate(self, shape: Any, dtype: Any) -> Any:
        return super().allocate(shape, dtype) if self.arrays is None else self.arrays.allocate(shape, dtype)

    def views(self, x: Buffer) -> list[Any]:
        if self.arrays is None:
            raise BackendUnavailable(f"views: expected ranks that share memory, got {self.name} on several hosts")
        return list(self.arrays.views(x))

    @abstractmethod
    def absent(self, work: Work[Any]) -> list[int]:
        """The ranks that are known not to have begun a collective."""

    def behind(self, work: Work[Any]) -> list[int]:
        """The ranks that a collective in shared memory waits for."""
        return []

    def late(self, work: Work[Any]) -> tuple[list[int], str | None]:
        """The ranks that ``work`` waits for, as far as known, and the text for an error."""
        if not work.collective:
            return self._late_in_message(work)
        if late := self.absent(work):
            return late, timeouts.late(self.ledger.names(late))
        if late := self.behind(work):
            return late, timeouts.stuck(self.ledger.names(late))
        late = self.transport.awaited(self._tag(work))
        return late, timeouts.awaited(self.ledger.names(late)) if late else None

    def waits_for(self, work: Work[Any]) -> list[int]:
        return [self.ledger.world[rank] for rank in self.late(work)[0]]

    def _in_flight(self, work: Work[Any], rank: int, receives: bool) -> bool:
        """Whether this end of a message is not complete."""
        message = work.operation.message
        return self.transport.in_flight(rank, message.recv_tag if receives else message.tag, receives)

    def _late_in_message(self, work: Work[Any]) -> tuple[list[int], str]:
        message = work.operation.message
        src, dst = ([] if rank is None else [rank] for rank in (message.src, message.dst))
        if src and dst:
            src = [rank for rank in src if self._in_flight(work, rank, receives=True)]
            dst = [rank for rank in dst if self._in_flight(work, rank, receives=False)]
        names = self.ledger.names
        words = [timeouts.unsent(names(src, False), message.recv_tag)] if src or not dst else []
        words += [timeouts.unreceived(names(dst, False))] if dst else []
        return [*src, *(rank for rank in dst if rank not in src)], " and ".join(words)

    def timed_out(self, work: Work[Any], seconds: float | None) -> KosError:
        late, words = self.late(work)
        return self.ledger.overdue(late, work, seconds, words) if late else super().timed_out(work, seconds)

    def report_wait(self, work: Work[Any] | None) -> None:
        self.ledger.board.post_wait(None if work is None else self.waits_for(work))

    def failed(self, work: Work[Any], error: Exception) -> KosError:
        failure = super().failed(work, error)
        if isinstance(failure, RankLost | CollectiveTimeout):
            self.ledger.board.post_failure(failure)
        return failure


class HostBackend(MessagingBackend):
    """Adds shared memory to a Backend that has a transport."""

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None) -> None:
        super().__init__(rendezvous, engine)
        self._segment: Segment | None = None
        self.shared_memory = "a group of one"  # the segment's description, or why none is shared
        self._calls: CallRing | None = None
        self.fingerprints: Fingerprints | None = None  # None: this rank compares no calls
        self._node: Node | None = None
        self.crowded, self.one_host = False, self.size == 1
        self._begun = 0  # the number of the next collective
        self._aborting = False
        self._reported: int | None = None  # the earliest collective whose failure was reported to other hosts
        try:
            self._share_memory(rendezvous)
        except BaseException:
            HostBackend.report_end(self, UNMADE)  # a subclass has no transport yet
            self._free()
            if self._segment is not None:
                self._segment.close()
            raise

    def _share_memory(self, rendezvous: Rendezvous) -> None:
        """Open what the ranks of this host share.  Collective."""
        if self.size > 1:
            self._segment, self.shared_memory = open_segment(rendezvous)
        if self._segment is not None:
            self._calls = self.fingerprints = CallRing(self._segment, self.ledger)
            self.crowded = self._segment.size > (os.cpu_count() or 1)
            self.one_host = self._segment.size == self.size
            if self.one_host:
                self.transport = self._node = Node(self._calls, self.engine, rendezvous)
                if not self._node.one_copy:
                    self.shared_memory += "; process_vm_readv is not permitted, so large arrays are copied twice"
        if rendezvous.local_size == self.size:
            self.arrays = SharedArrays(rendezvous)

    def eager(self, comm: Any) -> Any:
        """What makes the calls of ``comm`` in the core as far as they need no Python; None if it makes none."""
        if self._node is None or self._calls is None or comm._tracing is not None:
            return None
        return self._node.eager(comm, self)

    @property
    def calls(self) -> CallRing | None:
        """The comparison of calls between the ranks of this host, shared with GPU backends of the communicator."""
        return self._calls

    @property
    def shares_memory(self) -> bool:
        """Whether this rank has a segment with others of its host; ``shared_memory`` says why not."""
        return self._segment is not None and self._segment.size > 1

    def details(self) -> list[tuple[str, str, str]]:
        return [("shared memory", "in use" if self.shares_memory else "no", self.shared_memory)]

    def idle(self) -> Idle:
        """Shared memory and MPI have no events: a wait polls."""
        return Backoff(self.crowded)

    def agree(self, work: Work[Any]) -> Callable[[], bool] | None:
        self._begun = work.sequence + 1
        return self._calls.publish(work) if self._calls is not None else None

    def prepare(self, o: Operation) -> Prepared:
        prepared = super().prepare(o)
        if self.fingerprints is not None:
            self.fingerprints.add(prepared)
        if self._node is not None:
            self._node.bind(prepared)
        return prepared

    def resume(self, work: Work[Any], left: Any) -> Steps | None:
        """The steps of ``work``, of which the core has ``left`` something; None if it is complete."""
        assert self._node is not None
        return self._node.start(work, left)

    def start_all(self, works: Sequence[Work[Any]], overlap: bool) -> None:
        if (node := self._node) is None:
            return super().start_all(works, overlap)
        node.batch = True
        try:
            super().start_all(works, overlap)
        finally:
            node.batch = False

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        return f"{self.name} shared memory" if self._node is not None else super().route_of(name, nbytes)

    def absent(self, work: Work[Any]) -> list[int]:
        return self._calls.missing(work) if self._calls is not None else []

    def may_sleep(self, work: Work[Any]) -> bool:
        return work.collective and bool(self.absent(work))

    def behind(self, work: Work[Any]) -> list[int]:
        left = work.left
        return [] if left is None else [rank for rank in range(self.size) if left.missing(rank)]

    def _in_flight(self, work: Work[Any], rank: int, receives: bool) -> bool:
        if work.left is None:
            return super()._in_flight(work, rank, receives)
        return bool(work.left.missing(rank) & (AWAITS_MESSAGE if receives else AWAITS_READ))

    def failed(self, work: Work[Any], error: Exception) -> KosError:
        if self._aborting:  # another thread frees what it uses
            return CollectiveError(f"{work}: the communicator was aborted")
        if not ends_group(work, error):
            return super().failed(work, error)
        if work.collective and self._calls is not None and isinstance(error, KosError) and not self.lost(error):
            try:
                self._calls.check(work)
            except KosError as known:  # the failure recorded in shared memory names the cause
                error, known.__context__ = known.with_traceback(None), None
        failure = super().failed(work, error)
        sequence = work.sequence if work.collective else self.begun
        shared = self.ledger.shared(failure, self.lost(failure), None if work.collective else work)
        if self._calls is not None:
            self._calls.fail(shared, sequence)
        if self._reported is None or sequence < self._reported:  # other ranks may wait in an earlier collective
            self._reported = sequence
            self.report_failure(shared, sequence)
        return failure

    def lost(self, error: KosError) -> bool:
        """Whether ``error`` makes this rank's device unusable."""
        return False

    def report_failure(self, failure: KosError, sequence: int) -> None:
        """Make the ranks of other hosts raise the failure from collective ``sequence`` on."""

    @property
    def begun(self) -> int:
        """The number of collectives begun on this rank, which is the sequence number of the next."""
        return self._begun if self._calls is None else self._calls.begun

    def report_end(self, reason: str) -> None:
        """Report to the other ranks that this one begins no more operations, and why."""
        if self._calls is not None:
            self._calls.fail(self.ledger.end(reason, self.cause()), self.stops_at())
            self._calls.mark_closed(ABORTED)

    def cause(self) -> KosError | None:
        """The failure because of which this rank ends, of this group or of any other."""
        return self.ledger.cause(self.broken, self._calls.killed() if self._calls is not None else None)

    def find_failure(self) -> KosError | None:
        calls = self._calls
        return self.broken or (None if calls is None else calls.find_failure())

    def stops_at(self) -> int:
        """The first collective that this rank does not complete if it ends now."""
        mine = (work for work in self.engine.outstanding() if work.backend is self and work.collective)
        return min((work.sequence for work in mine), default=self.begun)

    def abort(self, reason: str) -> None:
        self._aborting = True  # operations that end from now on are not reported
        self.report_end(reason)
        self.broken = self.broken or CollectiveError(reason)
        self._free()

    def close(self) -> None:
        self._free()

    def _free(self) -> None:
        closed(self)
        self._open = False
        calls, self._calls, self._node = self._calls, None, None
        watchdog.wait_for_check()
        if calls is not None:
            calls.close()


class Ending(Protocol):
    """A backend that reports the end of its process to the other ranks."""

    def report_end(self, reason: str) -> None: ...


_open: weakref.WeakSet[Ending] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # the end of a forked process is not that of the rank


def at_exit(backend: Ending) -> None:
    """Make ``backend`` report the end of the process if it is still open then."""
    if not _open:
        atexit.register(_report_ends)  # registered late, to run before the hook of ``mpi_job``, which waits
    _open.add(backend)


def closed(backend: Ending) -> None:
    """Undo ``at_exit``: ``backend`` is closed."""
    _open.discard(backend)


def _report_ends() -> None:
    """Report the end of this process to the ranks of all groups that it has not closed."""
    for backend in list(_open):
        backend.report_end("its process ended")
