"""The grid of ranks: its numbers, its communicators, the part of a model that each rank holds."""

import itertools
from types import SimpleNamespace

import pytest

from kos.comm.communicator import Communicator
from kos.errors import ConfigError, InvalidArgument
from kos.testing import spawn
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.device.choose import layout_of
from kos.train.model.families import FAMILIES
from kos.train.model.llama import Stages, split_layers
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.parallel.schedules import Schedule
from kos.train.parallel.tensor import TensorParallel
from kos.train.trainer import Trainer


def test_an_axis_of_one_rank_costs_nothing(before_call):
    before_call(Communicator, "split", lambda *_, **__: pytest.fail("a communicator is made"))

    def look(comm):
        mesh = Mesh(comm)
        assert mesh.dp.comm is mesh.replicas.comm is comm
        assert mesh.tp == mesh.pp == mesh.cp == (0, 1, None)
        with pytest.raises(InvalidArgument, match="expected an axis of several ranks, got one of 1"):
            _ = mesh.tp.comm

    spawn(look, 3)


def test_a_mesh_of_another_number_of_ranks_is_refused():
    with pytest.raises(InvalidArgument, match=r"expected a layout of 2 ranks, got Layout\(pp=1, dp=3, cp=1, tp=1\)"):
        spawn(lambda comm: Mesh(comm, Layout(dp=3)), 2)


def row(ranks: int, chunks: int = 1, v_shape: bool = False) -> Stages:
    return Schedule("", 1, ((),) * ranks, chunks, v_shape).stages_of_ranks


def test_layers_are_split_in_order_and_the_busiest_rank_has_little():
    assert split_layers(7, row(3)) == (range(2), range(2, 4), range(4, 7))
    assert split_layers(32, row(4), 2.4) == (range(9), range(9, 18), range(18, 26), range(26, 32))
    v = split_layers(16, row(4, 2, v_shape=True), 4.3)  # rank 0 has the head, and so one layer
    assert [len(stage) for stage in v] == [1, 3, 3, 3, 2, 2, 2, 0]
    shapes = [row(ranks) for ranks in range(1, 5)] + [row(2, 2), row(2, 2, v_shape=True), row(2, 3), row(3, 2)]
    for layers, stages, head in itertools.product(range(1, 10), shapes, (0.0, 0.4, 1.0, 5.0)):
        count = sum(map(len, stages))
        if count > layers + 1:
            continue
        got = split_layers(layers, stages, head)
        assert [layer for stage in got for layer in stage] == [*range(layers)] and all(got[:-1])

        def busiest(sizes, stages=stages, head=head):
            costs = [*sizes[:-1], sizes[-1] + head]
            return max(sum(costs[stage] for stage in held) for held in stages)

        cuts = itertools.combinations(range(1, layers + 1), count - 1)
        assert busiest(tuple(map(len, got))) == min(
            busiest(tuple(b - a for a, b in itertools.pairwise((0, *cut, layers)))) for cut in cuts
        )


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_a_family_supports_the_axes_that_it_states(family, axis):
    """What refuses a layout knows no family by name."""
    config = TrainConfig.from_preset("tiny", model={"model_type": family.kind}, **{axis: 2})
    if axis in family.axes:
        assert getattr(layout_of(config, 2), axis) == 2
        return
    with pytest.raises(ConfigError, match=f"--{axis} 2: expected 1 in a model of type {family.kind}, which supp"):
        layout_of(config, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", "2", "--hidden-size", "24", "--num-attention-heads", "3", "--num-key-value-heads", "3"],
         "--tp 2: expected num_attention_heads to be a multiple of 2, got 3"),
        (["--tp", "2", "--num-key-value-heads", "1", "--deterministic", "--micro-batch-size", "1"],
         "--deterministic --tp 2: expected a divisor of 1, the largest of 8, 4, 2 and 1 that divides heads, "
         "key/value heads, intermediate size and vocabulary, got 2"),
        (["--tp", "2", "--intermediate-size", "31"],
         "--tp 2: expected intermediate_size to be a multiple of 2, got 31"),
        (["--tp", "2", "--vocab-size", "257"], "--tp 2: expected vocab_size to be a multiple of 2, got 257"),
        (["--tp", "2", "--seq-len", "31"], "--seq-len: expected a multiple of 2 (--tp), got 31"),
        (["--cp", "2", "--seq-len", "30"], "--seq-len: expected a multiple of 4 (2 × --cp), got 30"),
        (["--pp", "2", "--pp-schedule", "zero-bubble-v", "--num-hidden-layers", "2"],
         "--pp 2 x 2 stages a rank (--pp-schedule): expected at most 3 stages (layers + 1), got 4"),
        (["--dp", "3"], "--dp 3: expected 2 ranks in all, got 3"),
        (["--tp", "3"], "--tp 3: expected a divisor of 2 (ranks), got 3"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_on_all_ranks(flags, message, tmp_path):
    def refused(comm):
        with pytest.raises(ConfigError) as caught:
            Trainer(parse([*flags, "--out", str(tmp_path / "run")]), comm)
        assert caught.value.on_every_rank, "so that one rank prints it"
        return str(caught.value)

    for text in spawn(refused, 2):
        assert message in text and "expected" in text and ", got " in text
    assert not (tmp_path / "run").exists()


def test_a_dry_grid_checks_collectives_too():
    """As a search of algorithms on a GPU does, where operations have a stream."""
    TensorParallel(SimpleNamespace(stream=7), Mesh.dry(Layout(tp=2), 0).tp).check()
