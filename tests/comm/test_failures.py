"""Mismatched calls, ranks that do not arrive, and ranks that are lost: errors name the ranks, and no rank hangs."""

import contextlib
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.contract import UNMADE
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup, ThreadWorld
from kos.comm.failures import WHY_CLOSED
from kos.comm.host.host_backend import HostBackend
from kos.comm.schedules import ScheduleError, registry
from kos.comm.schedules.schedule import Moves
from kos.errors import (
    BackendUnavailable,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgument,
    RankLost,
    RendezvousError,
)
from kos.testing import spawn
from tests.comm.ranks import TIMEOUT, MockRanks, on_each_rank, time_is_up, until
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import TCPRanks, run_threads


def F4() -> np.ndarray:
    return np.zeros(4, np.float32)


@pytest.mark.mpi
@on_each_rank("ranks_of_mpi.run")
def test_a_message_that_comes_after_a_close_is_not_of_the_next_group(comm, /, apart):
    """No rank receives it.  Open MPI would deliver it to a communicator that has the number of a freed one."""
    first = comm.duplicate()
    if comm.rank == 1:
        first.close()
    comm.rendezvous.barrier()
    if comm.rank == 0:
        first.send(np.zeros(37), 1)
    if comm.rank != 1:
        first.close()
    second = comm.duplicate()
    comm.rendezvous.barrier()
    if comm.rank == 0:
        second.send(np.ones(65), 1)
    elif comm.rank == 1:
        assert (second.recv(np.zeros(65), 0) == 1).all()
    second.close()


@pytest.mark.parametrize("on", [MockRanks, pytest.param(TCPRanks, marks=needs_core)])
def test_a_rank_that_is_late_in_another_group_is_named(on):
    """Rank 0 waits for rank 1, which waits in another group for rank 2."""
    begins, ended = threading.Event(), threading.Event()

    def body(comm):
        parts = [comm.group(ranks) for ranks in ((0, 1), (1, 2))]
        comm.barrier()
        part = parts[comm.rank > 0]
        assert part is not None
        if comm.rank == 2:
            assert ended.wait(TIMEOUT)
        elif comm.rank == 1:
            begins.set()
        else:
            assert begins.wait(TIMEOUT)
            until(lambda: comm.rendezvous.failures.status.awaited(1) == (2,))
        try:
            part.all_reduce(np.ones(1), timeout=0.4 if comm.rank == 0 else TIMEOUT)
        except CollectiveTimeout as error:
            return str(error), error.ranks
        finally:
            if comm.rank == 0:
                ended.set()
        return None

    found, *others = on(3).run(body)
    assert found is not None and others == [None, None]
    assert found[1] == (2,) and "ranks [2] did not arrive or went no further, for which ranks [1] wait" in found[0]


def test_who_computes_for_longer_than_the_timeout_may_ask_afterwards(several, monkeypatch):
    """Operations on host memory advance only during calls of kos, so the time before a call causes no timeout."""
    clock, computed = time.monotonic, 0.0
    monkeypatch.setattr("kos.comm.work.time", SimpleNamespace(monotonic=lambda: clock() + computed))

    def body(comm):
        nonlocal computed
        x = np.ones(3)
        work = comm.all_reduce(x, async_op=True, timeout=30)
        comm.rendezvous.barrier()
        computed = 1000.0
        comm.rendezvous.barrier()
        while not work.done():
            pass
        assert (x == comm.size).all()

    several.run(body)


def test_synchronize_raises_what_failed_at_its_launch(several):
    """Nothing is in flight any more, and the program has not waited for the failed operation."""

    def late(comm):
        part, x = comm.duplicate(), np.ones(3)
        if comm.rank > 0:
            with pytest.raises(CollectiveTimeout, match="all_reduce #0"):
                part.all_reduce(x, timeout=0.2)
        comm.rendezvous.barrier()
        if comm.rank == 0:
            known = part.rendezvous.failures
            until(lambda: known.find() or known.earliest)  # the hub of ``part`` may be later than that of ``comm``
            part.all_reduce(x, async_op=True)
        for _ in range(2):
            with pytest.raises(CollectiveTimeout, match=r"all_reduce #0 .* not complete after 0.2 s"):
                part.synchronize(1)
        comm.rendezvous.barrier()

    def message(comm):
        for tag in range(2):
            if comm.rank == 0:
                comm.send(np.ones(3), 1, tag)
            elif comm.rank == 1:
                work = comm.recv(np.zeros(4), 0, tag, async_op=True)
                until(lambda: not comm.backend.engine.poll())
                with pytest.raises(CollectiveMismatch, match=f"recv #{tag} .* with tag {tag}: .*got 3 elements"):
                    work.wait() if tag else comm.synchronize()
                comm.synchronize()  # it was told
        comm.barrier()

    several.run(late)
    several.run(message)


