"""Transfer with an emulated GPU that is late or hangs: what GPUs do not show, or not on purpose."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kos.errors import CudaError, TransferError, TransferTimeout
from kos.memory import Array
from kos.testing import spawn
from kos.transfer import Placement, Publisher, Subscriber, exchange
from kos.transfer.reader import Target
from tests.train.host_kernels.ops import needs_compiler
from tests.transfer import gpu_checks as checks
from tests.transfer.emulated_gpu import WHOLE, EmulatedMemory, both, of
from tests.transfer.gpu_process import OtherPublisher
from tests.transfer.publishing import expect_version

pytestmark = [needs_compiler, pytest.mark.usefixtures("memory")]
start = partial(OtherPublisher, 0, True)
NOT_READY = 600
LATE = "cuda:0: expected the end of the queued work"


class Queues:
    """The streams of a GPU: kernels that are queued while ``late`` run by ``run``, as on a busy one."""

    def __init__(self, memory: EmulatedMemory) -> None:
        self.late, self.pending = False, dict[int, list[Callable[[], None]]]()
        memory.queue, memory.cu.cuStreamQuery = self.queue, self.query

    def queue(self, stream: int, work: Callable[[], None]) -> None:
        self.pending.setdefault(stream, []).append(work)
        if not self.late:
            self.run()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is queued meanwhile runs, and what was queued before does not."""
        left, self.pending, self.late = self.pending, {}, False
        yield
        self.pending = left

    def query(self, stream: int) -> tuple[int]:
        return (NOT_READY * bool(self.pending.get(stream)),)

    def run(self) -> None:
        for queued in self.pending.values():
            for work in queued:
                work()
        self.pending.clear()


@pytest.fixture
def queues(memory):
    return Queues(memory)


@pytest.fixture
def hung(memory):
    """The threads to which all streams look busy."""
    found = set[int]()
    memory.cu.cuStreamQuery = lambda _: (NOT_READY * (threading.get_ident() in found),)
    return found


@pytest.fixture
def clock(monkeypatch):
    """The time of publishers and of their copies, ``now``, once it was started.

    ``stop`` undoes all patches of the test.
    """
    found = SimpleNamespace(now=0.0, monotonic=lambda: found.now, sleep=lambda seconds: None)

    def start():
        for module in ("publisher", "gpu"):
            monkeypatch.setattr(f"kos.transfer.{module}.time", found)

    found.start, found.stop = start, monkeypatch.undo
    return found


def reads_the_next_version(publisher: Publisher, subscriber: Subscriber, source: Array, queues: Queues) -> None:
    """An update first waits for the copies of the one before: it fails while they are queued, and then succeeds."""
    with queues.apart():
        source.copy_from(np.full(4, 2, np.float32))
        publisher.publish(2)
    with pytest.raises(TransferTimeout, match=LATE):
        subscriber.update(0.3)
    queues.run()
    assert subscriber.update(30).version == 2


@pytest.mark.parametrize("staged", [True, False])
def test_copies_of_a_failed_update_do_not_reach_the_next_version(staged, queues):
    """They are still queued on the GPU when it begins."""
    source, into = of(1), of(0)
    with both(source, into, staged=staged) as (publisher, subscriber):
        queues.late = True
        with pytest.raises(TransferTimeout):
            subscriber.update(0.3)
        assert queues.pending
        reads_the_next_version(publisher, subscriber, source, queues)
        queues.run()
        assert (into.numpy() == 2).all()


def test_without_staging_memory_an_update_writes_after_the_work_that_was_queued_before(hung, memory):
    into, ordered = of(0), memory.cu.cuStreamWaitEvent

    def behind(*arguments):
        hung.add(threading.get_ident())
        return ordered(*arguments)

    with both(of(1), into, staged=False) as (_, subscriber):
        memory.cu.cuStreamWaitEvent = behind
        with pytest.raises(TransferTimeout, match=LATE):
            subscriber.update(0.3)
        memory.cu.cuStreamWaitEvent = ordered
        hung.clear()
        assert (into.numpy() == 0).all()
        assert subscriber.update(30).version == 1 and (into.numpy() == 1).all()


