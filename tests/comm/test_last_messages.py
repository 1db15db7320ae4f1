"""Messages that a rank sent before it ended arrive.

Its end fails no call that can complete, and a failed call names it.
"""

import math
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import kos
from kos.comm.failures import WHY_CLOSED, FailureLog
from kos.comm.host.mpi import LAST_CHECKS, MPITransport
from kos.comm.matching import Matching
from kos.comm.operation import COLLECTIVE_TAGS
from kos.comm.work import Engine
from kos.errors import CollectiveTimeout, KosError, RankLost
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks

pytestmark = pytest.mark.usefixtures("apart")


def end(comm: kos.Communicator) -> None:
    """As the end of the process: the connections close without a word."""
    transport: Any = comm.backend.transport
    for peer in transport.peers.values():
        peer.link.sock.shutdown(socket.SHUT_RDWR)


def notice_end(comm: kos.Communicator, work: Any) -> None:
    """Poll ``work``, which stays in flight, until the end of rank 1 is known."""
    transport, deadline = comm.backend.transport, time.monotonic() + TIMEOUT
    while transport.peers[1].gone is None:
        assert not work.done()
        assert time.monotonic() < deadline
    assert not work.done()


def test_a_rank_that_ends_right_after_a_barrier_fails_it_nowhere():
    """Rank 1 has completed the barrier and ended, while rank 0 is late in it and rank 2 still waits for rank 0."""
    begun, known = threading.Event(), threading.Event()

    def body(comm):
        if comm.rank == 0:
            work = comm.barrier(async_op=True)
            assert not work.done()
            begun.set()
            assert known.wait(TIMEOUT)
            work.wait()
        assert begun.wait(TIMEOUT)
        if comm.rank == 1:
            comm.barrier()
            end(comm)
        elif comm.rank == 2:
            work = comm.barrier(async_op=True)
            notice_end(comm, work)
            known.set()
            work.wait()
        if comm.rank != 1:
            with pytest.raises(RankLost, match="barrier #1: rank 1 is gone: its connection was closed") as caught:
                comm.barrier()
            assert caught.value.ranks == (1,)

    TCPRanks(3).run(body)


def test_ranks_that_remain_exchange_messages():
    """They do not wait for the rank that has ended."""
    known = threading.Event()

    def body(comm):
        if comm.rank == 1:
            end(comm)
        elif comm.rank == 0:
            work = comm.recv(np.zeros(3), 2, async_op=True)
            notice_end(comm, work)
            known.set()
            assert (work.wait() == 2).all()
            comm.send(np.ones(3), 2)
        else:
            assert known.wait(TIMEOUT)
            comm.send(np.full(3, 2.0), 0)
            assert (comm.recv(np.zeros(3), 0) == 1).all()

    TCPRanks(3).run(body)


def test_a_rank_that_has_ended_is_named_where_another_one_is_late():
    """Rank 0 waits for rank 2, which does not arrive and therefore does not report the loss."""
    over = threading.Event()

    def body(comm):
        if comm.rank == 1:
            comm.gather(np.ones(3), root=0)
            end(comm)
        elif comm.rank == 0:
            work = comm.gather(np.ones(3), root=0, async_op=True)
            notice_end(comm, work)
            with pytest.raises(CollectiveTimeout, match=r"waiting for ranks \[1\]") as caught:
                work.wait(0.1)
            assert caught.value.ranks == (1,)
            over.set()
        else:
            assert over.wait(TIMEOUT)

    TCPRanks(3).run(body)


def test_what_a_slow_rank_has_not_received_yet_survives_the_abort_of_its_sender():
    """The sender has not read what the receiver sent meanwhile.  Linux would reset the connection because of it."""
    posted, sent, unread, ended = (threading.Event() for _ in range(4))
    count = 150_000  # bytes: the sender's system holds them, that of the receiver does not

    def body(comm):
        transport = comm.backend.transport
        sock = transport.peers[1 - comm.rank].link.sock
        if comm.rank == 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            assert posted.wait(TIMEOUT)
            comm.send(np.full(count, 7, np.uint8), 1)
            sent.set()
            assert unread.wait(TIMEOUT)
            comm.abort()
            ended.set()
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            work = comm.recv(np.zeros(count, np.uint8), 0, async_op=True)
            posted.set()
            assert sent.wait(TIMEOUT)
            transport.describe(0, COLLECTIVE_TAGS)
            unread.set()
            assert ended.wait(TIMEOUT)
            assert (work.wait() == 7).all()
            comm.abort()

    TCPRanks(2).run(body)


