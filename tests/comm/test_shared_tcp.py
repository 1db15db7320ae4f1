"""The tcp backend where its ranks share memory: conformance, mismatches, and a rank that is killed or stopped."""

from __future__ import annotations

import pytest

from tests.comm.tcp_ranks import TCPRanks, run_processes
from tests.comm.test_conformance import (  # noqa: F401 -- collected here, to run on the ranks below
    test_all_gather_v,
    test_all_reduce_by_algorithm,
    test_all_to_all,
    test_all_to_all_v,
    test_barrier_waits_for_everybody,
    test_broadcast,
    test_gather_and_scatter,
    test_large,
    test_messages,
    test_reduce,
    test_shapes_and_scalars,
)
from tests.comm.test_shared_failures import CASES, check_mismatch


@pytest.fixture
def ranks() -> TCPRanks:
    return TCPRanks(3)


def test_explain_says_what_is_shared(ranks: TCPRanks) -> None:
    for text in ranks.run(lambda comm: comm.explain()):
        assert "shared memory  in use  3 ranks of this host share" in text


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_mismatch(ranks: TCPRanks, case: str, odd: int) -> None:
    messages = ranks.run(lambda comm: check_mismatch(comm, case, odd))
    assert len(set(messages)) == 1


END = """
import os, signal
import numpy as np, kos
comm = kos.init("tcp", timeout=20)
pids = [int(pid) for pid in comm.all_gather(np.array(os.getpid()))]
survivors = comm.split(int(comm.rank == 1))
if comm.rank == 1:
    os.kill(os.getpid(), signal.{signal})
    os._exit(0)
try:
    comm.all_reduce(np.zeros((2, 3)), timeout={timeout})
except kos.errors.CollectiveError as error:
    print(type(error).__name__, error, flush=True)
survivors.barrier()
if comm.rank == 0 and "{signal}" == "SIGSTOP":
    os.kill(pids[1], signal.SIGCONT)
"""


def test_a_killed_rank_is_named() -> None:
    results = run_processes(END.format(signal="SIGKILL", timeout=15.0), 3)
    for _, output in (results[0], results[2]):
        assert "RankLost all_reduce #1 of float64[2, 3] by SUM: rank 1 is gone" in output, output


def test_a_stopped_rank_is_named() -> None:
    results = run_processes(END.format(signal="SIGSTOP", timeout=1.0), 3)
    for _, output in (results[0], results[2]):
        assert "CollectiveTimeout all_reduce #1 of float64[2, 3] by SUM: not complete after 1.0 s" in output, output
        assert "ranks [1] did not arrive" in output
