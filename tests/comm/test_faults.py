"""Planned faults in every collective, and the campaign of random faults: correct results, or errors that name the rank.

``python -m tests.faults`` runs the campaign for longer.
"""

import json
import re
import threading

import numpy as np
import pytest

import kos
from kos.comm.schedules import algorithms
from kos.errors import CollectiveError, CollectiveTimeout, InvalidArgument, KosError, RankLost
from kos.testing import Fault, spawn
from tests.comm.model import NAMES, Step, run
from tests.comm.ranks import on_each_rank
from tests.faults import run as campaign
from tests.launcher import needs_mpirun

SIZE, SEED = 3, 17
CULPRIT = 1
CALLS = {name: Step(name, root=CULPRIT * (name in ("broadcast", "scatter", "scatter_v"))) for name in NAMES} | {
    f"all_reduce {name}": Step("all_reduce", algorithm=number, in_place=True)
    for number, name in enumerate(algorithms("all_reduce"), len(algorithms("all_reduce")))
}
CALLS["all_reduce deterministic"] = Step("all_reduce", deterministic=True)

every_call = pytest.mark.parametrize("name", CALLS)


@every_call
@on_each_rank(spawn, SIZE, 60, faults=[Fault("delay", CULPRIT, operation, 0.01) for operation in (1, 2)])
def test_delays_change_no_result(comm, /, name):
    """Nor do they change later calls on the same communicator."""
    for _ in range(4):
        run(comm, CALLS[name], SEED)


def outcome(name: str, kind: str) -> dict[int, KosError]:
    """What each rank raised from an operation that cannot succeed, all of them still there meanwhile."""
    errors: dict[int, KosError] = {}
    over = threading.Barrier(SIZE - (kind in ("stall", "crash")))

    def body(comm: kos.Communicator) -> None:
        run(comm, CALLS[name], SEED)
        comm.rendezvous.barrier()
        try:
            run(comm, CALLS[name], SEED)
        except KosError as error:
            errors[comm.rank] = error
        if name != "send_recv":  # whose ranks wait for two others alone
            over.wait(30)

    assert spawn(body, SIZE, 60, faults=[Fault(kind, CULPRIT, 1)]) == [None] * SIZE
    return errors


@every_call
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("stall", rf"(?s)waits for rank {CULPRIT} in world: {{name}} #1.*rank {CULPRIT}: stalled before {{name}}"),
        ("drop", "waits for .*rank.* in world: {name} #1"),
    ],
)
def test_a_rank_that_stalls_or_sends_nothing(name, kind, message):
    """No rank waits forever: all ranks raise as soon as none of them can go on."""

    def body(comm):
        for _ in range(2):
            run(comm, CALLS[name], SEED)
            comm.rendezvous.barrier()

    with pytest.raises(CollectiveTimeout) as caught:
        spawn(body, SIZE, 60, faults=[Fault(kind, CULPRIT, 1)])
    lines = "\n".join(sorted(str(caught.value).splitlines(), key=lambda line: "stalled" in line))
    assert re.search(message.format(name=name.split()[0]), lines)
    assert caught.value.ranks == (CULPRIT,)
    lost = rf"the messages of rank {CULPRIT}'s {name.split()[0]} #1 were lost, as the test's plan says"
    assert bool(re.search(lost, lines)) == (kind == "drop")


@every_call
def test_a_rank_that_crashes_is_named(name):
    errors = outcome(name, "crash")
    assert 2 in errors and (name == "send_recv" or 0 in errors) and CULPRIT not in errors
    for rank, error in errors.items():
        assert isinstance(error, RankLost)
        assert rank != 2 or f"rank {CULPRIT} is gone: it crashed before" in str(error)


@every_call
def test_an_operation_that_fails_on_one_rank(name):
    errors = outcome(name, "error")
    assert CULPRIT in errors and (name == "send_recv" or len(errors) == SIZE)
    for error in errors.values():
        assert isinstance(error, CollectiveError)
        assert f"rank {CULPRIT} failed, as the test's plan says" in str(error)
        assert error.ranks == (CULPRIT,)


def test_ranks_of_a_split_are_those_of_the_world():
    """Operation 1 of world rank 2 is its first on the split, where it is rank 1."""

    def body(comm):
        comm.barrier()
        part = comm.split(comm.rank % 2)
        try:
            part.all_reduce(np.ones(3))
        except RankLost as error:
            return str(error)
        return "fine"

    results = spawn(body, 4, 60, faults=[Fault("crash", 2, 1)])
    assert results[2] is None and results[1] == results[3] == "fine"
    assert "rank 2 of world is gone: it crashed" in results[0]


def test_two_that_stall_and_one_that_crashes():
    faults = [Fault("stall", 0), Fault("stall", 1), Fault("crash", 2)]

    def body(comm):
        with pytest.raises(RankLost, match="rank 2 is gone: it crashed before barrier"):
            comm.barrier()
        return "survived"

    assert spawn(body, 4, 60, faults=faults) == [None, None, None, "survived"]


def test_a_rank_that_crashes_finishes_nothing():
    """A crashed rank neither waits for its operations in flight nor notifies other ranks."""

    def body(comm):
        if comm.rank == 1:
            comm.recv(np.empty(1), 0, async_op=True)
        with pytest.raises(RankLost, match="rank 1 is gone: it crashed before barrier"):
            comm.barrier()

    assert spawn(body, 2, 30, faults=[Fault("crash", 1, 1)]) == [None, None]


def test_a_fault_of_one_kind_of_operation():
    def body(comm):
        try:
            for _ in range(3):
                comm.barrier()
                comm.all_reduce(np.ones(2))
        except RankLost as error:
            return str(error)
        return "no error"

    results = spawn(body, 2, 60, faults=[Fault("crash", 1, 2, call="all_reduce")])
    assert "all_reduce #5" in results[0] and "rank 1 is gone: it crashed before all_reduce" in results[0]
    with pytest.raises(InvalidArgument, match=r"got none of .*call='send'.* in \[6, 6\] operations"):
        spawn(body, 2, 60, faults=[Fault("crash", 1, call="send")])
    with pytest.raises(InvalidArgument, match="fault: expected"):
        Fault("drop", 0, 0, 1)


@pytest.mark.parametrize("backend", ["tcp", pytest.param("mpi", marks=needs_mpirun, id="on mpi")])
def test_every_survivor_names_the_rank_that_failed_first(backend, tmp_path):
    seed, out = int(np.random.SeedSequence().generate_state(1)[0]), tmp_path / "summary.json"
    assert campaign(2, backend, seed, timeout=3.0, jobs=2, out=out) == 0, "the seeds are printed"
    summary = json.loads(out.read_text())
    assert (summary["trials"], summary["right"], summary["wrong"]) == (2, 2, [])
