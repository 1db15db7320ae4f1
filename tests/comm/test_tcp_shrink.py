"""Ranks without MPI go on after others are gone: the rendezvous by environment, and the tcp backend over it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kos.comm.env_rendezvous import EnvRendezvous
from kos.errors import BackendUnavailable, KosError, RankLost, RendezvousError
from tests.comm.tcp_ranks import run_processes, run_ranks


def die(rendezvous: EnvRendezvous) -> None:
    """What the others see of a process that is killed."""
    assert rendezvous._connection is not None
    rendezvous._connection.close()
    rendezvous._connection = None


@pytest.mark.parametrize("gone", [[1], [3], [1, 2], [1, 2, 3], []])
@pytest.mark.parametrize("waiting", [True, False])
def test_the_ranks_that_are_left_meet(gone: list[int], waiting: bool) -> None:
    """Whether or not they had learned of the loss."""
    left = [rank for rank in range(4) if rank not in gone]

    def body(rendezvous: EnvRendezvous) -> Any:
        rendezvous.barrier()
        if rendezvous.rank in gone:
            die(rendezvous)
            return None
        if waiting and gone:
            with pytest.raises(RankLost, match=r"rank \d is gone"):
                rendezvous.barrier()
        part = rendezvous.shrink()
        assert (part.rank, part.size) == (left.index(rendezvous.rank), len(left))
        found = part.allgather(b"%d" % rendezvous.rank)
        half = part.split(part.rank % 2)
        assert half is not None and len(half.allgather(b"")) == half.size
        half.close()
        part.close()
        with pytest.raises(BackendUnavailable, match="got one that was closed"):
            rendezvous.check_shrink()
        return found

    expected = [b"%d" % rank for rank in left]
    assert run_ranks(4, body) == [expected if rank in left else None for rank in range(4)]


def test_twice() -> None:
    def body(rendezvous: EnvRendezvous) -> int:
        part: Any = rendezvous
        for gone in (3, 2):
            part.barrier()
            if rendezvous.rank == gone:
                die(part)
                return 0
            part = part.shrink()
        size: int = part.size
        part.barrier()
        part.close()
        return size

    assert run_ranks(4, body) == [2, 2, 0, 0]


def test_a_rank_that_lives_and_does_not_come() -> None:
    """It is named, and once it comes they go on."""
    refused = threading.Barrier(3)

    def body(rendezvous: EnvRendezvous) -> int:
        rendezvous.timeout = 0.3 if rendezvous.rank == 0 else 20.0
        rendezvous.barrier()  # and rank 0 has told its hub
        if rendezvous.rank == 1:
            refused.wait(20)
        else:
            with pytest.raises(RendezvousError, match=r"shrink: ranks \[1\] did not come within 0.3 s"):
                rendezvous.shrink()
            refused.wait(20)
        rendezvous.timeout = 20.0
        part = rendezvous.shrink()
        part.barrier()
        part.close()
        return part.size

    assert run_ranks(3, body) == [3, 3, 3]


def test_without_rank_0_there_is_no_hub() -> None:
    def body(rendezvous: EnvRendezvous) -> None:
        rendezvous.barrier()
        if rendezvous.rank == 0:
            rendezvous.close()
            return
        with pytest.raises(KosError, match=r"rank 0 (is gone|gave no answer)"):
            rendezvous.shrink()

    run_ranks(3, body)


PROGRAM = """
import os, numpy as np, kos
with kos.init("tcp", timeout=20) as comm:
    me = comm.rank
    comm.all_reduce(np.ones(3))
    if me == {killed}:
        os.kill(os.getpid(), 9)
    try:
        while True:
            comm.all_reduce(np.ones(100_000))
    except kos.errors.RankLost as error:
        assert "rank {killed} is gone" in str(error), error
    with comm.shrink() as part:
        total = part.all_reduce(np.full(100_000, float(me)))
        print(part.size, total[0], total[-1], part.all_gather(np.array(me)).tolist())
"""


@pytest.mark.parametrize("killed", [1, 2])
def test_a_killed_process(killed: int) -> None:
    left = [rank for rank in range(3) if rank != killed]
    said = f"2 {3.0 - killed} {3.0 - killed} {left}\n"
    results = run_processes(PROGRAM.format(killed=killed), 3)
    assert [results[rank] for rank in left] == [(0, said)] * 2
