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
from time import time_ns
from typing import Any, Protocol

from kos.comm import timeouts, watchdog
from kos.comm.backend import UNMADE, ends_group
from kos.comm.host.shared import (
    ABORTED,
    Calls,
    Segment,
    SharedArrays,
    SharedCollectives,
    SharedMessages,
    open_segment,
)
from kos.comm.operation import Call, Message
from kos.comm.recorder import COMPLETED
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.rendezvous.mpi_job import Backoff
from kos.comm.scheduled import ScheduledBackend
from kos.comm.schedules.execute import Transport
from kos.comm.work import Engine, Idle, Steps, Work
from kos.errors import BackendUnavailable, CollectiveError, CollectiveTimeout, KosError, RankLost
from kos.memory import Buffer


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
    def absent(self, call: Call) -> list[int]:
        """The ranks that are known not to have begun a collective."""

    def behind(self) -> list[int]:
        """The ranks that the current collective in shared memory waits for."""
        return []

    def late(self, call: Call) -> tuple[list[int], str | None]:
        """The ranks that ``call`` waits for, as far as known, and the text for an error."""
        if not call.collective:
            return self._late_in_message(call.operation.message)
        if late := self.absent(call):
            return late, timeouts.late(self.ledger.names(late))
        if late := self.behind():
            return late, timeouts.stuck(self.ledger.names(late))
        late = self.transport.awaited(self._tag(call))
        return late, timeouts.awaited(self.ledger.names(late)) if late else None

    def waits_for(self, call: Call) -> list[int]:
        return [self.ledger.world[rank] for rank in self.late(call)[0]]

    def _late_in_message(self, message: Message) -> tuple[list[int], str]:
        src, dst = ([] if rank is None else [rank] for rank in (message.src, message.dst))
        if src and dst:
            src = [rank for rank in src if self.transport.in_flight(rank, message.recv_tag, receives=True)]
            dst = [rank for rank in dst if self.transport.in_flight(rank, message.tag, receives=False)]
        names = self.ledger.names
        words = [timeouts.unsent(names(src, False), message.recv_tag)] if src or not dst else []
        words += [timeouts.unreceived(names(dst, False))] if dst else []
        return [*src, *(rank for rank in dst if rank not in src)], " and ".join(words)

    def timed_out(self, call: Call, seconds: float | None) -> KosError:
        late, words = self.late(call)
        return self.ledger.overdue(late, call, seconds, words) if late else super().timed_out(call, seconds)

    def report_wait(self, call: Call | None) -> None:
        self.ledger.board.post_wait(None if call is None else self.waits_for(call))

    def failed(self, call: Call, error: Exception) -> KosError:
        failure = super().failed(call, error)
        if isinstance(failure, RankLost | CollectiveTimeout):
            self.ledger.board.post_failure(failure)
        return failure


class HostBackend(MessagingBackend):
    """Adds shared memory to a Backend that has a transport."""

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None) -> None:
        super().__init__(rendezvous, engine)
        self._segment: Segment | None = None
        self.shared_memory = "a group of one"  # the segment's description, or why none is shared
        self._calls: Calls | None = None
        self._shared: SharedCollectives | None = None
        self._mail: SharedMessages | None = None
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
            self._calls = Calls(self._segment, self.ledger)
            self.crowded = self._segment.size > (os.cpu_count() or 1)
            self.one_host = self._segment.size == self.size
            if self.one_host:
                self._shared = SharedCollectives(self._calls, self.crowded, rendezvous, self._by_messages)
                self.transport = self._mail = SharedMessages(self._calls, self._shared.direct, self.crowded)
                if not self._shared.direct.usable:
                    self.shared_memory += "; process_vm_readv is not permitted, so large arrays are copied twice"
        if self.one_host:
            self.arrays = SharedArrays(rendezvous)

    def carry(self, transport: NamingTransport) -> None:
        """Send messages over ``transport``; in shared memory, those that it cannot carry."""
        if self._mail is None:
            self.transport = transport
        else:
            self._mail.other = transport

    @property
    def calls(self) -> Calls | None:
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

    def agree(self, call: Call) -> Callable[[], bool] | None:
        self._begun = call.sequence + 1
        return self._calls.publish(call) if self._calls is not None else None

    def start(self, call: Call) -> Work[Any] | None:
        """Launch a prepared call; None if it was launched before, and is complete already."""
        shared = self._shared
        if call.plan is None or shared is None or self.broken is not None or self.ledger.board.last is not None:
            return super().start(call)
        # Collectives need no lock: one thread at a time uses a communicator, and a progress thread what is in flight.
        try:
            if call.collective:
                steps = shared.start(call)
            else:
                with self.engine.lock:
                    steps = self._by_mailbox(call)
        except BaseException as error:
            steps = _raise(error)
        if steps is not None:
            return self.engine.launch(call, self, steps)
        record = call.record
        if record is not None and record[0] is call.description:  # ``completed``, inlined
            record[COMPLETED] = time_ns()
        return None

    def start_all(self, calls: Sequence[Call], overlap: bool) -> list[Work[Any]]:
        if self._mail is not None:
            self._mail.batch = True
        try:
            return [self.start(call) or Work(call, self, None) for call in calls]
        finally:
            if self._mail is not None:
                self._mail.batch = False

    def _steps(self, call: Call) -> Steps | None:
        shared = self._shared
        if not call.collective:
            return self._message(call) if self._mail is None else self._by_mailbox(call)
        if shared is not None and (call.plan is not None or shared.prepare(call)):
            return shared.start(call)
        return self._by_messages(call)

    def _by_mailbox(self, call: Call) -> Steps | None:
        """Start messages through shared memory.  Returns their steps, or None if they are complete."""
        assert self._mail is not None
        messages = self._mail.start(call)
        return self._finish(messages) if messages else None

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        return f"{self.name} shared memory" if self._shared is not None else super().route_of(name, nbytes)

    def absent(self, call: Call) -> list[int]:
        return self._calls.missing(call) if self._calls is not None else []

    def behind(self) -> list[int]:
        return self._shared.behind() if self._shared is not None else []

    def failed(self, call: Call, error: Exception) -> KosError:
        if self._aborting:  # another thread frees what it uses
            return CollectiveError(f"{call}: the communicator was aborted")
        if not ends_group(call, error):
            return super().failed(call, error)
        if call.collective and self._calls is not None and isinstance(error, KosError) and not self.lost(error):
            try:
                self._calls.check(call)
            except KosError as known:  # the failure recorded in shared memory names the cause
                error, known.__context__ = known.with_traceback(None), None
        failure = super().failed(call, error)
        sequence = call.sequence if call.collective else self.begun
        shared = self.ledger.shared(failure, self.lost(failure), None if call.collective else call)
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
        mine = (work.call for work in self.engine.outstanding() if work.backend is self)
        return min((call.sequence for call in mine if call.collective), default=self.begun)

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
        calls, mail, self._calls, self._shared, self._mail = self._calls, self._mail, None, None, None
        watchdog.wait_for_check()
        if mail is not None:
            mail.close()
        if calls is not None:
            calls.close()


def _raise(error: BaseException) -> Steps:
    """Steps that fail: ``Work`` handles the error."""
    raise error
    yield


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
