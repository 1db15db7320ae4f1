"""What the backends of one communicator share on a GPU: streams, the comparison of calls, and the failure log.

Ranks that share a host compare their calls in shared memory.  A communicator has one such segment: that of the backend
for host memory where there is one, else its own.  Between hosts calls are compared only after a timeout, or after work
that ended early: the first rank of each host then sends its last calls to the others, through the hub.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np

from kos.comm.control.base import ControlPlane
from kos.comm.control.notices import Channel
from kos.comm.failures import EndedEarly, FailureLog, PendingRanks
from kos.comm.gpu.order import Streams
from kos.comm.host.host_backend import HostBackend, at_exit, closed
from kos.comm.host.shared import FingerprintRing, open_segment
from kos.comm.prepared import Prepared, described
from kos.comm.work import Work
from kos.errors import CollectiveError, CollectiveTimeout, KosError, RankLost
from kos.memory.pool import pinned_empty

_UNCONFIRMED = 64
"""Collectives that are queued before they are compared with those of the other ranks, as far as these have arrived."""
_REPORT_SECONDS = 1.0
"""In which other ranks report why work on the GPU ended early or came late: four ticks of their watchdogs."""
_DEAD_SECONDS = 0.5
"""What a GPU waits for may still end in so long after the end of a rank's process was found."""


