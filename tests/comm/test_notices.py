"""Messages of a group's hub other than exchanges: notices and deaths.  Also the freeing of communicators of MPI."""

import queue
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from kos.comm.control import mpi_job
from kos.comm.control.group import TCPControlPlane
from kos.comm.control.hub import CONNECTION_CLOSED
from kos.comm.control.mpi import MPIRanks
from kos.comm.control.notices import FORWARD_SECONDS
from kos.errors import RankLost, RendezvousError
from tests.comm.ranks import until
from tests.comm.tcp_ranks import run_ranks

WAIT = 20.0  # seconds


def die(rendezvous: TCPControlPlane) -> None:
    """As the kernel does when the process dies."""
    assert rendezvous.connection is not None
    rendezvous.connection.sock.shutdown(socket.SHUT_RDWR)


def test_a_hub_that_does_not_forward_a_notice_in_time():
    """Other ranks name the rank of the hub.  That rank itself runs, and names none."""

    class Unread(set[int]):
        def __contains__(self, token: object) -> bool:
            return False

    def ask(rendezvous):
        rendezvous.inbox.forwarded = Unread()  # the hub may be faster than any timeout
        silent = rendezvous.send_notice("query", None, 1e-9)
        rendezvous.barrier()
        return silent

    assert run_ranks(3, ask) == [[], [0], [0]]


def test_a_notice_that_is_awaited_has_been_forwarded():
    """What its sender tells other ranks afterwards arrives later.  Without a hub, the sender waits for no answer."""

    def body(rendezvous):
        channel = rendezvous.channel
        rendezvous.barrier()
        for number in range(50):
            if rendezvous.rank == 1:
                channel.send("first", number, wait=True)
                told.put(number)
                assert read.get(timeout=WAIT) == number
            elif rendezvous.rank == 2:
                assert told.get(timeout=WAIT) == number
                assert channel.receive("first") == [[1, number]]
                read.put(number)
        rendezvous.barrier()
        if rendezvous.rank == 0:
            die(rendezvous)
        elif rendezvous.rank == 1:
            until(lambda: 0 in rendezvous.deaths())
            began = time.monotonic()
            channel.send("last", wait=True)
            assert time.monotonic() - began < FORWARD_SECONDS / 2

    told, read = queue.Queue[int](), queue.Queue[int]()
    run_ranks(3, body)


def test_notices_reach_all_others_in_order():
    """Notices of two topics are sent during and between exchanges."""

    def body(rendezvous):
        me, channel, topics = rendezvous.rank, rendezvous.channel, ("one", "other")
        rendezvous.barrier()
        for number in range(20):
            for topic in topics:
                channel.send(topic, topic, number)
            if number == 10:
                rendezvous.barrier()
        for topic in topics:
            got = list[list[int]]()
            until(lambda topic=topic, got=got: got.extend(channel.receive(topic)) or len(got) == 40)
            for other in {0, 1, 2} - {me}:
                assert [notice for notice in got if notice[0] == other] == [[other, topic, n] for n in range(20)]
        rendezvous.barrier()

    run_ranks(3, body)


def test_a_notice_arrives_while_a_rank_waits_in_an_exchange():
    """Another of its threads gets it."""
    came = threading.Event()

    def body(rendezvous):
        channel = rendezvous.channel
        if rendezvous.rank == 1:
            waiting = threading.Thread(target=rendezvous.barrier)
            waiting.start()
            until(rendezvous.inbox.notices["any"].__len__)
            assert channel.receive("any") == [[0, "of rank 0"]]
            came.set()
            waiting.join(WAIT)
        else:
            channel.send("any", "of rank 0")
            assert came.wait(WAIT)
            rendezvous.barrier()

    run_ranks(2, body)


