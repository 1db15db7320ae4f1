"""Calls on GPUs that the compiled core makes equal those that Python makes.

The tests cover what a launch depends on, and what makes the core leave a call to Python. The driver, NCCL and memory
are stand-ins. Kernels of peer run on the host.
"""

import ctypes
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.communicator import Communicator
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.host.host_backend import HostBackend
from kos.comm.host.threads import ThreadTransport
from kos.comm.recorder import SLOTS
from kos.cuda import driver
from kos.errors import CollectiveError, CollectiveTimeout, CudaError
from tests.comm.fake_gpu import Status, captures
from tests.comm.fake_nccl import WAIT, Comm, FakeRanks, Group
from tests.comm.fake_peer import ThreadRanks
from tests.comm.gpu_eager import by, call_during_start, hits, known, on_gpu
from tests.comm.ranks import on_each_rank, on_threads, until
from tests.comm.shared_ranks import needs_core
from tests.fake_cuda import Stream
from tests.host_compiler import needs_compiler

pytestmark = [needs_core, pytest.mark.usefixtures("no_looks")]


@on_each_rank("gpu_run")
def test_a_stream_that_its_owner_closes(comm, /):
    """Its handle becomes that of the legacy stream, for the core as for Python."""
    stream = Stream(40)
    x, y = on_gpu(np.ones(4, np.float32), stream), on_gpu(np.ones(4, np.float32))
    known(comm, x)
    known(comm, y, stream=stream)
    known(comm, x)
    comm.rendezvous.barrier()
    stream.handle = 0
    with by(comm, 0):
        comm.all_reduce(x)
    with by(comm, 0):
        comm.all_reduce(y, stream=stream)


@on_each_rank(FakeRanks(2).run)
def test_graphs_keep_windows(gpu, /, fake):
    """Python makes a captured call, and keeps the memory of windows for the graph."""
    comm = gpu.comm
    x, y = comm.allocate(4, np.float32), comm.allocate(4, np.float32)
    stream = Stream(40)
    known(comm, x, stream=stream)
    with captures() as graph, by(comm, 0):
        comm.all_reduce(x, stream=stream)
    with by(comm, 1):
        comm.all_reduce(x, stream=stream)
    with by(comm, 0):  # in another window
        comm.all_reduce(y, stream=stream)
    graph.destroy()


@on_each_rank(FakeRanks(2).run)
def test_a_captured_call_is_not_cached_for_eager_calls(gpu, /, fake):
    """A captured call is no template for eager calls, whose route may be another one."""
    comm, x, stream = gpu.comm, on_gpu([1.0]), Stream(40)
    known(comm, x)
    with captures(), by(comm, 0):
        for _ in range(3):
            comm.all_reduce(x, stream=stream)
    with by(comm, 0):
        comm.all_reduce(x, stream=stream)
    with by(comm, 1):
        comm.all_reduce(x, stream=stream)


# A communicator of one rank, whose calls are copies.


@on_each_rank("gpu_alone")
def test_a_timeout_names_the_last_call(comm, driver, /):
    x, y = on_gpu([1.0]), on_gpu([0.0])
    comm.all_reduce(x, out=y)
    comm.all_gather(x, y, algorithm="auto")
    comm.all_reduce(x, out=y, deterministic=True)
    driver.bindings.cuStreamQuery = lambda stream: (Status.CUDA_ERROR_NOT_READY,)
    with pytest.raises(CollectiveTimeout, match="all_reduce #2 "):
        comm.synchronize(timeout=0.2)


@on_each_rank("gpu_alone")
def test_groups_of_one_hold_no_descriptors(comm, fake, /):
    before = len(os.listdir("/proc/self/fd"))
    groups = [comm.duplicate() for _ in range(20)]  # whose exchanges may close theirs later
    until(lambda: len(os.listdir("/proc/self/fd")) - before < 20, 60)
    for each in groups:
        assert each.all_reduce(on_gpu([1.0])).numpy().tolist() == [1.0]
        each.close()


