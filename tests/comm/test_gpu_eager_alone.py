"""Calls of a communicator of one rank on a GPU: the compiled core makes them, as copies.

The driver, NCCL and memory are stand-ins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos import PremulSum, ReduceOp
from kos.comm.failures import EndedEarly
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.host.backend import HostBackend
from kos.comm.host.threads import ThreadTransport
from kos.comm.operation import EAGER
from kos.cuda import driver
from kos.errors import CollectiveTimeout, CudaError
from tests.comm.fake_nccl import WAIT, Comm, Group, Stream, captures
from tests.comm.fake_peer import no_gpus
from tests.comm.gpu_eager import by, hits, known, needs_compiler, on_gpu
from tests.comm.ranks import on_threads
from tests.comm.shared_ranks import needs_core

pytestmark = [needs_core, needs_compiler, pytest.mark.usefixtures("no_looks")]

CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda c, x, y: c.all_reduce(x),
    "all_reduce out": lambda c, x, y: c.all_reduce(x, ReduceOp.MAX, out=y),
    "all_reduce in place by out": lambda c, x, y: c.all_reduce(x, out=x),
    "all_reduce deterministic": lambda c, x, y: c.all_reduce(x, out=y, deterministic=True),
    "reduce": lambda c, x, y: c.reduce(x, 0, out=y),
    "broadcast": lambda c, x, y: c.broadcast(x, 0, out=y),
    "all_gather": lambda c, x, y: c.all_gather(x, y),
    "all_gather_v": lambda c, x, y: c.all_gather_v(x, [x.size], y),
    "reduce_scatter": lambda c, x, y: c.reduce_scatter(x, y),
    "reduce_scatter_v": lambda c, x, y: c.reduce_scatter_v(x, (x.size,), y),
    "all_to_all": lambda c, x, y: c.all_to_all(x, y),
    "gather": lambda c, x, y: c.gather(x, 0, out=y),
    "scatter": lambda c, x, y: c.scatter(x, y, 0),
    "scan": lambda c, x, y: c.scan(x, out=y),
    "scan in place": lambda c, x, y: c.scan(x, out=x),
    "gather_v": lambda c, x, y: c.gather_v(x, [x.size], 0, out=y),
    "scatter_v": lambda c, x, y: c.scatter_v(x, [x.size], y, root=0),
    "all_to_all_v": lambda c, x, y: c.all_to_all_v(x, [x.size], [x.size], y),
    "all_gather_v in place": lambda c, x, y: c.all_gather_v(x, [x.size], x),
    "gather_v in place": lambda c, x, y: c.gather_v(x, [x.size], 0, out=x),
    "reduce_scatter_v in place": lambda c, x, y: c.reduce_scatter_v(x, [x.size], x),
    "scatter_v in place": lambda c, x, y: c.scatter_v(x, [x.size], x, root=0),
}
"""Each leaves in its result what was in ``x``."""


@pytest.fixture(params=["nccl", "peer", "auto"])
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Runs a function of a communicator of one rank and of the stand-in for the driver."""
    kind, group = request.param, Group(1)

    def rank(rendezvous: Any, body: Callable[..., None], fake: Any) -> None:
        host = HostBackend(rendezvous, ThreadTransport)
        routes: list[Any] = [NCCLBackend(rendezvous, host.engine, 0, Comm(group, 0))] if kind != "peer" else []
        routes += [PeerBackend(rendezvous, host.engine, 0)] if kind != "nccl" else []
        backend = GPUBackend(rendezvous, routes, host if kind == "auto" else None)
        with kos.Communicator(backend, rendezvous, {}, WAIT) as comm:
            body(comm, fake.driver)

    with no_gpus(monkeypatch, 1) as fake:
        yield lambda body: on_threads(1, lambda rendezvous: rank(rendezvous, body, fake), WAIT, group.barrier.abort)


def test_every_operation(alone: Callable[..., None], seed: int) -> None:
    """On fresh arrays with poisoned outputs; one call makes each known."""

    def body(comm: kos.Communicator, fake: Any) -> None:
        rng = np.random.default_rng(seed)
        for name, call in CALLS.items():
            for count in (0, 3, 400):
                before = hits(comm)
                for _ in range(5):
                    values = rng.integers(0, 99, count).astype(np.int32)
                    x, y = on_gpu(values), on_gpu(np.full(count, -1, np.int32))
                    np.testing.assert_array_equal(call(comm, x, y).numpy(), values, name)
                    np.testing.assert_array_equal(x.numpy(), values, name)
                assert hits(comm) - before >= 3, name
        assert {name.split()[0] for name in CALLS} <= set(EAGER)

    alone(body)


def test_in_place_nothing_is_queued(alone: Callable[..., None]) -> None:
    """A call may be in place, and the next one not."""

    def body(comm: kos.Communicator, fake: Any) -> None:
        x, y = on_gpu([1.0, 2.0]), on_gpu([0.0, 0.0])
        known(comm, x)
        comm.all_reduce(x, out=x)
        known(comm, x, out=y)
        before = fake.launches
        with by(comm, 4):
            for out in (x, y, x, y):
                comm.all_reduce(x, out=out)
        assert fake.launches - before == 2

    alone(body)


def test_where_the_first_argument_is_no_array(alone: Callable[..., None]) -> None:
    def body(comm: kos.Communicator, fake: Any) -> None:
        x, y = on_gpu([1.0, 2.0]), on_gpu([0.0, 0.0])
        for out in (x, x, x, y, y, y, x, y):
            y.copy_from(np.zeros(2))
            assert comm.all_reduce(op=ReduceOp.MAX, x=x, out=out) is out
            assert y.numpy().tolist() == (x.numpy().tolist() if out is y else [0.0, 0.0])

    alone(body)


