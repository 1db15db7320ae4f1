"""Receives from any rank, on threads, over ``tcp`` and ``mpi``."""

import threading
from contextlib import suppress
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest

import kos
from kos.comm.host.mpi import MPITransport
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, RankLost
from kos.testing import Fault, spawn
from tests.comm.any_source import kind, run, wait_for_marks
from tests.comm.ranks import MockRanks, on_each_rank
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks, run_ranks

__all__ = ["kind", "run"]  # fixtures


@on_each_rank("run")
def test_receives_match_in_the_order_in_which_they_were_posted(comm, /):
    """From any rank or from one, of arrays or of bytes, cached calls of the core and send_recv."""
    if comm.rank == 1:
        comm.send(np.full(2, -1.0), 0)
        comm.recv(np.zeros(2), 0)  # the core of rank 0 knows both calls from now on
        comm.barrier()
        for number in range(4):
            comm.send(np.full(2, float(number)), 0)
        comm.send_bytes(b"four", 0)
        comm.send_recv(np.full(2, 5.0), np.zeros(2), 0, 0)
    elif comm.rank == 0:
        x = np.zeros(2)
        comm.recv(x, 1)
        comm.send(x, 1)
        first = comm.recv(np.zeros(2), 1, async_op=True)
        wild = [comm.recv(np.zeros(2), async_op=True) for _ in range(2)]
        named = comm.recv(x, 1, async_op=True)
        data = comm.recv_bytes(1, async_op=True)
        both = comm.send_recv(np.ones(2), np.zeros(2), 1, 1, async_op=True)
        comm.barrier()
        assert both.wait()[0] == 5 and data.wait() == b"four" and named.wait()[0] == 3
        assert [work.wait()[0][0] for work in wild] == [1, 2] and first.wait()[0] == 0
        assert all(work.wait()[1] == 1 for work in wild)
    else:
        comm.barrier()


@pytest.mark.parametrize("posted", ["before", "after"])
@on_each_rank("run")
def test_a_message_of_another_size_raises_and_spoils_nothing(comm, /, posted):
    """The receive that it is for raises, and names its sender; another one that waits gets the next message."""
    if comm.rank == 0:
        x, y = np.full(2, 7.0), np.zeros(3, np.float32)
        if posted == "after":
            comm.barrier()
            wait_for_marks(comm)
        works = [comm.recv(x, async_op=True), comm.recv(y, async_op=True)]
        if posted == "before":
            comm.barrier()
        assert (works[1].wait()[0] == 2).all()
        with pytest.raises(CollectiveMismatch, match=r"recv #\d+ .*, from any rank.* with tag 0: rank 0 expected 2 "
                           "elements of float64 from rank 1, got 100000 elements of float64") as caught:  # fmt: skip
            works[0].wait()
        assert caught.value.ranks == (0, 1) and (x == 7).all()
    else:
        comm.barrier()
        sent = comm.send(np.ones(100_000), 0, async_op=True) if comm.rank == 1 else None
        if comm.rank == 1:
            comm.send(np.full(3, 2, np.float32), 0)
        if posted == "after":
            wait_for_marks(comm)
        if sent is not None:
            with suppress(CollectiveMismatch):  # a long message was refused
                sent.wait()
    comm.barrier()


@on_each_rank("run")
def test_no_sender_is_served_alone(comm, /):
    if comm.rank:
        for _ in range(4):
            comm.send(np.zeros(1), 0)
    wait_for_marks(comm)
    if comm.rank == 0:
        for _ in range(4):
            sources = [comm.recv(np.zeros(1))[1] for _ in range(comm.size - 1)]
            assert sorted(sources) == list(range(1, comm.size))


@pytest.mark.parametrize("memory", ["shared", "none"], indirect=True)
@pytest.mark.parametrize("call", ["recv", "recv from any", "all_reduce"])
@on_each_rank(TCPRanks(2).run)
def test_a_wait_that_another_thread_aborts(comm, /, memory, call):
    """Memory and connections are freed before its operations are cancelled; the waiting thread may poll in between."""
    part, x = comm.duplicate(), np.zeros(1)
    if comm.rank == 0:
        waiting = part.all_reduce(x, async_op=True) if call == "all_reduce" else part.recv(
            x, 1 if call == "recv" else None, async_op=True
        )  # fmt: skip
        part.backend.abort("as by another thread")
        assert not part.backend.late(waiting).ranks
        with pytest.raises(CollectiveError, match=": the communicator was aborted$") as caught:
            waiting.wait()
        assert type(caught.value) is CollectiveError and caught.value.ranks == ()
    comm.rendezvous.barrier()
    part.abort()


@on_each_rank("run")
def test_a_rank_that_has_closed_ends_no_receive_from_others(comm, /):
    part, last = comm.duplicate(), comm.size - 1
    if comm.rank == 0:
        for rank in range(1, last):
            comm.recv_bytes(rank)  # it has closed
        comm.send_bytes(b"", last)
        assert part.recv_bytes() == (b"x", last)
        gone = "ranks .* are gone: they closed their" if last > 1 else "rank 1 is gone: it closed its"
        with pytest.raises(RankLost, match=rf"recv #\d of .*{gone} communicator") as caught:
            part.recv(np.zeros(1))
        assert caught.value.ranks == tuple(range(1, comm.size))
    elif comm.rank < last:
        part.close()
        comm.send_bytes(b"", 0)
    else:
        comm.recv_bytes(0)
        part.send_bytes(b"x", 0)
        part.close()
    comm.barrier()


