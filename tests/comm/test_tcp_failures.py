"""The tcp backend: timeouts, failures, and ranks that are lost, killed or stopped."""

import socket
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.host import tcp_messages as backend
from kos.comm.host.tcp import TCPTransport
from kos.errors import CollectiveMismatch, CollectiveTimeout, KosError, OutOfMemory, RankLost
from tests.comm.ranks import on_each_rank, on_hosts, until
from tests.comm.tcp_ranks import SECRET, TIMEOUT, TCPRanks, both_ranks, free_port, run_processes, run_ranks, run_threads
from tests.comm.test_tcp_backend import LONG, _apart  # noqa: F401 -- a fixture of these tests too


def test_a_collective_that_was_given_up_leaves_its_memory_alone():
    given_up, sent = threading.Event(), threading.Event()

    def body(comm):
        x = np.full(4, float(comm.rank))
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match="broadcast #0"):
                comm.broadcast(x, 1, timeout=0.05)
            given_up.set()
            assert sent.wait(TIMEOUT)
        else:
            assert given_up.wait(TIMEOUT)
            comm.broadcast(x, 1)  # it has not read yet that rank 0 gave up
            sent.set()
        comm.rendezvous.barrier()
        comm.backend.transport.poller.progress()
        assert (x == comm.rank).all()

    TCPRanks(2).run(body)


@pytest.mark.parametrize("quitter", ["receiver", "sender"])
def test_a_message_given_up_half_way(quitter):
    """The end that gives up may use its memory again.

    The connection remains usable, unless this end was the sender.
    """
    count = 32 << 20  # bytes: more than sockets hold

    def body(comm):
        me = ["receiver", "sender"][comm.rank]
        end = comm.backend.transport.peers[1 - comm.rank]
        x = np.full(count, comm.rank, np.uint8)
        work = (comm.recv if me == "receiver" else comm.send)(x, 1 - comm.rank, 5, async_op=True)
        if me == "receiver":
            while 5 in end.posted:
                work.done()
            comm.rendezvous.barrier()  # it is granted, but nothing read before as much is sent as fits
            while not x.any():
                work.done()
        else:
            queued = end.link._outgoing
            while not (queued and queued[0].message.tag == 5 and len(queued[0].views) == 1):
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
        if quitter == "sender":
            if me == "receiver":
                with pytest.raises(CollectiveTimeout, match="send #0 .* rank 0 did not receive"):
                    work.wait()
                assert x.max() == 1
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
        ((99, 0, 0, 0, 0, 0), "expected the header of a message, got kind 99 of 0 bytes"),
        ((backend.EAGER, 0, 0, 0, 1 << 40, 0), "expected the header of a message, got kind 1 of 1099511627776"),
        ((backend.DATA, 5, 0, 0, 10, 0), "expected the header of a message, got kind 5 of 10 bytes"),
        ((backend.CLOSE, 0, 0, 0, 1 << 20, 0), "expected the header of a message, got kind 7 of 1048576 bytes"),
    ],
)
@on_each_rank(TCPRanks(2).run)
def test_a_header_that_makes_no_sense(comm, /, header, what):
    if comm.rank == 0:
        with pytest.raises(RankLost, match=f"all_reduce #0 .*: rank 1 is gone: {what}"):
            comm.all_reduce(np.zeros(4))
    else:
        comm.backend.transport.peers[0].link.sock.send(backend.HEADER.pack(*header))
    comm.rendezvous.barrier()
    comm.abort()


def test_a_rank_that_is_lost_ends_what_waits_for_others():
    known = threading.Event()

    def body(comm):
        if comm.rank == 0:
            with pytest.raises(RankLost, match=r"recv #0 [^:]*: rank 1 is gone"):
                comm.recv(np.zeros(3), 2)
            known.set()
        elif comm.rank == 2:
            assert known.wait(20)
        comm.abort()

    TCPRanks(3).run(body)


