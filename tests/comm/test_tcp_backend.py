"""The tcp backend: conformance with and without shared memory, failures of some of several collectives."""

import gc
import os
import re
import select
import threading
import time
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import kos
from kos.comm.control.threads import single_rendezvous
from kos.comm.failures import PendingRanks
from kos.comm.host import tcp_messages as backend
from kos.comm.host.tcp import RECENT
from kos.comm.host.tcp_messages import Peer
from kos.errors import BackendUnavailable, CollectiveMismatch, CollectiveTimeout
from tests.comm import test_conformance as conformance
from tests.comm.ranks import on_each_rank, until
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks, run_processes

LONG = 3 * backend.EAGER_BYTES  # bytes


@pytest.fixture
def ranks(memory):
    return TCPRanks(3)


@pytest.fixture(autouse=True)
def _apart(request):
    """Ranks share a host, and use the network all the same unless the test asks for both."""
    if "memory" not in request.fixturenames:
        request.getfixturevalue("apart")


MORE = re.compile(r"\w+ complex128( SUM)?|.* by every schedule")
"""Promises beside those of the short suite: elements of 16 bytes, and schedules."""
LESS = re.compile(r".* int32( .*)?|compressed (?!int8 bfloat16|fp8 float32).*")
"""Promises left out: of int32, whose elements have 4 bytes as those of float32, and of most compressed formats."""
SHORT = [name for name in conformance.names_of(full=False) if not LESS.fullmatch(name)]
NAMES = [*SHORT, *filter(MORE.fullmatch, conformance.names_of())]
SHARED = {"views_put_and_get", *(name for name in NAMES[::2] if " " in name)}
"""Those that are checked in shared memory: what ranks of several hosts cannot do, and half of the results of calls."""


@pytest.mark.parametrize(
    ("name", "memory"), [(name, "shared" if name in SHARED else "none") for name in NAMES], indirect=["memory"]
)
def test_promise(ranks, seed, name):
    conformance.check(ranks, seed, name)


@pytest.mark.parametrize("memory", ["shared"], indirect=True)
def test_explain_says_what_is_shared(ranks):
    for text in ranks.run(lambda comm: comm.explain()):
        assert "shared memory  in use  3 ranks of this host share" in text
        assert re.search(r"tcp +in use +sockets between the ranks\n", text)  # so many as are left after shrink()


def test_a_rank_lost_from_an_earlier_collective_is_reported_to_all():
    """A later collective had failed.

    A rank that waits for the lost rank itself reports the loss to those that wait for others.
    """
    launched, failed, reported = threading.Barrier(4), threading.Barrier(4), threading.Barrier(3)

    def body(comm):
        if comm.rank == 3:
            launched.wait(TIMEOUT), failed.wait(TIMEOUT)
            comm.abort(reason="it is lost")
            return
        early = comm.broadcast(np.zeros(5), root=3, async_op=True)  # rank 2 waits for another than the root
        launched.wait(TIMEOUT)
        with pytest.raises(CollectiveTimeout, match="barrier #1"):
            comm.barrier(timeout=0.2 if comm.rank == 0 else TIMEOUT)
        failed.wait(TIMEOUT)
        begun = time.monotonic()
        with pytest.raises(CollectiveTimeout, match=r"barrier #1: .* ranks \[.*3\]"):  # the first failure
            early.wait(TIMEOUT / 2)
        assert time.monotonic() - begun < TIMEOUT / 4, "found at the timeout only"
        reported.wait(TIMEOUT)  # a rank that leaves would end the wait, too

    TCPRanks(4).run(body)


@on_each_rank(TCPRanks(2).run)
def test_calls_that_differ_are_found_at_the_end_at_the_latest(comm, /):
    """A root does not wait for the ranks to which it sends, so two roots complete before either knows of the other."""
    comm.barrier()
    x = np.full(3, comm.rank + 1.0)
    with pytest.raises(CollectiveMismatch, match=r"broadcast #1 .* they differ in root"):  # noqa: PT012
        comm.broadcast(x, root=comm.rank)
        comm.rendezvous.barrier()  # the messages have been sent
        comm.close()


def test_awaited_ranks_are_looked_up_under_the_lock():
    """Another thread of the program may advance the operations, and change the list of messages during the lookup."""
    held, asked = list[bool](), threading.Event()

    def body(comm):
        if comm.rank:
            assert asked.wait(TIMEOUT)
            comm.send(np.ones(3), 0)
            return
        backend = comm.backend

        def late(call):
            held.append(backend.engine.lock._is_owned())
            if len(held) == 3:
                asked.set()
            return PendingRanks()

        backend.late = late
        comm.recv(np.zeros(3), 1, timeout=2 * comm.timeout)
        assert all(held)

    TCPRanks(2).run(body)


