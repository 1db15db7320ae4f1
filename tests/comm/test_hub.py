"""The hub of a TCP rendezvous: exchanges, calls that differ, ranks that are lost, stall or are interrupted.

Ranks and hubs that lack connections or file descriptors.
"""

import contextlib
import errno
import gc
import os
import re
import select
import socket
import struct
import sys
import threading
import time
from functools import partial
from subprocess import PIPE, run
from typing import Any
from unittest.mock import Mock

import pytest

from kos.comm.control.group import TCPControlPlane
from kos.comm.control.hub import DATA, RESULT, is_cut_off, pair, send
from kos.comm.control.network import Network, admit_all
from kos.comm.control.place import env_rendezvous
from kos.comm.control.wire import MAX_MESSAGE, Connection, drive
from kos.errors import CollectiveTimeout, KosError, RankLost, RendezvousError
from tests.comm.ranks import no_file_may_be_opened, on_threads
from tests.comm.tcp_ranks import (
    ROOT,
    TIMEOUT,
    come_first,
    environment,
    finish,
    free_port,
    run_ranks,
    run_threads,
    start,
)
from tests.forked import python


def test_the_last_answers_arrive_without_a_close():
    """The process of rank 0 ends only when the hub has sent the answer to the others."""
    code = "from kos.comm.control.place import env_rendezvous\nenv_rendezvous(60).allgather(b'x' * 30_000_000)"
    port = free_port()
    rank0 = start([*python(), "-c", code], 0, 2, port)
    try:
        first, _ = env_rendezvous(60, environment(1, 2, port)).allgather(b"")
        assert first == b"x" * 30_000_000
    finally:
        [result] = finish([rank0])
    assert result == (0, "")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_group_that_is_freed_on_the_thread_of_its_hub(before_call):
    """The garbage collector may free a group on the thread of its hub."""
    collecting = list[threading.Thread]()

    def collect(connection):
        if threading.current_thread() in collecting:
            gc.collect()

    def body(rendezvous):
        group = rendezvous.split(0)
        hub = group._hub
        if rendezvous.rank == 0:
            group.itself = group
            del group
            collecting.append(hub)
        rendezvous.barrier()
        if rendezvous.rank == 1:
            group.close()
        else:
            hub.join(TIMEOUT)
            assert not hub.is_alive()

    before_call(Connection, "receive", collect)
    gc.disable()
    try:
        run_ranks(2, body)
    finally:
        gc.enable()


KINDS = pytest.mark.parametrize("run", [run_ranks, partial(on_threads, timeout=TIMEOUT)], ids=["env", "threads"])


@KINDS
@pytest.mark.parametrize("how", ["late", "closed"])
def test_the_first_failure_is_raised_again(run, how):
    """A rank that arrives after the timeout of another does not join that rank's next exchange."""
    given_up = threading.Barrier(2)

    def body(rendezvous):
        errors = []
        if rendezvous.rank == 1:
            given_up.wait(TIMEOUT)
        elif how == "closed":
            rendezvous.close()
        rendezvous.timeout = 0.2
        for attempt in range(2):
            with pytest.raises((RendezvousError, RankLost)) as caught:
                rendezvous.allgather(b"of the first" if attempt == 0 else b"of the second")
            errors.append(str(caught.value))
            if rendezvous.rank == 0 and attempt == 0:
                given_up.wait(TIMEOUT)
        return errors

    first, second = run(2, body)
    assert len(set(first)) == 1 and len(set(second)) == 1
    expected = {"late": r"ranks \[1\]", "closed": "rank 0 closed"}
    assert re.search(expected[how], first[0]), first


