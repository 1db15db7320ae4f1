"""The nccl backend's own work, without a GPU: see ``fake_nccl``.  The same conformance suite, ranks as threads."""

from __future__ import annotations

import gc
import itertools
import re
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.gpu import memory, nccl_binding, works
from kos.comm.gpu.memory import Windows
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.host.shared.segment import PID
from kos.comm.operation import Call, Operation
from kos.comm.rendezvous.threads import ThreadGroup, ThreadRendezvous
from kos.cuda import driver
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, CudaError, InvalidArgument, RankLost
from kos.memory.array import Array
from kos.memory.windows import WindowMemory
from tests.comm.fake_nccl import FakeNCCL, FakeRanks, Group, Memory, captures, communicator
from tests.comm.ranks import on_each_rank
from tests.comm.test_conformance import *  # noqa: F403 -- the tests that GPUs run too
from tests.comm.test_nccl import (  # noqa: F401 -- collected here
    test_batch_and_persistent,
    test_deterministic_is_in_rank_order,
    test_messages,
    test_minimum_keeps_nan,
    test_several_communicators,
)

SIZE = 3


@pytest.fixture
def ranks(fake: FakeNCCL) -> FakeRanks:
    return FakeRanks(SIZE)


@on_each_rank(FakeRanks(SIZE).run)
def test_one_address_as_several_dtypes(gpu: Any, /, fake: FakeNCCL) -> None:
    """Launches are kept by address: those of another dtype are others."""
    comm, n = gpu.comm, gpu.size
    x, out = Array.zeros(32, np.uint8, 0), Array.zeros(32 * n, np.uint8, 0)
    for _ in range(2):  # met first, then kept
        for dtype in (np.float64, np.float32, np.int8):
            source, target = (Array(a.pointer, (k,), dtype, 0) for a, k in ((x, 2), (out, 2 * n)))
            source.copy_from(np.full(2, comm.rank + 1, dtype))
            out.fill_bytes(255)
            got = comm.all_gather(source, target).numpy()
            assert got.tolist() == [float(r + 1) for r in range(n) for _ in range(2)]
            rest = out.numpy()[got.nbytes :]
            assert (rest == 255).all(), f"wrote beyond {got.nbytes} bytes of {got.dtype}"


def test_batch_is_one_group(fake: FakeNCCL) -> None:
    def body(gpu: Any) -> None:
        xs = [Array.zeros(5, np.float32, 0) for _ in range(4)]
        with gpu.comm.batch():
            for x in xs:
                gpu.comm.all_reduce(x)
        if gpu.rank == 0:
            groups.append(fake.groups)

    groups: list[int] = []
    FakeRanks(1).run(body)
    assert groups == [1]


CONTROL: dict[str, Callable[[kos.Communicator], Any]] = {
    "split": lambda comm: comm.split(0),
    "duplicate": lambda comm: comm.duplicate(),
    "allocate of float32[4]": lambda comm: comm.allocate(4, np.float32),
    "allocate of float64[4]": lambda comm: comm.allocate(4, np.float64),
    "all_gather_bytes": lambda comm: comm.all_gather_bytes(b"{"),
}


@pytest.mark.parametrize(("mine", "theirs"), [*itertools.combinations(CONTROL, 2)])
@on_each_rank(FakeRanks(SIZE).run)
def test_calls_of_the_control_plane_that_differ(gpu: Any, /, fake: FakeNCCL, mine: str, theirs: str) -> None:
    """All ranks raise it, and again from the next call, of whatever kind; closing still ends."""
    said = f"world: rank 0 called {mine} (exchange N) but rank 1 called {theirs} "
    for call in (CONTROL[theirs if gpu.rank == 1 else mine], CONTROL["split"], lambda comm: comm.barrier()):
        with pytest.raises(CollectiveMismatch, match=re.escape(said).replace("N", r"\d+")):
            call(gpu.comm)


