"""Surviving ranks continue after a rank has aborted (threads), and after a process was killed (MPI)."""

import os
import re
import signal
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

import kos
from kos.comm.contract import CHANGES
from kos.comm.control.mpi import wait_for_all
from kos.comm.control.threads import RANK_THREAD, ThreadControlPlane, ThreadGroup, ThreadWorld
from kos.comm.failures import FailureLog
from kos.comm.host.mpi import MPITransport
from kos.errors import CollectiveError, CollectiveTimeout, RankLost, RendezvousError
from kos.testing import spawn
from tests.comm.ranks import MockRanks, on_each_rank, on_threads
from tests.comm.tcp_ranks import TCPRanks, run_processes
from tests.comm.test_jobs import needs_mpirun
from tests.comm.test_shared_failures import ULFM, job


def survive_in_a_grid(comm: kos.Communicator) -> None:
    """Rank 3 of a grid dies; rank 0, which shares no group with it, waits in one for a rank that shrinks."""
    column, row = comm.grid((2, 2))
    copy = column.duplicate()
    column.all_reduce(np.ones(1))
    row.all_reduce(np.ones(1))
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        while True:
            copy.all_reduce(np.ones(1))
            row.all_reduce(np.ones(1))

    with pytest.raises(RankLost, match="rank 3 (of world )?is gone"):
        go_on()
    with comm.shrink() as rest:
        assert rest.all_gather(np.array(comm.rank)).tolist() == [0, 1, 2]
    for group in (column, row, copy):
        with pytest.raises(CollectiveError, match="is closed"):
            group.barrier()


IN_A_GRID = """
import os, kos
from tests.comm.test_shrink import survive_in_a_grid
with kos.init(timeout=1000) as comm:
    survive_in_a_grid(comm)
    print("ended", flush=True)
"""


def test_ranks_that_wait_in_groups_come_to_a_shrink():
    """They call it long before their timeout."""
    assert sorted(run_processes(IN_A_GRID, 4)) == [(-9, ""), *[(0, "ended\n")] * 3]


@needs_mpirun
def test_ranks_that_wait_in_groups_come_to_a_shrink_under_mpirun(tmp_path):
    assert job(tmp_path, 4, IN_A_GRID, *ULFM) == ["ended"] * 3


def test_the_name_is_the_same_wherever_ranks_heard_of_the_loss():
    """The flight recorder's dumps are joined by this name."""

    def body(comm):
        if comm.rank == 1:
            next(comm._splits)  # it got further in a split amid which a rank was lost
        part = comm.shrink()
        half = part.split(0)
        return [part.name, half.name, part.shrink().name]

    assert spawn(body, 2, timeout=20) == [["world:shrunk", "world:shrunk.0:0", "world:shrunk:shrunk"]] * 2


@pytest.mark.parametrize("on", [MockRanks, TCPRanks])
@pytest.mark.parametrize("call", ["shrink", "grow", "replace"])
def test_a_rank_that_does_not_come_is_named_at_the_timeout_of_the_change(on, call):
    """The change has a timeout of its own, and does not alter that of the communicator."""
    done = threading.Event()

    def body(comm):
        usual = comm.timeout
        if comm.rank == 0:
            with pytest.raises(RendezvousError, match=rf"{call}: ranks \[1\] did not arrive within 0.3 s") as caught:
                getattr(comm, call)(*[1] * (call == "grow"), timeout=0.3)
            assert caught.value.ranks == (1,)
            done.set()
        assert done.wait(20)
        with comm.shrink(timeout=15) as part:
            assert part.timeout == part.rendezvous.timeout == usual != 15
            assert part.all_reduce(np.ones(1)) == comm.size

    on(2).run(body)


