"""WatchedBackend: the part of a GPUBackend that waits for the GPU on the host, and aborts calls in flight.

The host waits only where the program asks for it (``Work.wait(timeout)``, ``Work.synchronize``,
``Communicator.synchronize``, ``barrier``, ``close``).  Failures are found there, at the next call, and by the watchdog
(``kos.comm.watchdog``).  All routes of a communicator fail together.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait as await_futures
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NoReturn

from kos.comm import timeouts, watchdog
from kos.comm.contract import Backend
from kos.comm.control.base import ControlPlane
from kos.comm.failures import PendingRanks
from kos.comm.gpu.gpu_work import Marks, unstarted
from kos.comm.gpu.memory import ScratchPool
from kos.comm.gpu.order import Streams
from kos.comm.gpu.shared import CommState
from kos.comm.host.host_backend import HostBackend
from kos.comm.prepared import Store
from kos.comm.waits import Backoff, start_in_thread, wait
from kos.comm.work import Work
from kos.cuda import driver
from kos.cuda.driver import relaxed_capture
from kos.cuda.streams import is_captured
from kos.errors import CollectiveError, CudaError, KosError, by_handler

_SHOW_EVERY = 0.02
"""Seconds of waiting on the host after which a rank shows the other ranks for which ranks it waits."""
_MARKS = 16
"""The number of calls in flight whose deadlines the watchdog checks."""


class WatchedBackend:
    """The state of one communicator on the GPU ``device``, while its ``routes`` queue work there.

    ``host`` is the backend that carries the same communicator's host memory, if there is one.
    """

    __slots__ = ("__dict__", "__weakref__", "_last")  # the core writes the last
    device: int

    def __init__(self, rendezvous: ControlPlane, routes: Sequence[Backend], host: HostBackend | None) -> None:
        self.rank, self.size, self.failures = rendezvous.rank, rendezvous.size, rendezvous.failures
        self.group_suffix = self.failures.group_suffix  # follows the number of a rank in texts
        self.timeout = rendezvous.timeout
        """Seconds that an operation without a timeout of its own may take."""
        self.engine, self.store = routes[0].engine if host is None else host.engine, Store()
        self.routes = tuple(routes)
        """What may carry a call.  ``nccl`` is ended before ``peer``, which waits for the whole GPU."""
        assert routes[0].device is not None
        self.device = routes[0].device
        self.shared = CommState(rendezvous, self.failures, self, host)
        self._last: Work[Any] | None = None
        self._in_flight: deque[list[Any]] = deque()  # Works whose arrays must live until the GPU is done with them
        self._watches_deadlines = any(route.watched for route in routes)
        self._marks = Marks(self.device, _MARKS if self._watches_deadlines else 0)
        self._scratch = ScratchPool(self.device)
        self._failed: Sequence[int] = next((route.failed for route in routes if route.failed_word), (0,))
        self._closing = self._aborted = False
        self._message_streams: set[int] = set()  # streams on which messages were queued: the core queues more there
        self.messages_queued = False  # whether messages of any rank may be queued, while a group is made
        self.awaited: list[int] = []  # the ranks for which kernels waited at the watchdog's last check
        self._seen = -1  # the number of the last collective at that check

    @property
    def streams(self) -> Streams:
        """The streams of the communicator's callers, for all its routes."""
        return self.shared.streams

    # Waiting on the host.

    def check(self, o: Work[Any]) -> None:
        """Raise known failures: calls that differ between ranks, ranks that have ended, and errors of the library."""
        self.shared.confirm()
        self.inspect(o)

    def inspect(self, o: Work[Any]) -> None:
        """Raise failures that the library or a kernel of a route has reported."""
        for route in self.routes:
            route.inspect(o)

    def confirm(self, o: Work[Any]) -> None:
        """Compare the calls so far with those of the other ranks, before ``o``, a call on host memory."""
        try:
            if self.failures.first is None:
                self.shared.confirm()
        except Exception as error:
            self._raise(o, error)

    def wait_on_host(self, o: Work[Any], over: Callable[[], bool], timeout: float | None) -> None:
        """Wait until ``over()``, at most ``timeout`` seconds; a failure ends what is in flight."""
        shown = False

        def poll() -> bool:
            is_over = over()
            self.check(o)  # all ranks have begun what is over: compare their calls
            if self.failures.first is not None:  # the watchdog was first: it alone notices a dead rank
                raise self.failures.first.copy()
            return is_over

        def show() -> None:
            nonlocal shown
            shown = True
            self.failures.show_wait(self.late(o))

        try:
            deadline = math.inf if timeout is None else time.monotonic() + timeout
            if not wait(poll, deadline, show, Backoff(), _SHOW_EVERY) and timeout is not None:
                raise self._expired(o, timeout)
        except Exception as error:
            self._raise(o, error)
        finally:  # after the failure is posted: a rank with neither a wait nor a failure is named as the cause
            if shown:
                self.failures.show_wait(None)

    def _expired(self, o: Work[Any], timeout: float) -> KosError:
        """Fail ``o``, whose time is up.  The lock keeps the watchdog from reporting the abort as the cause."""
        with self.shared.lock:
            known = self.failures.first
            return self.to_error(o, self.timed_out(o, timeout) if known is None else known.copy())

    def synchronize(
        self, timeout: float | None = None, stream: int | None = None, until: Callable[[], bool] | None = None
    ) -> None:
        """Wait on the host for all queued work, for the work on ``stream``, or until ``until()`` is true."""
        self.failures.refuse("synchronize")
        last = self._last or unstarted("synchronize", self)
        if until is not None:
            return self.wait_on_host(last, until, timeout or self.timeout)
        several = self.streams.owners.copy() if stream is None else {stream: None}
        for each, owner in several.items():
            self.wait_on_host(last, partial(self.is_idle, each, owner), timeout or self.timeout)
        last.record_end(time.time_ns())
        for each in several:
            self.streams.forget(each)
        if stream is None:
            self._in_flight.clear()
            unused = self._scratch.trim()
            if unused and self.store.core is not None:
                self.store.core.forget()  # before the memory is freed: other threads may still make such launches
            for piece in unused:
                piece.close()

    def settle(self, timeout: float) -> bool:
        """Wait on the host for collectives that are queued; returns whether messages may still be queued.

        It does not wait for messages, nor for what is queued behind them.
        """
        last = self._last or unstarted("synchronize", self)
        several = {each: owner for each, owner in self.streams.owners.items() if not is_captured(each)}
        for each, owner in several.items():
            if each not in self._message_streams:
                self.wait_on_host(last, partial(self.is_idle, each, owner), timeout)
                self.streams.forget(each)
        return not all(self.is_idle(each, owner) for each, owner in several.items() if each in self._message_streams)

    def is_idle(self, stream: int, owner: Any) -> bool:
        """Whether everything that was queued on the stream has run."""
        with driver.on_device(self.device):
            return self.streams.over(stream, owner)

    # Who is late.

    def late(self, work: Work[Any]) -> PendingRanks:
        """Which ranks ``work`` waits for, as far as known, and how an error says that."""
        message, words = work.operation.message, timeouts.UNKNOWN
        if not work.collective:
            words = timeouts.unsent(f"rank {message.src}", message.recv_tag)
            if message.src is None:
                words = timeouts.unreceived(f"rank {message.dst}")
        return self.shared.late(work, words)

    def timed_out(self, work: Work[Any], seconds: float | None) -> KosError:
        """The error of a call whose time is up.  Kernels of its route end, and report what they waited for."""
        error = self.failures.timeout_error(self.late(work), work, seconds)
        for route in self.routes:
            if route is work.prepared.route and (waited := route.end_waits()):
                error = error.copy(f"{error}; {waited}")
        return error

    # Failures.

    def watch(self) -> None:
        """Check the other ranks, errors of the libraries, and the deadlines of queued calls.  The watchdog calls it."""
        shared = self.shared
        if not shared.lock.acquire(blocking=False):  # another thread aborts it, and may wait for the GPU
            return
        try:  # nothing may be touched after a close or an abort
            if shared.ended or self._closing:
                return
            latest = self._last or shared.last or unstarted("watchdog", self)
            try:
                if self.failures.first is not None:  # of a call on host memory, or of an exchange
                    raise self.failures.first.copy()
                shared.look_for_the_lost(latest)
                with driver.on_device(self.device), relaxed_capture():
                    self.inspect(latest)
                    if self._watches_deadlines:
                        self._look_at_deadlines(time.monotonic())
                self._show_queue()
            except Exception as error:
                self.to_error(latest, error.copy(f"{error}; {ENDED}") if isinstance(error, KosError) else error)
        finally:
            shared.lock.release()

    def _look_at_deadlines(self, now: float) -> None:
        """Raise CollectiveTimeout for a call that the GPU began too long ago, or that a rank has not begun in time."""
        if (timeout_error := self._marks.timeout_error(now)) is not None:
            late = timeout_error[0] or self._last or unstarted("watchdog", self)
            raise self.timed_out(late, timeout_error[1])
        if not self._marks.running and not self._marks.captured:
            self.shared.look_for_the_late(now)
        raise_if_stuck(self, now)
        self.streams.current = self.streams.NONE  # the next call is marked again

    def _show_queue(self) -> None:
        """Show the other ranks for which ranks the GPU waits: the program may wait for a stream outside of kos."""
        late = self.awaited = [rank for route in self.routes for rank in route.kernel_waits()]
        last = self.shared.last_on_gpu()
        if not late and last is not None:
            late = self.shared.missing(last) if last.sequence == self._seen else []
            self._seen = last.sequence
        if late or self in self.failures.status.queued:
            self.failures.status.post_queued(self, [self.failures.world[rank] for rank in late])

    def find_failure(self) -> KosError | None:
        """The failure of this communicator, if it can be found without a call.  Called by the watchdog's thread."""
        return self.failures.first

    def to_error(self, work: Work[Any], error: Exception) -> KosError:
        """The failure to raise for ``error``.  Aborts calls in flight, and reports the failure to the other ranks."""
        shared, failures = self.shared, self.failures
        for route in self.routes:
            error = route.explain(work, error)
        with shared.lock:
            if shared.ended:  # and ``error`` is a consequence
                launching = not isinstance(error, KosError)  # the watchdog aborted during a launch
                text = f"{work}: the communicator failed before: {failures.first}" if launching else None
                assert failures.first is not None
                return failures.named(work, failures.first.copy(text))
            if isinstance(error, KosError) and not lost(self, error):  # other ranks of the host may know the cause
                error = shared.cause(work, error)
            failure = failures.named(work, error)
            work.record_failure(failure)
            failures.report(work, failure, self.begun, lost(self, failure))
            shared.ended = True
            failures.status.post_queued(self, ())
            self.abort_device(str(failure))
            return failure

    @property
    def begun(self) -> int:
        return 0 if (calls := self.shared.calls) is None else calls.begun

    def _raise(self, work: Work[Any], error: Exception) -> NoReturn:
        raise error if by_handler(error) else self.to_error(work, error)

    @property
    def abort_flags(self) -> list[int]:
        """As ``Communicator.abort_flags``; kernels that can end early set a flag of their own."""
        return [self.shared.abort_flag, *(flag for route in self.routes for flag in route.abort_flags)]

    def signal_abort(self, reason: str) -> None:
        """Begin to end everything that waits for other ranks.  Does not wait for it."""
        self.shared.mark_ended()
        if not self._aborted:
            self._aborted = True
            for route in self.routes:
                route.abort(reason)

    def abort_device(self, reason: str, final: bool = False) -> None:
        """Abort calls in flight on the GPU, on this rank alone, and wait until the GPU is idle."""
        self.signal_abort(reason)  # signal all routes first, because ending one may wait for kernels of another
        wait_for_idle(self, self._drain)
        for route in self.routes:
            route.drained(final)

    def _drain(self) -> None:
        with suppress(CudaError), relaxed_capture():  # a broken context runs no kernels
            driver.synchronize(self.device)

    def unwatch(self) -> None:
        """Stop the watchdog's checks.  Waits for a check that is in progress."""
        with self.shared.lock:
            self._closing = True
            self.failures.status.post_queued(self, ())
        watchdog.remove(self)

    def signal_end(self, reason: str) -> None:
        """Report the end to the other ranks, and signal waiting kernels to end, before anything is freed."""
        self.unwatch()
        if self.streams.owners:
            self.shared.post_end(reason)
        else:
            self.shared.report_end(reason)
        self.signal_abort(reason)

    def abort(self, reason: str) -> None:
        """End everything in flight without waiting for other ranks; report the reason to them."""
        self.unwatch()
        self.shared.report_end(reason)
        with self.shared.lock:
            self.failures.first = self.failures.first or CollectiveError(reason)
            self.shared.ended = True  # later failures are not reported
            self.shared.close()
            self.abort_device(reason, final=True)

    def close(self) -> None:
        """Free the resources.  Collective; nothing may be in flight."""
        self.unwatch()
        reporters = self.failures.reporters
        with ExitStack() as rest:  # closes all, from the last line to the first, even if one fails
            rest.callback(self._scratch.close)
            rest.callback(self.shared.close)
            for route in reversed(self.routes):
                if route in reporters:
                    reporters.remove(route)
                rest.callback(route.close, self.begun)