def test_all_that_a_rank_sent_before_it_closed_arrives():
    """However far behind the receiver is.  It still returns credits to the sender, which has closed."""
    slow, closed, count = threading.Event(), threading.Event(), 12  # of the 15 that go without being asked for

    def body(comm):
        if comm.rank == 0:
            assert slow.wait(20)
            for k in range(count):
                comm.send(np.full(LONG // 12, k, np.float32), 1)
            comm.close()
            closed.set()
            return
        comm.backend.transport.peers[0].link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        works = [comm.recv(np.zeros(LONG // 12, np.float32), 0, async_op=True) for _ in range(count)]
        slow.set()
        deadline = time.monotonic() + 20
        while not closed.wait(2):  # where the kernel's buffers do not hold them all
            comm.backend.transport.poller.progress()
            assert time.monotonic() < deadline
        for k, work in enumerate(works):
            assert (work.wait() == k).all()
        with pytest.raises(RankLost, match="rank 0 is gone: it closed its communicator"):
            comm.recv(np.zeros(3), 0)

    TCPRanks(2).run(body)


@pytest.mark.parametrize("within", ["reading", "sending"])
def test_a_handler_raises_within_a_message_of_another_communicator(within, before_call):
    """One wait advances the connections of all communicators.  Both then end with the reason."""
    armed, ready = list[Any](), threading.Event()

    def interrupt(what, *_):
        if armed and threading.current_thread() is armed[0] and (within == "sending" or what is armed[1]):
            armed.clear()
            raise KeyboardInterrupt

    before_call(*((backend.Peer, "arrive") if within == "reading" else (backend, "islice")), interrupt)

    def body(comm):
        other, x = comm.duplicate(), np.ones(1 << 20)
        if comm.rank == 0:
            sent = other.send(x, 1, async_op=True) if within == "sending" else None
            armed.extend((threading.current_thread(), other.backend.transport.peers[1]))
            ready.set()
            with pytest.raises(KeyboardInterrupt):
                comm.recv(x, 1)
            assert sent is None or sent.state.startswith("failed")
        else:
            assert ready.wait(TIMEOUT)
            if within == "reading":
                other.send(np.ones(3), 0)
            else:
                other.recv(np.zeros(1 << 20), 0, async_op=True)
            told = "rank 0 is gone: recv was interrupted by KeyboardInterrupt"
            for each in (other, comm):
                with pytest.raises(RankLost, match=told):
                    each.recv(x, 0, tag=1)

    TCPRanks(2).run(body)


def test_a_rank_whose_backend_cannot_be_made(monkeypatch):
    """No rank waits for it: it reports its failure, although its process continues."""
    make = TCPTransport.__init__

    def make_but_on_1(self, rendezvous, engine):
        if rendezvous.rank == 1:
            raise MemoryError("all is used")
        make(self, rendezvous, engine)

    def body(rendezvous):
        with pytest.raises(OutOfMemory) as caught:
            kos.init("tcp", rendezvous=rendezvous)
        if rendezvous.rank != 1:
            told = "init was interrupted on rank 1 by MemoryError: all is used"
            assert told in str(caught.value) and caught.value.ranks == (1,), caught.value

    monkeypatch.setattr(TCPTransport, "__init__", make_but_on_1)
    run_ranks(3, body)


def test_a_failure_of_one_rank_is_reported_to_all():
    """An earlier collective still completes, even if its messages arrive after the report of the failure."""
    transports = {}

    def body(comm):
        transports[comm.rank] = comm.backend.transport
        comm.rendezvous.barrier()
        x = np.full(3, float(comm.rank == 0))
        if comm.rank == 1:  # the only one that rank 3 gets it from
            until(lambda: transports[3].failures.earliest is not None)
        assert (comm.broadcast(x, 0) == 1).all()
        message = r"barrier #1: not complete after 0.1 s; .*ranks \[\d"
        with pytest.raises(CollectiveTimeout, match=message):
            comm.barrier(timeout=TIMEOUT if comm.rank else 0.1)
        comm.rendezvous.barrier()

    TCPRanks(4).run(body)


def test_a_rank_that_left_for_a_failure_says_so():
    """Also if it found the failure in a message, which fails no collective.

    Other ranks may not have the report yet.
    """
    heard = threading.Event()

    def body(comm):
        if comm.rank == 0:
            comm.rendezvous.channel.report_failure(CollectiveMismatch("of two", ranks=[0, 1]), 0)
            assert heard.wait(20)
        else:
            with pytest.raises(CollectiveMismatch, match="of two"):
                comm.recv(np.zeros(1), 0) if comm.rank == 1 else comm.barrier()
            if comm.rank == 2:
                heard.set()
        comm.abort()

    TCPRanks(3).run(body)


def test_a_root_that_stops_within_a_gather_is_named(monkeypatch):
    """The root has received a part of a message.  The sender then waits for space in the socket, and for no CTS."""
    on_hosts(monkeypatch, (1, 1))
    with both_ranks() as (root, other):
        x, out = np.ones(4 << 20), np.zeros((2, 4 << 20))  # more bytes than the sockets hold
        received, sent = root.gather(x, 0, out=out, async_op=True), other.gather(x, 0, async_op=True)
        while not out[1, 0]:
            assert not received.done() and not sent.done()
        waiting = r"not complete after 0.2 s; still waiting for ranks \[0\]"
        with pytest.raises(CollectiveTimeout, match=waiting) as caught:
            sent.wait(0.2)
        assert caught.value.ranks == (0,)


ENDS_FOR_IT = """
import os, signal, time
import kos, numpy as np
comm = kos.init(timeout=30)
row, column = comm.grid((2, 2))
comm.barrier()
if comm.rank == 3:
    time.sleep(0.5)  # the others get out of the barrier
    os.kill(os.getpid(), signal.SIGKILL)
if comm.rank == 1:  # waits for rank 3, and ends without a word
    try:
        row.all_reduce(np.ones(4))
    finally:
        os._exit(1)
time.sleep(2.5)
try:
    column.all_reduce(np.ones(4)) if comm.rank == 0 else comm.barrier()
except kos.errors.RankLost as error:
    print(error.ranks, error, flush=True)
os._exit(0)
"""


HOSTS = pytest.mark.parametrize("hosts", [(4,), (2, 2), (1, 1, 1, 1)], ids=str)


@HOSTS
def test_a_rank_that_ended_because_of_another_is_not_blamed_later(hosts, monkeypatch):
    on_hosts(monkeypatch, hosts)
    results = run_processes(ENDS_FOR_IT, 4)
    assert all(results[rank][1].startswith("(3,) ") for rank in (0, 2)), results


DIES_WITHIN_A_SPLIT = """
import os, signal
import kos
comm = kos.init("tcp", timeout=30)
if comm.rank == 2:
    together = comm.rendezvous.together  # its first call is the last step before the ranks join the new group
    comm.rendezvous.together = lambda step: (together(step), os.kill(os.getpid(), signal.SIGKILL))
try:
    comm.split(0)
except kos.errors.KosError as error:
    print(type(error).__name__, error.ranks, error, flush=True)
os._exit(0)
"""


@HOSTS
def test_a_rank_that_dies_within_a_split_is_not_awaited(hosts, monkeypatch):
    """It has no connection yet whose loss could be noticed."""
    on_hosts(monkeypatch, hosts)
    results = run_processes(DIES_WITHIN_A_SPLIT, 3)
    for _, output in results[:2]:
        assert output.startswith("RankLost (2,) ") and "rank 2 is gone: its connection was closed" in output, results


UNMADE = """
import gc, os, time
from pkgutil import resolve_name
from unittest.mock import Mock
import kos
if {apart}:
    os.environ["KOS_HOST"] = os.environ["RANK"]
comm = kos.init(timeout=30)
comm.barrier()
def left():
    with open("/proc/self/maps") as maps:
        return sum("memfd:kos" in line for line in maps), len(os.listdir("/proc/self/fd"))
gc.collect()
gc.disable()
before = left()
if comm.rank in {failing}:
    owner, _, name = "{place}".rpartition(".")
    setattr(resolve_name(owner), name, Mock(side_effect=MemoryError("all is used")))
try:
    comm.split(0)
except kos.errors.KosError as error:
    print(type(error).__name__)
until = time.monotonic() + 10
while any(a > b for a, b in zip(left(), before)) and time.monotonic() < until:
    time.sleep(0.01)  # threads close what they served a moment later
print(*(max(a - b, 0) for a, b in zip(left(), before)), "left")
"""
BACKEND = "kos.comm.host.host_backend"
LATE = ("kos.comm.groups.Group", f"{BACKEND}.SharedArrays")
"""Made after the last exchange: a rank that cannot make them is alone in that."""


@pytest.mark.parametrize(("place", "failing"), [
    ("kos.comm.host.tcp.TCPTransport.__init__", (1,)), (f"{BACKEND}.FingerprintRing", (0, 1)),
    (f"{BACKEND}.SharedMemoryTransport", (1,)),
    *((place, (0, 1)) for place in LATE),
])  # fmt: skip
def test_what_was_made_of_a_group_is_freed_at_once_if_the_rest_cannot_be(place, failing, memory):
    """All ranks free it at once.  The garbage collector would be late, because the frames of an error refer to it."""
    if memory == "none" and place.startswith(BACKEND):
        pytest.skip("ranks on hosts of their own do not make it")
    results = run_processes(UNMADE.format(place=place, failing=failing, apart=memory == "none"), 2, KOS_HOST="")
    for rank in failing if place in LATE else (0, 1):
        error = "OutOfMemory"
        assert results[rank][1] == f"{error}\n0 0 left\n", results


@pytest.mark.parametrize(("backends", "nccl"), [(("tcp", "tcp"), {"max_ctas": 8}), (("tcp", "auto"), None)])
def test_the_rendezvous_of_an_init_that_fails_is_freed(monkeypatch, backends, nccl):
    found, usual, port = list[Any](), kos.comm.rendezvous_of, free_port()
    monkeypatch.setattr(kos.comm, "rendezvous_of", lambda *given: found.append(usual(*given)) or found[-1])

    def body(rank):
        place = {"rank": rank, "size": 2, "address": f"127.0.0.1:{port}", "secret": SECRET}
        with pytest.raises(KosError, match="nccl: expected None" if nccl else "init: rank . requested backend"):
            kos.init(backends[rank], rendezvous=place, timeout=TIMEOUT, nccl=nccl)

    assert run_threads(partial(body, 0), partial(body, 1)) == [None, None]
    assert [each.connection for each in found] == [None, None]