def test_a_message_that_another_operation_has_read_ends_a_wait():
    """The first operation is polled before the message arrives, and the second one after.

    Then the wait must not sleep.
    """
    ask, sent = threading.Event(), threading.Event()

    def body(comm):
        if comm.rank:
            assert ask.wait(TIMEOUT)
            comm.send(np.ones(3), 0)
            sent.set()
            comm.send(np.ones(3), 0, 1)
            return
        transport = comm.backend.transport
        transport.poller.epoll = epoll = Mock(wraps=transport.poller.epoll)
        first, second = (comm.recv(np.empty(3), 1, tag, async_op=True) for tag in (0, 1))
        polls, progress = list[int](), transport.poller.progress

        def read():
            polls.append(len(polls))
            if len(polls) == 2:
                ask.set()
                assert sent.wait(TIMEOUT)
                assert select.select([transport.peers[1].link.sock], [], [], TIMEOUT)[0]
                epoll.poll.reset_mock()
            progress()

        def has_slept():
            return any(call.args[0] for call in epoll.poll.call_args_list)

        mark, transport.poller.progress = transport.poller.mark(), read
        first.wait()
        assert not has_slept()
        second.wait()
        epoll.poll.reset_mock()
        transport.poller.pause(mark, 0.001)  # what has arrived since the mark may have ended an operation
        assert not has_slept()
        transport.poller.pause(transport.poller.mark(), 0.001)
        assert has_slept()

    TCPRanks(2).run(body)


@pytest.mark.parametrize("count", [0, 3])
def test_a_rank_that_is_done_and_closes_names_its_last_call(count):
    """The root of a broadcast waits for no other rank, nor does a rank whose array is empty."""
    closed = threading.Event()

    def body(comm):
        comm.barrier()
        if comm.rank == 0:
            comm.broadcast(np.zeros(count))
            comm.close()
            closed.set()
            return
        assert closed.wait(TIMEOUT)
        with pytest.raises(CollectiveMismatch, match="rank 0 called broadcast #1 .* but rank 1 called all_reduce #1"):
            comm.all_reduce(np.zeros(3))

    TCPRanks(2).run(body)


def test_no_thread_polls_connections_that_are_being_closed(before_call):
    """A thread that uses another group polls the connections of all groups of its rank."""
    engines, polled = dict[Any, Any](), list[bool]()

    def closing(peer):
        poll = threading.Thread(target=engines[peer.transport.poller].poll)
        poll.start()
        poll.join(0.2)
        polled.append(not poll.is_alive())

    def body(comm):
        carrier = comm.backend
        engines[carrier.transport.poller] = carrier.engine
        comm.split(0).close()
        comm.duplicate().abort()

    before_call(Peer, "close", closing)
    TCPRanks(3).run(body)
    assert polled
    assert not any(polled)


@pytest.mark.parametrize("memory", ["none"], indirect=True)
@on_each_rank(TCPRanks(2).run)
def test_more_messages_than_descriptions_are_kept(comm, /, memory):
    """Messages have no descriptions, and so do not displace those of collectives."""
    x = np.zeros(3)
    for number in range(RECENT + 10):
        comm.send(x + number, 1) if comm.rank == 0 else comm.recv(x, 0)
    assert comm.rank == 0 or (x == RECENT + 9).all()


@on_each_rank("ranks.run")
def test_many_collectives_in_flight(comm, /):
    """There are more in flight than a rank keeps descriptions of complete ones."""
    x = np.arange(1100.0)
    if comm.rank == 1:
        comm.rendezvous.barrier()
    works = [comm.all_reduce(x[at : at + 1], algorithm="ring", async_op=True) for at in range(x.size)]
    if comm.rank != 1:
        comm.rendezvous.barrier()
    for work in works:
        work.wait()
    assert (x == comm.size * np.arange(x.size)).all()


def test_communicators_that_are_dropped_give_their_descriptors_back(memory):
    counts = []

    def opened():
        return len(os.listdir("/proc/self/fd"))

    def body(comm):
        for _ in range(4):
            part = comm.split(0)
            assert part.all_reduce(np.ones(1), algorithm="ring") == 2
            part.barrier()
            del part
            comm.rendezvous.barrier()
            if comm.rank == 0:
                gc.collect()
                until(lambda: opened() <= min(counts, default=1e9))  # threads close what they served a moment later
                counts.append(opened())
            comm.rendezvous.barrier()
        comm.barrier()

    TCPRanks(2).run(body)
    assert len(counts) == 4


@pytest.mark.parametrize("timeout", ["float('inf')", "1e7"])
def test_a_timeout_longer_than_poll_counts(timeout):
    results = run_processes(f"import kos; kos.init(timeout={timeout}).close()", 2)
    assert [code for code, _ in results] == [0, 0], results


def test_without_sockets_it_says_why():
    with pytest.raises(BackendUnavailable, match="tcp: the ranks did not connect over TCP"):
        kos.init("tcp", rendezvous=single_rendezvous())
