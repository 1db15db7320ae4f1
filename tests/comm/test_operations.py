"""What every operation has in common: wrong keywords, its place in a batch, its timeout."""

import copy
import mmap
import pickle
import re
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.operation import CORE_OPERATIONS
from kos.dtypes import DTYPES
from kos.errors import CollectiveTimeout, InvalidArgument, RendezvousError
from kos.memory import as_buffer
from kos.memory.array import Array
from kos.memory.dlpack import CPU, export_capsule
from kos.testing import spawn
from tests.comm import shared_ranks
from tests.comm.fake_nccl import FakeRanks
from tests.comm.ranks import on_each_rank, time_is_up


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_communicators_and_works_stay_in_their_process(way):
    with kos.init("mock") as comm:
        work = comm.all_reduce(np.ones(2), async_op=True)
        for each in (comm, work):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                way(each)
        work.wait()


def test_keywords_that_are_none():
    with kos.init("mock") as comm:
        with pytest.raises(TypeError, match=r"all_reduce\(\) got an unexpected keyword argument 'algoritm'"):
            comm.all_reduce(np.ones(2), algoritm="ring")
        with pytest.raises(TypeError, match=r"broadcast\(\) got an unexpected keyword argument 'deterministic'"):
            comm.broadcast(np.ones(2), deterministic=True)
        with pytest.raises(InvalidArgument, match="expected 'auto' or one of pairwise for all_to_all"):
            comm.all_to_all(np.ones(2), algorithm="ring")
        with pytest.raises(InvalidArgument, match="async_op: expected False in a batch"), comm.batch():  # noqa: PT012
            comm.all_reduce(np.ones(2))
            comm.all_reduce(np.ones(2), async_op=True)
        assert comm.recorder.entries() == []
        assert comm.all_reduce(np.ones(2))[0] == 1, "the batch was left open"


def test_persistent_operations_are_refused_with_the_reason():
    with kos.init("mock") as comm:
        for name in CORE_OPERATIONS:
            text = f"{name}_init: expected a call, as kos has no persistent operations: {name}"
            with pytest.raises(AttributeError, match=re.escape(text)):
                getattr(comm, f"{name}_init")
        for name in ("x_init", "all_reduced"):
            with pytest.raises(AttributeError, match=f"^'Communicator' object has no attribute '{name}'$"):
                getattr(comm, name)


@shared_ranks.needs_core
@on_each_rank(shared_ranks.run, 2)
def test_a_flag_of_numpy_is_a_flag(comm, /):
    flag = np.True_ if comm.rank else 1
    assert (comm.all_reduce(np.ones(3), deterministic=flag) == 2).all()


@on_each_rank(FakeRanks(1).run)
def test_a_call_after_a_batch_is_in_the_order_of_its_stream(gpu, /, fake):
    """It runs beside the stream of its arrays only within an asynchronous batch."""
    x = Array.zeros(3, np.float32, 0)
    works = []
    for async_op in (True, False):
        with gpu.comm.batch(async_op=async_op) as batch:
            gpu.comm.all_reduce(x)
        works += batch.works
    assert [work.event is None for work in works] == [False, True]


def test_a_group_of_one_reduces_in_place():
    """Without memory or time that depends on the size of the array."""
    with kos.init("mock") as comm:
        x = np.ones(1 << 22, np.float32)
        comm.all_reduce(x)
        tracemalloc.start()
        try:
            comm.all_reduce(x)
            assert tracemalloc.get_traced_memory()[1] < x.nbytes // 16
        finally:
            tracemalloc.stop()
        assert (x == 1).all()


@on_each_rank("ranks.run")
def test_the_root_of_a_broadcast_may_pass_an_array_that_is_read_only(comm, /):
    x = np.full(3, comm.rank)
    x.flags.writeable = comm.rank != 0
    for async_op in (False, True) * 2:
        result = comm.broadcast(x, async_op=async_op)
        assert (result.wait() if async_op else result) is x and x.tolist() == [0, 0, 0]


