"""Each row of the table of failures (``kos.testing.conformance.failures``), on ranks that are threads or processes.

Those of GPUs are in ``test_scenarios_on_fakes.py``.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from kos.testing.conformance.failures import LATE, SCENARIOS, Scenario, check
from tests.comm.ranks import MockRanks, check_scenario
from tests.comm.tcp_ranks import TCPRanks

every_row = pytest.mark.parametrize("row", SCENARIOS, ids=str)
# Rows whose ranks wait for a timeout are left to `make test-all`, but for these.
PROMPT = [
    row if row.error is not LATE or str(row) in ("all_reduce, a rank is late", "barrier, rank 0 gives up")
    else pytest.param(row, marks=pytest.mark.slow)
    for row in SCENARIOS
]  # fmt: skip
every_prompt_row = pytest.mark.parametrize("row", PROMPT, ids=str)


@every_row
def test_on_threads(row: Scenario) -> None:
    check_scenario(MockRanks(3).run, row)


@every_prompt_row
def test_on_tcp(row: Scenario, memory: str) -> None:
    check_scenario(TCPRanks(3).run, row)


@pytest.mark.mpi
@every_prompt_row
def test_on_mpi(row: Scenario, ranks_of_mpi: Any, memory: str) -> None:
    from mpi4py import MPI

    def meet(*_: Any) -> None:
        request = MPI.COMM_WORLD.Ibarrier()
        while not request.Test():
            time.sleep(0.001)

    ranks_of_mpi.run(lambda comm: check(comm, row, meet=meet))
