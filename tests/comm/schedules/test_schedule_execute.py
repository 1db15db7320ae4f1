"""Schedules executed over an adversarial in-memory transport, against NumPy."""

import importlib

import fake_world
import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from kos.comm.schedules import algorithms, build, collectives
from kos.errors import InvalidArgument

CASES = [(c, a) for c in collectives() for a in algorithms(c)]
module = importlib.import_module("kos.comm.schedules.execute")


@pytest.fixture
def tiny_segments(monkeypatch):
    """Messages cut every 24 bytes, into four at most, with two staging slots: everything wraps."""
    monkeypatch.setattr(module, "SEGMENT_BYTES", 24)
    monkeypatch.setattr(module, "MAX_SEGMENTS", 4)
    monkeypatch.setattr(module, "STAGING_SLOTS", 2)
    module._compile.cache_clear()
    yield
    module._compile.cache_clear()


def check(schedule, elements, seed, deliveries=1, dtype=np.float64):
    rng = np.random.default_rng(seed)
    buffers = fake_world.make_buffers(schedule, elements, rng, dtype)
    want = fake_world.expected(schedule, buffers, elements)
    inputs = [b["input"].copy() if "input" in b else None for b in buffers]
    fake_world.run(schedule, buffers, lambda dst, src: np.add(dst, src, out=dst), seed, deliveries)
    exact = schedule.ordered or schedule.collective not in ("all_reduce", "reduce", "reduce_scatter")
    tolerance = 0 if exact else 50 * np.finfo(dtype).eps
    for rank in range(schedule.ranks):
        if inputs[rank] is not None:
            assert np.array_equal(buffers[rank]["input"], inputs[rank]), "an input was written"
        if want[rank] is not None:
            got = fake_world.result(schedule, buffers, rank)
            np.testing.assert_allclose(got, want[rank], rtol=tolerance, atol=10 * tolerance,
                                       err_msg=f"{schedule}, rank {rank}")
            if schedule.collective == "all_reduce":
                assert np.array_equal(buffers[0]["data"], got), f"{schedule}: ranks 0 and {rank} differ"


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, pytest.param(4, marks=pytest.mark.slow)])
def test_every_algorithm(collective, algorithm, ranks):
    for i, root in enumerate(sorted({0, ranks - 1, ranks // 2})):
        for j, elements in enumerate((0, 1, 5, 53)):
            chunks = (1, 3)[(i + j + ranks) % 2]  # the other for this length with another root and number of ranks
            check(build(collective, algorithm, ranks, chunks, root), elements, seed=ranks)


@st.composite
def schedules(draw):
    collective, algorithm = draw(st.sampled_from(CASES))
    ranks, chunks = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    local = draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))
    return build(collective, algorithm, ranks, chunks, draw(st.integers(0, ranks - 1)), ranks_per_node=local)


@pytest.mark.parametrize("segments", ["whole", "tiny"])
def test_any_schedule_any_size_any_order_of_delivery(segments, request):
    if segments == "tiny":
        request.getfixturevalue("tiny_segments")

    @settings(max_examples=100, deadline=None)
    @given(schedule=schedules(), elements=st.integers(0, 300), seed=st.integers(0, 2**32 - 1),
           deliveries=st.sampled_from([1, 2, 7, 1000]), dtype=st.sampled_from([np.float32, np.float64]))
    def inner(schedule, elements, seed, deliveries, dtype):
        note(f"{schedule}, {elements} elements, seed {seed}")
        check(schedule, elements, seed, deliveries, dtype)

    inner()


@pytest.mark.parametrize(("collective", "algorithm"), [(c, a) for c, a in CASES if "reduce" in c])
@pytest.mark.parametrize("ranks", [3, 6, 8])
def test_the_order_of_additions_depends_on_no_cut(collective, algorithm, ranks):
    """Every element is added in one order however many chunks a message has: shown by a sum that is not associative."""

    def scramble(dst, src):
        np.copyto(dst, (dst + src) * np.uint64(0x9E3779B97F4A7C15) ^ dst * src)

    for elements in (5, 257):
        whole = None
        for chunks in (1, 2, 3, 16):
            schedule, rng = build(collective, algorithm, ranks, chunks, ranks // 2), np.random.default_rng(elements)
            buffers = fake_world.make_buffers(schedule, elements, rng, np.uint64)
            for mine in buffers:
                x = mine["data" if "data" in mine else "input"]
                x[...] = rng.integers(2**64, size=x.size, dtype=np.uint64)
            fake_world.run(schedule, buffers, scramble, seed=chunks)
            got = fake_world.result(schedule, buffers, schedule.root)
            whole = got if whole is None else whole
            assert np.array_equal(got, whole), f"{schedule}: {(got != whole).sum()} of {got.size} elements differ"


@pytest.mark.parametrize(("arguments", "message"), [
    (("all_reduce", "rings", 4), "unknown algorithm 'rings' .* ring, h.* tree"),
    (("allreduce", "ring", 4), "unknown collective 'allreduce', .* all_reduce"),
    (("all_reduce", "ring", 0), "ranks must be at least 1, got 0"),
    (("all_reduce", "ring", 4, 0), "chunks must be at least 1, got 0"),
    (("all_reduce", "ring", 4.5), "ranks must be a whole number, got 4.5"),
    (("all_reduce", "ring", "4"), "ranks must be a whole number, got '4'"),
    (("all_reduce", "ring", 4, 1.5), "chunks must be a whole number, got 1.5"),
    (("broadcast", "ring", 4, 1, None), "root must be a whole number, got None"),
    (("broadcast", "ring", 4, 1, 4), r"root must be in 0\.\.3, got 4"),
])
def test_unknown_names_and_numbers_are_refused(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        build(*arguments)


def test_schedules_are_cached():
    assert build("all_reduce", "ring", 4) is build("all_reduce", "ring", 4)
