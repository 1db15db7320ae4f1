"""``Communicator.on_failure`` on backends for host memory: the loss of a rank is reported without another call."""

import threading

import pytest

from kos.errors import RankLost
from kos.testing import Fault, spawn
from tests.comm.ranks import TIMEOUT, on_each_rank
from tests.comm.tcp_ranks import run_processes
from tests.comm.test_jobs import needs_mpirun
from tests.comm.test_shared_failures import ULFM, job

PROGRAM = """
import os, sys, threading
import numpy as np
import kos
if "{memory}" == "without":
    del os.pidfd_open
comm = kos.init("{backend}", timeout=60)
group = comm.duplicate()
comm.all_reduce(np.ones(3))
found, errors = threading.Event(), []
def report(error):
    errors.append(error)
    if len(errors) == 2:  # of both groups
        found.set()
for each in (comm, group):
    each.on_failure(report)
comm.rendezvous.barrier()
if comm.rank == 1:
    {end}
found.wait({seconds})
print(*dict.fromkeys(f"{{type(error).__name__}} {{error.ranks}}" for error in errors), flush=True)
"""


def ranks_report(end: str, memory: str, seconds: float = TIMEOUT, last: str = "pass") -> list[str]:
    """The errors that the callbacks of ranks 0 and 2 of three received; ``last`` runs before any rank aborts."""
    code = PROGRAM.format(backend="tcp", memory=memory, end=end, seconds=seconds)
    results = run_processes(f"{code}\n{last}\ncomm.abort() if errors else group.close() or comm.close()", 3)
    assert [results[rank][0] for rank in (0, 2)] == [0, 0], results
    return [results[rank][1].strip() for rank in (0, 2)]


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(0)", "sys.exit()", "comm.abort()"])
def test_a_rank_that_ends_is_reported(end, memory):
    assert ranks_report(end, memory) == ["RankLost (1,)"] * 2


def test_a_python_without_pidfd_open():
    """For example, a Python that was built for Linux before 5.3."""
    assert ranks_report("os.kill(os.getpid(), 9)", "without", 10.0) == ["RankLost (1,)"] * 2


def test_a_rank_that_closes_is_not_reported(memory):
    """It is not reported after its process has ended, either."""
    assert ranks_report("group.close(); comm.close(); os._exit(0)", memory, 1.0) == ["", ""]


def test_a_failed_collective_of_another_rank_is_reported(memory):
    end = """
    for each in (comm, group):
        try:
            each.barrier(timeout=0.2)
        except kos.errors.CollectiveTimeout:
            pass
"""
    for found in ranks_report(end, memory, 10.0, "comm.rendezvous.barrier()"):
        assert found.startswith("CollectiveTimeout"), found


@needs_mpirun
@pytest.mark.parametrize("apart", [False, True])
def test_a_rank_that_ends_is_reported_on_mpi(tmp_path, apart):
    code = PROGRAM.format(backend="mpi", memory="shared", end="os.kill(os.getpid(), 9)", seconds=TIMEOUT)
    if apart:
        code = f"os.environ['KOS_HOST'] = os.environ['OMPI_COMM_WORLD_RANK']\n{code}"
    assert job(tmp_path, 3, f"{code}\ncomm.abort(0)", *ULFM) == ["RankLost (1,)"] * 2


def test_a_rank_that_closes_is_not_reported_on_threads():
    def body(comm):
        errors = []
        comm.on_failure(errors.append)
        comm.barrier()
        if comm.rank == 1:
            comm.close()
        threading.Event().wait(0.6)
        return errors

    assert spawn(body, 3) == [[]] * 3


def test_a_process_forked_while_the_watchdog_holds_its_lock_ends():
    code = """
import os, signal, sys, warnings
import kos
from kos.comm import watchdog
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and newer warn of a fork beside threads
comm = kos.init("tcp", timeout=60)
comm.on_failure(print)
watchdog._stop._cond.acquire()
child = os.fork()
if not child:
    signal.alarm(20)
    sys.exit()
watchdog._stop._cond.release()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
comm.close()
"""
    assert run_processes(code, 2) == [(0, "0\n")] * 2


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
@on_each_rank(spawn, 2)
def test_a_callback_that_raises_does_not_keep_others_from_being_called(comm, /, error):
    """All other callbacks are called, for this failure and for later ones."""
    first, second = comm.duplicate(), comm.duplicate()
    if comm.rank == 0:
        called = [threading.Event() for _ in range(3)]

        def report(failure):
            called[0].set()
            raise error

        first.on_failure(report)
        first.on_failure(lambda failure: called[1].set())
        second.on_failure(lambda failure: called[2].set())
    comm.barrier()
    if comm.rank == 1:
        first.abort()
    elif comm.rank == 0:
        assert called[0].wait(TIMEOUT) and called[1].wait(TIMEOUT)
    comm.barrier()
    if comm.rank == 1:
        second.abort()
    elif comm.rank == 0:
        assert called[2].wait(TIMEOUT)


def test_who_aborts_because_of_a_callback_names_the_cause():
    found, aborted = threading.Event(), threading.Event()

    def body(comm):
        if comm.rank == 0:
            comm.on_failure(lambda error: found.set())
        comm.barrier()
        if comm.rank == 0:
            assert found.wait(TIMEOUT)
            comm.abort()
            aborted.set()
        elif comm.rank == 1:
            comm.barrier()  # it crashes
        else:
            assert aborted.wait(TIMEOUT)
            with pytest.raises(RankLost, match="rank 1 is gone.*; rank 0 aborted because of it"):
                comm.barrier()

    spawn(body, 3, faults=[Fault("crash", rank=1, operation=1)])
