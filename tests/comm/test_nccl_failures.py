"""Failures of the nccl backend without a GPU: mismatched or endless calls, and ranks that end or do not arrive."""

import itertools
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.host.shared.segment import PID
from kos.comm.work import Engine
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, CudaError, KosError, RankLost
from kos.memory.array import Array
from kos.memory.windows import WindowMemory
from tests.comm.fake_nccl import Comm, FakeNCCL, FakeRanks, Group, of_nccl
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import ROOT
from tests.launcher import run_program

SIZE = 3

CONTROL: dict[str, Callable[[kos.Communicator], Any]] = {
    "split": lambda comm: comm.split(0),
    "duplicate": lambda comm: comm.duplicate(),
    "allocate of float32[4]": lambda comm: comm.allocate(4, np.float32),
    "allocate of float64[4]": lambda comm: comm.allocate(4, np.float64),
    "all_gather_bytes": lambda comm: comm.all_gather_bytes(b"{"),
}


@pytest.mark.parametrize(("mine", "theirs"), [*itertools.combinations(CONTROL, 2)])
@on_each_rank(FakeRanks(SIZE).run)
def test_calls_of_the_control_plane_that_differ(gpu, /, fake, mine, theirs):
    """All ranks raise the mismatch, and raise it again from the next call of any kind.

    The communicator can still be closed.
    """
    said = f"world: rank 0 called {mine} (exchange N) but rank 1 called {theirs} "
    for call in (CONTROL[theirs if gpu.rank == 1 else mine], CONTROL["split"], lambda comm: comm.barrier()):
        with pytest.raises(CollectiveMismatch, match=re.escape(said).replace("N", r"\d+")):
            call(gpu.comm)


@on_each_rank(FakeRanks(1).run)
def test_a_call_that_does_not_return_ends_in_time(gpu, /, fake):
    """The first call of its kind may wait inside NCCL.  The abort lets it return."""
    aborted = threading.Event()
    fake.all_reduce = lambda *arguments: aborted.wait(20)
    fake.comm_abort = lambda comm: aborted.set()
    x = Array.zeros(5, np.float32, 0)
    message = r"all_reduce #0 of float32\[5\].*not begun by all ranks after 0.1 s"
    with pytest.raises(CollectiveTimeout, match=message):
        gpu.comm.all_reduce(x, kos.PremulSum(2.0), timeout=0.1)
    assert aborted.is_set()
    with pytest.raises(CollectiveError, match="failed before"):
        gpu.comm.all_reduce(x)


EXITS = """
import time, pytest
from tests.comm.fake_nccl import FakeRanks, no_gpu

def abort(comm):
    time.sleep(2)  # longer than the end of a communicator waits for it
    print("aborted", flush=True)

with pytest.MonkeyPatch.context() as patch, no_gpu(patch) as fake:
    fake.comm_abort = abort
    FakeRanks(1).run(lambda gpu: gpu.comm.abort())
    print("exits", flush=True)
"""
LATE = """
import atexit, os, time
from kos.comm.waits import start_in_thread, wait_at_exit

def begin():
    future = start_in_thread(lambda: time.sleep(0.3))
    future.add_done_callback(lambda _: (time.sleep(0.3), print("freed", flush=True)))
    wait_at_exit(future)

{}
"""
BEGINS = {"at the exit": "atexit.register(begin)", "before": "begin()"}
NEVER = """
import os
from kos.comm import waits

for _ in range(500):
    waits.wait_at_exit(waits.Future())
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    waits.EXIT_SECONDS = 0.5  # of all together
else:
    waits.EXIT_SECONDS = 1e6  # what its parent has begun never ends here
print("exits")
"""


def test_a_process_does_not_exit_during_an_abort():
    """At the exit, CUDA and NCCL free what the abort uses: the process would end with SIGSEGV."""
    done = run_program(sys.executable, "-c", EXITS, cwd=ROOT)
    assert (done.returncode, done.stdout.split()) == (0, ["exits", "aborted"]), done.stderr


