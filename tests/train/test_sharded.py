"""Where parts of tensors lie: boxes cut along named axes, and slices of a layout that several ranks hold."""

import itertools

import numpy as np
import pytest

from kos.errors import CheckpointError
from kos.memory.sharded import Sharded
from kos.testing import spawn
from kos.transfer.placement import Placement
from tests.train.models import small
from tests.train.sharded import make_state


@pytest.mark.parametrize("axes", [{"tp": 0}, {"tp": 1}, {"tp": 2, "ep": 0}, {"tp": 1, "ep": 1}], ids=str)
def test_the_boxes_of_all_ranks_make_up_the_tensor(axes):
    """Also if two axes of ranks split the same dimension."""
    shape, seen = (4, 8, 6), np.zeros((4, 8, 6), int)
    for ranks in itertools.product(range(2), repeat=len(axes)):
        place = Sharded(shape)
        for rank, (axis, dim) in zip(ranks, axes.items(), strict=True):
            place = place.split(axis, dim, rank, 2)
        seen[place.box] += 1
        assert seen[place.box].shape == place.local and place.size == seen[place.box].size
        assert place.transposed.local == place.local[::-1] and place.transposed.box == place.box[::-1]
        assert seen[place.rows(1, 2)].shape == (1, *place.local[1:])
        assert Placement.of(place, "w").parts[0].start == tuple(each.start for each in place.box)
    assert (seen == 1).all()


def test_neighbours_hold_copies_of_one_of_few_parts():
    places = [Sharded((6, 4)).split("tp", 0, rank, 4, most=2) for rank in range(4)]
    assert [(each.box[0].start, each.along("tp").copies) for each in places] == [(0, 2), (0, 2), (3, 2), (3, 2)]
    assert places[0].along("dp") is None and Sharded((6, 4)).local == (6, 4)


def test_a_rank_without_a_part_gets_it_from_the_first_that_has_it():
    """The first of three ranks lost its copies, and the last had only the first half of the weights."""
    def body(comm):
        state = make_state(comm, small())
        weights, end = state.optimizer.weights, state.optimizer.weights.end
        for number, held in enumerate(state.arrays.values()):
            held.flat[:] = np.arange(held.flat.size) % 97 + number
        expected = {kept: held.flat[: held.end].copy() for kept, held in state.arrays.items()}
        mine = state.to_host(3)
        if comm.rank == 0:
            mine = mine._replace(values={})
        if comm.rank == 2:
            half = [(0, weights.flat[: end // 2].copy())]
            mine = mine._replace(values={**mine.values, "weights": half})
        for held in state.arrays.values():
            held.flat[:] = 0
        holds = [{}, state.holds, {**state.holds, "weights": [(0, end // 2)]}]
        state.load(mine, comm, holds)
        for kept, held in state.arrays.items():
            np.testing.assert_array_equal(held.flat[: held.end], expected[kept], kept)
        assert state.optimizer.step_count == 3
        with pytest.raises(CheckpointError, match="got none with some of weights: ranks 1, 3 had it"):
            state.load(mine, comm, [{}, holds[2], holds[2]], {1, 3})

    spawn(body, 3, timeout=60)
