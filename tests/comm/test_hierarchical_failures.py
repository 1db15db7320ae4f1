"""Failures of phases between hosts: ranks that do not arrive or that end, mismatched calls, and survivors."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import kos
from kos.comm.gpu import shared
from kos.comm.gpu.hierarchical import CARRIED, HierarchicalBackend
from kos.comm.gpu.routes import PHASES
from kos.comm.host.host_backend import HostBackend
from kos.comm.host.tcp import TCPTransport
from kos.comm.host.threads import ThreadTransport
from kos.cuda.kernels import Plan
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, KosError, RankLost
from tests.comm import fake_nccl
from tests.comm.fake_gpu import Status
from tests.comm.fake_nccl import Group
from tests.comm.ranks import on_each_rank, on_hosts
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import run_ranks
from tests.comm.test_hierarchical import HostRanks, Ways, communicator, filled, no_gpu
from tests.host_compiler import COMPILER

__all__ = ["no_gpu"]  # a fixture

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (g++ or clang++)")


def run(body: Callable[[kos.Communicator], Any]) -> list[Any]:
    """What ``body(comm)`` returned on each of two ranks of two hosts."""
    flat, all_done = Kernels(4), threading.Barrier(4)

    def rank(rendezvous: Any) -> Any:
        comm = communicator(rendezvous, HostBackend(rendezvous, TCPTransport), flat)
        try:
            return body(comm)
        finally:
            all_done.wait(3 * Kernels.seconds)  # outside of kos, which blames no rank that waits for others
            comm.abort()

    return run_ranks(4, rank, limit=4 * Kernels.seconds)


class Kernels(Group):
    """As kernels of NCCL: one that waits for a rank that never comes ends when its own rank aborts."""

    seconds = 60.0  # in which another rank finds that it waits for too long, also on a busy machine

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.aborted = [threading.Event() for _ in range(size)]
        self.messages = {(i, j): Messages(self.aborted[j]) for i in range(size) for j in range(size)}

    def swap(self, rank: int, value: Any) -> list[Any]:
        try:
            return super().swap(rank, value)
        except threading.BrokenBarrierError:  # another rank has aborted
            assert self.aborted[rank].wait(self.seconds), "a kernel of NCCL hangs"
            return [value] * self.size


class Messages(queue.Queue[Any]):
    def __init__(self, aborted: threading.Event) -> None:
        super().__init__()
        self._aborted = aborted

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while not self._aborted.is_set():
            with suppress(queue.Empty):
                return super().get(timeout=0.02)
        raise queue.Empty


@pytest.fixture
def kernels(no_gpu, frequent_looks, monkeypatch):
    """Kernels of NCCL and the watchdog as in a job, and kernels of ``peer`` that are compiled."""
    HostRanks((2, 2)).run(lambda gpu: [getattr(gpu.comm, name)(filled(gpu, 1000)) for name in CARRIED[:4]])
    abort = no_gpu.comm_abort

    def aborting(comm):
        abort(comm)
        if isinstance(comm.group, Kernels):
            comm.group.aborted[comm.rank].set()

    no_gpu.comm_abort = aborting
    monkeypatch.setattr(fake_nccl, "Group", Kernels)
    monkeypatch.setattr(shared, "_REPORT_SECONDS", 15.0)  # an emulated kernel looks at its deadline seldom
    on_hosts(monkeypatch, (2, 2))


def raised_by(comm: Any, *calls: Callable[[], Any]) -> KosError:
    """What one of the calls raises, or the end of what they have queued."""
    try:
        for call in calls:
            call()
        comm.synchronize()
    except KosError as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("waits", [True, False])
@on_each_rank(HostRanks((2, 2)).run)
def test_what_a_kernel_of_phases_waits_for_is_in_the_text_of_a_timeout(gpu, /, no_gpu, waits):
    """NCCL alone does not report it."""
    backend = gpu.comm.backend
    work = gpu.comm.all_reduce(filled(gpu, 1000), async_op=True)
    route = next(route for route in backend.routes if route.name == PHASES)
    route.node.kernel_waits = lambda: [0] * waits
    route.node.end_waits = lambda: "the GPU waited for rank 9"
    text = str(backend.timed_out(work, 1.0))
    assert work.prepared.route is route and ("waited for rank 9" in text) == waits, text


@needs_core
@pytest.mark.parametrize(
    ("name", "rank", "connected"),
    [("all_reduce", 0, False), ("all_reduce", 3, True), ("all_gather", 0, True), ("broadcast", 3, True),
     ("reduce_scatter", 3, False), ("abort", 0, True), ("abort", 3, True)],
)  # fmt: skip
def test_a_rank_that_does_not_come_or_ends_is_named_on_all(kernels, name, rank, connected):
    """Whatever phase a rank waits in, and on whichever host."""

    def body(comm):
        call = comm.all_reduce if name == "abort" else getattr(comm, name)
        for _ in range(2 * connected):
            call(filled(comm, 1000))
        comm.rendezvous.barrier()
        error = CollectiveError("")
        if comm.rank == rank:
            comm.abort(reason="of the test") if name == "abort" else None
        elif name == "abort":
            error = raised_by(comm, *[lambda: call(filled(comm, 1000))] * 3)
            assert isinstance(error, RankLost) and f"rank {rank} is gone: of the test" in str(error), error
        else:
            error = raised_by(comm, lambda: call(filled(comm, 1000), timeout=1.0))
            assert type(error) is CollectiveTimeout, error
        return str(error.ranks)

    found = run(body)
    del found[rank]
    assert found == [f"({rank},)"] * 3


@pytest.mark.parametrize(("dead", "way"), [((4, 5), PHASES), ((0, 1), PHASES), ((5,), "nccl")], ids=str)
@on_each_rank(HostRanks((2, 2, 2)).run_bare)
def test_survivors_work_in_phases_if_hosts_are_alike(rendezvous, /, no_gpu, dead, way):
    flat = rendezvous.threads.shared("group", lambda: Group(6))
    comm = communicator(rendezvous, HostBackend(rendezvous, ThreadTransport), flat)
    comm.all_reduce(filled(comm, 100))
    rendezvous.barrier()
    if rendezvous.rank in dead:
        return rendezvous.threads.world.end(rendezvous.rank, "it is dead")
    rest = comm.shrink()
    x = filled(rest, 100)
    if way == PHASES:
        assert Ways(rest).of(rest.all_reduce, x, algorithm=PHASES) == PHASES
    else:
        assert "expected hosts with the same number of ranks" in rest.explain()
        rest.all_reduce(x)
    assert (x.numpy() == rest.size * (rest.size + 1) / 2).all()
    rest.close()


@needs_core
@pytest.mark.parametrize("differs", ["count", "operation"])
@pytest.mark.parametrize("hosts", ["within a host", "between hosts"])
def test_calls_that_differ_are_named_on_all(kernels, no_gpu, monkeypatch, differs, hosts):
    """The error is that of calls without phases: it compares the properties of the call that the program made."""
    monkeypatch.setattr(HierarchicalBackend, "resolve", lambda route, o: Plan((), PHASES))
    no_gpu.cu.cuStreamQuery = lambda stream: (Status.CUDA_ERROR_NOT_READY,)

    def body(comm):
        other = comm.rank > 1 if hosts == "between hosts" else comm.rank == 3
        for _ in range(3):
            comm.all_reduce(filled(comm, 10))
        x = filled(comm, 10 + other * (differs == "count"))
        call = comm.broadcast if other and differs == "operation" else comm.all_reduce
        compare = comm.backend.synchronize  # once all have called, however busy the machine is
        error = raised_by(comm, lambda: call(x), comm.rendezvous.barrier, lambda: compare(timeout=0.3))
        assert type(error) is CollectiveMismatch, error
        return str(error)

    for text in run(body):
        assert "#3" in text and ("count 10 against 11" in text or "operation" in text), text
