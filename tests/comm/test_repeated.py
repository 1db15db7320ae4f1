"""Calls like earlier ones on a GPU: prepared once, for any arrays, and again where anything about them has changed."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import kos
from kos.cuda import streams
from kos.errors import CollectiveError, InvalidArgument
from kos.memory.array import Array
from tests.comm import fake_nccl, test_auto
from tests.comm.fake_gpu import captures
from tests.comm.fake_nccl import FakeRanks
from tests.comm.gpu_ranks import Prepared
from tests.comm.ranks import on_each_rank
from tests.fake_cuda import Stream

COUNT = 6
SIZE = 3


@pytest.fixture
def of_graphs(fake, monkeypatch):
    """A table by which small calls go by another part in a graph."""
    table = test_auto.ROUTES | {
        "all_reduce 16-bit ordinary graph": [[64, "peer"], [None, "nccl"]],
        "all_reduce 16-bit ordinary eager": [[None, "nccl"]],
    }
    monkeypatch.setattr(test_auto.Peer, "table", test_auto.parse(test_auto.changed("routes", to=table), "the test"))


@pytest.fixture
def alone(fake, monkeypatch):
    fake_nccl.launching_alone(monkeypatch)
    return fake_nccl.alone()


def ones(count: int = COUNT, dtype: Any = np.float32, stream: Any = None) -> Array:
    return Array.from_numpy(np.ones(count, dtype), 0, stream=stream)


@on_each_rank(FakeRanks(SIZE).run)
def test_what_a_rank_receives_may_change_though_it_sends_the_same(gpu, /, fake):
    """Rank 0 sends the same, and receives as many elements, but not as many from each rank."""
    comm, me = gpu.comm, gpu.comm.rank
    for turn in (0, 1, 2, 0, 0, 0, 1, 1, 1, 2, 0, 2):
        table = [[2, 2, 2], [1 + turn, 2, 2], [3 - turn, 2, 2]]
        sent, received, ranks = table[me], [row[me] for row in table], 10 * turn + np.arange(SIZE)
        x = Array.from_numpy(np.full(sum(sent), ranks[me]), 0)
        out = Array.zeros(sum(received), np.int64, 0)
        comm.all_to_all_v(x, sent, received, out)
        assert out.numpy().tolist() == np.repeat(ranks, received).tolist()


def kept(comm: kos.Communicator, x: Array, **options: Any) -> Prepared:
    """After as many calls as it takes."""
    prepared = Prepared(comm)
    for _ in range(2):
        comm.all_reduce(x, **options)
    assert not prepared.by(lambda: comm.all_reduce(x, **options))
    return prepared


def test_an_array_of_another_stream_is_used_in_its_order(alone, fake):
    usual, seen = fake.all_reduce, list[int]()
    fake.all_reduce = lambda *arguments: (seen.append(arguments[-1]), usual(*arguments))
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
def test_an_end_is_the_end(alone, how, fake):
    x = ones()
    kept(alone, x)
    launched = list[Any]()
    fake.all_reduce = launched.append
    if how == "closed":
        alone.close()
    elif how == "aborted":
        alone.abort()
    else:
        alone.backend.failures.first = CollectiveError("an earlier failure")
    with pytest.raises(CollectiveError, match="closed|out of step|earlier failure"):
        alone.all_reduce(x)
    assert not launched


def test_nothing_is_kept_longer_than_its_arrays_and_its_backend(alone):
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


@on_each_rank(test_auto.run)
def test_auto_repeats_where_a_graph_goes_another_way_too(comm, log, /, of_graphs):
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
