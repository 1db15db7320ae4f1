"""Benchmarks on emulated GPUs: collectives and limits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest

from kos.bench.cases import Case, Data
from kos.bench.implementations import Ours
from kos.bench.limits import DeviceLimits
from kos.bench.measure import DeviceTimer, Job, Run, measure
from kos.bench.memory import DeviceMemory, Space
from kos.bench.peers_gpu import RawNCCL
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.cuda import kernels
from kos.cuda.kernels import KernelCache, compile_kernels
from kos.errors import BackendUnavailable
from kos.testing import spawn
from tests.comm.fake_gpu import at
from tests.comm.fake_nccl import FakeNCCL, Group, communicator, no_gpu
from tests.test_benchmark_cases import PLACES

ROOT = Path(__file__).resolve().parents[1]


class StandIn:
    """A kernel of ``device.cu``, emulated on host memory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self, stream: Any, grid: int, block: int, array: int, table: int, count: int, size: int, start: int,
        period: int, *counter: int,
    ) -> None:  # fmt: skip
        words = np.dtype(f"u{size}")
        expected = np.resize(at(table, period, words), start + count)[start:]
        if self.name == "repeat":
            at(array, count, words)[:] = expected
        else:
            at(*counter, 1, np.dtype("u8"))[0] += np.count_nonzero(at(array, count, words) != expected)


class HostTimer(DeviceTimer):
    """Its graphs are lists of calls, whose kernels take 5 SMs."""

    def capture(self, calls: Any) -> Any:
        return (lambda: [call() for call in calls]), 5


@contextmanager
def half_a_millisecond(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]) -> Iterator[FakeNCCL]:
    """An emulated GPU on which every interval takes 0.5 ms, and whose graphs are empty; ``load`` gives its kernels."""
    with no_gpu(monkeypatch) as fake:
        monkeypatch.setattr("kos.cuda.load_kernel", load)
        cu = fake.cu
        cu.cuEventElapsedTime = lambda begun, ended: (0, 0.5)
        cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
        cu.CUgraphInstantiate_flags = SimpleNamespace(CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY=8)
        cu.cuStreamEndCapture = cu.cuGraphInstantiate = lambda *_: (0, object())
        for name in ("StreamBeginCapture", "GraphDestroy", "GraphExecDestroy", "GraphLaunch", "EventSynchronize"):
            setattr(cu, f"cu{name}", lambda *_: (0,))
        yield fake


@pytest.mark.parametrize(("op", "in_place"), [*PLACES, ("routing", False)])
def test_rows_on_emulated_gpus(op, in_place, monkeypatch):
    """Slots, checks, timers, calls of kos and of raw NCCL; the GPU and NCCL are emulated on the host."""
    ranks = 2
    case = Case.of(op, 9 * 7168 * 2 if op == "routing" else 1000 * ranks, "bfloat16", "sum", ranks, in_place)
    group = Group(ranks)

    def run(control):
        stream = SimpleNamespace(handle=7, __cuda_stream__=lambda: (0, 7))
        job, memory, timer = Job(control), DeviceMemory(0, stream), HostTimer(Job(control), stream)
        comm = communicator(ThreadControlPlane(threads, control.rank, 20.0), group)
        implementations = [Ours(comm, "kos-nccl"), RawNCCL(control, 0, stream)]
        runs = []
        space = Space(case, Data(case, control.rank, 0), memory, memory.empty, 3)
        for implementation in implementations:
            calls = [implementation.bind(case, slot.send, slot.recv) for slot in space.slots]
            if calls[0] is not None:
                runs.append(Run(implementation, space, calls))
        found = []
        for mode in DeviceTimer.MODES:
            for each, s in zip(runs, measure(job, timer, runs, mode, 3, 3), strict=True):
                found.append((f"{each.name} {mode}", s.iterations, s.wrong, s.time_us > 0 and s.cpu_us > 0))
                assert s.sms == (5 if mode == "graph" else None)
        space.fill(0, 0)  # a wrong result: the call did nothing
        space.check(0, 0)
        found.append(("nothing", 0, space.wrong(), True))
        implementations[0].close()
        return found

    with half_a_millisecond(monkeypatch, lambda path, name, device: StandIn(name)):
        threads = ThreadGroup(ranks)
        rows, other = spawn(run, ranks)
    *rows, untouched = rows
    kinds = {"scan": 1, "exscan": 1}.get(op, 2)
    assert [row[1:] for row in rows] == [(15, 0, True)] * 3 * kinds
    there = op == "exscan" or (in_place and op in ("broadcast", "scan"))
    assert (untouched[2] > 0) != there and other[-1][2] >= 0


def test_device_limits_on_emulated_gpus(monkeypatch):
    """Launches, copies and the figures of all ranks, if every interval takes 0.5 ms."""
    stream = SimpleNamespace(handle=7, __cuda_stream__=lambda: (0, 7))
    bytes_copied = []

    def run(control):
        return DeviceLimits(Job(control), 0, stream).figures()

    def load(path, name, device):
        kernel = create_autospec(kernels.Kernel, instance=True)

        def bind(grid, block, *arguments):
            assert isinstance(grid, int) and isinstance(block, int)
            return lambda stream: None

        kernel.bind.side_effect = bind
        return kernel

    with half_a_millisecond(monkeypatch, load) as fake:
        slab = SimpleNamespace(pointer=4096, pointers=(4096, 8192))
        monkeypatch.setattr("kos.memory.symmetric.SymmetricMemory", lambda *arguments: nullcontext(slab))
        fake.cu.cuMemcpyAsync = lambda to, of, n, stream: bytes_copied.append(n) or (0,)
        figures = spawn(run, 2)
    assert figures[0] == figures[1]
    assert figures[0]["launch_us"] == 5 and figures[0]["flag_round_trip_us"] == 0.5
    assert figures[0]["pair_gbps"] == pytest.approx(bytes_copied[0] / 125e-6 / 1e9)
    assert len(bytes_copied) == 24  # of rank 0 alone


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_device_code_compiles(tmp_path, arch):
    try:
        kernels.nvrtc_version()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    source = ROOT / "kos" / "bench" / "device.cu"
    cubin = compile_kernels(source, arch, {}, KernelCache(tmp_path))
    assert all(b".text." + name in cubin for name in (b"repeat", b"count_wrong", b"empty", b"ping_pong"))
