"""Messages of the compiled core: refused, cancelled, waiting for credits, in one copy and in pieces."""

import time
import weakref
from typing import Any

import numpy as np
import pytest

from kos._core import native
from kos.comm.host.shared.segment import PID, STARTED
from kos.dtypes import DTYPES
from tests.comm.tcp_ranks import run_threads
from tests.core.core_ranks import group, groups, needs_core, segment, together
from tests.core.group import CoreError, CoreGroup

pytestmark = needs_core


@pytest.fixture(params=[False, True], ids=["pieces", "one copy"])
def pair(request):
    with groups(2) as made:
        if request.param:
            assert run_threads(*[group.connect for group in made]) == [True] * 2
        yield made


def send(group: CoreGroup, x: Any, dst: int, tag: int = 0) -> Any:
    return group.prepare("send", "uint8", x.size, dst=dst, tag=tag).start(x)


def recv(group: CoreGroup, x: Any, src: int, tag: int = 0) -> Any:
    return group.prepare("recv", "uint8", x.size, src=src, tag=tag).start(x)


def data(nbytes: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def end_of(nbytes: int) -> int:
    """What the core tells of the other end of a message of uint8."""
    return nbytes << 8 | list(DTYPES).index("uint8")


def end(*works: Any) -> None:
    left = list(works)
    while left:
        left = [work for work in left if not work.done()]


def test_a_barrier_takes_messages_that_fill_the_mailbox_many_times(pair):
    """Rank 1 waits in a barrier while rank 0 sends blocking messages, within the credits."""
    a, b = pair
    x = data(1000, 1)

    def first():
        for _ in range(2000):
            a.prepare("send", "uint8", 1000, dst=1).run(x)
        a.prepare("barrier").run()

    def second():
        b.prepare("barrier").run()
        for _ in range(2000):
            y = np.zeros_like(x)
            b.prepare("recv", "uint8", 1000, src=0).run(y)
            assert (x == y).all()

    assert run_threads(first, second) == [None, None]


def test_messages_that_find_no_room_wait_for_it_and_not_for_their_receives(pair):
    """The room of a mailbox has fewer places of 60,000 bytes than the mailbox has headers."""
    a, b = pair
    sent = [data(60_000, seed) for seed in range(30)]
    works = [send(a, x, 1) for x in sent]
    assert not works[-1].done()
    barrier = b.prepare("barrier").start()
    for work in works:  # no receive has begun
        deadline = time.monotonic() + 5
        while not work.done():
            assert time.monotonic() < deadline, "it waits for its receive"
            barrier.done()
    a.prepare("barrier").run()
    barrier.wait()
    for x in sent:
        y = np.zeros_like(x)
        recv(b, y, 0).wait()
        assert (x == y).all()


def test_a_message_that_was_received_gives_all_its_credit_back(pair):
    """Also what each message counts beside its data: 20,000 of them would use up all credit."""
    a, b = pair
    x, y = data(100, 1), np.zeros(100, np.uint8)
    for _ in range(20_000):
        sent = send(a, x, 1)
        assert sent.done(), "it waits for its receive"
        end(recv(b, y, 0))


def test_memory_that_cannot_be_read_comes_in_pieces():
    """As that of a device.  Here process_vm_readv gets a number of no process."""
    with groups(2) as (a, b):
        assert run_threads(a.connect, b.connect) == [True, True]
        line = a.lines[0]
        a.words[line + PID], a.words[line + STARTED] = 1 << 30, 0
        x, y = data(3_000_001, 1), np.zeros(3_000_001, np.uint8)
        end(send(a, x, 1), recv(b, y, 0))
        assert (x == y).all()
        theirs = [np.zeros(400_000), np.zeros(400_000)]
        calls = [g.prepare("all_gather", "float64", 200_000) for g in (a, b)]
        together(calls, [(np.full(200_000, rank + 1.0), out) for rank, out in enumerate(theirs)])
        assert all((out == np.repeat([1.0, 2.0], 200_000)).all() for out in theirs)


def test_a_send_completes_beside_a_receive_that_is_refused(pair):
    a, b = pair
    for nbytes, waits in ((500_000, False), (500_000, True), (3_000_001, False)):
        x, y, got = data(nbytes, 1), np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        send(b, x[:10], 0)
        work = a.prepare("send_recv", "uint8", nbytes, dst=1, src=1).start(x, y, waits=waits)
        assert not work.done() and work.missing(1) == native.AWAITS_READ
        theirs = recv(b, got, 0)
        with pytest.raises(CoreError, match=f"^MESSAGE of rank 1, {end_of(10)}, by rank 0"):
            end(theirs, work)
        end(theirs)
        assert (got == x).all() and not y.any() and work.missing(1) == 0
    theirs = recv(b, got, 0)
    assert not theirs.done()  # nothing is left of the others
    end(send(a, x, 1), theirs)


@pytest.mark.parametrize("direct", [False, True])
def test_a_receive_completes_beside_a_send_that_is_refused(direct):
    with groups(3) as made:
        if direct:
            assert run_threads(*[group.connect for group in made]) == [True] * 3
        a, b, c = made
        x, y = data(500_000, 1), np.zeros(500_000, np.uint8)
        work = a.prepare("send_recv", "uint8", x.size, dst=1, src=2).start(x, y)
        assert [work.missing(rank) for rank in range(3)] == [0, native.AWAITS_READ, native.AWAITS_MESSAGE]
        with pytest.raises(CoreError, match=f"^MESSAGE of rank 0, {end_of(500_000)}, by rank 1"):
            recv(b, y[:3], 0).wait()
        assert not work.done()
        assert [work.missing(rank) for rank in range(3)] == [0, 0, native.AWAITS_MESSAGE]
        with pytest.raises(CoreError, match=f"^REFUSED_MESSAGE of rank 1, {end_of(3)}, by rank 0"):
            end(send(c, x + 1, 0), work)
        assert (y == x + 1).all()


def test_a_cancelled_message_releases_its_array(pair):
    a, _ = pair
    for nbytes in (10, 500_000):
        lost = np.zeros(nbytes, np.uint8)
        works = [recv(a, lost, 1), *([send(a, lost, 1)] if nbytes > 10 else [])]
        alive = weakref.ref(lost)
        del lost
        for work in works:
            work.cancel()
        assert alive() is None


def test_a_message_within_a_collective_fails_with_it_or_an_earlier_one(pair):
    a, b = pair
    x, y, z = data(500_000, 1), np.zeros(500_000, np.uint8), np.zeros(3, np.uint8)
    before = a.prepare("recv", "uint8", x.size, src=1, tag=1).start(y, sequence=3)
    later = [
        a.prepare("recv", "uint8", 3, src=1, tag=2 + index).start(z, sequence=sequence)
        for index, sequence in enumerate((4, 5, None))
    ]
    b.fail(4)
    for work in later:
        with pytest.raises(CoreError, match="^TOLD of rank 1, 4"):
            work.done()
    for sequence in (4, None):
        with pytest.raises(CoreError, match="^TOLD of rank 1, 4"):
            b.prepare("send", "uint8", 3, tag=2).start(z, sequence=sequence)
    assert not before.done()
    end(b.prepare("send", "uint8", x.size, tag=1).start(x, sequence=3), before)
    assert (x == y).all()


@pytest.mark.parametrize("direct", [0, 1], ids=["pieces", "one copy"])
def test_sends_may_be_cancelled_without_end(direct):
    """Each of them has used an answer, which the receiver gives back.  Of 256 ranks, a mailbox has 512 answers."""
    with segment(256) as file:
        a, b = (group(file, rank, 256) for rank in range(2))
        a.core.direct = b.core.direct = direct
        x, y = data(50_000, 1), np.zeros(50_000, np.uint8)
        for number in range(1200):
            work = send(a, y, 1, number % 2)
            assert work.missing(1)
            work.cancel()
            if number % 50 == 49:
                end(send(a, x[:4], 1, 0), recv(b, y[:4], 0, 0), send(a, x[:4], 1, 1), recv(b, y[:4], 0, 1))
        for number in range(1200):  # when the receiver has answered already
            work, theirs = send(a, x, 1, 6), recv(b, y, 0, 6)
            assert theirs.done() == direct
            if number % 4 == 1:
                theirs.cancel()
            work.cancel()
            if number % 4 > 1:
                theirs.cancel()
            elif not (direct or number % 4):
                end(send(a, x, 1, 6), theirs)
        sends, works = [send(a, x, 1, 5) for _ in range(30)], [recv(b, np.zeros_like(x), 0, 5) for _ in range(30)]
        end(*sends, *works)
        end(send(a, x, 1, 5), recv(b, y, 0, 5))
        assert (x == y).all()
        a.close()
        b.close()


def test_an_answer_is_not_used_again_before_its_sender_has_seen_it():
    """All 512 answers of a mailbox are in use when the receiver of a message in pieces cancels, and another is sent."""
    with segment(256) as file:
        a, b = (group(file, rank, 256) for rank in range(2))
        x, y = data(50_000, 1), np.zeros(50_000, np.uint8)
        for number in range(511):
            send(a, x, 1, 5).cancel()
            if number % 50 == 49:
                end(send(a, x[:4], 1, 0), recv(b, y[:4], 0, 0))
        work, theirs = send(a, x, 1, 6), recv(b, y, 0, 6)
        assert not theirs.done()
        theirs.cancel()
        other = send(a, x[::-1].copy(), 1, 7)
        assert work.done() and not other.done()
        end(other, recv(b, y, 0, 7))
        assert (x[::-1] == y).all()
        a.close()
        b.close()


@pytest.mark.parametrize("posted", [False, True], ids=["alone", "beside another"])
def test_a_message_in_pieces_may_be_cancelled_by_either_end(posted):
    """A receive whose sender cancels gets the next message, and a second one the message after it."""
    with groups(2) as (a, b):
        for number in range(6):
            x, y, z = data(3_000_000, number), np.zeros(3_000_000, np.uint8), np.zeros(3, np.uint8)
            work, theirs = send(a, x, 1), recv(b, y, 0)
            others = [send(a, x[:3], 1)] if posted else []
            assert not work.done() and not theirs.done() and not work.done() and not theirs.done()
            assert 0 < np.count_nonzero(y) < y.size
            if number % 2:
                theirs.cancel()
                end(work)
            else:
                work.cancel()
                expected = data(3_000_000, number + 1)
                if posted:  # it has come before the cancellation, and has other bytes
                    with pytest.raises(CoreError, match=f"^MESSAGE of rank 0, {end_of(3)}"):
                        end(theirs)
                    others.append(send(a, x[:3], 1))
                else:
                    second = recv(b, z, 0)
                    end(send(a, expected, 1), theirs, send(a, x[:3], 1), second)
                    assert (y == expected).all() and (z == x[:3]).all()
            if others:
                end(*others, recv(b, z, 0))
                assert (z == x[:3]).all()