@pytest.mark.timeout(60)
def test_a_copy_from_staging_memory_that_is_late(queues, monkeypatch):
    """``update`` ends, and the copy is over when the next one begins."""
    source, into, commit = of(1), of(0), Target.commit

    def late(target, *limit):
        queues.late = True
        commit(target, *limit)

    with both(source, into) as (publisher, s):
        with monkeypatch.context() as patch:
            patch.setattr(Target, "commit", late)
            patch.setattr("kos.transfer.subscriber.GRACE", 0.2)
            with pytest.raises(TransferTimeout, match=LATE):
                s.update(0.5)
        assert queues.pending and s.version is None
        reads_the_next_version(publisher, s, source, queues)
    assert (into.numpy() == 2).all()


def test_a_rank_whose_copy_from_staging_memory_fails_gets_the_version_again(monkeypatch):
    """The other ranks have it, and read it again with this one."""
    fails, commit, found = set[int](), Target.commit, dict[int, list[Any]]()

    def bad(target, *limit):
        if threading.get_ident() in fails:
            fails.clear()
            raise CudaError("cuMemcpyAsync failed")
        commit(target, *limit)

    monkeypatch.setattr(Target, "commit", bad)

    def run(comm):
        into = of(0)
        with Subscriber(publisher.address, {"w": (into, WHOLE)}, comm=comm) as subscriber:
            if comm.rank == 1:
                fails.add(threading.get_ident())
                with pytest.raises(CudaError, match="cuMemcpyAsync failed"):
                    subscriber.update(30)
            else:
                subscriber.update(30)
            found[comm.rank] = [subscriber.update(30)[:3], subscriber.update(30)[:3], into.numpy().tolist()]

    with Publisher(None, {"w": (of(1), WHOLE)}) as publisher:
        publisher.publish(1)
        spawn(run, 2, timeout=60)
    assert found[0] == found[1] == [(1, True, False), (1, False, False), [1.0] * 4]


def test_an_error_of_the_driver_names_no_publisher(memory):
    with both(of(1), of(0)) as (_, s):
        memory.cu.cuLaunchKernelEx = lambda *_: (700,)
        with pytest.raises(CudaError, match="^launch of copy_runs: cuLaunchKernelEx failed: status 700"):
            s.update(30)


def test_memory_is_mapped_while_copies_from_it_are_queued(queues, memory):
    right, found = memory.cu.cuIpcCloseMemHandle, list[bool]()

    def close(base):
        found.append(bool(queues.pending))
        return right(base)

    memory.cu.cuIpcCloseMemHandle = close
    arrays = checks.on_gpu(0, {"a.weight": checks.WANTED["a.weight"]})
    with start() as publisher:
        publisher.publish(1)
        with Subscriber(publisher.address, arrays, transport="shared") as subscriber:
            queues.late = True
            with pytest.raises(TransferTimeout) as error:
                subscriber.update(0.5)
            assert str(error.value).startswith(LATE) and not error.value.ranks  # it is not the publisher's fault
            assert queues.pending and not found
            queues.late = False
            queues.run()
            assert subscriber.update(30).version == 1
        expect_version(arrays, 1)
    assert found and not any(found)


def test_a_rank_of_a_publisher_whose_gpu_hangs_is_named_by_all(hung):
    """Its error comes before the others' timeout of the communicator, which is as before afterwards."""
    found = dict[int, str]()

    def run(comm):
        placed = Placement.whole((4,), f"w{comm.rank}")
        with Publisher(comm, {"w": (of(comm.rank), placed)}, patience=0.1) as publisher:
            publisher.publish(1)
            limit, comm.timeout = comm.timeout, 2.0
            if comm.rank == 0:
                hung.add(threading.get_ident())
            with pytest.raises(TransferTimeout) as error:
                publisher.publish(2)
            found[comm.rank] = str(error.value)
            hung.clear()
            comm.timeout = limit
            publisher.publish(3)

    spawn(run, 2, timeout=60)
    assert all(LATE in each for each in found.values()) and found[1].startswith("Publisher: rank 0: ")


