"""Mismatched calls, ranks that do not come, ranks that are gone: errors that name them, and no hang."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kos
from kos import ReduceOp
from kos.comm.backends import mock, mpi_messages
from kos.comm.rendezvous import ThreadGroup, ThreadRendezvous
from kos.comm.schedules import ScheduleError, registry
from kos.comm.schedules.schedule import Moves
from kos.errors import (
    BackendUnavailable,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgument,
    KosError,
    RankLost,
    RendezvousError,
)
from kos.testing import Fault, spawn
from tests.comm.ranks import TIMEOUT, time_out_beside_others
from tests.comm.tcp_ranks import run_threads

F4, F5, I4 = (lambda: np.zeros(4, np.float32)), (lambda: np.zeros(5, np.float32)), (lambda: np.zeros(4, int))
Call = Callable[[kos.Communicator], Any]

MISMATCHES: dict[str, tuple[Call, Call, str]] = {
    "operation": (
        lambda c: c.all_reduce(F4()),
        lambda c: c.broadcast(F4()),
        "operation .*(all_reduce against broadcast|broadcast against all_reduce)",
    ),
    "count": (lambda c: c.all_reduce(F4()), lambda c: c.all_reduce(F5()), "count (4 against 5|5 against 4)"),
    "dtype": (lambda c: c.broadcast(F4()), lambda c: c.broadcast(I4()), "dtype .*float32.*|dtype .*int64"),
    "op": (
        lambda c: c.all_reduce(F4()),
        lambda c: c.all_reduce(F4(), ReduceOp.MAX),
        "op (SUM against MAX|MAX against SUM)",
    ),
    "root": (lambda c: c.broadcast(F4(), 0), lambda c: c.broadcast(F4(), 1), "root (0 against 1|1 against 0)"),
    "algorithm": (
        lambda c: c.all_reduce(F4(), algorithm="ring"),
        lambda c: c.all_reduce(F4(), algorithm="tree"),
        "algorithm (ring against tree|tree against ring)",
    ),
    "deterministic": (
        lambda c: c.all_reduce(F4(), deterministic=True),
        lambda c: c.all_reduce(F4()),
        "deterministic (True against False|False against True)",
    ),
    "counts": (
        lambda c: c.all_gather_v(np.zeros(2 + (c.rank == 2)), [2, 2, 3]),
        lambda c: c.all_gather_v(np.zeros(2), [2, 2, 2]),
        r"counts \[2, 2, .\] against \[2, 2, .\]",
    ),
    "gather size": (lambda c: c.gather(F4()), lambda c: c.gather(F5()), "count (4 against 5|5 against 4)"),
    "barrier": (lambda c: c.barrier(), lambda c: c.all_reduce(F4()), "barrier"),
}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch_raises_on_all_ranks_and_names_two(case: str, odd: int) -> None:
    usual, other, message = MISMATCHES[case]
    caught: dict[int, str] = {}

    def body(comm: kos.Communicator) -> None:
        comm.all_reduce(np.zeros(1))
        with pytest.raises(CollectiveMismatch, match=message) as error:
            (other if comm.rank == odd else usual)(comm)
        caught[comm.rank] = str(error.value)
        with pytest.raises(KosError):  # the ranks are out of step: nothing goes on by luck
            comm.all_reduce(np.zeros(1))

    spawn(body, 3, timeout=20)
    assert sorted(caught) == [0, 1, 2]
    assert len(set(caught.values())) == 1
    assert f"rank {odd} called" in caught[0]
    assert "#1" in caught[0]


@pytest.mark.mpi
@pytest.mark.parametrize("odd", [0, -1])
@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch_between_hosts_on_mpi(ranks_of_mpi: Any, monkeypatch: pytest.MonkeyPatch, case: str, odd: int) -> None:
    """Ranks that share no memory: all raise long before their timeout."""
    monkeypatch.setattr("kos.comm.backends.host.open_segment", lambda _: (None, "switched off by the test"))
    usual, other, message = MISMATCHES[case]

    def body(comm: kos.Communicator) -> None:
        if case == "counts" and comm.size != 3:
            return
        comm.all_reduce(np.zeros(1))
        for again in ("", "failed before"):
            with pytest.raises(CollectiveMismatch, match=f"{again}.*{message}") as error:
                (other if comm.rank == odd % comm.size else usual)(comm)
            assert f"rank {odd % comm.size} called" in str(error.value) and "#1" in str(error.value)

    began = time.monotonic()
    ranks_of_mpi.run(body)
    assert time.monotonic() - began < TIMEOUT / 2


@pytest.mark.mpi
@pytest.mark.parametrize("memory", ["shared", "none"])
def test_a_failure_is_heard_between_hosts_on_mpi(
    ranks_of_mpi: Any, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    """Of a collective that one rank alone gave up, and of a rank that left, also by who waits for a message."""
    if memory == "none":
        monkeypatch.setattr("kos.comm.backends.host.open_segment", lambda _: (None, "switched off by the test"))

    def gives_up(comm: kos.Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match="all_reduce #0"):
                comm.all_reduce(np.ones(1), timeout=0.1)
        else:
            with pytest.raises(CollectiveTimeout, match="all_reduce #0 .* not complete after 0.1 s"):
                comm.recv(np.ones(1), 0)

    def leaves(comm: kos.Communicator) -> None:
        left = comm.duplicate()
        if comm.rank == 0:
            left.send(np.ones(1), 1)
            left.abort(0, "it had enough")
        else:
            if comm.rank == 1:
                assert left.recv(np.zeros(1), 0) == 1
                with pytest.raises(RankLost, match="rank 0 is gone: it had enough"):
                    left.recv(np.zeros(1), 0)
            with pytest.raises(RankLost, match="rank 0 is gone: it had enough"):
                left.barrier()

    def leaves_for_a_failure(comm: kos.Communicator) -> None:
        """Rank 1 hears of it in a message, and goes before rank 0 has told the rest."""
        left = comm.duplicate()
        if comm.rank == 0 and memory == "none":
            left.backend._messages._others = [comm.rendezvous.rank + 1]  # type: ignore[attr-defined]
        comm.rendezvous.barrier()
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match="all_reduce #0"):
                left.all_reduce(np.ones(1), timeout=0.1)
        else:
            with pytest.raises(CollectiveTimeout, match="all_reduce #0"):
                left.recv(np.ones(1), 0) if comm.rank == 1 else left.all_reduce(np.ones(1))
            left.abort(0, "it had enough")
        comm.rendezvous.barrier()
        left.abort(0, "it had enough")

    began = time.monotonic()
    ranks_of_mpi.run(gives_up)
    ranks_of_mpi.run(leaves_for_a_failure)
    ranks_of_mpi.run(leaves)
    assert time.monotonic() - began < TIMEOUT / 2


def test_split_against_another_call(several: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        comm.duplicate().close()
        message = r"rank . called .*split #1.* operation (split ag|.* against split)"
        with pytest.raises(CollectiveMismatch, match=message):
            comm.split(0) if comm.rank == 0 else comm.all_reduce(F4())

    several.run(body)


def test_split_against_duplicate(several: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        with pytest.raises(CollectiveMismatch, match="operation (split against duplicate|duplicate against split)"):
            comm.split(0) if comm.rank == 0 else comm.duplicate()

    several.run(body)


def test_message_of_another_size_or_dtype() -> None:
    for wrong in (np.zeros(3, np.float32), np.zeros(4, np.int32)):

        def body(comm: kos.Communicator, wrong: np.ndarray = wrong) -> None:
            if comm.rank == 0:
                comm.send(wrong, 1)
            else:
                message = "recv #0 .*: rank 1 expected 4 elements of float32 from rank 0"
                with pytest.raises(CollectiveMismatch, match=message):
                    comm.recv(F4(), 0)
            assert comm.all_reduce(np.ones(3)).sum() == 6, "a message breaks nothing"

        spawn(body, 2, timeout=20)


@pytest.mark.mpi
@pytest.mark.parametrize("posted", ["before", "after"])
def test_message_of_another_size_on_mpi(ranks_of_mpi: Any, posted: str) -> None:
    """Nothing is written beside what the receive was given: Open MPI would, of longer messages within a host."""

    def body(comm: kos.Communicator) -> None:
        for sent, expected in [(3, 4), (5, 4), (0, 2), (2, 0), (100_000, 2000), (10**6, 0), (2000, 10**6)]:
            memory = np.zeros(2 * 10**6, np.float32)
            if comm.rank == 1 and posted == "before":
                work = comm.recv(memory[500_000:][:expected], 0, async_op=True)
                work.done()
            comm.rendezvous.barrier()
            if comm.rank == 0:
                comm.send(np.ones(sent, np.float32), 1)
            elif comm.rank == 1:
                if posted == "after":
                    work = comm.recv(memory[500_000:][:expected], 0, async_op=True)
                with pytest.raises(CollectiveMismatch, match=r"recv #\d") as caught:
                    work.wait()
                message = f"rank 1 expected {expected} elements of float32 from rank 0, got {sent} elements"
                assert message in str(caught.value)
                assert not memory.any()
        for tag in range(3):  # the dtype is wrong; other messages have come before it was asked for
            if comm.rank == 0:
                for x in (np.ones(4, np.int32), np.ones(4, np.float32)):
                    comm.send(x, 1, tag)
        if posted == "after":
            comm.rendezvous.barrier()
        if comm.rank == 1:
            for tag in (2, 0, 1):
                with pytest.raises(
                    CollectiveMismatch, match="expected 4 elements of float32 .* got 4 elements of int32"
                ):
                    comm.recv(F4(), 0, tag)
                assert (comm.recv(F4(), 0, tag) == 1).all()
        comm.barrier()

    ranks_of_mpi.run(body)


def disagree_about_counts(comm: kos.Communicator, sent: int, expected: int) -> None:
    """Rank 1 sends rank 0 something else than that one expects: all ranks say so, and the same."""
    n, me = comm.size, comm.rank
    matrix = np.full((n, n), 2)
    comm.all_to_all_v(np.zeros(2 * n), matrix[me], matrix[:, me])
    matrix[1, 0] = sent if me == 1 else expected
    x = np.zeros(int(matrix[me].sum()))
    with pytest.raises(CollectiveMismatch) as caught:
        comm.all_to_all_v(x, matrix[me], matrix[:, me], timeout=10)
    message = f"rank 0 expected {expected} elements of float64 from rank 1, got {sent} elements of float64"
    assert message in str(caught.value)
    assert "all_to_all_v #1" in str(caught.value)
    with pytest.raises(CollectiveError, match="failed before"):
        comm.barrier()


COUNTS = [(0, 3), (3, 0), (2, 3), (300_000, 0), (0, 300_000), (300_000, 299_999)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_counts_of_two_ranks_that_disagree(several: Any, counts: tuple[int, int]) -> None:
    several.run(lambda comm: disagree_about_counts(comm, *counts))


def test_timeout_of_a_message_gives_up_no_other(several: Any) -> None:
    several.run(time_out_beside_others)


def give_up_a_send(comm: kos.Communicator) -> None:
    """A send that times out ends the communicator: nobody gets what its memory held later, and all say the same."""
    for elements in (4, 4096, 1 << 20):
        part, x = comm.duplicate(), np.ones(elements)
        message = "(send|send_recv) #0 .* to rank 1 with tag 5.*: not complete after 0.05 s"
        collective = part.barrier(async_op=True) if comm.rank == 1 else None
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match=message):
                part.send_recv(x, np.zeros(1), 1, 1, 5, timeout=0.05)
            x[:] = -7
        comm.rendezvous.barrier()
        if comm.rank == 1:
            y = np.zeros(elements)
            with contextlib.suppress(CollectiveTimeout):  # a short one may have been copied in time
                part.recv(y, 0, 5)
                assert (y == 1).all()
            with pytest.raises(CollectiveTimeout, match=message):
                part.recv(y, 0, 5)
            with pytest.raises(CollectiveTimeout, match=message):
                part.send(y, 0, 5)
            assert collective is not None
            with pytest.raises(CollectiveTimeout, match=message):
                collective.wait()
        with pytest.raises(CollectiveTimeout, match=message):
            part.barrier()
        part.close()
    comm.barrier()


def test_a_send_given_up_ends_the_communicator(several: Any) -> None:
    several.run(give_up_a_send)


@pytest.mark.mpi
def test_a_send_given_up_between_hosts_on_mpi(ranks_of_mpi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kos.comm.backends.host.open_segment", lambda _: (None, "switched off by the test"))
    ranks_of_mpi.run(give_up_a_send)


def abort_a_send(comm: kos.Communicator) -> None:
    """Of a send that is under way at an abort nobody gets what its memory held later."""
    for elements in (4, 4096, 1 << 20):
        part, x = comm.duplicate(), np.ones(elements)
        if comm.rank == 0:
            part.send(x, 1, async_op=True)
            part.abort(0, "it had enough")
            x[:] = -7
        comm.rendezvous.barrier()
        if comm.rank == 1:
            y = np.zeros(elements)
            with contextlib.suppress(RankLost):  # a short one has left its memory
                part.recv(y, 0)
                assert (y == 1).all()
            with pytest.raises(RankLost, match="rank 0 is gone: .*it had enough"):
                part.recv(y, 0)
    comm.barrier()


@pytest.mark.parametrize("memory", ["shared", "none"])
def test_a_send_under_way_at_an_abort(several: Any, monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    if memory == "none":
        monkeypatch.setattr("kos.comm.backends.host.open_segment", lambda _: (None, "switched off by the test"))
    several.run(abort_a_send)


def test_a_receive_that_does_not_fit_gives_up_no_send_beside_it(several: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        x, y = np.full(1 << 18, float(comm.rank)), np.zeros(1 << 18)
        if comm.rank == 0:
            with pytest.raises(CollectiveMismatch, match="send_recv #0 .* got 3 elements"):
                comm.send_recv(x, y, 1, 1)
            x[:] = -7
        elif comm.rank == 1:
            comm.send(np.zeros(3), 0)
            comm.recv(y, 0)
            assert (y == 0).all()
        comm.barrier()

    several.run(body)


@pytest.mark.mpi
@pytest.mark.parametrize("elements", [65_536, 200_003])
def test_messages_longer_than_mpi_counts(ranks_of_mpi: Any, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """With a limit of 1000 bytes instead of 2 GiB."""
    monkeypatch.setattr("kos.comm.backends.mpi_messages.LARGEST", 1000)
    monkeypatch.setattr("kos.comm.backends.mpi.LARGEST", 1000)
    long: set[int] = set()
    make = mpi_messages._long_type
    monkeypatch.setattr(mpi_messages, "_long_type", lambda nbytes, MPI: (long.add(nbytes), make(nbytes, MPI))[1])

    def body(comm: kos.Communicator) -> None:
        me, n = comm.rank, comm.size
        x = np.random.default_rng(elements + me).integers(0, 256, elements, np.uint8)
        rows = np.stack([np.random.default_rng(elements + r).integers(0, 256, elements, np.uint8) for r in range(n)])
        before = (me - 1) % n
        y = np.full_like(x, 99)
        comm.send_recv(x, y, (me + 1) % n, before)
        assert (y == rows[before]).all() and elements in long
        assert (comm.all_gather(x) == rows).all()
        assert (comm.broadcast(x.copy(), 1) == rows[1]).all()
        assert (comm.all_gather_v(x, [elements] * n) == rows.reshape(-1)).all()
        if me == 0:
            comm.send(x, 1)
        elif me == 1:
            z = np.zeros(elements + 1, np.uint8)
            with pytest.raises(CollectiveMismatch, match=f"expected {elements + 1} .* got {elements} elements"):
                comm.recv(z, 0)
            assert not z.any()

    ranks_of_mpi.run(body)


def test_timeout_names_operation_and_missing_ranks() -> None:
    def body(comm: kos.Communicator) -> None:
        comm.barrier()
        began = time.monotonic()
        with pytest.raises(KosError) as caught:
            comm.all_reduce(np.zeros((2, 3), np.float32), timeout=0.3)
        assert time.monotonic() - began < 15
        # Whoever times out first says who is missing; the other hears that it gave up.
        text = str(caught.value)
        assert "all_reduce #1 of float32[2, 3] by SUM: not complete after 0.3 s" in text
        assert "ranks [1, 3] did not arrive" in text
        assert isinstance(caught.value, CollectiveTimeout | RankLost)

    spawn(body, 4, timeout=30, faults=[Fault("stall", rank, 1) for rank in (1, 3)])


def test_asking_whether_it_is_done_times_out_as_waiting_does(several: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        part = comm.duplicate()
        comm.rendezvous.barrier()
        if comm.rank > 0:
            began = time.monotonic()
            work = part.all_reduce(np.ones(3), async_op=True, timeout=0.3)
            message = r"all_reduce #0 .*: not complete after 0.3 s; ranks \[0\] did not arrive"
            with pytest.raises(CollectiveTimeout, match=message):  # noqa: PT012
                while not work.done():
                    assert time.monotonic() - began < 15
            assert comm.size > 2 or time.monotonic() - began >= 0.3
        comm.rendezvous.barrier()

    several.run(body)


def test_who_computes_for_longer_than_the_timeout_may_ask_afterwards(several: Any) -> None:
    """Memory of a host moves when somebody asks: time before that is nobody's fault."""

    def body(comm: kos.Communicator) -> None:
        x = np.ones(3)
        work = comm.all_reduce(x, async_op=True, timeout=0.5)
        time.sleep(0.7)
        comm.rendezvous.barrier()
        while not work.done():
            pass
        assert (x == comm.size).all()

    several.run(body)