log = logging.getLogger(__name__)

_ABORT_SECONDS = 20.0
_HALTED_SECONDS = 1.0
"""How long a failed communicator waits for the GPU before others that wait for the same stopped rank fail too."""
ENDED = "what was in flight was ended, and its results are undefined"

_aborting: dict[Any, float] = {}
"""Failed backends that wait for their GPU to become idle, and when each began."""


def wait_for_idle(backend: Any, drain: Callable[[], None]) -> None:
    """After an abort, run ``drain``, which waits until the GPU is idle, on a thread; the others are checked meanwhile.

    Kernels of other communicators may keep the GPU busy, since they wait for the same rank.
    """
    began = _aborting[backend] = time.monotonic()
    drained = start_in_thread(drain)
    drained.add_done_callback(lambda _: _aborting.pop(backend, None))
    while not await_futures([drained], watchdog.TICK).done:
        if time.monotonic() > began + _ABORT_SECONDS:
            log.error("rank %d: the GPU did not end its work within %g s", backend.rank, _ABORT_SECONDS)
            return
        watchdog.check_others()


def raise_if_stuck(backend: Any, now: float) -> None:
    """Raise if another communicator failed because of a rank of this one, and the GPU does not become idle.

    In that case this communicator waits for the rank in calls whose start the watchdog does not see, such as those
    of a replayed graph.
    """
    failures = backend.failures
    for other, began in list(_aborting.items()):
        failure = other.failures.first
        ranks = set() if failure is None else set(failure.ranks) & set(failures.world)
        patience = _HALTED_SECONDS if all(map(failures.status.halted, ranks)) else backend.timeout
        if ranks and other.device == backend.device and now - began > patience:
            assert failure is not None
            cause = str(failure).removesuffix(f"; {ENDED}")
            raise failure.copy(f"the GPU was not idle {patience:g} s after another communicator failed: {cause}")


def lost(backend: Any, error: KosError) -> bool:
    """Whether ``error`` makes the GPU of this rank unusable."""
    if not isinstance(error, CudaError):
        return False
    try:
        with driver.on_device(backend.device):
            return driver.broken() is not None
    except CudaError:  # it cannot even be made current
        return True
