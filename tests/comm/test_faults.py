"""Every fault of a plan at every collective: results that stay right, or errors that name the rank."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import kos
from kos.comm.schedules import algorithms
from kos.errors import CollectiveError, CollectiveTimeout, InvalidArgument, KosError, RankLost
from kos.testing import Fault, spawn
from tests.comm.model import NAMES, Step, run

SIZE, SEED = 3, 17
LOOK = 0.05  # seconds between two looks at the clock
CULPRIT = 1
CALLS = {name: Step(name, root=CULPRIT * (name in ("broadcast", "scatter"))) for name in NAMES} | {
    f"all_reduce {name}": Step("all_reduce", algorithm=number, in_place=True)
    for number, name in enumerate(algorithms("all_reduce"), len(algorithms("all_reduce")))
}
CALLS["all_reduce deterministic"] = Step("all_reduce", deterministic=True)

every_call = pytest.mark.parametrize("name", CALLS)


@every_call
@pytest.mark.parametrize("kind", ["delay", "reorder", "duplicate", "stall"])
def test_results_that_no_fault_changes(name: str, kind: str) -> None:
    """Late, twice, overtaken, or after a pause; and so is what follows on the same communicator."""
    seconds = None if kind == "duplicate" else 0.01
    faults = [Fault(kind, CULPRIT, operation, seconds) for operation in (1, 2)]

    def body(comm: kos.Communicator) -> None:
        for _ in range(4):
            run(comm, CALLS[name], SEED)

    spawn(body, SIZE, 60, faults=faults)


class Outcome:
    """What each rank raised from an operation that cannot succeed, all of them still there meanwhile."""

    def __init__(self, name: str, fault: Fault, survivors: int) -> None:
        self.errors: dict[int, KosError] = {}
        first, over = threading.Barrier(SIZE), threading.Barrier(survivors)
        comms: dict[int, kos.Communicator] = {}
        done: set[int] = set()
        clock = 0.0

        def monotonic() -> float:
            """Time stands until all that come wait for each other, or are done: nobody is late by chance."""
            nonlocal clock
            waiting = {rank for rank, comm in list(comms.items()) if comm.backend.engine.outstanding()}
            happened = all(fault not in comm.backend._group.world.faults.pending for comm in list(comms.values()))
            if fault.kind in ("stall", "drop") and happened and len(waiting | done) == survivors:
                clock += LOOK
            return clock

        def body(comm: kos.Communicator) -> None:
            run(comm, CALLS[name], SEED)
            first.wait(30)
            comms[comm.rank], comm.timeout = comm, LOOK
            try:
                run(comm, CALLS[name], SEED)
            except KosError as error:
                self.errors[comm.rank] = error
            done.add(comm.rank)
            over.wait(30)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("kos.comm.work.time", SimpleNamespace(monotonic=monotonic))
            results = spawn(body, SIZE, 60, faults=[fault])
        assert results == [None] * SIZE


@every_call
def test_a_rank_that_stalls_is_named(name: str) -> None:
    outcome = Outcome(name, Fault("stall", CULPRIT, 1), SIZE - 1)
    late = [error for error in outcome.errors.values() if isinstance(error, CollectiveTimeout)]
    assert late and CULPRIT not in outcome.errors
    if name == "send_recv":
        assert str(late[0]).endswith(f"rank {CULPRIT} sent nothing with tag 0")
        return
    assert sorted(outcome.errors) == [0, 2]
    for error in outcome.errors.values():
        assert isinstance(error, CollectiveTimeout | RankLost)
        assert f"ranks [{CULPRIT}] did not arrive" in str(error)


@every_call
def test_a_rank_that_crashes_is_named(name: str) -> None:
    outcome = Outcome(name, Fault("crash", CULPRIT, 1), SIZE - 1)
    lost = outcome.errors if name != "send_recv" else {2: outcome.errors[2]}
    assert name == "send_recv" or sorted(lost) == [0, 2]
    for error in lost.values():
        assert isinstance(error, RankLost)
        assert f"rank {CULPRIT} is gone: it crashed before" in str(error)


@every_call
def test_a_message_that_is_lost(name: str) -> None:
    """Nobody waits for ever; whoever waits for a message says whose."""
    outcome = Outcome(name, Fault("drop", CULPRIT, 1), SIZE)
    late = [error for error in outcome.errors.values() if isinstance(error, CollectiveTimeout)]
    assert late
    for error in outcome.errors.values():
        assert isinstance(error, CollectiveTimeout | RankLost)
    told = " ".join(map(str, outcome.errors.values()))
    assert f"rank {CULPRIT} sent nothing" in told or "all ranks arrived; no message from ranks [" in told


@every_call
def test_a_message_that_was_changed_is_found(name: str) -> None:
    outcome = Outcome(name, Fault("corrupt", CULPRIT, 1), SIZE)
    assert outcome.errors
    told = [e for e in outcome.errors.values() if f"message from rank {CULPRIT} was changed" in str(e)]
    assert told and all(isinstance(error, CollectiveError) for error in outcome.errors.values())
    assert all(re.match(rf"world: {name.split()[0]} #\d+", str(error)) for error in told), told


def test_ranks_of_a_split_are_those_of_the_world() -> None:
    """Operation 1 of world rank 2 is its first on the split, where it is rank 1."""

    def body(comm: kos.Communicator) -> str:
        comm.barrier()
        part = comm.split(comm.rank % 2)
        assert part is not None
        try:
            part.all_reduce(np.ones(3))
        except RankLost as error:
            return str(error)
        return "fine"

    results = spawn(body, 4, 60, faults=[Fault("crash", 2, 1)])
    assert results[2] is None and results[1] == results[3] == "fine"
    assert "rank 1 is gone: it crashed" in results[0]


def test_several_faults_at_once() -> None:
    faults = [
        Fault(kind, rank, operation)
        for kind in ("delay", "reorder", "duplicate")
        for rank in range(SIZE)
        for operation in range(3)
    ]

    def body(comm: kos.Communicator) -> None:
        works = [comm.all_reduce(np.full(12, comm.rank + 10.0**n), async_op=True) for n in range(3)]
        for n, work in reversed(list(enumerate(works))):
            assert (work.wait() == 3 + 3 * 10.0**n).all()

    spawn(body, SIZE, 60, faults=faults)


def test_two_that_stall_and_one_that_crashes() -> None:
    faults = [Fault("stall", 0), Fault("stall", 1), Fault("crash", 2)]

    def body(comm: kos.Communicator) -> str:
        with pytest.raises(RankLost, match="rank 2 is gone: it crashed before barrier"):
            comm.barrier()
        return "survived"

    assert spawn(body, 4, 60, faults=faults) == [None, None, None, "survived"]


def test_a_rank_that_crashes_finishes_nothing() -> None:
    """Not even what it has under way: it does not wait for that, nor tell anybody."""

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 1:
            comm.recv(np.empty(1), 0, async_op=True)
        with pytest.raises(RankLost, match="rank 1 is gone: it crashed before barrier"):
            comm.barrier()

    assert spawn(body, 2, 30, faults=[Fault("crash", 1, 1)]) == [None, None]


def test_a_plan_that_makes_no_sense() -> None:
    for wrong in (
        lambda: Fault("loss", 0),
        lambda: Fault("drop", -1),
        lambda: Fault("drop", 0, -1),
        lambda: Fault("drop", 0, seconds=1),
        lambda: Fault("delay", 0, seconds=0),
    ):
        with pytest.raises(InvalidArgument, match="fault: expected"):
            wrong()
    with pytest.raises(InvalidArgument, match="faults: expected ranks below 2, got .*rank=2"):
        spawn(lambda comm: None, 2, faults=[Fault("drop", 2)])


def test_a_fault_that_never_happens_fails_the_test() -> None:
    def body(comm: kos.Communicator) -> None:
        comm.broadcast(np.ones(1))  # of which rank 1 sends nothing

    for fault in (Fault("drop", 1), Fault("crash", 0, 1)):
        with pytest.raises(InvalidArgument, match=r"got none of .*Fault.* in \[1, 1\] operations"):
            spawn(body, 2, faults=[fault])


def test_without_a_plan_messages_go_the_short_way() -> None:
    def body(comm: kos.Communicator) -> str:
        return type(comm.backend.transport).__name__

    assert spawn(body, 2) == ["_Mailboxes"] * 2
