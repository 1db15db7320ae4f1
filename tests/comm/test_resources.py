"""Descriptors, memory and events do not accumulate when a process creates, splits and aborts communicators."""

import contextlib
import gc
import os
import threading
import weakref

import numpy as np
import pytest

import kos
from kos.comm.control.base import ControlPlane
from kos.comm.host.shared.segment import share_file
from kos.cuda import driver
from kos.errors import KosError, RankLost
from kos.memory import Array
from tests.comm.fake_nccl import alone, launching_alone
from tests.comm.ranks import TIMEOUT, until
from tests.comm.tcp_ranks import SECRET, free_port, run_threads

TIMES = 40


def _descriptors() -> dict[str, str]:
    """The open files of this process."""
    gc.collect()
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def _maps() -> int:
    """The mappings of anonymous files of this process."""
    with open("/proc/self/maps") as file:
        return sum("memfd:kos" in line for line in file)


class _Failing(ControlPlane):
    """Rank 0 of two, whose exchange ``failing`` fails."""

    def __init__(self, failing: int) -> None:
        self.rank, self.size, self.timeout, self.failing = 0, 2, 1.0, failing

    def _exchange(self, message: bytes) -> list[bytes]:
        self.failing -= 1
        if self.failing < 0:
            raise RankLost("rank 1 is gone")
        return [message, message]

    def split(self, color: int | None, key: int = 0) -> ControlPlane | None:
        return None


@pytest.mark.parametrize("failing", [0, 1])
def test_a_shared_file_is_closed_if_an_exchange_fails(failing):
    before = _descriptors()
    for _ in range(TIMES):
        with pytest.raises(RankLost):
            share_file(_Failing(failing), [0, 1], 4096, "", os.close)
    assert _descriptors() == before


def _tcp(rank: int, port: int, how: str) -> None:
    with contextlib.suppress(KosError):
        place = {"rank": rank, "size": 2, "address": f"127.0.0.1:{port}", "secret": SECRET}
        if how == "refused":
            kos.init("mpi", rendezvous=place, timeout=TIMEOUT)
        with kos.init("tcp", rendezvous=place, timeout=TIMEOUT) as comm:
            if how == "split":
                group = comm.split(0)
                assert group is not None
                group.all_reduce(np.ones(1))
                group.close()
            comm.all_reduce(comm.allocate(4, "float32"))
            if how == "aborted" and rank == 1:
                comm.abort()
            elif how == "aborted":
                comm.recv(np.ones(1), src=1)


@pytest.mark.parametrize("how", ["closed", "aborted", "split", "refused"])
def test_communicators_of_tcp_leave_nothing_open(how, memory):
    def left():
        return len(_descriptors()), _maps()

    def make(times):
        for _ in range(times):
            port = free_port()
            for each in run_threads(lambda port=port: _tcp(0, port, how), lambda port=port: _tcp(1, port, how)):
                assert each is None, each
        for thread in {*threading.enumerate()} - others:
            if thread.name == "kos rendezvous":  # it ends after its ranks
                thread.join(TIMEOUT)
                assert not thread.is_alive(), "a hub whose ranks have ended is still there"
        return left()

    others = {*threading.enumerate()}
    descriptors, maps = make(3)  # also what is made once for a process
    make(TIMES // 2)
    until(lambda: left()[0] <= descriptors and left()[1] <= maps)  # threads that end close theirs


class _Events:
    """Counts the events of the stand-in for the driver; ``late`` are those that the GPU has not passed."""

    def __init__(self) -> None:
        self.made, self.destroyed, self.late = 0, list[int](), set[int]()
        cu = driver.cu
        cu.cuEventCreate, cu.cuEventDestroy, cu.cuEventQuery = self.create, self.destroy, self.query

    def create(self, flags: int) -> tuple[int, int]:
        self.made += 1
        return 0, self.made

    def destroy(self, event: int) -> tuple[int]:
        self.destroyed.append(event)
        return (0,)

    def query(self, event: int) -> tuple[int]:
        return (driver.cu.CUresult.CUDA_ERROR_NOT_READY if event in self.late else 0,)


@pytest.fixture
def events(fake, monkeypatch):
    launching_alone(monkeypatch)
    return _Events()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_the_events_of_a_communicator_end_with_it(events, end):
    for _ in range(TIMES):
        comm, x = alone(), Array.zeros(4, np.float32, 0)
        works = [comm.all_reduce(x, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        comm.synchronize()
        getattr(comm, end)()
    del comm, work, works
    gc.collect()
    assert events.made >= 3 * TIMES
    assert sorted(events.destroyed) == [*range(1, events.made + 1)]  # each once


def test_the_arrays_of_a_call_live_while_another_frees_others(events):
    """A signal handler or another thread frees the finished call that this call is about to free."""
    comm, x = alone(), Array.zeros(4, np.float32, 0)
    comm.all_reduce(x)
    first = comm.all_reduce(Array.zeros(4, np.float32, 0), async_op=True)
    handle = first.event.handle
    events.late.add(handle)
    second = comm.all_reduce(Array.zeros(4, np.float32, 0), async_op=True)
    events.late = {second.event.handle}
    left, nested = weakref.ref(second), False

    def query(event):
        nonlocal nested
        if not nested and event == handle:
            nested = True
            comm.all_reduce(x, async_op=True)
        return events.query(event)

    del first, second
    driver.cu.cuEventQuery = query
    comm.all_reduce(x, async_op=True)
    gc.collect()
    assert nested and left() is not None
    driver.cu.cuEventQuery = events.query
    events.late.clear()
    comm.all_reduce(x, async_op=True).wait()
    comm.synchronize()
    gc.collect()
    assert left() is None
    comm.close()