@on_each_rank("gpu_alone")
def test_a_thread_without_the_context(comm, fake, /):
    """Python makes the context current."""
    x, y = on_gpu([1.0], Stream(40)), on_gpu([0.0], Stream(40))
    known(comm, x, out=y)
    fake.current = 0
    with by(comm, 0):
        comm.all_reduce(x, out=y)
    fake.current = driver.primary_context(0)
    with by(comm, 1):
        comm.all_reduce(x, out=y)


@on_each_rank("gpu_alone")
def test_a_copy_that_is_refused(comm, fake, /):
    """A call in place makes no copy, and succeeds."""
    x, y = on_gpu([1.0]), on_gpu([0.0])
    known(comm, x)
    known(comm, x, out=y)
    before = fake.launches
    with by(comm, 2):
        comm.all_reduce(x)
        comm.all_reduce(x, out=y)
    assert fake.launches == before + 1
    fake.instead["cuMemcpyDtoDAsync_v2"] = lambda *words: 1
    with pytest.raises(CudaError, match="cuMemcpyDtoDAsync failed: status 1"):
        comm.all_reduce(x, out=y)
    with pytest.raises(CudaError, match="failed before"):
        comm.all_reduce(x, out=y)


# What Python runs within a call.


class Asked(Stream):
    """One that runs a function when it is next asked for its handle."""

    at_ask: Callable[[], Any] | None = None

    def __cuda_stream__(self) -> tuple[int, int]:
        at_ask, self.at_ask = self.at_ask, None
        if at_ask is not None:
            at_ask()
        handle: tuple[int, int] = super().__cuda_stream__()
        return handle


@on_each_rank("gpu_run")
def test_a_stream_that_is_asked_may_have_the_call_forgotten(comm, /):
    stream = Asked(40)
    x = on_gpu(np.ones(4, np.float32), stream)
    known(comm, x)
    stream.at_ask = lambda: setattr(comm, "timeout", 19.0)
    with by(comm, 0):
        comm.all_reduce(x)
    assert stream.at_ask is None


@on_each_rank("gpu_run")
def test_a_call_within_the_record_of_another_is_the_next_one(comm, /):
    """Overwriting an entry of the recorder frees the object that it kept.

    The finalizer of that object makes the call.
    """
    x, y, z = (on_gpu(np.zeros(n, np.float32)) for n in (4, 4, 8))
    known(comm, x)
    known(comm, z)
    said = list[str]()
    code = compile("call(y)", "a line", "exec")
    exec(code, {"call": comm.all_reduce, "y": y})

    def at_end(_):
        try:
            comm.all_reduce(z)
            said.append("made")
        except Exception as error:
            said.append(str(error))

    watcher = weakref.ref(code, at_end)
    del code
    for _ in range(SLOTS - 1):
        comm.all_reduce(x)
    assert watcher() is not None
    comm.all_reduce(x)
    assert watcher() is None and said == ["made"]
    last = [entry["collective_seq_id"] for entry in comm.recorder.entries()[-3:]]
    assert last == sorted(last) and len({*last}) == 3


@on_each_rank("gpu_run")
def test_a_call_within_the_first_one_of_a_signature_is_not_taken_for_it(comm, /):
    """For example, a profile function makes it, through the method of the class, on the same array."""
    x = on_gpu(np.ones(4, np.int32))
    known(comm, on_gpu(np.ones(8, np.int32)), op=kos.ReduceOp.MAX)

    call_during_start(comm, x, "call", lambda: Communicator.all_reduce(comm, x, kos.ReduceOp.MAX))
    for count in range(3):
        assert x.numpy().tolist() == [2 * 2**count] * 4
        comm.all_reduce(x)


@on_each_rank("gpu_run")
def test_whatever_a_launch_depends_on(comm, /):
    """If any of these changes, the core finds what Python would find.

    The core makes the next call after that again.
    """
    x, backend = on_gpu(np.ones(4, np.float32)), comm.backend
    known(comm, x)
    changes = [(backend.shared.streams, "current", backend.shared.streams.NONE)]
    changes.append((backend.shared.streams, "route", object()))
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


