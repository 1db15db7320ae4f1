"""The tcp backend: conformance with and without shared memory, messages in any order, ranks that are lost."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.host import tcp_messages as backend
from kos.comm.operation import COLLECTIVE_TAGS
from kos.comm.rendezvous.threads import SingleRendezvous
from kos.comm.schedules import algorithms
from kos.errors import BackendUnavailable, CollectiveMismatch, CollectiveTimeout, RankLost
from kos.testing.conformance.values import ALL_DTYPES
from tests.comm import test_conformance as conformance
from tests.comm.ranks import WAITS, closes_because_of_another, on_each_rank, time_out_beside_others
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks, run_processes
from tests.comm.test_conformance import (  # noqa: F401 -- collected here, to run on the ranks below
    test_barrier_waits_for_all_ranks,
    test_large,
    test_shapes_and_scalars,
)
from tests.comm.test_message_failures import COUNTS, disagree_about_counts, give_up_a_send
from tests.comm.test_shared_failures import SCHEDULED, check_mismatch

LONG = 3 * backend.EAGER_BYTES  # bytes
OF_TWO = b'["CollectiveMismatch", "of two", [0, 1]]'  # what a rank may tell of a failure


@pytest.fixture
def ranks(memory: str) -> TCPRanks:
    return TCPRanks(3)


@pytest.fixture(autouse=True)
def _apart(request: pytest.FixtureRequest) -> None:
    """Ranks share a host, and use the network all the same unless the test asks for both."""
    if "memory" not in request.fixturenames:
        request.getfixturevalue("apart")


@pytest.mark.parametrize(
    ("algorithm", "memory", "dtype"),
    [  # each on sockets or in shared memory
        pytest.param(name, memory, dtype, id=f"{name}-{memory}", marks=() if i % 2 == j else pytest.mark.slow)
        for i, name in enumerate(algorithms("all_reduce"))
        for j, (memory, dtype) in enumerate((("none", np.float32), ("shared", np.int64)))
    ],
    indirect=["memory"],
)
def test_all_reduce_by_algorithm(ranks: TCPRanks, seed: int, algorithm: str, dtype: Any) -> None:
    conformance.test_all_reduce_by_algorithm(ranks, seed, algorithm, dtype)


MOVING = (
    "all_gather_v", "all_to_all", "all_to_all_v", "broadcast", "gather_and_scatter", "gather_v_and_scatter_v",
    "messages",
)  # fmt: skip
PAIRS = [  # each operation with a dtype of each size, each of both on sockets and in shared memory
    pytest.param(("none", "shared")[(i + j) % 2], name, dtype, id=f"{name}-{dtype}")
    for i, name in enumerate(MOVING)
    for j, dtype in enumerate(conformance.MOVED)
]


@pytest.mark.parametrize(("memory", "name", "dtype"), PAIRS, indirect=["memory"])
def test_moving(ranks: TCPRanks, seed: int, name: str, dtype: Any) -> None:
    getattr(conformance, f"test_{name}")(ranks, seed, dtype)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_reduce(ranks: TCPRanks, seed: int, memory: str, dtype: Any) -> None:
    """Each dtype in both orders of addition, each on one of both memories."""
    fixed = ALL_DTYPES.index(dtype) % 2 == (memory == "shared")
    conformance.test_reduce(ranks, seed, dtype, fixed)


WITH_MEMORY = ("absent", "views_put_and_get")  # what ranks of several hosts cannot do


@pytest.mark.parametrize(
    ("case", "memory"),
    [(case, "shared" if case.name in WITH_MEMORY else "none") for case in conformance.OTHERS],
    ids=str,
    indirect=["memory"],
)
def test_promise(ranks: TCPRanks, case: Any) -> None:
    ranks.run(case.call)


@pytest.mark.parametrize("memory", ["shared"], indirect=True)
@pytest.mark.parametrize("case", sorted(SCHEDULED))
def test_mismatch_of_calls_by_messages(ranks: TCPRanks, case: str) -> None:
    ranks.run(lambda comm: check_mismatch(comm, case, 1))


@pytest.mark.parametrize("memory", ["shared"], indirect=True)
def test_explain_says_what_is_shared(ranks: TCPRanks) -> None:
    for text in ranks.run(lambda comm: comm.explain()):
        assert "shared memory  in use  3 ranks of this host share" in text
        assert re.search(r"tcp +in use +sockets between the ranks\n", text)  # so many as are left after shrink()


@pytest.mark.parametrize("count", [0, 1, backend.EAGER_BYTES, backend.EAGER_BYTES + 1, LONG])
def test_messages_that_nobody_asked_for_yet(count: int) -> None:
    """Received in another order than sent, whatever their length; those of one tag stay in order."""
    print("seed", seed := int(np.random.SeedSequence().generate_state(1)[0]))
    data = np.random.default_rng(seed).integers(0, 256, (2, 4, count), np.uint8)

    def body(comm: kos.Communicator) -> None:
        me, peer = comm.rank, 1 - comm.rank
        works = [comm.send(data[me, i], peer, tag, async_op=True) for i, tag in enumerate([1, 2, 2, 1])]
        comm.barrier()  # whatever can come has come
        for i, tag in [(1, 2), (2, 2), (0, 1), (3, 1)]:
            got = np.full(count, 0xAA, np.uint8)
            comm.recv(got, peer, tag)
            assert (got == data[peer, i]).all(), i
        for work in works:
            work.wait()
        end = comm.backend.transport.peers[peer]
        assert not (end._posted or end._arrived or end._announced or end._incoming or end._outgoing)

    TCPRanks(2).run(body)


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_failure_of_a_later_collective_leaves_the_earlier_alone(in_flight: bool) -> None:
    """A rank that gives the later one up and closes has done its part of the earlier, whoever else has not."""
    gone = threading.Event()

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 3:
            assert gone.wait(TIMEOUT)
        early = comm.gather(np.array([comm.rank]), root=1, async_op=True)
        out = None if in_flight else early.wait()
        with pytest.raises(CollectiveTimeout, match="barrier #1: not complete") as caught:
            comm.barrier(timeout=0.2 if comm.rank == 0 else TIMEOUT)
        assert "rank 0" not in str(caught.value)
        out = early.wait() if in_flight else out
        assert comm.rank != 1 or out.ravel().tolist() == [0, 1, 2, 3]
        if comm.rank == 0:
            comm.close()
            gone.set()

    TCPRanks(4).run(body)


def test_a_rank_lost_from_an_earlier_collective_is_reported_to_all() -> None:
    """A later one had failed; who waits for the lost rank itself reports it to those that wait for others."""
    launched, failed, reported = threading.Barrier(4), threading.Barrier(4), threading.Barrier(3)

    def body(comm: kos.Communicator) -> None:
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


def test_an_announced_message_of_a_rank_that_is_gone() -> None:
    """It was never sent: the receive names the rank, as one of a message that was not announced does."""
    gone = threading.Event()

    def body(comm: kos.Communicator) -> None:
        part = comm.duplicate()
        if comm.rank == 1:
            part.send(np.ones(LONG, np.uint8), 0, async_op=True)
            part.abort(reason="it had enough")
            gone.set()
        else:
            assert gone.wait(TIMEOUT)
            for count in (1, LONG):  # the first reads what came
                with pytest.raises(RankLost, match="recv #. .* rank 1 is gone: it had enough"):
                    part.recv(np.zeros(count, np.uint8), 1, tag=int(count == 1))
        comm.barrier()

    TCPRanks(2).run(body)


@on_each_rank(TCPRanks(2).run)
def test_calls_that_differ_are_found_at_the_end_at_the_latest(comm: kos.Communicator, /) -> None:
    """A root does not wait for those whom it sends to: two roots are done before either knows of the other."""
    comm.barrier()
    x = np.full(3, comm.rank + 1.0)
    with pytest.raises(CollectiveMismatch, match=r"broadcast #1 .* they differ in root"):  # noqa: PT012
        comm.broadcast(x, root=comm.rank)
        comm.rendezvous.barrier()  # the messages have been sent
        comm.close()


@pytest.mark.parametrize(
    ("count", "dtype"), [(0, np.uint8), (4, np.uint8), (LONG, np.uint8), (3, np.int8), (LONG, np.float32)]
)
@pytest.mark.parametrize("posted", ["before", "after"])
@on_each_rank(TCPRanks(2).run)
def test_message_of_another_size_or_dtype(comm: kos.Communicator, /, count: int, dtype: Any, posted: str) -> None:
    """The receiver raises, and the sender of a long message, which was not sent, too."""
    kind = np.dtype(dtype).name
    message = f"#0 .*: rank 1 expected 3 elements of uint8 from rank 0, got {count} elements of {kind}"
    expected = np.full(3, 7, np.uint8)
    if comm.rank == 1 and posted == "before":
        work = comm.recv(expected, 0, 7, async_op=True)
    comm.rendezvous.barrier()
    if comm.rank == 0:
        work = comm.send(np.zeros(count, dtype), 1, 7, async_op=True)
    comm.barrier()
    if comm.rank == 1 and posted == "after":
        work = comm.recv(expected, 0, 7, async_op=True)
    if comm.rank == 0 and count < LONG:
        work.wait()
    else:
        with pytest.raises(CollectiveMismatch, match=message):
            work.wait()
    assert (expected == 7).all()
    swapped = comm.send_recv(np.full(2, comm.rank), np.zeros(2, int), 1 - comm.rank, 1 - comm.rank)
    assert (swapped == 1 - comm.rank).all(), "the connection is not fit any more"


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_counts_of_two_ranks_that_disagree(ranks: TCPRanks, counts: tuple[int, int]) -> None:
    ranks.run(lambda comm: disagree_about_counts(comm, *counts))


@pytest.mark.parametrize("counts", [[2, 2, 0], [0, 2, 3], [2, 2, 300_000]], ids=str)
@pytest.mark.parametrize("name", ["all_gather_v", "reduce_scatter_v"])
def test_counts_that_are_not_the_same_on_all_ranks(ranks: TCPRanks, name: str, counts: list[int]) -> None:
    """Rank 1 has others than its neighbours."""

    def body(comm: kos.Communicator) -> str:
        mine = counts if comm.rank == 1 else [2, 2, 3]
        x = np.zeros(mine[comm.rank] if name == "all_gather_v" else sum(mine))
        with pytest.raises(CollectiveMismatch) as caught:
            getattr(comm, name)(x, mine)
        return str(caught.value)

    for message in ranks.run(body):
        assert f"{name} #0" in message and "rank 1" in message


@pytest.mark.parametrize("count", [0, 1000, backend.EAGER_BYTES])
def test_a_sender_that_runs_ahead_does_not_fill_the_receivers_memory(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "CREDIT_BYTES", 1 << 20 if count == backend.EAGER_BYTES else 1 << 17)
    number = 3 * backend.CREDIT_BYTES // (count + backend.OVERHEAD_BYTES)

    def body(comm: kos.Communicator) -> None:
        peer = comm.backend.transport.peers[1 - comm.rank]

        def kept() -> list[int]:
            arrived = [arrival for queue in peer._arrived.values() for arrival in queue]
            return [len(arrival.data) for arrival in arrived if arrival.data is not None]

        if comm.rank == 0:
            x = [np.full(count, i % 251, np.uint8) for i in range(number)]
            works = [comm.send(data, 1, i % 3, async_op=True) for i, data in enumerate(x)]
            comm.barrier()
            for work in works:
                work.wait()
        else:
            comm.barrier()  # whatever can come has come
            assert number > len(kept()) > number // 4
            assert sum(kept()) + len(kept()) * backend.OVERHEAD_BYTES <= backend.CREDIT_BYTES
            for i in range(number):
                assert (comm.recv(np.zeros(count, np.uint8), 0, i % 3) == i % 251).all(), i
        comm.barrier()
        assert not (peer._arrived or peer._announced or peer._incoming or peer._outgoing)
        known = json.dumps([peer._credits, peer._freed]).encode()
        window, _ = json.loads(comm.rendezvous.allgather(known)[comm.rank])
        _, taken = json.loads(comm.rendezvous.allgather(known)[1 - comm.rank])
        assert window + taken == backend.CREDIT_BYTES, "something of it is lost"

    TCPRanks(2).run(body)


def test_communicators_that_are_dropped_give_their_descriptors_back(memory: str) -> None:
    counts: list[int] = []

    def body(comm: kos.Communicator) -> None:
        for _ in range(4):
            part = comm.split(0)
            assert part.all_reduce(np.ones(1), algorithm="ring") == 2
            part.barrier()
            del part
            comm.rendezvous.barrier()
            if comm.rank == 0:
                gc.collect()
                give_up = time.monotonic() + 20  # threads close what they served a moment later
                while (count := len(os.listdir("/proc/self/fd"))) > min(counts, default=count):
                    assert time.monotonic() < give_up, (counts, count)
                    time.sleep(0.001)
                counts.append(count)
            comm.rendezvous.barrier()
        comm.barrier()

    TCPRanks(2).run(body)
    assert len(counts) == 4


@on_each_rank(TCPRanks(3).run)
def test_a_broken_communicator_that_is_closed_leaves_the_rendezvous(comm: kos.Communicator, /) -> None:
    comm.rendezvous.barrier()
    if comm.rank:
        with pytest.raises(CollectiveTimeout):
            comm.barrier(timeout=0.05)
        comm.close()
        assert comm.rendezvous._connection is None
    else:
        expected = r"barrier #0: not complete .*; rank [12] aborted because of it"
        with pytest.raises(CollectiveTimeout, match=expected):
            comm.rendezvous.barrier()
        comm.abort()


@on_each_rank(TCPRanks(2).run)
def test_a_receive_that_was_given_up_leaves_its_memory_alone(comm: kos.Communicator, /) -> None:
    x = np.zeros(4)
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"recv #0 .* tag 3: .* rank 1 sent nothing"):
            comm.recv(x, 1, 3, timeout=0.05)
    comm.barrier()
    if comm.rank == 1:
        comm.send(np.ones(4), 0, 3)
    comm.barrier()
    assert (x == 0).all()
    if comm.rank == 0:
        assert (comm.recv(x, 1, 3) == 1).all()


@on_each_rank(TCPRanks(2).run)
def test_a_collective_that_was_given_up_leaves_its_memory_alone(comm: kos.Communicator, /) -> None:
    x = np.full(4, float(comm.rank))
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match="broadcast #0"):
            comm.broadcast(x, 1, timeout=0.05)
    comm.rendezvous.barrier()
    if comm.rank == 1:
        comm.broadcast(x, 1)  # it has not read yet that rank 0 gave up
    comm.rendezvous.barrier()
    comm.backend.transport.poller.progress()
    assert (x == comm.rank).all()


def test_a_message_given_up_leaves_the_others() -> None:
    TCPRanks(2).run(time_out_beside_others)


def test_a_send_given_up_ends_the_communicator(ranks: TCPRanks) -> None:
    ranks.run(give_up_a_send)


@pytest.mark.parametrize("quitter", ["receiver", "sender"])
def test_a_message_given_up_half_way(quitter: str) -> None:
    """Whoever gives up has its memory to itself; the connection stays fit, unless it was the sender."""
    count = 32 << 20  # bytes: more than sockets hold

    def body(comm: kos.Communicator) -> None:
        me = ["receiver", "sender"][comm.rank]
        end = comm.backend.transport.peers[1 - comm.rank]
        x = np.full(count, comm.rank, np.uint8)
        work = (comm.recv if me == "receiver" else comm.send)(x, 1 - comm.rank, 5, async_op=True)
        if me == "receiver":
            while 5 in end._posted:
                work.done()
            comm.rendezvous.barrier()  # it is granted, but nothing read before as much is sent as fits
            while not x.any():
                work.done()
        else:
            while not (end._outgoing and end._outgoing[0].message.tag == 5 and len(end._outgoing[0].views) == 1):
                work.done()
            comm.rendezvous.barrier()
            y = np.full(3, 4, np.uint8)
            behind = comm.send(y, 0, 6, async_op=True)
        comm.rendezvous.barrier()
        if me == quitter:
            with pytest.raises(CollectiveTimeout, match=r"not complete after 0\.01 s"):
                work.wait(timeout=0.01)
            if me == "receiver":
                before = x.copy()
                assert 0 < before.sum() < count
            else:
                with pytest.raises(CollectiveTimeout, match="send #0 .* rank 0 did not receive"):
                    behind.wait(timeout=0.01)
                x[:], y[:] = 7, 7
        comm.rendezvous.barrier()
        if quitter == "sender":  # the rest is sent all the same, as it was; what was not begun is not
            if me == "receiver":
                assert (work.wait() == 1).all()
                with pytest.raises(CollectiveTimeout, match="send #0 .* rank 0 did not receive"):
                    comm.recv(np.zeros(3, np.uint8), 1, 6)
            with pytest.raises(CollectiveTimeout, match="send #0 .* rank 0 did not receive"):
                comm.barrier()
            return
        comm.barrier()
        if quitter == me == "receiver":
            assert (x == before).all()
            assert comm.recv(np.zeros(3, np.uint8), 1, 6).tolist() == [4, 4, 4]
        else:
            work.wait()
        if me == "receiver":
            assert (comm.recv(np.zeros(LONG, np.uint8), 1, 5) == 9).all()
        else:
            comm.send(np.full(LONG, 9, np.uint8), 0, 5)

    TCPRanks(2).run(body)


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ((99, 0, 0, 0, 0), "expected the header of a message, got kind 99 of 0 bytes"),
        ((backend.EAGER, 0, 0, 1 << 40, 0), "expected the header of a message, got kind 1 of 1099511627776"),
        ((backend.DATA, 0, 5, 10, 0), "expected the header of a message, got kind 5 of 10 bytes"),
        ((backend.ABORT, 0, 0, 1 << 20, 0), "expected the header of a message, got kind 8 of 1048576 bytes"),
    ],
)
@on_each_rank(TCPRanks(2).run)
def test_a_header_that_makes_no_sense(comm: kos.Communicator, /, header: tuple[int, ...], what: str) -> None:
    if comm.rank == 0:
        with pytest.raises(RankLost, match=f"all_reduce #0 .*: rank 1 is gone: {what}"):
            comm.all_reduce(np.zeros(4))
    else:
        comm.backend.transport.peers[0].sock.send(backend.HEADER.pack(*header))
    comm.rendezvous.barrier()
    comm.abort()


def test_a_rank_that_is_lost_ends_what_waits_for_others() -> None:
    known = threading.Event()

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(RankLost, match=r"recv #0 [^:]*: rank 1 is gone"):
                comm.recv(np.zeros(3), 2)
            known.set()
        elif comm.rank == 2:
            assert known.wait(20)
        comm.abort()

    TCPRanks(3).run(body)


def test_all_that_a_rank_sent_before_it_closed_arrives() -> None:
    """However far the receiver is behind, which tells it of room that it gets again."""
    slow, closed, count = threading.Event(), threading.Event(), 12  # of the 15 that go without being asked for

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 0:
            assert slow.wait(20)
            for k in range(count):
                comm.send(np.full(LONG // 12, k, np.float32), 1)
            comm.close()
            closed.set()
            return
        comm.backend._mesh.peers[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        works = [comm.recv(np.zeros(LONG // 12, np.float32), 0, async_op=True) for _ in range(count)]
        slow.set()
        deadline = time.monotonic() + 20
        while not closed.wait(2):  # where the kernel's buffers do not hold them all
            comm.backend._poller.progress()
            assert time.monotonic() < deadline
        for k, work in enumerate(works):
            assert (work.wait() == k).all()
        with pytest.raises(RankLost, match="rank 0 is gone: it closed its communicator"):
            comm.recv(np.zeros(3), 0)

    TCPRanks(2).run(body)


def test_a_connection_whose_reading_is_interrupted_is_lost_by_that_name() -> None:
    """Whatever communicator's wait it is that reads there: one wait sees to the connections of all."""

    def interrupted() -> Iterator[None]:
        raise KeyboardInterrupt
        yield

    def body(comm: kos.Communicator) -> None:
        other = comm.duplicate()
        if comm.rank == 0:
            peer = other.backend._mesh.peers[1]
            peer._reader = interrupted()
            with pytest.raises(KeyboardInterrupt):
                peer.progress()
            with pytest.raises(RankLost, match="rank 1 is gone: reading from it was interrupted"):
                other.recv(np.zeros(3), 1)
        comm.barrier()

    TCPRanks(2).run(body)


