"""Receives from any rank, messages of bytes, probes, and waits of every kind, on threads, over ``tcp`` and ``mpi``."""

import gc
import threading
from contextlib import suppress

import numpy as np
import pytest

import kos
from kos import _core
from kos.comm.contract import Backend
from kos.comm.host.threads import ThreadTransport
from kos.comm.matching import Receive
from kos.comm.operation import COLLECTIVE_TAGS
from kos.errors import (
    BackendUnavailable,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgument,
    RankLost,
)
from kos.testing import spawn
from tests.comm.conftest import UNDER_MPIRUN
from tests.comm.ranks import MockRanks, MPIRanks, on_each_rank
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks, run_processes, run_ranks

SIZE, LONG = 3, 5 << 20
ON_MPI = [pytest.param(name, marks=pytest.mark.mpi) for name in ("mpi", "mpi apart")]


@pytest.fixture(params=[*(() if UNDER_MPIRUN else ("mock", "tcp", "tcp apart")), *ON_MPI])
def kind(request):
    if request.param.endswith("apart"):
        request.getfixturevalue("apart")
    elif request.param != "mock" and _core.native is None:
        pytest.skip(str(_core.unavailable))
    return request.param


@pytest.fixture
def run(kind, request):
    """Runs a function of a communicator on three ranks, or under mpirun on all of them."""
    if "mpi" in kind:
        world = request.getfixturevalue("mpi_world")
        if world.size == 1:
            pytest.skip("needs mpirun with two ranks or more")
        return MPIRanks(world).run
    if kind == "mock":
        return lambda fn: spawn(fn, SIZE, timeout=TIMEOUT, buffer_bytes=1 << 16)  # as processes of one host
    return TCPRanks(SIZE).run


def wait_for_marks(comm: kos.Communicator, tag: int = 99) -> None:
    """Rank 0 waits until what the others have sent before has arrived."""
    if comm.rank:
        comm.send(np.zeros(0), 0, tag)
        return
    for rank in range(1, comm.size):
        comm.recv(np.zeros(0), rank, tag)


@pytest.mark.parametrize("posted", ["before", "after"])
@on_each_rank("run")
def test_a_message_of_another_size_fails_only_its_own_receive(comm, /, posted):
    """Only the receive that matches the message raises, and it names the sender.

    Another receive gets the next message.
    """
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
    """An abort frees memory and connections before it cancels operations.  The waiting thread may poll in between."""
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
        assert str(caught.value) == f"{caught.value.call}: the communicator was aborted"
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
def test_groups_and_batches(comm, /):
    """In a group whose ranks are in reverse order, while messages of the world have the same tag."""
    group, last, x = comm.split(0, -comm.rank), comm.size - 1, np.zeros(2)
    assert group is not None
    if comm.rank == last:  # rank 0 of the group
        for _ in range(last):
            got, source = group.recv(x)
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


@pytest.mark.parametrize("memory", ["shared", "none"], indirect=True)
@on_each_rank(TCPRanks(2).run)
def test_a_receive_behind_another_is_named_at_its_timeout(comm, /, memory):
    """The receive of a send_recv has not begun, because an earlier receive from any rank is still waiting."""
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


@on_each_rank("run")
def test_a_receive_of_bytes_holds_up_no_other_sender(comm, /):
    if comm.size < 3:
        return
    if comm.rank == 0:
        data = comm.recv_bytes(1, async_op=True)
        assert comm.recv(np.zeros(2), 2, timeout=20)[0] == 2
        assert comm.recv(np.zeros(2), timeout=20)[1] == 2
        comm.send(np.zeros(1), 1, 5)
        assert data.wait() == b"late"
    elif comm.rank == 1:
        comm.recv(np.zeros(1), 0, 5)
        comm.send_bytes(b"late", 0)
    elif comm.rank == 2:
        comm.send(np.full(2, 2.0), 0)
        comm.send(np.full(2, 2.0), 0)


