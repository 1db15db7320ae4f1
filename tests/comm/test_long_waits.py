"""A rank that waits for a long time uses little CPU time: it polls rarely, or sleeps until an event."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.base import ControlPlane
from kos.comm.waits import Backoff
from kos.testing import spawn
from tests.comm.tcp_ranks import TIMEOUT, run_ranks

SECONDS = 0.6
WAITS: dict[str, Callable[[kos.Communicator], Any]] = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(2)),
    "message": lambda comm: comm.send(np.ones(2), 0) if comm.rank else comm.recv(np.ones(2), 1),
    "split": lambda comm: comm.split(0),
    "exchange": lambda comm: comm.rendezvous.barrier(),
}


def waits(comm: kos.Communicator) -> None:
    """Rank 0 waits for rank 1, which is late, and takes a small part of a core."""
    for name, wait in WAITS.items():
        if comm.rank == 1:
            threading.Event().wait(SECONDS)
        began = time.thread_time()
        wait(comm)
        assert time.thread_time() - began < 0.3 * SECONDS, name


@pytest.fixture
def short(monkeypatch):
    """Shorten the first second of a wait to 50 ms."""
    monkeypatch.setattr(Backoff, "SLEEP_AFTER", 0.05)


def by_tcp(fn: Callable[[kos.Communicator], None]) -> None:
    def body(rendezvous: ControlPlane) -> None:
        with kos.init("tcp", rendezvous=rendezvous, timeout=TIMEOUT) as comm:
            fn(comm)

    run_ranks(2, body)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("kind", ["mock", "shared memory", "sockets"])
def test_a_wait_takes_a_small_part_of_a_core(kind, request):
    if kind == "sockets":
        request.getfixturevalue("apart")
    spawn(waits, 2) if kind == "mock" else by_tcp(waits)


@pytest.mark.mpi
@pytest.mark.usefixtures("short")
def test_a_wait_of_mpi_takes_a_small_part_of_a_core(mpi_world):
    pair = mpi_world.split(0 if mpi_world.rank < 2 else None)
    if pair is not None and pair.size == 2:
        waits(pair)
