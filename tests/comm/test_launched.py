"""Programs that a rank starts do not take its place, because they inherit the claim of its process."""

import os
import sys
from pathlib import Path

import pytest

from kos.comm.control.identity import claimed
from kos.environment import KOS_CLAIM
from tests.comm.tcp_ranks import run_processes
from tests.comm.test_jobs import environment, output, program
from tests.launcher import MPIRUN, needs_mpirun, run_program, skip_without_semaphores

CHILD = """
import re, subprocess
from kos.environment import KOS_CLAIM
INIT = "import kos; c = kos.init(timeout=60); print(f'child: rank {c.rank} of {c.size} on {c.backend_name}')"
def child(command=(sys.executable, "-c", INIT), **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, **options)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]
def refused(said):
    expected = f"init: process {os.getpid()}, which has started this one, is already rank {comm.rank} of {comm.size}"
    expected += " of this job: expected no second one, got process "
    assert "kos.errors.RendezvousError: " + expected in said, said
    ways = r", got process (\\d+); to make process \\1 a group of one, start it without the variables "
    assert re.search(ways, said) and said.endswith("start it without KOS_CLAIM"), said
    return said
"""

# What starts the child, in a process of the rank; it raises unless the child is refused.
WAYS = {
    "subprocess": "refused(child())",
    "shell": "refused(child(['sh', '-c', f'{sys.executable} -c \"$0\" && true', INIT]))",
    "fork": """
import multiprocessing
def run():
    try:
        kos.init(timeout=60)
    except kos.errors.RendezvousError as error:
        sys.exit(7 if "is already rank" in str(error) else str(error))
process = multiprocessing.get_context("fork").Process(target=run)
process.start()
process.join(100)
assert process.exitcode == 7, process.exitcode
""",
}


@needs_mpirun
def test_a_spawned_child_of_a_rank_of_mpi_is_refused(tmp_path):
    skip_without_semaphores()
    text = f"""{CHILD}
if __name__ == "__main__":
    import multiprocessing
    comm = kos.init(timeout=60)
    if comm.rank == 0:
        pool = multiprocessing.get_context("spawn").Pool(1)
        try:
            pool.apply(kos.init, kwds={{"timeout": 60}})
        except kos.errors.RendezvousError as error:
            refused("kos.errors.RendezvousError: " + str(error))
        else:
            raise AssertionError("not refused")
        pool.terminate()
    assert comm.all_reduce(np.ones(1)) == 2
    comm.close()
    print("done", flush=True)
"""
    assert output(tmp_path, text, 2, fresh=True) == "done\n" * 2


# Programs of two ranks of MPI, each of which starts others.
ON_MPI = {
    # As torchrun or srun set for what a rank of mpirun starts by them.
    "variables of other launchers": """
for name in ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "RANK"):
    refused(child(env={**os.environ, name: "1"}))
assert comm.all_reduce(np.ones(1)) == 2
comm.close()
""",
    # Also after ``close``: Open MPI 5.0.11 crashed in MPI_Finalize once a child had taken the rank's place.
    "as long as its rank has MPI": """
comm.close()
refused(child())
again = kos.init(timeout=60)  # the rank itself
assert again.all_reduce(np.ones(1)) == 2
clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM_", "PMIX_"))}
assert child(env=clean) == "child: rank 0 of 1 on mock"
again.close()
""",
    # The variables that are removed make mpirun of Open MPI 4 refuse to start; the others still name the rank.
    "another job": """
if comm.rank == 0:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KOS_CLAIM", "OMPI_UNIVERSE_SIZE", "OMPI_MCA_ess"))}
    assert env["OMPI_COMM_WORLD_RANK"] == "0"
    said = child([mpirun, "-n", "2", sys.executable, "-c", INIT], env=env)
    assert sorted(said.splitlines()) == [f"child: rank {rank} of 2 on mpi" for rank in range(2)], said
comm.barrier()
""",
}


@needs_mpirun
@pytest.mark.parametrize("name", ON_MPI)
def test_what_a_rank_of_mpi_starts(tmp_path, name):
    text = f"{CHILD}\nmpirun = {MPIRUN!r}\ncomm = kos.init(timeout=60)\n{ON_MPI[name]}\nprint('done', flush=True)\n"
    assert output(tmp_path, text, 2) == "done\n" * 2


