"""Programs that a rank starts do not take its place, because the process of the rank claims it."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kos
from kos.comm.control.identity import claimant, claimed, hold
from tests.comm.tcp_ranks import free_port, run_processes
from tests.comm.test_jobs import environment, output, program
from tests.launcher import MPIRUN, needs_mpirun, run_program, skip_without_semaphores

CHILD = """
import re, subprocess
from kos.comm.control.identity import claimant
INIT = "import kos; c = kos.init(timeout=60); print(f'child: rank {c.rank} of {c.size} on {c.backend_name}')"
def child(command=(sys.executable, "-c", INIT), **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, **options)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]
def refused(said):
    expected = f"init: process {os.getpid()}, which has started this one, is already rank {comm.rank} of {comm.size}"
    expected += " of this job: expected no second one, got process "
    assert "kos.errors.RendezvousError: " + expected in said, said
    ways = r", got process (\\d+); to make process \\1 a group of one, start it without the variables "
    assert re.search(ways, said) and said.endswith("start it with a launcher of that job"), said
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
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_UNIVERSE_SIZE", "OMPI_MCA_ess"))}
    assert claimant(True) == os.getpid() and env["OMPI_COMM_WORLD_RANK"] == "0"
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
                 "with identity.claimed(True, 60): os.execv(sys.executable, [sys.executable, sys.argv[1]])", path],
    }[wrapper]  # fmt: skip
    done = run_program(MPIRUN, "-n", "2", *command, env=environment(), cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n" * 2, "")


# What calls ``kos.init`` before the rank does, or once the process ``rank`` has claimed the rank.
RUN = """
import multiprocessing, subprocess, time
from kos.comm.control.identity import claimant
def run(rank=None):
    while rank is not None and claimant(False) != rank:
        time.sleep(0.01)
    try:
        kos.init(timeout=60)
    except kos.errors.RendezvousError as error:
        print(error, flush=True)
    else:
        print("is the rank", flush=True)
"""


@needs_mpirun
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_starts_no_rank_of_mpi(tmp_path, method):
    """Not even if a process starts, calls ``kos.init`` and ends before its rank does: MPI could not start again."""
    if method == "spawn":
        skip_without_semaphores()
    text = f"""{RUN}
if __name__ == "__main__":
    child = multiprocessing.get_context("{method}").Process(target=run)
    child.start()
    child.join(100)
    comm = kos.init(timeout=60)
    assert comm.all_reduce(np.ones(1)) == 2
    comm.close()
    print("done", flush=True)
"""
    done = output(tmp_path, text, 2, fresh=True).splitlines()
    refused = [line for line in done if re.match(
        r"init: expected the process that a launcher has started as rank [01] of 2, got process (\d+), "
        r"which process \d+ has started by multiprocessing; to make process \1 a group of one, start it without", line)]
    assert len(refused) == 2 and sorted(done) == [*["done"] * 2, *sorted(refused)], done


def test_a_program_that_starts_before_its_rank_is_refused(tmp_path):
    (path := tmp_path / "program.py").write_text(f"""import os, sys, numpy as np, kos
{RUN}
if len(sys.argv) > 1:
    sys.exit(run(int(sys.argv[1])))
child = subprocess.Popen([sys.executable, __file__, str(os.getpid())], stdout=subprocess.PIPE, text=True)
comm = kos.init(timeout=60)
refused = f"init: process {{os.getpid()}}, which has started this one, is already rank {{comm.rank}} of 2"
assert refused in child.communicate(timeout=100)[0]
assert comm.all_reduce(np.ones(1)) == 2
comm.close()
""")
    assert run_processes(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')", 2) == [(0, "")] * 2


# Programs of two ranks without MPI.
WITHOUT_MPI = {
    # A program that the rank has started before it calls ``kos.init``.
    "a rank whose place a program has taken is refused": """
PROGRAM = "import kos, sys\\nwith kos.init(timeout=60):\\n    print(1, flush=True)\\n    sys.stdin.readline()"
command = (sys.executable, "-c", PROGRAM)
with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
    assert child.stdout.readline() == "1\\n"
    with pytest.raises(kos.errors.RendezvousError) as caught:
        kos.init(timeout=60)
    text = f"init: process {child.pid}, which this one has started, is already rank {os.environ['RANK']} of 2 of"
    assert text in str(caught.value)
    child.stdin.close()
    assert child.wait(60) == 0
""",
    "its place is free once it has closed": """
comm = kos.init(timeout=60)
part = comm.split(0)
assert comm.split(None) is None
comm.barrier()
comm.close()
refused(child())  # ``part`` is open
part.close()
assert claimant(False) is None
assert child() == f"child: rank {comm.rank} of 2 on tcp"
""",
    "the claim lasts as long as a group of the rank": """
for attempt in range(2):
    with pytest.raises(kos.errors.BackendUnavailable):
        kos.init("mock", timeout=60)
    assert claimant(False) is None
with kos.init(timeout=60) as comm:
    assert claimant(False) == os.getpid()
    again = kos.init(timeout=60)  # a second group of the same process
    again.close()
    assert claimant(False) == os.getpid()
    grown = comm.shrink()
assert claimant(False) == os.getpid()
grown.abort()
assert claimant(False) is None
""",
    "the claim goes with a communicator that the program drops": """
comm = kos.init(timeout=60)
part = comm.split(0)
assert part.all_reduce(np.ones(1)) == 2
del part
gc.collect()
refused(child())  # ``comm`` is open
comm.barrier()
rank = comm.rank
del comm
gc.collect()
assert claimant(False) is None
assert child() == f"child: rank {rank} of 2 on tcp"
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


LAUNCHERS = {
    "shell": {"RANK": "0", "WORLD_SIZE": "2"},
    "torchrun": {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"},
    "srun": {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
    "mpi": {"PMI_RANK": "0", "PMI_SIZE": "2"},
}


@pytest.fixture
def launched(no_launcher):
    def launch(launcher, **more):
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "KOS_SECRET": "s"}
        job["SLURM_STEP_NUM_TASKS"] = "2" if launcher == "srun" else "1"
        for name, value in {**LAUNCHERS[launcher], **job, **more}.items():
            no_launcher.setenv(name, value)
        return no_launcher

    return launch


def test_a_group_that_is_freed_while_another_is_made_leaves_the_claim(launched):
    class Group:
        pass

    launched("shell")
    old = hold(Group())
    with claimed(False, 60):
        del old
        gc.collect()
        assert claimant(False) == os.getpid()
        new = hold(Group())
    assert claimant(False) == os.getpid()
    del new
    gc.collect()
    assert claimant(False) is None


STRANGER = "1 (other) S 0" + " 0" * 20  # /proc/PID/stat of a process without a parent


@contextmanager
def claiming(by_mpi: bool = False, then: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that has claimed the rank of this environment and runs the line ``then``.  It is killed at the end."""
    program = f"from kos.comm.control.identity import claimed\nimport os, sys\nwith claimed({by_mpi}, 60):"
    program += f"\n    print('claimed', flush=True)\n    {then}\n    sys.stdin.readline()"
    command = (sys.executable, "-c", program)
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "claimed\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("launcher", ["shell", "torchrun", "srun"])
def test_the_claim_of_another_process(launched, launcher):
    """While that process runs, this one is refused.  Once it is killed, this one is its successor."""
    environment = launched(launcher)
    alone = r"start it without the variables .*MASTER_PORT"
    with claiming() as process:
        expected = rf"^init: process {process.pid}, which this one has started, is already rank 0 of 2 of this job: "
        expected += rf".*, got process {os.getpid()}; to make process {process.pid} a group of one, {alone}"
        with pytest.raises(kos.errors.RendezvousError, match=expected):
            kos.init(timeout=0.1)
        with pytest.MonkeyPatch.context() as other:
            other.setenv("MASTER_PORT", str(free_port()))
            with pytest.raises(kos.errors.RendezvousError, match=r"ranks \[1\] of 2 did not"):
                kos.init(timeout=0.1)
        process.kill()
        process.wait(60)
        with pytest.raises(kos.errors.RendezvousError, match=r"ranks \[1\] of 2 did not"):
            kos.init(timeout=0.1)
    assert claimant(False) is None and environment


@pytest.fixture
def on_first_sleep(monkeypatch, before_call):
    """Calls a function when kos first waits for a process to end, which may take long; returns the waits in seconds."""

    def install(act):
        waits = list[float]()

        def noted(seconds):
            if not waits:
                act()
            waits.append(seconds)

        before_call(time, "sleep", noted)
        monkeypatch.setattr("kos.comm.control.identity.ENDING_SECONDS", 60.0)
        return waits

    return install


def test_a_rank_of_an_earlier_run_that_is_about_to_end(launched, on_first_sleep):
    """A script may start a job again as soon as one of its ranks has ended; the other ranks may end a moment later."""
    environment = launched("shell")
    environment.setattr(Path, "read_text", lambda path, **_: STRANGER)
    with claiming() as process:
        expected = f"^init: process {process.pid}, perhaps of an earlier run, is already rank 0 of 2 of this job: "
        with pytest.raises(kos.errors.RendezvousError, match=expected), claimed(False, 0.1):
            pass
        waits = on_first_sleep(process.kill)
        with claimed(False, 60):
            assert waits and claimant(False) == os.getpid()


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_processes_that_a_rank_leaves_behind_do_not_keep_its_claim(launched, how):
    """For example, workers that load data remain when the rank is killed and a launcher starts it again."""
    launched("shell")
    sleep = "import time; time.sleep(100)"
    then = {
        "fork": f"os.fork() or exec('print(os.getpid(), flush=True); {sleep}')",  # its hooks after a fork have run
        "spawn": f"import subprocess; print(subprocess.Popen([sys.executable, '-c', '{sleep}']).pid, flush=True)",
    }[how]
    with claiming(then=then) as process:
        assert process.stdout is not None
        left = int(process.stdout.readline())
        try:
            assert claimant(False) == process.pid
            process.kill()
            process.wait(60)
            os.kill(left, 0)  # it runs
            with claimed(False, 60):
                assert claimant(False) == os.getpid()
        finally:
            os.kill(left, signal.SIGKILL)
            process.stdout.close()


@pytest.mark.parametrize("ends", [True, False])
def test_a_program_that_an_ended_rank_has_forked_holds_its_claim(launched, on_first_sleep, ends):
    """A rank that is started again waits, because the program may close the claim a moment later.

    The wait is limited.
    """
    launched("shell")
    hold = "import sys; sys.stdin.readline()"
    program = "from kos.comm.control.identity import claimed\nimport os, subprocess, sys\nwith claimed(False, 60):\n"
    program += "    fds = [int(fd) for fd in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + fd)]\n"
    program += f"    subprocess.Popen([sys.executable, '-c', '{hold}'], pass_fds=fds)\n    os._exit(0)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        assert process.wait(60) == 0 and process.stdin is not None
        assert claimant(False) == process.pid
        waits = on_first_sleep(process.stdin.close if ends else bool)
        with claimed(False, 60 if ends else 0.1):
            assert waits and claimant(False) == (os.getpid() if ends else process.pid)


@pytest.mark.parametrize("relation", ["unrelated", "parent"])
def test_a_job_without_a_name(launched, relation):
    """kos does not know the launcher, so two of its jobs on one host cannot be told apart."""
    rank = os.getpid()  # no test of another process has it
    environment = launched("mpi", PMI_RANK=f"{rank}", PMI_SIZE=f"{rank + 1}")
    with claiming(by_mpi=True):
        if relation == "unrelated":
            environment.setattr(Path, "read_text", lambda path, **_: STRANGER)
            with claimed(True, 60):
                assert claimant(True) != os.getpid()
        else:
            with pytest.raises(kos.errors.RendezvousError, match=f"is already rank {rank} of"), claimed(True, 0.1):
                pass


def test_processes_of_other_users_may_be_hidden(no_launcher):
    """For example, hidepid=1 of /proc hides the processes that started the launcher."""
    read, mine = Path.read_text, Path(f"/proc/{os.getpid()}/stat")

    def read_own(path, *args, **options):
        if path != mine and path.name == "stat":
            raise PermissionError(1, "Operation not permitted", str(path))
        return read(path, *args, **options)

    no_launcher.setenv("OMPI_COMM_WORLD_RANK", f"{os.getpid()}")  # no test of another process has it
    no_launcher.setattr(Path, "read_text", read_own)
    with claimed(True, 60):
        assert claimant(True) == os.getpid()
