"""``benchmarks.gpu_calls`` on stand-ins: each way makes the same launches, and the core makes those it is timed for."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_calls
from kos.comm import watchdog
from kos.comm.gpu import nccl_binding
from kos.comm.gpu.nccl import NCCLBackend
from kos.cuda import driver
from kos.errors import BackendUnavailable
from kos.memory.array import Array
from tests.comm.fake_nccl import FakeRanks, no_gpu
from tests.comm.shared_ranks import needs_core

CALLS, TURNS = 5, 3


@needs_core
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize(
    ("name", "each"),
    {"all_reduce": (1, 1), "all_gather": (1, 1), "scatter": (1, 1), "scan": (13, 13), "gather_v": (5, 3)}.items(),
)
@pytest.mark.parametrize("by_core", [True, False])
def test_four_variants_of_the_same_call(
    monkeypatch: pytest.MonkeyPatch, name: str, each: tuple[int, int], by_core: bool
) -> None:
    """What the core does not make is timed by Python alone.  ``each``: the launches of both ranks."""
    loop, rows = gpu_calls.build(), []

    def body(gpu: Any) -> None:
        arrays = [Array.from_numpy(np.zeros(n, np.float32), 0) for n in (4, 8, 8)]
        rows.append(gpu_calls.Timer(gpu.comm, loop, CALLS, TURNS).row(gpu_calls.OPERATIONS[name], *arrays))

    with no_gpu(monkeypatch) as fake:
        monkeypatch.setattr(watchdog, "add", lambda backend: None)  # a tick makes Python order the next call
        monkeypatch.setattr(driver, "synchronize", lambda device: None)
        if not by_core:
            monkeypatch.setattr(NCCLBackend, "launches", lambda *_: None)
        FakeRanks(2).run(body)
        launches = fake.driver.launches
    row = rows[0]
    assert rows[1] == row
    if not by_core:
        assert row["launches"] == row["by_core"] == 0 and "core_us" not in row and row["python_us"] > 0
        return
    assert row["launches"] == max(each) and min(row[key] for key in ("python_us", "core_us", "c_us", "bare_us")) > 0
    # The core's first call after the GPU was waited for is ordered by Python.
    assert row["by_core"] == pytest.approx(CALLS / (CALLS + 1), abs=0.01)
    calls = TURNS * (3 * CALLS + 1)  # by the core, the loop in C, and the function in C, called once more first
    made = sum(each) * calls
    assert launches - made in range(10 * sum(each)), "a few launches before the timed ones"


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BackendUnavailable, match="needs a C compiler"):
        gpu_calls.build()


def test_every_function_has_a_name_in_nccl() -> None:
    """As in nccl.h."""
    names = {
        "all_reduce": "AllReduce", "reduce": "Reduce", "reduce_scatter": "ReduceScatter", "broadcast": "Broadcast",
        "all_gather": "AllGather", "all_to_all": "AlltoAll", "gather": "Gather", "scatter": "Scatter", "send": "Send",
        "recv": "Recv", "group_start": "GroupStart", "group_end": "GroupEnd",
    }  # fmt: skip
    assert {name: nccl_binding.function_name(name) for name in names} == {x: f"nccl{y}" for x, y in names.items()}
