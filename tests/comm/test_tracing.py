"""KOS_NVTX and KOS_RECORDER_TIMING: what they trace, and that nothing is traced without them."""

import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.host.host_backend import HostBackend
from kos.comm.host.threads import ThreadTransport
from kos.cuda import driver
from kos.errors import BackendUnavailable, CollectiveMismatch, InvalidArgument
from kos.memory.array import Array
from kos.testing import spawn
from tests.comm.fake_gpu import captures
from tests.comm.fake_nccl import WAIT, Comm, FakeNCCL, FakeRanks, Group, of_nccl
from tests.comm.ranks import on_each_rank, on_threads

SIDE = 99  # the communicator's own stream, in ``fake_nccl``


@pytest.fixture
def ranges(monkeypatch):
    """What NVTX is told; a range's end is an empty string."""
    told = []

    @contextmanager
    def annotate(message, domain):
        told.append(f"{domain} {message}")
        try:
            yield
        finally:
            told.append("")

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    monkeypatch.setenv("KOS_NVTX", "1")
    return told


def test_a_range_for_each_launch(ranges):
    def body(comm):
        x = np.ones(3, np.float32)
        comm.all_reduce(x)
        comm.broadcast(x, async_op=True).wait()
        with comm.batch():
            comm.all_reduce(x)
            comm.all_gather(np.ones(1))
        comm.split(0).barrier()

    spawn(body, 1)
    assert [each for each in ranges if each] == [
        "kos world: all_reduce of float32[3] by SUM", "kos world: broadcast of float32[3], root 0",
        "kos world: batch of 2", "kos world: all_reduce of float32[3] by SUM", "kos world: all_gather of float64[1]",
        "kos world: split", "kos world.0:0: barrier",
    ]  # fmt: skip
    assert ranges[:5] == [ranges[0], "", ranges[2], "", ranges[4]] and ranges.count("") == 7


def test_a_range_ends_with_the_error_of_its_launch(ranges):
    def body(comm):
        with pytest.raises(CollectiveMismatch):
            comm.all_reduce(np.ones(2 + comm.rank))

    spawn(body, 2)
    assert sorted(ranges)[:2] == ["", ""] and len(ranges) == 4


def test_nvtx_that_is_not_installed(monkeypatch):
    monkeypatch.setenv("KOS_NVTX", "1")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(BackendUnavailable, match="KOS_NVTX: expected the package nvtx"):
        kos.init()


@pytest.mark.parametrize("name", ["KOS_NVTX", "KOS_RECORDER_TIMING"])
def test_a_switch_is_0_or_1(monkeypatch, name):
    monkeypatch.setenv(name, "no")
    with pytest.raises(InvalidArgument, match=f"{name}: expected 0 or 1 in the environment, got 'no'"):
        kos.init()


class Clock:
    """Events on streams: when each was recorded, in milliseconds; each launch takes one on its stream."""

    def __init__(self, fake: FakeNCCL) -> None:
        self.times: dict[int, tuple[int, float]] = {}
        self.now, self.passed, self._next = 0.0, True, 0
        self.recorded: list[int] = []
        self.timed: list[int] = []  # events that measure time
        cu = fake.cu
        cu.cuEventCreate, cu.cuEventRecord, cu.cuEventQuery = self.create, self.record, self.query
        cu.cuEventElapsedTime = lambda begin, end: (0, self.times[end][1] - self.times[begin][1])
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            setattr(fake, name, self.launch(getattr(fake, name)))

    def launch(self, function: Any) -> Any:
        def run(*arguments: Any) -> None:
            self.now += 1.5
            function(*arguments)

        return run

    def create(self, flags: int) -> tuple[int, int]:
        self._next += 1
        if flags != driver.cu.CUevent_flags.CU_EVENT_DISABLE_TIMING:
            self.timed.append(self._next)
        return 0, self._next

    def record(self, event: int, stream: int) -> tuple[int]:
        self.times[event] = stream, self.now
        self.recorded.append(stream)
        return (0,)

    def query(self, event: int) -> tuple[int]:
        return (0 if self.passed else 600,)


@pytest.fixture
def clock(fake, monkeypatch):
    monkeypatch.setenv("KOS_RECORDER_TIMING", "1")
    return Clock(fake)


def durations(comm: kos.Communicator) -> list[tuple[str, float | None]]:
    return [(e["profiling_name"].partition(":")[2], e.get("duration_ms")) for e in comm.recorder.entries()]


@on_each_rank(FakeRanks(1).run)
def test_durations_of_operations_on_a_gpu(gpu, /, clock):
    comm, x, y = gpu.comm, Array.zeros(4, np.float32, 0), Array.zeros(4, np.float32, 0)
    twice = kos.PremulSum(2.0)  # in a group of one, NCCL runs only operations with a factor
    comm.all_reduce(x, twice)
    for _ in range(3):  # cached in the end
        comm.reduce_scatter(x, x, twice)
    comm.all_reduce(x, twice, async_op=True).wait()
    with comm.batch():
        comm.all_reduce(x, twice)
        comm.reduce_scatter(y, y, twice)
    clock.passed = False
    assert {duration for _, duration in durations(comm)} == {None}, "the GPU has not passed them"
    clock.passed = True
    assert durations(comm) == [
        ("all_reduce", 1.5), *[("reduce_scatter", 1.5)] * 3, ("all_reduce", 1.5),
        ("all_reduce", 3.0), ("reduce_scatter", 3.0),
    ]  # fmt: skip


@pytest.mark.parametrize("batch", [False, True])
def test_operations_on_a_host_have_no_duration(clock, batch):
    """Also if operations of the same communicator on a GPU have one."""

    def body(rendezvous):
        host = HostBackend(rendezvous, ThreadTransport)
        with kos.Communicator(of_nccl(rendezvous, Comm(Group(1), 0), host), rendezvous, {}, WAIT, host=host) as comm:
            with comm.batch() if batch else nullcontext():
                comm.broadcast(np.ones(2))
                comm.all_reduce(Array.zeros(4, np.float32, 0), kos.PremulSum(2.0))
            assert durations(comm) == [("all_reduce", 1.5), ("broadcast", None)][:: 1 if batch else -1]

    on_threads(1, body)


def test_an_overlapped_operation_is_timed_on_its_own_stream(clock):
    """It is not timed on the caller's stream, for whose work it waits."""

    def body(gpu):
        comm, x = gpu.comm, Array.zeros(4, np.float32, 0)
        comm.all_reduce(x, async_op=True).wait()
        slot = comm.recorder.slots[0]
        begin, end = (event for event, (stream, _) in clock.times.items() if stream == SIDE and event in clock.timed)
        assert comm.recorder.durations.keys() == {id(slot)} and begin < end

    FakeRanks(1).run(body)


@on_each_rank(FakeRanks(1).run)
def test_an_entry_that_was_replaced_has_no_duration_of_the_former(gpu, /, clock):
    comm, x = gpu.comm, Array.zeros(4, np.float32, 0)
    comm.all_reduce(x)
    for _ in range(1024):
        with captures():  # not timed: it runs when the graph is replayed
            x.stream = 5
            comm.all_reduce(x)
    assert len(comm.recorder.durations) == 1
    assert {duration for _, duration in durations(comm)} == {None}
