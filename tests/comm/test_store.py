"""``comm.store`` on threads, over ``tcp`` (also on pretended hosts) and ``mpi``."""

import importlib.util
import threading
from datetime import timedelta

import pytest

from kos.errors import CollectiveTimeout, InvalidArgument, RankLost
from kos.testing import Deadlock, spawn
from tests.comm.conftest import UNDER_MPIRUN
from tests.comm.ranks import MPIRanks, on_each_rank
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks, run_threads

ON_MPI = [pytest.param("mpi", marks=pytest.mark.mpi)]
NEVER = 0.05  # seconds of a wait for what does not come


@pytest.fixture(params=[*(() if UNDER_MPIRUN else ("mock", "tcp", "tcp apart")), *ON_MPI])
def ranks(request):
    """Three ranks or, under mpirun, all of them."""
    if request.param == "tcp apart":
        request.getfixturevalue("apart")
    if request.param == "mpi":
        return MPIRanks(request.getfixturevalue("mpi_world")).run
    return TCPRanks(3).run if "tcp" in request.param else lambda fn: spawn(fn, 3, timeout=TIMEOUT)


@on_each_rank("ranks")
def test_values_are_those_of_all_ranks(comm, /):
    store, last = comm.store, comm.size - 1
    if comm.rank == last:
        store.set("small", "text of 日本")
        store.set("large", large := bytes(range(256)) * 4096)
        store.set("empty", memoryview(b""))
    store.wait(["large", "small"])
    assert (store.get("small"), store.get("empty")) == ("text of 日本".encode(), b"")
    assert store.get("large") == bytes(range(256)) * 4096 and "small" in store and "other" not in store
    sums = comm.all_gather_bytes(str(store.add("count", comm.rank + 1)).encode())
    total = comm.size * (comm.size + 1) // 2
    assert max(map(int, sums)) == total == store.add("count", 0) == int(store.get("count"))
    assert len(store) == 4
    comm.barrier()
    assert store.add(f"of {comm.rank}") == 1
    comm.barrier()
    if comm.rank == last:
        assert store.delete("large") and not store.delete("large") and large
    comm.barrier()
    assert "large" not in store and len(store) == 3 + comm.size
    with pytest.raises(InvalidArgument, match="whole number as the value of 'small', got b'text of"):
        store.add("small")
    with comm.split(comm.rank % 2) as part:  # has a store of its own
        assert len(part.store) == 0


@on_each_rank("ranks")
def test_a_wait_ends_at_its_timeout_and_breaks_nothing(comm, /):
    for wait, missing in (
        (lambda: comm.store.get("a", NEVER), r"store.get\('a'\): no rank has set the key within 0.05 s"),
        (lambda: comm.store.wait(["b", "c"], NEVER), r"store.wait\('b', 'c'\): not all keys have been set within"),
    ):  # fmt: skip
        with pytest.raises(CollectiveTimeout, match=missing):
            wait()
    comm.barrier()
    if comm.rank == 0:
        comm.store.set("a", b"1")  # not an answer to the request that was withdrawn
    assert comm.store.get("a") == b"1" and comm.failure is None


@on_each_rank("ranks")
def test_wrong_arguments_are_refused(comm, /):
    store = comm.store
    for call, expected in (
        (lambda: store.set("a", 3), "value: expected bytes or a string, got int"),
        (lambda: store.set("a", bytes((1 << 20) + 1)), "value: expected at most 1048576 bytes, got 1048577"),
        (lambda: store.get(""), "key: expected a string of 1 to 1024 characters, got ''"),
        (lambda: store.delete(b"a"), "key: expected a string of 1 to 1024 characters, got b'a'"),
        (lambda: store.wait("ab"), "keys: expected a list of strings, got 'ab'"),
        (lambda: store.add("a", 1.5), "amount: expected a whole number, got 1.5"),
        (lambda: store.get("a", 0), "timeout: expected a positive number"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=expected):
            call()
    assert len(store) == 0


@on_each_rank("ranks")
def test_threads_of_a_rank_wait_side_by_side(comm, /):
    def ask(thread):
        comm.store.set(f"{comm.rank}/{thread}", str(thread))
        other = (comm.rank + 1) % comm.size
        return [int(comm.store.get(f"{other}/{each}")) for each in range(8)]

    assert run_threads(*[lambda thread=thread: ask(thread) for thread in range(8)]) == [[*range(8)]] * 8
    comm.barrier()


@on_each_rank("ranks")
def test_a_rank_that_has_closed_its_communicator_ends_no_wait(comm, /):
    if comm.rank == comm.size - 1:
        comm.close()
    elif comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match="no rank has set the key"):
            comm.store.get("never", NEVER)
        comm.store.set("late", b"here")
        if comm.size > 2:
            comm.store.get("read")
    else:
        assert comm.store.get("late") == b"here"
        comm.store.set("read", b"")


@pytest.mark.skipif(UNDER_MPIRUN, reason="it loses a rank")
@pytest.mark.parametrize("on", ["mock", "tcp"])
def test_a_lost_rank_ends_the_waits(on):
    seen, ready = [], threading.Barrier(3)

    def body(comm):
        ready.wait(TIMEOUT)
        if comm.rank == 1:
            raise LookupError("planned")
        with pytest.raises(RankLost, match=r"store.get\('never'\).*rank 1 is gone.*LookupError: planned"):
            comm.store.get("never")
        seen.append(comm.rank)

    with pytest.raises((LookupError, AssertionError), match="planned"):
        TCPRanks(3).run(body) if on == "tcp" else spawn(body, 3, timeout=TIMEOUT)
    assert sorted(seen) == [0, 2]


@pytest.mark.skipif(UNDER_MPIRUN, reason="it needs no ranks of mpirun")
def test_a_deadlock_of_waits_is_found():
    with pytest.raises(Deadlock, match=r"rank 1 waits for rank 0 in store.get\('of 0'\)"):
        spawn(lambda comm: comm.store.get(f"of {1 - comm.rank}"), 2, timeout=TIMEOUT)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@on_each_rank("ranks")
def test_as_a_store_of_torch(comm, /):
    import torch.distributed as dist

    from kos.interop.torch import Store

    base = Store(comm)
    store = dist.PrefixStore("a", dist.PrefixStore("b", base))  # calls from C++
    if comm.rank == 0:
        store.set("x", "1")
    store.wait(["x"], timedelta(seconds=TIMEOUT))
    assert store.get("x") == b"1" and store.check(["x"]) and not store.check(["x", "y"])
    comm.barrier()
    store.add("n", 2)
    comm.barrier()
    assert store.add("n", 0) == 2 * comm.size and comm.store.get("torch/b/a/n") == str(2 * comm.size).encode()
    comm.barrier()
    assert comm.rank or store.delete_key("x")
    base.set_timeout(timedelta(seconds=NEVER))
    with pytest.raises(Exception, match=r"store.get\('torch/b/a/y'\): no rank has set the key within 0.05 s"):
        store.get("y")
    assert base.timeout == timedelta(seconds=NEVER) and store.num_keys() == len(comm.store) == 1
    comm.barrier()