@pytest.fixture
def mpi(mpi_library, monkeypatch):
    """Rank 0 of three, over a stand-in for MPI.  Comparisons of calls are complete, messages and broadcasts are not."""
    request = SimpleNamespace(Test=lambda: True)
    comm = SimpleNamespace(
        Idup=lambda: (comm, request), Set_errhandler=lambda handler: None, Iallreduce=lambda *given: request,
        Improbe=lambda *given: None,
    )  # fmt: skip
    pending = SimpleNamespace(Test=lambda: False)
    comm.Ibcast = lambda data, root: pending
    vars(mpi_library).update(Status=Mock(), ERRORS_RETURN=0, IN_PLACE=0, INT64_T=0, MAX=0, ANY_TAG=0, BYTE=0)
    monkeypatch.setattr("kos.comm.host.mpi.await_request", lambda *given: None)
    place = SimpleNamespace(
        rank=0, size=3, failures=FailureLog(range(3), 0), ranks_per_host=1, mpi_comm=comm, channel=None, deaths=dict
    )
    transport = MPITransport(place, Engine())
    transport.open(SimpleNamespace(one_host=False))
    transport.next_check = math.inf
    return transport


SEQUENCES = pytest.mark.parametrize("sequence", [7, COLLECTIVE_TAGS - 1, 3 * COLLECTIVE_TAGS], ids=str)


@SEQUENCES
def test_a_message_of_mpi_of_a_rank_that_left_later_is_awaited(mpi, sequence):
    mpi.failures.record_left(1, sequence + 1, WHY_CLOSED)
    message = mpi.irecv(np.zeros(1), 1, mpi.tag(sequence))
    for _ in range(10 * LAST_CHECKS):
        mpi.receive_notices()
        assert not message.done()
    message.complete = True
    assert message.done()


@SEQUENCES
@pytest.mark.parametrize("collective", [True, False])
def test_a_message_of_mpi_that_never_comes_fails_after_some_time(mpi, sequence, collective):
    """However often it was polled before."""
    mpi.failures.record_left(1, sequence, WHY_CLOSED)
    message = mpi.irecv(np.zeros(1), 1, mpi.tag(sequence) if collective else 3)
    for _ in range(LAST_CHECKS):
        mpi.receive_notices()
        mpi.next_check = math.inf
        for _ in range(3):
            assert not message.done()
    mpi.receive_notices()
    with pytest.raises(RankLost, match="rank 1 is gone: it closed its communicator"):
        message.done()


def test_messages_of_others_do_not_shorten_the_wait_for_last_messages_of_mpi(mpi):
    """The rank reads notices after each message of another rank.  These checks do not count."""
    mpi.failures.record_left(1, 0, "its process ended")
    message = mpi.irecv(np.zeros(1), 1, 3)
    for _ in range(2 * LAST_CHECKS):
        mpi.check_sender(2)
        assert not message.done()


def test_a_rank_that_is_killed_in_a_collective_of_mpi_may_have_completed_it(mpi):
    """If all ranks have begun it, the killed rank does not fail it.

    A rank that was aborted does, and so does a later call.
    """
    work = SimpleNamespace(sequence=4, prepared=SimpleNamespace(fingerprint=1, text=b""))
    arrived = mpi.agree(work, None)
    assert arrived is not None and arrived()
    mpi.failures.record_left(1, 0, "its process ended")
    assert arrived()
    mpi.failures.record_left(2, 4, "it was aborted")
    with pytest.raises(RankLost, match="rank 2 is gone: it was aborted"):
        arrived()
    late = mpi.agree(SimpleNamespace(sequence=5, prepared=work.prepared), None)
    with pytest.raises(RankLost, match="rank 1 is gone: its process ended"):
        assert late is not None and late()


def test_a_collective_of_mpi_itself_fails_some_time_after_the_end_of_a_rank(mpi):
    """Once all ranks have begun it, MPI may complete it, or wait for the killed rank without reporting so."""
    options = SimpleNamespace(deterministic=False, algorithm="auto")
    operation = SimpleNamespace(options=options, reduction=None, root=1)
    steps = mpi.native(SimpleNamespace(sequence=4, operation=operation), {"data": np.zeros(1)}, "broadcast")
    next(steps)
    mpi.failures.record_left(1, 0, "its process ended")
    for _ in range(LAST_CHECKS):
        mpi.receive_notices()
        for _ in range(3):
            next(steps)
    mpi.receive_notices()
    with pytest.raises(RankLost, match="rank 1 is gone: its process ended"):
        next(steps)


class Silent:
    """The messages of a transport that knows the end of rank 1, but not yet its last messages."""

    check_seconds, last_checks = 1.0, 5

    def arrived(self, ranks: Any, tag: int) -> None:
        return None

    def end_of(self, rank: int) -> KosError:
        return RankLost(f"rank {rank} is gone", ranks=[rank])


def test_a_receive_of_any_length_waits_for_last_messages_for_some_time(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("kos.comm.matching.time", SimpleNamespace(monotonic=lambda: clock.now))
    matching = Matching(0, 2, Silent(), FailureLog(range(2), 0))
    for _ in range(Silent.last_checks + 1):
        for _ in range(10):
            assert matching.poll(1, 0) is None
        clock.now += Silent.check_seconds
    with pytest.raises(RankLost, match="rank 1 is gone"):
        matching.poll(1, 0)
