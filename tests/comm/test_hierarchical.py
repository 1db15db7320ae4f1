"""Collectives between hosts in phases, without a GPU: ranks are threads, NCCL and the kernels of ``peer`` those of
``fake_nccl`` and ``fake_peer``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kos
from kos import PremulSum, ReduceOp
from kos.comm.control.base import Rendezvous
from kos.comm.control.threads import ThreadGroup, ThreadRendezvous
from kos.comm.gpu import links
from kos.comm.gpu.auto import AutoBackend
from kos.comm.gpu.hierarchical import CARRIED, NAME, HierarchicalBackend
from kos.comm.gpu.links import network_rate, predicted
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.host.backend import HostBackend
from kos.comm.host.threads import ThreadTransport
from kos.comm.tuning import Table, key, user_path
from kos.memory.array import Array
from kos.testing.conformance import results
from tests.comm import fake_nccl
from tests.comm import test_conformance as conformance
from tests.comm.fake_nccl import WAIT, Comm, FakeNCCL, Group, captures
from tests.comm.fake_peer import ThreadRanks, no_gpus
from tests.comm.gpu_ranks import OnGPU, noting_who_adds
from tests.host_compiler import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (g++ or clang++)")

BF16 = np.dtype(ml_dtypes.bfloat16)
LAYOUTS = [(2, 2), (2, 2, 2), (3, 3)]
ALWAYS = {key(name, False, False, True): ((None, NAME),) for name in CARRIED}


class HostRanks(ThreadRanks):
    """Ranks that are threads, so many on each pretended host, with a stand-in for a GPU each."""

    pool = ThreadPoolExecutor(6)

    def __init__(self, hosts: Sequence[int], routes: Any = ALWAYS) -> None:
        super().__init__(sum(hosts))
        self.names = [f"host {host}" for host, count in enumerate(hosts) for _ in range(count)]
        self.routes, self.flat = routes, Group(self.size)

    def run_bare(self, fn: Callable[[Rendezvous], Any], timeout: float = WAIT) -> list[Any]:
        self.flat = Group(self.size)
        names = self.names

        def named(rendezvous: Any) -> Any:
            rendezvous.host = names[rendezvous.rank]
            return fn(rendezvous)

        return super().run_bare(named, timeout)

    def _with_communicator(self, fn: Callable[[Any], Any], rendezvous: Rendezvous, timeout: float) -> Any:  # type: ignore[override]
        host = HostBackend(rendezvous, ThreadTransport)
        gpu = HierarchicalBackend(rendezvous, 0, Comm(self.flat, rendezvous.rank), host)
        comm = kos.Communicator(AutoBackend(rendezvous, host, [gpu]), rendezvous, {}, timeout)
        if self.routes is not None and gpu.table is not None:
            gpu.use(Table("", "", self.size, "the test", gpu.table.launches, self.routes, gpu.hosts))
        with noting_who_adds(comm):
            result = fn(OnGPU(comm))
        comm.close()
        return result


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with no_gpus(monkeypatch, 3):
        yield


@pytest.fixture(params=LAYOUTS, ids=str)
def ranks(no_gpu: None, request: pytest.FixtureRequest) -> HostRanks:
    return HostRanks(request.param)


CASES = [(name, dtype, op) for name in ("all_reduce", "reduce_scatter") for dtype, op in (
    (np.dtype(np.float32), ReduceOp.SUM), (BF16, ReduceOp.AVG), (np.dtype(np.float64), ReduceOp.PREMUL_SUM),
    (np.dtype(np.int16), ReduceOp.BXOR), (np.dtype(np.complex64), ReduceOp.PROD), (np.dtype(np.float16), ReduceOp.MAX),
)]  # fmt: skip
CASES += [(name, dtype, None) for name in CARRIED[2:] for dtype in (BF16, np.dtype(np.int64), np.dtype(np.int8))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(getattr(x, "name", x)) for x in case))
def test_results(ranks: HostRanks, seed: int, case: tuple[Any, ...]) -> None:
    name, dtype, op = case
    ranks.run(lambda comm: results.correct(comm, seed, name, dtype, *(() if op is None else (op,))))