@needs_compiler
@on_each_rank(ThreadRanks(2).run)
def test_a_sum_in_rank_order_on_peer(gpu, /, peers):
    """An exchange, and a kernel that adds, on scratch memory."""
    x, terms = on_gpu(np.zeros(4, np.complex64)), np.array([1, 2j, -3, 4 - 1j], np.complex64)
    known(gpu.comm, x)
    x.copy_from(terms * (gpu.comm.rank + 1))
    with by(gpu.comm, 1):
        gpu.comm.all_reduce(x)
    assert (x.numpy() == 3 * terms).all()


@on_each_rank(FakeRanks(2).run)
def test_every_64th_call_compares(gpu, /, fake):
    comm, x = gpu.comm, on_gpu([1.0])
    known(comm, x)
    for _ in range(400):
        comm.all_reduce(x)
    at = comm.backend.shared.calls.core.compare_at
    assert at > 300 and 390 <= hits(comm) <= 403


@on_each_rank("gpu_run")
def test_cached_calls_keep_few_streams(comm, /):
    """A program may create one stream per step.  Streams that are used again are kept."""
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


def test_two_threads_are_found_while_a_launch_blocks(fake, monkeypatch):
    """The core calls ``sem_wait`` in place of NCCL's all_reduce.  The first argument, the array, holds a semaphore."""
    libc, found = ctypes.CDLL(None), threading.Event()
    monkeypatch.setattr(fake, "address_of", lambda operation: ctypes.cast(libc.sem_wait, ctypes.c_void_p).value)
    monkeypatch.setattr(fake, "all_reduce", lambda *_: None)

    def semaphore(value):
        array = on_gpu(np.zeros(4, np.int64))
        libc.sem_init(ctypes.c_void_p(array.pointer), 0, value)
        return array

    def body(gpu):
        comm, x, y = gpu.comm, semaphore(0), semaphore(9)
        known(comm, y)
        comm.rendezvous.barrier()
        if comm.rank == 1:
            assert found.wait(WAIT)
            comm.all_reduce(y)  # the one that the other rank has begun
            comm.all_reduce(y)
            with pytest.raises(CollectiveError, match="two threads"):
                comm.synchronize()
            return
        first = threading.Thread(target=comm.all_reduce, args=(x,), daemon=True)
        first.start()
        try:
            while comm._active is None:
                time.sleep(0.001)
            with pytest.raises(CollectiveError, match=r"two threads call .*all_reduce #4 .* and all_reduce"):
                comm.all_reduce(y)
        finally:
            found.set()
            libc.sem_post(ctypes.c_void_p(x.pointer))
        first.join()

    FakeRanks(2).run(body)


@needs_compiler
def test_of_two_backends_python_orders_each_turn(peers):
    """Deterministic calls use peer, and others use NCCL.

    Python makes the first call after each change of the backend.
    """
    group = Group(2)

    def rank(rendezvous):
        host = HostBackend(rendezvous, ThreadTransport)
        nccl = NCCLBackend(rendezvous, host.engine, 0, Comm(group, rendezvous.rank))
        routes = [nccl, PeerBackend(rendezvous, host.engine, 0)]
        with kos.Communicator(GPUBackend(rendezvous, routes, host), rendezvous, {}, WAIT, host=host) as comm:
            x, ways = on_gpu(np.ones(4, np.float32)), [{}, {"deterministic": True}]
            parts = set()
            for options in ways:
                known(comm, x, **options)
                parts.add(comm.backend.order.route.name)
            assert parts == {"nccl", "peer"}
            for options in (*ways, *ways):
                with by(comm, 0):
                    comm.all_reduce(x, **options)
                with by(comm, 1):
                    comm.all_reduce(x, **options)
            assert comm.all_reduce(np.ones(3)).sum() == 6  # of host memory, by Python

    on_threads(2, rank, WAIT, group.barrier.abort)