@KINDS
def test_a_rank_that_is_interrupted_says_so(run):
    """It is interrupted in an exchange.  No rank waits for the timeout, neither in this exchange nor in a later one."""

    def body(rendezvous):
        if rendezvous.rank == 1:
            rendezvous._exchange = Mock(side_effect=KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                rendezvous.barrier()
        for _ in range(2):
            with pytest.raises(RankLost, match="rendezvous: exchange was interrupted on rank 1 by Keyboard") as caught:
                rendezvous.barrier()
            assert caught.value.ranks == (1,)
        rendezvous.close()

    run(3, body)


def test_a_rank_that_does_not_connect_is_named(monkeypatch):
    def admit_but_2(listener, key, above, size, deadline, look, epoch):
        return admit_all(listener, key, above - {2}, size, deadline, look=look)[0], [2]

    def body(rendezvous):
        problem = ""
        if rendezvous.rank == 2:
            rendezvous.allgather(b"")  # the first step of connect
        else:
            with pytest.raises(RendezvousError) as caught:
                rendezvous.connect()
            problem = str(caught.value)
        said = "tcp: rank {} waited for ranks with higher numbers: ranks [2] did not connect within {:g} s"
        expected = [said.format(rank, rendezvous.timeout).encode() for rank in (0, 1)]
        assert rendezvous.allgather(problem.encode()) == [*expected, b""]

    monkeypatch.setattr("kos.comm.control.network.admit_all", admit_but_2)
    run_ranks(3, body)


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_aborts_is_named(gone):
    def body(rendezvous):
        rendezvous.barrier()
        if rendezvous.rank == gone:
            rendezvous.abort(1)
            return
        for _ in range(2):
            with pytest.raises(RankLost, match=f"rendezvous: rank {gone} is gone: it aborted the group"):
                rendezvous.allgather(b"")

    run_ranks(4, body)


@pytest.mark.parametrize(("late", "within"), [(0, False), (1, False), (1, True)])
def test_a_rank_that_stalls_is_named(late, within, monkeypatch):
    """It stalls before it sends its message, or in the middle of it."""
    met, named, receive, arrived = threading.Barrier(3), threading.Barrier(3), Connection.receive, list[bytes]()

    def note(connection):
        message = yield from receive(connection)
        arrived.extend([message] * (message[:1] == DATA))
        return message

    monkeypatch.setattr(Connection, "receive", note)
    come_first(monkeypatch, lambda: len(arrived) % 3 == 2)

    def body(rendezvous):
        rendezvous.timeout = 0.3
        if late == 0 and rendezvous._hub is not None:  # else the hub uses the timeout of rank 0
            rendezvous._hub.timeout = 0.3
        began = time.monotonic()  # before any rank waits: the hub counts from the first
        met.wait(20)
        if rendezvous.rank != late:
            with pytest.raises(RendezvousError, match=rf"ranks \[{late}\] of 3 did not arrive within 0.3 s"):
                rendezvous.allgather(b"")
            assert time.monotonic() - began >= 0.3
        elif within:
            rendezvous.connection.sock.send(b"\0")
        named.wait(20)

    run_ranks(3, body)


def test_a_rank_that_does_not_read_delays_no_other_rank():
    came = threading.Event()

    def body(rendezvous):
        connection = rendezvous.connection
        if rendezvous.rank == 2:
            receive = connection.receive
            connection.receive = lambda: (came.wait(20), receive())[1]
        assert len(rendezvous.allgather(bytes(10_000_000))) == 3
        assert came.is_set() or rendezvous.rank == 1
        came.set()

    run_ranks(3, body)


def test_a_forked_process_does_not_keep_rank_0s_connection_open():
    mine, hubs = pair()
    (ready, began), (asleep, wake) = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.close(wake)
        os.write(began, b"1")
        os.read(asleep, 1)
        os._exit(0)
    assert os.read(ready, 1)
    mine.close()
    assert hubs.drain()  # the connection has ended, although the child lives
    for descriptor in (ready, began, asleep, wake):
        os.close(descriptor)
    assert os.waitpid(child, 0)[1] == 0


def of_two(timeout: float) -> tuple[TCPControlPlane, Connection]:
    """Rank 1 of two, and the hub's end of its connection."""
    mine, hubs = pair()
    rendezvous = TCPControlPlane(1, 2, timeout, Network(b"s", "127.0.0.1", "", loopback=True), None)
    rendezvous.connection = mine
    return rendezvous, hubs


def test_a_check_for_deaths_does_not_lose_the_answer_to_an_exchange(monkeypatch):
    """The answer arrives after the wait for it, and before the check for lost ranks."""
    real = drive

    def late(waiting, sock, deadline, look=None):
        if look is not None:
            next(waiting)
            message = real(connection.receive(), connection.sock, deadline)[1:]
            send(connection, RESULT + struct.pack("!2I", len(message), len(message)) + 2 * message)
            while not select.select([sock], [], [], 1)[0]:
                pass
            look()
        return real(waiting, sock, deadline, look)

    rendezvous, connection = of_two(1.0)
    rendezvous.failures.status.connect(rendezvous)
    monkeypatch.setattr("kos.comm.control.group.drive", late)
    assert rendezvous.allgather(b"question") == [b"question"] * 2


@pytest.mark.parametrize("grace", [{"control.group": 0.1}], ids=[""])
def test_a_hub_that_stalls(grace):
    rendezvous, _hubs = of_two(0.2)
    with pytest.raises(RendezvousError, match=r"rank 0 gave no answer within 0\.2 s"):
        rendezvous.allgather(b"")


def test_the_ranks_beside_a_lost_hub_are_looked_for_on_its_host(monkeypatch):
    asked = []
    monkeypatch.setattr("kos.comm.control.group.look_beside_hub", lambda failures, places: asked.extend(places))
    mine, hubs = pair()
    hubs.close()
    network = Network(b"s", "hub", "10.0.0.2", loopback=False, name="hub")
    rendezvous = TCPControlPlane(2, 3, 1.0, network, None)
    rendezvous.connection, rendezvous._addresses = mine, [("", 1), ("", 2), ("10.0.0.2", 3)]
    with pytest.raises(RankLost, match="rank 0 is gone"):
        rendezvous.allgather(b"")
    assert asked == [("hub", 1), ("hub", 2), ("10.0.0.2", 3)]


def test_an_exchange_that_cannot_be_compressed(monkeypatch):
    for name, value in (("hub.PACKED_RANKS", 2), ("hub.MAX_MESSAGE", 300_000), ("wire.MAX_MESSAGE", 300_000)):
        monkeypatch.setattr(f"kos.comm.control.{name}", value)
    run_ranks(2, lambda rendezvous: rendezvous.allgather(os.urandom(149_970)))


def test_an_exchange_of_too_many_bytes_is_refused():
    message = f"allgather: expected less than {MAX_MESSAGE} bytes in all, got {MAX_MESSAGE // 100}[0-9][0-9]"

    def body(rendezvous):
        with pytest.raises(RendezvousError, match=message):
            rendezvous.allgather(bytes(MAX_MESSAGE // 2 + 1))

    run_ranks(2, body)


def test_a_rank_that_waits_for_connections_hears_of_a_failure():
    """Before its timeout."""

    def body(rendezvous):
        expected: type[BaseException] = RankLost
        if rendezvous.rank == 1:
            expected, rendezvous.network = KeyboardInterrupt, Mock(call=Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(expected) as caught, rendezvous.reporting():
            rendezvous.connect()
        if rendezvous.rank == 0:
            assert "interrupted on rank 1 by KeyboardInterrupt" in str(caught.value)

    run_ranks(2, body, timeout=10.0)


def test_a_timeout_of_another_rank_is_no_lack_of_connections():
    """In Python a CollectiveTimeout is an OSError."""
    late = CollectiveTimeout("all_reduce #3: rank 2 did not arrive", ranks=[2])

    def body(rendezvous):
        if rendezvous.rank == 1:
            rendezvous.network = Mock(wraps=rendezvous.network, listen=Mock(side_effect=late))
        with pytest.raises(CollectiveTimeout, match="rank 2 did not arrive") as caught:
            rendezvous.split(0)
        assert caught.value.ranks == (2,) and "connections" not in str(caught.value)

    run_ranks(3, body)


def test_a_listener_without_an_acceptor_is_closed():
    """Otherwise, ranks that connect to it would wait as long as the listener is open."""
    listener = Network(b"secret", "127.0.0.1", "", True).listen()
    with no_file_may_be_opened(), pytest.raises(OSError, match="Too many open files"):
        admit_all(listener, b"key", {1}, 2, time.monotonic() + TIMEOUT)
    assert listener.fileno() < 0


def test_a_hub_without_file_descriptors_fails_at_once(monkeypatch):
    """The other ranks get the report as soon as rank 0 has closed another file."""
    usual, close, free, port = socket.socket.accept, Connection.close, threading.Event(), free_port()

    def accept(self):
        if threading.current_thread().name == "kos rendezvous" and not free.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return usual(self)

    def join(rank):
        with pytest.raises(RendezvousError, match="rank 0 cannot open its connections: .*Too many open") as caught:
            env_rendezvous(15, environment(rank, 3, port))
        return caught.value

    def close_and_free(self):
        close(self)
        free.set()

    monkeypatch.setattr(socket.socket, "accept", accept)
    monkeypatch.setattr(Connection, "close", close_and_free)
    errors = run_threads(*[partial(join, rank) for rank in range(3)])
    assert [error.ranks for error in errors] == [(0,)] * 3


@pytest.mark.parametrize("opens", ["accept", "dup", "connect"])
def test_a_rank_without_file_descriptors_for_the_others_is_named(before_call, opens):
    lacking = None

    def limited(*given, **more):
        if threading.current_thread() is lacking:
            raise OSError(errno.EMFILE, "Too many open files")

    before_call(*((socket, "create_connection") if opens == "connect" else (socket.socket, opens)), limited)

    def body(rendezvous):
        nonlocal lacking
        if rendezvous.rank == 1:
            lacking = threading.current_thread()
        rendezvous.barrier()
        def connect():
            with rendezvous.reporting():
                rendezvous.connect()
                rendezvous.barrier()  # rank 0 may have all of its connections

        with pytest.raises(KosError) as caught:
            connect()
        assert caught.value.ranks == (1,), caught.value
        if rendezvous.rank == 1:
            assert str(caught.value).startswith("rendezvous: rank 1 cannot open its connections: Too many open files")

    run_ranks(3, body)


def test_a_hub_serves_more_ranks_than_processes_may_usually_open_files():
    """Rank 0 raises the limit of its process.  One rank ends, which is reported to all others."""
    limit = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (1024, r.getrlimit(r.RLIMIT_NOFILE)[1]))"
    done = run([sys.executable, "-c", f"{limit}; from benchmarks.hub import measure; measure(1100, 1)"], cwd=ROOT,
               timeout=2 * TIMEOUT, stderr=PIPE, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rank_without_file_descriptors_for_the_hub_fails_at_once():
    place = environment(1, 2, free_port())
    with (
        no_file_may_be_opened(),
        pytest.raises(RendezvousError, match="rank 1 cannot open its connections: .*Too many open files") as caught,
    ):
        env_rendezvous(3600, place)
    assert caught.value.ranks == (1,)


def fail_once(owner: Any, name: str, error: BaseException, *, after: bool) -> None:
    """The next call of that method raises ``error``, before or after what it does."""
    usual = getattr(owner, name)

    def call(*given: Any) -> None:
        delattr(owner, name)
        if after:
            usual(*given)
        raise error

    setattr(owner, name, call)


CTRL_C, NO_FILES = KeyboardInterrupt(), OSError(errno.EMFILE, "Too many open files", "/one/of/many")
LACKS = r"rank {} cannot open its connections: Too many open files( \(the hard limit .*)?(;|$)"  # without the file
INTERRUPTED = "interrupted on rank {} .*by KeyboardInterrupt"
STEPS: dict[str, tuple[str, bool, BaseException, str]] = {
    "within an exchange": ("_exchange", True, CTRL_C, INTERRUPTED),
    "after an exchange": ("allgather", True, CTRL_C, INTERRUPTED),
    "before it joins": ("join_hub", False, CTRL_C, INTERRUPTED),
    "once the hub has admitted it": ("_call_hub", True, CTRL_C, "rank {}"),  # which may take no second call
    "once it has joined": ("_own_location", False, CTRL_C, INTERRUPTED),
    "no file is left": ("_own_location", False, NO_FILES, LACKS),
}
"""The method that raises; whether it does so at its end; what it raises, and what the others hear."""


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_within_a_split_is_named_on_all(rank, step):
    """The group that is split reports it."""
    name, after, error, told = STEPS[step]

    def body(rendezvous):
        if rendezvous.rank != rank:
            began = time.monotonic()
            with pytest.raises(KosError, match=told.format(rank)) as caught:
                rendezvous.split(0, rendezvous.rank)
            assert caught.value.ranks == (rank,) and time.monotonic() - began < 0.5 * TIMEOUT
            return
        unjoined = rendezvous._unjoined

        def make(ranks):
            child = unjoined(ranks)
            fail_once(rendezvous if name in ("_exchange", "allgather") else child, name, error, after=after)
            return child

        rendezvous._unjoined = make
        with pytest.raises(KeyboardInterrupt if error is CTRL_C else RendezvousError):
            rendezvous.split(0, rendezvous.rank)
        last = rendezvous.failures.status.last
        assert error is NO_FILES or (last is not None and last.ranks == (rank,))

    if rank or name != "_call_hub":  # rank 0 calls no hub
        run_ranks(3, body)


def test_a_host_whose_rank_reads_nothing_is_not_cut_off():
    """The host of a stopped rank, for example, still answers TCP's probes of the receive window."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        reader, _ = listener.accept()
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(bytes(1 << 20))
        time.sleep(3.0)
        assert not is_cut_off(sock)
        reader.close()
