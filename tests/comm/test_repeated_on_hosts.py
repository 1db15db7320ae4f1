"""Repeated calls on host memory are prepared once, for any ndarrays, and anew if anything about them has changed."""

import gc
import weakref

import numpy as np
import pytest

import kos
from kos.comm.prepared import MOST_STORED
from kos.errors import InvalidArgument
from kos.testing import spawn
from tests.comm import shared_ranks
from tests.comm.ranks import on_each_rank
from tests.comm.tcp_ranks import TCPRanks


@pytest.fixture
def alone():
    """A group of one."""
    return kos.init("mock")


def test_arrays_are_not_held_and_the_cache_is_bounded(alone):
    arrays = []
    for count in range(2 * MOST_STORED):
        alone.all_reduce(x := np.ones(count))
        arrays.append(weakref.ref(x))
    del x
    gc.collect()
    assert {each() for each in arrays} == {None} and 0 < len(alone.backend.store) <= MOST_STORED


@shared_ranks.needs_core
def test_later_results_are_new_arrays_and_their_calls_are_not_checked(monkeypatch):
    def make_calls(comm):
        first = comm.all_gather(x := np.ones(3))
        monkeypatch.setattr("kos.comm.collectives.output", None)  # a call that is checked gets its result from there
        assert (comm.all_gather(2 * x) == [[2] * 3] * 2).all() and (first == 1).all()

    TCPRanks(2).run(make_calls)


@pytest.mark.parametrize("run", [spawn, shared_ranks.run], ids=["mock", "shared"])
@on_each_rank("run", 2)
def test_a_root_in_an_array_is_read_at_each_call(comm, /):
    for root in (0, 0, 0, 1, 0, 1):
        x = np.full(3, comm.rank)
        assert comm.broadcast(x, np.array(root)).tolist() == [root] * 3


@pytest.mark.parametrize("run", [spawn, shared_ranks.run], ids=["mock", "shared"])
@on_each_rank("run", 2)
def test_a_known_call_with_async_op_is_refused_in_a_batch(comm, /):
    x = np.ones(3)
    for _ in range(3):
        comm.all_reduce(x, async_op=True).wait()
    with pytest.raises(InvalidArgument, match="async_op: expected False in a batch"), comm.batch():
        comm.all_reduce(x, async_op=True)
    assert comm.all_reduce(np.ones(3)).tolist() == [2] * 3


@on_each_rank(shared_ranks.run, 2)
def test_cached_calls_take_no_array_of_another_rank_than_the_root(comm, /):
    whole, part = np.ones(2), np.ones(1)
    for counts in ((), ([1, 1],)):
        suffix = "_v" if counts else ""
        scatter, gather = (getattr(comm, name + suffix) for name in ("scatter", "gather"))
        for _ in range(3):
            scatter(None if comm.rank else whole, *counts, part)
            gather(part, *counts, out=None if comm.rank else whole)
        if comm.rank:
            with pytest.raises(InvalidArgument, match="x: expected None on rank 1"):
                scatter(part, *counts, part)
            with pytest.raises(InvalidArgument, match="out: expected None on rank 1"):
                gather(part, *counts, out=whole)
