"""What every collective promises about bits: in rank order, in fp32, and the same between backends."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kos
from kos import PremulSum, ReduceOp
from kos.testing import spawn
from kos.testing.conformance import results
from tests.comm.ranks import TIMEOUT, assert_bits, inputs


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_deterministic_adds_in_rank_order(ranks: Any, seed: int, dtype: Any) -> None:
    ranks.run(lambda comm: results.deterministic_adds_in_rank_order(comm, seed, dtype))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD, PremulSum(0.3)], ids=str)
@pytest.mark.mpi
def test_deterministic_is_the_same_on_mock_and_mpi(mpi_world: kos.Communicator, seed: int, op: Any) -> None:
    for dtype in (np.float32, ml_dtypes.bfloat16):
        xs = inputs(seed, mpi_world.size, 1003, dtype)

        def reduce(comm: kos.Communicator, xs: list[np.ndarray] = xs) -> np.ndarray:
            return comm.all_reduce(xs[comm.rank].copy(), op, deterministic=True)

        mine = reduce(mpi_world)
        for other in spawn(reduce, mpi_world.size, timeout=TIMEOUT):
            assert_bits(mine, other, f"{dtype}")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_16_bit_floats_accumulate_in_fp32(ranks: Any, dtype: Any) -> None:
    ranks.run(lambda comm: results.sums_of_16_bits_in_fp32(comm, dtype))


def test_nan_wins_min_and_max_on_every_rank(ranks: Any) -> None:
    ranks.run(results.nan_wins_min_and_max_on_every_rank)
