"""The ranks that are left go on: after a rank is gone (threads) and after a process is killed (MPI)."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.backend import SHRINKS
from kos.comm.failures import Ledger
from kos.comm.host.mpi import MPIBackend
from kos.comm.rendezvous.threads import ThreadRendezvous
from kos.errors import BackendUnavailable, CollectiveError, RankLost, RendezvousError
from kos.testing import spawn
from tests.comm.ranks import on_each_rank, on_threads
from tests.comm.tcp_ranks import run_processes
from tests.comm.test_jobs import needs_mpirun
from tests.comm.test_shared_failures import ULFM, job


@pytest.mark.parametrize("gone", [[0], [1], [3], [1, 2], [0, 1, 2]])
def test_survivors_go_on(gone: list[int]) -> None:
    """Those that wait in a collective and one that does not come together again."""
    left = [rank for rank in range(4) if rank not in gone]
    sums: dict[int, Any] = {}

    def body(comm: kos.Communicator) -> None:
        if comm.rank in gone:
            raise ZeroDivisionError("boom")
        if comm.rank != left[-1] or len(left) == 1:
            with pytest.raises(RankLost, match="rank . is gone"):
                comm.all_reduce(np.ones(3), algorithm="ring")
        part = comm.shrink()
        assert (part.rank, part.size) == (left.index(comm.rank), len(left))
        sums[comm.rank] = part.all_reduce(np.full(2, float(comm.rank))).tolist()
        assert part.all_gather(np.array(comm.rank)).tolist() == left
        with pytest.raises(CollectiveError, match="is closed"):
            comm.barrier()
        half = part.split(part.rank % 2)
        half.barrier()
        half.close()
        part.close()

    with pytest.raises(ZeroDivisionError):
        spawn(body, 4, timeout=20)
    assert sums == {rank: [float(sum(left))] * 2 for rank in left}


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


def test_ranks_that_wait_in_groups_come_to_a_shrink() -> None:
    """Long before the timeout."""
    assert sorted(run_processes(IN_A_GRID, 4)) == [(-9, ""), *[(0, "ended\n")] * 3]


@needs_mpirun
def test_ranks_that_wait_in_groups_come_to_a_shrink_under_mpirun(tmp_path: Path) -> None:
    assert job(tmp_path, 4, IN_A_GRID, *ULFM) == ["ended"] * 3


def test_the_name_is_the_same_wherever_ranks_heard_of_the_loss() -> None:
    """By it dumps of the flight recorder are joined."""

    def body(comm: kos.Communicator) -> list[str]:
        if comm.rank == 1:
            next(comm._splits)  # it got further in a split amid which a rank was lost
        part = comm.shrink()
        half = part.split(0)
        return [part.name, half.name, part.shrink().name]

    assert spawn(body, 2, timeout=20) == [["world:shrunk", "world:shrunk.0:0", "world:shrunk:shrunk"]] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    done = threading.Event()

    def body(comm: kos.Communicator) -> None:
        comm.rendezvous.timeout = 0.2
        if comm.rank == 1:
            done.wait(20)
            return
        with pytest.raises(RendezvousError, match=r"shrink: ranks \[1\] did not arrive within 0.2 s"):
            comm.shrink()
        done.set()

    spawn(body, 2, timeout=20)


def test_an_exchange_of_threads_completes_for_all_ranks_or_for_none() -> None:
    """A rank that ends directly after its last message does not make the split fail on the other ranks."""

    def body(rendezvous: ThreadRendezvous) -> int:
        group = rendezvous.threads
        if rendezvous.rank != 0:
            part: Any = rendezvous.split(1)
            part.barrier()
            size: int = part.size
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
def test_without_fault_tolerance_it_says_so(comm: kos.Communicator, /) -> None:
    with pytest.raises(BackendUnavailable, match="shrink: expected .*mpirun --with-ft ulfm"):
        comm.shrink()
    comm.barrier()  # and has not given it up


def test_who_shrinks_is_not_who_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may have learned first of the one that failed, and say that it goes on without it."""
    ledger = Ledger([0, 1, 2], rank=2)
    ledger.record_end(0, 3, SHRINKS)
    messages = SimpleNamespace(receive_notices=lambda: None)
    failed = iter([[], [], [1]])
    backend: Any = SimpleNamespace(
        _calls=None, _messages=messages, ledger=ledger, _failed_ranks=lambda: next(failed, [])
    )
    monkeypatch.setattr("kos.comm.host.mpi._NAMING_SECONDS", 1000.0)
    assert next(MPIBackend.gone(backend)) == (1, "its process failed")
    monkeypatch.setattr("kos.comm.host.mpi._NAMING_SECONDS", 0.0)
    assert next(MPIBackend.gone(backend)) == (0, SHRINKS)


