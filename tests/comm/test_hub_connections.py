"""Ranks and hubs that lack connections or file descriptors, and calls of the hub that Ctrl-C interrupts."""

import contextlib
import errno
import socket
import sys
import threading
import time
from functools import partial
from subprocess import PIPE, run
from typing import Any
from unittest.mock import Mock

import pytest

from kos.comm.control.env import env_rendezvous
from kos.comm.control.hub import is_cut_off
from kos.comm.control.wire import Connection, Network, admit_all
from kos.errors import CollectiveTimeout, KosError, RendezvousError
from tests.comm.ranks import no_file_may_be_opened
from tests.comm.tcp_ranks import ROOT, TIMEOUT, environment, free_port, run_ranks, run_threads


def test_a_rank_that_waits_for_connections_hears_of_a_failure():
    """Before its timeout."""

    def body(rendezvous):
        expected = RendezvousError
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
        usual = rendezvous.barrier

        def fail():
            usual()
            rendezvous.failures.over = late
            raise late

        if rendezvous.rank == 1:
            rendezvous.barrier = fail
        with pytest.raises(CollectiveTimeout, match="rank 2 did not arrive") as caught:
            rendezvous.split(0)
        assert caught.value.ranks == (2,) and "connections" not in str(caught.value)

    run_ranks(3, body)


def test_a_listener_without_an_acceptor_is_closed():
    """Those who call there would wait for as long as it lasts."""
    listener = Network(b"secret", "127.0.0.1", "", True).listen()
    with no_file_may_be_opened(), pytest.raises(OSError, match="Too many open files"):
        admit_all(listener, b"key", {1}, 2, time.monotonic() + TIMEOUT)
    assert listener.fileno() < 0


def test_a_hub_without_file_descriptors_fails_at_once(monkeypatch):
    """The other ranks hear it as soon as rank 0 has closed another file."""
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
            assert str(caught.value) == (
                "rendezvous: rank 1 cannot open its connections: [Errno 24] Too many open files"
            )

    run_ranks(3, body)


def test_a_hub_serves_more_ranks_than_processes_may_usually_open_files():
    """One of them ends, which all the others are told; rank 0 raises the limit of its process."""
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


CTRL_C, NO_FILES = KeyboardInterrupt(), OSError("too many open files")
INTERRUPTED = "interrupted on rank {} .*by KeyboardInterrupt"
STEPS: dict[str, tuple[str, bool, BaseException, str]] = {
    "within the barrier": ("_exchange", True, CTRL_C, INTERRUPTED),
    "after the barrier": ("barrier", True, CTRL_C, INTERRUPTED),
    "before it joins": ("_join", False, CTRL_C, INTERRUPTED),
    "once the hub has admitted it": ("_call_hub", True, CTRL_C, "rank {}"),  # which may take no second call
    "once it has joined": ("_own_location", False, CTRL_C, INTERRUPTED),
    "no file is left": ("_own_location", False, NO_FILES, "rank {} cannot open its connections: too many"),
}
"""The method that raises; whether it does so at its end; what it raises, and what the others hear."""


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_within_a_split_is_named_on_all(rank, step):
    """Unless the hub of the new group, which rank 0 runs, has told them, what the rank itself knows of it tells them."""
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
            fail_once(rendezvous if name in ("_exchange", "barrier") else child, name, error, after=after)
            return child

        rendezvous._unjoined = make
        with pytest.raises(KeyboardInterrupt if error is CTRL_C else RendezvousError):
            rendezvous.split(0, rendezvous.rank)
        last = rendezvous.failures.status.last
        assert name == "_own_location" or (last is not None and last.ranks == (rank,))

    if rank or name != "_call_hub":  # rank 0 calls no hub
        run_ranks(3, body)


def test_a_host_whose_rank_reads_nothing_is_not_cut_off():
    """It answers what asks for room in the receiver's memory: of a stopped rank, for one."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        reader, _ = listener.accept()
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(bytes(1 << 20))
        time.sleep(3.0)
        assert not is_cut_off(sock)
        reader.close()
