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


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("start", [pytest.param("mpirun", marks=needs_mpirun), "environment"])
def test_a_killed_rank(tmp_path, start, last):
    ranks, text = len(cuda.visible_devices()), PROGRAM.format(last=last)
    if ranks < 2:
        pytest.skip("needs two GPUs or more")
    if start == "mpirun":
        said = job(tmp_path, ranks, text, *ULFM)
    else:
        results = run_processes(text, ranks)
        said = ["".join(output.splitlines()[-1:]) for _, output in (results[:-1] if last else results[1:])]
    assert said == [f"left: {ranks - 1}"] * (ranks - 1), said