@pytest.mark.parametrize("on", [MockRanks, TCPRanks])
@pytest.mark.parametrize("call", ["shrink", "replace"])
def test_a_change_names_the_rank_that_is_late_also_if_another_one_is_gone(on, call):
    """The late rank has also found that the other rank is gone, so its communicator has already failed."""
    done, failed = threading.Event(), [threading.Event() for _ in range(3)]

    def body(comm):
        if comm.rank == 2:
            comm.abort()
            return
        with pytest.raises(RankLost, match=r"rank 2 is gone"):
            comm.recv(np.empty(1), 2)
        failed[comm.rank].set()
        if comm.rank == 0:
            assert failed[1].wait(20)
            late = rf"^world: {call}: ranks \[1\] did not arrive within 0.3 s$"
            with pytest.raises(RendezvousError, match=late) as caught:
                getattr(comm, call)(timeout=0.3)
            assert caught.value.ranks == (1,)
            done.set()
        assert done.wait(20)

    on(3).run(body)


@pytest.mark.parametrize("on", [MockRanks, TCPRanks])
@pytest.mark.parametrize("call", ["shrink", "grow", "replace"])
@pytest.mark.parametrize("lowest_is_late", [False, True])
def test_a_change_of_the_membership_ends_at_the_first_deadline_of_all_ranks(on, call, lowest_is_late):
    """Rank 2 does not call; a rank that calls later does not make the others wait any longer."""
    called, done = threading.Event(), threading.Barrier(3, timeout=40)
    early, newcomers = int(lowest_is_late), () if call == "shrink" else (1,)

    def body(comm):
        comm.barrier()
        done.wait()  # over messages, a rank may still be in the barrier when another has left it
        began = time.monotonic()
        if comm.rank != 2:
            if comm.rank == early:
                called.set()
            else:
                assert called.wait(20)
            with pytest.raises(RendezvousError, match="did not arrive within"):
                getattr(comm, call)(*newcomers, timeout=1.0 if comm.rank == early else 15)
        seconds = time.monotonic() - began
        done.wait()
        return seconds

    assert max(on(3).run(body)) < 10


@pytest.mark.parametrize("lost", [False, True])
def test_a_change_has_one_deadline_though_rank_0_does_not_answer(monkeypatch, lost):
    """The wait for rank 0 gets no extra time.

    If the failure names rank 0, half of the time remains for the next steps.
    """
    done, failed = threading.Barrier(3, timeout=40), threading.Barrier(2, timeout=20)

    def body(comm):
        comm.barrier()
        done.wait()  # over messages, a rank may still be in the barrier when another has left it
        began, result = 0.0, ""
        if comm.rank:
            if lost:
                with pytest.raises(CollectiveTimeout, match=r"ranks? \[?0"):
                    comm.recv(np.empty(1), 0, timeout=0.1)
                failed.wait()
            began = time.monotonic()
            try:
                result = f"size {comm.shrink(timeout=4).size}"
            except RendezvousError as error:
                result = str(error)
            began = time.monotonic() - began
        done.wait()
        return began, result

    _, *others = TCPRanks(3).run(body)
    assert {text for _, text in others} == {"size 2" if lost else "world: shrink: ranks [0] did not arrive within 4 s"}
    assert max(seconds for seconds, _ in others) < 4 + 10


@pytest.fixture
def in_call(before_call):
    """``in_call(rank, call)`` is set once that rank, a thread, waits for others in that call."""
    events = defaultdict[tuple[int, str], threading.Event](threading.Event)

    def noted(world, rank, seconds, waits_for):
        for call, _ in waits_for():
            events[rank, call].set()

    before_call(ThreadWorld, "wait", noted)
    return lambda rank, call: events[rank, call]


def test_shrink_leaves_out_a_missing_rank_that_the_failure_names(in_call):
    done = threading.Event()

    def body(comm):
        if comm.rank == 1:
            assert done.wait(20)
            with pytest.raises(RankLost, match="shrink: rank 1 was left out: the others continued") as caught:
                comm.shrink()
            assert caught.value.ranks == (1,)
            return 0
        with pytest.raises((CollectiveTimeout, RankLost)):
            comm.all_reduce(np.ones(1), timeout=0.2)
        if comm.rank == 0:
            assert in_call(2, "shrink").wait(20)
        with comm.shrink(timeout=0.4 if comm.rank == 0 else 20) as part:
            size = part.all_reduce(np.ones(1))[0]
            done.set()
            return int(size)

    assert spawn(body, 3, timeout=20) == [2, 0, 2]