@on_each_rank(spawn, 2, timeout=60)
def test_a_call_in_a_batch_is_launched_with_it(comm, /):
    x, y = np.ones(3), np.ones(3)
    with comm.batch() as batch:
        assert comm.all_reduce(x) is x
        comm.rendezvous.barrier()
        assert batch.works == [] and (x == 1).all(), "launched before the batch ends"
        comm.all_reduce(y)
    assert (x == 2).all() and (y == 2).all() and len(batch.works) == 2

    class Stop(Exception):
        pass

    with pytest.raises(Stop), comm.batch():  # noqa: PT012
        comm.all_reduce(x)
        raise Stop
    assert (x == 2).all()
    with batch:  # opened again
        comm.all_reduce(x)
    assert (x == 4).all() and len(batch.works) == 1


@on_each_rank(spawn, 2, timeout=60)
def test_memory_that_two_operations_of_a_batch_use(comm, /):
    """If one of them writes the memory, the batch is refused before anything is sent."""
    x, out, rows = np.ones(8), np.zeros(8), np.zeros((2, 8))
    peer = 1 - comm.rank
    rank_0 = comm.rank == 0
    clashes = {
        "written twice": [lambda: comm.all_reduce(x), lambda: comm.all_reduce(x)],
        "one element": [lambda: comm.recv(x[:3], peer, 0), lambda: comm.recv(x[2:], peer, 1)],
        "read and written": [lambda: comm.all_reduce(x, out=out), lambda: comm.all_reduce(out)],
        "written, then read": [lambda: comm.all_reduce(out), lambda: comm.send(out[7:], peer)],
        "inside another": [lambda: comm.all_gather(x, rows), lambda: comm.all_reduce(rows[1, 3:4])],
        "bytes": [lambda: comm.all_reduce(x), lambda: comm.all_reduce(x.view(np.uint8)[63:])],
        "own part": [lambda: comm.all_gather(rows[comm.rank], rows), lambda: comm.send(rows[comm.rank], peer)],
    }
    for name, calls in clashes.items():
        for order in (calls, calls[::-1]):
            expected = r"batch: expected no memory that another.*got operation [12], .*, and operation [123], "
            with pytest.raises(InvalidArgument, match=expected), comm.batch():  # noqa: PT012
                comm.all_reduce(np.ones(3))
                for call in order:
                    call()
            assert (x == 1).all() and not out.any() and not rows.any(), f"{name}: something was sent"
    with comm.batch():  # only read together, or side by side, or empty
        comm.all_reduce(x, out=out)
        comm.send(x, peer)
        comm.recv(rows[1], peer)
        comm.all_gather(rows[0, 4 * comm.rank : 4 * comm.rank + 4], rows[0])
        comm.broadcast(x, 0, out=None if rank_0 else np.zeros(8))
        comm.all_reduce(x[:0])
        comm.all_reduce(x[3:3])
    assert (out == 2).all() and (rows[1] == 1).all() and not rows[0].any()


@pytest.mark.parametrize("timeout", [0, -1.0, True, "3", float("nan")])
def test_waits_check_their_timeout(timeout):
    with kos.init("mock") as comm:
        work = comm.all_reduce(np.ones(2), async_op=True)
        with comm.batch(async_op=True) as batch:
            comm.barrier()
        for wait in (work.wait, work.synchronize, batch.wait, comm.synchronize, lambda t: setattr(comm, "timeout", t)):
            with pytest.raises(InvalidArgument, match="timeout: expected a positive number of seconds, got"):
                wait(timeout)
        assert work.wait(1.0)[0] == 1


def test_a_timeout_that_is_set_is_followed():
    """By calls, by groups that are created afterwards, and by their use of the rendezvous."""
    released = threading.Event()

    def body(comm):
        comm.timeout = 40
        assert comm.rendezvous.timeout == comm.timeout == 40
        for made in (comm.split(0), comm.duplicate(), comm.shrink()):
            assert made.timeout == made.rendezvous.timeout == 40
            comm = made
        try:
            if comm.rank == 0:
                comm.timeout = 0.2
                for _ in range(2):  # the first failure stays
                    with pytest.raises(RendezvousError, match="within 0.2 s"):
                        comm.rendezvous.split(0)
        finally:
            released.set() if comm.rank == 0 else released.wait(20)

    spawn(body, 2, timeout=60)


