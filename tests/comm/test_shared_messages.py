"""Messages through shared memory: headers and answers that run out, what is taken early, ranks that have ended."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kos
from kos.comm.host.shared.segment import ANSWERS, HEADERS
from kos.errors import CollectiveTimeout, RankLost
from tests.comm.ranks import on_each_rank, time_out_beside_others
from tests.comm.shared_ranks import end_process, run
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks
from tests.comm.test_host_messages import LONG, assert_nothing_is_left, ends

EAGER = 128 << 10  # bytes


def test_more_messages_than_headers() -> None:
    """They wait for the receiver, which waits for a message of another tag."""
    number = 3 * HEADERS

    def body(comm: kos.Communicator) -> None:
        x = np.arange(number)
        if comm.rank == 0:
            works = [comm.send(x[i : i + 1], 1, i % 2, async_op=True) for i in range(number)]
            assert not works[-1].done() and works[HEADERS - 1].done()
            comm.rendezvous.barrier()
            comm.send(np.ones(1), 1, 2)
            for work in works:
                work.wait()
        else:
            comm.rendezvous.barrier()
            comm.recv(np.zeros(1), 0, 2)
            for i in range(number):
                assert comm.recv(np.zeros(1, int), 0, i % 2)[0] == i
        assert_nothing_is_left(comm)

    run(body, 2)


def test_more_long_messages_than_answers() -> None:
    """More long messages than answers: they do not block messages with other tags, and arrive in order."""
    count = ANSWERS + 20
    values = np.arange(count + EAGER, dtype=np.uint16).astype(np.uint8)

    def body(comm: kos.Communicator) -> None:
        x = np.empty(EAGER + 1, np.uint8)
        if comm.rank == 0:
            works = [comm.send(values[at : at + x.size], 1, async_op=True) for at in range(count)]
            works.append(comm.send(values[: x.size], 1, tag=1, async_op=True))
            for work in works:
                work.wait()
        else:
            assert (comm.recv(x, 0, tag=1) == values[: x.size]).all()
            for at in range(count):
                assert (comm.recv(x, 0) == values[at : at + x.size]).all()
        assert_nothing_is_left(comm)

    TCPRanks(2).run(body)


@on_each_rank(run, 2)
def test_a_receive_takes_no_later_message(comm: kos.Communicator, /) -> None:
    """A message that is taken without a receive is copied twice."""
    x = np.arange(EAGER, dtype=np.uint8)
    if comm.rank == 0:
        for i in range(3):
            comm.send(x + i, 1, i)
    comm.barrier()
    for i in range(3 if comm.rank else 0):
        assert (comm.recv(np.zeros_like(x), 0, i) == x + i).all()
        assert not ends(comm)[0].arrived
    assert_nothing_is_left(comm)


def test_timeout_of_a_message_gives_up_no_other() -> None:
    run(time_out_beside_others, 2)


@pytest.mark.parametrize("count", [1, LONG])
@on_each_rank(run, 2)
def test_two_ranks_that_both_send_first(comm: kos.Communicator, /, count: int) -> None:
    """Of long messages both wait, and the one that gives up says for whom."""
    peer, x = 1 - comm.rank, np.full(count, comm.rank, np.uint8)
    if count == 1:
        comm.send(x, peer)
        assert comm.recv(np.empty_like(x), peer)[0] == peer
    else:
        with pytest.raises(CollectiveTimeout, match=r"send #0 .*: .*rank 1 did not receive"):
            comm.send(x, peer, timeout=0.3 if comm.rank == 0 else TIMEOUT)


@pytest.mark.parametrize("count", [1, LONG])
def test_the_last_message_of_a_rank_that_has_ended(count: int) -> None:
    """It is received, if it has left the rank's memory; the receive after it names the rank."""
    ended = threading.Event()

    def body(comm: kos.Communicator) -> None:
        x = np.ones(count, np.uint8)
        if comm.rank == 1:
            comm.send(x, 0, async_op=True)
            end_process(comm)
            ended.set()
            return
        assert ended.wait(TIMEOUT)
        if count == 1:
            assert comm.recv(np.zeros(1, np.uint8), 1)[0] == 1
        with pytest.raises(RankLost, match="recv #. .*: rank 1 is gone: its process"):
            comm.recv(np.zeros(3, np.uint8), 1, 5)

    run(body, 2, close=False)


@pytest.mark.parametrize("early", [True, False])
def test_a_send_cancelled_without_a_failure_of_the_group_is_not_received(early: bool) -> None:
    """Its exchange has lost the rank that it received from, and the program goes on with the array."""
    cancelled, waits = threading.Event(), threading.Event()

    def body(comm: kos.Communicator) -> None:
        x, out = np.full(LONG, 1, np.uint8), np.zeros(LONG, np.uint8)
        if comm.rank == 2:
            end_process(comm)
        comm.rendezvous.barrier()
        if comm.rank == 0:
            with pytest.raises(RankLost, match="send_recv #0 .*: rank 2 is gone"):
                comm.send_recv(x, out, 1, 2)
            x[:] = 7
            cancelled.set()
            assert waits.wait(TIMEOUT)
            comm.send(np.full(LONG, 2, np.uint8), 1)
        elif comm.rank == 1:
            assert cancelled.wait(TIMEOUT)
            if early:
                work = comm.recv(out, 0, async_op=True)
                assert not work.done()
            else:
                comm.send(out[:1], 2)  # takes nothing
            waits.set()
            assert set(work.wait() if early else comm.recv(out, 0)) == {2}

    run(body, 3, close=False)
