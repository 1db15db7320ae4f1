"""Ranks that find each other by a store of keys, as torch.distributed has one."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

import kos
from kos.comm.rendezvous.foreign import StoreRendezvous
from kos.errors import CollectiveTimeout, RendezvousError
from tests.comm.tcp_ranks import TIMEOUT, run_threads


class DictStore:
    """A store within the process."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()
        self.waits_for_hub = threading.Event()

    def set(self, key, value):
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else value
            self._changed.notify_all()

    def get(self, key):
        return self._values[key]

    def add(self, key, value):
        with self._changed:
            self._values[key] = self._values.get(key, 0) + value
            return self._values[key]

    def wait(self, keys, timeout):
        if keys[0].endswith("/hub"):
            self.waits_for_hub.set()
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout.total_seconds()):
                raise RuntimeError("not set in time")


def ranks_of(size, body, store=None, timeout=TIMEOUT, **keywords):
    """What ``body(comm)`` returned or raised on each rank."""
    store = store or DictStore()

    def rank(number):
        rendezvous = StoreRendezvous(store, number, size, timeout, **keywords)
        with kos.init("tcp", rendezvous=rendezvous, timeout=timeout) as comm:
            return body(comm)

    return run_threads(*[lambda number=number: rank(number) for number in range(size)])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_of_a_store_are_a_group(size):
    hook = sys.excepthook
    totals = ranks_of(size, lambda comm: comm.all_reduce(np.arange(3.0) + comm.rank).tolist())
    assert totals == [[size * i + size * (size - 1) / 2 for i in range(3)]] * size
    assert sys.excepthook is hook


def test_a_second_group_does_not_read_what_the_first_left_in_the_store():
    store = DictStore()

    def rank(number, late):
        if late and number == 0:
            assert store.waits_for_hub.wait(TIMEOUT)
        with kos.init("tcp", rendezvous=StoreRendezvous(store, number, 2, TIMEOUT), timeout=TIMEOUT) as comm:
            return comm.all_reduce(np.array([comm.rank])).item()

    for late in (False, True):
        store.waits_for_hub.clear()
        assert run_threads(lambda: rank(0, late), lambda: rank(1, late)) == [1, 1]  # noqa: B023


def test_a_group_of_a_store_can_be_split():
    def body(comm):
        with comm.split(comm.rank % 2) as half:
            return half.all_reduce(np.array([comm.rank])).item()

    assert ranks_of(4, body) == [2, 4, 2, 4]


def test_every_rank_names_those_that_are_missing():
    store = DictStore()

    def rank(number):
        return StoreRendezvous(store, number, 3, 1.0, world_ranks=[4, 5, 9])

    for error in run_threads(lambda: rank(0), lambda: rank(1)):
        assert isinstance(error, RendezvousError) and error.ranks == (9,)
        assert "ranks [9] of world did not join the store within 1 s" in str(error)


def test_errors_name_the_ranks_of_the_world():
    def body(comm):
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout) as caught:
                comm.recv(np.empty(1), 1, timeout=0.2)
            comm.barrier()
            return str(caught.value)
        return comm.barrier()

    text = ranks_of(2, body, world_ranks=[3, 7])[0]
    assert "rank 7 of world sent nothing" in text


def test_a_store_that_has_no_keys_of_rank_0_is_waited_for():
    with pytest.raises(RendezvousError, match="did not join the store within 0.3 s"):
        StoreRendezvous(DictStore(), 1, 2, 0.3)
