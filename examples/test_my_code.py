"""Tests of your own distributed code, on ranks that are threads: no launcher, no GPU, and faults on demand.

pytest -p kos.testing.plugin examples/test_my_code.py
"""

import numpy as np
import pytest

from kos.errors import CollectiveMismatch, RankLost
from kos.testing import Deadlock, Fault, spawn


def normalise(comm, x):
    """Our code: shift and scale ``x``, of which every rank has a part, to mean 0 and variance 1 over all parts."""
    count, total, squares = comm.all_reduce(np.array([x.size, x.sum(), (x * x).sum()]))
    mean = total / count
    return (x - mean) / np.sqrt(squares / count - mean**2)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_the_parts_together_have_mean_0_and_variance_1(spawn_ranks):
    parts = spawn_ranks(lambda comm: normalise(comm, np.arange(10.0) ** (comm.rank + 1)))
    whole = np.concatenate(parts)
    assert abs(whole.mean()) < 1e-12 and abs(whole.var() - 1) < 1e-12


def test_a_rank_that_dies_raises_on_the_others(spawn_ranks):
    def body(comm):
        with pytest.raises(RankLost, match="rank 1 is gone"):
            normalise(comm, np.ones(3))
        return "raised"

    assert spawn_ranks(body, faults=[Fault("crash", rank=1)]) == ["raised", None]


def test_a_branch_that_one_rank_does_not_take_is_found(spawn_ranks):
    def body(comm):
        with pytest.raises(CollectiveMismatch, match="rank 0 called barrier .* but rank 1 called all_reduce"):
            comm.barrier() if comm.rank == 0 else normalise(comm, np.ones(3))

    spawn_ranks(body)


def test_messages_that_wait_for_each_other_are_found():
    def body(comm):
        comm.send(np.ones(3), 1 - comm.rank)  # nccl would wait here forever
        return comm.recv(np.empty(3), 1 - comm.rank)

    with pytest.raises(Deadlock, match="the cycle: rank 0 -> rank 1 -> rank 0"):
        spawn(body, 2)