def test_only_the_first_batch_of_its_kind_may_wait(fake: FakeNCCL) -> None:
    """A thread that may be left behind costs more than the launch."""
    bounded: list[str] = []

    def body(gpu: Any) -> None:
        comm, xs = gpu.comm, [Array.zeros(5, np.float32, 0) for _ in range(4)]
        usual = comm.backend.bounded
        comm.backend.bounded = lambda run, timeout, what: (bounded.append(what), usual(run, timeout, what))[1]
        for count in (2, 2, 3, 2, 3):
            with comm.batch():
                for x in xs[:count]:
                    comm.all_reduce(x)
        assert [what[:19] for what in bounded] == ["world: all_reduce #"] * 2

    FakeRanks(1).run(body)


def test_the_first_message_to_each_peer_may_wait(fake: FakeNCCL) -> None:
    """NCCL connects two ranks when one first sends to the other, whatever that has sent elsewhere."""
    met: list[int] = []

    def body(gpu: Any) -> None:
        comm, x, y = gpu.comm, Array.zeros(5, np.float32, 0), Array.zeros(5, np.float32, 0)
        bounded, usual = [], comm.backend.bounded
        comm.backend.bounded = lambda run, timeout, what: (bounded.append(what), usual(run, timeout, what))[1]
        for step in (1, 2, 1, 2):
            comm.send_recv(x, y, (comm.rank + step) % 3, (comm.rank - step) % 3)
        met.append(len(bounded))

    FakeRanks(3).run(body)
    assert met == [2, 2, 2]


