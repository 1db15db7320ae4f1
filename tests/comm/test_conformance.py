"""The promises of ``kos.testing.conformance`` for every dtype, on mock and MPI; other files collect them by name."""

import os
import re
import zlib
from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos import PremulSum, ReduceOp, _core, cuda
from kos.comm.compression import CARRIED, FORMATS
from kos.comm.group_backend import GroupBackend
from kos.comm.schedules import algorithms
from kos.testing import spawn
from kos.testing.conformance import cases, model, results
from kos.testing.conformance.__main__ import main
from kos.testing.conformance.failures import SCENARIOS
from kos.testing.conformance.model import Step
from kos.testing.conformance.values import ALL_DTYPES, LARGE, REDUCTIONS, SIZES, assert_bits, inputs, vector
from tests.comm import compression_bounds as bounds
from tests.comm.conftest import backends
from tests.comm.ranks import TIMEOUT, MockRanks, MPIRanks

# Collected on GPUs too, by ``import *``.
__all__ = [
    "test_all_gather", "test_all_gather_v", "test_all_reduce", "test_all_to_all", "test_all_to_all_v",
    "test_broadcast", "test_compressed", "test_compressed_sums_are_near", "test_error_feedback",
    "test_gather_and_scatter", "test_gather_v_and_scatter_v", "test_large", "test_reduce",
    "test_reduce_scatter", "test_reduce_scatter_v", "test_scan", "test_scans_add_in_rank_order",
    "test_shapes_and_scalars",
]  # fmt: skip

# Threads, processes with the compiled core and processes without it each run every pair of dtype and operation once:
# threads on 2, 3 or 4 ranks in turn, and processes with the core a third of the pairs on each of 2, 3 and 4.  For data
# movement, two processes and threads run every dtype, other processes one dtype of each size.  `make test` runs a third
# of the pairs on threads, another on two processes and a ninth on four.  Ranks with GPUs run everything.
PROCESSES = os.environ.get("OMPI_COMM_WORLD_SIZE")
DIVIDED = PROCESSES in ("2", "3", "4") and bool(cuda.unavailable())
THIRD = {"2": 1, "4": 2}.get(PROCESSES or "", 0)


def third(*indices: int) -> bool:
    """Whether the parameters of these indices are in the third that this number of ranks has."""
    return sum(indices) % 3 == THIRD


def on_one_size(parameters: Sequence[Any]) -> list[Any]:
    """All of them on two processes and on threads, a third of them on 3 and on 4 processes."""
    return [each for i, each in enumerate(parameters) if not DIVIDED or PROCESSES == "2" or third(i)]


PAIRS = [
    pytest.param(dtype, op, marks=() if third(place) and (PROCESSES != "4" or i % 3 == 0) else pytest.mark.slow)
    for i, (dtype, op) in enumerate(REDUCTIONS)
    if third(place := i + ALL_DTYPES.index(dtype)) or not DIVIDED or (PROCESSES == "2" and _core.native is None)
]
MOVED = [np.dtype(name) for name in (np.bool_, ml_dtypes.bfloat16, np.float32, np.int64, np.complex128)]
reductions = pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda x: getattr(x, "name", str(x)))
QUICK = ALL_DTYPES if PROCESSES == "2" else [np.dtype(np.float32)] if PROCESSES == "4" else MOVED
DTYPES = [
    pytest.param(dtype, marks=() if dtype in QUICK else pytest.mark.slow)
    for dtype in (MOVED if DIVIDED and PROCESSES != "2" else ALL_DTYPES)
]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
CALLS = (
    "all_reduce|reduce|reduce_scatter|reduce_scatter_v|scan|exscan|broadcast|all_gather|all_gather_v|all_to_all|"
    "all_to_all_v|gather|gather_v|scatter|scatter_v|send_recv"
)
ELSEWHERE = re.compile(
    rf"({CALLS}) \w+( [A-Z_]+)?( deterministic)?|(all_gather|broadcast|send_recv) float32 large|"
    r"(all_reduce|reduce_scatter) float32 SUM by every schedule|"
    r"(compressed|feedback_keeps_what_is_lost) \w+ \w+|shapes_and_scalars"
)
"""The names of the promises that the other tests of this file check, for dtypes and sizes of their own."""


