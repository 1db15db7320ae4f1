"""Gradients over micro-batches and ranks: against a float64 sum, and bit for bit in deterministic mode."""

import numpy as np
import pytest

from kos.comm.communicator import Communicator
from kos.testing import spawn
from kos.train.model.parameters import Parameters
from kos.train.parallel.data import DataParallel, make_buckets, shard_batch, subtrees, waiting_subtrees
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
    mine, mesh = shard_batch(micro_batches, 1, comm.rank, comm.size), Mesh(comm)
    in_order = micro_batches if deterministic else None
    parallel = DataParallel(mesh.dense, gradients, in_order=in_order, bucket_bytes=bucket_bytes)
    for index, rows in enumerate(mine):
        for name, span in gradients.spans.items():
            if index and not deterministic:
                gradients.flat[span] += micro[rows.start, span]
            else:
                into = gradients if parallel.tree is None else parallel.tree.target(index)
                into.flat[span] = micro[rows.start, span]
            if parallel.tree is not None:
                parallel.tree.add(name, index)
            elif index + 1 == len(mine):
                parallel.gradient_ready(name)
    parallel.finish()
    return gradients.flat[: sum(x.size for x in gradients.values())]


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sum(size, deterministic, bucket_bytes):
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


@pytest.mark.parametrize(("size", "count"), [(1, 6), (2, 6), (6, 6), (2, 10), (5, 10), (7, 21), (3, 8), (7, 24)])
def test_a_tree_over_any_number_of_micro_batches(size, count):
    for result in spawn(lambda comm: _sum_over_ranks(comm, True, 300, count), size):
        assert result.tobytes() == _tree(_micro_gradients(count)).tobytes()


def test_a_rank_keeps_few_subtrees():
    assert [waiting_subtrees(range(count)) for count in (1, 2, 4, 8, 64, 2**17)] == [0, 1, 2, 3, 6, 17]
    assert subtrees(3, 5) == ([0, 0, 1, 0, 2], [(3, 1), (4, 4)])


@pytest.mark.parametrize("multiple", [4, 128, 8 * 16_384])
def test_buckets_are_whole_and_begin_where_vectors_do(multiple):
    total = 1_235_814_400 // multiple * multiple
    buckets = make_buckets(total, multiple, 38_619_200, 9_654_800)
    assert [b.start for b in buckets] == [0, *(b.stop for b in buckets[:-1])] and buckets[-1].stop == total
    assert all(bucket.start % multiple == 0 for bucket in buckets)
    lengths = [bucket.stop - bucket.start for bucket in buckets]
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] <= 9_654_800 < lengths[0] <= 38_619_200


def test_a_large_last_tensor_has_few_buckets_of_its_own():
    buckets = make_buckets(1000, 8, 320, 80, last=405)
    assert buckets == [slice(0, 96), slice(96, 176), slice(176, 256), slice(256, 336), slice(336, 400), slice(400, 720),
                       slice(720, 1000)]  # fmt: skip
    assert make_buckets(1000, 8, 320, 80, last=921) == make_buckets(1000, 8, 320, 80)


@pytest.mark.parametrize(("batch", "micro", "size"), [(16, 2, 1), (16, 2, 4), (12, 3, 2), (8, 1, 8), (16, 2, 3)])
def test_every_row_is_in_one_shard(batch, micro, size):
    shards = [shard_batch(batch, micro, rank, size) for rank in range(size)]
    lengths = [len(hand) for hand in shards]
    assert max(lengths) - min(lengths) == (1 if batch // micro % size else 0)
    assert sorted(row for hand in shards for rows in hand for row in rows) == list(range(batch))
    order = [rows.start for hand in shards for rows in hand]
    assert order == sorted(order)