def test_synchronize_raises_what_failed_at_its_launch(several: Any) -> None:
    """Nothing is in flight then; nor did anybody ask."""

    def late(comm: kos.Communicator) -> None:
        part, x = comm.duplicate(), np.ones(3)
        if comm.rank > 0:
            with pytest.raises(CollectiveTimeout, match="all_reduce #0"):
                part.all_reduce(x, timeout=0.2)
        comm.rendezvous.barrier()
        if comm.rank == 0:
            part.all_reduce(x, async_op=True)
        for _ in range(2):
            with pytest.raises(CollectiveTimeout, match=r"all_reduce #0 .* not complete after 0.2 s"):
                part.synchronize(1)
        comm.rendezvous.barrier()

    def message(comm: kos.Communicator) -> None:
        for tag in range(2):
            if comm.rank == 0:
                comm.send(np.ones(3), 1, tag)
            elif comm.rank == 1:
                until = time.monotonic() + 15
                work = comm.recv(np.zeros(4), 0, tag, async_op=True)
                while comm.backend.engine.outstanding():
                    comm.backend.engine.poll()
                    assert time.monotonic() < until
                with pytest.raises(CollectiveMismatch, match=f"recv #{tag} .* with tag {tag}: .*got 3 elements"):
                    work.wait() if tag else comm.synchronize()
                comm.synchronize()  # it was told
        comm.barrier()

    several.run(late)
    several.run(message)


