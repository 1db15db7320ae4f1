"""``benchmarks.gpu_calls`` on stand-ins: each way makes the same launches, and the core makes those it is timed for."""

from __future__ import annotations

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
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@needs_core
@needs_gcc
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce", "scatter"])
def test_four_variants_of_the_same_call(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    loop, rows = gpu_calls.build(), []

    def body(gpu: Any) -> None:
        comm = gpu.comm
        arrays = [Array.from_numpy(np.zeros(n, np.float32), 0) for n in (4, 8, 8)]
        rows.append(gpu_calls.Timer(comm, loop, CALLS, TURNS).row(gpu_calls.OPERATIONS[name], *arrays))

    with no_gpu(monkeypatch) as fake:
        monkeypatch.setattr(watchdog, "add", lambda backend: None)  # a tick makes Python order the next call
        monkeypatch.setattr(driver, "synchronize", lambda device: None)
        FakeRanks(2).run(body)
        launches = fake.driver.launches
    assert rows[0] == rows[1]
    row = rows[0]
    assert row["kernels"] == 1 and min(row[key] for key in ("python_us", "core_us", "c_us", "bare_us")) > 0
    # The core's first call after the GPU was waited for is ordered by Python.
    assert row["by_core"] == pytest.approx(CALLS / (CALLS + 1), abs=0.01)
    made = 2 * TURNS * (3 * CALLS + 1)  # by the core, the loop in C, and the function in C, called once more first
    assert launches - made in range(2 * 10), "a few launches before the timed ones"


@needs_core
@needs_gcc
def test_what_the_core_does_not_make_is_timed_by_python_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, rows = gpu_calls.build(), []

    def body(gpu: Any) -> None:
        arrays = [Array.from_numpy(np.zeros(n, np.float32), 0) for n in (4, 8, 8)]
        rows.append(gpu_calls.Timer(gpu.comm, loop, CALLS, TURNS).row(gpu_calls.OPERATIONS["scan"], *arrays))

    with no_gpu(monkeypatch):
        monkeypatch.setattr(driver, "synchronize", lambda device: None)
        FakeRanks(2).run(body)
    assert rows[0]["kernels"] == rows[0]["by_core"] == 0 and "core_us" not in rows[0] and rows[0]["python_us"] > 0


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BackendUnavailable, match="needs a C compiler"):
        gpu_calls.build()


def test_every_function_has_a_name_in_nccl() -> None:
    """As in nccl.h."""
    names = {
        "all_reduce": "AllReduce", "reduce": "Reduce", "reduce_scatter": "ReduceScatter", "broadcast": "Broadcast",
        "all_gather": "AllGather", "all_to_all": "AlltoAll", "gather": "Gather", "scatter": "Scatter",
    }  # fmt: skip
    assert {operation: nccl_binding.function_name(operation) for operation in names} == {
        operation: f"nccl{name}" for operation, name in names.items()
    }
