"""Calls on GPUs that the compiled core makes: what a launch depends on, and what ends one.

The driver, NCCL and memory are stand-ins; kernels of peer run on the host.
"""

import ctypes
import gc
import signal
import threading
import time
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest

import kos
from kos import ReduceOp
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.host.host_backend import HostBackend
from kos.comm.host.threads import ThreadTransport
from kos.cuda import driver
from kos.errors import CollectiveError, CollectiveMismatch, CudaError, KosError
from tests.comm.fake_nccl import WAIT, Comm, FakeRanks, Group
from tests.comm.fake_peer import ThreadRanks
from tests.comm.gpu_eager import by, hits, known, on_gpu
from tests.comm.ranks import on_each_rank, on_threads
from tests.comm.shared_ranks import needs_core
from tests.fake_cuda import Stream
from tests.host_compiler import needs_compiler

pytestmark = [needs_core, pytest.mark.usefixtures("no_looks")]


@on_each_rank("gpu_run")
def test_whatever_a_launch_depends_on(comm, /):
    """One by one, the core finds what Python would find; the next call after that is the core's again."""
    x, backend = on_gpu(np.ones(4, np.float32)), comm.backend
    known(comm, x)
    changes = [(backend.shared.streams, "current", backend.shared.streams.NONE)]
    changes.append((backend.shared.streams, "party", object()))
    for where, name, value in changes:
        setattr(where, name, value)
        with by(comm, 0):
            comm.all_reduce(x)
        with by(comm, 1):
            comm.all_reduce(x)
    backend.shared.calls.core.fail(10**6)  # another rank reports that a later call fails
    with by(comm, 0):
        comm.all_reduce(x)
    comm.timeout = 19.0  # the Prepared are other ones
    with by(comm, 0):
        comm.all_reduce(x)


@needs_compiler
@on_each_rank(ThreadRanks(2).run)
def test_other_communicators_leave_too_little_room(gpu, /, peers):
    comm = gpu.comm
    other = comm.duplicate()
    x = on_gpu(np.ones(4, np.float32))
    for _ in range(3):
        other.all_reduce(x)
    known(comm, x)
    room = comm.backend.routes[0]._room
    blocks, per_sm = room
    for less in ((blocks - 1, per_sm), (blocks, per_sm + 1)):
        room[0], room[1] = less
        with by(comm, 0):
            comm.all_reduce(x)
    room[0], room[1] = blocks + 1, per_sm - 1
    with by(comm, 1):
        comm.all_reduce(x)
    other.close()


@needs_compiler
@on_each_rank(ThreadRanks(2).run)
def test_the_legacy_stream_is_that_of_the_current_device(gpu, /, peers):
    comm, x = gpu.comm, on_gpu(np.ones(4, np.float32))
    known(comm, x)
    peers.driver.current += 1
    with by(comm, 0):
        comm.all_reduce(x)
    comm.rendezvous.barrier()
    peers.driver.current -= 1


@on_each_rank(FakeRanks(2).run)
def test_every_64th_call_compares(gpu, /, fake):
    comm, x = gpu.comm, on_gpu([1.0])
    known(comm, x)
    for _ in range(400):
        comm.all_reduce(x)
    at = comm.backend.shared.calls.core.compare_at
    assert at > 300 and 390 <= hits(comm) <= 403
    assert comm.backend.shared._confirmed > 300


def test_calls_that_differ_are_named(fake):
    """The ranks never wait for one another here."""
    fake.all_reduce = lambda *_: None
    failures = []

    def body(gpu):
        comm, x = gpu.comm, on_gpu([1])
        known(comm, x)
        known(comm, x, op=ReduceOp.MAX)
        comm.rendezvous.barrier()

        def call(number):
            comm.all_reduce(x, op=ReduceOp.MAX if number == 50 and comm.rank else ReduceOp.SUM)
            time.sleep(0.001 * (number > 100))  # ranks compare the last 1,024

        with pytest.raises(CollectiveMismatch) as found:
            deque(map(call, range(5000)), 0)
        failures.append(found.value)
        assert hits(comm) > 45

    FakeRanks(2).run(body)
    assert len(failures) == 2
    for error in failures:
        assert "rank 0 called all_reduce #58 of int64[1] by SUM but rank 1 called all_reduce #58" in str(error)


@on_each_rank("gpu_run")
def test_cached_calls_keep_few_streams(comm, /):
    """If a program creates one per step; streams used again are kept."""
    x, alive = on_gpu(np.zeros(4, np.float32)), weakref.WeakSet[Stream]()
    for step in range(60):
        alive.add(stream := Stream(40 + step))
        for _ in range(4):
            comm.all_reduce(x, stream=stream)
        assert hits(comm) > 2 * step
        alive.add(stream := Stream(140 + step))
        y = on_gpu(np.zeros(4, np.float32), stream)
        for _ in range(4):
            comm.all_reduce(y)
    del stream, y
    comm.synchronize()
    gc.collect()
    assert len(alive) < 20
    streams = [Stream(200 + i) for i in range(8)]
    for _ in range(3):
        for each in streams:
            for _ in range(3):
                comm.all_reduce(x, stream=each)
    with by(comm, 16):
        for each in streams:
            for _ in range(3):
                comm.all_reduce(x, stream=each)


