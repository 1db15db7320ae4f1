"""Ranks without MPI go on after others are gone: the rendezvous by environment, and the tcp backend over it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kos.comm.rendezvous.env import EnvRendezvous
from kos.errors import BackendUnavailable, RankLost, RendezvousError
from tests.comm.tcp_ranks import run_processes, run_ranks


def die(rendezvous: EnvRendezvous) -> None:
    """What the others see of a process that is killed."""
    rendezvous._connection.close()
    rendezvous._listener.close()
    rendezvous._connection = None


@pytest.mark.parametrize("gone", [[0], [1], [3], [0, 1], [1, 2], [0, 2, 3], []], ids=str)
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
        for gone in (0, 2):
            part.barrier()
            if rendezvous.rank == gone:
                die(part)
                return 0
            part = part.shrink()
        size: int = part.size
        part.barrier()
        part.close()
        return size

    assert run_ranks(4, body) == [0, 2, 0, 2]


def test_a_rank_that_lives_and_does_not_come() -> None:
    """All that come name it, and none goes on without it."""
    refused = threading.Barrier(3)

    def body(rendezvous: EnvRendezvous) -> None:
        rendezvous.barrier()
        rendezvous.timeout = 0.5
        if rendezvous.rank != 1:
            with pytest.raises(RendezvousError, match=r"shrink: ranks \[1\] did not arrive within 0.5 s"):
                rendezvous.shrink()
        refused.wait(20)

    run_ranks(3, body)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_dies_while_the_others_wait_for_it(gone: int) -> None:
    def body(rendezvous: EnvRendezvous) -> int:
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


SURVIVE = """
import os
import numpy as np, kos
import kos.comm.host.backend as host
if not {shared}:
    host.open_segment = lambda _: (None, "switched off by the test")
with kos.init(timeout=60) as comm:
    me, killed = comm.rank, {killed}
    comm.all_reduce(np.ones(3))
    comm.rendezvous.barrier()
    if me in killed:
        os.kill(os.getpid(), 9)
    if me != 2:  # who notices, and who does not
        try:
            while True:
                comm.all_reduce(np.ones(100_000))
        except kos.errors.RankLost as error:
            assert "is gone" in str(error), error
    left = [r for r in range(4) if r not in killed]
    with comm.shrink() as part:
        assert part.all_gather(np.array(me)).tolist() == left
        total = part.all_reduce(np.full(100_000, float(me)), deterministic=True)
        with part.split(part.rank % 2) as half:
            half.barrier()
        again = part.shrink()
        again.barrier()
        print(total[0], total[-1], again.size, again.backend.shares_memory, flush=True)
"""


@pytest.mark.parametrize(
    ("killed", "shared"), [([0], True), ([0], False), ([0, 1], True), ([1, 3], False), ([3], True)], ids=str
)
def test_a_killed_process(killed: list[int], shared: bool) -> None:
    results = run_processes(SURVIVE.format(killed=killed, shared=shared), 4)
    total, left = 6.0 - sum(killed), 4 - len(killed)
    expected = (0, f"{total} {total} {left} {shared}\n")
    assert [r for r in results if r[0] != -9] == [expected] * left, results
