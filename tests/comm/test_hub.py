"""The hub of a TCP rendezvous: exchanges, calls that differ, ranks that are lost or stall."""

import gc
import os
import re
import select
import socket
import struct
import threading
import time
from functools import partial
from unittest.mock import Mock

import pytest

from kos.comm.control.env import env_rendezvous
from kos.comm.control.group import TCPRendezvous
from kos.comm.control.hub import RESULT, Hub, pair, send
from kos.comm.control.wire import MAX_MESSAGE, Connection, Network, admit_all, drive
from kos.errors import CollectiveMismatch, CudaError, RankLost, RendezvousError
from tests.comm.ranks import on_threads
from tests.comm.tcp_ranks import TIMEOUT, come_first, environment, finish, free_port, run_ranks, start
from tests.forked import python


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_allgather_and_split(size):
    def body(rendezvous):
        me = rendezvous.rank
        for length in (0, 1, 70_000):
            got = rendezvous.allgather(bytes([me]) * (length + me))
            assert got == [bytes([r]) * (length + r) for r in range(size)]
        rendezvous.barrier()
        assert (rendezvous.local_rank, rendezvous.local_size) == (me, size)
        part = rendezvous.split(me % 3 if me % 3 < 2 else None, -me)
        if me % 3 == 2:
            assert part is None
        else:
            members = [r for r in reversed(range(size)) if r % 3 == me % 3]
            assert part.allgather(str(me).encode()) == [str(r).encode() for r in members]
            assert (part.rank, part.size) == (members.index(me), len(members))
            smaller = part.split(part.rank)
            assert smaller is not None and smaller.allgather(b"x") == [b"x"]
            part.close()
        rendezvous.barrier()

    run_ranks(size, body)


def test_the_last_answers_arrive_without_a_close():
    """The process of rank 0 ends only when the hub has sent the answer to the others."""
    code = "from kos.comm.control.env import env_rendezvous\nenv_rendezvous(60).allgather(b'x' * 30_000_000)"
    port = free_port()
    rank0 = start([*python(), "-c", code], 0, 2, port)
    try:
        first, _ = env_rendezvous(60, environment(1, 2, port)).allgather(b"")
        assert first == b"x" * 30_000_000
    finally:
        [result] = finish([rank0])
    assert result == (0, "")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_group_that_is_freed_on_the_thread_of_its_hub(monkeypatch):
    """The garbage collector may free a group on the thread of its hub."""
    receive, collecting = Hub._receive, list[Hub]()

    def collect(self, rank, slots):
        if self in collecting:
            gc.collect()
        receive(self, rank, slots)

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

    monkeypatch.setattr(Hub, "_receive", collect)
    gc.disable()
    try:
        run_ranks(2, body)
    finally:
        gc.enable()


KINDS = pytest.mark.parametrize("run", [run_ranks, partial(on_threads, timeout=TIMEOUT)], ids=["env", "threads"])


@KINDS
def test_calls_that_differ_raise_on_all_ranks(run):
    """One rank gathers while the others split.  No rank gets the bytes of another call, then or later."""

    def body(rendezvous):
        rendezvous.barrier()
        errors = []
        rendezvous.call = "allocate of float32[4]" if rendezvous.rank == 2 else "split"
        for call in (lambda: rendezvous.split(0), rendezvous.barrier):
            with pytest.raises(CollectiveMismatch) as caught:
                call() if rendezvous.rank != 2 else rendezvous.allgather(b"12")
            errors.append(str(caught.value))
            assert caught.value.ranks == (0, 2) and caught.value.expected.startswith("split (exchange ")
        return errors

    [text] = {text for errors in run(3, body) for text in errors}
    calls = re.fullmatch(r"rank 0 called split \(exchange (\d+)\) but rank 2 called (.*) \(exchange (\d+)\)", text)
    assert calls is not None and calls[1] == calls[3] and calls[2] == "allocate of float32[4]", text


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
@pytest.mark.parametrize(
    ("where", "error"),
    [("exchange", KeyboardInterrupt()), ("part", MemoryError("all is used")), ("part", CudaError("out of memory"))],
    ids=["exchange", "part", "GPU"],
)
def test_a_rank_that_gives_up_says_so(run, where, error):
    """Ctrl-C within an exchange, and a group that one rank cannot use: nobody waits for the timeout."""

    def body(rendezvous):
        group = rendezvous.split(0, -rendezvous.rank) if where == "part" else rendezvous
        if rendezvous.rank == 1:
            if where == "part":
                with pytest.raises(type(error)), group.reporting():
                    raise error
            else:
                group._exchange = Mock(side_effect=error)
                with pytest.raises(type(error)):
                    group.barrier()
            with pytest.raises(RendezvousError, match="interrupted on rank 1"):
                group.barrier()
        else:
            me, what = "rank 1( of world)?", f"{type(error).__name__}.*{error}"
            told = f"rendezvous: exchange was interrupted on {me} by {what}; {me} aborted because of it"
            for _ in range(2):
                with pytest.raises(RendezvousError, match=told) as caught:
                    group.barrier()
                assert caught.value.ranks == (1,)
        group.close()

    run(3, body)