def test_bytes_take_their_own_timeout_where_only_the_rendezvous_carries_them(fake):
    late = threading.Event()

    def body(gpu):
        if gpu.rank == 1:
            late.wait(20)
            gpu.comm.abort()  # the group has failed: it cannot close together
            return
        try:
            with pytest.raises(RendezvousError, match=r"ranks \[1\] did not arrive within 0.2 s"):
                gpu.comm.all_gather_bytes(b"x", timeout=0.2)
            assert gpu.comm.rendezvous.timeout == gpu.comm.timeout > 1
        finally:
            late.set()

    FakeRanks(2).run(body)


@pytest.mark.parametrize("failing", [False, True])
def test_spawn_ends_waits_in_every_group(failing, monkeypatch):
    """Also in groups split from the first one, whether or not another rank raised."""
    pairs = []
    third = []
    time_is_up(monkeypatch, lambda: (
        len(pairs) == 2 and all(pair.backend.engine.outstanding() for pair in pairs) and not third[0].is_alive()
    ))  # fmt: skip
    told = []
    heard = threading.Semaphore(0)

    def body(comm):
        if comm.rank == 2:
            third.append(threading.current_thread())
            comm.split(None)
            if failing:
                raise ZeroDivisionError
            return
        pair = comm.split(0)
        pairs.append(pair)
        try:
            pair.recv(np.ones(1), 1 - pair.rank, timeout=1e4)  # each waits for the other
        except CollectiveTimeout as error:
            told.append(error)
            heard.release()
            raise

    with pytest.raises(ZeroDivisionError if failing else CollectiveTimeout, match=None if failing else "recv #0"):
        spawn(body, 3, timeout=0.3, check_deadlock=False)
    for _ in range(2):
        assert heard.acquire(timeout=30), "a rank still waits"
    assert "not complete after 0.3 s; rank" in str(told[0])


class Empty:
    """As torch's empty tensors, which have no address."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, **options: Any) -> Any:
        return export_capsule(0, (0, 3), DTYPES["float32"], 0, self, readonly=False, versioned=True, kind=CPU)


def test_an_array_without_an_address():
    """It gets an address that no library treats as a special value, such as MPI_IN_PLACE."""
    buffer = as_buffer(Empty(), "x", writable=True)
    assert buffer.shape == (0, 3) and buffer.flat.size == 0 and buffer.address > mmap.PAGESIZE


@pytest.mark.mpi
@on_each_rank("ranks_of_mpi.run")
def test_an_array_without_an_address_on_mpi(comm, /, apart):
    x = Empty()
    assert comm.all_reduce(x) is x and comm.all_gather(x).shape == (comm.size, 0, 3)


MAKE_GROUPS: dict[str, Callable[[kos.Communicator], Any]] = {
    "split": lambda comm: comm.split(0),
    "duplicate": lambda comm: comm.duplicate(),
    "group": lambda comm: comm.group(range(comm.size)),
    "grid": lambda comm: comm.grid((comm.size,))[0],
}


@pytest.mark.parametrize("name", MAKE_GROUPS)
def test_groups_are_made_while_a_receive_waits_for_a_later_message(several, name):
    """A sum in flight is complete once the group is made."""

    def body(comm):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        received, x = np.zeros(3), np.ones(2)
        message = comm.recv(received, left, async_op=True)
        comm.all_reduce(x, async_op=True)
        with MAKE_GROUPS[name](comm) as part:
            assert part.size == comm.size and (x == comm.size).all()
            comm.send(np.full(3, float(comm.rank)), right)
            assert (message.wait() == left).all()

    several.run(body)