@pytest.mark.parametrize("timeout", [float("inf"), 1e10])
def test_a_timeout_longer_than_clocks_count(timeout: float) -> None:
    def body(comm: kos.Communicator) -> None:
        group = comm.rendezvous.threads
        assert group is not None
        mine = ThreadRendezvous(group.shared("another", lambda: ThreadGroup(2)), comm.rank, 20.0)
        with kos.init("mock", rendezvous=mine, timeout=timeout) as patient:
            for root in (0, 1):  # who waits is the other one
                patient.broadcast(np.ones(1), root)
            patient.barrier(timeout=timeout)

    spawn(body, 2, timeout=20)


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_timeout_on_mpi(ranks_of_mpi: Any, algorithm: str) -> None:
    def body(comm: kos.Communicator) -> None:
        began = time.monotonic()  # before any rank leaves the barrier: the first to give up tells the others
        comm.barrier()
        if comm.rank == 0:
            comm.rendezvous.barrier()  # not in the collective, until all others have given up
            return
        message = r"all_reduce #1 of float32\[70000\] by SUM: not complete after 0.3 s"
        with pytest.raises(CollectiveTimeout, match=message) as caught:
            comm.all_reduce(np.zeros(70000, np.float32), algorithm=algorithm, timeout=0.3)
        assert 0.3 <= time.monotonic() - began < 15
        if algorithm == "ring" and comm.rank == 1:
            assert "ranks [0] did not arrive" in str(caught.value)
        with pytest.raises(CollectiveError, match="failed before: .*all_reduce #1"):
            comm.barrier()
        comm.rendezvous.barrier()

    ranks_of_mpi.run(body)