def test_all_hear_of_a_collective_that_one_failed_in() -> None:
    """In their turn: one that was before it goes on, though its messages come after that news."""
    transports: dict[int, Any] = {}

    def body(comm: kos.Communicator) -> None:
        transports[comm.rank] = comm.backend.transport
        comm.rendezvous.barrier()
        x = np.full(3, float(comm.rank == 0))
        if comm.rank == 1:  # the only one that rank 3 gets it from
            deadline = time.monotonic() + 30
            while transports[3].ledger.failure is None:
                assert time.monotonic() < deadline
        assert (comm.broadcast(x, 0) == 1).all()
        message = r"barrier #1: not complete after 0.1 s; still waiting for ranks \[\d"
        with pytest.raises(CollectiveTimeout, match=message):
            comm.barrier(timeout=TIMEOUT if comm.rank else 0.1)
        comm.rendezvous.barrier()

    TCPRanks(4).run(body)


def test_a_rank_that_left_for_a_failure_says_so() -> None:
    """Also if it met that in a message, which breaks nothing; others may not have heard of it yet."""
    heard = threading.Event()

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 0:
            comm.backend._mesh.peers[1].send_control(backend.FAILED, COLLECTIVE_TAGS, OF_TWO)
            assert heard.wait(20)
        else:
            with pytest.raises(CollectiveMismatch, match="of two"):
                comm.recv(np.zeros(1), 0) if comm.rank == 1 else comm.barrier()
            if comm.rank == 2:
                heard.set()
        comm.abort()

    TCPRanks(3).run(body)


