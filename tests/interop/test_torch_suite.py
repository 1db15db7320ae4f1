"""PyTorch's own suite over kos: the committed table, and a part of the suite."""

import ctypes
import json
from importlib.util import find_spec

import pytest

from tests.interop.ranks import run
from tests.interop.torch_suite import EXCEPT, RESULT, RESULT_CUDA, missed

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

PART = """
test_DistributedDataParallelCPU_grad_is_view test_accumulate_gradients_no_sync_allreduce_with_then_hook
test_all_gather_coalesced_with_empty test_all_reduce_coalesced_max test_barrier_timeout_full_group
test_batch_isend_irecv_gloo_tags test_broadcast_full_group test_ddp_logging_data_cpu test_destroy_group test_get_future
test_scatter_object_list test_send_recv_any_source_autograd test_static_graph_api_cpu
"""


def test_every_test_that_gloo_passed_passed_or_is_explained():
    table = json.loads(RESULT.read_text())["ranks"]
    assert {ranks: missed(each["tests"]) for ranks, each in table.items()} == {"2": [], "3": [], "4": []}
    for each in table.values():
        assert each["counts"]["kos"]["failed"] == 0 and each["counts"]["gloo"]["passed"] >= 90


def test_every_test_that_nccl_passed_passed_or_is_explained():
    table = json.loads(RESULT_CUDA.read_text())["ranks"]
    assert "2" in table and table.keys() <= {"2", "4"}
    for each in table.values():
        assert missed(each["tests"], "nccl") == []
        assert each["counts"]["kos as nccl"]["passed"] >= 140 and each["counts"]["nccl"]["passed"] >= 140


@pytest.fixture
def autograd():
    """Skips where torch's own autograd crashes in the processes that the suite forks: it calls cuInit a second time."""
    import torch

    if torch.version.cuda is None or torch.cuda.device_count():
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    pytest.skip("torch built for CUDA, a driver, no visible GPU: cuInit crashes in processes forked after a first call")


def run_suite(backend: str, pattern: str) -> dict[str, str]:
    call = "tests.interop.torch_suite:run_forked"
    outcomes: dict[str, str] = run(call, 1, None, backend, 2, pattern, limit=500 if pattern else 1100)[0]
    return outcomes


def expect_no_failure(outcomes):
    failed = {name: outcome for name, outcome in outcomes.items() if outcome.startswith("failed")}
    assert failed.keys() <= EXCEPT.keys() | {"test_get_backend"}, failed


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("autograd")
def test_a_part_of_the_suite_passes_with_the_backend_name_kos():
    """The suite has for kos, by its own name, a part of the tests that it has for gloo."""
    outcomes = run_suite("kos", PART)
    expect_no_failure(outcomes)
    assert sum(outcome == "passed" for outcome in outcomes.values()) >= 7, outcomes


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("autograd")
def test_the_suite_passes():
    """If the committed table is of this version of torch, only a part of the suite runs.

    The tests that the table has as skipped are left out.  Of two tests that do the same on 2 ranks, one is left out,
    too: the one in a group of all ranks, and the one under the older of two profilers.
    """
    import torch

    table = json.loads(RESULT.read_text())
    known = {name: row["kos as gloo"] for name, row in table["ranks"]["2"]["tests"].items()}
    twins = {name: name.replace("_full_group", "").replace("_autograd_", "_torch_") for name in known}
    left_out = {name for name, twin in twins.items() if twin != name and twin in known}
    names = [name for name in known.keys() - left_out if not known[name].startswith("skipped")]
    same = table["torch"] == torch.__version__
    outcomes = run_suite("kos as gloo", " ".join(names) if same else "")
    expect_no_failure(outcomes)
    if same:
        passed = {name for name, outcome in outcomes.items() if outcome == "passed"}
        assert passed == {name for name in names if known[name] == "passed"}