def test_a_call_that_does_not_return_ends_in_time(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of its kind may wait inside NCCL; the abort lets it return."""
    aborted = threading.Event()
    monkeypatch.setattr(fake, "all_reduce", lambda *arguments: aborted.wait(20))
    monkeypatch.setattr(fake, "comm_abort", lambda comm: aborted.set())

    def body(gpu: Any) -> None:
        x = Array.zeros(5, np.float32, 0)
        message = r"all_reduce #0 of float32\[5\].*not begun by all ranks after 0.1 s"
        with pytest.raises(CollectiveTimeout, match=message):
            gpu.comm.all_reduce(x, timeout=0.1)
        assert aborted.is_set()
        with pytest.raises(CollectiveError, match="failed before"):
            gpu.comm.all_reduce(x)

    FakeRanks(1).run(body)


@pytest.mark.parametrize("wrong", [0, 9, 70, 1030, 2047])
def test_calls_that_differ_are_told_later(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """Nobody waits for the comparison, which is of many calls at a time, and wherever their ring wraps."""
    monkeypatch.setattr(fake, "all_reduce", lambda *arguments: None)

    def body(gpu: Any) -> None:
        comm, x, y = gpu.comm, Array.zeros(5, np.float32, 0), Array.zeros(6, np.float32, 0)
        comm.barrier()
        for turn in range(1, wrong + 1):
            comm.all_reduce(x)
            if turn % 512 == 0:
                comm.rendezvous.barrier()  # none is further ahead than calls are kept for
        message = rf"rank [01] called all_reduce #{wrong + 1} .* rank 2 .*: they differ in count 5 against 6"

        def all_reduce() -> None:
            comm.all_reduce(y if comm.rank == 2 else x)
            comm.backend.wait_on_host(comm.backend._last, lambda: False, 1e4)  # as on a GPU, where it does not end

        with pytest.raises(CollectiveMismatch, match=message):
            all_reduce()

    FakeRanks(SIZE).run(body)


def test_one_rank_may_run_far_ahead(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    """What neither side has on record any more is not compared."""
    monkeypatch.setattr(fake, "all_reduce", lambda *arguments: None)

    def body(gpu: Any) -> None:
        comm, xs = gpu.comm, [Array.zeros(count, np.float32, 0) for count in (5, 6, 7)]
        for _ in range(2):
            if comm.rank:
                comm.rendezvous.barrier()
            for turn in range(2500):  # no multiple of 3 is a power of two
                comm.all_reduce(xs[turn % 3])
            if not comm.rank:
                comm.rendezvous.barrier()
        comm.synchronize()

    FakeRanks(SIZE).run(body)


def test_work_that_does_not_end_is_aborted(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.cu, "cuStreamQuery", lambda stream: (600,))

    def body(gpu: Any) -> None:
        x = Array.zeros(5, np.float32, 0)
        work = gpu.comm.all_reduce_init(x).start()
        assert not work.done()
        with pytest.raises(CollectiveTimeout, match=r"all_reduce #0 .* not complete after 0.1 s"):
            work.synchronize(0.1)
        assert fake.ended == [("abort", 0, 1)]
        with pytest.raises(CollectiveError, match="all_reduce #0.* failed"):
            work.wait()

    FakeRanks(1).run(body)


def test_a_failure_that_all_know_does_not_keep_nccl_from_ending(
    fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "all_reduce", lambda *arguments: None)
    revoke = fake.comm_revoke
    monkeypatch.setattr(fake, "comm_revoke", lambda *of: (time.sleep(0.1), revoke(*of)))  # as long as it may take

    def body(gpu: Any) -> None:
        comm = gpu.comm
        comm.all_reduce(Array.zeros(5 + (comm.rank == 2), np.float32, 0))
        with pytest.raises(CollectiveMismatch):
            comm.backend.wait_on_host(comm.backend._last, lambda: False, 20)
        assert ("revoke", comm.rank, SIZE) in fake.ended and comm.backend._revoked is not None

    FakeRanks(SIZE).run(body)


@pytest.mark.parametrize("version", [22700, 22809], ids=["abort", "revoke"])
@pytest.mark.parametrize("end", [kos.Communicator.abort, kos.Communicator.shrink])
def test_communicators_split_from_one_that_is_aborted_end_with_it(
    fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch, version: int, end: Callable[[kos.Communicator], Any]
) -> None:
    """An abort frees memory, and CUDA waits there for the kernels of all communicators: all of them end first."""
    running, aborted = [set[Any]() for _ in range(SIZE)], list[tuple[int, bool]]()
    changed = threading.Condition()

    def stop(comm: Any, *flags: int) -> None:
        with changed:
            running[comm.rank].discard(comm)
            changed.notify_all()

    def abort(comm: Any) -> None:
        stop(comm)
        with changed:
            aborted.append((comm.rank, changed.wait_for(lambda: not running[comm.rank], 5)))

    monkeypatch.setattr(fake, "get_version", lambda: version)
    monkeypatch.setattr(fake, "comm_revoke", stop)
    monkeypatch.setattr(fake, "comm_abort", abort)

    def body(gpu: Any) -> None:
        world = gpu.comm
        half = world.duplicate()
        groups = [world, half, half.split(0), world.split(0)]
        running[world.rank].update(each.backend._handle for each in groups)
        world.rendezvous.barrier()
        end(world)
        assert all(each._closed for each in groups)

    FakeRanks(SIZE).run(body)
    revoked = end is kos.Communicator.shrink and version == 22809  # the survivors' own, which may serve again
    assert len(aborted) >= (3 if revoked else 4) * SIZE and all(alone for _, alone in aborted), aborted


def test_scratch_memory_does_not_grow_with_the_streams(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no graph can hold is free when the host has waited for all."""
    monkeypatch.setattr(memory, "capture_of", lambda stream: stream == 7)

    def body(gpu: Any) -> None:
        comm, x = gpu.comm, Array.zeros(5, np.int16, 0)
        for stream in range(5, 25):
            comm.all_reduce(x, stream=stream)
        comm.all_reduce(Array.zeros(1 << 20, np.int16, 0), stream=24)
        pieces = [piece for each in comm.backend._scratch._pieces.values() for piece in each]
        assert len(pieces) == 21
        comm.synchronize()
        assert {stream: len(each) for stream, each in comm.backend._scratch._pieces.items()} == {7: 1, 24: 1}
        assert sum(piece.closed for piece in pieces) == 19
        comm.all_reduce(x, stream=7)
        comm.all_reduce(x, stream=5)

    FakeRanks(2).run(body)


@pytest.mark.parametrize("how", ["abort", "killed"])
def test_a_rank_that_goes_after_it_queued_what_others_wait_for(
    fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It has begun all that they have: that the GPU does not end is all that they see of it."""
    monkeypatch.setattr(fake, "all_reduce", lambda *arguments: None)

    def body(gpu: Any) -> None:
        comm = gpu.comm
        comm.all_reduce(Array.zeros(5, np.float32, 0))
        comm.rendezvous.barrier()
        calls, last = comm.backend.shared.calls, comm.backend._last
        if comm.rank == 1:
            if how == "abort":
                comm.abort(reason="ZeroDivisionError: boom")
            else:
                calls.segment.words[calls.segment.layout.line(1) + PID] = (1 << 22) + 1  # no process has it
                comm._closed = True
            return
        why = "ZeroDivisionError: boom" if how == "abort" else "its process ended"
        with pytest.raises(RankLost, match=f"rank 1 is gone: {why}"):
            comm.backend.wait_on_host(last, lambda: False, 1e4)

    FakeRanks(SIZE).run(body)


def test_a_rank_that_closed_may_end_while_others_still_wait(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "all_reduce", lambda *arguments: None)
    monkeypatch.setattr(fake, "comm_destroy", lambda comm: None)
    closed = threading.Barrier(SIZE)

    def body(gpu: Any) -> None:
        comm = gpu.comm
        comm.all_reduce(Array.zeros(5, np.float32, 0))
        calls, last = comm.backend.shared.calls, comm.backend._last
        if comm.rank == 1:
            calls.segment.words[calls.segment.layout.line(1) + PID] = (1 << 22) + 1
            comm.close()
        closed.wait(20)
        if comm.rank == 0:
            until = time.monotonic() + 1.5
            comm.backend.wait_on_host(last, lambda: time.monotonic() > until, 20)

    FakeRanks(SIZE).run(body)


@pytest.mark.parametrize("how", ["by NCCL", "too old", "NCCL fails", "one was aborted"])
def test_ranks_that_are_left_go_on(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """By NCCL's own shrink where that is possible on all ranks, else they meet anew by their rendezvous."""
    whole, shrink = threading.Event(), fake.comm_shrink
    if how == "too old":
        monkeypatch.setattr(fake, "get_version", lambda: 22806)

    def shrunk(comm: Any, excluded: list[int], count: int, options: dict[str, Any], flags: int) -> Any:
        assert excluded == [1] and options == {}
        if how == "NCCL fails" and comm.rank == 2:
            raise CollectiveError("no")
        return shrink(comm, excluded, count, options, flags)

    monkeypatch.setattr(fake, "comm_shrink", shrunk)

    def body(gpu: Any) -> None:
        comm = gpu.comm
        group = comm.backend._comm.group
        comm.all_reduce(Array.zeros(3, np.int32, 0))
        comm.rendezvous.barrier()
        if comm.rank == 1:
            comm.backend.unwatch()  # as its process is dead
            comm.rendezvous.threads.world.end(1, "it is dead")
            whole.wait(20)
            comm._closed = True
            return
        if how == "one was aborted" and comm.rank == 2:
            comm.backend._shrinkable = False
        rest = comm.shrink()
        assert rest.size == 2 and rest.rank == comm.rank // 2
        assert (rest.backend._comm.group is group.children.get("shrunk")) == (how == "by NCCL")
        x = Array.from_numpy(np.full(3, comm.rank + 1, np.int32), 0)
        assert (rest.all_reduce(x).numpy() == 4).all()
        assert rest.all_gather(Array.zeros(2, np.int8, 0)).shape == (2, 2)
        rest.close()
        whole.set()

    FakeRanks(SIZE).run(body)
    aborts = sorted(of for what, *of in fake.ended if what == "abort")
    assert aborts == [[0, 2]] * (how == "NCCL fails") + [[0, 3], [2, 3]], "something was left"
    revokes = {"too old": [], "one was aborted": [0]}.get(how, [0, 2])
    assert sorted(rank for what, rank, _ in fake.ended if what == "revoke") == revokes


def test_the_first_call_waits_until_all_have_joined(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL meets beside what the ranks do next."""
    may_join, join = threading.Event(), nccl_binding.join
    monkeypatch.setattr(nccl_binding, "join", lambda *arguments: may_join.wait(20) and join(*arguments))

    def body(gpu: Any) -> None:
        comm = kos.Communicator(NCCLBackend(gpu.comm.rendezvous, 0), gpu.comm.rendezvous, {}, 20)
        comm.backend.inspect(Call(Operation("a test", 0)))
        comm.rendezvous.barrier()  # all are here, and none has joined
        may_join.set()
        x = Array.from_numpy(np.full(3, comm.rank + 1, np.int32), 0)
        assert (comm.all_reduce(x).numpy() == SIZE * (SIZE + 1) // 2).all()
        comm.backend.close()

    FakeRanks(SIZE).run(body)


def test_ranks_that_do_not_join_in_time(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(nccl_binding, "join", lambda *arguments: never.wait(1e4))
    monkeypatch.setattr(fake, "comm_abort", lambda comm: pytest.fail("there is nothing to abort"))

    def body(gpu: Any) -> None:
        comm = kos.Communicator(NCCLBackend(gpu.comm.rendezvous, 0), gpu.comm.rendezvous, {}, 0.1)
        comm.backend.timeout = 0.1
        for _ in range(2):
            with pytest.raises(CollectiveTimeout, match=r"nccl: init: not begun by all ranks after 0.1 s"):
                comm.all_reduce(Array.zeros(3, np.int32, 0))
        comm.backend.abort("enough")  # ends without them

    FakeRanks(SIZE).run(body)
    never.set()


def test_who_joins_after_the_end_is_not_used(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    joins = threading.Event()
    monkeypatch.setattr(nccl_binding, "join", lambda *arguments: joins.wait(20) and "late")
    backend = NCCLBackend(ThreadRendezvous(ThreadGroup(1), 0, 20.0), 0)
    waits = works.on_thread(lambda: backend._comm, "a first message", 0, backend.check_others)
    with pytest.raises(CollectiveTimeout):
        waits(0.1)
    backend.abort_device()
    joins.set()
    assert waits(20) is backend._comm is None


def test_a_communicator_that_nothing_needed_is_closed_without_it(
    fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl_binding, "join", lambda *arguments: time.sleep(0.5))
    backend = NCCLBackend(ThreadRendezvous(ThreadGroup(1), 0, 20.0), 0)
    backend.timeout = 0.1
    backend.close()
    assert "rank 0: nccl: init: not begun by all ranks after 0.1 s" in caplog.text


def test_windows_wait_until_all_have_joined(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_binding, "join", lambda *arguments: 1 // 0)
    monkeypatch.setattr(fake, "mem_alloc", lambda nbytes: pytest.fail("nobody frees it"))
    backend = NCCLBackend(ThreadRendezvous(ThreadGroup(1), 0, 20.0), 0)
    with pytest.raises(ZeroDivisionError):
        backend.allocate(3, np.int32)


def test_a_window_outlives_the_calls_that_use_it(fake: FakeNCCL) -> None:
    """Its array is gone as soon as a call is queued: the next ``allocate`` waits, and frees it, or the end does."""
    log, over = fake.windows, list[int]()

    def query(stream: int) -> tuple[int]:
        log.append(("looked", stream))
        return (over.pop() if over else 0,)

    driver.cu.cuStreamQuery = query
    comm = communicator(ThreadRendezvous(ThreadGroup(1), 0, 20.0), Group(1))
    x, lives_on = comm.allocate(5, np.float32), comm.allocate(5, np.float32)
    first, last = x.pointer, lives_on.pointer
    comm.all_reduce(x)
    comm.all_reduce(lives_on)  # or the last operation keeps its array
    log.clear()
    del x
    assert not log, "freed behind a call that has not run"
    over.append(driver.cu.CUresult.CUDA_ERROR_NOT_READY)
    y = comm.allocate(6, np.float32)
    second = y.pointer
    assert [what for what, _ in log] == ["looked", "looked", "deregister", "free", "register"]
    assert {address for _, address in log[2:4]} == {first}
    del y, log[:]
    comm.close()
    assert log == [("deregister", second), ("free", second)]
    del lives_on
    assert log[2:] == [], "the last operation has it"
    comm.backend._last = None
    assert log[2:] == [("free", last)]


@on_each_rank("ranks.run")
def test_sizes_do_not_travel_in_a_graph(gpu: Any, /) -> None:
    """Refused before anything is sent; outside of it the rendezvous carries them."""
    comm, n = gpu.comm, gpu.comm.size
    x = Array.from_numpy(np.full(comm.rank, comm.rank, np.float32), 0)
    with captures(), pytest.raises(InvalidArgument, match="^counts: expected numbers while a CUDA graph is capt"):
        comm.all_gather_v(x, stream=5)
    assert comm.all_gather_v(x).numpy().tolist() == [rank for rank in range(n) for _ in range(rank)]
    work = comm.gather_v(x, root=1, async_op=True)
    assert (work.wait() is None) == (comm.rank != 1)


@on_each_rank("ranks.run")
def test_a_window_outlives_the_graphs_that_captured_it(gpu: Any, /, fake: FakeNCCL) -> None:
    """Its array is gone and the graph is not, on one rank or on all: its memory is freed when all graphs are gone."""
    comm = gpu.comm
    x, other = comm.allocate(5, np.float32), comm.allocate(5, np.float32)
    x.stream = 5
    comm.broadcast(other, 0)  # the first connects, on another thread
    with captures() as graph:
        comm.broadcast(x, 0)
        comm.broadcast(x, 0)
    comm.broadcast(other, 0)  # or the last operation keeps its array
    pointer = x.pointer
    del x
    comm.allocate(1, np.float32)
    assert ("free", pointer) not in fake.windows
    if comm.rank == 1:
        graph.destroy()
    comm.allocate(1, np.float32)
    assert ("free", pointer) not in fake.windows, "other ranks' graphs reach it"
    if comm.rank != 1:
        graph.destroy()
    comm.allocate(1, np.float32)
    assert fake.windows.count(("free", pointer)) == 1


def test_addresses_of_a_freed_window_never_come_back(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[Any]()
    cu = SimpleNamespace(
        cuMemRetainAllocationHandle=lambda pointer: (0, "handle"),
        cuMemGetAddressRange=lambda pointer: (0, pointer, 64),
        cuMemUnmap=lambda *what: log.append(what) or (0,), cuMemRelease=lambda what: log.append(what) or (0,),
    )  # fmt: skip
    monkeypatch.setattr(nccl_binding, "cu", cu)
    fake.mem_free = log.append
    nccl_binding.free(4096)
    assert log == [(4096, 64), "handle", "handle"]
    cu.cuMemRetainAllocationHandle = lambda pointer: (1, None)
    nccl_binding.free(4096)
    assert log[3:] == [4096], "NCCL had it from cudaMalloc"


def test_what_fails_of_an_end_leaves_none_of_the_rest_undone(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[str]()

    def deregister(comm: Any, window: Any) -> None:
        raise CollectiveError("window")

    def destroy(comm: Any) -> None:
        log.append("destroyed")
        raise CollectiveError("destroy")

    free = lambda pointer: log.append(str(pointer))  # noqa: E731
    for name, function in (("deregister", deregister), ("destroy", destroy), ("free", free)):
        monkeypatch.setattr(nccl_binding, name, function)
    backend = NCCLBackend(ThreadRendezvous(ThreadGroup(1), 0, 20.0), 0)
    assert backend._comm is not None
    monkeypatch.setattr(backend._token, "close", lambda: log.append("freed"))
    for number in range(2):
        backend._windows.memories[number] = WindowMemory(number, 1, "window")
        backend._windows.release(number, number)
    with pytest.raises(CollectiveError, match="destroy") as caught:
        backend.close()
    assert str(caught.value.__context__) == "window"
    assert log == ["0", "destroyed", "1", "freed"] and backend._comm is None


def test_a_window_that_is_collected_while_others_are_freed(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its release frees all that are unused: those too that are about to be."""
    freed = []

    def free(memory: WindowMemory) -> None:
        freed.append(memory.pointer)
        if len(freed) == 1:
            windows.release(3, 3)

    rendezvous = ThreadRendezvous(ThreadGroup(1), 0, 20.0)
    windows = Windows(rendezvous, 0, free, lambda: len(freed) > 0)
    windows.memories = {number: WindowMemory(number, 1, "window") for number in (1, 2, 3)}
    windows.release(1, 1)
    windows.release(2, 2)
    windows.free(windows.unused())
    assert sorted(freed) == [1, 2, 3] and not windows.memories and not windows.unused()


def test_errors_of_nccl_are_errors_of_kos(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    class NCCLError(Exception):
        status = 6

    def broken(*arguments: Any) -> None:
        raise NCCLError("RemoteError (6)")

    monkeypatch.setattr(fake, "broadcast", broken)
    for name in ("mem_alloc", "comm_window_register"):
        monkeypatch.setattr(fake, name, broken, raising=False)

    def body(gpu: Any) -> None:
        with pytest.raises(RankLost, match=r"^nccl: allocate 2,000 bytes: NCCL 2.28.9: RemoteError"):
            gpu.comm.allocate(1000, np.int16)
        monkeypatch.setattr(fake, "mem_alloc", lambda nbytes: 4096)
        with pytest.raises(RankLost, match=r"^nccl: window: NCCL 2.28.9: RemoteError"):
            gpu.comm.allocate(1000, np.int16)
        monkeypatch.setattr(NCCLError, "status", 1)
        with pytest.raises(CudaError, match=r"^nccl: window: NCCL 2.28.9"):
            gpu.comm.allocate(1000, np.int16)
        monkeypatch.setattr(NCCLError, "status", 6)
        with pytest.raises(RankLost, match=r"broadcast #0 .*NCCL 2.28.9: RemoteError"):
            gpu.comm.broadcast(Array.zeros(3, np.int8, 0))

    FakeRanks(1).run(body)


@on_each_rank(FakeRanks(1).run)
def test_scratch_grows_and_stays(gpu: Any, /, fake: FakeNCCL) -> None:
    backend = gpu.comm.backend
    small = backend.scratch(10, 1)
    assert backend.scratch(1 << 20, 1) == small
    large = backend.scratch(3 << 20, 1)
    assert large != small and backend.scratch(5, 1) == large
    assert backend.scratch(5, 2) not in (small, large), "streams share scratch"
    kept = backend._scratch._pieces[1]
    assert not kept[0].closed, "a graph may use it"
    gpu.comm.close()
    assert kept[0].closed


@on_each_rank(FakeRanks(2).run)
def test_refused_by_this_backend(gpu: Any, /, fake: FakeNCCL) -> None:
    comm, x = gpu.comm, Array.zeros(4, np.float32, 0)
    owner = Memory(16)
    owner.close()
    for message, call in {
        r"x: expected memory of cuda:0 \(backend nccl\), got ndarray in memory of the host": lambda: comm.all_reduce(
            np.ones(4)
        ),
        "got Array in memory of cuda:1": lambda: comm.all_reduce(Array(8, (1,), np.float32, 1)),
        "algorithm: expected 'auto' for all_reduce on nccl": lambda: comm.all_reduce(x, algorithm="ring"),
        "the stream of x": lambda: comm.all_reduce(x, out=Array(owner.pointer, (4,), np.float32, 0, stream=7)),
        "one that was freed": lambda: comm.all_reduce(Array(8, (1,), np.float32, 0, owner=owner)),
        "tag: expected 0": lambda: comm.send(x, 1 - comm.rank, tag=4),
        "stream: expected a handle, or .*, got 'x'": lambda: comm.all_reduce(x, stream="x"),
        "stream: expected a handle, or .*, got -1": lambda: comm.barrier(stream=-1),
        "stream: expected a handle, or .*, got True": lambda: comm.synchronize(stream=True),
    }.items():
        with pytest.raises(InvalidArgument, match=message):
            call()
    assert comm.recorder.count == 0


def test_library_is_asked_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(nccl_binding, "library", lambda: SimpleNamespace(get_version=lambda: 22605))
    with pytest.raises(kos.errors.BackendUnavailable, match=r"window: expected NCCL 2.27 or newer, got 2.26.5"):
        nccl_binding.require("window")


@on_each_rank(FakeRanks(1).run)
def test_nothing_keeps_the_arrays_of_a_call(gpu: Any, /, fake: FakeNCCL) -> None:
    """Memory of a GPU must not wait for the collector, not even that of the first call of its kind."""
    comm, gone = gpu.comm, []
    gc.collect()
    gc.disable()
    try:
        for count in (5, 5, 700):
            x = Array.zeros(count, np.float32, 0)
            comm.all_reduce(x)
            gone.append(weakref.ref(x))
        for _ in range(2):
            with comm.batch():
                for count in (6, 800):
                    x = Array.zeros(count, np.float32, 0)
                    comm.broadcast(x, 0)
                    gone.append(weakref.ref(x))
        x = None
        comm.barrier()
        assert [array() for array in gone] == [None] * 7
    finally:
        gc.enable()


def test_revoke_returns_when_nothing_is_in_flight_any_more(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [7, 7, 6]  # in progress, then what it ended with
    monkeypatch.setattr(fake, "comm_revoke", lambda comm, flags: None, raising=False)
    monkeypatch.setattr(fake, "comm_get_async_error", lambda comm: states.pop(0))
    nccl_binding.revoke(object())
    assert not states
    monkeypatch.setattr(nccl_binding, "_REVOKE_LOOKS", 3)
    states.extend([7] * 3)
    with pytest.raises(CollectiveError, match="still in progress"):
        nccl_binding.revoke(object())
    assert not states


def test_a_failure_keeps_no_frames(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their arrays would live as long as the communicator."""

    def fail(*arguments: Any) -> None:
        raise CollectiveError("a test")

    monkeypatch.setattr(fake, "all_reduce", fail)

    def body(gpu: Any) -> None:
        with pytest.raises(CollectiveError, match="a test"):
            gpu.all_reduce(np.ones(3, np.float32))
        failure = gpu.comm.backend.broken
        assert "a test" in str(failure) and failure.__traceback__ is None and failure.__context__ is None

    FakeRanks(1).run(body)


def test_arrays_of_a_batch_live_until_it_is_over(fake: FakeNCCL) -> None:
    """Beside the caller's stream: what is freed in the order of that may still be in use."""
    over = [0]
    driver.cu.cuEventQuery = lambda event: (over[0],)

    def body(gpu: Any) -> None:
        comm, x = gpu.comm, Array.zeros(4, np.float32, 0)
        for _ in range(2):  # the first calls of a kind are kept longer
            comm.all_reduce(x)
        over[0] = driver.cu.CUresult.CUDA_ERROR_NOT_READY
        arrays = [Array.zeros(4, np.float32, 0) for _ in range(3)]
        left = [weakref.ref(array) for array in arrays]
        with comm.batch(async_op=True) as batch:
            for array in arrays:
                comm.all_reduce(array)
        del batch, arrays, array
        comm.all_reduce(x)
        gc.collect()
        assert None not in [array() for array in left]
        over[0] = 0
        for _ in range(2):
            comm.all_reduce(x, async_op=True).wait()
        gc.collect()
        assert [array() for array in left] == [None] * 3

    FakeRanks(1).run(body)
