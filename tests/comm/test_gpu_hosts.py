"""Calls on GPUs that differ between hosts: without a GPU, and with ranks that are threads of one process.

Each rank has its own rendezvous over sockets, and shares memory only with the ranks of its host.
"""

import contextlib
import re
import threading
import time
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.base import ControlPlane
from kos.comm.host.host_backend import HostBackend
from kos.comm.host.mpi import MPITransport
from kos.comm.host.tcp import TCPTransport
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, RankLost
from tests.comm.fake_gpu import captures
from tests.comm.fake_nccl import Comm, Group, of_nccl, quiet
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import run_ranks
from tests.comm.test_watchdog import DIFFERENCES, Heard, on_gpu

TIMEOUT = 20.0  # seconds
APART, PAIRS, TWO_AND_ONE = (0, 1), (0, 0, 1, 1), (0, 0, 1)  # the host of each rank


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    with quiet(monkeypatch) as fake:
        yield fake


def nccl(rendezvous: ControlPlane) -> kos.Communicator:
    backend = of_nccl(rendezvous, Comm(Group(1), 0))
    return kos.Communicator(backend, rendezvous, {}, TIMEOUT)


def auto(rendezvous: ControlPlane) -> kos.Communicator:
    host = HostBackend(rendezvous, TCPTransport if rendezvous.mpi_comm is None else MPITransport)
    backend = of_nccl(rendezvous, Comm(Group(1), 0), host)
    return kos.Communicator(backend, rendezvous, {}, TIMEOUT, host=host)


@pytest.fixture
def run(monkeypatch):
    """``run(body, hosts, kind)``: what ``body(comm)`` returned on each rank; rank r is on host ``hosts[r]``."""

    def run(body, hosts=APART, kind=nccl):
        monkeypatch.setattr("tests.comm.ranks.host_of", lambda rank: f"host {hosts[rank]}")

        def rank(rendezvous):
            comm = kind(rendezvous)
            try:
                return body(comm)
            finally:
                comm.abort()

        return run_ranks(len(hosts), rank)

    return run


def is_stuck(comm: kos.Communicator) -> Any:
    """The part of ``comm`` whose GPU ends nothing from now on, as a library's kernels that wait for other ranks."""
    part: Any = comm.backend
    part.is_idle = lambda *_: False
    return part


KINDS = pytest.mark.parametrize("kind", [nccl, auto], ids=["nccl", "auto"])


def all_raise(comm: kos.Communicator) -> str:
    """The text of the mismatch that hosts find at a timeout, and that the next use raises."""
    comm.rendezvous.barrier()  # on a busy machine a rank may begin its call later than the others' time is up
    is_stuck(comm)
    for use in (lambda: comm.synchronize(timeout=0.3), lambda: comm.all_reduce(on_gpu())):
        with pytest.raises(CollectiveMismatch) as raised:
            use()
    return str(raised.value)


def in_a_capture(comm: kos.Communicator, x: Any) -> None:
    with captures():
        comm.all_reduce(x)


def in_a_batch(comm: kos.Communicator, x: Any) -> None:
    with comm.batch():
        comm.all_reduce(on_gpu())
        comm.all_reduce(x)


def once_it_is_known(comm: kos.Communicator, x: Any) -> None:
    for _ in range(5):
        comm.all_reduce(on_gpu(10))
    comm.rendezvous.barrier()
    comm.all_reduce(x)


ALONE = kos.Communicator.all_reduce
WAYS = [
    *((ALONE, hosts, kind) for hosts in (APART, PAIRS, TWO_AND_ONE) for kind in (nccl, auto)),
    (ALONE, tuple(range(7)), nccl),
    *((way, APART, nccl) for way in (in_a_capture, in_a_batch, once_it_is_known)),
    (lambda comm, x: comm.all_reduce(x, async_op=True), APART, nccl),
]
"""Ways to make a call, the hosts of the ranks, and their backend."""


@needs_core
@pytest.mark.parametrize(("way", "hosts", "kind"), WAYS)
def test_a_mismatch_is_raised_on_all_ranks(run, way, hosts, kind):
    """The ranks of each host agree among themselves.  Of several hosts, some may also agree with each other."""

    def body(comm):
        for count in (5, 6, 7):
            comm.all_reduce(on_gpu(count))
        way(comm, on_gpu(10 + (hosts[comm.rank] == 1)))
        return all_raise(comm)

    for text in run(body, hosts, kind):
        calls = re.findall(r"rank (\d) called all_reduce #\d+ of float32\[(\d+)\] by SUM", text)
        assert {int(count): hosts[int(rank)] == 1 for rank, count in calls} == {10: False, 11: True}, text
        assert "they differ in count 1" in text


@needs_core
@pytest.mark.parametrize("case", ["where it lies", "operation"])
@pytest.mark.parametrize("hosts", [APART, TWO_AND_ONE], ids=str)
def test_calls_of_auto_on_both_kinds_of_memory(run, case, hosts):
    """Calls on host memory and on GPUs have one numbering, also on a rank that shares no memory."""

    def body(comm):
        heard = Heard(comm)
        for turn in range(40):
            comm.all_reduce(np.ones(turn))
            comm.all_reduce(on_gpu(turn))
            with comm.batch():
                comm.all_reduce(on_gpu(3))
                comm.barrier()
                comm.all_reduce(np.ones(3))
        wait_for_looks(comm)
        assert comm.failure is None
        is_stuck(comm)
        with contextlib.suppress(CollectiveMismatch):  # a call on host memory waits, and raises it itself
            DIFFERENCES[case][hosts[comm.rank]](comm, on_gpu)
            comm.backend.synchronize(timeout=0.3)
        error = heard.wait()
        comm.rendezvous.barrier()
        return str(error)

    for text in run(body, hosts, auto):
        assert "all_reduce #200" in text and "they differ in" in text


