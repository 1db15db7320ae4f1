"""Newcomers to a group that grows: who is admitted, who is refused by name, who dies or stops while joining."""

import errno
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm import create
from kos.comm.control.hub import pair
from kos.comm.control.network import Network
from kos.comm.control.newcomers import SILENT, Newcomer, Newcomers, parse
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.control.wire import JOIN, Acceptor, Connection, authenticate, connect, drive, receive_greeting
from kos.errors import BackendUnavailable, RankLost, RendezvousError
from tests.comm.growing import both, check, join, known, run
from tests.comm.tcp_ranks import SECRET, run_ranks

__all__ = ["known"]  # a fixture of every test


@both
def test_nobody_admits_a_newcomer(backend):
    def newcomer(address):
        words = r"^join: expected members at .* within 0.3 s, got none: .* not called grow or replace"
        with pytest.raises(RendezvousError, match=words):
            join(address, timeout=0.3)
        done.set()

    done = threading.Event()
    run(backend, 2, lambda comm: done.wait(20), newcomer)


def test_the_timeout_of_join_says_what_it_waited_for(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        here, gone = (f"127.0.0.1:{each.getsockname()[1]}" for each in (silent, nobody))
        with pytest.raises(RendezvousError) as caught:
            join(f"{here},{gone}", timeout=0.3)
    waited = f"{here}: {SILENT}; {gone}: [Errno 111] Connection refused"
    assert str(caught.value).endswith(f" s, got none: {waited}")
    with pytest.raises(RendezvousError, match="got none: .*No such file or directory: '.*/address'$"):
        join(f"{tmp_path}/address", timeout=0.1)


@pytest.mark.parametrize("call", ["grow", "replace"])
def test_a_group_of_one_that_nobody_can_join_says_so_at_once(no_launcher, call):
    with kos.init(timeout=20) as comm:
        words = f"^{call}.*: expected a launcher, or RANK=0 WORLD_SIZE=1, by which newcomers reach this process, got "
        with pytest.raises(BackendUnavailable, match=words):
            getattr(comm, call)(1)
        assert comm.all_reduce(np.ones(1)) == 1
        alone = comm.shrink()
        with pytest.raises(BackendUnavailable, match=words):
            getattr(alone, call)(1)


def test_a_newcomer_that_is_interrupted_waits_no_longer(monkeypatch):
    def wait_for(self, *args):
        raise KeyboardInterrupt

    group = ThreadGroup(1)
    monkeypatch.setattr(threading.Condition, "wait_for", wait_for)
    with pytest.raises(KeyboardInterrupt):
        join(group.address)
    assert ThreadControlPlane(group, 0).newcomers() == 0


def healthy_beside(
    stranger: Callable[[str], Any],
    ready: threading.Event,
    body: Callable[[kos.Communicator], Any] = lambda comm: check(comm.grow(1)),
) -> None:
    """Two members admit a newcomer that connects once ``ready`` is set, whatever another stranger does meanwhile."""

    def newcomer(address: str) -> tuple[int, int]:
        assert ready.wait(20)
        return check(join(address))

    results = run("tcp", 2, body, stranger, newcomer)
    assert sorted(each for each in results if each) == [(rank, 3) for rank in range(3)]


@pytest.fixture
def impatient(monkeypatch):
    """A newcomer waits less for members with another secret, and members for newcomers that they have asked."""
    monkeypatch.setattr("kos.comm.control.newcomers.FOREIGN_SECONDS", 0.2)
    monkeypatch.setattr("kos.comm.control.grow.CONFIRM_SECONDS", 1.0)


def poll_newcomers(comm: kos.Communicator, until: Callable[[], bool]) -> list[int]:
    """The most newcomers that each rank has counted, at the steps of a program, until rank 0 says so."""
    most = np.zeros(comm.size, np.int64)
    while not comm.broadcast(np.array(until()), 0):
        most = np.maximum(most, comm.all_gather(np.array(comm.newcomers())))
    return [int(each) for each in most]


def test_a_newcomer_that_does_not_reach_the_leader_is_refused(monkeypatch):
    """No member counts it.  If one did, all members would wait for it."""
    monkeypatch.setattr("kos.comm.control.newcomers.REACH_SECONDS", 0.3)
    resolve = socket.getaddrinfo

    def resolves(host, port, *args, **options):
        if threading.current_thread() is lost and port == closed[0]:
            raise OSError("No route to host")
        return resolve(host, port, *args, **options)

    def stranger(address):
        nonlocal lost
        lost, closed[:] = threading.current_thread(), [parse(address)[0][1]]
        words = r"^join: expected a newcomer that reaches rank 0 at \S+, which leads, got one that does not"
        with pytest.raises(RendezvousError, match=words + r"; \S+: No route to host$"):
            join(address)
        refused.set()

    def body(comm):
        assert poll_newcomers(comm, refused.is_set) == [0, 0]
        return check(comm.grow(1))

    lost, closed, refused = threading.main_thread(), list[int](), threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", resolves)
    healthy_beside(stranger, refused, body)


@pytest.mark.parametrize(("members", "dropped"), [(3, False), (2, True)])
def test_a_newcomer_that_knows_another_member_is_shown_the_leader(members, dropped):
    """If the leader has dropped the newcomer, the newcomer connects to it again.  The other member still counts it."""

    def body(comm):
        counted = []
        poll_newcomers(comm, lambda: counted.append(comm.newcomers()) or counted[-1] > 0)
        while dropped and not comm.all_gather(np.array(comm.newcomers())).all():
            pass
        if dropped and comm.rank == 0:
            comm.rendezvous.joining.close()
        return check(comm.grow(1, timeout=4.0 if dropped else None))

    def newcomer(address):
        return check(join(address.split(",")[1]))

    assert sorted(run("tcp", members, body, newcomer)) == [(rank, members + 1) for rank in range(members + 1)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"secret": "wrong"}, r"expected the same secret \(KOS_SECRET\) on all ranks, got different ones$"),
        ({"backend": "nccl"}, "expected backend tcp, as the group has, got backend nccl$"),
        ({"device": 1}, "expected no device, as backend tcp of the group uses no GPU, got 1$"),
        ({"version": "0.0.1"}, r"expected version \S+ of kos, as the group has, got version 0.0.1 of kos$"),
        ({"protocol": b"kos/tcp3"}, r"expected a rank of kos \(kos/tcp4\), got b'kos/tcp3'$"),
    ],
    ids=["secret", "backend", "device", "version", "protocol"],
)
def test_a_newcomer_that_does_not_fit_is_refused(options, words, impatient, monkeypatch):
    """The error names the reason on the newcomer's side.  The members keep waiting for another newcomer."""
    refused = threading.Event()
    if version := options.pop("version", None):
        known = kos.comm.versions
        wrong = {**known(), "kos": version}
        monkeypatch.setattr("kos.comm.versions", lambda: known() if refused.is_set() else wrong)

    def stranger(address):
        protocol = options.pop("protocol", None)
        if protocol:
            listener = socket.create_server(("127.0.0.1", 0))
            greeter = threading.Thread(target=lambda: listener.accept()[0].sendall(protocol + bytes(36)))
            greeter.start()
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RendezvousError, match=f"^join: .*{words}") as caught:
            join(address, **options)
        assert "\n" not in str(caught.value)
        refused.set()

    healthy_beside(stranger, refused)


