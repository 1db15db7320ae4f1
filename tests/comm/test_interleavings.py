"""The watchdog, or another thread of the program, acts during a call, in every order.  See docs/architecture.md."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kos.comm.control.group import TCPControlPlane
from kos.comm.control.network import Network
from kos.comm.control.place import env_rendezvous
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.failures import FailureLog
from kos.comm.host.shared.segment import Segment
from kos.comm.host.shared.status import SharedStatus
from kos.errors import CollectiveError, KosError, RankLost
from tests.comm.interleavings import LIMIT, Interleaving
from tests.comm.ranks import TIMEOUT, on_each_rank
from tests.comm.shared_ranks import needs_core, run, shared_only
from tests.comm.tcp_ranks import both_ranks, environment, free_port, run_threads


@contextlib.contextmanager
def shared_memory_ranks() -> Iterator[list[Any]]:
    """The communicators of two ranks that share memory and have no sockets."""
    group = ThreadGroup(2)
    places = [ThreadControlPlane(group, rank, TIMEOUT) for rank in (0, 1)]
    made = run_threads(*[partial(shared_only, place) for place in places])
    try:
        yield made
    finally:
        run_threads(*[each.abort for each in made])


def _failure(rank: int, text: str = "a failure that the watchdog has found") -> KosError:
    return RankLost(text, ranks=[rank])


@pytest.mark.usefixtures("apart")
def test_a_report_of_the_watchdog_beside_a_message():
    interleaving, count, left = Interleaving("host/tcp_messages.py", "host/tcp.py"), 0, True
    while left:
        with both_ranks() as (comm, other):
            with contextlib.suppress(RankLost):  # it may know of the failure first
                channel = comm.rendezvous.channel
                left = interleaving(
                    lambda comm=comm: comm.send(np.ones(1), dst=1),
                    lambda channel=channel: channel.report_failure(_failure(0), 0),
                )
            if not left:
                break
            with pytest.raises(RankLost, match="that the watchdog has found"):  # both messages have left
                [other.recv(np.ones(1), src=0, tag=tag) for tag in (0, 1)]
            count += 1
    assert count > 10


def test_the_earliest_failure_of_two_threads_counts():
    interleaving, left = Interleaving("comm/failures.py"), True
    while left:
        log = FailureLog([0, 1], 0)
        left = interleaving(lambda log=log: log.record(5, _failure(1)), lambda log=log: log.record(3, _failure(0)))
        assert log.earliest is not None and log.earliest[0] == (3 if left else 5)


class _Link:
    def __init__(self, log: FailureLog) -> None:
        self.log = log

    def close(self) -> None:
        self.log.reporters.remove(self)

    def find_failure(self) -> KosError | None:
        return None


class _Failed(_Link):
    def find_failure(self) -> KosError | None:
        return _failure(0)


def test_a_link_is_closed_while_the_watchdog_asks_all():
    interleaving, left = Interleaving("comm/failures.py", "test_interleavings.py"), True
    while left:
        log = FailureLog([0, 1], 0)
        first = _Link(log)
        log.reporters += [first, _Failed(log)]
        found = []
        left = interleaving(lambda found=found, log=log: found.append(log.find()), first.close)
        assert found[0] is not None


def test_ends_that_arrive_while_a_call_asks():
    interleaving, left = Interleaving("comm/failures.py"), True
    while left:
        log = FailureLog(range(4), 0)
        log.record_left(1, 7, "it closed")
        left = interleaving(lambda log=log: log.raise_reported(3), lambda log=log: log.record_left(2, 9, "it closed"))


def test_deaths_that_arrive_while_a_call_reads_them():
    interleaving, left = Interleaving("control/notices.py", "control/group.py"), True
    while left:
        place = TCPControlPlane(1, 4, TIMEOUT, Network(b"", "127.0.0.1", "127.0.0.1", True), None)
        channel = place.channel
        place.inbox.deaths[2] = "its process ended"
        left = interleaving(
            lambda channel=channel: channel.record_deaths(),
            lambda place=place: place.inbox.deaths.setdefault(3, "it ended too"),
        )


@pytest.mark.parametrize("name", ["deaths", "notice", "exchange"])
def test_a_group_is_closed_beside_another_thread(name):
    """No rank is reported as dead, and only errors of kos are raised."""
    interleaving, left = Interleaving("control/group.py", "control/notices.py"), True
    while left:
        port = free_port()
        places = [partial(env_rendezvous, TIMEOUT, environment(rank, 2, port)) for rank in (0, 1)]
        one, two = run_threads(*places)

        def wait(one=one):
            with contextlib.suppress(KosError):
                one.barrier()

        other = threading.Thread(target=wait, daemon=True)
        if name == "exchange":
            other.start()

        def call(two=two):
            if name == "exchange":
                with contextlib.suppress(KosError):
                    two.barrier()
            elif name == "notice":
                two.send_notice("failed", ["RankLost", "lost", [0]])
            else:
                two.deaths()

        def close(two=two):
            two.abort(None)

        left = interleaving(call, close)
        assert name == "exchange" or not two.deaths()
        if name == "exchange":
            other.join(LIMIT)
        one.abort(None)


@needs_core
def test_failures_of_two_threads_in_shared_memory():
    """The record of one of the two failures is complete."""
    interleaving, left = Interleaving("shared/status.py"), True
    while left:
        status = SharedStatus(Segment(-1, [0], 0), [0])
        texts = [f"{each} " * 50 for each in ("program", "watchdog")]
        left = interleaving(
            lambda s=status, t=texts[0]: s.post_failure(_failure(0, t)),
            lambda s=status, t=texts[1]: s.post_failure(_failure(0, t)),
        )
        known = status.failure(0)
        assert known is not None and str(known[0]) in texts


class _Gate:
    """A link at which an abort waits, after it has looked for operations in flight and before it frees anything."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def report_end(self, *_: Any) -> None:
        self.reached.set()
        self.open.wait(LIMIT)

    def find_failure(self) -> None:
        return None


@needs_core
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 does not trace each instruction; 3.12.1 crashes")
@pytest.mark.parametrize("name", ["late", "wait"])
def test_another_thread_frees_what_a_wait_uses(name):
    """The other thread runs at every instruction of the backend."""
    interleaving, left, count = Interleaving("host/host_backend.py", finely=True), True, 0
    while left:
        gate = _Gate()
        with shared_memory_ranks() as (comm, _):
            comm.backend.failures.reporters.append(gate)
            work = comm.all_reduce(np.ones(3), async_op=True)
            aborting = threading.Thread(target=comm.abort, daemon=True)
            aborting.start()
            assert gate.reached.wait(LIMIT)

            def call(comm=comm, work=work):
                if name == "late":  # as a wait does
                    with comm.backend.engine.lock:
                        comm.backend.late(work)
                        comm.backend.may_sleep(work)
                else:
                    with contextlib.suppress(KosError):
                        work.wait(0.05)

            def free(gate=gate, aborting=aborting):
                gate.open.set()
                aborting.join(LIMIT)

            left = interleaving(call, free)
            gate.open.set()
            aborting.join(LIMIT)
            count += 1
    assert count > 5


@needs_core
@on_each_rank(run, 2, close=False)
def test_a_work_that_the_core_has_begun_is_aborted(comm, /):
    x = np.ones(3)
    for _ in range(3):
        comm.all_reduce(x, async_op=True).wait()
    if comm.rank == 0:
        work = comm.all_reduce(x, async_op=True)
        comm.abort()
        with pytest.raises(CollectiveError) as caught:
            work.wait()
        assert str(caught.value) == f"{caught.value.call}: the communicator was aborted"
