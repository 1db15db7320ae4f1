"""The promises of ``kos.testing.conformance`` for every dtype, on threads and MPI; other files check some of them."""

import re
from functools import cache
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
import pytest

from kos import PremulSum, ReduceOp
from kos.testing import spawn
from kos.testing.conformance import Case, cases, results
from kos.testing.conformance.__main__ import main
from kos.testing.conformance.failures import SCENARIOS
from kos.testing.conformance.model import Step
from kos.testing.conformance.values import REDUCTIONS, assert_bits, inputs
from tests.comm import compression_bounds as bounds
from tests.comm.conftest import UNDER_MPIRUN, backends
from tests.comm.ranks import TIMEOUT, MockRanks, MPIRanks, split_among_jobs

# Collected on GPUs too, by ``import *``.
__all__ = ["test_compressed_sums_are_near", "test_error_feedback", "test_result"]


def names_of(full: bool = True, gpu: bool = False) -> list[str]:
    """The promises but those of failures, which test_scenarios.py checks."""
    failing = {*map(str, SCENARIOS)}
    return [case.name for case in cases(full, gpu=gpu) if case.name not in failing]


OF_OTHER_DTYPES = re.compile(r".* (?!float32)(float|bfloat|u?int|complex|bool)\d*(_\w+)?\b.*")
"""Matches the names of promises whose dtype is not float32."""


@cache
def promises(seed: int) -> dict[str, Case]:
    """All promises by their names."""
    return {case.name: case for case in cases(full=True, seed=seed)}


def check(ranks: Any, seed: int, name: str) -> None:
    """Check the promise of that name."""
    case = promises(seed)[name]
    ranks.run(lambda comm: case.applies(comm) and case.call(comm))


@pytest.fixture(**backends(1, 3))
def ranks(request):
    return MPIRanks(request.getfixturevalue("mpi_world")) if request.param == "mpi" else MockRanks(request.param)


PROMISES = [name for name in names_of() if not OF_OTHER_DTYPES.fullmatch(name)]
ON_THREADS = [(size, name) for number, name in enumerate(PROMISES) for size in (1, 2 + number % 3)]


@pytest.mark.parametrize(("ranks", "name"), [
    *(pytest.param(size, name, id=f"mock-{size}-{name}") for size, name in ON_THREADS if not UNDER_MPIRUN),
    *(pytest.param("mpi", name, id=f"mpi-{name}", marks=pytest.mark.mpi) for name in split_among_jobs(PROMISES, 2)),
], indirect=["ranks"])  # fmt: skip
def test_promise(ranks, seed, name):
    """On threads, each promise is checked on one rank, and on 2, 3 or 4 ranks."""
    check(ranks, seed, name)


# Each promise of another dtype is checked either on threads or on MPI. For each pair of a dtype and a reduce operation,
# the all_reduce is checked on one of them, and the reduce_scatter on the other.
OTHERS = [*filter(OF_OTHER_DTYPES.fullmatch, names_of())]
OPERATIONS = [*dict.fromkeys(name.partition(" ")[0] for name in OTHERS)]  # all_reduce, reduce_scatter, ...


def is_for_mpi(name: str) -> bool:
    operation, _, pair = name.partition(" ")
    return (OPERATIONS.index(operation) + crc32(pair.encode())) % 2 == 0


@pytest.mark.parametrize("name", [name for name in OTHERS if not is_for_mpi(name)])
def test_other_dtypes(seed, name):
    check(MockRanks(3), seed, name)


@pytest.mark.mpi
@pytest.mark.parametrize("name", split_among_jobs(filter(is_for_mpi, OTHERS), 4))
def test_other_dtypes_on_mpi(mpi_world, seed, name):
    check(MPIRanks(mpi_world), seed, name)


STEPS = [
    *(Step("reduce", dtype=dtype, op=op) for dtype, op in REDUCTIONS if op in (ReduceOp.SUM, ReduceOp.BXOR)),
    *(Step(name, dtype=dtype, op=op) for name in ("scan", "exscan")
      for dtype, op in REDUCTIONS if op is ReduceOp.PREMUL_SUM),
]  # fmt: skip
"""Calls that the table of promises does not have."""


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.name}-{step.dtype}-{step.op.name}")
def test_result(ranks, seed, step):
    ranks.run(lambda comm: results.correct(comm, seed, step))


def test_the_names_of_promises_are_different_and_can_be_listed(capsys):
    for full in (False, True):
        names = [case.name for case in cases(full)]
        assert len({*names}) == len(names)
        assert main(["--list", *["--full"] * full]) == 0
        assert capsys.readouterr().out.splitlines() == names
    assert main(["--list", "--gpu", "--only", "any_rank"]) == 0 and capsys.readouterr().out.split() == []


@pytest.mark.parametrize(("size", "envelopes"), [(1, True), (2, False), (2, True)])
def test_promises_apply_to_ranks_and_backends_that_have_them(size, envelopes):
    comm = SimpleNamespace(size=size, backend=SimpleNamespace(has_envelopes=envelopes), backend_name="some")
    left_out = {str(case) for case in cases(full=True) if not case.applies(comm)}
    assert ("cancelled" in left_out) == (size < 2)
    assert ("messages_from_any_rank" in left_out) == (size < 2 or not envelopes)
    assert ("probe, a rank is late" in left_out) == (size < 2 or not envelopes)
    assert "all_reduce float32 SUM" not in left_out


@pytest.mark.parametrize(("form", "dtype"), [("int8", ml_dtypes.bfloat16), ("int4", np.float16)])
def test_error_feedback(ranks, seed, form, dtype):
    ranks.run(lambda comm: results.feedback_keeps_what_is_lost(comm, seed, form, np.dtype(dtype)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda kind: kind.__name__)
def test_compressed_errors_are_within_the_bounds(ranks, seed, dtype):
    ranks.run(lambda comm: bounds.errors_are_within_the_bounds(comm, seed, np.dtype(dtype)))


def test_compressed_sums_are_near(ranks, seed):
    ranks.run(lambda comm: bounds.compressed_sums_are_near(comm, seed))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD, PremulSum(0.3)], ids=str)
@pytest.mark.mpi
def test_deterministic_is_the_same_on_mock_and_mpi(mpi_world, seed, op):
    for dtype in (np.float32, ml_dtypes.bfloat16):
        xs = inputs(seed, mpi_world.size, 1003, dtype)

        def reduce(comm, xs=xs):
            return comm.all_reduce(xs[comm.rank].copy(), op, deterministic=True)

        mine = reduce(mpi_world)
        for other in spawn(reduce, mpi_world.size, timeout=TIMEOUT):
            assert_bits(mine, other, f"{dtype}")
