"""Each row of the table of failures that GPUs promise, on the stand-ins of nccl and peer."""

import pytest

from kos.testing.conformance.failures import GPU, SCENARIOS
from tests.comm.fake_nccl import FakeRanks, quiet
from tests.comm.fake_peer import ThreadRanks, no_gpus
from tests.comm.ranks import check_scenario
from tests.comm.shared_ranks import needs_core
from tests.host_compiler import needs_compiler

SIZE = 3
ROWS = [row for row in SCENARIOS if GPU not in row.never]
# Programs that run the kernels of others, or wait as others do.
ALIKE = (
    "all_reduce of 300,007", "all_reduce in rank order", "all_gather", "all_gather_v", "all_to_all_v", "recv", "dtype",
    "count, large and small", "op",
)  # fmt: skip


@needs_core
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_on_nccl(row, monkeypatch):
    with quiet(monkeypatch) as fake:
        fake.cu.cuStreamQuery = lambda stream: (600,)
        check_scenario(FakeRanks(SIZE).run, row)


@needs_core
@needs_compiler
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.slow) if row.program in ALIKE else row for row in ROWS], ids=str
)
@pytest.mark.usefixtures("frequent_looks")
def test_on_peer(row, monkeypatch):
    with no_gpus(monkeypatch, SIZE):
        check_scenario(lambda fn: ThreadRanks(SIZE).run(fn, 60.0), row, SIZE, limit=2.5)
