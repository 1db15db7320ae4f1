"""The promises of ``kos.testing.conformance`` for every dtype, on mock and MPI; other files collect them by name."""

import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos import PremulSum, ReduceOp
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
from tests.comm.ranks import TIMEOUT

# Collected on GPUs too, by ``import *``.
__all__ = [
    "test_all_gather", "test_all_gather_v", "test_all_reduce", "test_all_to_all", "test_all_to_all_v",
    "test_broadcast", "test_compressed", "test_compressed_sums_are_near", "test_error_feedback",
    "test_gather_and_scatter", "test_gather_v_and_scatter_v", "test_large", "test_reduce",
    "test_reduce_scatter", "test_reduce_scatter_v", "test_scan", "test_scans_add_in_rank_order",
    "test_shapes_and_scalars",
]  # fmt: skip

# Two processes and threads run two different thirds of the pairs of dtype and operation; each third has every dtype and
# every operation.  For data movement, two processes run every dtype, and threads run one dtype of each size.  Four
# processes share two cores, so they run less: a ninth of the pairs, and one dtype of data movement.
PROCESSES = os.environ.get("OMPI_COMM_WORLD_SIZE")
LEFT_OUT = () if PROCESSES == "2" else pytest.mark.slow
PART, OF = {"2": (1, 3), "4": (2, 9)}.get(PROCESSES or "", (0, 3))
PAIRS = [
    pytest.param(dtype, op, marks=() if (i + ALL_DTYPES.index(dtype)) % OF == PART else pytest.mark.slow)
    for i, (dtype, op) in enumerate(REDUCTIONS)
]
MOVED = [np.dtype(name) for name in (np.bool_, ml_dtypes.bfloat16, np.float32, np.int64, np.complex128)]
reductions = pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda x: getattr(x, "name", str(x)))
FEW = [np.dtype(np.float32)] if PROCESSES == "4" else MOVED
DTYPES = [pytest.param(dtype, marks=() if dtype in FEW else LEFT_OUT) for dtype in ALL_DTYPES]
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


def checked_here(full: bool) -> list[str]:
    """All promises but those that other tests check: those of ``ELSEWHERE``, and failures (test_scenarios.py)."""
    failing = {*map(str, SCENARIOS)}
    names = [case.name for case in cases(full)]
    return [name for name in names if name not in failing and not ELSEWHERE.fullmatch(name)]


@pytest.mark.parametrize("name", checked_here(full=True))
def test_promise(ranks, seed, name):
    (case,) = (each for each in cases(full=True, seed=seed) if each.name == name)
    ranks.run(lambda comm: case.applies(comm) and case.call(comm))


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


@pytest.mark.parametrize("dtype", [np.dtype(name) for name in CARRIED], ids=str)
@pytest.mark.parametrize("form", FORMATS)
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
    "dtype",
    [
        pytest.param(np.float32, id="float32"),
        pytest.param(np.int64, id="int64", marks=LEFT_OUT if PROCESSES == "4" else ()),
    ],
)
@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
def test_all_reduce_by_algorithm(ranks, seed, algorithm, dtype):
    by_algorithm(ranks, seed, "all_reduce", algorithm, dtype)


@pytest.mark.parametrize("algorithm", algorithms("reduce_scatter"))
def test_reduce_scatter_by_algorithm(ranks, seed, algorithm):
    by_algorithm(ranks, seed, "reduce_scatter", algorithm, np.float32)


def by_algorithm(ranks: Any, seed: int, name: str, algorithm: str, dtype: Any) -> None:
    known = algorithms(name)
    number = known.index(algorithm) + len(known)  # 0 is auto
    sizes = (*SIZES, LARGE)
    ranks.run(lambda comm: results.correct(comm, seed, Step(name, dtype=np.dtype(dtype), algorithm=number), sizes))


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