class InTurn:
    """Groups of threads: one of one rank, and one of 2, 3 or 4."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, fn: Callable[[Any], Any]) -> list[Any]:
        MockRanks(1).run(fn)
        return MockRanks(self.size).run(fn)


@pytest.fixture(**backends(0))
def ranks(request):
    """The ranks of mpirun, or one thread and then 2, 3 or 4, which the arguments of the test choose."""
    if request.param == "mpi":
        return MPIRanks(request.getfixturevalue("mpi_world"))
    return InTurn(2 + zlib.crc32(request.node.name.encode()) % 3)


@pytest.fixture(**backends(1, 2, 3, 4))
def of_each_size(request):
    """The ranks of mpirun, or so many threads."""
    return MPIRanks(request.getfixturevalue("mpi_world")) if request.param == "mpi" else MockRanks(request.param)


def checked_here(of_dtypes: bool) -> list[str]:
    """All promises but those that other tests check: those of ``ELSEWHERE``, and failures (test_scenarios.py)."""
    failing = {*map(str, SCENARIOS)}
    names = [case.name for case in cases(full=True) if case.name not in failing and not ELSEWHERE.fullmatch(case.name)]
    return [name for name in names if of_dtypes == any(f" {dtype}" in name for dtype in ALL_DTYPES)]


def check_promise(ranks: Any, seed: int, name: str) -> None:
    (case,) = (each for each in cases(full=True, seed=seed) if each.name == name)
    ranks.run(lambda comm: case.applies(comm) and case.call(comm))


@pytest.mark.parametrize("name", checked_here(of_dtypes=False))
def test_promise(of_each_size, seed, name):
    check_promise(of_each_size, seed, name)


@pytest.mark.parametrize("name", on_one_size(checked_here(of_dtypes=True)))
def test_promise_of_a_dtype(ranks, seed, name):
    check_promise(ranks, seed, name)


def test_the_names_of_promises_are_different_and_can_be_listed(capsys):
    for full in (False, True):
        names = [case.name for case in cases(full)]
        assert len({*names}) == len(names)
        assert main(["--list", *["--full"] * full]) == 0
        assert capsys.readouterr().out.splitlines() == names
    assert main(["--list", "--gpu", "--only", "any_rank"]) == 0 and capsys.readouterr().out.split() == []


@pytest.mark.parametrize(("size", "envelopes", "views"), [(1, True, True), (2, False, True), (2, True, False)])
def test_promises_apply_to_ranks_and_backends_that_have_them(size, envelopes, views):
    backend = type("Some", (), {"has_envelopes": envelopes, "views": list if views else GroupBackend.views})()
    comm = SimpleNamespace(size=size, backend=backend, backend_name="some")
    left_out = {str(case) for case in cases(full=True) if not case.applies(comm)}
    assert ("cancelled" in left_out) == (size < 2)
    assert ("messages_from_any_rank" in left_out) == (size < 2 or not envelopes)
    assert ("probe, a rank is late" in left_out) == (size < 2 or not envelopes)
    assert ("views_put_and_get" in left_out) == (not views)
    assert "all_reduce float32 SUM" not in left_out


@reductions
def test_all_reduce(ranks, seed, dtype, op):
    ranks.run(lambda comm: results.correct(comm, seed, Step("all_reduce", dtype=dtype, op=op)))


@reductions
def test_reduce_scatter(ranks, seed, dtype, op):
    """Every dtype and every operation, as is fastest and in rank order; each pair of them in one of the ways."""
    deterministic = REDUCTIONS.index((dtype, op)) % 2 == 1
    step = Step("reduce_scatter", dtype=dtype, op=op, deterministic=deterministic)
    ranks.run(lambda comm: results.correct(comm, seed, step))


@pytest.mark.parametrize("deterministic", [False, True])
@every_dtype
def test_reduce(ranks, seed, dtype, deterministic):
    op = ReduceOp.BXOR if dtype == np.bool_ else ReduceOp.SUM
    step = Step("reduce", dtype=dtype, op=op, deterministic=deterministic)
    ranks.run(lambda comm: results.correct(comm, seed, step))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.values[0] != np.bool_], ids=str)
def test_reduce_scatter_v(ranks, seed, dtype):
    ranks.run(lambda comm: results.correct(comm, seed, Step("reduce_scatter_v", dtype=dtype)))


@every_dtype
def test_scan(ranks, seed, dtype):
    """Each dtype with the operations that it is alone in, or that scale."""
    op = ReduceOp.BXOR if dtype == np.bool_ else ReduceOp.SUM if dtype.kind in "iu" else ReduceOp.PREMUL_SUM
    for name in ("scan", "exscan"):
        ranks.run(lambda comm, name=name: results.correct(comm, seed, Step(name, dtype=dtype, op=op)))


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_scans_add_in_rank_order(ranks, seed, dtype):
    for name in ("scan", "exscan"):
        step = Step(name, dtype=dtype, values="apart")
        ranks.run(lambda comm, step=step: results.correct(comm, seed, step, (*SIZES, 70_001)))


@pytest.mark.parametrize(("form", "dtype"), on_one_size(list(product(FORMATS, map(np.dtype, CARRIED)))), ids=str)
def test_compressed(ranks, seed, form, dtype):
    ranks.run(lambda comm: results.compressed(comm, seed, form, dtype))


@pytest.mark.parametrize(("form", "dtype"), [("fp8", np.float32), ("int8", ml_dtypes.bfloat16), ("int4", np.float16)])
def test_error_feedback(ranks, seed, form, dtype):
    ranks.run(lambda comm: results.feedback_keeps_what_is_lost(comm, seed, form, np.dtype(dtype)))


@pytest.mark.parametrize("form", FORMATS)
def test_the_model_of_feedback_loses_nothing(seed, form):
    """The sum of what was sent, and the residual, are the sum of all vectors; infinities are not kept."""
    residual, given, sent, largest = np.zeros(1000, np.float32), 0.0, 0.0, ml_dtypes.finfo(np.float32).max
    for turn in range(20):
        x = vector((seed, turn), 1000, np.float32)
        given = given + x.astype(np.float64)
        x, residual = model.fed_back(FORMATS[form], x, residual)
        sent = sent + model.decoded(FORMATS[form], x)
    lost = np.linalg.norm(given - sent - residual) / np.linalg.norm(given)
    assert lost < 20 * float(np.finfo(np.float32).eps), f"{lost} of the sum"
    x[::7] = np.inf, np.nan, -np.inf, *x[21::7]
    x[1::7], residual[1::7] = largest, largest / 64
    x, residual = model.fed_back(FORMATS[form], x, residual)
    assert (x[1::7] == largest).all(), "a finite number became infinite"
    assert np.isfinite(residual).all() and not np.isfinite(x[:21:7]).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda kind: kind.__name__)
def test_compressed_errors_are_within_the_bounds(ranks, seed, dtype):
    ranks.run(lambda comm: bounds.errors_are_within_the_bounds(comm, seed, np.dtype(dtype)))


def test_compressed_sums_are_near(ranks, seed):
    ranks.run(lambda comm: bounds.compressed_sums_are_near(comm, seed))


@pytest.mark.parametrize(
    ("name", "algorithm"), [(name, each) for name in ("all_reduce", "reduce_scatter") for each in algorithms(name)]
)
def test_by_algorithm(of_each_size, seed, name, algorithm):
    """Floats on even numbers of ranks; on odd ones integers, whose sums are exact in any order."""
    dtype = np.dtype((np.float32, np.int64)[of_each_size.size % 2])
    number = algorithms(name).index(algorithm) + len(algorithms(name))  # 0 is auto
    step = Step(name, dtype=dtype, algorithm=number)
    of_each_size.run(lambda comm: results.correct(comm, seed, step, (*SIZES, LARGE)))


def moving(*names: str) -> Callable[..., None]:
    @every_dtype
    def test(ranks, seed, dtype):
        for name in names:
            step, schedules = Step(name, dtype=dtype), name == "all_gather"
            ranks.run(lambda comm, step=step, every=schedules: results.correct(comm, seed, step, every_schedule=every))

    return test


test_messages = moving("send_recv")
test_broadcast = moving("broadcast")
test_all_gather = moving("all_gather")
test_all_gather_v = moving("all_gather_v")
test_all_to_all = moving("all_to_all")
test_all_to_all_v = moving("all_to_all_v")
test_gather_and_scatter = moving("gather", "scatter")
test_gather_v_and_scatter_v = moving("gather_v", "scatter_v")


def test_large(ranks, seed):
    """Several segments of every schedule."""
    for name in ("all_gather", "broadcast", "send_recv"):
        step, schedules = Step(name), name == "all_gather"
        ranks.run(lambda comm, step=step, every=schedules: results.correct(comm, seed, step, [LARGE], every))


def test_shapes_and_scalars(ranks):
    ranks.run(results.shapes_and_scalars)


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