@pytest.mark.parametrize("begin", BEGINS.values(), ids=BEGINS)
def test_an_exit_waits_for_what_follows_an_abort(begin):
    """Also if an exit handler begins the abort."""
    done = run_program(sys.executable, "-c", LATE.format(begin), cwd=ROOT)
    assert (done.returncode, done.stdout.split()) == (0, ["freed"]), done.stderr


def test_aborts_that_do_not_end_delay_an_exit_once():
    """They do not delay the exit of a process that was forked meanwhile.

    Otherwise this program would reach its time limit.
    """
    done = run_program(sys.executable, "-c", NEVER, cwd=ROOT)
    assert (done.returncode, done.stdout.split()) == (0, ["exits"] * 2), done.stderr


@needs_core
@pytest.mark.parametrize("wrong", [0, 9, 70, 1030, 2047])
@on_each_rank(FakeRanks(SIZE).run)
def test_calls_that_differ_are_reported_later(gpu, /, queued, wrong):
    """No rank waits for the comparison.

    It compares many calls at a time, also where their ring buffer wraps around.
    """
    comm, x, y = gpu.comm, Array.zeros(5, np.float32, 0), Array.zeros(6, np.float32, 0)
    comm.barrier()
    for turn in range(1, wrong + 1):
        comm.all_reduce(x)
        if turn % 512 == 0:
            comm.rendezvous.barrier()  # none is further ahead than calls are kept for
    message = rf"rank [01] called all_reduce #{wrong + 1} .* rank 2 .*: they differ in count 5 against 6"

    def all_reduce():
        comm.all_reduce(y if comm.rank == 2 else x)
        comm.backend.wait_on_host(comm.backend._last, lambda: False, 1e4)  # as on a GPU, where it does not end

    with pytest.raises(CollectiveMismatch, match=message):
        all_reduce()


@on_each_rank(FakeRanks(1).run)
def test_work_that_does_not_end_is_aborted(gpu, /, fake):
    """A failure does not wait for graphs, as NCCL's abort does (commDestroySync in NCCL's init.cc, from 2.26)."""
    graphs_are_gone, notified, abort = threading.Event(), threading.Event(), fake.comm_abort
    fake.comm_abort = lambda comm: (abort(comm), graphs_are_gone.wait(60))
    fake.cu.cuStreamQuery = lambda stream: (600,)
    gpu.comm.on_failure(lambda error: notified.set())
    with gpu.comm.batch() as batch:
        gpu.comm.all_reduce(Array.zeros(5, np.float32, 0))
    work = batch.works[0]
    assert not work.done()
    began = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"all_reduce #0 .* not complete after 0.1 s"):
        work.synchronize(0.1)
    assert notified.wait(10) and time.monotonic() - began < 15
    assert fake.ended == [("abort", 0, 1)]
    with pytest.raises(CollectiveTimeout, match=r"^world: all_reduce #0 [^:]*: not complete after 0.1 s"):  # its own
        work.wait()
    graphs_are_gone.set()


@pytest.mark.parametrize("end", [kos.Communicator.abort, kos.Communicator.shrink])
def test_communicators_split_from_one_that_is_aborted_end_with_it(fake, end):
    """An abort frees memory, for which CUDA waits for the kernels of all communicators.

    Therefore all of them end first.
    """
    running, aborted = [set[Any]() for _ in range(SIZE)], list[tuple[int, bool]]()
    changed = threading.Condition()

    def abort(comm):
        with changed:
            running[comm.rank].discard(comm)
            changed.notify_all()
            aborted.append((comm.rank, changed.wait_for(lambda: not running[comm.rank], 5)))

    fake.comm_abort = abort

    def body(gpu):
        world = gpu.comm
        half = world.duplicate()
        groups = [world, half, half.split(0), world.split(0)]
        running[world.rank].update(each.backend.routes[0]._handle for each in groups)
        world.rendezvous.barrier()
        rest = end(world)
        assert all(each._closed for each in groups)
        if rest is not None:  # the ranks meet anew by their rendezvous
            assert (rest.all_reduce(Array.from_numpy(np.ones(3, np.int32), 0)).numpy() == SIZE).all()
            rest.close()

    FakeRanks(SIZE).run(body)
    assert len(aborted) >= 4 * SIZE and all(alone for _, alone in aborted), aborted


