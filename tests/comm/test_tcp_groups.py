"""Groups over tcp share the connections between two ranks: descriptors, closing, aborting, threads, unread messages."""

import contextlib
import socket
import threading

import numpy as np
import pytest

from kos.errors import CollectiveTimeout, KosError, RankLost
from tests.comm.ranks import until
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks, both_ranks, run_threads

LONG = 32 << 20  # bytes: more than sockets hold


@pytest.fixture(autouse=True)
def _apart(apart):
    """Ranks share a host, and use the network all the same."""


def total(comm):
    return comm.all_reduce(np.ones(3), algorithm="ring")[0]


def test_groups_share_the_connections_between_two_ranks():
    def body(comm):
        links = {id(peer.link) for peer in comm.backend.transport.peers.values()}
        half = comm.split(comm.rank // 2)
        groups = [comm.duplicate(), half, half.duplicate()]
        for group in groups:
            assert {id(peer.link) for peer in group.backend.transport.peers.values()} <= links
            assert total(group) == group.size

    TCPRanks(4).run(body)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_group_that_ends_disturbs_no_other(end):
    """Neither the one that it was made from, nor another, nor, if it is closed, those that were made from it."""

    def body(comm):
        first, second = comm.duplicate(), comm.duplicate()
        inner = first.duplicate()
        pending = second.all_reduce(np.ones(3), algorithm="ring", async_op=True) if comm.rank else None
        getattr(first, end)()
        assert total(comm) == comm.size
        comm.close()
        assert (pending.wait() if comm.rank else second.all_reduce(np.ones(3), algorithm="ring"))[0] == comm.size
        if end == "close":
            assert total(inner) == comm.size
        getattr(second, end)()
        if end == "close":
            assert total(inner) == comm.size
            inner.close()

    TCPRanks(3).run(body)


def test_a_group_is_aborted_while_the_receiver_of_a_long_message_grants_it():
    """The sender has not read the CTS before its abort, after which no data may follow."""
    with both_ranks() as (one, other):
        sender, receiver = run_threads(one.duplicate, other.duplicate)
        sender.send(np.ones(LONG, np.uint8), 1, async_op=True)
        work = receiver.recv(np.ones(LONG, np.uint8), 0, async_op=True)
        until(lambda: receiver.backend.engine.poll() and receiver.backend.transport.peers[0].link.incoming)
        sender.abort()
        with pytest.raises(RankLost, match="rank 0 is gone"):
            work.wait()
        receiver.abort()
        assert [*run_threads(lambda: total(one), lambda: total(other))] == [2, 2]


@pytest.mark.parametrize("quitter", ["receiver", "sender"])
def test_a_group_that_ends_within_a_message_disturbs_no_other(quitter):
    """The rest of the message passes, as it was, and is dropped.  Both ends may use their memory again."""
    begun, ended = threading.Barrier(2), threading.Event()

    def body(comm):
        other, x = comm.duplicate(), np.full(LONG, comm.rank + 1, np.uint8)
        work = other.recv(x, 1, async_op=True) if comm.rank == 0 else other.send(x, 0, async_op=True)
        while comm.rank == 0 and x[0] == 1:
            assert not work.done()
        while comm.rank == 1 and not begun.n_waiting:
            assert not work.done()
        begun.wait(TIMEOUT)
        me = "receiver" if comm.rank == 0 else "sender"
        if me == quitter:
            other.abort()
            before = x.copy()
            x[1:] = 7
            ended.set()
        else:
            assert ended.wait(TIMEOUT)
            with contextlib.suppress(RankLost):  # unless the rest came before the report of the abort
                work.wait()
                assert comm.rank or (x == 2).all()
            other.abort()
        y = np.zeros(LONG, np.uint8)
        comm.recv(y, 1) if comm.rank == 0 else comm.send(np.full(LONG, 9, np.uint8), 0)
        assert comm.rank or (y == 9).all()
        assert total(comm) == 2
        assert me != quitter or (before[0] == 2 and (x[1:] == 7).all())

    TCPRanks(2).run(body)


def test_messages_that_a_group_does_not_receive_hold_up_no_other():
    """Each group may have as much in flight as one of its own connection would have."""
    x = np.zeros(200 << 10, np.uint8)

    def body(comm):
        groups = [comm.duplicate() for _ in range(3)]
        for group in groups if comm.rank else ():
            for _ in range(18):
                group.send(x, 0)
        for group in reversed(groups) if comm.rank == 0 else ():
            for _ in range(18):
                group.recv(x.copy(), 1)

    TCPRanks(2).run(body)


def test_threads_use_groups_that_share_connections():
    def body(comm):
        groups = [comm.duplicate() for _ in range(3)]
        x = np.arange(100_000.0)

        def use(group):
            return [group.all_reduce(x.copy(), algorithm="ring")[-1] for _ in range(20)]

        for result in run_threads(*[lambda group=group: use(group) for group in groups]):
            assert result == [x[-1] * comm.size] * 20

    TCPRanks(2).run(body)


def test_a_rank_that_ends_is_lost_in_all_groups():
    def body(comm):
        groups = [comm, comm.duplicate(), comm.duplicate()]
        comm.rendezvous.barrier()
        if comm.rank == 2:
            for peer in comm.backend.transport.peers.values():
                peer.link.sock.shutdown(socket.SHUT_RDWR)
            return
        for group in groups:
            with pytest.raises(RankLost, match="rank 2"):
                group.recv(np.zeros(1), 2)

    TCPRanks(3).run(body)


def test_a_group_that_timed_out_disturbs_no_other():
    def body(comm):
        other = comm.duplicate()
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout):
                other.barrier(timeout=0.05)
        comm.rendezvous.barrier()
        if comm.rank == 1:
            with contextlib.suppress(KosError):  # unless it has what it needs of rank 0
                other.barrier()
        assert total(comm) == 2

    TCPRanks(2).run(body)