@on_each_rank("run")
def test_bytes_are_arrays_of_uint8(comm, /):
    if comm.rank == 0:
        assert comm.recv(np.zeros(3, np.uint8), 1).tobytes() == b"abc"
        assert comm.recv_bytes(1) == b"\1\2"
        expected = "recv_bytes #2, from rank 1.* with tag 0: rank 0 expected elements of uint8 from rank 1, got 2 "
        with pytest.raises(CollectiveMismatch, match=f"{expected}elements of float64"):
            comm.recv_bytes(1)
        assert comm.recv_bytes(1) == b"next"
    elif comm.rank == 1:
        comm.send_bytes(memoryview(b"a-b-c-")[::2], 0)
        comm.send(np.array([1, 2], np.uint8), 0)
        comm.send(np.zeros(2), 0)
        comm.send_bytes(b"next", 0)
    comm.barrier()


@on_each_rank("run")
def test_a_probe_takes_nothing(comm, /):
    if comm.rank == 0:
        assert comm.probe(tag=6, wait=False) is None
        comm.barrier()
        for source in (1, None):
            for _ in range(2):
                envelope = comm.probe(source, 6)
                assert envelope == comm.probe(source, 6, wait=False) == (1, np.int32, 5, 6) and envelope.nbytes == 20
        assert comm.probe(tag=5, wait=False) is None
        assert comm.recv(np.zeros(5, np.int32), tag=6)[1] == 1
        assert comm.probe(tag=6, wait=False) is None
        waiting = comm.recv(np.zeros(1), tag=6, async_op=True)
        comm.barrier()
        wait_for_marks(comm)
        assert comm.probe(tag=6, wait=False) is None, "its message is for the receive that waits"
        assert waiting.wait()[0][0] == 8
        comm.barrier()
    else:
        comm.barrier()
        if comm.rank == 1:
            comm.send(np.ones(5, np.int32), 0, 6)
        comm.barrier()
        if comm.rank == 1:
            comm.send(np.full(1, 8.0), 0, 6)
        wait_for_marks(comm)
        comm.barrier()


@on_each_rank("run")
def test_any_tag_takes_messages_in_the_order_in_which_they_were_sent(comm, /):
    tags = [5, 3, 5, 0, 3, COLLECTIVE_TAGS - 1]
    if comm.rank:
        for number, tag in enumerate(tags):
            comm.send(np.array([comm.rank, number, tag], float), 0, tag)
        comm.barrier()
        comm.send_bytes(bytes(comm.rank), 0, 7)
    else:
        seen: dict[int, list[float]] = {rank: [] for rank in range(1, comm.size)}
        for turn in range(len(tags) * len(seen)):
            envelope = comm.probe(tag=kos.ANY)
            x, src, tag = comm.recv(np.zeros(3), envelope.src if turn % 2 else None, kos.ANY)
            assert (x[0], x[2]) == (src, tag) and (turn % 2 == 0 or (src, tag) == (envelope.src, envelope.tag))
            seen[src].append(x[1])
        assert all(numbers == [*range(len(tags))] for numbers in seen.values())
        comm.barrier()
        assert {comm.recv_bytes(tag=kos.ANY) for _ in seen} == {(bytes(rank), rank, 7) for rank in seen}
        with pytest.raises(CollectiveTimeout, match="from any rank with any tag"):
            comm.recv(np.zeros(1), tag=kos.ANY, timeout=0.05)
        assert comm.probe(tag=kos.ANY, wait=False) is None  # messages of collectives have tags too
        assert comm.recv(x, kos.NOBODY, kos.ANY) [1:] == (kos.NOBODY, kos.ANY)
    comm.barrier()


@on_each_rank("run")
def test_receives_of_any_tag_and_of_one_match_in_the_order_of_their_calls(comm, /):
    if comm.rank == 0:
        x = np.zeros((5, 1))
        calls = [(None, 2), (1, kos.ANY), (1, 2), (None, kos.ANY), (1, 3)]
        works = [comm.recv(x[i], src, tag, async_op=True) for i, (src, tag) in enumerate(calls)]
        comm.barrier()
        got = [work.wait(TIMEOUT) for work in works]
        assert x.ravel().tolist() == [0, 1, 2, 3, 4]
        assert [each[1:] for each in got[:2]] == [(1,), (1, 2)] and got[3][1:] == (1, 2)
    else:
        comm.barrier()
        if comm.rank == 1:
            for number, tag in enumerate([2, 2, 2, 2, 3]):
                comm.send(np.array([float(number)]), 0, tag)
    comm.barrier()


