"""Transfer with an emulated GPU: what GPUs do not show, or not on purpose, as late copies and streams that hang."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kos.errors import CudaError, InvalidArgument, TransferError, TransferTimeout
from kos.memory import Array
from kos.testing import spawn
from kos.transfer import Placement, Publisher, Subscriber, exchange, gpu
from kos.transfer.gpu import Run, Runs, launches, whole
from kos.transfer.placement import Current
from kos.transfer.reader import Target
from tests.comm.fake_gpu import captures
from tests.train.host_kernels.ops import needs_compiler
from tests.transfer import gpu_checks as checks
from tests.transfer.emulated_gpu import EmulatedMemory
from tests.transfer.gpu_process import OtherPublisher
from tests.transfer.publishing import expect_version

pytestmark = [needs_compiler, pytest.mark.usefixtures("memory")]
start = partial(OtherPublisher, 0, True)
WHOLE = Placement.whole((4,))
NOT_READY = 600
LATE = "cuda:0: expected the end of the queued work"


def of(value: float) -> Array:
    return Array.from_numpy(np.full(4, value, np.float32), 0)


@contextmanager
def both(source: Array, into: Any, **options: Any) -> Iterator[tuple[Publisher, Subscriber]]:
    """A publisher that has published ``source``, and a subscriber with these options."""
    with (
        Publisher(None, {"w": (source, WHOLE)}) as publisher,
        Subscriber(publisher.address, {"w": (into, WHOLE)}, **options) as subscriber,
    ):
        publisher.publish(1)
        yield publisher, subscriber


def test_a_captured_stream_is_refused():
    """The version of before is still there, also with one buffer."""
    array = Array.zeros((4,), np.float32, 0, stream=7)
    placed = {"w": (array, WHOLE)}
    with Publisher(None, placed, buffers=1) as publisher:
        publisher.publish(1)
        with captures(), pytest.raises(InvalidArgument, match="w: expected a stream that is not being captured"):
            publisher.publish(2)
        with Subscriber(publisher.address, placed) as subscriber:
            with captures(), pytest.raises(InvalidArgument, match="w: expected a stream that is not being captured"):
                subscriber.update(30)
            assert subscriber.update(30).version == 1
            publisher.publish(2)
            assert subscriber.update(30).version == 2


def test_the_memory_of_an_empty_array_may_change():
    """An example is the empty shard of a rank, which moves to another device together with its module."""
    places = [np.empty(0, np.float32)]
    arrays = {"w": (np.ones(4, np.float32), WHOLE),
              "none": (Current(lambda: places[-1]), Placement.whole((0,)))}  # fmt: skip
    with Publisher(None, arrays) as publisher:
        publisher.publish(1)
        places.append(Array.zeros((0,), np.float32, 0))
        publisher.publish(2)
        with Subscriber(publisher.address, {"w": (np.zeros(4, np.float32), WHOLE)}) as subscriber:
            assert subscriber.update(30).version == 2


@pytest.mark.parametrize("staged", [True, False])
def test_work_that_does_not_end_on_the_stream_of_the_arrays(staged, memory):
    """As a kernel that hangs: an update ends at its deadline, and a publisher of a communicator at its timeout."""
    array, into = of(1), of(0)
    busy, waiting = SimpleNamespace(now=False), set[int]()

    def wait(stream, event, flags):
        waiting.update([stream] * busy.now)
        return (0,)

    memory.cu.cuStreamWaitEvent = wait
    memory.cu.cuStreamQuery = lambda stream: (600 * (busy.now and stream in waiting),)

    def run(comm):
        with (
            Publisher(comm, {"w": (array, WHOLE)}, patience=0.1) as publisher,
            Subscriber(publisher.address, {"w": (into, WHOLE)}, staged=staged) as subscriber,
        ):
            publisher.publish(1)
            busy.now = True
            with pytest.raises(TransferTimeout, match=LATE):
                subscriber.update(0.5)
            assert subscriber.version is None
            comm.timeout = 0.5
            with pytest.raises(TransferTimeout, match=LATE):
                publisher.publish(2)
            busy.now = False
            assert subscriber.update(30).version == 1
        assert (into.numpy() == 1).all()

    spawn(run, 1, timeout=60)


def test_an_array_that_was_moved_is_refused():
    """Its former memory may be another's."""
    array = of(0)
    with both(array, of(0)) as (publisher, _):
        array.pointer = of(0).pointer
        expected = r"w: expected the same memory as before \(cuda:0, 0x.*\), got cuda:0, 0x"
        with pytest.raises(InvalidArgument, match=expected):
            publisher.publish(2)


def test_an_array_that_becomes_read_only_is_not_written():
    places = [first := of(0)]
    with both(of(1), Current(lambda: places[-1])) as (_, subscriber):
        places.append(Array(first.pointer, first.shape, first.dtype, 0, owner=first, readonly=True))
        with pytest.raises(InvalidArgument, match="w: expected a writable array, got a read-only Array"):
            subscriber.update(30)
    assert not first.numpy().any()