def test_a_notice_that_is_not_urgent_is_for_those_that_stay():
    closed = threading.Event()

    def body(rendezvous):
        channel, forwarded = rendezvous.channel, 0
        rendezvous.barrier()
        if rendezvous.rank == 1:
            channel.send("any", soon=False)
            rendezvous.close()
            closed.set()
        elif rendezvous.rank == 2:
            assert closed.wait(WAIT)
            forwarded = len(until(lambda: channel.receive("any")))
        return forwarded

    assert run_ranks(3, body) == [0, 0, 1]


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("gone", [0, 2])
def test_a_death_is_found_at_once(gone, busy):
    """Whether or not other ranks wait in an exchange.  Exchanges then raise it."""

    def body(rendezvous):
        rendezvous.barrier()
        if rendezvous.rank == gone:
            return die(rendezvous)
        if not busy:
            began = time.monotonic()
            assert until(rendezvous.deaths) == {gone: CONNECTION_CLOSED}
            assert time.monotonic() - began < 5
        with pytest.raises(RankLost, match=f"rank {gone} is gone"):
            rendezvous.barrier()

    run_ranks(4, body)


@pytest.mark.parametrize("first", ["a death", "a timeout"])
def test_a_failed_group_still_carries_notices_and_deaths(first):
    heard = threading.Barrier(2)

    def body(rendezvous):
        channel = rendezvous.channel
        rendezvous.barrier()
        if rendezvous.rank == 3:
            if first == "a death":
                die(rendezvous)
            heard.wait(WAIT)
            return
        if first == "a timeout" and rendezvous.rank == 0:
            rendezvous.timeout = 0.2
        with pytest.raises((RankLost, RendezvousError)):
            rendezvous.barrier()
        if rendezvous.rank == 2:
            channel.send("any", "after it")
            die(rendezvous)
            return
        assert until(lambda: channel.receive("any")) == [[2, "after it"]]
        assert until(lambda: 2 in rendezvous.deaths())
        if rendezvous.rank == 0:
            heard.wait(WAIT)

    run_ranks(4, body)


def test_the_hub_serves_until_all_have_closed():
    """Rank 0, which runs the hub, closes first.  This is not reported as a death."""
    closed = threading.Event()

    def body(rendezvous):
        channel = rendezvous.channel
        rendezvous.barrier()
        if rendezvous.rank == 0:
            rendezvous.close()
            closed.set()
            return
        assert closed.wait(WAIT)
        channel.send("any")
        assert until(lambda: channel.receive("any")) == [[3 - rendezvous.rank]]
        assert rendezvous.deaths() == {}
        with pytest.raises(RankLost, match="rank 0 is gone: it closed the group"):
            rendezvous.barrier()

    run_ranks(3, body)


def test_two_threads_close_the_last_two_groups(mpi_library, monkeypatch):
    """One of them frees the communicator that the groups share."""
    freed, both = [], threading.Barrier(2)
    shared = SimpleNamespace()
    whole = MPIRanks(shared, [0])
    groups = [whole, whole.of([0])]
    mpi_library.Is_finalized = lambda: both.wait(WAIT) < 0  # once both have left
    monkeypatch.setattr(mpi_job, "free_after_all", freed.append)
    threads = [threading.Thread(target=group.free, args=(True, None)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert freed == [shared]


@pytest.fixture
def to_close(mpi_library):
    """``make(number, test)``: a communicator of MPI.  ``test`` says whether all of its ranks have closed it.

    Also the numbers of those that were freed.
    """
    freed = list[int]()
    mpi_library.Is_finalized, mpi_library.Exception = lambda: False, OSError

    def make(number, test):
        return SimpleNamespace(Ibarrier=lambda: SimpleNamespace(Test=test), Free=lambda: freed.append(number))

    return make, freed


def test_a_communicator_is_freed_once_all_its_ranks_have_closed_it(to_close):
    (make, freed), done = to_close, {2}
    for number in (1, 2):
        mpi_job.free_after_all(make(number, lambda number=number: number in done))
    assert freed == [2]
    done.add(1)
    mpi_job.free_closed()
    assert freed == [2, 1]


def test_another_thread_frees_communicators_too(to_close):
    """While one thread checks whether a communicator can be freed, another thread checks all of them."""
    (make, freed), looks, all_closed = to_close, iter(range(3)), threading.Event()

    def look():
        if all_closed.is_set() and next(looks, None) is not None:
            mpi_job.free_closed()
        return all_closed.is_set()

    for number in range(4):
        mpi_job.free_after_all(make(number, look))
    assert freed == []
    all_closed.set()
    for _ in range(2):
        mpi_job.free_closed()
        assert sorted(freed) == [0, 1, 2, 3]
