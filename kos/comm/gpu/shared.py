"""What the backends of one communicator share on a GPU: its streams, the comparison of its calls, and its failure.

Ranks that share a host compare their calls in shared memory.  A communicator has one such segment: that of the backend
for host memory where there is one, else its own.  Between hosts the first rank of each sends its calls to the others.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from kos.comm.backend import Backend
from kos.comm.control.base import Rendezvous
from kos.comm.failures import EndedEarly, Ledger, again
from kos.comm.gpu.order import Streams
from kos.comm.host.backend import HostBackend, at_exit, closed
from kos.comm.host.shared import ABORTED, CallRing, between_hosts, open_segment
from kos.comm.work import Work
from kos.errors import CollectiveError, CollectiveTimeout, KosError, RankLost

_UNCONFIRMED = 64
"""Collectives that are queued before they are compared with those of the other ranks, as far as these have arrived."""
_REPORT_SECONDS = 1.0
"""In which a rank whose work on the GPU ended early reports why: four ticks of its watchdog."""
_DEAD_SECONDS = 0.5
"""What a GPU waits for may still end in so long after the end of a rank's process was found."""


class CommState:
    """The state of one communicator on one GPU, whichever of its backends carries a call."""

    def __init__(self, rendezvous: Rendezvous, ledger: Ledger, backend: Any, host: Backend | None) -> None:
        self.ledger = ledger
        self.backends: Sequence[Any] = (backend,)  # what fails together, in the order in which it is ended
        self.streams = Streams(backend.device)
        self.lock = threading.RLock()  # the user's thread or the watchdog reports a failure
        self.calls: CallRing | None = None
        self.segment = "a group of one"  # how calls are compared, or why they are not
        self.last: Work[Any] | None = None  # the last collective
        self.compare_at = _UNCONFIRMED  # the collective at which calls are compared again
        self._confirmed = 0  # collectives that every rank of the host is known to have begun alike
        self._owns_calls = False
        self._lost: KosError | None = None  # a rank does nothing more, as far as the watchdog knows
        self._look_at = 0.0  # when the watchdog looks for such ranks again
        self._seen: tuple[int, float] = -1, 0.0  # the last call that the watchdog saw, and when it first did
        self.broken: KosError | None = None
        if isinstance(host, HostBackend) and host.calls is not None:
            self.calls, self.segment = host.calls, host.shared_memory
        elif rendezvous.size > 1:
            segment, self.segment = open_segment(rendezvous)
            if segment is not None:
                self.calls, self._owns_calls = CallRing(segment, ledger), True
                at_exit(self)
        self._hosts = None if rendezvous.size == 1 else between_hosts(rendezvous, self.calls)

    def confirm(self) -> None:
        """Compare the calls of the ranks of this host since this was done last: many at a time costs little."""
        if self.calls is not None and self.last is not None:
            self.compare_at = self.last.sequence + _UNCONFIRMED
            self._confirmed = self.calls.compare(self.last, self._confirmed)

    def missing(self, work: Work[Any]) -> list[int]:
        """The ranks of this host that have not begun ``work``."""
        return self.calls.missing(work) if self.calls is not None and work.collective else []

    def late(self, work: Work[Any]) -> list[int]:
        """The ranks that ``work``, or what is queued with it, waits for, as far as known."""
        message, me = work.operation.message, self.ledger.rank
        return (
            self.missing(work)
            or [rank for backend in self.backends for rank in backend.awaited]
            or sorted({rank for rank in (message.src, message.dst) if rank not in (None, me)})
            or (self.missing(self.last) if self.last is not None else [])
        )

    @property
    def others(self) -> list[int]:
        """The ranks of the group but this one."""
        return [rank for rank in range(len(self.ledger.world)) if rank != self.ledger.rank]

    def arrived(self, work: Work[Any]) -> list[int]:
        """The ranks that are known to have begun ``work``, and may wait for a stream."""
        if self.calls is None or not work.collective:
            return []
        missing = self.missing(work)
        return [rank for rank in self.others if rank not in missing]

    def _elsewhere(self) -> list[int]:
        """The ranks of the world that other communicators of this GPU wait for: kernels run one after another."""
        queued = list(self.ledger.board.queued.items())
        return sorted({rank for backend, ranks in queued if backend not in self.backends for rank in ranks})

    def report_wait(self, work: Work[Any] | None) -> None:
        """Show the other ranks for whom this one waits in ``work``; None: for nobody."""
        board, world = self.ledger.board, self.ledger.world
        if work is None:
            return board.post_wait(None)
        known = [world[rank] for rank in self.late(work)] or self._elsewhere()
        # Any may be late: first those that do not wait, for a board has few places.
        board.post_wait(known or sorted((world[r] for r in self.others), key=lambda r: board.awaited(r) is not None))

    def overdue(self, work: Work[Any], seconds: float | None) -> KosError | None:
        """The error of ``work``, whose time is up; None if nothing is known of the ranks that delay it."""
        others, ledger = self.others, self.ledger
        if late := self.late(work):
            return ledger.overdue(late, work, seconds, arrived=self.arrived(work))
        if elsewhere := self._elsewhere():
            return ledger.overdue([], work, seconds, elsewhere=elsewhere)
        error = ledger.overdue(others, work, seconds)
        few = len(error.ranks) < len(others) or all(ledger.board.halted(rank) for rank in error.ranks)
        return error if error.ranks and few else None

    def look_for_the_lost(self, latest: Work[Any]) -> None:
        """Raise what concerns this rank: calls that differ, another rank's failure, RankLost for a rank that is gone.

        Whatever this rank has queued may wait for that one, replays of graphs too, which are no calls.  What may still
        end has half a second for that.
        """
        calls = self.calls
        if calls is None:
            return
        self.confirm()
        self._exchange()
        calls.raise_failure(calls.begun - 1)
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at, known = now + _DEAD_SECONDS, self._lost
        try:
            killed = calls.killed()
            self._lost = None if killed is None else self.ledger.lost(killed, "its process ended", None, None, 0.0)
            calls.raise_failure(sys.maxsize)
        except RankLost as error:
            self._lost = error
        except KosError:  # of a collective that this rank has not reached
            pass
        if known is not None and self._lost is not None:
            raise again(self._lost, f"{latest}: {self._lost}")

    def _exchange(self) -> None:
        """Compare the calls with those of other hosts, and exchange failures."""
        if self._hosts is not None and self.last is not None:
            with self.lock:
                self._hosts.send()
                self._hosts.receive(self.last.group)

    def last_of(self, backend: Backend) -> Work[Any] | None:
        """The last collective, if ``backend`` carries it and it does not end before all ranks have arrived."""
        o = self.last
        mine = o is not None and o.backend is backend and o.operation.root is None
        return o if mine else None

    def look_for_the_late(self, now: float, backend: Backend) -> None:
        """Raise CollectiveTimeout where ranks of this host did not begin the last call, one of ``backend``, in time."""
        o = self.last_of(backend)
        if o is None:
            return
        timeout = o.operation.options.timeout
        if self._seen[0] != o.sequence:
            self._seen = o.sequence, now
        elif timeout is not None and now - self._seen[1] > timeout and (absent := self.missing(o)):
            arrived = [rank for rank in range(len(self.ledger.world)) if rank not in absent]
            raise self.ledger.overdue(absent, o, timeout, arrived=arrived)

    def cause(self, o: Work[Any], error: KosError) -> KosError:
        """What the other ranks of the host know better: another failure, calls that differ, a rank that died."""
        calls = self.calls
        if calls is None:
            return error
        try:
            if isinstance(error, EndedEarly):
                self._exchange()
                calls.raise_failure(sys.maxsize)  # of any call: it ended this one
            if o.collective and o.sequence >= 0:  # else a wait, which was no call
                calls.check(o)
        except KosError as known:
            known.__context__ = None  # which says the same, less well
            return known.with_traceback(None)
        if isinstance(error, CollectiveTimeout | EndedEarly) and (killed := calls.killed()) is not None:
            return self.ledger.lost(killed, "its process ended", o, None, 0.0)
        return error

    def explained(self, o: Work[Any], error: KosError) -> KosError:
        """The cause, which another rank may report a little later where the error is EndedEarly.

        Where nobody does, the ranks waited for are to blame that are known to be gone, late or waiting themselves.
        """
        deadline = time.monotonic() + _REPORT_SECONDS
        while (known := self.cause(o, error)) is error and isinstance(error, EndedEarly):
            if self.calls is None or time.monotonic() > deadline:
                return self._unexplained(error)
            time.sleep(0.01)
        if isinstance(error, EndedEarly) and error.unexplained is CollectiveError:  # it may have a cause of its own
            return again(known, f"{known}; here: {error}")
        return known

    def _unexplained(self, error: EndedEarly) -> KosError:
        board, world = self.ledger.board, self.ledger.world
        others = [rank for rank in world if rank != world[self.ledger.rank]]
        known = [rank for rank in others if board.halted(rank) or board.failure(rank) is not None]
        waited = [rank for rank in error.ranks if rank in known or board.awaited(rank) is not None]
        if late := [world.index(rank) for rank in waited or known]:
            return self.ledger.overdue(late, error, None)
        return error.unexplained(str(error))

    def report(self, o: Work[Any], failure: KosError, lost: bool) -> None:
        """Have the other ranks of the host raise it, too; ``lost``: this rank's GPU is of no more use."""
        reported = self.ledger.shared(failure, lost, None if o.collective else o)
        if self.calls is not None:
            begun = o.collective and o.sequence >= 0
            self._fail(self.calls, reported, o.sequence if begun else self.calls.begun)

    def _fail(self, calls: CallRing, failure: KosError, sequence: int) -> None:
        """Report the failure to the other ranks of this host, and its first one to other hosts."""
        calls.fail(failure, sequence)
        if self._hosts is not None:
            with self.lock:
                self._hosts.send()

    def post_end(self, reason: str) -> None:
        """Before an abort: the other ranks may wait for any of what this one has queued."""
        if self.calls is not None:
            end = self.ledger.end(reason, self.ledger.cause(self.broken, self.calls.killed()))
            self._fail(self.calls, end, 0 if self.streams.keepers else self.calls.begun)

    def report_end(self, reason: str) -> None:
        """Report to the other ranks that this one begins nothing more, and why, if no host backend reports it."""
        if self.calls is not None and self._owns_calls:
            self.post_end(reason)
            self.calls.mark_closed(ABORTED)

    def close(self, orderly: bool = False) -> None:
        """Leave the segment.  If ``orderly``, raises CollectiveMismatch if the last calls of another host differ."""
        closed(self)
        hosts, self._hosts = self._hosts, None
        try:
            if hosts is not None:
                hosts.close(self.last.group if orderly and self.last is not None else "")
        finally:
            calls, self.calls = self.calls, None
            if calls is not None and self._owns_calls:
                calls.close()
