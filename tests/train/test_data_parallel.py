"""Gradients over micro-batches and ranks: against a float64 sum, and bit for bit in deterministic mode."""

from __future__ import annotations

import numpy as np
import pytest

from kos.comm.communicator import Communicator
from kos.testing import spawn
from kos.train.parallel.data import DataParallel, deal
from kos.train.parameters import Parameters

SHAPES = {f"layer{i}.weight": (5, 7 + i) for i in range(6)} | {"norm.weight": (3,)}
MICRO_BATCHES = 8


def _micro_gradients() -> np.ndarray:
    size = Parameters(SHAPES).flat.size
    scales = 10.0 ** np.arange(MICRO_BATCHES)[:, None] / 1e3  # so that the order of additions shows
    return (np.random.default_rng(5).standard_normal((MICRO_BATCHES, size)) * scales).astype(np.float32)


def _sum_over_ranks(comm: Communicator, deterministic: bool, bucket_bytes: int) -> np.ndarray:
    """A backward stands in that writes (or adds) the micro-batch's gradients, tensor by tensor."""
    micro = _micro_gradients()
    gradients = Parameters(SHAPES)
    gradients.flat[:] = np.nan
    parallel = DataParallel(comm, gradients, deterministic=deterministic, bucket_bytes=bucket_bytes)
    mine = deal(MICRO_BATCHES, 1, comm.rank, comm.size)
    for index, rows in enumerate(mine):
        for name, span in gradients.spans.items():
            if parallel.accumulates(index):
                gradients.flat[span] += micro[rows.start, span]
            else:
                gradients.flat[span] = micro[rows.start, span]
            if index + 1 == len(mine):
                parallel.gradient_ready(name)
        parallel.finish_round(index, len(mine))
    return gradients.flat


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sum(size: int, deterministic: bool, bucket_bytes: int) -> None:
    micro = _micro_gradients()
    results = spawn(lambda comm: _sum_over_ranks(comm, deterministic, bucket_bytes), size)
    exact = micro.astype(np.float64).sum(axis=0)
    in_order, backwards = (np.add.accumulate(order)[-1] for order in (micro, micro[::-1]))
    assert in_order.tobytes() != backwards.tobytes(), "the order of additions shows in this data"
    for result in results:
        assert result.tobytes() == results[0].tobytes()
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-5 * np.abs(micro).max())
        if deterministic:
            assert result.tobytes() == in_order.tobytes()


@pytest.mark.parametrize(("batch", "micro", "size"), [(16, 2, 1), (16, 2, 4), (12, 3, 2), (8, 1, 8)])
def test_every_row_is_dealt_once(batch: int, micro: int, size: int) -> None:
    hands = [deal(batch, micro, rank, size) for rank in range(size)]
    assert len({len(hand) for hand in hands}) == 1
    assert sorted(row for hand in hands for rows in hand for row in rows) == list(range(batch))
    order = [hands[rank][turn].start for turn in range(len(hands[0])) for rank in range(size)]
    assert order == sorted(order)
