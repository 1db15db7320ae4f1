"""Calls that the compiled core makes by itself are as those through Python, and notice whatever has changed."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kos
from kos.comm.communicator import Communicator
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, InvalidArgument
from kos.testing.conformance.values import assert_bits
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import TCPRanks

pytestmark = needs_core

DTYPES = [np.dtype(each) for each in (np.float64, np.float32, ml_dtypes.bfloat16, np.int16, np.uint8)]


def hits(comm: Any) -> int:
    return int(comm._eager.hits)


def values(random: np.random.Generator, dtype: np.dtype[Any], count: int) -> Any:
    return random.integers(0, 9, count).astype(dtype)


CALLS = {
    "all_reduce": lambda c, x, y, n: c.all_reduce(x),
    "all_reduce max": lambda c, x, y, n: c.all_reduce(x, kos.ReduceOp.MAX, out=y[:n]),
    "all_reduce in place": lambda c, x, y, n: c.all_reduce(x, out=x),
    "scan in place": lambda c, x, y, n: c.scan(x, out=x),
    "reduce": lambda c, x, y, n: c.reduce(x, 1),
    "reduce_scatter": lambda c, x, y, n: c.reduce_scatter(y[: n * c.size], x),
    "broadcast": lambda c, x, y, n: c.broadcast(x, root=1),
    "broadcast out": lambda c, x, y, n: c.broadcast(x, 0, out=y[:n]),
    "all_gather": lambda c, x, y, n: c.all_gather(x, y[: n * c.size]),
    "gather": lambda c, x, y, n: c.gather(x, 0, out=y[: n * c.size] if c.rank == 0 else None),
    "scatter": lambda c, x, y, n: c.scatter(y[: n * c.size] if c.rank == 0 else None, x, 0),
    "all_to_all": lambda c, x, y, n: c.all_to_all(np.tile(x, c.size), y[: n * c.size]),
    "scan": lambda c, x, y, n: c.scan(x, kos.ReduceOp.PROD),
    "exscan": lambda c, x, y, n: c.exscan(x),
    "send_recv": lambda c, x, y, n: c.send_recv(x, y[:n], (c.rank + 1) % c.size, (c.rank - 1) % c.size),
    "barrier": lambda c, x, y, n: c.barrier(),
    "all_gather_v": lambda c, x, y, n: c.all_gather_v(x, [n] * c.size, y[: n * c.size]),
    "gather_v": lambda c, x, y, n: c.gather_v(x, [n] * c.size, 0, out=y[: n * c.size] if c.rank == 0 else None),
    "reduce_scatter_v": lambda c, x, y, n: c.reduce_scatter_v(y[: n * c.size], (n,) * c.size, x),
    "scatter_v": lambda c, x, y, n: c.scatter_v(y[: n * c.size] if c.rank == 0 else None, (n,) * c.size, x, root=0),
    "all_to_all_v": lambda c, x, y, n: c.all_to_all_v(np.tile(x, c.size), [n] * c.size, [n] * c.size, y[: n * c.size]),
}


def test_results_are_those_of_calls_through_python(seed: int) -> None:
    """On fresh arrays, of sizes and dtypes that come again."""

    def body(comm: kos.Communicator) -> None:
        plain = comm.duplicate()
        for name in CALLS:
            plain.__dict__.pop(name.split()[0], None)  # the method of the class
        random, order = np.random.default_rng(seed + comm.rank), np.random.default_rng(seed)
        begun = hits(comm)
        for _ in range(150):
            name, dtype = str(order.choice(list(CALLS))), DTYPES[order.integers(len(DTYPES))]
            n = int(order.choice([1, 5, 5000]))
            x, y = values(random, dtype, n), values(random, dtype, n * comm.size)
            mine, other = (x.copy(), y.copy()), (x.copy(), y.copy())
            got, expected = CALLS[name](comm, *mine, n), CALLS[name](plain, *other, n)
            for a, b in zip(mine, other, strict=True):
                assert_bits(a, b, name)
            assert (got is None) == (expected is None), name
            if got is not None:
                assert_bits(np.asarray(got), np.asarray(expected), name)
        assert hits(comm) > begun
        assert hits(plain) == 0
        plain.close()

    TCPRanks(3).run(body)


@on_each_rank("run")
def test_every_operation_hits(comm: kos.Communicator, /) -> None:
    for name, call in CALLS.items():
        before = hits(comm)
        x, y = np.ones(4), np.ones(4 * comm.size)
        for _ in range(4):
            call(comm, x, y, 4)
        assert hits(comm) - before >= 3, name
    assert comm.all_reduce(x) is x and comm.all_reduce(x, out=x) is x
    assert comm.all_reduce.__name__ == "all_reduce" and "Reduce ``x`` over all ranks" in str(comm.all_reduce.__doc__)


@pytest.fixture
def run() -> Any:
    return TCPRanks(2).run


@on_each_rank("run")
def test_shards_in_place_go_to_python(comm: kos.Communicator, /) -> None:
    """Among calls of the same shapes that the core makes; with the results of these."""
    counts, start = [2, 3], 2 * comm.rank
    whole, apart = np.empty(5), np.full(counts[comm.rank], comm.rank + 1.0)
    mine = whole[start : start + apart.size]
    for turn in range(4):
        comm.all_gather_v(apart, counts, whole)
        whole[:] = 0
        mine[:] = apart
        before = hits(comm)
        assert comm.all_gather_v(mine, counts, whole) is whole and hits(comm) == before
        assert whole.tolist() == [1, 1, 2, 2, 2], turn
        assert comm.reduce_scatter_v(whole, counts, mine) is mine and (mine == comm.size * apart).all()
        with pytest.raises(InvalidArgument, match="overlap"):
            comm.all_gather_v(whole[1 : 1 + apart.size], counts, whole)
    before = hits(comm)
    comm.all_gather_v(apart, counts, whole)
    assert hits(comm) == before + 1


@on_each_rank("run")
def test_the_recorder_has_them(comm: kos.Communicator, /) -> None:
    x = np.ones(3)
    for _ in range(3):
        comm.all_reduce(x)  # this line
    entries = comm.recorder.entries()[-3:]
    assert [entry["collective_seq_id"] for entry in entries] == [0, 1, 2]
    assert {entry["state"] for entry in entries} == {"completed"}
    lines = {entry["frames"][0]["line"] for entry in entries}
    assert len(lines) == 1 and "test_eager.py" in entries[0]["frames"][0]["filename"]
    assert all(entry["time_created_ns"] <= entry["time_discovered_completed_ns"] for entry in entries)
    assert "all_reduce #2" in comm.recorder.last_call()


@on_each_rank("run")
def test_other_arrays_are_other_calls(comm: kos.Communicator, /) -> None:
    """Of another shape, dtype, order or place."""
    x = np.ones((4, 4))
    for _ in range(3):
        comm.all_reduce(x)
    for other in (np.ones(16), np.ones((4, 4), np.float32), np.ones((4, 4), np.int64), np.ones((8, 2))):
        assert (comm.all_reduce(other) == comm.size).all()
    frozen = np.ones((4, 4))
    frozen.flags.writeable = False
    for wrong in (frozen, np.ones((8, 8))[::2, ::2], np.asfortranarray(np.arange(16.0).reshape(4, 4))):
        with pytest.raises(InvalidArgument):
            comm.all_reduce(wrong)
    out = np.zeros(8)
    for _ in range(3):
        comm.all_reduce(np.ones(4), out=out[:4])
    with pytest.raises(InvalidArgument, match="overlap"):
        comm.all_reduce(out[1:5], out=out[:4])
    assert comm.all_reduce(out[:4], out=out[:4]) is not None


@on_each_rank("run")
def test_in_place_is_another_call(comm: kos.Communicator, /) -> None:
    """If one array is passed twice; two arrays of the same memory go to Python."""
    x, y = np.ones(4), np.ones(4)
    for _ in range(3):
        comm.all_reduce(x, out=x), comm.all_reduce(x, out=y), comm.all_reduce(out=y, x=y)
    before = hits(comm)
    for out in (x, y, x, y):
        assert comm.all_reduce(x, out=out) is out
    assert comm.all_reduce(out=y, x=y) is y and hits(comm) == before + 5
    view = x[:]
    assert comm.all_reduce(x, out=view) is view and hits(comm) == before + 5
    assert x.tolist() == [comm.size**6.0] * 4  # three times in place, then twice, then by the view
    for call in (comm.all_reduce, comm.scan):  # where the first argument is no array
        for out in (x, x, x, y, y, y, x, y):
            y[:] = -1
            assert call(op=kos.ReduceOp.MAX, x=x, out=out) is out
            assert y.tolist() == (x if out is y else y).tolist()


@on_each_rank("run")
def test_a_new_timeout_counts(comm: kos.Communicator, /) -> None:
    x = np.ones(3)
    for _ in range(3):
        comm.all_reduce(x)
    comm.timeout = 0.2
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match="all_reduce #3 .*not complete after 0.2 s"):
            comm.all_reduce(x)
    comm.rendezvous.timeout = 30.0
    comm.rendezvous.barrier()


@on_each_rank("run")
def test_batches_get_them(comm: kos.Communicator, /) -> None:
    x, y = np.ones(3), np.ones(3)
    for _ in range(3):
        comm.all_reduce(x)
    x[:] = 1
    with comm.batch():
        comm.all_reduce(x)
        assert (x == 1).all()
        comm.all_reduce(y)
    assert (x == comm.size).all() and (y == comm.size).all()


@on_each_rank("run")
def test_calls_beside_others_in_flight(comm: kos.Communicator, /) -> None:
    """Waits of one advance the others: what the other rank waits for may be among them."""
    x, y = np.ones(1 << 16), np.ones(2)
    for _ in range(3):
        comm.all_reduce(y)
    y[:] = 1
    if comm.rank == 0:
        work = comm.send(x, 1, async_op=True)
        comm.all_reduce(y)
        work.wait()
    else:
        comm.recv(x, 0)
        comm.all_reduce(y)
    assert (y == comm.size).all()


def test_a_closed_communicator_refuses_them() -> None:
    def body(comm: kos.Communicator) -> None:
        part, aborted = comm.duplicate(), comm.duplicate()
        for each in (part, aborted):
            for _ in range(3):
                each.barrier()
        part.close()
        aborted.abort()
        for each in (part, aborted):
            with pytest.raises(CollectiveError, match="closed"):
                each.barrier()
        comm.barrier()

    TCPRanks(2).run(body)


@on_each_rank("run")
def test_calls_that_differ_are_named(comm: kos.Communicator, /) -> None:
    part = comm.duplicate()
    x, y = np.ones(3), np.ones(4)
    for _ in range(3):
        part.all_reduce(x)
        part.all_reduce(y)
    with pytest.raises(CollectiveMismatch, match=r"all_reduce #6 of float64\[3\].* but .*#6 of float64\[4\].*count"):
        part.all_reduce(x if comm.rank == 0 else y)
    with pytest.raises(CollectiveError, match="failed before"):
        part.all_reduce(x)
    part.abort()
    comm.barrier()


@on_each_rank("run")
def test_messages_that_differ_are_named(comm: kos.Communicator, /) -> None:
    x, y = np.ones(3), np.ones(4)
    for _ in range(3):
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
        comm.send(y, 1) if comm.rank == 0 else comm.recv(y, 0)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        with pytest.raises(CollectiveMismatch, match="recv #6 .*: rank 1 expected 4 elements .* got 3 elements"):
            comm.recv(y, 0)
    comm.barrier()


@on_each_rank("run")
def test_a_list_of_counts_may_change(comm: kos.Communicator, /) -> None:
    counts, x, out = [1, 1], np.full(1, comm.rank), np.empty(2, int)
    for _ in range(4):
        comm.all_gather_v(x, counts, out)
    assert hits(comm) == 3 and out.tolist() == [0, 1]
    counts[:] = [2, 0]
    with pytest.raises(InvalidArgument):
        comm.all_gather_v(x, counts, out)


@on_each_rank("run")
def test_counts_are_compared_by_value(comm: kos.Communicator, /) -> None:
    mine = np.arange(3.0) + 10 * comm.rank
    each: list[Any] = [[1, 2], [2, 1], (1, 2), [2, 1]]
    got: Any = None
    for turn, counts in enumerate(each * 3):
        out = np.zeros(3)
        before = hits(comm)
        got = comm.all_gather_v(mine[: counts[comm.rank]].copy(), counts, out)
        assert got.tolist() == [*np.arange(3.0)[: counts[0]], *(10 + np.arange(3.0))[: counts[1]]]
        assert hits(comm) - before == (turn > 1), "lists and tuples of the same numbers are the same call"


@on_each_rank("run")
def test_counts_that_are_no_plain_integers_go_to_python(comm: kos.Communicator, /) -> None:
    """Numbers of NumPy, and an array, of which the core would compare only the shape."""
    x, y, out = np.arange(2.0), np.arange(2.0), np.zeros(2)
    for counts in ([np.int64(1)] * 2, np.array([1, 1])):
        for _ in range(3):
            got = comm.all_to_all_v(x, counts, counts, out)
            assert got.tolist() == [comm.rank] * 2
    assert hits(comm) == 0
    counts = np.array([2, 0]) if comm.rank == 0 else np.array([0, 2])  # each keeps its own
    for _ in range(2):
        assert comm.all_to_all_v(y, counts, counts, out).tolist() == [0, 1]
    for wrong in ([True, True], [1.0, 1.0]):
        with pytest.raises(InvalidArgument):
            comm.all_to_all_v(x, wrong, [1, 1], out)
    comm.barrier()


def test_two_threads_are_found() -> None:
    def body(comm: kos.Communicator) -> None:
        part, x, begun = comm.duplicate(), np.ones(3), threading.Event()
        for _ in range(3):
            part.all_reduce(x)
        if comm.rank == 0:

            def first() -> None:
                begun.set()
                with pytest.raises(CollectiveError, match="two threads|threads"):
                    part.all_reduce(x)

            thread = threading.Thread(target=first)
            thread.start()
            assert begun.wait(10)
            while part._active is None:
                pass
            with pytest.raises(CollectiveError, match="threads"):
                part.all_reduce(x)
            thread.join(10)
        comm.rendezvous.barrier()
        part.abort()

    TCPRanks(2).run(body)


def test_a_subclass_keeps_its_methods() -> None:
    class Counting(Communicator):
        calls = 0

        def all_reduce(self, x: Any, *args: Any, **options: Any) -> Any:
            self.calls += 1
            return super().all_reduce(x, *args, **options)

    def body(comm: kos.Communicator) -> None:
        other = Counting(comm.backend, comm.rendezvous, comm.probes, 30.0)
        other._collectives = comm._collectives  # one backend, one order
        for _ in range(3):
            other.all_reduce(np.ones(2))
        assert other.calls == 3
        for _ in range(3):
            comm.barrier()
        assert hits(comm) == 2 and other._eager is None  # the core has those of one communicator
        assert comm.recorder.last_call() != other.recorder.last_call()

    TCPRanks(2).run(body)


@on_each_rank("run")
def test_a_call_beside_others_is_kept_once(comm: kos.Communicator, /) -> None:
    """It goes through the method each time; other calls stay known."""
    x, y, peer = np.ones(3), np.ones(2), 1 - comm.rank
    comm.all_reduce(y)
    work = comm.recv(np.empty(1), peer, async_op=True)
    for _ in range(100):
        comm.all_reduce(x)
    comm.send(np.ones(1), peer)
    work.wait()
    before = hits(comm)
    comm.all_reduce(y)
    assert hits(comm) == before + 1


@on_each_rank("run")
def test_keywords_belong_to_a_call(comm: kos.Communicator, /) -> None:
    """Also in another order, with the same arrays."""
    for _ in range(3):
        x, out = np.ones(3), np.zeros(3)
        comm.all_reduce(x=x, out=out)
        assert (x == 1).all() and (out == comm.size).all()
        x, out = np.ones(3), np.zeros(3)
        comm.all_reduce(out=out, x=x)
        assert (x == 1).all() and (out == comm.size).all()
        comm.all_reduce(x, out=out)
    assert hits(comm) == 6
    with pytest.raises(TypeError):
        comm.all_reduce(x, to=out)  # type: ignore[call-overload]


@on_each_rank("run")
def test_nothing_holds_the_arrays_or_the_communicator(comm: kos.Communicator, /) -> None:
    x = np.ones(1000)
    seen = weakref.ref(x)
    for _ in range(3):
        comm.all_reduce(x)
    del x
    assert seen() is None
    part = comm.duplicate()
    for _ in range(3):
        part.barrier()
    part.close()
    gone = weakref.ref(part)
    del part
    until = time.monotonic() + 10
    while gone() is not None and time.monotonic() < until:
        gc.collect()  # another rank, a thread of this process, may be collecting
        time.sleep(0.01)
    assert gone() is None


@on_each_rank("run")
def test_more_calls_than_are_kept(comm: kos.Communicator, /) -> None:
    for _, count in itertools.product(range(3), range(1, 100)):
        assert (comm.all_reduce(np.ones(count)) == comm.size).all()


def test_a_call_is_never_kept_as_another() -> None:
    """Calls of batches, by a schedule, and that raise come between a call that is kept and its arguments."""

    def body(comm: Any) -> None:
        x, y = np.ones(4), np.empty(4)
        if comm.rank == 0:
            for dst in (1, 2):
                with comm.batch():
                    comm.send(x, dst)
                    comm.recv(y, dst)
            with pytest.raises(InvalidArgument):
                comm.send(x, 3)
            for value, dst in ((42.0, 2), (43.0, 1), (44.0, 2)):
                comm.send(np.full(4, value), dst)
        else:
            with comm.batch():
                comm.recv(y, 0)
                comm.send(x, 0)
            for value in {1: (43.0,), 2: (42.0, 44.0)}[comm.rank]:
                assert comm.recv(y, 0).tolist() == [value] * 4
        for _ in range(3):
            z = comm.all_reduce(x.copy(), algorithm="ring")
            comm.all_reduce_init(x.copy()).start().wait()
            before = hits(comm)
            z = comm.all_reduce(z, algorithm="ring")
            assert hits(comm) == before, "a call by a schedule ran in the core"

    TCPRanks(3).run(body)


def test_threads_do_not_keep_each_others_calls() -> None:
    """While a thread waits in a send, another one sends the same array to another rank."""

    def body(comm: Any) -> None:
        x = np.zeros(1_000_000)  # each send waits for its receive
        if comm.rank == 0:
            other = threading.Thread(target=lambda: (time.sleep(0.1), comm.send(x, 2)))
            other.start()
            comm.send(x, 1)
            other.join()
            comm.send(x + 1, 1)
            comm.send(x + 2, 2)
        else:
            time.sleep(0.3 * comm.rank)
            assert [comm.recv(x, 0)[0] for _ in range(2)] == [0.0, comm.rank]

    TCPRanks(3).run(body)


def test_a_known_call_beside_others_keeps_the_table() -> None:
    """As many signatures as are kept; then each again, beside an outstanding Work."""

    def body(comm: Any) -> None:
        arrays = [np.ones(n) for n in range(1, 32)]  # with the one that is outstanding
        for x in arrays * 2:
            comm.all_reduce(x)
        work = comm.all_reduce(np.ones(3), async_op=True)
        comm.all_reduce(arrays[0])
        work.wait()
        before = hits(comm)
        for x in arrays:
            comm.all_reduce(x)
        assert hits(comm) - before == len(arrays)

    TCPRanks(2).run(body)