class CommState:
    """What one communicator on one GPU compares between ranks, and its failure.  All routes share it."""

    __slots__ = ("__dict__", "__weakref__", "last")  # the core writes it

    def __init__(self, rendezvous: ControlPlane, failures: FailureLog, backend: Any, host: HostBackend | None) -> None:
        self.failures = failures
        self._backend = backend
        self.streams = Streams(backend.device)
        self.lock = threading.RLock()  # the user's thread or the watchdog reports a failure
        self.calls: FingerprintRing | None = None
        self.segment: str  # how calls are compared, or why they are not
        self.last: Work[Any] | None = None  # the last collective
        self.ended = False
        """Whether what was in flight has been ended, because of ``failures.first``."""
        self._abort_flag: np.ndarray[Any, Any] | None = None  # made when asked
        self._owns_calls = False
        self._lost: KosError | None = None  # a rank does nothing more, as far as the watchdog knows
        self._look_at = 0.0  # when the watchdog looks for such ranks again
        self._seen: tuple[int, float] = -1, 0.0  # the last call that the watchdog saw, and when it first did
        if host is not None and host.calls is not None:
            self.calls, self.segment = host.calls, host.shared_memory
        else:
            segment, self.segment = open_segment(rendezvous)
            if segment is not None:
                self.calls, self._owns_calls = FingerprintRing(segment, failures), True
                at_exit(self)
        if self.calls is not None:
            self.calls.core.compare_at = _UNCONFIRMED  # the collective at which calls are compared again
        self._channel: Channel | None = None
        self._sent = -1  # the number of calls when they were last sent to other hosts
        alone = self.calls is None or self.calls.segment.size < rendezvous.size
        if rendezvous.size > 1 and alone and rendezvous.channel is not None:
            self._channel = rendezvous.channel
            failures.add_reporter(self._channel)

    @property
    def abort_flag(self) -> int:
        """Address of a flag that is not 0 after ``mark_ended``."""
        if self._abort_flag is None:
            self._abort_flag = pinned_empty(1, np.uint64, self.streams.device)
            self._abort_flag[0] = self.ended
        return int(self._abort_flag.__array_interface__["data"][0])

    def mark_ended(self) -> None:
        """Set the abort flag.  Called before operations in flight are ended: their results are incomplete."""
        if self._abort_flag is not None:
            self._abort_flag[0] = 1

    # Comparing calls.

    def compare_host_calls(self, prepared: Prepared) -> None:
        """Compare calls on host memory like ``prepared`` with calls on GPUs, if their backend has no ring for both."""
        if self._owns_calls and self.calls is not None:
            self.calls.add(prepared)

    def announce_on_host(self, work: Work[Any]) -> None:
        """Publish that this rank begins ``work``, a call on host memory, if ``compare_host_calls`` prepared it."""
        calls = self.calls  # another thread may end the communicator
        if self._owns_calls and calls is not None and work.collective:
            calls.announce(work)
            self.last = work

    def confirm(self) -> None:
        """Compare the calls of the ranks of this host since the last comparison: many at a time, which costs little."""
        calls, last = self.calls, self.last  # another thread may end the communicator
        if calls is not None and last is not None:
            calls.core.compare_at = last.sequence + _UNCONFIRMED
            calls.confirm(last)

    def _read_reports(self) -> None:
        """Record the reports of other hosts.  If one has asked for it, compare their calls with those of this host."""
        if self._channel is None or self.calls is None:
            return
        first = self.calls.segment.rank == 0
        self._channel.record_deaths()
        if self._channel.receive("compare") and first:
            self._send_calls()
        for calls in self._channel.receive("calls"):
            if first:
                self._compare(*calls)

    def _send_calls(self) -> None:
        """Send the last calls of this rank to other hosts.  It does so once, because many hosts may ask."""
        assert self._channel is not None and self.calls is not None
        if self.calls.begun == self._sent:
            return
        self._sent = self.calls.begun
        start, marks = self.calls.since(0)
        texts = {mark: self.calls.texts[mark].decode() for mark in marks if mark in self.calls.texts}
        self._channel.send("calls", start, marks, texts)

    def _compare(self, rank: int, first: int, theirs: list[int], texts: dict[str, str]) -> None:
        """Report the first of the calls of that rank, from the ``first``-th on, that differs from this rank's."""
        if self.calls is None or self.last is None:  # this rank has begun none
            return
        start, mine = self.calls.since(first)
        for sequence, pair in enumerate(zip(mine, theirs[start - first :], strict=False), start):
            if pair[0] != pair[1]:
                known = self.calls.texts.get(pair[0]), texts.get(str(pair[1]), "").encode()
                words = [described(text, sequence) if text else (f"collective #{sequence}", {}) for text in known]
                both = (self.failures.rank, *words[0]), (rank, *words[1])
                self.calls.raise_everywhere(self.failures.mismatch(self.last.group, *both), sequence)

    # Which ranks are late.

    def missing(self, work: Work[Any]) -> list[int]:
        """The ranks of this host that have not begun ``work``."""
        return calls.missing(work) if (calls := self.calls) is not None and work.collective else []

    def late(self, work: Work[Any], words: str | None) -> PendingRanks:
        """The ranks that ``work``, or what is queued with it, waits for, as far as known."""
        message, me, missing = work.operation.message, self.failures.rank, self.missing(work)
        others = [rank for rank in range(len(self.failures.world)) if rank != me]
        ranks = (
            missing
            or self._backend.awaited
            or sorted({rank for rank in (message.src, message.dst) if rank not in (None, me)})
            or (self.missing(self.last) if self.last is not None else [])
        )
        if ranks:
            arrived = others if self.calls is not None and work.collective else []
            return PendingRanks(ranks, arrived=[rank for rank in arrived if rank not in missing], absent=bool(missing))
        # Those that other communicators of this GPU wait for: kernels run one after another.
        queued = list(self.failures.status.queued.items())
        elsewhere = sorted({rank for backend, each in queued if backend is not self._backend for rank in each})
        return PendingRanks((), words, elsewhere=elsewhere, others=others)

    # What the watchdog looks at.

    def look_for_the_lost(self, latest: Work[Any]) -> None:
        """Raise what concerns this rank: calls that differ, another rank's failure, RankLost for a rank that is gone.

        Whatever this rank has queued may wait for that one, replays of graphs too, which are no calls.  What may still
        end has half a second for that.
        """
        calls = self.calls
        if calls is None:
            return
        self.confirm()  # also finds the end of a rank that has not begun the last call
        self._read_reports()
        self.failures.raise_reported(calls.begun - 1, latest)
        calls.raise_failure(calls.begun - 1)
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at, known = now + _DEAD_SECONDS, self._lost
        try:
            killed = calls.killed()
            self._lost = None if killed is None else self.failures.ended(killed)
            calls.raise_failure(sys.maxsize)
        except RankLost as error:
            self._lost = error
        except KosError:  # of a collective that this rank has not reached
            pass
        if known is not None and self._lost is not None:
            raise self._lost.copy(f"{latest}: {self._lost}")

    def last_on_gpu(self) -> Work[Any] | None:
        """The last collective, if it is on the GPU and cannot complete before all ranks have arrived."""
        o = self.last
        return o if o is not None and o.backend is self._backend and o.operation.root is None else None

    def look_for_the_late(self, now: float) -> None:
        """Raise CollectiveTimeout if ranks of this host have not begun the last call in time."""
        o = self.last_on_gpu()
        if o is None or not o.prepared.route.watched:  # else its kernel has a deadline of its own
            return
        timeout = o.operation.options.timeout
        if self._seen[0] != o.sequence:
            self._seen = o.sequence, now
        elif timeout is not None and now - self._seen[1] > timeout and self.missing(o):
            raise self.failures.timeout_error(self.late(o, None), o, timeout)

    # The cause of a failure.

    def cause(self, o: Work[Any], error: KosError) -> KosError:
        """What the other ranks know better: another failure, calls that differ, a rank that died.

        Where work ended early, and where hosts may have called differently, they may report it a little later.
        """
        early = isinstance(error, EndedEarly)
        late = isinstance(error, CollectiveTimeout) and not self.missing(o)
        between_hosts = self._channel is not None and (early or late)
        if between_hosts and self._channel is not None:
            self._channel.send("compare")
            if self.calls is not None and self.calls.segment.rank == 0:
                self._send_calls()
        deadline = time.monotonic() + _REPORT_SECONDS
        while (known := self._known(o, error)) is error and (early or between_hosts):
            if self.calls is None or len(self.failures.world) == 1 or time.monotonic() > deadline:
                return self._unexplained(error) if isinstance(error, EndedEarly) else error
            time.sleep(0.01)
        if isinstance(error, EndedEarly) and error.unexplained is CollectiveError:  # it may have a cause of its own
            return known.copy(f"{known}; here: {error}")
        return known

    def _known(self, o: Work[Any], error: KosError) -> KosError:
        calls = self.calls
        if calls is None:
            return error
        early = isinstance(error, EndedEarly)
        try:
            self._read_reports()
            if early:
                calls.raise_failure(sys.maxsize)  # of any call: it ended this one
            self.failures.raise_reported(sys.maxsize if early else o.sequence if o.collective else -1)
            if o.collective and o.sequence >= 0:  # else a wait, which was no call
                calls.check(o)
        except KosError as known:
            known.__context__ = None  # that error says the same in other words
            return known.with_traceback(None)
        if isinstance(error, CollectiveTimeout | EndedEarly) and (killed := calls.killed()) is not None:
            return self.failures.lost(killed, "its process ended", o, None, 0.0)
        return error

    def _unexplained(self, error: EndedEarly) -> KosError:
        """Those of the ranks waited for are to blame that are known to be gone, late or waiting themselves."""
        status, world = self.failures.status, self.failures.world
        others = [rank for rank in world if rank != world[self.failures.rank]]
        known = [rank for rank in others if status.halted(rank) or status.cause(rank) is not None]
        waited = [rank for rank in error.ranks if rank in known or status.awaited(rank) is not None]
        if late := [world.index(rank) for rank in waited or known]:
            return self.failures.timeout_error(PendingRanks(late), error)
        return error.unexplained(str(error))

    # The end.

    def post_end(self, reason: str) -> None:
        """Before an abort: the other ranks may wait for any of what this one has queued."""
        if self.calls is not None:
            waits = self.streams.owners and self.calls.failure() is None
            cause = self.failures.cause()
            first = 0 if waits else self.calls.begun
            self.calls.report_end(first, reason, cause)
            if self._channel is not None:
                self._channel.report_end(first, reason, cause)

    def report_end(self, reason: str) -> None:
        """Report to the other ranks that this one begins nothing more, and why, if no host backend reports it."""
        if self._owns_calls:
            self.post_end(reason)

    def close(self) -> None:
        """Leave the segment, and report nothing more through the hub; waits for a look of the watchdog."""
        closed(self)
        with self.lock:
            calls, self.calls, self._channel = self.calls, None, None
            if calls is not None and self._owns_calls:
                calls.close()
