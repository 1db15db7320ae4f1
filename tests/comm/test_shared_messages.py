"""Messages through shared memory: unexpected and cancelled messages, exchanges, ranks that have ended."""

import threading

import numpy as np
import pytest

from kos.errors import CollectiveTimeout, RankLost
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import end_process, needs_core, run
from tests.comm.tcp_ranks import TIMEOUT
from tests.comm.test_host_messages import LONG, assert_nothing_is_left

pytestmark = needs_core

EAGER = 128 << 10  # bytes


@on_each_rank(run, 2)
def test_a_receive_does_not_take_a_later_message(comm, /):
    """A message that is taken before its receive is copied twice, and kept in between."""
    x = np.arange(EAGER // 8, dtype=np.uint8)
    if comm.rank == 0:
        for i in range(3):
            comm.send(x + i, 1, i)
    comm.rendezvous.barrier()
    for i in range(3 if comm.rank else 0):
        assert (comm.recv(np.zeros_like(x), 0, i) == x + i).all()
        assert comm.backend.calls.core.held()[0] == 0
    assert_nothing_is_left(comm)


@pytest.mark.parametrize("count", [1, LONG])
@on_each_rank(run, 2)
def test_two_ranks_that_both_send_before_they_receive(comm, /, count):
    """With long messages, both ranks wait.  The rank that times out first names the rank that did not receive."""
    peer, x = 1 - comm.rank, np.full(count, comm.rank, np.uint8)
    if count == 1:
        comm.send(x, peer)
        assert comm.recv(np.empty_like(x), peer)[0] == peer
    else:
        with pytest.raises(CollectiveTimeout, match=r"send #0 .*: .*rank 1 did not receive") as caught:
            comm.send(x, peer, timeout=0.3 if comm.rank == 0 else TIMEOUT)
        whose = "" if comm.rank == 0 else "rank 0: "
        assert str(caught.value).startswith(f"{whose}{comm.name}: send #0 of uint8[{count}], to rank 1"), caught.value


@pytest.mark.parametrize("count", [1, LONG])
def test_the_last_message_of_a_rank_that_has_ended(count):
    """It is received if it was copied out of the rank's memory.  The next receive names the rank."""
    ended = threading.Event()

    def body(comm):
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
def test_a_send_cancelled_without_a_failure_of_the_group_is_not_received(early):
    """Its send_recv has lost the rank from which it received, and the program continues to use the array."""
    cancelled, waits = threading.Event(), threading.Event()

    def body(comm):
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