def test_factors_and_copies(alone: Callable[..., None]) -> None:
    """A sum with a factor is a kernel, or a call of NCCL."""

    def body(comm: kos.Communicator, fake: Any) -> None:
        x, y = on_gpu(np.array([1.0, 2.0], np.float32)), on_gpu(np.zeros(2, np.float32))
        for _ in range(4):
            assert comm.all_reduce(x, PremulSum(3.0), out=y).numpy().tolist() == [3.0, 6.0]
            assert comm.all_reduce(x, out=y).numpy().tolist() == [1.0, 2.0]

    alone(body)


def test_no_output_and_no_data(alone: Callable[..., None]) -> None:
    def body(comm: kos.Communicator, fake: Any) -> None:
        x, y = on_gpu([1.0]), on_gpu([9.0])
        comm.exscan(x, out=y)
        comm.exscan(x, out=y)
        with by(comm, 2):
            comm.exscan(x, out=y)
            comm.exscan(x, out=y)
        for _ in range(4):
            comm.barrier(stream=Stream(40))
        assert x.numpy().tolist() == [1.0] and y.numpy().tolist() == [9.0]
        known(comm, x)
        fake.current = 0  # nothing is launched, so no context is needed
        with by(comm, 1):
            comm.all_reduce(x)

    alone(body)


def test_a_timeout_names_the_last_call(alone: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: kos.Communicator, fake: Any) -> None:
        x, y = on_gpu([1.0]), on_gpu([0.0])
        comm.all_reduce(x, out=y)
        comm.all_gather(x, y, algorithm="auto")
        comm.all_reduce(x, out=y, deterministic=True)
        monkeypatch.setattr("kos.cuda.streams.is_idle", lambda stream: False)
        monkeypatch.setattr("kos.comm.gpu.order.is_idle", lambda stream: False)
        with pytest.raises(CollectiveTimeout, match="all_reduce #2 "):
            comm.synchronize(timeout=0.2)

    alone(body)


def test_a_failure_of_one_rank_waits_for_no_report(alone: Callable[..., None]) -> None:
    def body(comm: kos.Communicator, fake: Any) -> None:
        x = on_gpu([1.0])
        work = comm.all_reduce(x, out=on_gpu([0.0]), async_op=True)
        shared = getattr(comm.backend, "gpus", [comm.backend])[0].shared
        began = time.monotonic()
        shared.cause(work, EndedEarly("ended early"))
        assert time.monotonic() - began < 0.5

    alone(body)


def test_groups_of_one_hold_no_descriptors(alone: Callable[..., None]) -> None:
    def body(comm: kos.Communicator, fake: Any) -> None:
        before = len(os.listdir("/proc/self/fd"))
        groups = [comm.duplicate() for _ in range(20)]
        assert len(os.listdir("/proc/self/fd")) - before < 20
        for each in groups:
            assert each.all_reduce(on_gpu([1.0])).numpy().tolist() == [1.0]
            each.close()

    alone(body)


def test_persistent_starts(alone: Callable[..., None]) -> None:
    def body(comm: kos.Communicator, fake: Any) -> None:
        x, y = on_gpu([1.0, 2.0]), on_gpu([0.0, 0.0])
        start = comm.all_reduce_init(x, out=y).start
        for _ in range(3):
            start()
        x.copy_from(np.array([3.0, 4.0]))
        with by(comm, 1):
            start().wait()
        assert y.numpy().tolist() == [3.0, 4.0]

    alone(body)


def test_a_thread_without_the_context(alone: Callable[..., None]) -> None:
    """Python makes it current."""

    def body(comm: kos.Communicator, fake: Any) -> None:
        x, y = on_gpu([1.0], Stream(40)), on_gpu([0.0], Stream(40))
        known(comm, x, out=y)
        fake.current = 0
        with by(comm, 0):
            comm.all_reduce(x, out=y)
        fake.current = driver.primary_context(0)
        with by(comm, 1):
            comm.all_reduce(x, out=y)

    alone(body)


def test_graphs_keep_windows(alone: Callable[..., None]) -> None:
    def body(comm: kos.Communicator, fake: Any) -> None:
        stream = Stream(40)
        x, y = (comm.allocate(4, np.float32) for _ in range(2))
        known(comm, x, out=y, stream=stream)
        with captures() as graph, by(comm, 0):
            comm.all_reduce(x, out=y, stream=stream)
        graph.destroy()

    alone(body)


def test_a_copy_that_is_refused(alone: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: kos.Communicator, fake: Any) -> None:
        x, y = on_gpu([1.0]), on_gpu([0.0])
        known(comm, x, out=y)
        stubs = {"CUresult": lambda status: status, "cuMemGetInfo": lambda: (0,)}
        monkeypatch.setattr(driver, "cu", SimpleNamespace(**vars(driver.cu) | stubs))
        monkeypatch.setattr(driver, "error_of", lambda name, status: CudaError(f"{name} failed: status {status}"))
        fake.instead["cuMemcpyDtoDAsync_v2"] = lambda *words: 1
        with pytest.raises(CudaError, match="cuMemcpyDtoDAsync failed: status 1"):
            comm.all_reduce(x, out=y)
        with pytest.raises(CudaError, match="failed before"):
            comm.all_reduce(x, out=y)

    alone(body)
