"""Ranks for tests of receives from any rank, of bytes and of probes: threads, ``tcp`` and ``mpi``."""

import numpy as np
import pytest

import kos
from kos import _core
from kos.testing import spawn
from tests.comm.conftest import UNDER_MPIRUN
from tests.comm.ranks import MPIRanks
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks

SIZE, LONG = 3, 5 << 20
ON_MPI = [pytest.param(name, marks=pytest.mark.mpi) for name in ("mpi", "mpi apart")]


@pytest.fixture(params=[*(() if UNDER_MPIRUN else ("mock", "tcp", "tcp apart")), *ON_MPI])
def kind(request):
    if request.param.endswith("apart"):
        request.getfixturevalue("apart")
    elif request.param != "mock" and _core.native is None:
        pytest.skip(str(_core.unavailable))
    return request.param


@pytest.fixture
def run(kind, request):
    """Runs a function of a communicator on three ranks, or under mpirun on all of them."""
    if "mpi" in kind:
        world = request.getfixturevalue("mpi_world")
        if world.size == 1:
            pytest.skip("needs mpirun with two ranks or more")
        return MPIRanks(world).run
    if kind == "mock":
        return lambda fn: spawn(fn, SIZE, timeout=TIMEOUT, buffer_bytes=1 << 16)  # as processes of one host
    return TCPRanks(SIZE).run


def wait_for_marks(comm: kos.Communicator, tag: int = 99) -> None:
    """Rank 0 waits until what the others have sent before has arrived."""
    if comm.rank:
        comm.send(np.zeros(0), 0, tag)
        return
    for rank in range(1, comm.size):
        comm.recv(np.zeros(0), rank, tag)
