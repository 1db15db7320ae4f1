"""Failures that the watchdog finds while nobody waits in kos, and calls on GPUs that differ: without a GPU."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.gpu import gpu_health, gpu_work
from kos.comm.host.shared.segment import PID
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, KosError, RankLost
from kos.memory.array import Array
from tests.comm.fake_gpu import Status
from tests.comm.fake_nccl import quiet
from tests.comm.gpu_ranks import Prepared
from tests.comm.model import Step, call
from tests.comm.ranks import on_each_rank, until
from tests.comm.shared_ranks import SharedOnly
from tests.comm.test_auto import run

TIMEOUT = 20.0  # seconds
Call = Callable[[kos.Communicator, Callable[..., Any]], Any]


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    with quiet(monkeypatch) as fake:
        yield fake


class Heard:
    """What ``on_failure`` reported to a rank."""

    def __init__(self, comm: kos.Communicator) -> None:
        self.errors: list[KosError] = []
        self._event = threading.Event()
        comm.on_failure(self)

    def __call__(self, error: KosError) -> None:
        self.errors.append(error)
        self._event.set()

    def wait(self) -> KosError:
        assert self._event.wait(TIMEOUT), "the watchdog reported nothing"
        return self.errors[0]


def on_gpu(count: int = 6, dtype: Any = np.float32) -> Array:
    return Array.zeros(count, dtype, 0)


def fails(comm: kos.Communicator, kind: type[KosError], match: str) -> None:
    """The next use of any kind raises what the watchdog found."""
    for use in (lambda: comm.all_reduce(on_gpu()), lambda: comm.all_reduce(np.zeros(3)), comm.synchronize):
        with pytest.raises(kind, match=match):
            use()


def kill(comm: kos.Communicator, rank: int) -> None:
    calls = comm.host.calls
    calls.segment.words[calls.segment.line(rank) + PID] = (1 << 22) + 1  # no process has it


@pytest.mark.parametrize("parts", ["nccl", "peer", "nccl peer"])
def test_a_rank_that_dies_is_named(parts):
    def body(comm, log):
        heard = Heard(comm)
        comm.all_reduce(on_gpu())
        comm.rendezvous.barrier()
        if comm.rank == 0:
            kill(comm, 1)
            error = heard.wait()
            assert isinstance(error, RankLost) and "all_reduce #0 of float32[6]" in str(error)
            assert "rank 1 is gone: its process ended" in str(error) and "results are undefined" in str(error)
            fails(comm, RankLost, "rank 1 is gone")
            assert len(heard.errors) == 1
        comm.rendezvous.barrier()

    run(body, parts, host=SharedOnly)


def idle_once_failed(fake: Any, gpus: list[Any]) -> None:
    """The GPU is idle once all of these backends have failed."""
    ended = threading.Event()

    def synchronize():
        if all(each.failures.first is not None for each in gpus):
            ended.set()
        ended.wait(2 * TIMEOUT)
        return (0,)

    fake.cu.cuCtxSynchronize = synchronize


def test_kernels_of_every_communicator_of_a_lost_rank_are_ended(fake, caplog):
    """The GPU is idle only after the kernels of the duplicate have ended, too."""

    def body(comm, log):
        several = comm, comm.duplicate()
        for each in several:
            each.all_reduce(on_gpu())
        comm.rendezvous.barrier()
        if comm.rank == 0:
            idle_once_failed(fake, [each.backend for each in several])
            heard = [Heard(each) for each in several]
            for each in several:
                kill(each, 1)
            assert all(isinstance(each.wait(), RankLost) for each in heard)
        comm.rendezvous.barrier()

    run(body, "nccl", host=SharedOnly)
    assert "did not end its work" not in caplog.text


@pytest.mark.parametrize("rank_is", ["stopped", "late"])
def test_graphs_of_another_communicator_do_not_hold_the_gpu(rank_is, fake, monkeypatch, caplog):
    """A replay has no deadline.

    It is ended if another communicator failed because of the same rank and the GPU stays busy.
    """
    monkeypatch.setattr(gpu_health, "_HALTED_SECONDS", 0.3)

    def body(comm, log):
        graphs, bystander = comm.duplicate(), comm.split(comm.rank)  # the second has no other rank
        assert bystander is not None
        for each in (comm, graphs):
            each.all_reduce(on_gpu())
        comm.rendezvous.barrier()
        if comm.rank == 0:
            gpus = [each.backend for each in (comm, graphs)]
            idle_once_failed(fake, gpus)
            monkeypatch.setattr(type(gpus[1].failures.status), "halted", lambda *_: rank_is == "stopped")
            gpus[1].timeout = 0.6 if rank_is == "late" else 1000.0
            heard, began = Heard(graphs), time.monotonic()
            late = CollectiveTimeout("synchronize: rank 1 did not arrive")
            late.ranks = (1,)
            gpus[0].to_error(gpus[0]._last, late)
            error = heard.wait()
            assert isinstance(error, CollectiveTimeout) and error.ranks == (1,)
            assert "after another communicator failed" in str(error) and "rank 1 did not arrive" in str(error)
            assert time.monotonic() - began > (0.3 if rank_is == "stopped" else 0.6)
            assert bystander.failure is None
        comm.rendezvous.barrier()

    run(body, "nccl", host=SharedOnly)
    assert "did not end its work" not in caplog.text


@on_each_rank(run, "nccl", host=SharedOnly)
def test_what_lasts_too_long_is_ended(comm, log, /):
    if comm.rank == 0:
        heard = Heard(comm)
        comm.all_reduce(on_gpu(), timeout=0.1)
        error = heard.wait()
        assert isinstance(error, CollectiveTimeout) and "ranks [1] did not arrive" in str(error)
        fails(comm, CollectiveTimeout, "not complete after 0.1 s")
    comm.rendezvous.barrier()


@on_each_rank(run, "nccl", host=SharedOnly)
def test_a_rank_that_does_not_come_where_no_call_is_marked(comm, log, /):
    """Of many calls in a row, only a few have events.  The host knows which ranks have made the last ones."""
    if comm.rank == 0:
        heard = Heard(comm)
        comm.backend._marks.free.clear()
        comm.all_reduce(on_gpu(), timeout=0.1)
        assert "ranks [1] did not arrive" in str(heard.wait())
    comm.rendezvous.barrier()


def test_a_call_that_waits_behind_one_without_a_mark(fake, monkeypatch):
    """The GPU has not begun the marked call.  It may hang in an earlier collective, which has no mark."""
    monkeypatch.setattr(gpu_work.Mark, "ended", lambda mark: not mark.follows_unmarked)
    fake.cu.cuEventQuery = lambda event: (Status.CUDA_ERROR_NOT_READY,)

    def body(comm, log):
        x = on_gpu()
        for _ in range(3):
            comm.all_reduce(x)
        comm.rendezvous.barrier()
        if comm.rank == 0:
            heard = Heard(comm)
            comm.backend.watch()
            comm.all_reduce(x, timeout=0.1)
            assert "ranks [1] did not arrive" in str(heard.wait())
        comm.rendezvous.barrier()

    run(body, "nccl", host=SharedOnly)


@on_each_rank(run, host=SharedOnly)
def test_who_timed_out_waiting_for_the_dead_names_them(comm, log, /):
    part = comm.backend
    part.unwatch()
    comm.all_reduce(on_gpu())
    comm.rendezvous.barrier()
    if comm.rank == 0:
        kill(comm, 1)
        error = part.to_error(part._last, CollectiveTimeout("rank 1 did not arrive"))
        assert isinstance(error, RankLost) and "rank 1 is gone: its process ended" in str(error)
    comm.rendezvous.barrier()


def test_a_wait_on_the_host_is_shown(fake):
    """It is shown with the ranks that it waits for, and until it ends."""
    fake.cu.cuStreamQuery = lambda stream: (600,)

    def body(comm, log):
        part = comm.backend
        status = part.failures.status
        if comm.rank == 0:
            comm.all_reduce(on_gpu())
            waiting = threading.Event()
            status.post_wait = _telling(status.post_wait, waiting)
            late = r"all_reduce #0 .*: not complete after 0.3 s; ranks \[1\] did not arrive"
            with pytest.raises(CollectiveTimeout, match=late) as got:
                comm.synchronize(0.3)
            assert got.value.ranks == (1,)
            assert waiting.is_set() and status.awaited(0) is None, "shown, and no longer"
            assert status.last is not None, "the failure is shown before"
        comm.rendezvous.barrier()

    run(body, "nccl", host=SharedOnly)


def _telling(post: Callable[[Any], None], waiting: threading.Event) -> Callable[[Any], None]:
    def posting(ranks: Any) -> None:
        named = None if ranks is None else list(ranks)
        post(named)
        if named == [1]:
            waiting.set()

    return posting


def test_a_queue_that_waits_is_shown_while_the_program_does_something_else():
    """Nothing is shown once the ranks have come."""
    began = threading.Event()

    def body(comm, log):
        status = comm.backend.failures.status
        if comm.rank == 0:
            comm.all_reduce(on_gpu())
            until(lambda: status.queued and list(status.queued.values()) == [(1,)])
            began.set()
            until(lambda: not status.queued)
        else:
            assert began.wait(TIMEOUT)
            assert status.awaited(0) == (1,)
            comm.all_reduce(on_gpu())
        comm.rendezvous.barrier()

    run(body, "nccl", host=SharedOnly)


@on_each_rank(run, "nccl", host=SharedOnly)
def test_what_nccl_meets_is_explained_by_the_rank_that_died(comm, log, /, fake):
    """NCCL reports that another rank has gone before the watchdog knows which rank it is."""
    part = comm.backend
    part.unwatch()
    comm.all_reduce(on_gpu())
    comm.rendezvous.barrier()
    if comm.rank == 0:
        fake.comm_get_async_error = lambda each: 6
        threading.Timer(0.2, kill, (comm, 1)).start()
        with pytest.raises(RankLost, match="rank 1 is gone: its process ended") as raised:
            comm.synchronize()
        assert raised.value.ranks == (1,)
    comm.rendezvous.barrier()


DIFFERENCES: dict[str, tuple[Call, Call]] = {
    "root": (partial(call, Step("reduce", 10)), partial(call, Step("reduce", 10, root=1))),
    "operation": (lambda c, x: c.all_reduce(x(10)), lambda c, x: c.broadcast(x(10))),
    "allocate against a call on GPUs": (lambda c, x: c.allocate(4, "float32"), lambda c, x: c.all_reduce(x(10))),
    "allocate against a call on hosts": (lambda c, x: c.allocate(4, "float32"), lambda c, x: c.all_reduce(np.zeros(3))),
    "allocate count": (lambda c, x: c.allocate(4, "float32"), lambda c, x: c.allocate(5, "float32")),
    "where it lies": (lambda c, x: c.all_reduce(x(10)), lambda c, x: c.all_reduce(np.zeros(10, np.float32))),
}  # fmt: skip
"""Calls of ranks 0 and 1 that do not belong together."""


@pytest.mark.parametrize("next_call", ["barrier", "all_reduce on the host"])
@pytest.mark.parametrize("case", DIFFERENCES)
@on_each_rank(run, host=SharedOnly)
def test_calls_of_auto_that_differ_raise_by_the_next_one(comm, log, /, case, next_call):
    """The next call, on host memory, waits for all ranks, and raises the error on each of them."""
    comm.backend.unwatch()  # it finds it too, a little later

    def calls():
        DIFFERENCES[case][comm.rank](comm, on_gpu)
        comm.barrier() if next_call == "barrier" else comm.all_reduce(np.zeros(3))

    with pytest.raises(CollectiveMismatch) as error:
        calls()
    text = str(error.value)
    assert "rank 0 called" in text and "rank 1 called" in text


@pytest.mark.parametrize("name", ["all_gather_v", "gather_v", "scatter_v", "reduce_scatter_v"])
@on_each_rank(run, host=SharedOnly)
def test_cached_calls_whose_counts_differ_raise_on_every_rank(comm, log, /, name):
    calls, me = [], comm.rank
    for counts in ([4, 4], [3, 4] if me else [4, 3]):  # this rank's is 4 in both
        gathers, x, out = name in ("all_gather_v", "gather_v"), on_gpu(4), on_gpu(sum(counts))
        if not gathers:
            x, out = out, x
        arguments = {"gather_v": (x, counts, 0, None if me else out), "scatter_v": (None if me else x, counts, out, 0)}
        calls.append(partial(getattr(comm, name), *arguments.get(name, (x, counts, out))))
    prepared = Prepared(comm)
    for _ in range(3):
        calls[0]()
    assert not prepared.by(calls[0])
    calls[1]()
    with pytest.raises(CollectiveMismatch, match=r"rank 0 called .*rank 1 called .*they differ in counts"):
        comm.barrier()
    with pytest.raises(CollectiveError, match="failed before"):
        calls[0]()
