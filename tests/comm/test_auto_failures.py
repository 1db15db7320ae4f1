"""Failures, aborts and closes of a communicator that has two backends for GPUs."""

from collections.abc import Callable

import numpy as np
import pytest

import kos
from kos.comm.control.threads import ThreadControlPlane
from kos.errors import CollectiveError, CollectiveTimeout, InvalidArgument, RankLost
from kos.memory.array import Array
from tests.comm.ranks import on_each_rank, on_threads
from tests.comm.shared_ranks import SharedOnly, needs_core
from tests.comm.test_auto import SIZE, run, zeros
from tests.comm.works import work_of
from tests.fake_cuda import GPU, installed

pytestmark = pytest.mark.usefixtures("fake")


@on_each_rank(run)
def test_each_backend_is_closed_if_the_close_of_another_fails(comm, log, /):
    backend = comm.backend
    ended = []

    def fails(name):
        ended.append(name)
        raise CollectiveError(name)

    for part in (*backend.routes, comm.host):
        part.close = lambda *_, name=part.name: fails(name)
    with pytest.raises(CollectiveError):
        comm.close()
    assert ended == ["nccl", "peer", "mock"]


@pytest.mark.parametrize(("parts", "calls"), [("nccl", 2), ("nccl peer", 2), ("nccl peer", 0)])
def test_a_failure_on_the_host_ends_the_calls_on_gpus(parts, calls):
    def body(comm, log):
        x = zeros(1)
        for _ in range(calls):
            comm.all_reduce(x)
        comm.rendezvous.barrier()
        comm.backend.failures.first = CollectiveError("barrier #7: rank 1 did not arrive")
        with pytest.raises(CollectiveError, match="failed before: barrier #7: rank 1 did not arrive"):
            comm.all_reduce(x)

    run(body, parts)


def test_a_failure_of_a_call_ends_all_routes():
    def body(comm, log):
        if comm.rank:
            return
        backend, ended = comm.backend, list[str]()
        for route in backend.routes:
            route.abort = lambda reason, name=route.name: ended.append(f"waits of {name}")
            route.drained = lambda final, name=route.name: ended.append(name)
        call = work_of("all_reduce", backend, sequence=7)
        backend.to_error(call, CollectiveTimeout("all_reduce #7: rank 1 did not arrive"))
        # Ending nccl may wait for kernels of peer, and ending peer for all that the GPU does.
        assert ended == ["waits of nccl", "waits of peer", "nccl", "peer"]
        for x in (zeros(1), zeros(1 << 20), np.zeros(1)):
            with pytest.raises(CollectiveError, match="failed before: all_reduce #7: rank 1 did not arrive"):
                comm.all_reduce(x)
            with pytest.raises(CollectiveError, match="failed before"), comm.batch():
                comm.all_reduce(x)

    run(body)


@on_each_rank(run)
def test_survivors_of_a_shrink_use_both_backends(comm, log, /):
    comm.all_reduce(zeros(1))
    comm.rendezvous.barrier()
    if comm.rank == 0:
        comm.rendezvous.threads.world.end(0, "it is dead")
        return
    rest = comm.shrink()
    assert rest.backend_name == "nccl+peer+mock" and rest.size == 1
    for x in (np.ones(3), Array.from_numpy(np.ones(5000, np.float16), 0), Array.from_numpy(np.ones(1), 0)):
        got = rest.all_reduce(x)
        assert ((got if isinstance(x, np.ndarray) else got.numpy()) == 1).all()
    rest.close()


@on_each_rank(run)
def test_an_abort_is_reported_before_it_waits(comm, log, /):
    backend = comm.backend
    comm.host.abort = lambda reason: log.append(f"mock: {reason}")
    for route in backend.routes:
        route.abort = lambda reason, name=route.name: log.append(f"waits of {name}")
        route.drained = lambda final, name=route.name: log.append(f"{name}: {final}")
    comm.abort(reason="enough")
    waits = ["waits of nccl", "waits of peer"]
    assert log == [*waits, "mock: enough", "nccl: True", "peer: True"]


@needs_core
@on_each_rank(run, host=SharedOnly)
def test_an_abort_reaches_ranks_that_wait_for_a_gpu(comm, log, /, queued):
    comm.all_reduce(zeros(5000))
    part = comm.backend
    comm.rendezvous.barrier()
    if comm.rank:
        comm.abort(reason="enough")
        return
    with pytest.raises(RankLost, match="rank 1 is gone: enough"):
        part.wait_on_host(part._last, lambda: False, 20)


def on_two_ranks(body: Callable[[kos.Communicator], None]) -> None:
    def rank(rendezvous: ThreadControlPlane) -> None:
        with kos.init("auto", rendezvous=rendezvous) as comm:
            body(comm)

    on_threads(SIZE, rank)


@on_each_rank(on_two_ranks)
def test_without_a_backend_for_gpus_the_error_says_why(comm, /):
    why = [f"{name}: {comm.probes[name].reason}" for name in ("nccl", "peer")]
    assert all(each.partition(": ")[2] in comm.explain() for each in why)
    pair = comm.duplicate()
    for call in (comm.all_reduce, pair.all_reduce):
        with pytest.raises(InvalidArgument) as caught:
            call(zeros(2))
        expected = "x: expected memory of the host (backend mock), got Array in memory of cuda:0"
        assert str(caught.value) == f"{expected}; auto found no backend for GPUs: {'; '.join(why)}"
    comm.all_reduce(np.ones(2))  # nothing was sent


@pytest.mark.parametrize("visible", [True, False])
def test_a_visible_gpu_without_a_backend_is_a_warning(visible, fake, monkeypatch, caplog):
    with installed(monkeypatch, fake.cu, (GPU(),) * visible):
        on_two_ranks(lambda comm: None)
    why = "the ranks are threads of one process, which share its GPU"
    text = f"auto: rank 0 sees a GPU, but no backend can use GPUs: nccl: {why}; peer: {why}"
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == [text] * visible
