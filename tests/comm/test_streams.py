"""Callers' streams, without a GPU: the order of work, in and out of captures, and streams that end after the call.

A stand-in for the driver tracks what the work of each stream comes after, and refuses what CUDA refuses. It fails the
test if a stream that no longer exists is queried or used.
"""

import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import kos
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.order import Order, Streams
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.gpu.peer.concurrent import ConcurrentKernels, Occupancy
from kos.comm.tuning import KernelConfig, Launches
from kos.comm.work import Engine
from kos.cuda import streams
from kos.errors import InvalidArgument
from kos.memory.array import Array
from tests.comm import fake_peer, test_auto
from tests.comm.fake_gpu import FakeGraph
from tests.comm.fake_nccl import Comm, FakeNCCL, alone, launching_alone, no_gpu
from tests.comm.host_kernel import HostKernel
from tests.comm.ranks import on_each_rank
from tests.fake_cuda import CREATED, Contexts
from tests.host_compiler import COMPILER, needs_compiler


class Device:
    """Streams and events: of each the calls that it comes after, apart for what runs and for each capture."""

    def __init__(self) -> None:
        self.alive = {0, streams.LEGACY, *CREATED}
        self.busy: set[int] = set()
        self.captures: dict[int, int] = {}  # by stream: the number of its capture
        self._behind: dict[tuple[int, int], set[Any]] = {}
        self._events: dict[Any, tuple[int, set[Any]]] = {}
        self._calls: dict[tuple[int, int], list[tuple[Any, Any]]] = {}
        self._last: dict[Any, set[Any]] = {}
        self.over: set[Any] = set()  # as the host was told
        self._lock = threading.RLock()
        self._made = 0

    def install(self, cu: Any) -> None:
        cu.cuStreamIsCapturing = lambda stream: (0, int(self._asked(stream)[0] > 0))
        cu.cuStreamGetCaptureInfo = lambda stream: (0, 1, self._asked(stream)[0], FakeGraph())
        cu.cuStreamQuery, cu.cuEventQuery = self._query, self._event_query
        cu.cuEventRecord, cu.cuStreamWaitEvent = self._record, self._wait
        cu.cuCtxSynchronize = self._synchronize

    def _asked(self, stream: int) -> tuple[int, int]:
        assert stream in self.alive, f"a stream that is gone was asked: {stream}"
        return self.captures.get(stream, 0), stream

    def _query(self, stream: int) -> tuple[int]:
        assert not self._asked(stream)[0], "queried amid a capture"
        if stream in self.busy:
            return (600,)
        self.over |= self._behind.get((0, stream), set())
        return (0,)

    def _event_query(self, event: Any) -> tuple[int]:
        capture, behind = self._events.get(event, (0, set()))
        assert not capture, "a captured event was queried"
        self.over |= behind
        return (0,)

    def _synchronize(self) -> tuple[int]:
        self.over.update(*self._behind.values())
        return (0,)

    def _record(self, event: Any, stream: int) -> tuple[int]:
        with self._lock:
            place = self._asked(stream)
            self._events[event] = place[0], set(self._behind.get(place, ()))
        return (0,)

    def _wait(self, stream: int, event: Any, flags: int) -> tuple[int]:
        with self._lock:
            capture, behind = self._events.get(event, (0, set()))
            if capture and not self._asked(stream)[0]:
                self.captures[stream] = capture  # it joins
            place = self._asked(stream)
            assert place[0] == capture, "what is captured and what runs wait for each other"
            self._behind.setdefault(place, set()).update(behind)
        return (0,)

    def launched(self, stream: int, route: Any) -> None:
        """Fail unless the launch comes after all those of other routes of this rank; a route orders its own."""
        with self._lock:
            place, rank = self._asked(stream), threading.get_ident()
            behind = self._behind.setdefault(place, set())
            if route is not None:
                behind |= self._last.get((route, place[0]), set())
            calls = self._calls.setdefault((rank, place[0]), [])
            others = {call for call, other in calls if route is None or other != route}
            missed = others - behind - self.over
            assert not missed, f"call {len(calls)} on stream {stream} does not follow call {missed}"
            call = (rank, place[0], len(calls))
            calls.append((call, route))
            behind.add(call)
            self._last[route, place[0]] = set(behind)

    @contextmanager
    def capturing(self, stream: int) -> Iterator[None]:
        with self._lock:
            self._made += 1
            capture = self.captures[stream] = self._made
        yield
        with self._lock:
            for each in [each for each, of in self.captures.items() if of == capture]:
                del self.captures[each]