def test_a_rank_that_joins_after_another_was_found_dead(monkeypatch):
    """It hears of the death, though rank 0 has left the group meanwhile."""
    found, told, report, join_at = threading.Event(), threading.Barrier(2), Hub._report, TCPRendezvous._join_at

    def tell(self, failure):
        found.set()
        report(self, failure)

    def join(self, *arguments):
        if self.rank == 2:
            told.wait(TIMEOUT)
            raise RankLost("as if its process had ended")
        if self.rank == 1:
            assert found.wait(TIMEOUT)
            time.sleep(0.5)  # rank 0 leaves
        join_at(self, *arguments)

    def body(rendezvous):
        rendezvous.failures.status.ended = lambda rank: rank == 2
        with pytest.raises(RankLost) as caught:
            rendezvous.split(0)
        if rendezvous.rank != 2:
            assert caught.value.ranks == (2,), caught.value
        if rendezvous.rank == 1:
            told.wait(TIMEOUT)
        rendezvous.barrier()

    for module in ("hub", "group"):  # the hub awaits rank 1, however late it is
        monkeypatch.setattr(f"kos.comm.control.{module}.CLOSE_SECONDS", TIMEOUT)
    monkeypatch.setattr(Hub, "_report", tell)
    monkeypatch.setattr(TCPRendezvous, "_join_at", join)
    run_ranks(3, body)


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

    monkeypatch.setattr("kos.comm.control.group.admit_all", admit_but_2)
    run_ranks(3, body)


@pytest.mark.parametrize("how", ["killed", "aborted", "closed"])
@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_is_lost(how, gone):
    why = {
        "killed": "its connection was closed",
        "aborted": "it aborted the group",
        "closed": "it closed the group|its connection was closed",
    }[how]

    def body(rendezvous):
        rendezvous.barrier()
        if rendezvous.rank == gone:
            if how == "killed":
                rendezvous._connection.sock.shutdown(socket.SHUT_RDWR)  # as the kernel does when a process dies
            elif how == "aborted":
                rendezvous.abort(1)
            else:
                rendezvous.close()
            return
        for _ in range(2):
            with pytest.raises(RankLost, match=f"rendezvous: rank {gone} is gone: ({why})"):
                rendezvous.allgather(b"")

    run_ranks(4, body)


@pytest.mark.parametrize(("late", "within"), [(0, False), (1, False), (1, True)])
def test_a_rank_that_stalls_is_named(late, within, monkeypatch):
    """Before it sends its message, or within it."""
    met, named = threading.Barrier(3), threading.Barrier(3)
    come_first(monkeypatch, lambda present: present == 2)

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
            rendezvous._connection.sock.send(b"\0")
        named.wait(20)

    run_ranks(3, body)


def test_a_rank_that_does_not_read_delays_no_other_rank():
    came = threading.Event()

    def body(rendezvous):
        connection = rendezvous._connection
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


def of_two(timeout: float) -> tuple[TCPRendezvous, Connection]:
    """Rank 1 of two, and the hub's end of its connection."""
    mine, hubs = pair()
    rendezvous = TCPRendezvous(1, 2, timeout, Network(b"s", "127.0.0.1", "", loopback=True), None)
    rendezvous._connection = mine
    return rendezvous, hubs


def test_a_look_for_deaths_leaves_the_answer_to_an_exchange(monkeypatch):
    """The answer arrives between the wait for it and the look."""
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
    rendezvous = TCPRendezvous(2, 3, 1.0, network, None)
    rendezvous._connection, rendezvous._addresses = mine, [("", 1), ("", 2), ("10.0.0.2", 3)]
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
