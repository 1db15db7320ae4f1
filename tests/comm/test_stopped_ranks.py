"""Ranks that a signal has stopped: at the timeout of a call, they are named as those that did not arrive."""

import re
import subprocess
import sys

import pytest

from kos.comm.control.group import GRACE_SECONDS
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import environment, free_port, run_processes
from tests.forked import PATHS, python
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program

STOPS = """
import os, pathlib, signal, time
import kos, numpy as np
comm = kos.init("{backend}", timeout=30)  # a rank may be late on a busy machine
pids = [int(pid) for pid in comm.all_gather_bytes(b"%d" % os.getpid())]
if "{way}" == "rendezvous":  # by which the bytes of a backend for GPUs alone go
    comm.host = None
if comm.rank == {stopped}:
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
try:
    began = time.monotonic()
    comm.all_gather_bytes(b"x", timeout=2)
except kos.errors.KosError as error:
    print(type(error).__name__, error.ranks, error, flush=True)
    if "{way}" == "rendezvous":
        print("after", time.monotonic() - began, flush=True)
pathlib.Path("{folder}", str(comm.rank)).touch()
while len(list(pathlib.Path("{folder}").glob("[0-9]"))) < 2:  # the other one looks at the stopped rank; mpirun ends all
    time.sleep(0.01)
if comm.rank == (0 if {stopped} else 1):
    os.kill(pids[{stopped}], signal.SIGCONT)
os._exit(0)
"""
WAYS = [("collective", 0), ("collective", 2), ("rendezvous", 0), ("rendezvous", 2)]


def check(output: str, way: str, stopped: int, errors: str = "", suffix: str = "") -> None:
    said = [line for line in output.splitlines() if f"({stopped},)" in line]
    late = rf"ranks \[{stopped}\]( of 3)?{suffix} did not arrive|rank {stopped}{suffix} gave no answer"
    assert len(said) == 2 and all(re.search(late, line) for line in said), output + errors
    kind = "RendezvousError" if way == "rendezvous" else "CollectiveTimeout"
    assert all(line.startswith(kind) for line in said), output


@needs_core
@pytest.mark.parametrize(("way", "stopped"), WAYS)
def test_a_stopped_rank_on_tcp(tmp_path, way, stopped):
    results = run_processes(STOPS.format(backend="tcp", way=way, stopped=stopped, folder=tmp_path), 3)
    check("".join(output for _, output in results), way, stopped)


@needs_core
@pytest.mark.parametrize("way", ["collective", "rendezvous"])
def test_a_stopped_rank_of_a_group_is_named_by_its_rank_in_the_world(tmp_path, way):
    """The group has the ranks of the world in reverse order.  Its rank 2 is stopped, which is rank 0 of the world."""
    program = STOPS.replace("timeout=30)", "timeout=30).group([2, 1, 0])")
    results = run_processes(program.format(backend="tcp", way=way, stopped=2, folder=tmp_path), 3)
    check("".join(output for _, output in results), way, 0, suffix=" of world")


@needs_core
def test_a_stopped_hub_is_not_awaited_longer_than_another_rank(tmp_path):
    """A rank knows that the process of its hub is stopped, and does not wait for the report of the hub."""
    results = run_processes(STOPS.format(backend="tcp", way="rendezvous", stopped=0, folder=tmp_path), 3)
    output = "".join(output for _, output in results)
    seconds = [float(line.split()[1]) for line in output.splitlines() if line.startswith("after")]
    assert len(seconds) == 2 and max(seconds) < 2 + GRACE_SECONDS - 0.5, output


@needs_core
@needs_mpirun
@pytest.mark.parametrize(("way", "stopped"), [("collective", 0), ("rendezvous", 2)])
def test_a_stopped_rank_on_mpi(tmp_path, way, stopped):
    path = tmp_path / "program.py"
    path.write_text(STOPS.format(backend="mpi", way=way, stopped=stopped, folder=tmp_path))
    environment = {**OUTSIDE, "OPENBLAS_NUM_THREADS": "1"}
    done = run_program(MPIRUN, "-n", "3", *python(), str(path), env=environment, cwd="/")
    check(done.stdout, way, stopped, done.stderr)


