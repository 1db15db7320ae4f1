"""Each row of the table of failures (``kos.testing.conformance.failures``), on ranks that are threads or processes.

The rows for GPUs are in ``test_scenarios_on_fakes.py``.
"""

import ctypes
import threading
import time
from typing import Any

import pytest

from kos._core import native
from kos.comm.failures import FailureLog
from kos.testing.conformance.failures import LATE, SCENARIOS, check
from tests.comm.ranks import SIZE, TIMEOUT, MockRanks, check_scenario, split_among_jobs
from tests.comm.tcp_ranks import TCPRanks

# Rows whose ranks wait for a timeout run in `make test-all` only, except these.
WAITING = ("all_reduce, a rank is late", "barrier, rank 0 gives up", "recv, rank 0 gives up")
IN_BOTH = ("all_reduce, a later one fails", "recv, rank 0 gives up")


def rows() -> list[Any]:
    """Each row in one kind of memory; 3 ranks of mpirun run it in the other kind."""
    found = []
    for number, row in enumerate(SCENARIOS):
        waits = row.error is LATE and str(row) not in WAITING
        for memory in ("shared", "none"):
            second = str(row) not in IN_BOTH and (memory == "none") == (number % 2 == 0)
            if native is None or str(row) in IN_BOTH or second == (SIZE == "3"):
                marks = pytest.mark.slow if waits or second else ()
                found.append(pytest.param(row, memory, id=f"{memory}-{row}", marks=marks))
    return found


ROWS = rows()
OF_THREE = [each for each in ROWS if each.values[0].ranks > 2]
OF_MPI = ROWS if SIZE == "3" else [*(OF_THREE if SIZE != "2" else ()), *split_among_jobs(
    [each for each in ROWS if each not in OF_THREE], 2)]  # fmt: skip


@pytest.mark.parametrize("row", SCENARIOS, ids=str)
def test_on_threads(row):
    check_scenario(MockRanks(3).run, row)


def test_a_rank_that_gets_no_core_may_be_named(monkeypatch):
    """It is waiting too, but gets no CPU core to report that in time."""
    row = next(row for row in SCENARIOS if str(row) == "recv_bytes from any, a rank is late")
    shown, meeting, waiting = threading.Semaphore(0), threading.Barrier(3), set[int]()

    def show(log, late):  # in the call, not in the barrier before it
        if late is not None and log.rank not in waiting:
            waiting.add(log.rank)
            shown.release()

    monkeypatch.setattr(FailureLog, "show_wait", show)

    def meet(comm, limit):
        if comm.rank == 2:
            assert shown.acquire(timeout=TIMEOUT) and shown.acquire(timeout=TIMEOUT)
            ctypes.PyDLL(None).usleep(int(0.7e6 * limit))  # which keeps Python's lock, so that no other thread runs
        meeting.wait(TIMEOUT)

    MockRanks(3).run(lambda comm: check(comm, row, 2.0, meet))


@pytest.mark.parametrize(("row", "memory"), ROWS, indirect=["memory"])
def test_on_tcp(row, memory):
    check_scenario(TCPRanks(3).run, row)


@pytest.mark.mpi
@pytest.mark.parametrize(("row", "memory"), OF_MPI, indirect=["memory"])
def test_on_mpi(row, ranks_of_mpi, memory):
    from mpi4py import MPI

    def meet(*_):
        request = MPI.COMM_WORLD.Ibarrier()
        while not request.Test():
            time.sleep(0.001)

    ranks_of_mpi.run(lambda comm: check(comm, row, meet=meet))