@pytest.mark.parametrize("waiting", ["all_reduce", "barrier", "recv", "rendezvous", "split"])
def test_the_other_ranks_hear_of_an_exception(waiting: str) -> None:
    heard: list[str] = []

    def body(comm: kos.Communicator) -> None:
        part = comm.split(0)
        if comm.rank == 1:
            raise ZeroDivisionError("boom")
        waits: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: comm.all_reduce(np.zeros(4)),
            "barrier": comm.barrier,
            "recv": lambda: comm.recv(np.zeros(1), 1),
            "rendezvous": lambda: comm.rendezvous.allgather(b""),
            "split": lambda: part.all_reduce(np.zeros(4), algorithm="ring"),
        }
        with pytest.raises(RankLost) as caught:
            waits[waiting]()
        heard.append(str(caught.value))

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="boom") as caught:
        spawn(body, 3, timeout=40)
    assert time.monotonic() - began < 20
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]
    assert len(heard) == 2
    assert all("rank 1" in text for text in heard), heard


@pytest.mark.parametrize("closes", [False, True])
def test_a_rank_that_returned_or_closed_is_gone(closes: bool) -> None:
    heard = threading.Event()

    def body(comm: kos.Communicator) -> None:
        part = comm.split(0)
        assert part is not None
        if comm.rank == 1 and closes:
            comm.close()
            part.send(np.ones(1), 0)  # another group
            assert heard.wait(40)
        elif comm.rank == 0:
            if closes:
                assert part.recv(np.zeros(1), 1) == 1
            for call in (lambda: comm.recv(np.zeros(1), 1), comm.barrier, lambda: comm.rendezvous.allgather(b"")):
                with pytest.raises(RankLost, match="rank 1 is gone: (its function returned|it closed its comm)"):
                    call()
            heard.set()

    spawn(body, 2, timeout=20)