def wait_for_rank_1(comm: kos.Communicator) -> None:
    """Rank 0 alone fails, which names rank 1; rank 2 knows of no failure."""
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout) as caught:
            comm.recv(np.empty(1), 1, timeout=0.2)
        assert caught.value.ranks == (1,)


def test_the_failure_of_the_lowest_rank_determines_whom_shrink_leaves_out(in_call, monkeypatch):
    """Also if another rank times out first: here rank 2 is the only one that does, after rank 0 has called."""

    def monotonic():
        late = threading.current_thread().name == f"{RANK_THREAD}2" and in_call(0, "shrink").is_set()
        return time.monotonic() + 1000.0 * late

    monkeypatch.setattr("kos.comm.control.grow.time", SimpleNamespace(monotonic=monotonic))
    done = threading.Event()

    def body(comm):
        wait_for_rank_1(comm)
        if comm.rank == 1:
            assert done.wait(20)
            return 0
        with comm.shrink() as part:
            done.set()
            return part.size

    assert spawn(body, 3, timeout=20) == [2, 0, 2]


def test_a_replacement_that_fails_leaves_no_rank_out(in_call):
    failed = threading.Barrier(3)

    def body(comm):
        wait_for_rank_1(comm)
        if comm.rank == 0:
            assert in_call(2, "replace").wait(20)
        if comm.rank != 1:
            with pytest.raises(RendezvousError, match="newcomer"):
                comm.replace(timeout=0.4 if comm.rank == 0 else 20)
        failed.wait(20)
        with comm.shrink() as part:
            return part.size

    assert spawn(body, 3, timeout=20) == [3] * 3


def test_an_exchange_of_threads_completes_for_all_ranks_or_for_none():
    """A rank that ends directly after its last message does not make the split fail on the other ranks."""

    def body(rendezvous):
        group = rendezvous.threads
        if rendezvous.rank != 0:
            part = rendezvous.split(1)
            part.barrier()
            size = part.size
            return size
        with group.world.lock:
            while len(rendezvous._slots.get(1, ())) < 2:  # the others wait
                group.world.wakeup[0].wait(20)
            rendezvous.split(0)
            group.world.end(0, "boom")
        return 0

    assert on_threads(3, body) == [0, 2, 2]


@pytest.mark.mpi
@on_each_rank("ranks_of_mpi.run")
def test_ranks_of_mpi_go_on_without_mpi(comm, /, memory):
    """Also if no rank was lost, because communicators of MPI need all ranks of the job."""
    with comm.duplicate().shrink() as rest, rest.split(0) as part:
        for group in (rest, part):
            assert (group.size, group.backend_name) == (comm.size, "tcp")
            assert (group.all_reduce(np.ones(70_000)) == comm.size).all()
            assert group.rendezvous.mpi_comm is None
    comm.barrier()


def test_a_rank_that_shrinks_is_not_named_as_the_failed_one():
    """Another rank may have learned of the failed rank first, and may report that it continues without that rank."""
    failures = FailureLog([0, 1, 2], rank=2)
    failures.record_left(0, 3, CHANGES)
    said = list[tuple[int, int, str]]()

    def receive():
        for each in said:
            failures.record_left(*each)

    transport = SimpleNamespace(ring=None, receive_notices=receive, failures=failures)
    assert next(MPITransport.gone(transport)) == (0, CHANGES), "no other one was named for some time"
    said.append((1, 0, "its connection was closed"))
    assert next(MPITransport.gone(transport)) == (1, "its connection was closed")