@pytest.mark.parametrize("timeout", [float("inf"), 1e10])
@on_each_rank(spawn, 2, timeout=60)
def test_a_timeout_longer_than_clocks_count(comm, /, timeout):
    group = comm.rendezvous.threads
    mine = ThreadControlPlane(group.shared("another", lambda: ThreadGroup(2)), comm.rank, 20.0)
    with kos.init("mock", rendezvous=mine, timeout=timeout) as patient:
        for root in (0, 1):  # who waits is the other one
            patient.broadcast(np.ones(1), root)
        patient.barrier(timeout=timeout)


WAITS: dict[str, Callable[[kos.Communicator, kos.Communicator], Any]] = {
    "all_reduce": lambda comm, part: comm.all_reduce(np.zeros(4)),
    "barrier": lambda comm, part: comm.barrier(),
    "recv": lambda comm, part: comm.recv(np.zeros(1), 1),
    "rendezvous": lambda comm, part: comm.rendezvous.allgather(b""),
    "in a part": lambda comm, part: part.all_reduce(np.zeros(4), algorithm="ring"),
}
"""Calls that wait for rank 1."""


@pytest.mark.parametrize("waiting", WAITS)
@pytest.mark.parametrize(("end", "why"), [
    ("raises", "ZeroDivisionError: boom"), ("raises", "ZeroDivisionError"), ("returns", WHY_CLOSED),
    ("aborts", "the data are damaged"),
])  # fmt: skip
def test_a_rank_that_ends_is_named_by_those_that_wait_for_it(waiting, end, why):
    """Also by a rank that begins to wait after the thread of that rank has ended."""
    told = []
    if (end, waiting) == ("returns", "in a part"):  # which nothing closes
        why = "its function returned"

    def body(comm):
        part = comm.split(0)
        if comm.rank == 1 and end == "raises":
            raise ZeroDivisionError(*why.split(": ")[1:])
        if comm.rank == 1 and end == "aborts":
            comm.abort(reason=why)
        if comm.rank == 1:
            return
        while end == "aborts" and 1 not in comm.rendezvous.threads.world.ends:
            time.sleep(0.001)
        with pytest.raises(RankLost, match=f"rank 1 is gone: {why}(?!:)") as caught:
            WAITS[waiting](comm, part)
        assert caught.value.ranks == (1,)
        told.append(str(caught.value))

    with pytest.raises(ZeroDivisionError) if end == "raises" else contextlib.nullcontext() as caught:
        spawn(body, 3, timeout=40)
    assert len(told) == 2 and (end != "raises" or caught.value.__notes__ == ["raised on rank 1 of 3"])


@pytest.mark.parametrize("waiting", ["barrier", "recv", "rendezvous"])
@pytest.mark.parametrize("ended", [False, True])
def test_the_reason_of_an_early_return_does_not_depend_on_the_end_of_the_thread(ended, waiting, monkeypatch):
    """Rank 0 finds that rank 1 has returned, before the thread of rank 1 has ended or after that."""
    over, raised, end = threading.Event(), threading.Event(), ThreadWorld.end

    def end_in_order(world, rank, why):
        assert rank != 1 or ended or raised.wait(TIMEOUT)
        end(world, rank, why)
        over.set()

    def body(comm):
        if comm.rank == 0:
            assert not ended or over.wait(TIMEOUT)
            with pytest.raises(RankLost, match=f"rank 1 is gone: {WHY_CLOSED}$"):
                WAITS[waiting](comm, None)
            raised.set()

    monkeypatch.setattr(ThreadWorld, "end", end_in_order)
    spawn(body, 2)