STOPS_IN_MPI = """
import os, pathlib, signal, time
os.environ["KOS_HOST"] = "ab"[int(os.environ["OMPI_COMM_WORLD_RANK"]) % 2]
import kos, numpy as np
comm = kos.init("mpi", timeout=30)  # a rank may be late on a busy machine
pids = [int(pid) for pid in comm.all_gather_bytes(b"%d" % os.getpid())]
comm.timeout = 3
if comm.rank == {stopped}:  # stops between the comparison of the calls and MPI's call
    comm.backend.transport.native = lambda *call: (os.kill(os.getpid(), signal.SIGSTOP), os._exit(0))
try:
    comm.{call}(np.ones(1000, np.float32))
    comm.barrier()
except kos.errors.KosError as error:
    print(type(error).__name__, error.ranks, error, flush=True)
pathlib.Path(f"{{comm.rank}}").touch()
while len(list(pathlib.Path().glob("[0-9]"))) < comm.size - 1:  # the others may still need the hub
    time.sleep(0.01)
if comm.rank == 1 - {stopped}:
    os.kill(pids[{stopped}], signal.SIGCONT)
os._exit(0)
"""


@needs_core
@needs_mpirun
@pytest.mark.parametrize(
    ("size", "stopped", "call"), [(2, 1, "broadcast"), (4, 1, "all_reduce"), (4, 0, "broadcast")]
)
def test_a_rank_that_stops_in_a_collective_of_mpi_between_hosts(tmp_path, size, stopped, call):
    """MPI does not report for which ranks a collective waits, so the ranks ask each other through the hub on rank 0."""
    path = tmp_path / "program.py"
    path.write_text(STOPS_IN_MPI.format(call=call, stopped=stopped))
    environment = {**OUTSIDE, "PYTHONPATH": PATHS, "OPENBLAS_NUM_THREADS": "1"}
    done = run_program(MPIRUN, "-n", f"{size}", *python(), str(path), env=environment, cwd=tmp_path)
    said = [line for line in done.stdout.splitlines() if line.startswith(f"CollectiveTimeout ({stopped},)")]
    assert len(said) == size - 1, done.stdout + done.stderr


AWAITED = """
import os, signal, time
import kos, numpy as np
comm = kos.init("tcp", timeout=10)
comm.all_reduce(np.ones(3))
if comm.rank == 3:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    comm.all_reduce(np.ones(3), timeout=1.0 + comm.rank)  # rank 0 waits for ranks whose time is not up
except kos.errors.KosError as error:
    print(error.ranks, flush=True)
time.sleep(3)  # the hub may not end before the others have asked
os._exit(0)
"""


def printed(code: str, awaited: list[int], **more: str) -> list[str]:
    """What these of 4 ranks print; the others are stopped.  ``more``: environment variables, one character a rank."""
    port, ranks = free_port(), list[subprocess.Popen[str]]()
    for rank in range(4):
        env = {**OUTSIDE, **environment(rank, 4, port, **{name: values[rank] for name, values in more.items()})}
        ranks.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env))
    try:
        return [ranks[rank].communicate(timeout=90)[0] for rank in awaited]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_ranks_without_shared_memory_are_asked_for_whom_they_wait():
    """All survivors name the stopped rank, although most wait for one another."""
    assert printed(AWAITED, [0, 1, 2], KOS_CORE="0000") == ["(3,)\n"] * 3


STOPPED_HOST = """
import os, signal, time
import kos, numpy as np
comm = kos.init("tcp", timeout=30)
comm.barrier()
comm.rendezvous.barrier()  # the hub has answered all ranks
if comm.rank < 2:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    comm.all_gather(np.ones(3), timeout=2 if comm.rank == 2 else 30)
except kos.errors.CollectiveTimeout as error:
    print(error.ranks, error.unasked, comm.shrink(timeout=10).size, flush=True)
os._exit(0)
"""


@needs_core  # else rank 2 cannot ask rank 3, and does not say that rank 1 could not be asked
def test_a_host_with_the_hub_that_is_stopped_is_left_out():
    """Its rank 0 is named.  The other ranks cannot know that rank 1 is stopped too, but no longer wait for it.

    Rank 2 finds the failure, and rank 3 receives its report.
    """
    assert printed(STOPPED_HOST, [2, 3], KOS_HOST="aabb") == ["(0,) (1,) 2\n"] * 2
