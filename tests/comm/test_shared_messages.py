"""Messages through shared memory: exhausted headers and answers, unexpected messages, ranks that have ended."""

import threading

import numpy as np
import pytest

from kos.comm.host.shared.segment import STARTED
from kos.errors import CollectiveMismatch, CollectiveTimeout, RankLost
from tests.comm.ranks import on_each_rank, time_out_beside_others
from tests.comm.shared_ranks import end_process, needs_core, run
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks
from tests.comm.test_host_messages import LONG, assert_nothing_is_left

pytestmark = needs_core

EAGER = 128 << 10  # bytes
HEADERS, MANY = 64, 1100


@pytest.mark.parametrize("size", [2, 3])
def test_any_messages_at_once(size):
    """Of any size and tag, repeated on the same arrays or not, waited for at once or later."""
    print("seed", seed := int(np.random.SeedSequence().generate_state(1)[0]))
    random = np.random.default_rng(seed)
    sizes = [0, 1, 1000, 70_000, EAGER, EAGER + 1]
    plan = [(*random.choice(size, 2, replace=False), random.integers(3), random.choice(sizes)) for _ in range(400)]

    def body(comm):
        mine, works, held = np.random.default_rng(seed + comm.rank), [], []
        for number, (src, dst, tag, count) in enumerate(plan):
            x = np.full(count, number % 251, np.uint8)
            if comm.rank == src:
                works.append(comm.send(x, dst, tag, async_op=True))
            elif comm.rank == dst:
                x[:] = 255
                held.append((x, number % 251))
                works.append(comm.recv(x, src, tag, async_op=True))
            if mine.random() < 0.1:
                works.pop(int(mine.integers(len(works)))).wait() if works and number > 390 else None
        for work in works:
            work.wait()
        assert all((x == value).all() for x, value in held)
        x, out = np.zeros(1000), np.zeros(1000)
        for step in range(20):  # cached
            x[:] = 100 * step + comm.rank
            comm.send_recv(x, out, (comm.rank + 1) % size, (comm.rank - 1) % size)
            assert (out == 100 * step + (comm.rank - 1) % size).all()
        assert_nothing_is_left(comm)

    run(body, size)


def test_more_messages_than_headers():
    """They wait for the receiver, which waits for a message of another tag."""
    number = 3 * HEADERS

    def body(comm):
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