@needs_mpirun
@pytest.mark.parametrize(
    "end",
    ["os.kill(os.getpid(), 15)", "os._exit(3)", "sys.exit()",
     pytest.param("comm.close() or sys.exit()", marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_job_ends_after_a_rank_has(tmp_path, end):
    """However that rank ended: survivors continue, and the last of them exits after the others.

    After an exit code other than 0, Open MPI ends the remaining ranks as soon as one of the survivors exits.
    """
    text = f"""
import select
with kos.init("mpi", timeout=60) as comm:
    comm.all_reduce(np.ones(3))
    if comm.rank == 1:
        {end}
    try:
        while True:
            comm.all_reduce(np.ones(10))
    except kos.errors.RankLost:
        pass
    part = comm.shrink()
    first = os.pidfd_open(int(part.broadcast(np.array(os.getpid()), 0)))
    part.close()
    if part.rank == 1 and not {"3" in end}:
        assert select.select([first], [], [], 30)[0], "the other has not ended"
    print("shrunk", flush=True)
"""
    lines = job(tmp_path, 3, text, *ULFM)
    assert lines == ["shrunk"] * 2 or ("3" in end and lines == ["shrunk"])


@needs_mpirun
def test_a_split_group_shrinks(tmp_path):
    """The survivors form the group: a split group has no MPI communicator that could be shrunk."""
    text = """
with kos.init("mpi", timeout=60) as comm:
    part = comm.split(comm.rank // 3)
    part.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), 9)
    if part.size == 3:
        try:
            while True:
                part.split(0)
        except kos.errors.RankLost as error:
            assert error.ranks == (1,), error
        part = part.shrink()
        copy = part.duplicate()
        with copy.split(0) as again:
            print(again.world_ranks, copy.all_reduce(np.full(3, comm.rank)), flush=True)
    if comm.rank != 3:
        try:
            comm.barrier()
        except kos.errors.RankLost as error:
            assert error.ranks == (1,), error
    os._exit(0)
"""
    assert job(tmp_path, 4, text, *ULFM) == ["[0, 2] [2 2 2]"] * 2


@needs_mpirun
def test_an_abort_outside_of_an_exchange_is_reported(tmp_path):
    """It is reported to the ranks that wait in an exchange, while the process of the aborted rank continues."""
    text = f"""
import pathlib
comm, began = kos.init("mpi", timeout=60), time.monotonic()
told = pathlib.Path({str(tmp_path)!r}, "told")
if comm.rank == 1:
    comm.abort(reason="its data are damaged")
    while not told.exists() and time.monotonic() - began < 100:
        time.sleep(0.01)
else:
    try:
        comm.rendezvous.barrier()
    except kos.errors.RankLost as error:
        print(error.ranks, time.monotonic() - began < 30, flush=True)
    told.touch()
os._exit(0)
"""
    assert job(tmp_path, 2, text) == ["(1,) True"]


@needs_mpirun
def test_a_rank_that_died_before_init_is_named(tmp_path):
    text = f"""
import pathlib, time
from mpi4py import MPI
def meet(name, ranks):  # not by MPI: a rank that dies once it has left a barrier may fail those that are still within
    folder = pathlib.Path({str(tmp_path)!r})
    (folder / f"{{name}} {{MPI.COMM_WORLD.rank}}").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.glob(f"{{name}} *"))) < ranks and time.monotonic() < deadline:
        time.sleep(0.01)
meet("started", 3)  # one that dies in another's MPI_Init may hang it
if MPI.COMM_WORLD.rank == 1:
    os.kill(os.getpid(), 9)
try:
    kos.init(timeout=60)
except kos.errors.RankLost as error:
    print(error, flush=True)
meet("told", 2)  # else one is gone when the other looks who is
os._exit(0)
"""
    lines = job(tmp_path, 3, text, *ULFM)
    told = re.compile("rendezvous: rank 1 is gone: (start: MPI: |its process ended)")
    assert len(lines) == 2 and all(map(told.match, lines)), lines


def test_mpi_fails_for_a_rank_that_is_not_in_the_group(mpi_library):
    """The error names that rank, which the hub of the world has reported."""

    class Failed(Exception):
        def Get_error_string(self):
            return "MPI_ERR_PROC_FAILED"

    mpi_library.Exception = Failed

    def create():
        raise Failed

    rendezvous = ThreadControlPlane(ThreadGroup(2), 0, 20.0)
    rendezvous.threads.world.ends[5] = "its connection was closed"
    with pytest.raises(RankLost, match="rank 5 of world is gone: create: MPI: MPI_ERR_PROC_FAILED") as caught:
        wait_for_all(rendezvous, "create", create)
    assert caught.value.ranks == (5,)
