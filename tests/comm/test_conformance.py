"""The promises of ``kos.testing.conformance`` for every dtype, on mock and MPI; other files collect them by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kos import ReduceOp
from kos.comm.schedules import algorithms
from kos.testing.conformance import cases, failures, order, results
from kos.testing.conformance.values import ALL_DTYPES, LARGE, REDUCTIONS, SIZES, check

__all__ = ["LARGE", "SIZES", "check"]

reductions = pytest.mark.parametrize(("dtype", "op"), REDUCTIONS, ids=lambda x: getattr(x, "name", str(x)))
every_dtype = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
OTHERS = [case for case in cases() if case.name.split()[0] in {*vars(failures), *vars(order)}]


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_promise(ranks: Any, case: Any) -> None:
    if ranks.size >= case.ranks:
        ranks.run(case.call)


@reductions
def test_all_reduce(ranks: Any, seed: int, dtype: np.dtype, op: ReduceOp) -> None:
    ranks.run(lambda comm: results.all_reduce(comm, seed, dtype, op))


@pytest.mark.parametrize("dtype", [np.float32, np.int64], ids=["float32", "int64"])
@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
def test_all_reduce_by_algorithm(ranks: Any, seed: int, algorithm: str, dtype: Any) -> None:
    ranks.run(lambda comm: results.all_reduce_by_algorithm(comm, seed, algorithm, dtype))


@pytest.mark.parametrize("deterministic", [False, True])
@every_dtype
def test_reduce(ranks: Any, seed: int, dtype: np.dtype, deterministic: bool) -> None:
    ranks.run(lambda comm: results.reduce(comm, seed, dtype, deterministic))


@reductions
def test_reduce_scatter(ranks: Any, seed: int, dtype: np.dtype, op: ReduceOp) -> None:
    ranks.run(lambda comm: results.reduce_scatter(comm, seed, dtype, op))


@pytest.mark.parametrize("algorithm", algorithms("reduce_scatter"))
def test_reduce_scatter_by_algorithm(ranks: Any, seed: int, algorithm: str) -> None:
    ranks.run(lambda comm: results.reduce_scatter_by_algorithm(comm, seed, algorithm))


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if d != np.bool_], ids=str)
def test_reduce_scatter_v(ranks: Any, seed: int, dtype: np.dtype) -> None:
    ranks.run(lambda comm: results.reduce_scatter_v(comm, seed, dtype))


@every_dtype
def test_broadcast(ranks: Any, seed: int, dtype: np.dtype) -> None:
    ranks.run(lambda comm: results.broadcast(comm, seed, dtype))


@every_dtype
def test_all_gather(ranks: Any, seed: int, dtype: np.dtype) -> None:
    ranks.run(lambda comm: results.all_gather(comm, seed, dtype))


@every_dtype
def test_all_gather_v(ranks: Any, seed: int, dtype: np.dtype) -> None:
    ranks.run(lambda comm: results.all_gather_v(comm, seed, dtype))


@every_dtype
def test_all_to_all(ranks: Any, seed: int, dtype: np.dtype) -> None:
    ranks.run(lambda comm: results.all_to_all(comm, seed, dtype))


@every_dtype
def test_all_to_all_v(ranks: Any, seed: int, dtype: np.dtype) -> None:
    ranks.run(lambda comm: results.all_to_all_v(comm, seed, dtype))


@every_dtype
def test_gather_and_scatter(ranks: Any, seed: int, dtype: np.dtype) -> None:
    ranks.run(lambda comm: results.gather_and_scatter(comm, seed, dtype))


@every_dtype
def test_messages(ranks: Any, seed: int, dtype: np.dtype) -> None:
    ranks.run(lambda comm: results.messages(comm, seed, dtype))


def test_large(ranks: Any, seed: int) -> None:
    ranks.run(lambda comm: results.large(comm, seed))


def test_barrier_waits_for_everybody(ranks: Any) -> None:
    ranks.run(order.barrier_waits_for_everybody)


def test_shapes_and_scalars(ranks: Any) -> None:
    ranks.run(results.shapes_and_scalars)