def test_a_wrong_schedule_of_the_users_own_is_refused(monkeypatch):
    """It is refused before anything is sent, for each number of ranks.

    The schedule that was registered last is used.
    """
    monkeypatch.setitem(registry._REGISTRY, "all_reduce", dict(registry._REGISTRY["all_reduce"]))

    def to_and_fro(n, c, back=2):
        yield [Moves(np.arange(1, n), 0, 0, count=c, reduce=True)]
        yield [Moves(0, np.arange(1, back), 0, count=c)]

    def body(comm):
        return float(comm.all_reduce(np.ones(2), algorithm="own").sum())

    def refused(comm):
        with pytest.raises(ScheduleError, match="all_reduce/own on 3 ranks.*: rank 2, after the last round, data"):
            body(comm)
        assert comm.all_reduce(np.ones(1)) == 3

    registry.algorithm("all_reduce", "own")(lambda n, c: to_and_fro(n, c, n))
    assert spawn(body, 3) == [6] * 3
    registry.algorithm("all_reduce", "own")(lambda n, c: to_and_fro(n, c))
    assert spawn(body, 2) == [4] * 2
    spawn(refused, 3)


def test_spawn_names_ranks_that_hang(monkeypatch):
    release = threading.Event()
    threads = {}

    def body(comm):
        threads[comm.rank] = threading.current_thread()
        if comm.rank == 1:
            release.wait(30)

    time_is_up(monkeypatch, lambda: len(threads) == 2 and not threads[0].is_alive())
    try:
        still = r"spawn: ranks \[1\] of 2 are still running after 0.2 s; rank 1 is at .*test_failures.py:\d+"
        with pytest.raises(CollectiveTimeout, match=still) as caught:
            spawn(body, 2, timeout=0.2)
        assert caught.value.ranks == (1,)
    finally:
        release.set()


def test_a_missing_rank_at_init():
    with pytest.raises(RendezvousError, match=r"ranks \[1, 2\] did not arrive within 0.2 s"):
        kos.init("mock", rendezvous=ThreadControlPlane(ThreadGroup(3), 0, 0.2))


def test_a_backend_that_cannot_run_here_says_why():
    group = ThreadGroup(1)
    with pytest.raises(BackendUnavailable, match="mpi: the ranks are not processes of an MPI job"):
        kos.init("mpi", rendezvous=ThreadControlPlane(group, 0))
    comm = kos.init(rendezvous=ThreadControlPlane(group, 0))
    lines = comm.explain().splitlines()
    assert lines[0].split() == ["backend", "usable", "why"]
    assert lines[1].startswith("mpi      no      the ranks are not processes of an MPI job")
    assert lines[-1].startswith("mock     in use  1 rank in this process")


@pytest.mark.parametrize(("backend", "error", "said"), [
    ("auto", BackendUnavailable, "auto: expected a backend for GPU 3 of rank 1, got none: nccl: .+; peer"),
    ("mock", InvalidArgument, "device: expected None with backend 'mock', which uses no GPU, got 3 of rank 1"),
])  # fmt: skip
def test_a_device_without_a_backend_for_gpus(backend, error, said):
    """Every rank refuses the device, whichever rank asked for it.  Ranks that are threads refuse it even with a GPU."""
    group = ThreadGroup(2)

    def ask(rank):
        with pytest.raises(error, match=f"^{said}"):
            kos.init(backend, rendezvous=ThreadControlPlane(group, rank, TIMEOUT), device=3 if rank else None)

    assert run_threads(lambda: ask(0), lambda: ask(1)) == [None, None]


def test_a_refusal_whose_close_fails_too(monkeypatch):
    """The refusal is raised, and everything that was created is aborted."""
    ended = []

    def close(backend):
        raise CollectiveError("another rank called differently")

    monkeypatch.setattr(HostBackend, "close", close)
    monkeypatch.setattr(HostBackend, "abort", lambda backend, reason: ended.append(reason))
    with pytest.raises(BackendUnavailable, match="auto: expected a backend for GPU 3 of rank 0, got none"):
        kos.init(rendezvous=ThreadControlPlane(ThreadGroup(1), 0), device=3)
    assert ended == [UNMADE]


def test_ranks_that_request_different_backends():
    group, names = ThreadGroup(2), ["mock", "auto"]

    def ask(rank):
        message = f"init: rank {rank} requested backend '{names[rank]}', rank {1 - rank} '{names[1 - rank]}'"
        with pytest.raises(RendezvousError, match=f"^{message}$"):
            kos.init(names[rank], rendezvous=ThreadControlPlane(group, rank, TIMEOUT))

    assert run_threads(lambda: ask(0), lambda: ask(1)) == [None, None]
