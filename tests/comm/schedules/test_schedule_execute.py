"""Schedules executed over an adversarial in-memory transport, against NumPy."""

from __future__ import annotations

import fake_world
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kos.comm.schedules import algorithms, build, collectives

CASES = [(c, a) for c in collectives() for a in algorithms(c)]


def check(schedule, elements, seed, deliveries=1, dtype=np.float64):
    rng = np.random.default_rng(seed)
    buffers = fake_world.make_buffers(schedule, elements, rng, dtype)
    want = fake_world.expected(schedule, buffers, elements)
    inputs = [b["input"].copy() if "input" in b else None for b in buffers]
    fake_world.run(schedule, buffers, lambda dst, src: np.add(dst, src, out=dst), seed, deliveries)
    results = []
    for rank in range(schedule.ranks):
        if inputs[rank] is not None:
            assert np.array_equal(buffers[rank]["input"], inputs[rank]), "an input was written"
        if want[rank] is None:
            continue
        got = fake_world.result(schedule, buffers, rank)
        results.append(got)
        if schedule.ordered or schedule.collective not in ("all_reduce", "reduce", "reduce_scatter"):
            assert np.array_equal(got, want[rank]), f"{schedule}, rank {rank}: not bit for bit"
        else:
            np.testing.assert_allclose(got, want[rank], rtol=1e-5 if dtype == np.float32 else 1e-12, atol=1e-5,
                                       err_msg=f"{schedule}, rank {rank}")
    if schedule.collective == "all_reduce":
        assert all(np.array_equal(results[0], r) for r in results), f"{schedule}: ranks differ"


@pytest.mark.parametrize("collective,algorithm", CASES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7, 8])
def test_every_algorithm(collective, algorithm, ranks):
    for root in {0, ranks - 1, ranks // 2}:
        for chunks in (1, 3):
            for elements in (0, 1, 5, 53):
                check(build(collective, algorithm, ranks, chunks, root), elements, seed=ranks)