@needs_core
def test_a_rank_that_closed_may_end_while_others_still_wait(queued):
    queued.comm_destroy = lambda comm: None
    closed = threading.Barrier(SIZE)

    def body(gpu):
        comm = gpu.comm
        comm.all_reduce(Array.zeros(5, np.float32, 0))
        calls, last = comm.backend.shared.calls, comm.backend._last
        if comm.rank == 1:
            calls.segment.words[calls.segment.line(1) + PID] = (1 << 22) + 1
            comm.close()
        closed.wait(20)
        if comm.rank == 0:
            until = time.monotonic() + 1.5
            comm.backend.wait_on_host(last, lambda: time.monotonic() > until, 20)

    FakeRanks(SIZE).run(body)


def test_ranks_that_do_not_join_in_time(fake):
    never = threading.Event()
    fake.comm_init_rank_scalable = lambda *arguments: never.wait(1e4) and None
    fake.comm_abort = lambda comm: pytest.fail("there is nothing to abort")

    def body(gpu):
        comm = kos.Communicator(of_nccl(gpu.comm.rendezvous), gpu.comm.rendezvous, {}, 0.1)
        comm.backend.timeout = 0.1
        for _ in range(2):
            with pytest.raises(CollectiveTimeout, match=r"nccl: init: not begun by all ranks after 0.1 s"):
                comm.all_reduce(Array.zeros(3, np.int32, 0))
        comm.backend.abort("enough")  # ends without them

    FakeRanks(SIZE).run(body)
    never.set()


class PendingRanks(threading.Event):
    """NCCL connects ranks only once this event is set.  The communicator must then be ended."""

    def __init__(self, fake: FakeNCCL) -> None:
        super().__init__()
        self._ended: queue.Queue[Any] = queue.Queue()
        fake.comm_init_rank_scalable = fake.comm_split = lambda *arguments: self.wait(20) and "late"
        fake.comm_abort = self._ended.put

    def is_ended(self) -> bool:
        return self._ended.get(timeout=20) == "late"


@pytest.fixture
def late(fake):
    return PendingRanks(fake)


@pytest.fixture
def alone():
    return ThreadControlPlane(ThreadGroup(1), 0, 20.0)


def test_an_nccl_communicator_that_is_ready_after_an_abort_is_not_used(late, alone):
    """The communicator of NCCL is ended instead.  Otherwise its memory would be kept until the process ends."""
    backend = of_nccl(alone)
    nccl = backend.routes[0]
    begun = nccl._begin(lambda: nccl._comm, "a first message")
    with pytest.raises(CollectiveTimeout):
        nccl._finish(begun, "a first message", 0.1)
    backend.abort_device("a test")
    late.set()
    assert nccl._finish(begun, "a first message", 20) is nccl._comm is None
    assert late.is_ended()


@pytest.mark.parametrize("end", ["of the start", "of a communicator that nothing needed"])
def test_a_communicator_that_the_ranks_join_too_late_is_ended(end, late, alone, caplog):
    class WithoutMemory(NCCLBackend):
        def open(self, backend):
            raise CudaError("no memory")

    if end == "of the start":
        with pytest.raises(CudaError, match="no memory"):
            GPUBackend(alone, [WithoutMemory(alone, Engine(), 0)])
    else:
        backend = of_nccl(alone)
        backend.timeout = 0.1
        backend.close()
        assert "rank 0: nccl: init: not begun by all ranks after 0.1 s" in caplog.text
    late.set()
    assert late.is_ended()


