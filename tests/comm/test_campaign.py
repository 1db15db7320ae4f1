"""A short run of the fault campaign: ``python -m tests.faults`` runs it for longer."""

from __future__ import annotations

import numpy as np
import pytest

from tests.faults import Trial, campaign
from tests.launcher import needs_mpirun


@pytest.mark.parametrize(("backend", "trials"), [("tcp", 6), pytest.param("mpi", 4, marks=needs_mpirun)])
def test_every_survivor_names_the_rank_that_failed_first(backend: str, trials: int) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    assert campaign(trials, backend, seed, timeout=3.0, jobs=2) == 0, "the seeds are printed"


def test_a_seed_stands_for_one_trial() -> None:
    assert Trial.of(7, "tcp", 3.0) == Trial.of(7, "tcp", 3.0) != Trial.of(8, "tcp", 3.0)
