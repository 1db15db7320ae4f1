"""Ranks without MPI go on after others are gone: the rendezvous by environment, and the tcp backend over it."""

import threading
import time

import numpy as np
import pytest

from kos.comm.control.group import TCPControlPlane
from kos.errors import BackendUnavailable, RankLost
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks, run_processes, run_ranks


def die(rendezvous: TCPControlPlane) -> None:
    """What the others see of a process that is killed."""
    rendezvous.connection.close()
    rendezvous._listener.close()
    rendezvous.connection = None


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_dies_while_the_others_wait_for_it(gone):
    def body(rendezvous):
        rendezvous.barrier()
        if rendezvous.rank == gone:
            rendezvous._listener.setblocking(True)
            rendezvous._listener.accept()  # another has seen that it was there
            die(rendezvous)
            return 0
        part = rendezvous.shrink()
        part.barrier()
        return part.size

    assert run_ranks(3, body) == [0 if rank == gone else 2 for rank in range(3)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("exchange", [1, 2, 3])
@pytest.mark.parametrize("leader", [1, 2])
def test_a_rank_that_fails_in_a_split_is_not_awaited_in_the_new_group(exchange, leader):
    """Rank 0 dies while its hub answers: only rank 1 gets that answer.  Rank 0 and rank 3 form the other new group."""
    failed = threading.Barrier(3)

    def body(rendezvous):
        rendezvous.barrier()
        last, hub = rendezvous._exchanges + exchange, rendezvous._hub
        if hub is not None:
            flush = hub._flush

            def answer_rank_1(ranks, deadline):
                if rendezvous._exchanges < last:
                    return flush(ranks, deadline)
                flush({1}, deadline)
                for connection in hub._members.values():
                    connection._outgoing.clear()
                raise ConnectionError  # ends the hub, which closes the connections

            hub._flush = answer_rank_1
        began = time.monotonic()
        with pytest.raises(RankLost, match="rank 0 is gone: its connection was closed") as caught:  # noqa: PT012
            child = rendezvous.split(rendezvous.rank % 3 > 0, int(rendezvous.rank != leader))
            assert child is not None and rendezvous.rank in (1, 2)
            child.barrier()
        assert caught.value.ranks == (0,)
        if rendezvous.rank:
            assert time.monotonic() - began < TIMEOUT / 2
            failed.wait(TIMEOUT)  # alive until all survivors have failed

    run_ranks(4, body)


def test_each_shrink_begins_an_epoch():
    """No rank of the earlier membership takes part in it.  Groups that are split have the epoch of their parent."""

    def body(rendezvous):
        epochs = [rendezvous.epoch]
        for _ in range(2):
            rendezvous = rendezvous.shrink()
            part = rendezvous.split(0)
            assert part is not None
            part.barrier()
            epochs += [rendezvous.epoch, part.epoch]
            part.close()
        rendezvous.close()
        with pytest.raises(BackendUnavailable, match="got one that was closed"):
            rendezvous.check_change("shrink")
        return epochs

    assert run_ranks(3, body) == [[0, 1, 1, 2, 2]] * 3


def test_a_rank_that_joins_a_new_group_late():
    """After the split, the loss of a rank of another group does not affect the new group."""
    lost = threading.Event()

    def body(rendezvous):
        barrier = rendezvous.barrier  # the last step of a split before the ranks join the new group
        if rendezvous.rank == 2:
            rendezvous.barrier = lambda: (barrier(), lost.wait(20))
        part = rendezvous.split(int(rendezvous.rank > 0))
        if rendezvous.rank == 0:
            die(rendezvous)
            lost.set()
        part.barrier()
        size = part.size
        part.close()
        return size

    assert run_ranks(3, body) == [1, 2, 2]


HANDLED = """
import os, time
os.environ["KOS_HOST"] = "ab"[int(os.environ["RANK"]) // 2]
from pathlib import Path
import kos, numpy as np
from kos.errors import CollectiveError, CollectiveMismatch

comm, failed = kos.init("tcp", timeout=20), Path({folder!r})
try:
    comm.all_reduce(np.ones(3 + comm.rank % 2))
except CollectiveMismatch:
    comm = comm.shrink()
comm.all_reduce(np.ones(1))
while comm.rank == 0 and len([*failed.iterdir()]) < 2:
    time.sleep(0.01)
try:
    comm.barrier(timeout=0.5)
except CollectiveError as error:
    print(type(error).__name__, "differ in count" in str(error))
(failed / str(comm.rank)).touch()
"""


def test_a_failure_before_a_shrink_causes_none_in_the_new_group(tmp_path):
    """Ranks of another host had received the report of the failure."""
    ends = run_processes(HANDLED.format(folder=str(tmp_path)), 3)
    assert ends == [(0, "CollectiveTimeout False\n")] * 3, ends


@pytest.mark.parametrize("call", ["shrink", "abort"])
@pytest.mark.usefixtures("apart")
def test_a_rank_that_has_left_has_sent_its_part_of_earlier_calls(call):
    """A rank that still waits there for another rank completes the call; it fails in the next one."""
    left = threading.Event()

    def body(comm):
        if comm.rank == 0:
            assert left.wait(TIMEOUT)
        work = comm.gather(np.full(1, float(comm.rank)), root=2, async_op=True)
        if comm.rank == 2:
            with pytest.raises(RankLost, match="rank 1 is gone: it"):
                comm.recv(np.empty(1), src=1)
            left.set()
        gathered = work.wait()
        if comm.rank == 1 and call == "abort":
            comm.abort()
            return []
        if comm.rank == 2:
            with pytest.raises(RankLost, match=r"barrier #1: rank [01] is gone: it"):
                comm.barrier()
        with comm.shrink() as part:
            assert part.all_reduce(np.ones(1)) == part.size == (3 if call == "shrink" else 2)
        return gathered.ravel().tolist() if comm.rank == 2 else []

    assert TCPRanks(3).run(body) == [[], [], [0.0, 1.0, 2.0]]