def silent_newcomer(address: str) -> Connection:
    """A connection on which a newcomer has sent only its handshake."""
    place, deadline = parse(address)[0], time.monotonic() + 20
    sock = connect(*place, deadline)
    greeting = drive(receive_greeting(sock), sock, deadline)
    key = Network(SECRET.encode(), "", "", False).key(b"join")
    return drive(authenticate(sock, greeting, key, JOIN, 0, None), sock, deadline)


def raw_newcomer(address: str, port: int = 1) -> Connection:
    """A connection with the handshake and first message of a newcomer, which says that it listens at ``port``."""
    connection = silent_newcomer(address)
    hello = {"kos": kos.__version__, "me": ["127.0.0.1", port]}
    connection.post(json.dumps(hello).encode())
    drive(connection.flush(), connection.sock, time.monotonic() + 20)
    return connection


def receive_plan(connection: Connection) -> None:
    """Answer that this newcomer is ready, and let the leader admit it."""
    deadline = time.monotonic() + 20
    while b"plan" not in (message := drive(connection.receive(), connection.sock, deadline)):
        assert message == b'{"ready": true}'
        connection.post(message)
        drive(connection.flush(), connection.sock, deadline)


def test_a_newcomer_that_has_ended_stays_so():
    ours, theirs = pair()
    newcomer = Newcomer(ours, {"me": ["127.0.0.1", 1]}, True)
    assert newcomer.read()
    theirs.close()
    assert [newcomer.read() for _ in range(3)] == [False] * 3
    ours.close()


def test_a_newcomer_that_was_ready_is_taken():
    """Also if it has ended since, which the new group detects.  No other newcomer was asked to take its place."""
    pairs, joining = [pair(), pair()], Newcomers()
    for port, (ours, _) in enumerate(pairs):
        joining.add(ours, {"me": ["127.0.0.1", 1 + port]}, None)
    for _ in range(2):
        ready = joining.ready(1)
        pairs[0][1].post(b'{"ready": true}')
        drive(pairs[0][1].flush(), pairs[0][1].sock, time.monotonic() + 5)
    assert ready
    pairs[0][1].close()
    assert [each.hello["me"][1] for each in joining.take(1)] == [1]
    for each in pairs:
        for end in each:
            end.close()