def test_a_wrong_schedule_of_the_users_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is sent, for each number of ranks; what is registered last counts."""
    monkeypatch.setitem(registry._REGISTRY, "all_reduce", dict(registry._REGISTRY["all_reduce"]))

    def to_and_fro(n: int, c: int, back: int = 2) -> Iterator[list[Moves]]:
        yield [Moves(np.arange(1, n), 0, 0, count=c, reduce=True)]
        yield [Moves(0, np.arange(1, back), 0, count=c)]

    def body(comm: kos.Communicator) -> float:
        return float(comm.all_reduce(np.ones(2), algorithm="own").sum())

    def refused(comm: kos.Communicator) -> None:
        with pytest.raises(ScheduleError, match="all_reduce/own on 3 ranks.*: rank 2, after the last round, data"):
            body(comm)
        assert comm.all_reduce(np.ones(1)) == 3

    registry.algorithm("all_reduce", "own")(lambda n, c: to_and_fro(n, c, n))
    assert spawn(body, 3) == [6] * 3
    registry.algorithm("all_reduce", "own")(lambda n, c: to_and_fro(n, c))
    assert spawn(body, 2) == [4] * 2
    spawn(refused, 3)


def test_a_message_sent_before_leaving_arrives() -> None:
    def body(comm: kos.Communicator) -> float:
        x = np.full(1, comm.rank + 1.0)
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(x, 0)
        return float(x[0])

    for _ in range(50):
        assert spawn(body, 2, timeout=20) == [1.0, 1.0]


@pytest.mark.parametrize("name", ["all_reduce", "recv"])
def test_an_interrupted_operation_is_not_complete(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    interrupts: list[KeyboardInterrupt] = []
    came, over = threading.Event(), threading.Event()
    done = mock._Receive.done

    def interrupted(self: mock._Receive) -> bool:
        if interrupts:
            raise interrupts.pop()
        return done(self)

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 1:
            if name == "all_reduce":
                comm.all_reduce(np.ones(4), algorithm="ring", async_op=True)
            came.set()
            over.wait(20)  # it comes, and does nothing more
            comm.abort()
            return
        try:
            x = np.ones(4)
            came.wait(20)
            if name == "all_reduce":
                work = comm.all_reduce(x, algorithm="ring", async_op=True)
            else:
                work = comm.recv(x, 1, async_op=True)
            interrupts.append(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                work.wait()
            for again in (work.wait, work.done):
                with pytest.raises(CollectiveError, match=f"{name} #0 .*: interrupted by KeyboardInterrupt"):
                    again()
            assert comm.backend.engine.outstanding() == []
            assert (comm.backend.broken is None) is (name == "recv")
        finally:
            over.set()

    monkeypatch.setattr(mock._Receive, "done", interrupted)
    spawn(body, 2, timeout=20)


def test_spawn_names_ranks_that_hang() -> None:
    release = threading.Event()

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 1:
            release.wait(30)

    try:
        with pytest.raises(CollectiveTimeout, match=r"spawn: ranks \[1\] of 2 are still running after 0.2 s"):
            spawn(body, 2, timeout=0.2)
    finally:
        release.set()


@pytest.mark.parametrize("name", ["all_reduce", "split", "recv"])
def test_ranks_that_wait_when_their_time_is_up_say_for_whom(name: str) -> None:
    release = threading.Event()

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 1:
            release.wait(30)
            return
        calls = {"all_reduce": lambda: comm.all_reduce(F4()), "split": lambda: comm.split(0)}
        calls.get(name, lambda: comm.recv(F4(), 1))()

    what = "rank 1 sent nothing" if name == "recv" else r"ranks \[1\] did not arrive"
    message = rf"^world: {name} #0.*: not complete after 0.3 s; {what}"
    try:
        with pytest.raises(CollectiveTimeout, match=message) as caught:
            spawn(body, 2, timeout=0.3)
    finally:
        release.set()
    assert caught.value.__notes__ == ["raised on rank 0 of 2"]


def test_a_missing_rank_at_init() -> None:
    with pytest.raises(RendezvousError, match=r"ranks \[1, 2\] did not come within 0.2 s"):
        kos.init("mock", rendezvous=ThreadRendezvous(ThreadGroup(3), 0, 0.2))


def test_a_backend_that_cannot_run_here_says_why() -> None:
    group = ThreadGroup(1)
    with pytest.raises(BackendUnavailable, match="mpi: the ranks are not processes of an MPI job"):
        kos.init("mpi", rendezvous=ThreadRendezvous(group, 0))
    comm = kos.init(rendezvous=ThreadRendezvous(group, 0))
    lines = comm.explain().splitlines()
    assert lines[0].split() == ["backend", "usable", "why"]
    assert lines[1].startswith("mpi      no      the ranks are not processes of an MPI job")
    assert lines[-1].startswith("mock     in use  1 rank in this process")


@pytest.mark.parametrize(
    ("backend", "error", "said"),
    [
        ("auto", BackendUnavailable, "auto: expected a backend for GPU 3 of rank 1, got none: nccl: .+; peer"),
        ("mock", InvalidArgument, "device: expected None with backend 'mock', which uses no GPU, got 3 of rank 1"),
    ],
)
def test_a_device_without_a_backend_for_gpus(backend: str, error: type[Exception], said: str) -> None:
    """Refused on every rank, whoever asked for it; threads have none, GPU or not."""
    group = ThreadGroup(2)

    def ask(rank: int) -> None:
        with pytest.raises(error, match=f"^{said}"):
            kos.init(backend, rendezvous=ThreadRendezvous(group, rank, 5.0), device=3 if rank else None)

    assert run_threads(lambda: ask(0), lambda: ask(1)) == [None, None]


def test_ranks_that_ask_for_different_backends() -> None:
    group, names = ThreadGroup(2), ["mock", "auto"]

    def ask(rank: int) -> None:
        message = f"init: rank {rank} asked for backend '{names[rank]}', rank {1 - rank} for '{names[1 - rank]}'"
        with pytest.raises(RendezvousError, match=f"^{message}$"):
            kos.init(names[rank], rendezvous=ThreadRendezvous(group, rank, 5.0))

    assert run_threads(lambda: ask(0), lambda: ask(1)) == [None, None]


def test_nothing_is_kept_of_finished_operations() -> None:
    def body(comm: kos.Communicator) -> None:
        for _ in range(20):
            comm.all_reduce(np.ones(100), algorithm="ring")
            comm.all_gather_bytes(b"abc")
        comm.barrier()
        comm.rendezvous.barrier()
        room = comm.backend._room
        assert (room.sent, room.posted, room.calls) == ({}, {}, {})
        assert comm.backend.engine.outstanding() == []

    spawn(body, 3, timeout=20)
