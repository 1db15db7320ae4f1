"""``benchmarks.gpu_calls`` on stand-ins: each way makes the same launches, and the core makes those it is timed for."""

from __future__ import annotations

import shlex
import shutil
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_calls
from kos.comm import watchdog
from kos.comm.gpu import nccl_binding
from kos.cuda import driver
from kos.errors import BackendUnavailable
from kos.memory.array import Array
from tests.comm.fake_nccl import FakeRanks, no_gpu
from tests.comm.shared_ranks import needs_core

CALLS, TURNS = 5, 3


@needs_core
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce", "scatter", "scan"])
def test_four_variants_of_the_same_call(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What the core does not make, such as scan, is timed by Python alone."""
    loop, rows = gpu_calls.build(), []

    def body(gpu: Any) -> None:
        arrays = [Array.from_numpy(np.zeros(n, np.float32), 0) for n in (4, 8, 8)]
        rows.append(gpu_calls.Timer(gpu.comm, loop, CALLS, TURNS).row(gpu_calls.OPERATIONS[name], *arrays))

    with no_gpu(monkeypatch) as fake:
        monkeypatch.setattr(watchdog, "add", lambda backend: None)  # a tick makes Python order the next call
        monkeypatch.setattr(driver, "synchronize", lambda device: None)
        FakeRanks(2).run(body)
        launches = fake.driver.launches
    row = rows[0]
    if name == "scan":
        assert row["kernels"] == row["by_core"] == 0 and "core_us" not in row and row["python_us"] > 0
        return
    assert rows[1] == row
    assert row["kernels"] == 1 and min(row[key] for key in ("python_us", "core_us", "c_us", "bare_us")) > 0
    # The core's first call after the GPU was waited for is ordered by Python.
    assert row["by_core"] == pytest.approx(CALLS / (CALLS + 1), abs=0.01)
    made = 2 * TURNS * (3 * CALLS + 1)  # by the core, the loop in C, and the function in C, called once more first
    assert launches - made in range(2 * 10), "a few launches before the timed ones"


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BackendUnavailable, match="needs a C compiler"):
        gpu_calls.build()


def test_every_function_has_a_name_in_nccl() -> None:
    """As in nccl.h."""
    operations = shlex.split("all_reduce reduce reduce_scatter broadcast all_gather all_to_all gather scatter")
    names = "ncclAllReduce ncclReduce ncclReduceScatter ncclBroadcast ncclAllGather ncclAlltoAll ncclGather ncclScatter"
    assert " ".join(map(nccl_binding.function_name, operations)) == names