@pytest.mark.parametrize("wait", WAITS)
def test_closing_a_group_after_a_failure_in_another_names_its_cause(ranks: TCPRanks, wait: str) -> None:
    ranks.run(lambda comm: closes_because_of_another(comm, wait))


END = """
import os, signal
import numpy as np, kos
import kos.comm.host.backend as host
if "{memory}" == "none":
    host.open_segment = lambda _: (None, "switched off by the test")
comm = kos.init("tcp", timeout=60)
survivors = comm.split(int(comm.rank == 1))
comm.barrier()
child = 0
if comm.rank == 1:
    child = os.fork()
    if child == 0:  # which outlives it, and holds nothing of it
        os.closerange(0, 3)
        signal.alarm(100)
        signal.pause()
pids = [list(map(int, pid.split())) for pid in comm.rendezvous.allgather(b"%d %d" % (os.getpid(), child))]
if comm.rank == 1:
    os.kill(os.getpid(), signal.{signal})
    os._exit(0)
work = comm.all_reduce(np.zeros((2, 3)), async_op=True)
survivors.barrier()
try:
    work.wait({timeout})
except kos.errors.CollectiveError as error:
    print(type(error).__name__, error, flush=True)
survivors.barrier()
if comm.rank == 0:
    os.kill(pids[1][1], signal.SIGKILL)
    if "{signal}" == "SIGSTOP":
        os.kill(pids[1][0], signal.SIGCONT)
"""


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_a_killed_or_stopped_rank_is_named(memory: str, signal: str) -> None:
    killed = signal == "SIGKILL"
    results = run_processes(END.format(signal=signal, timeout=30.0 if killed else 1.0, memory=memory), 3)
    stopped = "ranks [1] did not arrive" if memory == "shared" else "waiting for ranks ["
    for _, output in (results[0], results[2]):
        assert f"{'RankLost' if killed else 'CollectiveTimeout'} world: all_reduce #2 of float64[2, 3] by SUM" in output
        assert ("rank 1 is gone" if killed else "not complete after 1.0 s") in output, output
        assert killed or stopped in output, output


LIMITED = """
import os, resource
import kos
comm = kos.init(timeout=30)
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
if comm.rank == {lacking}:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, limit[1]))
try:
    comm.duplicate()
except kos.errors.KosError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, limit)
"""


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_that_may_open_too_few_files_is_named_on_all(lacking: int) -> None:
    for code, output in run_processes(LIMITED.format(lacking=lacking), 2):
        assert code == 0, output
        assert f"rank {lacking}" in output and "Traceback" not in output, output


@pytest.mark.parametrize("timeout", ["float('inf')", "1e7"])
def test_a_timeout_longer_than_poll_counts(timeout: str) -> None:
    results = run_processes(f"import kos; kos.init(timeout={timeout}).close()", 2)
    assert [code for code, _ in results] == [0, 0], results


def test_without_sockets_it_says_why() -> None:
    with pytest.raises(BackendUnavailable, match="tcp: the ranks did not connect over TCP"):
        kos.init("tcp", rendezvous=SingleRendezvous())