def test_a_failure_ends_the_wait_for_the_connection(late, alone):
    backend = of_nccl(alone)
    backend.failures.first = CollectiveError("rank 1 is gone")
    with pytest.raises(CollectiveError, match="rank 1 is gone"):
        backend.routes[0].connect()
    backend.abort("the end of the test")
    late.set()
    assert late.is_ended()


def test_a_split_that_ends_too_late_is_ended(fake, late, alone):
    backend = of_nccl(alone, Comm(Group(1), 0))
    assert backend.allocate(4, np.float32) is not None  # the array is gone, but other ranks may use the window
    backend.timeout = 0.1
    with pytest.raises(CollectiveTimeout, match="nccl: init"):
        backend.split(alone, 0, 0, None)
    late.set()
    assert late.is_ended()
    for thread in threading.enumerate():
        if thread.name == "nccl: abort":
            thread.join(20)
    assert [what for what, _ in fake.windows] == ["register"]


def test_a_close_completes_although_a_step_of_it_fails(fake, alone):
    log = list[str]()

    def deregister(comm, window):
        raise CollectiveError("window")

    def destroy(comm):
        log.append("destroyed")
        raise CollectiveError("destroy")

    free = lambda pointer: log.append(str(pointer))  # noqa: E731
    for name, function in (("comm_window_deregister", deregister), ("comm_destroy", destroy), ("mem_free", free)):
        setattr(fake, name, function)
    backend = of_nccl(alone)
    nccl = backend.routes[0]
    assert nccl._comm is not None
    nccl._token.close = lambda: log.append("freed")
    for number in range(2):
        nccl._windows.memories[number] = WindowMemory(number, 1, "window")
        nccl._windows.release(number)
    with pytest.raises(CollectiveError, match="destroy") as caught:
        backend.close()
    assert str(caught.value.__context__) == "window"
    assert log == ["0", "destroyed", "1", "freed"] and nccl._comm is None


@on_each_rank(FakeRanks(1).run)
def test_errors_of_nccl_are_errors_of_kos(gpu, /, fake):
    status = 6

    def broken(*arguments):
        raise fake.NCCLError(status)

    fake.all_reduce = broken
    for name in ("mem_alloc", "comm_window_register"):
        setattr(fake, name, broken)
    with pytest.raises(RankLost, match=r"^nccl: allocate 2,000 bytes: NCCL 2.28.9: status 6"):
        gpu.comm.allocate(1000, np.int16)
    fake.mem_alloc = lambda nbytes: 4096
    with pytest.raises(RankLost, match=r"^nccl: window: NCCL 2.28.9: status 6"):
        gpu.comm.allocate(1000, np.int16)
    status = 1
    with pytest.raises(CudaError, match=r"^nccl: window: NCCL 2.28.9"):
        gpu.comm.allocate(1000, np.int16)
    status = 6
    with pytest.raises(RankLost, match=r"all_reduce #0 .*NCCL 2.28.9: status 6"):
        gpu.comm.all_reduce(Array.zeros(3, np.float32, 0), kos.PremulSum(2.0))


@needs_core
@pytest.mark.parametrize("status", [2, 3, 6])  # what NCCL reports if a rank dies while it starts
def test_an_error_of_nccl_is_explained_by_the_rank_that_is_gone(status, fake):
    worlds = {}

    def split(comm, *arguments):
        if comm.rank == 1:
            worlds[1].abort(reason="it had enough")
        raise fake.NCCLError(status)

    fake.comm_split = split

    def body(gpu):
        worlds[gpu.rank] = gpu.comm
        with pytest.raises(KosError) as caught:
            gpu.comm.duplicate()
        if gpu.rank == 0:
            assert type(caught.value) is RankLost and caught.value.ranks == (1,), caught.value
            assert "it had enough" in str(caught.value)
            gpu.comm.abort()

    FakeRanks(2).run(body)
