"""``kos.NOBODY`` and the neighbours of a grid, on threads, over ``tcp`` and ``mpi``."""

import numpy as np
import pytest

import kos
from kos import _core
from kos.errors import CollectiveError, InvalidArgument
from kos.testing import spawn
from tests.comm.conftest import UNDER_MPIRUN
from tests.comm.ranks import MPIRanks, on_each_rank
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks

ON_MPI = [pytest.param(name, marks=pytest.mark.mpi) for name in ("mpi", "mpi apart")]


@pytest.fixture(params=[*(() if UNDER_MPIRUN else ("mock", "tcp", "tcp apart")), *ON_MPI])
def ranks(request):
    """Two ranks or, under mpirun, all of them."""
    if request.param.endswith("apart"):
        request.getfixturevalue("apart")
    elif request.param != "mock" and _core.native is None:
        pytest.skip(str(_core.unavailable))
    if "mpi" in request.param:
        return MPIRanks(request.getfixturevalue("mpi_world")).run
    return TCPRanks(3).run if "tcp" in request.param else lambda fn: spawn(fn, 3, timeout=TIMEOUT)


@on_each_rank("ranks")
def test_a_halo_exchange_on_open_boundaries_has_no_branches(comm, /):
    line, halo = comm.grid(comm.size), np.full((2, 3), -1.0)
    left, right = line.shift(0)
    mine = np.full(3, float(comm.rank))
    for _ in range(3):  # also when the calls are cached
        assert comm.send_recv(mine, halo[0], dst=right, src=left) is not None
        comm.send_recv(mine, halo[1], dst=left, src=right)
    assert (halo[0] == comm.rank - 1).all()  # -1: unchanged
    assert (halo[1] == (comm.rank + 1 if comm.rank < comm.size - 1 else -1)).all()
    with comm.batch() as batch:
        comm.send(mine, right)
        comm.send(mine, left)
        got = comm.recv(halo[0], left), comm.recv(halo[1], right)
    assert len(batch.works) == 4 and (got[0] == comm.rank - 1).all()
    works = [comm.send_recv(mine, halo[0], right, left, async_op=True), comm.recv(halo[1], kos.NOBODY, async_op=True)]
    assert [work.wait(5.0).base is halo for work in works] == [True, True]
    assert works[1].done() and works[1].state == "complete" and "from nobody with tag 0" in repr(works[1])


@on_each_rank("ranks")
def test_messages_to_nobody_are_checked_and_not_sent(comm, /):
    x = np.arange(3.0)
    assert comm.send(x, kos.NOBODY) is None and comm.send(x, kos.NOBODY, tag=7, async_op=True).wait() is None
    assert comm.recv(x, kos.NOBODY) is x and x.tolist() == [0, 1, 2]
    assert comm.send_recv(x, out := np.zeros(2), kos.NOBODY, kos.NOBODY) is out
    assert comm.send_bytes(b"abc", kos.NOBODY) is None
    assert comm.recv_bytes(kos.NOBODY) == comm.recv_bytes(kos.NOBODY, async_op=True).wait() == b""
    for call in (
        lambda: comm.send(x, kos.NOBODY, tag=-1), lambda: comm.recv(np.ones((4, 4))[:, 1], kos.NOBODY),
        lambda: comm.probe(kos.NOBODY), lambda: comm.broadcast(x, kos.NOBODY), lambda: comm.send(x, -2),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            call()
    part = comm.duplicate()
    part.close()
    with pytest.raises(CollectiveError, match="closed"):
        part.send(x, kos.NOBODY)
    comm.barrier()


def test_neighbours():
    def body(comm):
        grid = comm.grid((2, 3))
        column, row = grid
        assert grid.shape == (2, 3) and grid.coordinates == divmod(comm.rank, 3) == (column.rank, row.rank)
        return [grid.shift(0), grid.shift(1), grid.shift(1, 2), grid.shift(1, -1), grid.shift(1, periodic=True),
                grid.shift(0, 3, periodic=True)]  # fmt: skip

    no, found = kos.NOBODY, spawn(body, 6, timeout=TIMEOUT)
    assert found[0] == [(no, 3), (no, 1), (no, 2), (1, no), (2, 1), (3, 3)]
    assert found[4] == [(1, no), (3, 5), (no, no), (5, 3), (3, 5), (1, 1)]


def test_wrong_shifts():
    def body(comm):
        grid = comm.grid((1, 2))
        for wrong in ({"axis": 2}, {"axis": -1}, {"axis": 0, "by": 0.5}, {"axis": 0, "periodic": 2}):
            with pytest.raises(InvalidArgument, match="expected"):
                grid.shift(**wrong)
        assert grid.shift(0, periodic=True) == (comm.rank, comm.rank) and grid.shift(1, 0) == (comm.rank, comm.rank)

    spawn(body, 2, timeout=TIMEOUT)


def test_a_group_of_one_has_nobody():
    def body(comm):
        assert comm.grid(1).shift(0) == (kos.NOBODY, kos.NOBODY) and str(kos.NOBODY) == "kos.NOBODY"
        assert comm.recv(np.ones(1), kos.NOBODY) == 1
        with pytest.raises(InvalidArgument, match="src: expected another rank, got None in a group of one"):
            comm.recv(np.ones(1))

    spawn(body, 1, timeout=TIMEOUT)