def test_many_long_messages_that_nobody_receives_yet():
    """They do not block messages with other tags, and arrive in order."""
    count = MANY
    values = np.arange(count + EAGER, dtype=np.uint16).astype(np.uint8)

    def body(comm):
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
def test_a_receive_does_not_take_a_later_message(comm, /):
    """A message that is taken without a receive is copied twice, and kept meanwhile."""
    x = np.arange(EAGER // 8, dtype=np.uint8)
    if comm.rank == 0:
        for i in range(3):
            comm.send(x + i, 1, i)
    comm.rendezvous.barrier()
    for i in range(3 if comm.rank else 0):
        assert (comm.recv(np.zeros_like(x), 0, i) == x + i).all()
        assert comm.backend.calls.core.held()[0] == 0
    assert_nothing_is_left(comm)


def test_timeout_of_a_message_gives_up_no_other():
    run(time_out_beside_others, 2)


@pytest.mark.parametrize("count", [1, LONG])
@on_each_rank(run, 2)
def test_two_ranks_that_both_send_before_they_receive(comm, /, count):
    """Of long messages both wait, and the one that gives up says for whom."""
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
    """It is received, if it has left the rank's memory; the receive after it names the rank."""
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
    """Its exchange has lost the rank that it received from, and the program goes on with the array."""
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


@pytest.mark.parametrize("count", [EAGER + 1, LONG + 7])
def test_exchange_of_long_messages(count):
    """Odd sizes, and arrays that are read-only or not aligned."""

    def body(comm):
        peer, memory = 1 - comm.rank, np.zeros((2, count + 3), np.uint8)
        x, out = memory[0, 1 : count + 1], memory[1, 3:]
        readonly = x.view()
        readonly.flags.writeable = False
        persistent = comm.send_recv_init(x, out, peer, peer)
        for step in range(12):
            x[:] = np.arange(step + comm.rank, step + comm.rank + count, dtype=np.int64)
            if step % 3 == 0:
                persistent.start().wait()
            else:
                comm.send_recv(readonly if step % 3 == 1 else x, out, peer, peer)
            assert (out == np.arange(step + peer, step + peer + count).astype(np.uint8)).all()
        assert not memory[1, :3].any() and not memory[0, 0] and not memory[0, count + 1 :].any()
        assert_nothing_is_left(comm)

    TCPRanks(2).run(body)


def test_exchange_beside_other_messages():
    """Messages that arrive before the exchange, an earlier receive, and more messages than headers."""

    def body(comm):
        peer, x = 1 - comm.rank, np.full(EAGER + 1, comm.rank + 1, np.uint8)
        out = np.empty_like(x)
        exchange = comm.send_recv_init(x, out, peer, peer)

        def check():
            out[:] = 0
            assert (exchange.start().wait() == peer + 1).all()

        check()
        for number, count in ((1, 1), (HEADERS - 1, 1), (HEADERS, 1), (HEADERS + 1, 1), (1, x.size), (MANY, x.size)):
            sends, receives = (number if number < MANY or rank == 0 else 0 for rank in (comm.rank, peer))
            works = [comm.send(x[:count], peer, 1 + i % 2, async_op=True) for i in range(sends)]
            check()
            comm.send_recv(x[:1], np.empty(1, np.uint8), peer, peer, 4)  # takes all messages
            check()
            received = np.zeros(count, np.uint8)
            assert all(comm.recv(received, peer, 1 + i % 2)[-1] == peer + 1 for i in range(receives))
            for work in works:
                work.wait()
            check()
        first = comm.recv(np.empty_like(x), peer, async_op=True)  # gets the first message
        works = [comm.send(np.full_like(x, 7), peer, async_op=True)]
        check()
        assert (first.wait() == 7).all()
        works[0].wait()
        check()
        assert_nothing_is_left(comm)

    TCPRanks(2).run(body)


def test_exchange_after_a_message_that_waits_for_a_header():
    def body(comm):
        peer, x = 1 - comm.rank, np.full(EAGER + 1, comm.rank + 1, np.uint8)
        exchange, out = comm.send_recv_init(x, np.empty_like(x), peer, peer), np.empty_like(x)
        exchange.start().wait()
        count = HEADERS if comm.rank == 0 else 0
        works = [comm.send(x[:1], peer, 1, async_op=True) for _ in range(count)]
        works += [comm.send(np.full_like(x, 7), peer, async_op=True) for _ in range(count and 1)]
        comm.rendezvous.barrier()
        other = comm.recv(np.empty(1, np.uint8), peer, 9, async_op=True)
        assert not other.done()  # takes what has arrived, which frees headers of the other rank
        comm.rendezvous.barrier()
        if comm.rank == 1:
            assert (comm.recv(out, peer) == 7).all()
        assert (exchange.start().wait() == peer + 1).all()
        assert all(comm.recv(out[:1], peer, 1)[0] == 1 for _ in range(HEADERS if comm.rank == 1 else 0))
        comm.send(x[:1], peer, 9)
        for work in [*works, other]:
            work.wait()
        assert_nothing_is_left(comm)

    run(body, 2)


def test_exchange_of_messages_that_differ():
    """Both ranks raise, and the next exchange on the same arrays succeeds."""

    def body(comm):
        peer, x = 1 - comm.rank, np.full(LONG, comm.rank, np.uint8)
        out = np.empty_like(x)
        exchange = comm.send_recv_init(x, out, peer, peer)
        shorter = comm.send_recv_init(x[1:], np.empty(LONG - 1, np.uint8), peer, peer)
        expected = f"rank {comm.rank} expected {LONG - comm.rank} elements of uint8 from rank {peer}"
        for _ in range(3):
            assert (exchange.start().wait() == peer).all()
            with pytest.raises(CollectiveMismatch, match=f"send_recv #.*: {expected}"):
                (shorter if comm.rank == 1 else exchange).start().wait()
            comm.barrier()
        assert (exchange.start().wait() == peer).all()
        receives_less = comm.send_recv_init(x, np.empty(LONG - 1, np.uint8), peer, peer)
        with pytest.raises(CollectiveMismatch, match=f"send_recv #.*: rank 1 expected {LONG - 1} elements of "):
            (receives_less if comm.rank == 1 else exchange).start().wait()
        assert (exchange.start().wait() == peer).all()
        assert_nothing_is_left(comm)

    run(body, 2)


def test_exchange_with_a_rank_that_ends_before_it_has_read():
    ended = threading.Event()

    def body(comm):
        peer, x = 1 - comm.rank, np.full(LONG, comm.rank, np.uint8)
        out = np.empty_like(x)
        exchange = comm.send_recv_init(x, out, peer, peer)
        exchange.start().wait()
        if comm.rank == 1:
            comm.send(x, 0, async_op=True)
            calls = comm.backend.calls
            calls.words[calls._line + STARTED] += 1  # as if another process had its process ID
            ended.set()
            return
        assert ended.wait(TIMEOUT)
        with pytest.raises(RankLost, match="send_recv #. .*: rank 1 is gone: its process"):
            exchange.start().wait()
        assert (out == 1).all()

    run(body, 2, close=False)