@needs_mpirun
def test_a_group_of_one_may_start_an_mpirun(tmp_path):
    text = f"""{CHILD}
os.environ |= {{"RANK": "0", "WORLD_SIZE": "1"}}
comm = kos.init(timeout=60)
said = child(["{MPIRUN}", "-n", "2", sys.executable, "-c", INIT])
assert sorted(said.splitlines()) == [f"child: rank {{rank}} of 2 on mpi" for rank in range(2)], said
print("done", flush=True)
"""
    assert output(tmp_path, text) == "done\n"


@needs_mpirun
@pytest.mark.parametrize("wrapper", ["python", "exec"])
def test_a_program_between_mpirun_and_the_rank(tmp_path, wrapper):
    """A wrapper that has not called ``kos.init``, or one that has called it and then executes the rank's program."""
    path = program(tmp_path, "comm = kos.init(timeout=60)\nassert comm.all_reduce(np.ones(1)) == 2\nprint('done')\n")
    command = {
        "python": [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, {path!r}])"],
        "exec": [sys.executable, "-c", "import os, sys; from kos.comm.control import identity\n"
                 "with identity.claimed(True): os.execv(sys.executable, [sys.executable, sys.argv[1]])", path],
    }[wrapper]  # fmt: skip
    done = run_program(MPIRUN, "-n", "2", *command, env=environment(), cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n" * 2, "")


# Programs of two ranks without MPI.
WITHOUT_MPI = {
    "its place is free once it has closed": """
comm = kos.init(timeout=60)
part = comm.split(0)
assert comm.split(None) is None
comm.barrier()
comm.close()
refused(child())  # ``part`` is open
part.close()
assert child() == f"child: rank {comm.rank} of 2 on tcp"
""",
    "the claim lasts as long as a group of the rank": """
for attempt in range(2):
    with pytest.raises(kos.errors.BackendUnavailable):
        kos.init("mock", timeout=60)
    assert KOS_CLAIM.name not in os.environ
with kos.init(timeout=60) as comm:
    again = kos.init(timeout=60)  # a second group of the same process
    again.close()
    refused(child())
    grown = comm.shrink()
refused(child())
grown.abort()
assert KOS_CLAIM.name not in os.environ
""",
    "the claim of a process that has ended": """
comm = kos.init(timeout=60)
assert os.environ[KOS_CLAIM.name] == str(os.getpid())
ended = subprocess.Popen(["true"])
ended.wait(60)
environment = {**os.environ, KOS_CLAIM.name: f"{ended.pid}"}
code = f"import os; from kos.comm.control.identity import claimed\\nwith claimed(False): print(os.environ['KOS_CLAIM'])"
said = child((sys.executable, "-c", code), env=environment)
assert said.isdecimal() and said != str(ended.pid), said
comm.close()
""",
    **{
        f"a child, by {way}": f"comm = kos.init(timeout=60)\n{text}\nassert comm.all_reduce(np.ones(1)) == 2"
        for way, text in WAYS.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_MPI)
def test_ranks_without_mpi(name):
    text = f"import gc, os, sys, numpy as np, pytest, kos\n{CHILD}\n{WITHOUT_MPI[name]}"
    assert run_processes(text, 2) == [(0, "")] * 2


def test_processes_of_other_users_may_be_hidden(no_launcher):
    """For example, hidepid=1 of /proc hides the processes that started the launcher."""
    read, mine = Path.read_text, Path(f"/proc/{os.getpid()}/stat")

    def read_own(path, *args, **options):
        if path != mine and path.name == "stat":
            raise PermissionError(1, "Operation not permitted", str(path))
        return read(path, *args, **options)

    no_launcher.setenv("OMPI_COMM_WORLD_RANK", f"{os.getpid()}")  # no test of another process has it
    no_launcher.setattr(Path, "read_text", read_own)
    with claimed(True):
        assert os.environ[KOS_CLAIM.name] == f"{os.getpid()}"