@pytest.mark.parametrize("when", ["before it is asked", "once it has the plan", "while it makes its communicator"])
def test_a_newcomer_stops_while_it_joins(when, impatient, monkeypatch):
    """A healthy newcomer that waits too is taken instead."""
    make, first = create.communicator, threading.Lock()

    def stopping(*args, **options):
        if when.startswith("while") and args[2].rank == 2 and first.acquire(blocking=False):
            here.set()
            over.wait(40)
            raise RankLost("the test is over")
        return make(*args, **options)

    def stopped(address):
        if when.startswith("while"):
            with pytest.raises(RankLost, match="the test is over"):
                join(address, timeout=1.0)
            return
        with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel answers for a process that is stopped
            connection = raw_newcomer(address, listener.getsockname()[1])
            if when.startswith("once"):
                receive_plan(connection)
            here.set()
            assert over.wait(40)
            connection.close()

    def body(comm):
        began = time.monotonic()
        new = comm.grow(1, timeout=4.0)
        seconds = time.monotonic() - began
        over.set()
        assert seconds < 8.0
        return check(new)

    monkeypatch.setattr("kos.comm.communicator", stopping)
    here, over = threading.Event(), threading.Event()
    healthy_beside(stopped, here, body)


@pytest.mark.usefixtures("impatient")
def test_newcomers_that_stall_do_not_prolong_the_call():
    """Each of them costs an attempt, but all attempts together have the timeout of the call."""

    def stalling(address):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            connection = raw_newcomer(address, listener.getsockname()[1])
            arrived.append(connection)
            receive_plan(connection)
            assert over.wait(60)
            connection.close()

    def body(comm):
        while comm.broadcast(np.array(len(arrived)), 0) < 8:
            comm.newcomers()
        began = time.monotonic()
        with pytest.raises(RendezvousError, match="grow 1: . of 1 newcomers joined at .* within 2 s"):
            comm.grow(1, timeout=2.0)
        seconds = time.monotonic() - began
        for connection in arrived if comm.rank == 0 else ():
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        over.set()
        assert seconds < 6.0
        return check(comm)

    def stall(address):
        with suppress(OSError, RendezvousError):
            stalling(address)

    arrived, over = list[Connection](), threading.Event()
    assert run("tcp", 2, body, *[stall] * 8)[:2] == [(0, 2), (1, 2)]


def test_the_count_does_not_wait_for_a_newcomer_that_says_nothing():
    def silent(address):
        connection = silent_newcomer(address)
        here.set()
        assert over.wait(40)
        connection.close()

    def body(comm):
        longest = 0.0
        while not here.is_set() or longest == 0.0:
            began = time.monotonic()
            assert comm.newcomers() == 0
            longest = max(longest, time.monotonic() - began)
        comm.newcomers()
        over.set()
        assert longest < 1.0
        return check(comm)

    here, over = threading.Event(), threading.Event()
    assert run("tcp", 1, body, silent)[0] == (0, 1)


def test_a_newcomer_of_a_failed_attempt_that_is_late_is_named_by_its_address():
    def body(group):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if group.rank == 0:
                places.append(listener.getsockname())
            group.barrier()
            group.newer = 1, [*group.members, places[0]]
            group.timeout = 1.0
            with pytest.raises(RendezvousError) as caught:
                group.shrink()
            group.barrier()
        return str(caught.value)

    places = list[Any]()
    texts = set(run_ranks(2, body))
    assert texts == {f"shrink: the newcomer at 127.0.0.1:{places[0][1]} did not arrive within 1 s"}


@pytest.mark.parametrize("first", [b"{", b"", None])
def test_a_caller_without_a_first_message_is_dropped(first, monkeypatch):
    """It has proved that it knows the secret.

    Then it sends no JSON, or ends, or its connection times out (ETIMEDOUT).
    """

    def lost(connection):
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        yield 0

    def call():
        sock = connect(*listener.getsockname(), deadline)
        with sock:
            greeting = drive(receive_greeting(sock), sock, deadline)
            connection = drive(authenticate(sock, greeting, b"key", 1, 2), sock, deadline)
            if first:
                connection.post(first)
                drive(connection.flush(), sock, deadline)
            if first != b"":
                sock.settimeout(20)
                dropped.append(sock.recv(1) == b"")

    if first is None:
        monkeypatch.setattr(Connection, "receive", lost)
    deadline, dropped, listener = time.monotonic() + 20, list[bool](), Network(b"", "127.0.0.1", "", True).listen()
    caller = threading.Thread(target=call)
    caller.start()
    with closing(Acceptor(listener, b"key", hello=True)) as door:
        while caller.is_alive():
            assert door.admit(0.05) is None
    assert dropped == ([] if first == b"" else [True])
