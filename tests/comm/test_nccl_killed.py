"""A rank of nccl is killed in the middle of collectives: the others raise in time, shrink and go on."""

import pytest

from kos import cuda
from tests.comm.tcp_ranks import run_processes
from tests.comm.test_jobs import needs_mpirun
from tests.comm.test_shared_failures import ULFM, job

pytestmark = pytest.mark.gpu

PROGRAM = """
import logging, os, time
import numpy as np
import kos
from kos.memory.array import Array
logging.basicConfig(level=logging.WARNING)
begun = time.monotonic()
with kos.init("nccl", timeout=8) as comm:
    me, size, killed = comm.rank, comm.size, comm.size - 1 if {last} else 0
    kos.cuda.set_device(comm.device)
    x = Array.from_numpy(np.ones(1 << 22, np.float32), comm.device)
    comm.all_reduce(x)
    comm.synchronize()
    if me == killed:
        comm.all_reduce(x)
        os.kill(os.getpid(), 9)
    killing = time.monotonic()
    try:
        while True:
            comm.all_reduce(x)
            comm.synchronize()
    except (kos.errors.RankLost, kos.errors.CollectiveTimeout) as error:
        took = time.monotonic() - killing
        assert took < 12, took
        assert isinstance(error, kos.errors.CollectiveTimeout) or f"rank {{killed}} is gone" in str(error), error
    with comm.shrink() as rest:
        left = [rank for rank in range(size) if rank != killed]
        assert rest.size == size - 1
        y = Array.from_numpy(np.full(1 << 20, float(me), np.float32), comm.device)
        for turn in range(3):
            out = rest.all_reduce(y, out=Array.empty(1 << 20, np.float32, comm.device)).numpy()
            assert (out == sum(left)).all()
        assert rest.all_gather(y[:1]).numpy().reshape(-1).tolist() == left
        print("left:", rest.size, flush=True)
        rest.barrier()
        os._exit(0)  # MPI_Finalize of Open MPI 5.0.11 now and then waits for the dead
"""


def gpus() -> int:
    ranks = len(cuda.visible_devices())
    if ranks < 2:
        pytest.skip("needs two GPUs or more")
    return ranks


@needs_mpirun
@pytest.mark.parametrize("last", [True, False])
def test_a_killed_rank_of_an_mpi_job(tmp_path, last):
    ranks = gpus()
    text = PROGRAM.format(last=last)
    assert job(tmp_path, ranks, text, *ULFM) == [f"left: {ranks - 1}"] * (ranks - 1)


@pytest.mark.parametrize("last", [True, False])
def test_a_killed_rank_without_mpi(last):
    ranks = gpus()
    results = run_processes(PROGRAM.format(last=last), ranks)
    left = results[:-1] if last else results[1:]
    assert [text.splitlines()[-1:] for _, text in left] == [[f"left: {ranks - 1}"]] * (ranks - 1), results
