"""Subtrees of a sum over micro-batches, and buckets of gradients."""

import pytest

from kos.train.parallel.data import make_buckets, subtrees, waiting_subtrees


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
    assert make_buckets(1000, 8, 320, 80, last=615)[-2:] == [slice(584, 608), slice(608, 1000)]
    assert make_buckets(1000, 8, 320, 80, last=921) == make_buckets(1000, 8, 320, 80)
