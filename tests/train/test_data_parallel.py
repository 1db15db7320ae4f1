"""Gradients over micro-batches and ranks: against a float64 sum, and bit for bit in deterministic mode."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kos.comm.communicator import Communicator
from kos.testing import spawn
from kos.train.model.gpt2 import make_model
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.ops import numpy as ops
from kos.train.parallel.data import DataParallel, cut, deal, subtrees, waiting_subtrees
from kos.train.parallel.mesh import Mesh

SHAPES = {f"layer{i}.weight": (5, 7 + i) for i in range(6)} | {"norm.weight": (3,)}
MICRO_BATCHES = 8


def _micro_gradients(count: int = MICRO_BATCHES) -> np.ndarray:
    size = Parameters(SHAPES).flat.size
    scales = 10.0 ** (np.arange(count)[:, None] % 8) / 1e3  # so that the order of additions shows
    return (np.random.default_rng(5).standard_normal((count, size)) * scales).astype(np.float32)


def _sum_over_ranks(
    comm: Communicator, deterministic: bool, bucket_bytes: int, micro_batches: int = MICRO_BATCHES
) -> np.ndarray:
    """A backward stands in that writes (or adds) the micro-batch's gradients, tensor by tensor."""
    micro = _micro_gradients(micro_batches)
    gradients = Parameters(SHAPES, multiple=comm.size)
    gradients.flat[:] = np.nan
    mine, mesh = deal(micro_batches, 1, comm.rank, comm.size), Mesh(comm)
    in_order = (mesh.dp, len(mine)) if deterministic else None
    parallel = DataParallel(mesh.gradients, gradients, in_order=in_order, bucket_bytes=bucket_bytes)
    for index, rows in enumerate(mine):
        for name, span in gradients.spans.items():
            if parallel.accumulates(index):
                gradients.flat[span] += micro[rows.start, span]
            else:
                gradients.flat[span] = micro[rows.start, span]
            if parallel.tree is not None:
                parallel.tree.add(name, index)
            elif index + 1 == len(mine):
                parallel.gradient_ready(name)
        parallel.finish_round(index, len(mine))
    return gradients.flat[: sum(x.size for x in gradients.values())]


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sum(size: int, deterministic: bool, bucket_bytes: int) -> None:
    micro = _micro_gradients()
    results = spawn(lambda comm: _sum_over_ranks(comm, deterministic, bucket_bytes), size)
    exact = micro.astype(np.float64).sum(axis=0)
    assert _tree(micro).tobytes() != np.add.accumulate(micro)[-1].tobytes(), "the order of additions shows in this data"
    for result in results:
        assert result.tobytes() == results[0].tobytes()
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-5 * np.abs(micro).max())
        if deterministic:
            assert result.tobytes() == _tree(micro).tobytes()


def _tree(terms: np.ndarray) -> np.ndarray:
    """A binary tree whose left half is the largest power of two."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return _tree(terms[:half]) + _tree(terms[half:])


@pytest.mark.parametrize(("size", "count"), [(1, 6), (2, 6), (3, 6), (6, 6), (2, 10), (5, 10), (7, 21), (6, 24)])
def test_a_tree_over_any_number_of_micro_batches(size: int, count: int) -> None:
    for result in spawn(lambda comm: _sum_over_ranks(comm, True, 300, count), size):
        assert result.tobytes() == _tree(_micro_gradients(count)).tobytes()


def test_a_rank_keeps_few_subtrees() -> None:
    assert [waiting_subtrees(0, count) for count in (1, 2, 4, 8, 64)] == [0, 1, 2, 3, 6]
    assert subtrees(3, 5) == ([0, 0, 1, 0, 2], [(3, 1), (4, 4)])


def _gradients_of_a_model(comm: Communicator, tied: bool, gathered: bool, rounds: int) -> np.ndarray:
    """Of a batch that all ranks share, in ``rounds``; with ``gathered`` each adds all ranks' lookups by itself."""
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=tied,
    )  # fmt: skip
    model = make_model(config, ops)
    weights = Parameters(config.parameter_shapes(), np.float32, config.fused_groups())
    rng = np.random.default_rng(3)
    weights.flat[:] = rng.normal(0, 0.2, weights.flat.size)
    tokens = rng.integers(0, 37, (comm.size * rounds, 2, 9), np.int32)
    gradients = weights.like()
    gradients.flat[:] = np.nan if rounds == 1 or not gathered else 0
    lookups = config.embedding if gathered else None
    axis = Mesh(comm).gradients
    parallel = DataParallel(axis, gradients, ops, bucket_bytes=2400, least_bytes=300, lookups=lookups, tied=tied)
    lengths = [bucket.stop - bucket.start for bucket in parallel.buckets]
    assert sum(lengths) == gradients.flat.size and min(lengths[:-1]) < max(lengths) == 600
    loss = np.zeros(1)
    for index in range(rounds):
        mine, last = tokens[index * comm.size + comm.rank], index + 1 == rounds
        with ops.step(model.arena):
            model.queue_loss_and_gradients(
                weights, mine, np.roll(mine, -1, 1), gradients, loss, accumulate=parallel.accumulates(index),
                on_gradient=parallel.gradient_ready if last else None,
                lookups=partial(parallel.gather_lookups, model.arena) if last and gathered else None,
            )  # fmt: skip
        parallel.finish_round(index, rounds)
    return gradients.flat


@pytest.mark.parametrize(("tied", "rounds"), [(True, 1), (True, 2), (False, 1)])
def test_gathered_lookups_give_the_same_sum(tied: bool, rounds: int) -> None:
    summed, gathered = (
        spawn(lambda comm, how=how: _gradients_of_a_model(comm, tied, how, rounds), 3) for how in (False, True)
    )
    for result in gathered:
        assert result.tobytes() == gathered[0].tobytes()
        np.testing.assert_allclose(result, summed[0], rtol=1e-4, atol=1e-5 * np.abs(summed[0]).max())


@pytest.mark.parametrize("multiple", [4, 128, 8 * 16_384])
def test_buckets_are_whole_and_begin_where_vectors_do(multiple: int) -> None:
    total = 1_235_814_400 // multiple * multiple
    buckets = cut(973_145_088, total, multiple, 38_619_200, 9_654_800)
    assert [b.start for b in buckets] == [0, *(b.stop for b in buckets[:-1])] and buckets[-1].stop == total
    assert all(bucket.start % multiple == 0 for bucket in buckets)
    lengths = [bucket.stop - bucket.start for bucket in buckets if bucket.stop < 973_145_088]
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] <= 9_654_800 < lengths[0] <= 38_619_200


@pytest.mark.parametrize(("batch", "micro", "size"), [(16, 2, 1), (16, 2, 4), (12, 3, 2), (8, 1, 8)])
def test_every_row_is_dealt_once(batch: int, micro: int, size: int) -> None:
    hands = [deal(batch, micro, rank, size) for rank in range(size)]
    assert len({len(hand) for hand in hands}) == 1
    assert sorted(row for hand in hands for rows in hand for row in rows) == list(range(batch))
    order = [rows.start for hand in hands for rows in hand]
    assert order == sorted(order)