def test_a_launch_that_is_refused(fake):
    failed = threading.Event()

    def body(gpu):
        comm, x = gpu.comm, on_gpu([1.0])
        known(comm, x)
        comm.rendezvous.barrier()
        driver.cu.cuMemGetInfo = lambda: (0,)
        fake.driver.instead["all_reduce"] = lambda *words: 1
        before = hits(comm)
        if comm.rank == 1:
            failed.wait(10.0)
            with pytest.raises(KosError):
                comm.all_reduce(x)
            return
        with pytest.raises(CudaError, match=r"all_reduce #4 .*status 1"):
            comm.all_reduce(x)
        failed.set()
        assert hits(comm) == before + 1 and comm._active is None
        with pytest.raises(CudaError, match="failed before"):
            comm.all_reduce(x)
        assert hits(comm) == before + 1

    FakeRanks(2).run(body)


LONG = 100  # seconds


@pytest.fixture
def blocking(fake):
    """An all_reduce by the core is nanosleep: its first address is that of how long it blocks, if no signal comes."""
    nanosleep = ctypes.cast(ctypes.CDLL(None).nanosleep, ctypes.c_void_p).value
    fake.address_of = lambda operation: nanosleep
    fake.all_reduce = lambda *_: None
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield
    signal.signal(signal.SIGUSR1, before)


def end_block(thread: int, over: threading.Event) -> None:
    """Send that thread signals, which end its nanosleep, until its call is over."""
    while not over.wait(0.002):
        signal.pthread_kill(thread, signal.SIGUSR1)


def call_that_blocks(comm: Any, x: Any, over: threading.Event) -> float:
    """The seconds that the call has taken, which a signal has ended."""
    began = time.monotonic()
    try:
        with pytest.raises(KosError):
            comm.all_reduce(x)
    finally:
        over.set()
    return time.monotonic() - began


def call_and_wait(comm: Any, x: Any) -> None:
    comm.all_reduce(x)
    comm.synchronize()


def test_other_threads_run_while_a_launch_blocks(fake, blocking):
    over = threading.Event()

    def body(gpu):
        comm, x, short = gpu.comm, on_gpu(np.array([LONG, 0])), on_gpu(np.array([0, 0]))
        known(comm, short)
        comm.rendezvous.barrier()
        if comm.rank == 1:  # the core leaves calls after another rank's failure to Python
            assert over.wait(LONG)
            with pytest.raises(KosError):
                call_and_wait(comm, short)
            return
        thread = threading.Thread(target=end_block, args=(threading.get_ident(), over))
        thread.start()
        with by(comm, 1):
            assert call_that_blocks(comm, x, over) < LONG
        thread.join()

    FakeRanks(2).run(body)


def test_two_threads_are_found_while_a_launch_blocks(fake, blocking):
    found = threading.Event()

    def body(gpu):
        comm, x, y, over = gpu.comm, on_gpu(np.array([LONG, 0])), on_gpu(np.array([0, 0])), threading.Event()
        known(comm, y)
        comm.rendezvous.barrier()
        if comm.rank == 1:
            assert found.wait(LONG)
            comm.all_reduce(y)  # the one that the other rank has begun
            comm.all_reduce(y)
            with pytest.raises(CollectiveError, match="two threads"):
                comm.synchronize()
            return
        seconds = []
        first = threading.Thread(target=lambda: seconds.append(call_that_blocks(comm, x, over)))
        first.start()
        while comm._active is None:
            time.sleep(0.001)
        with pytest.raises(CollectiveError, match=r"two threads call .*all_reduce #4 .* and all_reduce"):
            comm.all_reduce(y)
        found.set()
        assert first.ident is not None
        end_block(first.ident, over)
        first.join()
        assert seconds[0] < LONG

    FakeRanks(2).run(body)


@needs_compiler
def test_of_two_backends_python_orders_each_turn(peers):
    """Deterministic calls go by peer, others by NCCL."""
    group = Group(2)

    def rank(rendezvous):
        host = HostBackend(rendezvous, ThreadTransport)
        nccl = NCCLBackend(rendezvous, host.engine, 0, Comm(group, rendezvous.rank))
        routes = [nccl, PeerBackend(rendezvous, host.engine, 0)]
        with kos.Communicator(GPUBackend(rendezvous, routes, host), rendezvous, {}, WAIT) as comm:
            x, ways = on_gpu(np.ones(4, np.float32)), [{}, {"deterministic": True}]
            parts = set()
            for options in ways:
                known(comm, x, **options)
                parts.add(comm.backend.order.party.name)
            assert parts == {"nccl", "peer"}
            for options in (*ways, *ways):
                with by(comm, 0):
                    comm.all_reduce(x, **options)
                with by(comm, 1):
                    comm.all_reduce(x, **options)
            assert comm.all_reduce(np.ones(3)).sum() == 6  # of host memory, by Python

    on_threads(2, rank, WAIT, group.barrier.abort)