@on_each_rank(spawn, 1)
def test_a_group_of_one_has_no_other_rank(comm, /):
    for call in (lambda: comm.recv(np.zeros(1)), comm.recv_bytes, comm.probe):
        with pytest.raises(InvalidArgument, match="src: expected another rank, got None in a group of one"):
            call()


DEAD = """
import os, sys
import numpy as np, kos
comm = kos.init("tcp", timeout=30)
if comm.rank == 1:
    comm.send_bytes(b"last", 0, 2)
    comm.barrier()
    os._exit(7)
comm.barrier()
if comm.rank == 2:
    try:
        comm.recv(np.zeros(1), 0)
    except kos.errors.CollectiveError as error:
        print(error)
    os._exit(0)
try:
    print(comm.recv_bytes(tag=2))
    {call}
except kos.errors.RankLost as error:
    print(error.ranks, error, flush=True)
os._exit(0)
"""
CALLS = ["comm.recv(np.zeros(1))", "comm.recv_bytes()", "comm.probe()", "while True: comm.probe(wait=False)"]


@pytest.mark.parametrize("core", ["1", "0"])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_whose_process_ends_is_named(call, core):
    (code, output), _, _ = run_processes(DEAD.replace("{call}", call), 3, KOS_CORE=core)
    assert code == 0 and "(b'last', 1)" in output, output
    assert "(1,) " in output and "rank 1 is gone" in output, output


@pytest.mark.skipif(_core.native is None, reason=str(_core.unavailable))
@on_each_rank(TCPRanks(2).run)
def test_a_message_whose_sender_has_cancelled_it_is_passed(comm, /):
    """Neither a probe nor a receive of bytes sees the cancelled message: the receive has the length of the next one."""
    if comm.rank == 1:
        work = comm.send_bytes(b"x" * LONG, 0, async_op=True)
        comm.rendezvous.barrier()
        comm.rendezvous.barrier()
        work.cancel(CollectiveMismatch("cancelled, as after the loss of another rank"))
        comm.rendezvous.barrier()
        comm.rendezvous.barrier()
        comm.send_bytes(b"next", 0)
    else:
        comm.rendezvous.barrier()
        assert comm.probe() == (1, np.uint8, LONG, 0)
        comm.rendezvous.barrier()
        comm.rendezvous.barrier()
        assert comm.probe(wait=False) is None
        waiting = comm.recv_bytes(async_op=True)
        comm.rendezvous.barrier()
        assert waiting.wait() == (b"next", 1)
    comm.barrier()


@pytest.mark.parametrize("on", [MockRanks, TCPRanks])
def test_polls_of_many_tags_leave_nothing_behind(on):
    def body(comm):
        comm.barrier()
        if comm.rank == 0:
            for tag in range(500):
                assert comm.probe(tag=tag, wait=False) is None
        left = sum(isinstance(each, Receive) for each in gc.get_objects())
        comm.barrier()
        return left

    assert max(on(2).run(body)) < 10


def test_a_transport_without_envelopes_refuses(monkeypatch):
    monkeypatch.setattr(ThreadTransport, "arrived", Backend.arrived)

    def body(comm):
        calls = {
            "recv from any rank": lambda: comm.recv(np.zeros(1)), "recv_bytes": lambda: comm.recv_bytes(0),
            "probe": comm.probe, "send_bytes": lambda: comm.send_bytes(b"", 1),
        }  # fmt: skip
        for name, call in calls.items():
            with pytest.raises(BackendUnavailable, match=f"{name}: expected a backend .*, got mock"):
                call()

    spawn(body, 2)


@on_each_rank("gpu_run")
def test_backends_for_gpus_refuse(comm, /):
    x, name = comm.allocate(3, np.float32), comm.backend_name
    for what, call in {
        "recv from any rank": lambda: comm.recv(x), "recv_bytes": comm.recv_bytes, "probe": comm.probe,
        "send_bytes": lambda: comm.send_bytes(b"", 1 - comm.rank),
    }.items():  # fmt: skip
        with pytest.raises(BackendUnavailable, match=f"{what}: expected a backend for host memory.*, got {name}"):
            call()
    comm.barrier()