@on_each_rank("run")
def test_groups_in_batches_and_persistent(comm, /):
    """In a group whose ranks are in reverse, beside messages of the world with the same tag."""
    group, last, x = comm.split(0, -comm.rank), comm.size - 1, np.zeros(2)
    assert group is not None
    if comm.rank == last:  # rank 0 of the group
        receive = group.recv_init(x)
        for _ in range(last):
            got, source = receive.start().wait()
            assert got is x and (x == last - source).all()
        group.send(np.zeros(1), last, 1)
        with group.batch() as batch:
            assert group.recv(x) is x
        assert batch.works[0].wait() == (x, last) and (x == 9).all()
        assert comm.recv(x)[1] == 0 and (x == 7).all()
        with pytest.raises(CollectiveTimeout, match="from any rank of the group with tag 3: not complete"):
            group.recv(x, tag=3, timeout=0.1)
    else:
        if comm.rank == 0:
            comm.send(np.full(2, 7.0), last)
        group.send(np.full(2, float(comm.rank)), 0)
        if comm.rank == 0:
            group.recv(np.zeros(1), 0, 1)
            group.send(np.full(2, 9.0), 0)
    comm.rendezvous.barrier()
    group.close()


@pytest.mark.parametrize("kind", ["drop", "crash", "error", "stall"])
def test_faults_of_a_sender_name_it(kind):
    def body(comm):
        if comm.rank == 0:
            comm.recv_bytes(tag=4)
            comm.recv_bytes(tag=4)
        elif comm.rank == 1:
            comm.send_bytes(b"x" * 100, 0, 4)
        else:
            comm.send_bytes(b"y", 0, 4)
            comm.recv(np.zeros(1), 0)

    with pytest.raises(CollectiveError) as caught:
        spawn(body, 3, faults=[Fault(kind, 1, call="send")], timeout=20)
    assert caught.value.ranks == (1,), caught.value


@pytest.mark.parametrize("memory", ["shared", "none"], indirect=True)
@on_each_rank(TCPRanks(2).run)
def test_a_receive_behind_another_is_named_at_its_timeout(comm, /, memory):
    """Of a send_recv whose receive has not begun, since it comes after one from any rank."""
    if comm.rank == 0:
        wild = comm.recv(np.zeros(1), async_op=True, timeout=20)
        with pytest.raises(CollectiveTimeout, match="rank 1 sent nothing with tag 0") as caught:
            comm.send_recv(np.zeros(1), np.zeros(1), 1, 1, timeout=0.3)
        assert caught.value.ranks == (1,)
        wild.cancel(CollectiveError("not needed"))
    else:
        comm.recv(np.zeros(1), 0)
    comm.rendezvous.barrier()
    comm.abort()


def test_mpi_shows_no_more_messages_than_are_taken():
    """Messages that no receive takes yet stay in MPI."""
    shown = list[int]()

    def probe(source):
        shown.append(source)
        rank, tag = (2, 3) if len(shown) == 2 else (1, 3 if len(shown) > 2 else 4)
        return None if len(shown) > 100 else ((rank, tag), (object(), 8, tag))

    mpi = SimpleNamespace(next_check=inf, _arrived={}, _posted={}, _probe=probe, _MPI=SimpleNamespace(ANY_SOURCE=-1))
    for _ in range(2):  # the second time it is known
        assert MPITransport.arrived(mpi, [1, 2], 3)[:1] == (2,)
        assert shown == [-1, -1]


@pytest.mark.parametrize("on", [MockRanks, TCPRanks])
def test_a_failure_with_the_text_of_an_orderly_end(on):
    """It ends a receive from any rank, though another rank could still send."""
    raised, left = threading.Event(), threading.Barrier(3, timeout=TIMEOUT)

    def body(comm):
        comm.barrier()
        left.wait()  # over messages, a rank may still be in the barrier when another has left it
        if comm.rank == 1:
            comm.abort(reason="ValueError: it closed its communicator")
        elif comm.rank == 2:
            assert raised.wait(TIMEOUT)
        else:
            with pytest.raises(RankLost, match="rank 1 is gone: .*ValueError: it closed its communicator"):
                comm.recv(np.zeros(1), timeout=10)
            raised.set()

    on(3).run(body)


def test_a_progress_thread_receives_from_any_rank():
    def body(comm):
        if comm.rank == 0:
            works = [comm.recv_bytes(async_op=True) for _ in range(2)]
            comm.rendezvous.barrier()
            while any(work.state == "in flight" for work in works):  # no call of kos
                threading.Event().wait(0.001)
            assert sorted(work.wait() for work in works) == [(b"1", 1), (b"2", 2)]
        else:
            comm.rendezvous.barrier()
            comm.send_bytes(b"%d" % comm.rank, 0)

    def rank(rendezvous):
        with kos.init("tcp", rendezvous=rendezvous, timeout=TIMEOUT, progress_thread=True) as comm:
            body(comm)

    run_ranks(3, rank)
