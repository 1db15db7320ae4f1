"""A short run of the fault campaign: ``python -m tests.faults`` runs it for longer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kos.comm.rendezvous.threads import ThreadGroup, ThreadRendezvous
from tests.comm import fake_nccl
from tests.comm.tcp_ranks import run_threads
from tests.faults import Rank, Trial, campaign
from tests.launcher import needs_mpirun


@pytest.mark.parametrize(
    ("backend", "trials"),
    [
        ("tcp", 2),
        pytest.param("mpi", 2, marks=needs_mpirun),
        pytest.param("tcp", 6, marks=pytest.mark.slow),
        pytest.param("mpi", 6, marks=[needs_mpirun, pytest.mark.slow]),
    ],
)
def test_every_survivor_names_the_rank_that_failed_first(backend: str, trials: int, tmp_path: Path) -> None:
    seed, out = int(np.random.SeedSequence().generate_state(1)[0]), tmp_path / "summary.json"
    assert campaign(trials, backend, seed, timeout=3.0, jobs=2, out=out) == 0, "the seeds are printed"
    summary = json.loads(out.read_text())
    assert (summary["trials"], summary["right"], summary["wrong"]) == (trials, trials, [])


def test_a_seed_stands_for_one_trial() -> None:
    assert Trial.of(7, "tcp", 3.0) == Trial.of(7, "tcp", 3.0) != Trial.of(8, "tcp", 3.0)


def test_a_program_without_a_fault_passes_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, group, nccl = Trial.of(-2, "nccl", 3.0), ThreadGroup(2), fake_nccl.Group(2)

    def body(rank: int) -> None:
        comm = fake_nccl.communicator(ThreadRendezvous(group, rank, 30.0), nccl)
        part = Rank(trial, comm)
        part.warm_up()
        part.run()
        for each in reversed(part.groups.values()):
            each.close()

    with fake_nccl.no_gpu(monkeypatch):
        assert run_threads(lambda: body(0), lambda: body(1)) == [None, None]