@needs_mpirun
@pytest.mark.parametrize(
    ("killed", "shared", "named", "call"),
    [
        (0, True, True, "barrier()"),
        (1, False, False, "all_reduce(x)"),
        pytest.param(3, True, True, "all_reduce(x, algorithm='ring')", marks=pytest.mark.slow),
        pytest.param(0, False, True, "all_reduce(x)", marks=pytest.mark.slow),
    ],
)
def test_a_killed_process(tmp_path: Path, killed: int, shared: bool, named: bool, call: str) -> None:
    """Also where MPI does not say what its error is, as Open MPI now and then."""
    text = f"""
import kos.comm.host.backend as host
from kos.comm.host.mpi import MPIBackend
if not {shared}:
    host.open_segment = lambda _: (None, "switched off by the test")
agree = MPIBackend.agree
def unnamed(self, operation):
    came = agree(self, operation)
    def ask():
        try:
            return came()
        except self._MPI.Exception as error:
            raise self._MPI.Exception(self._MPI.ERR_OTHER) from error
    return came and ask
if not {named}:
    MPIBackend.agree = unnamed
with kos.init("mpi", timeout=60) as comm:
    me = comm.rank
    comm.all_reduce(np.ones(3))
    if comm.rank == {killed}:
        os.kill(os.getpid(), 9)
    try:
        x = np.ones(100_000)
        while True:
            comm.{call}
    except kos.errors.RankLost as error:
        assert not {shared} or "rank {killed} is gone" in str(error), error
    with comm.shrink() as part:
        assert part.size == 3 and part.all_gather(np.array(me)).tolist() == [r for r in range(4) if r != {killed}]
        total = part.all_reduce(np.full(100_000, float(me)), deterministic=True)
        half = part.split(part.rank % 2)
        half.barrier()
        half.close()
        print(total[0], total[-1], part.backend.shares_memory, flush=True)
"""
    left = 6.0 - killed
    assert job(tmp_path, 4, text, *ULFM) == [f"{left} {left} {shared}"] * 3