class Stream:
    """A stream that is destroyed with its last reference."""

    def __init__(self, device: Device, handle: int) -> None:
        assert handle not in device.alive
        self.handle, self._device = handle, device
        device.alive.add(handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def __del__(self) -> None:
        self._device.alive.discard(self.handle)
        self._device._behind.pop((0, self.handle), None)


Call = Callable[..., None]
"""Makes two all_reduces on a stream, by different parts of ``auto``."""


@pytest.fixture(params=["nccl", "peer", "auto"])
def run(request, monkeypatch):
    device = Device()
    launching_alone(monkeypatch)
    if request.param == "peer":
        if COMPILER is None:
            pytest.skip("needs a C++ compiler")
        with fake_peer.no_gpus(monkeypatch, 1) as fake:
            device.install(fake.cu)
            fake.load_kernel = lambda *a, **b: Noted(device, HostKernel(*a, **b))
            comm = fake_peer.communicator(ThreadControlPlane(ThreadGroup(1), 0, 20.0))
            yield lambda body: body(comm, device, lambda stream: reduce(comm, stream, 40, 20_000))
        return
    with no_gpu(monkeypatch) as fake:
        device.install(fake.cu)
        note(fake, device, alone=request.param == "nccl")
        if request.param == "nccl":
            comm = alone()
            yield lambda body: body(comm, device, lambda stream: reduce(comm, stream, 40))
        else:
            yield lambda body: test_auto.run(
                lambda comm, log: body(comm, device, lambda stream: reduce(comm, stream, 40, 20_000)), size=1
            )


class Noted:
    """A kernel that tells of its launches."""

    fit = 1
    """Blocks that a multiprocessor holds."""

    def __init__(self, device: Device, kernel: Any) -> None:
        self._device, self._kernel = device, kernel

    def max_active_blocks(self, threads: int) -> int:
        return self.fit

    def bind(self, *arguments: Any, **options: Any) -> Callable[..., None]:
        run = self._kernel.bind(*arguments, **options)

        def launch(stream: Any, *arrays: int) -> None:
            self._device.launched(streams.handle(stream), None)
            run(stream, *arrays)

        return launch


def note(fake: FakeNCCL, device: Device, alone: bool) -> None:
    all_reduce = fake.all_reduce

    def noting(send: int, recv: int, count: int, code: int, op: int, comm: Comm, stream: int) -> None:
        device.launched(stream, "nccl" if alone else comm.group)
        all_reduce(send, recv, count, code, op, comm, stream)

    fake.all_reduce = noting


def reduce(comm: kos.Communicator, stream: Any, *counts: int) -> None:
    for count in counts:
        comm.all_reduce(Array.zeros(count, np.float16, 0), stream=stream)


class Program:
    """Random calls on streams that come and go: eager, captured, asynchronous and in batches."""

    def __init__(self, comm: kos.Communicator, device: Device, call: Call, seed: int) -> None:
        self.comm, self.device, self.call, self.random = comm, device, call, random.Random(seed)
        self.handles = itertools.count(1000)
        self.kept, self.ending = [self.new() for _ in range(3)], list[Stream]()
        self.arrays = [Array.zeros(count, np.float16, 0) for count in (20_000, 20_001, 40, 41)]

    def new(self) -> Stream:
        return Stream(self.device, next(self.handles))

    def stream(self) -> Any:
        """One that is kept, the default one, or one that ends after the call; as an object or a handle."""
        self.ending.append(self.new())
        stream = self.random.choice([*self.kept, self.ending[-1], None])
        return stream if stream is None or self.random.random() < 0.5 else stream.handle

    def eager(self) -> None:
        self.call(self.stream())

    def asynchronous(self) -> None:
        work = self.comm.all_reduce(self.arrays[2], stream=self.stream(), async_op=True)
        if self.random.random() < 0.5:
            work.wait()

    def batch(self) -> None:
        several = [self.stream() for _ in self.arrays]
        with self.comm.batch():
            for x, stream in zip(self.arrays, several, strict=True):
                self.comm.all_reduce(x, stream=stream)

    def capture(self) -> None:
        """Of one stream, which a second joins."""
        first, second = self.random.sample(self.kept, 2)
        with self.device.capturing(first.handle):
            for turn in range(self.random.randrange(1, 4)):
                self.call(self.random.choice([first, first.handle]))
                if turn == 0:
                    self.device._record("fork", first.handle)
                    self.device._wait(second.handle, "fork", 0)
                self.call(self.random.choice([second, second.handle]))
                stream = self.random.choice([first, second])
                self.comm.all_reduce(self.arrays[2], stream=stream, async_op=True).wait()  # which joins the capture

    def replace(self) -> None:
        self.kept[self.random.randrange(3)] = self.new()

    def wait(self) -> None:
        self.random.choice([self.comm.barrier, self.comm.synchronize])()

    def run(self) -> None:
        steps = [self.eager, self.eager, self.asynchronous, self.batch, self.capture, self.replace, self.wait]
        for _ in range(60):
            self.random.choice(steps)()
            self.ending.clear()


@on_each_rank("run")
def test_random_programs(comm, device, call, /, seed):
    """A stream object is kept alive.  A bare handle is not used again, because CUDA may give it to another stream."""
    program = Program(comm, device, call, seed)
    program.run()
    call(None)
    comm.synchronize()
    gc.collect()
    left = {stream.handle for stream in program.kept}
    assert not [each for each in device.alive if each >= 1000 and each not in left], "kept for ever"
    handle = next(program.handles)
    for _ in range(2):
        stream = Stream(device, handle)
        call(handle)
        del stream
    comm.close()


@on_each_rank("run")
def test_a_batch_on_several_streams_beside_many_others(comm, device, call, /):
    """If kos has many streams, it forgets idle ones, but not those of the batch, on which nothing is queued yet."""
    numbers = itertools.count(1000)
    for _ in range(20):  # of which one finds as many streams as are kept
        call(Stream(device, next(numbers)))
        several = [Stream(device, next(numbers)) for _ in range(4)]
        with comm.batch():
            for count, stream in zip((20_000, 40, 20_001, 41), several, strict=True):
                comm.all_reduce(Array.zeros(count, np.float16, 0), stream=stream)


@on_each_rank("run")
def test_a_call_completes_after_its_stream(comm, device, call, /):
    stream = Stream(device, 1000)
    work = comm.all_reduce(Array.zeros(40, np.float16, 0), stream=stream.handle, async_op=True)
    del stream
    assert work.done()
    comm.synchronize()
    assert work.done()


@on_each_rank("run")
def test_few_of_many_streams_are_kept(comm, device, call, /):
    for turn in range(100):
        call(Stream(device, 1000 + turn))
    gc.collect()
    assert len(device.alive - {*CREATED}) < 50
    device.busy.update(range(2000, 2100))
    for turn in range(100):  # whose work goes on
        call(Stream(device, 2000 + turn))
    assert len(device.alive) > 100


@pytest.mark.parametrize("run", ["peer"], indirect=True)
@on_each_rank("run")
def test_communicators_that_do_not_fit_on_one_gpu_run_in_order(comm, device, call, /):
    """Otherwise, two kernels of ``peer`` could each hold a part of the GPU, and different parts on different ranks."""
    other = fake_peer.communicator(ThreadControlPlane(ThreadGroup(1), 0, 20.0))
    first, second = (Stream(device, 1000 + k) for k in range(2))
    device.busy.update((1000, 1001))
    for _ in range(3):
        call(first)
        reduce(other, second.handle, 20_000, 40)
    with device.capturing(first.handle):
        call(first)
        reduce(other, first.handle, 40)
    reduce(other, first.handle, 40)
    call(second)
    device.busy.clear()
    other.close()


@needs_compiler
def test_communicators_that_fit_on_one_gpu_run_concurrently(monkeypatch, follows):
    """Four kernels of 32 blocks each fit on 132 multiprocessors.

    The fifth follows all four, and the first then follows it.
    """
    device, launched = Device(), []
    launching_alone(monkeypatch)
    device.launched = lambda stream, route: launched.append(stream)
    with fake_peer.no_gpus(monkeypatch, 1, multiprocessors=132) as fake:
        device.install(fake.cu)
        fake.load_kernel = lambda *a, **b: Noted(device, HostKernel(*a, **b))
        comms = [fake_peer.communicator(ThreadControlPlane(ThreadGroup(1), 0, 20.0)) for _ in range(5)]
        many = [Stream(device, 1000 + k) for k in range(5)]
        device.busy.update(each.handle for each in many)
        table = Launches(((None, KernelConfig("one_shot", 32)),), ((None, KernelConfig("one_shot", 32)),))
        for comm in comms:
            comm.backend.routes[0].use(table)
        for turn in range(3):
            for comm, stream in zip(comms[:4], many, strict=False):
                reduce(comm, stream, 20_000)
                assert not [pair for pair in follows if len(set(pair)) > 1], turn
        reduce(comms[4], many[4], 20_000)
        assert {pair for pair in follows if len(set(pair)) > 1} == {(1004, 1000 + k) for k in range(4)}
        follows.clear()
        reduce(comms[0], many[0], 20_000)
        assert not [pair for pair in follows if pair == (1000, 1004)], "these two fit"
        assert {(1000, 1001), (1000, 1002), (1000, 1003)} <= set(follows)
        assert len(launched) == 14
        device.busy.clear()
        for comm in comms:
            comm.close()


def test_a_serial_party_follows_its_own_work(fake_device, follows):
    """The kernels of such a backend share memory.  Work in between may be on several streams without an order.

    NCCL orders its kernels on several streams, but a call may queue none on its own stream.
    """
    held, kept = Streams(0), [Stream(fake_device, 1000 + k) for k in range(4)]
    for stream in kept:
        held.hold(stream.handle, stream)
    order = Order(held)
    for route, stream in (("peer", 1000), ("other", 1001), ("other", 1002), ("peer", 1003)):
        order.enter(route, (stream,), route == "peer")
    assert follows == [(1001, 1000), (1002, 1000), (1003, 1001), (1003, 1002), (1003, 1000)]


@needs_compiler
def test_communicators_are_ordered_on_their_gpu(monkeypatch):
    """One of them may be on the legacy stream, which belongs to the current device of the thread."""
    contexts, current, order = Contexts(), list[int](), ConcurrentKernels.order

    def ordered(*given):
        current.append(contexts.stack[-1])
        return order(*given)

    monkeypatch.setattr(ConcurrentKernels, "order", ordered)
    launching_alone(monkeypatch)
    with fake_peer.no_gpus(monkeypatch, 1) as fake:
        contexts.install(fake.cu)
        contexts.stack[0] = 1  # the communicators are on GPU 0
        comms = [fake_peer.communicator(ThreadControlPlane(ThreadGroup(1), 0, 20.0)) for _ in range(2)]
        stream = Stream(Device(), 40)
        for comm in comms:
            reduce(comm, stream, 40, 20_000)  # the second takes more of the GPU, on the same stream
        for comm in comms:
            comm.close()
    assert len(current) > 2 and not any(current)


@pytest.fixture
def fake_device(fake, monkeypatch):
    device = Device()
    device.install(fake.cu)
    return device


@pytest.fixture
def follows(monkeypatch):
    """The streams that were made to follow another, each with that other."""
    pairs = []
    monkeypatch.setattr(Streams, "follow", lambda self, stream, before, capture: pairs.append((stream, before)))
    return pairs


@pytest.mark.parametrize("library", ["that imports an array of kos", "whose array kos imports"])
def test_the_stream_of_a_consumer_waits_for_the_stream_of_a_shared_array(fake_device, library):
    """The consumer's work on the memory runs after the work that the producer has queued on it."""
    fake_device.alive |= {1000, 1001}
    fake_device.launched(1000, "producer")
    if library == "that imports an array of kos":
        Array(256, (4,), np.float32, 0, stream=1000).__dlpack__(stream=1001, max_version=(1, 0))
    else:
        interface = {"shape": (4,), "typestr": "<f4", "data": (0, False), "version": 3, "stream": 1000}
        Array.from_dlpack(SimpleNamespace(__cuda_array_interface__=interface), stream=1001)
    fake_device.launched(1001, "consumer")  # fails unless it follows the producer's work


def test_an_idle_communicator_occupies_no_blocks(fake_device, follows):
    """The second and third communicators do not follow the first one, whose kernels have ended."""
    kernels, device = ConcurrentKernels(), fake_device
    members = [SimpleMember(Stream(device, 1000 + k)) for k in range(3)]
    for each in members:
        kernels.add(each)
    assert [each.exclusive for each in members] == [False] * 3
    for each in members:
        device.busy = {1001, 1002}
        assert kernels.order(each, each.stream.handle, Occupancy(128, 2), 132) == (Occupancy(128, 2), True)
        kernels.launched(each)
    assert not follows
    assert members[0].invalidated == 1
    assert kernels.is_idle(members[0]) and not kernels.is_idle(members[1]) and not kernels.is_idle()
    kernels.order(members[0], 1000, Occupancy(40, 8), 132)
    assert follows == [(1000, 1001), (1000, 1002)]
    assert not kernels.is_idle(members[1]), "in the phase before"
    with device.capturing(1001):
        assert kernels.is_idle(members[1]) and not kernels.is_idle(), "a load within a capture waits for a moment only"
    kernels.remove(members[1]), kernels.remove(members[2])
    assert members[0].exclusive


def test_a_communicator_about_to_launch_keeps_its_blocks(fake_device, follows):
    """It launches in another thread, and its stream is still idle."""
    kernels = ConcurrentKernels()
    first, second = (SimpleMember(Stream(fake_device, 1000 + k)) for k in range(2))
    kernels.order(first, 1000, Occupancy(128, 1), 132)
    kernels.order(second, 1001, Occupancy(128, 1), 132)
    assert follows == [(1001, 1000)]


def test_a_stream_that_may_be_gone_is_not_asked_whether_it_is_captured(fake_device):
    """The program passed only the handle of the stream."""
    kernels, member = ConcurrentKernels(), SimpleMember(Stream(fake_device, 1000))
    member.streams = Streams(0)
    member.streams.hold(1000, 1000)
    kernels.order(member, 1000, Occupancy(1, 1), 132)
    kernels.launched(member)
    fake_device.alive.remove(1000)
    assert kernels.is_idle(member)


class SimpleMember:
    """What ConcurrentKernels knows of a communicator."""

    def __init__(self, stream: Stream) -> None:
        self.streams, self.stream, self.invalidated, self.exclusive = Streams(0), stream, 0, True
        self.streams.hold(stream.handle, stream)

    def invalidate_order(self) -> None:
        self.invalidated += 1

    def set_exclusive(self, exclusive: bool) -> bool:
        changed, self.exclusive = self.exclusive != exclusive, exclusive
        return changed

    def load_copy_kernels(self) -> None:
        pass


@on_each_rank("run")
def test_a_call_that_would_wait_for_a_capture_is_refused(comm, device, call, /):
    """The call follows another one whose stream is being captured, and neither can wait for the other."""
    if comm.backend_name == "nccl":
        return  # which orders its own
    first, second = (Stream(device, 1000 + k) for k in range(2))
    call(first)
    count, x = comm.recorder.count, Array.zeros(40, np.float16, 0)
    with device.capturing(first.handle):
        for start in (
            lambda: call(second),
            lambda: comm.all_reduce(x, stream=second, async_op=True),
            lambda: in_batch(comm, x, second),
        ):
            with pytest.raises(InvalidArgument, match="is being captured now"):
                start()
    assert comm.recorder.count == count, "a refused call was counted"
    call(second)  # the communicator is intact


def in_batch(comm: kos.Communicator, x: Any, stream: Stream) -> None:
    with comm.batch():
        comm.all_reduce(x, stream=stream)


@needs_compiler
def test_a_communicator_that_cannot_be_made_leaves_its_gpu_to_others(monkeypatch):
    """If several communicators use a GPU, each launch of ``peer`` is ordered with the launches of the others."""

    class Broken(PeerBackend):
        name = "z"

        def open(self, backend):
            raise MemoryError("all is used")

    launching_alone(monkeypatch)
    with fake_peer.no_gpus(monkeypatch, 1):
        place = ThreadControlPlane(ThreadGroup(1), 0, 20.0)
        routes = [kind(place, Engine(), 0) for kind in (PeerBackend, Broken)]
        with pytest.raises(MemoryError):
            GPUBackend(place, routes)
        comm = fake_peer.communicator(ThreadControlPlane(ThreadGroup(1), 0, 20.0))
        monkeypatch.setattr(ConcurrentKernels, "order", Mock(side_effect=AssertionError("not alone on its GPU")))
        comm.all_reduce(Array.zeros(40, np.float16, 0))
        comm.close()


@on_each_rank("run")
def test_a_stream_that_its_owner_closed(comm, device, call, /, monkeypatch):
    stream = Stream(device, 1000)
    call(stream)
    device.alive.discard(stream.handle)
    stream.handle = 0
    call(None)