def test_work_that_does_not_end_delays_no_first_version(memory):
    """CUDA loads a kernel only when running kernels have ended, so kernels are loaded with the publisher."""
    loaded = list[str]()
    load = gpu.load_kernel

    def noting(path, name, device, **defines):
        loaded.append(name)
        return load(path, name, device, **defines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "load_kernel", noting)
        with Publisher(None, {"w": (of(0), WHOLE)}):
            assert loaded == ["copy_runs"]


def test_an_array_without_elements():
    """Nothing is copied from or to where it is said to be."""
    nothing, some = (Array(256, shape, "float32", 0) for shape in ((0, 3), (2, 3)))
    assert [*launches(whole(nothing), whole(nothing), 0)] == []
    assert len([*launches(whole(some), whole(some), 0)]) == 1


@pytest.mark.parametrize("sizes", [[1], [15, 16, 17], [(256 << 10) + 3, 4096, 2], [300_000] * 3], ids=str)
def test_one_kernel_copies_runs_of_any_size_and_alignment(sizes):
    """Units of 16 bytes to 1, by the alignment of both places; nothing beside the runs is written."""
    print("seed", seed := np.random.SeedSequence().entropy)
    rng = np.random.default_rng(seed)
    data, poison = (rng.integers(0, 256, 1 << 20, np.uint8) for _ in range(2))
    for shift in (0, 1, 2, 4, 8, 16):
        source, target = Array.from_numpy(data, 0), Array.from_numpy(poison, 0)
        runs, right, at = list[Run](), poison.copy(), 64
        for nbytes in sizes:
            runs.append(Run(target.pointer + at, source.pointer + at + shift, nbytes))
            right[at : at + nbytes] = data[at + shift : at + shift + nbytes]
            at += nbytes + 13
        Runs(runs, 0, None)(1)
        assert (target.numpy() == right).all()


@pytest.mark.parametrize("staged", [True, False])
def test_the_number_of_arrays_costs_no_copies(staged, memory):
    """After the first update, which uploads the tables of runs, kernels alone copy between GPUs."""
    copy, copies = memory.cu.cuMemcpyAsync, list[int]()
    memory.cu.cuMemcpyAsync = lambda *arguments: (copies.append(arguments[2]), copy(*arguments))[1]
    x = np.arange(5 * 64, dtype=np.float32)
    source, into = Array.from_numpy(x, 0), Array.zeros((5 * 64,), np.float32, 0)
    apart = [slice(0, 64), slice(64, 128), slice(192, 256)]

    def parts(flat):
        return {f"w{index}": (flat[part], Placement.whole((64,))) for index, part in enumerate(apart)}

    right = x.copy()
    right[128:192], right[256:] = 0, 0
    with (
        Publisher(None, parts(source)) as publisher,
        Subscriber(publisher.address, parts(into), staged=staged) as subscriber,
    ):
        for version in range(1, 6):  # more than the publisher has buffers, each of which has tables of its own
            publisher.publish(version)
            into.fill_bytes(0)
            copies.clear()
            subscriber.update(30)
            assert (into.numpy() == right).all()
        assert copies == [into.nbytes]  # that of numpy()


@pytest.mark.parametrize(("source", "target"), [*pairwise([*checks.NAMES, "float16", "float64"])])
def test_conversions(source, target):
    """From and to each type; all pairs are compared on GPUs."""
    checks.check_conversions(source, target)


def test_a_replica_on_the_same_gpu_is_read():
    """A publisher on another GPU is not read in turn with it."""

    def run(comm):
        with Publisher(comm, {"w": (Array.zeros((6,), "f4", comm.rank), Placement.whole((6,)))}) as publisher:
            mine = {"w": (Array.zeros((6,), "f4", comm.rank), Placement.whole((6,)))}
            with Subscriber(publisher.address, mine) as subscriber:
                assert subscriber.plan().traffic() == {(comm.rank, 0): 24}
            comm.barrier()

    spawn(run, 2, timeout=60)


# A GPU that is late.


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


def test_memory_is_freed_after_a_publish_that_failed(memory, hung):
    """By ``close``, not by a later collection of garbage."""

    def run(comm):
        source = of(1)
        publisher = Publisher(comm, {"w": (source, WHOLE)}, patience=0.1)
        publisher.publish(1)
        assert memory.held
        comm.timeout = 0.4
        hung.add(threading.get_ident())
        with pytest.raises(TransferTimeout):
            publisher.publish(2)
        hung.clear()
        publisher.close()
        assert not memory.held

    gc.disable()
    try:
        spawn(run, 1, timeout=60)
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["device", "host"])
def test_close_frees_no_memory_to_which_copies_are_queued(where, queues, memory, clock):
    """Of a publish that timed out; they run while ``close`` waits."""
    name = {"device": "cuMemFree", "host": "cuMemHostUnregister"}[where]
    right, found = getattr(memory.cu, name), list[bool]()

    def free(pointer):
        found.append(bool(queues.pending))
        return right(pointer)

    setattr(memory.cu, name, free)

    def run(comm):
        with Publisher(comm, {"w": (of(1), WHOLE)}, patience=0.1, memory=where) as publisher:
            comm.timeout, queues.late = 0.4, True
            with pytest.raises(TransferTimeout, match=LATE):
                publisher.publish(1)
            assert queues.pending
            clock.sleep = lambda seconds: queues.run()
            clock.start()

    spawn(run, 1, timeout=60)
    assert found and not any(found)


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