def look(comm: kos.Communicator) -> None:
    """Look at the calls so far, once a look that has begun is over: ``watch`` alone would leave it to that one."""
    part = comm.backend
    with part.shared.lock:
        part.watch()


def wait_for_looks(comm: kos.Communicator, count: int = 5) -> None:
    """Until the watchdogs of all ranks have looked so often at the calls so far."""
    for _ in range(count):
        look(comm)
        comm.rendezvous.barrier()


@KINDS
@pytest.mark.parametrize("hosts", [APART, PAIRS], ids=str)
def test_a_host_that_is_behind_is_no_mismatch(run, kind, hosts):
    """At its timeout, the other host sends its list of calls, of which the host that is behind has begun few."""

    def body(comm):
        for turn in range(2 if hosts[comm.rank] else 300):
            comm.all_reduce(on_gpu(turn % 7))
        comm.rendezvous.barrier()
        part = is_stuck(comm)
        with pytest.raises(CollectiveTimeout) as raised:
            part.synchronize(timeout=0.3)
        comm.rendezvous.barrier()
        return str(raised.value)

    assert all("not complete after 0.3 s" in text for text in run(body, hosts, kind))


@needs_core
@pytest.mark.parametrize(("calls", "wrong"), [(1000, 10), (1000, 999), (3000, 2100), (3000, 100)])
def test_the_last_calls_are_compared(run, calls, wrong):
    """The last 1,024."""

    def body(comm):
        xs = [on_gpu(count) for count in (5, 6, 7)]  # no multiple of 3 is a power of two
        for turn in range(calls):
            comm.all_reduce(xs[(turn + (turn == wrong and comm.rank)) % 3])
        part = is_stuck(comm)
        comm.rendezvous.barrier()
        with pytest.raises(CollectiveError) as raised:
            part.synchronize(timeout=0.3)
        comm.rendezvous.barrier()
        return str(raised.value)

    counts = [5, 6, 7]
    for text in run(body):
        mine, theirs = counts[wrong % 3], counts[(wrong + 1) % 3]
        if calls - wrong > 1024:
            assert "not complete" in text, "what neither rank has on record any more"
        else:
            assert f"#{wrong} of float32[{mine}]" in text and f"they differ in count {mine} against {theirs}" in text


@needs_core
def test_a_split_names_ranks_of_the_world(run):
    def body(comm):
        part = comm.split(comm.rank % 2)
        part.all_reduce(on_gpu(10 + (comm.rank == 3)))
        text = all_raise(part) if comm.rank % 2 else None
        comm.rendezvous.barrier()
        assert comm.rank % 2 or part.failure is None
        comm.rendezvous.barrier()
        part.abort()
        return text

    even, first, other, last = run(body, (0, 0, 1, 1))
    assert even is None and other is None
    assert first == last or "rank 1 of world called all_reduce #0" in first
    assert "rank 1 of world called" in last and "rank 3 of world called" in last


@needs_core
@KINDS
@pytest.mark.parametrize("hosts", [APART, PAIRS], ids=str)
def test_a_failure_reaches_the_other_hosts(run, kind, hosts):
    """Here an abort, as the loss of its rank."""

    def body(comm):
        heard = Heard(comm)
        comm.all_reduce(on_gpu())
        wait_for_looks(comm)
        if comm.rank == 0:
            comm.abort(reason="of the test")
            return ""
        error = heard.wait()
        assert error.ranks == (0,)
        return str(error)

    assert all("rank 0 is gone: of the test" in text for text in run(body, hosts, kind)[1:])


@needs_core
def test_what_nccl_meets_is_explained_by_another_host(run, fake):
    """NCCL reports that another rank has gone before the notice of that rank's host arrives."""

    def body(comm):
        part = comm.backend
        part.unwatch()
        comm.all_reduce(on_gpu())
        comm.rendezvous.barrier()
        if comm.rank == 0:
            fake.comm_get_async_error = lambda each: 6
            comm.rendezvous.barrier()
            threading.Timer(0.2, part.abort, ("of the test",)).start()
        else:
            comm.rendezvous.barrier()
            with pytest.raises(RankLost) as raised:
                comm.synchronize()
        comm.rendezvous.barrier()
        return str(raised.value) if comm.rank else ""

    assert "rank 0 is gone: of the test" in run(body)[1]


@needs_core
def test_one_rank_whose_time_is_up_asks_the_hosts_for_their_calls(run):
    """Here it is the second rank of its host, and no other rank waits."""

    def body(comm):
        heard, part = Heard(comm), is_stuck(comm)
        comm.all_reduce(on_gpu(10 + PAIRS[comm.rank]))
        comm.rendezvous.barrier()
        if comm.rank == 3:
            with pytest.raises(CollectiveMismatch):
                part.synchronize(timeout=0.3)
        error = str(heard.wait())
        comm.rendezvous.barrier()
        return error

    assert all("count 10 against 11" in text for text in run(body, PAIRS))


def test_an_orderly_end_is_no_failure(run):
    def body(comm):
        began = time.monotonic()
        comm.all_reduce(on_gpu())
        comm.close()
        assert time.monotonic() - began < TIMEOUT
        return comm.failure

    assert run(body, PAIRS) == [None] * 4
