"""Calls like earlier ones on a GPU: prepared once, for any arrays, and again where anything about them has changed."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm import prepared as prepared_calls
from kos.comm.gpu.eager import EagerCalls
from kos.comm.gpu.nccl import NCCLBackend
from kos.cuda import driver, streams
from kos.errors import CollectiveError, InvalidArgument
from kos.memory.array import Array
from tests.comm import fake_nccl, test_auto
from tests.comm.fake_nccl import FakeNCCL, FakeRanks, Stream, captures
from tests.comm.gpu_ranks import Prepared
from tests.comm.model import Step
from tests.comm.ranks import on_each_rank
from tests.comm.test_operations import on_gpu
from tests.comm.test_repeated_on_hosts import CASES, check_cached

COUNT = 6
SIZE = 3


@pytest.fixture
def of_graphs(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table by which small calls go by another part in a graph."""
    table = test_auto.ROUTES | {
        "all_reduce 16-bit ordinary graph": [[64, "peer"], [None, "nccl"]],
        "all_reduce 16-bit ordinary eager": [[None, "nccl"]],
    }
    monkeypatch.setattr(test_auto.Peer, "table", test_auto.parse(test_auto.changed("routes", to=table), "the test"))


@pytest.fixture
def alone(fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> kos.Communicator:
    fake_nccl.launching_alone(monkeypatch)
    return fake_nccl.alone()


def ones(count: int = COUNT, dtype: Any = np.float32, stream: Any = None) -> Array:
    return Array.from_numpy(np.ones(count, dtype), 0, stream=stream)


@pytest.mark.parametrize("step", [step for step in CASES if step.name != "barrier"], ids=str)
@on_each_rank(FakeRanks(SIZE).run)
def test_a_later_call_is_prepared_and_gives_what_the_first_gave(
    gpu: Any, /, fake: FakeNCCL, seed: int, step: Step
) -> None:
    comm = gpu.comm
    check_cached(comm, replace(step, dtype=np.int64), seed, *on_gpu(0), connects=1)
    entries = comm.recorder.entries()
    entries = entries[:: len(entries) // 6]  # of a send_recv each has two
    number = "p2p_seq_id" if step.name == "send_recv" else "collective_seq_id"
    assert [entry[number] for entry in entries] == list(range(6))
    sizes = "input_sizes", "output_sizes", "input_dtypes"
    keys = "profiling_name", "reduce_op", "root", "timeout_ms", "state", *sizes
    assert all(entry[key] == entries[0][key] for entry in entries for key in keys)
    assert len({(f["filename"], f["line"]) for entry in entries for f in entry["frames"]}) == 1


@on_each_rank(FakeRanks(SIZE).run)
def test_other_ranks_are_another_call(gpu: Any, /, fake: FakeNCCL) -> None:
    comm, prepared = gpu.comm, Prepared(gpu.comm)
    x, y = Array.from_numpy(np.full(COUNT, comm.rank), 0), Array.zeros(COUNT, np.int64, 0)
    for step in (1, 1, 1, 2, 2, 1):
        to, of = (comm.rank + step) % SIZE, (comm.rank - step) % SIZE
        comm.send_recv(x, y, to, of)
        assert (y.numpy() == of).all()
        with pytest.raises(InvalidArgument, match="tag: expected 0"):
            comm.send_recv(x, y, to, of, tag=1)
    for call in (comm.gather, comm.reduce):
        a, b = (Array.zeros(COUNT * n, np.int64, 0) for n in (1, SIZE if call == comm.gather else 1))
        for root in (0, 0, 0, 1, 1, 0):
            a.copy_from(np.full(COUNT, root + 1))
            b.copy_from(np.full(b.size, -1))
            result = call(a, root, out=b if comm.rank == root else None)
            assert (result is b) == (comm.rank == root)
            want = -1 if comm.rank != root else root + 1 if call == comm.gather else SIZE * (root + 1)
            assert (b.numpy() == want).all()
    assert prepared


@on_each_rank(FakeRanks(SIZE).run)
def test_calls_with_counts_that_change(gpu: Any, /, fake: FakeNCCL) -> None:
    """The results are right, also on the arrays of an earlier call with other counts."""
    comm, me, arrays = gpu.comm, gpu.comm.rank, dict[tuple[str, int], Array]()

    def array(name: str, count: int, fill: int) -> Array:
        x = arrays.setdefault((name, count), Array.zeros(count, np.int64, 0))
        x.copy_from(np.full(count, fill))
        return x

    for turn in (0, 1, 2, 0, 0, 0, 1, 1, 1, 4, 0, 4, 0, 4, 4, 4, 5):
        table = [[(turn + 2 * rank + to) % 4 for to in range(SIZE)] for rank in range(SIZE)]
        sent, received, counts, ranks = table[me], [row[me] for row in table], table[1], 10 * turn + np.arange(SIZE)
        x, out = array("x", sum(sent), ranks[me]), array("out", sum(received), -1)
        comm.all_to_all_v(x, sent, received, out)
        assert out.numpy().tolist() == np.repeat(ranks, received).tolist()
        part, whole = array("part", counts[me], ranks[me]), array("whole", sum(counts), -1)
        comm.all_gather_v(part, counts, whole)
        assert whole.numpy().tolist() == np.repeat(ranks, counts).tolist()
        gathered = array("gathered", sum(counts), -1) if me == 1 else None
        comm.gather_v(part, counts, 1, gathered)
        assert gathered is None or gathered.numpy().tolist() == whole.numpy().tolist()
        own = array("own", counts[me], -1)
        comm.scatter_v(gathered, counts, own, 1)
        assert own.numpy().tolist() == [ranks[me]] * counts[me]
        comm.reduce_scatter_v(whole, counts, own)
        assert own.numpy().tolist() == [SIZE * ranks[me]] * counts[me]


def uneven_call(comm: kos.Communicator, name: str, counts: Any, x: Array, out: Array) -> Any:
    """The call of an operation with counts; all ranks pass the same."""
    root = comm.rank == 1
    arguments: dict[str, tuple[Any, ...]] = {
        "all_to_all_v": (x, counts, counts, out), "gather_v": (x, counts, 1, out if root else None),
        "scatter_v": (x if root else None, counts, out, 1),
    }  # fmt: skip
    return getattr(comm, name)(*arguments.get(name, (x, counts, out)))


FORMS = {  # and how many shards of equal size the input and the output have
    "all_to_all_v": (SIZE, SIZE), "all_gather_v": (1, SIZE), "gather_v": (1, SIZE), "scatter_v": (SIZE, 1),
    "reduce_scatter_v": (SIZE, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@on_each_rank(FakeRanks(SIZE).run)
def test_counts_are_compared_by_value(gpu: Any, /, name: str, fake: FakeNCCL) -> None:
    comm, prepared, counts = gpu.comm, Prepared(gpu.comm), [COUNT] * SIZE
    x, out, other = (Array.zeros(COUNT * shards, np.int64, 0) for shards in (*FORMS[name], FORMS[name][1]))

    def found(counts: Any, out: Array = out) -> bool:
        return not prepared.by(lambda: uneven_call(comm, name, counts, x, out))

    assert [found(counts) for _ in range(3)] == [False, False, True]
    assert found(list(counts)) and found(tuple(counts)) and found([np.int64(COUNT)] * SIZE)
    assert found(counts, other)
    counts[:] = [COUNT + 1] * SIZE  # in the caller's own list
    for wrong in (counts, [COUNT] * (SIZE - 1), [COUNT, COUNT, -COUNT], 5, [float(COUNT)] * SIZE):
        with pytest.raises(InvalidArgument, match=rf"counts|x: expected {SIZE * (COUNT + 1)} elements"):
            uneven_call(comm, name, wrong, x, out)
    assert found([COUNT] * SIZE)


@on_each_rank(FakeRanks(SIZE).run)
def test_sizes_that_travel_are_sent_at_each_call(gpu: Any, /, fake: FakeNCCL) -> None:
    comm = gpu.comm
    x = Array.from_numpy(np.full(COUNT, comm.rank), 0)
    for turn in range(4):
        mine = x[: COUNT - turn * (comm.rank == 1)]
        sizes = [COUNT - turn * (rank == 1) for rank in range(SIZE)]
        out = Array.zeros(sum(sizes), np.int64, 0)
        comm.all_gather_v(mine, None, out)
        assert (out.numpy() == np.repeat(np.arange(SIZE), sizes)).all()


def test_counts_that_change_at_each_call_fill_no_memory(
    alone: kos.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_calls, "MOST_STORED", 8)
    x, out = ones(100), ones(100)
    for count in range(100):
        alone.all_to_all_v(x[:count], [count], [count], out[:count])
        alone.all_gather_v(x[: 1 + count % 2], [1 + count % 2], out[: 1 + count % 2])
    assert len(alone.backend.store) <= 8


def kept(comm: kos.Communicator, x: Array, **options: Any) -> Prepared:
    """After as many calls as it takes."""
    prepared = Prepared(comm)
    for _ in range(2):
        comm.all_reduce(x, **options)
    assert not prepared.by(lambda: comm.all_reduce(x, **options))
    return prepared


OPTIONS: list[dict[str, Any]] = [{"timeout": 3.0}, {"deterministic": True}, {"async_op": True}]


def test_a_different_call_is_another_signature(alone: kos.Communicator) -> None:
    x, out, memory = ones(), ones(), ones(2 * COUNT)
    odd = Array(memory.pointer + 4, (COUNT,), np.float32, 0, owner=memory)  # of another alignment
    prepared = kept(alone, x, out=out)
    for call in (
        lambda: alone.all_reduce(x[:3], out=out[:3]),
        lambda: alone.all_reduce(x.view("int32"), out=out.view("int32")),
        lambda: alone.all_reduce(x.reshape(2, 3), out=out.reshape(2, 3)),
        lambda: alone.all_reduce(x),
        lambda: alone.all_reduce(odd),
        lambda: alone.reduce_scatter(x, out),
        *(partial(alone.all_reduce, x, out=out, **options) for options in OPTIONS),
    ):
        assert prepared.by(call)
    for call in (
        lambda: alone.all_reduce(x, out=ones()),
        lambda: alone.all_reduce(ones(), out=x),
        lambda: alone.all_reduce(x, out=out, stream=5),
    ):
        assert not prepared.by(call)


def test_arrays_that_overlap_otherwise_are_another_signature(alone: kos.Communicator) -> None:
    """Their addresses are compared at each call, since no signature has them."""
    memory = ones(2 * COUNT)
    for _ in range(3):
        alone.all_reduce(memory[:COUNT], out=memory[COUNT:])
        with pytest.raises(InvalidArgument, match="overlap"):
            alone.all_reduce(memory[:COUNT], out=memory[4 : COUNT + 4])  # as far apart modulo 16 bytes as two arrays


@pytest.mark.parametrize("dtype", [np.float32, np.int16])  # that NCCL adds, and that kos adds
def test_a_group_of_one_makes_the_arrays_that_it_is_asked_for(alone: kos.Communicator, dtype: Any) -> None:
    x = ones(dtype=dtype)
    for operation in (alone.all_gather, alone.reduce_scatter):
        for _ in range(3):
            assert operation(x, x) is x
        made = operation(x)
        assert isinstance(made, Array) and made is not x
    made = alone.reduce_scatter_v(alone.all_reduce(x), [COUNT])
    assert made.numpy().tolist() == x.numpy().tolist() == [1] * COUNT


@pytest.mark.parametrize("which", ["x", "out", "in place"])
@pytest.mark.parametrize("how", ["freed", "readonly"])
def test_an_array_that_may_no_longer_be_used_is_refused(alone: kos.Communicator, how: str, which: str) -> None:
    x, out = ones(), None if which == "in place" else ones()
    kept(alone, x, out=out)
    array: Any = out if which == "out" else x
    if how == "freed":
        array.owner.close()
    else:
        array.readonly = True
    expected = {"freed": "an array with memory", "readonly": "a writable"}[how]
    fits = (how, which) == ("readonly", "x")  # it is only read
    wrong = pytest.raises(InvalidArgument, match=f"{'out' if array is out else 'x'}: expected {expected}")
    with nullcontext() if fits else wrong:
        alone.all_reduce(x, out=out)


def test_an_array_of_another_stream_is_used_in_its_order(
    alone: kos.Communicator, fake: FakeNCCL, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, seen = fake.all_reduce, list[int]()
    monkeypatch.setattr(fake, "all_reduce", lambda *arguments: (seen.append(arguments[-1]), usual(*arguments)))
    alone.backend.store.clear()
    first, second = Stream(7), Stream(8)
    x, out = ones(stream=first), ones(stream=first)
    kept(alone, x, out=out)
    assert set(seen) == {7}
    x.stream = out.stream = second
    alone.all_reduce(x, out=out)
    assert seen[-1] == 8
    kept(alone, x, out=out)
    out.stream = first
    with pytest.raises(InvalidArgument, match="stream of x"):
        alone.all_reduce(x, out=out)
    x.stream = out.stream = None
    alone.all_reduce(x, out=out)
    assert seen[-1] == streams.LEGACY


@pytest.mark.parametrize("how", ["closed", "broken", "aborted"])
def test_an_end_is_the_end(alone: kos.Communicator, how: str, monkeypatch: pytest.MonkeyPatch, fake: FakeNCCL) -> None:
    x = ones()
    kept(alone, x)
    launched = list[Any]()
    monkeypatch.setattr(fake, "all_reduce", launched.append)
    if how == "closed":
        alone.close()
    elif how == "aborted":
        alone.abort()
    else:
        alone.backend.failures.first = CollectiveError("an earlier failure")
    with pytest.raises(CollectiveError, match="closed|out of step|earlier failure"):
        alone.all_reduce(x)
    assert not launched


def test_communicators_that_take_turns_find_their_own(fake: FakeNCCL) -> None:
    one, other = (fake_nccl.alone() for _ in range(2))
    x, out = ones(), ones()
    counts = []
    for _ in range(6):
        counts.append([Prepared(comm).by(partial(comm.all_reduce, x, out=out)) for comm in (one, other)])
    assert counts[2:] == [[False, False]] * 4
    other.close()
    for _ in range(3):
        one.all_reduce(x, out=out)
    assert not Prepared(one).by(partial(one.all_reduce, x, out=out))


def test_nothing_is_kept_longer_than_its_arrays_and_its_backend(alone: kos.Communicator) -> None:
    gc.disable()
    try:
        x, out = ones(stream=(stream := Stream(9))), ones(stream=stream)
        kept(alone, x, out=out)
        alone.all_reduce(ones())  # the last operation, of others
        arrays = [weakref.ref(each) for each in (x, out)]
        del x, out
        assert [each() for each in arrays] == [None] * 2
    finally:
        gc.enable()
    x = ones()
    kept(alone, x)
    backend = weakref.ref(alone.backend)
    alone.close()
    vars(alone).clear()
    gc.collect()
    assert backend() is None, "an array keeps the backend"


def test_what_alternates_is_right_too(alone: kos.Communicator) -> None:
    x, out = ones(dtype=np.int32), ones(dtype=np.int32)
    for _ in range(6):
        assert alone.all_reduce(x, out=out) is out
        assert alone.all_reduce(x) is x
        assert alone.all_gather(x, out) is out
        assert alone.all_reduce(out, out=x) is x
    names = [entry["profiling_name"] for entry in alone.recorder.entries()[:24]]
    assert names == ["nccl:all_reduce", "nccl:all_reduce", "nccl:all_gather", "nccl:all_reduce"] * 6


@on_each_rank(test_auto.run)
def test_auto_repeats_where_a_graph_goes_another_way_too(
    comm: kos.Communicator, log: test_auto.Log, /, of_graphs: None
) -> None:
    small, large, prepared = test_auto.zeros(8, stream=5), test_auto.zeros(1000, stream=5), Prepared(comm)
    for _ in range(3):
        comm.all_reduce(small)
        comm.all_reduce(large)
    assert not prepared.by(lambda: comm.all_reduce(small))
    assert not prepared.by(lambda: comm.all_reduce(large))
    assert set(log) == {"nccl"}
    for graph in (captures, nullcontext, captures):
        log.clear()
        with graph():
            comm.all_reduce(small)
            comm.all_reduce(large)
        assert log == ["peer" if graph is captures else "nccl", "nccl"]


@pytest.mark.parametrize("route_depends", [False, True], ids=["one route", "another in a graph"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["any", "symmetric"])
@pytest.mark.parametrize("stream", [Stream(5), None], ids=["a stream", "legacy"])
def test_a_repeated_call_queries_the_capture_at_most_once(
    of_graphs: None, monkeypatch: pytest.MonkeyPatch, stream: Stream | None, symmetric: bool, route_depends: bool
) -> None:
    function, queries = driver.cu.cuStreamIsCapturing, list[int]()
    monkeypatch.setattr(driver.cu, "cuStreamIsCapturing", lambda stream: queries.append(stream) or function(stream))
    monkeypatch.setattr(NCCLBackend, "watched", False)  # else the watchdog marks a call, which queries again
    monkeypatch.setattr(EagerCalls, "remember", lambda *_: None)  # else the core makes the call, and asks the driver

    def body(comm: kos.Communicator, log: test_auto.Log) -> None:
        count = 8 if route_depends else 1000
        x, out = (comm.allocate(count, np.float16) if symmetric else test_auto.zeros(count) for _ in range(2))
        x.stream = out.stream = stream
        kept(comm, x, out=out)
        comm.rendezvous.barrier()
        queries.clear()
        comm.rendezvous.barrier()
        comm.all_reduce(x, out=out)
        comm.rendezvous.barrier()
        assert queries == [5] * test_auto.SIZE * (stream is not None and (symmetric or route_depends))

    test_auto.run(body)