@needs_mpirun
@pytest.mark.parametrize(
    "end",
    ["os.kill(os.getpid(), 15)", "os._exit(3)", "sys.exit()",
     pytest.param("comm.close() or sys.exit()", marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_job_ends_after_a_rank_has(tmp_path: Path, end: str) -> None:
    """However: survivors go on, the last of them when the others have exited.  Of an exit code that is not 0 Open MPI
    tells nobody, so they cannot shrink."""
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
    comm.timeout = {3 if "3" in end else 60}
    try:
        part = comm.shrink()
        first = os.pidfd_open(int(part.broadcast(np.array(os.getpid()), 0)))
        part.close()
        if part.rank == 1:
            assert select.select([first], [], [], 30)[0], "the other has not ended"
        print("shrunk", flush=True)
    except kos.errors.RankLost as error:
        spent = time.process_time()
        time.sleep(0.5)
        print(error, "idle" if time.process_time() - spent < 0.25 else "spins", flush=True)
"""
    lines = job(tmp_path, 3, text, *ULFM)
    unheard = "world: shrink: rank 1 is gone: its process exited with an error code, which Open MPI does not report"
    assert len(lines) == 2 and all(re.match(unheard if "3" in end else "shrunk", line) for line in lines), lines
    assert not any("spins" in line for line in lines), lines


@needs_mpirun
def test_a_split_group_shrinks(tmp_path: Path) -> None:
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
def test_a_rank_that_dies_within_the_shrink_of_a_split_group(tmp_path: Path) -> None:
    """The lowest rank's second message reaches one survivor and not the other: they form the same group."""
    text = f"""
import pathlib
from kos.comm.rendezvous.mpi import MPIGroup
usual, received, round = MPIGroup._exchange_with_survivors, pathlib.Path({str(tmp_path / "received")!r}), 0
def exchange(self, ranks, *arguments):
    global round
    round += 1
    if round == 2 and self.rank == 0:
        usual(self, [1], *arguments)
        while not received.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    if round == 2 and self.rank == 1:
        first = usual(self, [0], *arguments)
        received.touch()
        return {{**first, **usual(self, [2], *arguments)}}
    return usual(self, ranks, *arguments)
with kos.init("mpi", timeout=60) as comm:
    part = comm.split(comm.rank // 3)
    part.barrier()
    if part.size == 3:
        MPIGroup._exchange_with_survivors = exchange
        part = part.shrink()
        print(part.world_ranks, part.all_reduce(np.full(3, comm.rank)), flush=True)
    try:
        comm.barrier()
    except kos.errors.RankLost as error:
        assert error.ranks == (0,), error
    os._exit(0)
"""
    assert job(tmp_path, 4, text, *ULFM) == ["[1, 2] [3 3 3]"] * 2


@needs_mpirun
def test_two_ranks_that_die_within_the_shrink_of_a_split_group(tmp_path: Path) -> None:
    """Rank 0 reaches ranks 2 and 3 alone; rank 1, which lacks it, then reaches rank 2 alone."""
    text = f"""
import pathlib
from kos.comm.rendezvous.mpi import MPIGroup
usual, round = MPIGroup._exchange_with_survivors, 0
def touch(name): pathlib.Path({str(tmp_path)!r}, name).touch()
def die_after(*names):
    while not all(pathlib.Path({str(tmp_path)!r}, name).exists() for name in names):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
def exchange(self, ranks, *arguments):
    global round
    round += 1
    first = []
    if (self.rank, round) == (0, 2):
        usual(self, [2, 3], *arguments)
        die_after("second 2", "second 3")
    if (self.rank, round) == (1, 3):
        usual(self, [2], *arguments)
        die_after("third 2")
    if self.rank in (2, 3) and round == 2:
        first = [0]
    if (self.rank, round) == (2, 3):
        first = [1]
    received = usual(self, first, *arguments) if first else {{}}
    touch(f"{{['', 'first', 'second', 'third'][min(round, 3)]}} {{self.rank}}")
    return {{**received, **usual(self, [rank for rank in ranks if rank not in first], *arguments)}}
with kos.init("mpi", timeout=60) as comm:
    part = comm.split(comm.rank // 4)
    part.barrier()
    if part.size == 4:
        MPIGroup._exchange_with_survivors = exchange
        print(part.rendezvous.shrink().ranks, flush=True)
        touch(f"ended {{part.rank}}")
    while len(list(pathlib.Path({str(tmp_path)!r}).glob("ended *"))) < 2:
        time.sleep(0.01)
    os._exit(0)
"""
    assert job(tmp_path, 5, text, *ULFM) == ["[1, 2, 3]"] * 2


@needs_mpirun
def test_groups_of_one_host_make_no_communicator_of_mpi(tmp_path: Path) -> None:
    """In Open MPI 5.0.11 a rank may crash if another one dies while a communicator is created."""
    text = """
from mpi4py import MPI
with kos.init("mpi", timeout=60) as comm:
    first = MPI.COMM_WORLD.Dup().py2f()
    groups = [comm.split(0), comm.duplicate(), comm.group([1, 0])]
    print(sum(group.all_reduce(np.ones(1))[0] for group in groups), MPI.COMM_WORLD.Dup().py2f() - first, flush=True)
"""
    assert job(tmp_path, 2, text) == ["6.0 1"] * 2


@needs_mpirun
def test_threads_split_their_communicators_at_a_time(tmp_path: Path) -> None:
    """Communicators are independent: no two groups of one host get the same tags of MPI."""
    text = """
import threading
with kos.init("mpi", timeout=20) as comm:
    at_once = threading.Barrier(2, timeout=20)
    def splits(own, number):
        for _ in range(20):
            at_once.wait()
            with own.split(0) as part:
                assert set(part.all_gather_bytes(bytes([number]))) == {bytes([number])}
        ended.append(number)
    ended = []
    threads = [threading.Thread(target=splits, args=(comm.duplicate(), number)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sorted(ended), flush=True)
"""
    assert job(tmp_path, 2, text) == ["[0, 1]"] * 2


@needs_mpirun
def test_a_death_that_mpi_does_not_report(tmp_path: Path) -> None:
    text = """
import os, signal, time
from kos.comm.rendezvous import mpi_job
class Unaware:
    def __init__(self, comm):
        self.size = comm.size
    def Isend(self, data, to, tag):
        return mpi_job.load_mpi().REQUEST_NULL
    def Improbe(self, source, tag, status):
        return None
    def Iprobe(self, source, tag):
        return False
with kos.init("mpi", timeout=20) as comm:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mpi_job.failed_ranks = lambda comm: []
    comm.rendezvous.shared.comm, began = Unaware(comm.rendezvous.shared.comm), time.monotonic()
    try:
        comm.rendezvous.barrier()
    except kos.errors.RankLost as error:
        print(error, time.monotonic() - began < 10, flush=True)
    os._exit(0)
"""
    assert job(tmp_path, 2, text, *ULFM) == ["rendezvous: rank 1 is gone: its process ended True"]


@needs_mpirun
def test_a_rank_that_fails_in_a_split_is_not_awaited_in_the_new_group(tmp_path: Path) -> None:
    """Rank 2 sends its last message of the split to rank 0 alone; rank 0 then waits for rank 1 in their new group."""
    text = """
import struct, time
import kos.comm.rendezvous.mpi as mpi
group = mpi.MPIRendezvous(timeout=60)
assert group.local_size == 3
if group.rank == 2:
    transfer = group._transfer
    def silent_to_rank_1(data, to, source):
        if to == 1 and group._exchanges == 3:  # the last one of the split
            return bytearray(struct.pack("!I", 0))
        return transfer(data, to, source)
    group._transfer = silent_to_rank_1
group.timeout = 1 if group.rank == 1 else 60
child, began = None, time.monotonic()
try:
    child = group.split(int(group.rank == 2))
    child.allgather(b"")
except kos.errors.RendezvousError as error:
    print(group.rank, child is not None, time.monotonic() - began < 30, error, flush=True)
time.sleep(2)
os._exit(0)
"""
    late = "rendezvous: allgather: rank 1 waited 1 s for all other 2 ranks"
    expected = [f"0 True True {late}; rank 1 aborted because of it", f"1 False True {late}"]
    assert sorted(job(tmp_path, 3, text))[:2] == expected


@needs_mpirun
def test_groups_with_the_fewest_tags_that_mpi_allows(tmp_path: Path) -> None:
    """The backend mpi needs more; nccl and peer use the groups too."""
    text = """
import types
from kos.comm.rendezvous import mpi_job
from kos.comm.rendezvous.mpi import MPIRendezvous
class Few:
    def __init__(self, comm):
        self.comm = comm
    def __getattr__(self, name):
        return getattr(self.comm, name)
    def Get_attr(self, key):
        return 32767
    def Idup(self):
        comm, request = self.comm.Idup()
        return Few(comm), request
    def Isend(self, data, to, tag):
        assert 0 <= tag <= 32767, tag
        return self.comm.Isend(data, to, tag)
MPI = mpi_job.load_mpi()
few = types.SimpleNamespace(**vars(MPI))
few.COMM_WORLD = Few(MPI.COMM_WORLD)
mpi_job.load_mpi = lambda *_: few
group = MPIRendezvous()
names, child = group.allgather(b"%d" % group.rank), group.split(0)
tags = {group.shared.new_tag() for _ in range(9000)}
used = {group.shared.tag, child._tag} & tags
print(names == child.allgather(b"%d" % group.rank), len(tags), used, flush=True)
os._exit(0)
"""
    # Each of 2 ranks gets 2,729 of the triples in 16,384 tags.  The first triple is that of the group of all ranks, and
    # one of rank 0 is in use by the child.
    assert sorted(job(tmp_path, 2, text)) == ["True 2728 set()", "True 2729 set()"]


@needs_mpirun
def test_a_loss_that_one_rank_alone_hears_of(tmp_path: Path) -> None:
    """Open MPI tells nobody of an exit code that is not 0; it may tell some."""
    text = """
from kos.comm.rendezvous import mpi_job
with kos.init("mpi", timeout=60) as comm:
    comm.all_reduce(np.ones(3))
    if comm.rank == 1:
        os._exit(3)
    try:
        while True:
            comm.all_reduce(np.ones(10))
    except kos.errors.RankLost:
        pass
    if comm.rank == 2:
        mpi_job.failed_ranks = lambda _: [1]
    try:
        comm.shrink()
    except kos.errors.RankLost as error:
        print(error.ranks, error, flush=True)
"""
    lines = job(tmp_path, 3, text, *ULFM)
    assert len(lines) == 2 and all(line.startswith("(1,) world: shrink: rank 1 is gone: ") for line in lines), lines


@needs_mpirun
def test_init_returns_when_all_ranks_have_the_communicators(tmp_path: Path) -> None:
    """Open MPI crashes if a communicator is revoked while a rank still creates it.  Groups of one host create none."""
    text = f"""
import pathlib
import kos.comm.host.backend as host
from kos.comm.host.mpi import MPIBackend
host.open_segment = lambda _: (None, "switched off by the test")
through, made = pathlib.Path({str(tmp_path / "through")!r}), MPIBackend._dup
def late(self, rendezvous):
    comm, deadline = made(self, rendezvous), time.monotonic() + 0.5
    while rendezvous.rank == 0 and not through.exists() and time.monotonic() < deadline:
        os.sched_yield()
    print(through.exists(), flush=True)
    return comm
MPIBackend._dup = late
comm = kos.init("mpi", timeout=60)
through.touch()
comm.barrier()
comm.close()
"""
    assert job(tmp_path, 2, text) == ["False"] * 4


@needs_mpirun
def test_an_interrupted_exchange_is_reported(tmp_path: Path) -> None:
    """By a rank that goes on after Ctrl-C: the others do not wait for their timeout."""
    text = f"""
import pathlib
comm = kos.init("mpi", timeout=60)
group, began = comm.rendezvous, time.monotonic()
def told(): return pathlib.Path({str(tmp_path)!r}).glob("told *")
def interrupted(*_): raise KeyboardInterrupt
if comm.rank == 1:
    group._transfer = interrupted
try:
    group.barrier()
except kos.errors.KosError as error:
    print(error.ranks, error, time.monotonic() - began < 30, flush=True)
    pathlib.Path({str(tmp_path)!r}, f"told {{comm.rank}}").touch()
except KeyboardInterrupt:
    pass
while len(list(told())) < 2 and time.monotonic() - began < 100:
    time.sleep(0.01)
os._exit(0)
"""
    error = "rendezvous: init was interrupted on rank 1 by KeyboardInterrupt; rank 1 aborted because of it"
    assert job(tmp_path, 3, text) == [f"(1,) {error} True"] * 2


@needs_mpirun
@pytest.mark.parametrize("when", ["before", "within"])
def test_an_interrupted_split_between_hosts_is_reported(tmp_path: Path, when: str) -> None:
    """Whether or not MPI has split the communicator on the other ranks."""
    text = f"""
import pathlib
import kos.comm.rendezvous.base as base
import kos.comm.rendezvous.mpi as mpi
from kos.comm.rendezvous import mpi_job
group, began = mpi.MPIRendezvous(timeout=60), time.monotonic()
base.host_id = lambda: f"host {{group.rank}}"
def told(): return pathlib.Path({str(tmp_path)!r}).glob("told *")
def interrupted(call, *_):
    if {when == "within"}:
        mpi_job.on_thread(call).result()
    raise KeyboardInterrupt
if group.rank == 1:
    mpi_job.in_thread = interrupted
try:
    group.split(0, (group.rank + 1) % 3).barrier()
except kos.errors.KosError as error:
    named = "interrupted on rank 1 by KeyboardInterrupt" in str(error)
    print(error.ranks, named, time.monotonic() - began < 30, flush=True)
    pathlib.Path({str(tmp_path)!r}, f"told {{group.rank}}").touch()
except KeyboardInterrupt:
    pass
while len(list(told())) < 2 and time.monotonic() - began < 100:
    time.sleep(0.01)
os._exit(0)
"""
    assert job(tmp_path, 3, text) == ["(1,) True True"] * 2


@needs_mpirun
def test_an_abort_outside_of_an_exchange_is_reported(tmp_path: Path) -> None:
    """To the ranks that wait in one, while the process of the aborted rank goes on."""
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
def test_a_rank_that_died_before_init_is_named(tmp_path: Path) -> None:
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
    assert len(lines) == 2 and all(re.match("rendezvous: rank 1 is gone: start: MPI: ", line) for line in lines)