def test_all_ranks_of_a_subscriber_unmap_a_killed_publisher(memory):
    with start() as publisher:
        publisher.publish(1)

        def run(comm):
            arrays = checks.on_gpu(0, {"a.weight": checks.WANTED["a.weight"]})
            with Subscriber(publisher.address, arrays, comm=comm, transport="shared") as subscriber:
                subscriber.update(60)
                comm.barrier()
                if comm.rank == 0:
                    assert memory.held
                    publisher.kill()
                comm.barrier()
                with pytest.raises(TransferError):
                    subscriber.update(5)
                comm.barrier()
                assert not memory.held

        spawn(run, 2, timeout=100)


@pytest.mark.parametrize("ranks", [0, 1])
def test_publish_waits_for_its_gpus_until_a_deadline(ranks, hung, clock):
    """With a communicator, half of its timeout: a rank waits for its GPUs less than the ranks for each other."""

    def sleep(_):
        clock.now += 0.5
        assert clock.now < 1000

    def run(comm):
        with Publisher(comm if ranks else None, {"w": (of(1), WHOLE)}, patience=0.1) as publisher:
            publisher.publish(1)
            clock.sleep = sleep
            clock.start()
            hung.add(threading.get_ident())
            with pytest.raises(TransferTimeout, match=LATE):
                publisher.publish(2)
            clock.stop()
            hung.clear()
            assert clock.now == pytest.approx(comm.timeout / 2 if ranks else 120.0, abs=1)

    spawn(run, 1, timeout=60)


def test_checksums_may_take_longer_than_the_copies(memory, clock, monkeypatch):
    """A stream is not idle at the first look; the GPU is as fast as ever."""
    new, launched, crc = set[int](), list[int](), exchange.checksum

    def queue(stream, work):
        new.add(stream)
        launched.append(stream)
        work()

    def query(stream):
        busy = stream in new
        new.discard(stream)
        return (NOT_READY * busy,)

    def slow(arrays):
        clock.now += 30.0
        return crc(arrays)

    def run(comm):
        arrays = {f"w{i}": (of(i), WHOLE) for i in range(6)}
        with Publisher(comm, arrays, patience=0.1, checksums=True) as publisher:
            clock.start()
            memory.cu.cuStreamQuery, memory.queue = query, queue
            monkeypatch.setattr(exchange, "checksum", slow)
            publisher.publish(1)
            clock.stop()
            assert launched, "no look at a busy stream"

    spawn(run, 1, timeout=60)
    assert clock.now == 180


@pytest.mark.parametrize("where", ["device", "host"])
def test_close_frees_memory_after_the_copies_that_are_queued_to_it(where, queues, memory, clock):
    """Of a publish that timed out; they run while ``close`` waits.  No collection of garbage is needed."""
    name = {"device": "cuMemFree", "host": "cuMemHostUnregister"}[where]
    right, found = getattr(memory.cu, name), list[bool]()

    def free(pointer):
        found.append(bool(queues.pending))
        return right(pointer)

    setattr(memory.cu, name, free)

    def run(comm):
        source = of(1)
        held = {*memory.held}
        with Publisher(comm, {"w": (source, WHOLE)}, patience=0.1, memory=where) as publisher:
            comm.timeout, queues.late = 0.4, True
            with pytest.raises(TransferTimeout, match=LATE):
                publisher.publish(1)
            assert queues.pending
            clock.sleep = lambda seconds: queues.run()
            clock.start()
        assert found and not any(found) and {*memory.held} <= held

    gc.disable()
    try:
        spawn(run, 1, timeout=60)
    finally:
        gc.enable()


def test_memory_of_a_publisher_of_this_process_that_is_read_is_not_freed(memory):
    """Though the publisher is closed between the lease and the first copy."""
    with both(of(1), of(0), transport="shared") as (publisher, subscriber):
        held = set(memory.held)
        assert held

        def close():
            publisher.close()
            assert held <= set(memory.held)

        with checks.before_copies(close), pytest.raises(TransferError, match="expected a running publisher"):
            subscriber.update(30)
    assert not memory.held
