"""A rank is killed or stopped at each step of a call, in a build of the core with points to stop at."""

import ctypes
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.comm.host.shared.segment import PID
from tests.core.core_ranks import needs_core, on_processes
from tests.core.group import CoreError, CoreGroup

CORE = Path(__file__).resolve().parents[2] / "kos/_core"
COMPILER = shutil.which("gcc") or shutil.which("clang")
HEADERS = Path(sysconfig.get_path("include"))
pytestmark = [
    needs_core,
    pytest.mark.skipif(COMPILER is None or not (HEADERS / "Python.h").exists(), reason="needs a C compiler, Python.h"),
]
POINTS = re.findall(r"KOS_AT_\w+", (CORE / "core.h").read_text().split("enum kos_point {")[1].split("}")[0])
VICTIM = 1


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """The extension module with points to stop at."""
    path = tmp_path_factory.mktemp("core") / "native.so"
    options = ["-std=c11", "-O0", "-shared", "-fPIC", "-DKOS_POINTS", f"-I{HEADERS}", f"-I{CORE}"]
    sources = [*CORE.glob("*.c"), Path(__file__).with_name("points.c")]
    command = [str(COMPILER), *options, *map(str, sources), "-lm", "-lpthread", "-o", str(path)]
    subprocess.run(command, check=True, timeout=120)
    return str(path)


def use(build: str) -> Any:
    """That build, in this process."""
    spec = importlib.util.spec_from_file_location("kos._core.native", build)
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return native


def run_calls(group: CoreGroup) -> None:
    """Every path: small and large sums, one copy, offers, messages."""
    peer, n = 1 - group.rank, 120_000
    x, y = np.ones(n), np.zeros(2 * n)
    counts = {"send_counts": [5, 5], "recv_counts": [5, 5]}
    for prepared, arrays in (
        (group.prepare("all_reduce", "float64", 1), (np.ones(1),)),
        (group.prepare("all_reduce", "float64", n), (x,)),
        (group.prepare("all_to_all", "float64", n), (y, np.zeros(2 * n))),
        (group.prepare("all_to_all", "float64", varies=True, **counts), (x[:10], y[:10])),
        (group.prepare("send_recv", "float64", n, dst=peer, src=peer), (x, y[:n])),
        (group.prepare("send_recv", "float64", 3, dst=peer, src=peer), (x[:3], y[:3])),
        (group.prepare("barrier"), ()),
    ):
        prepared.run(*arrays)


def stopped(group: CoreGroup, build: str, point: int, count: int, number: int, timeout: float) -> list[Any]:
    """The error of a rank, and the seconds until it raised."""
    native = use(build)
    group = CoreGroup(group.memory, group.rank, group.size, native=native)  # on the same memory
    assert group.connect()
    run_calls(group)  # the other process may still load the module, which takes as long as the machine likes
    group.timeout = timeout
    if group.rank == VICTIM:
        ctypes.CDLL(build).stop_at(point, count, number)
    began = time.monotonic()
    try:
        for _ in range(30):
            run_calls(group)
    except CoreError as error:
        if group.rank != VICTIM and number == signal.SIGSTOP:
            os.kill(group.words[group.lines[VICTIM] + PID], signal.SIGCONT)
        return [error.kind, error.rank, time.monotonic() - began]
    return ["none", -1, 0.0]


@pytest.mark.parametrize("point", range(len(POINTS)), ids=[name.lower() for name in POINTS])
def test_a_rank_killed_at_a_step_is_named(build, point, tmp_path):
    """The rank is killed when it reaches an even point for the first time, or an odd point for the ninth time."""
    count = 1 + 8 * (point % 2)
    error, nothing = on_processes(2, stopped, tmp_path, build, point, count, int(signal.SIGKILL), 30.0)
    assert nothing is None and error[:2] == ["LOST", VICTIM] and error[2] < 20


@pytest.mark.parametrize("point", range(len(POINTS)), ids=[name.lower() for name in POINTS])
def test_a_rank_stopped_at_a_step_is_named_at_the_timeout(build, point, tmp_path):
    error, _ = on_processes(2, stopped, tmp_path, build, point, 3, int(signal.SIGSTOP), 1.0)
    assert error[:2] == ["LATE", VICTIM] and error[2] < 20
