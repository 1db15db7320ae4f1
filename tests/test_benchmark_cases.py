"""Cases of the benchmark of collectives: sizes, bandwidths, expected results, and the detection of wrong ones."""

from typing import Any

import numpy as np
import pytest

from kos import ReduceOp
from kos.bench.cases import IN_PLACE, OPERATIONS, PERIOD, STRIDE, Case, Data, bandwidths, busbw_factor
from kos.bench.memory import HostMemory, Space
from kos.errors import InvalidArgument
from kos.testing.conformance.model import Step, result

PLACES = [(op, False) for op in OPERATIONS] + [(op, True) for op in IN_PLACE]


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 2 * 7 / 8), ("reduce_scatter", 7 / 8), ("all_gather", 7 / 8), ("all_to_all", 7 / 8),
        ("gather", 7 / 8), ("scatter", 7 / 8), ("broadcast", 1.0), ("reduce", 1.0), ("send_recv", 1.0),
        ("all_gather_v", 15 / 16), ("all_to_all_v", 15 / 16), ("scan", 1.0), ("exscan", 1.0),
    ],
)  # fmt: skip
def test_bus_bandwidth_is_that_of_nccl_tests(op, factor):
    assert busbw_factor(op, 8) == factor
    assert bandwidths(factor, 10**9, 1e6) == (1.0, factor)  # 1 GB in a second


def test_counts_are_those_of_nccl_tests():
    case = Case.of("all_gather", 100, "float32", "sum", 8, False)
    assert (case.count, case.nbytes, case.sends(7), case.receives(7), case.redop) == (24, 96, 3, 24, "none")
    case = Case.of("reduce_scatter", 100, "bfloat16", "sum", 8, False)
    assert (case.count, case.nbytes, case.sends(0), case.receives(0), case.redop) == (48, 96, 48, 6, "sum")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_token_is_sent_once_to_each_rank_of_its_experts(ranks):
    case = Case.of("routing", 8192 * 7168 * 2, "bfloat16", "sum", ranks, False)
    assert case.nbytes == 8192 * 7168 * 2 and case.function == "all_to_all_v"
    held = 64 // ranks
    missed = np.prod([(64 - held - i) / (64 - i) for i in range(8)])  # none of the eight is among a rank's experts
    tokens = np.array(case.pieces) / 7168
    assert tokens == pytest.approx(8192 * (1 - missed), rel=0.02) and len(np.unique(tokens)) > 1
    assert case.busbw_factor == pytest.approx((ranks - 1) * (1 - missed), rel=0.02)
    assert [case.sends(0), case.receives(0)] == [tokens[0].sum() * 7168, tokens[:, 0].sum() * 7168]


def test_a_barrier_has_no_size_and_no_result():
    case = Case.of("barrier", 1 << 20, "float32", "sum", 3, False)
    assert (case.count, case.redop, case.busbw_factor, case.largest) == (1, "none", 0.0, (1, 1))
    assert Data(case, 1, seed=0).output == []


def collective(op: str, redop: str, inputs: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any] | None]:
    """The expected result of each of four ranks in float64, by the model of the conformance suite."""
    xs = [np.asarray(x, np.float64) for x in inputs]
    eighths = [1, 3, 1, 3] if op.endswith("_v") else [2] * 4
    counts: Any = [len(x) for x in xs] if "gather" in op else [eighth * len(xs[0]) // 8 for eighth in eighths]
    if op == "all_to_all_v":  # a rank's own piece is the smallest, and the next one is three times as long
        counts = [tuple(np.roll(counts, rank)) for rank in range(4)]
    step = Step(op, counts[0], np.float64, ReduceOp[redop.upper()], counts=tuple(counts))
    return [result(step, xs, rank) for rank in range(4)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("op", "in_place"), PLACES)
def test_expected_outputs(op, in_place, dtype):
    """The right outputs pass the check in every iteration; each wrong element is counted."""
    ranks, seed = 4, int(np.random.SeedSequence().entropy or 0) % 2**32
    print("seed", seed)
    for redop in ("sum", "avg", "max", "min", "prod") if "reduce" in op else ("sum",):
        if redop == "avg" and dtype == "int8":
            continue
        nbytes = (PERIOD + 5000) * np.dtype(Case.of(op, 64, dtype, redop, 4, False).dtype.numpy).itemsize
        case = Case.of(op, nbytes, dtype, redop, ranks, in_place)
        memory = HostMemory()
        spaces = [Space(case, Data(case, r, seed), memory, memory.empty, 2) for r in range(ranks)]
        for iteration in (0, PERIOD // STRIDE + 1):
            for space in spaces:
                space.fill(1, iteration)
            results = collective(op, redop, [space.slots[1].send for space in spaces])
            for space, expected in zip(spaces, results, strict=True):
                space.check(1, iteration)
                untouched = space.wrong()
                if expected is None:
                    continue
                recv = space.slots[1].recv
                assert in_place or (recv.view(np.uint8) == 255).all(), "an output was not poisoned"
                if not in_place or op not in ("broadcast", "scan") or space is not spaces[0]:  # it is there already
                    assert untouched > recv.size // (4 * ranks), "an operation that did nothing passed"
                recv[:] = expected
                space.check(1, iteration)
                assert space.wrong() == 0
                space.check(1, iteration + 1)
                assert space.wrong() > recv.size // 4, "the result of another iteration passed"
                recv.view(np.uint8)[:: recv.itemsize][[0, recv.size // 2, -1]] ^= 1
                space.check(1, iteration)
                assert space.wrong() == 3


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (("all_to_all", 16, "float32", "sum", 8), "for each of 8 ranks, got 16 bytes"),
        (("routing", 1024, "bfloat16", "sum", 2), "expected at least a token of 7168 bfloat16, got 1024 bytes"),
        (("all_reduce", 64, "float8_e5m2", "sum", 8), "sum: no values of float8_e5m2 have an exact result on 8 ranks"),
        (("all_reduce", 96, "float32", "avg", 3), "avg: expected floats on 2, 4, 8"),
        (("exscan", 96, "float32", "avg", 2), "avg: expected an operation that has an average, got exscan"),
    ],
)
def test_cases_that_cannot_be_measured(case, said):
    with pytest.raises(InvalidArgument, match=said):
        Case.of(*case, True)
