"""Gradients over micro-batches and ranks with ``--deterministic``: a tree, bit for bit."""

import numpy as np
import pytest

from kos.testing import spawn
from kos.train.model.parameters import Parameters
from kos.train.parallel.data import DataParallel, make_buckets, shard_batch, subtrees, waiting_subtrees
from kos.train.parallel.mesh import Mesh

SHAPES = {f"layer{i}.weight": (5, 7 + i) for i in range(6)} | {"norm.weight": (3,)}


def _tree(terms: np.ndarray) -> np.ndarray:
    """A binary tree whose left half is the largest power of two."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return _tree(terms[:half]) + _tree(terms[half:])


@pytest.mark.parametrize(("size", "count"), [(1, 6), (2, 6), (6, 6), (2, 10), (5, 10), (7, 21), (3, 8), (7, 24)])
def test_a_tree_over_any_number_of_micro_batches(size, count, rng):
    """A backward stands in that writes the micro-batch's gradients, tensor by tensor."""
    scales = 10.0 ** (np.arange(count)[:, None] % 8) / 1e3  # so that the order of additions shows
    micro = (rng.standard_normal((count, Parameters(SHAPES).flat.size)) * scales).astype(np.float32)

    def run(comm):
        gradients = Parameters(SHAPES, multiple=comm.size)
        gradients.flat[:] = np.nan
        parallel = DataParallel(Mesh(comm).dense, gradients, in_order=count, bucket_bytes=300)
        for index, rows in enumerate(shard_batch(count, 1, comm.rank, comm.size)):
            for name, span in gradients.spans.items():
                parallel.tree.target(index).flat[span] = micro[rows.start, span]
                parallel.tree.add(name, index)
        parallel.finish()
        return gradients.flat[: micro.shape[1]].tobytes()

    assert _tree(micro).tobytes() != np.add.accumulate(micro)[-1].tobytes(), "the order of additions shows in this data"
    assert spawn(run, size) == [_tree(micro).tobytes()] * size


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
