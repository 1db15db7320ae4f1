"""A rank does not wait in MPI_Init for longer than its timeout, and starts MPI as mpi4py is told to."""

import re

import pytest

from kos.comm.control.mpi_job import EXIT_CODE
from tests.comm.test_jobs import mpirun, output, program
from tests.launcher import needs_mpirun

MISSING = r"rank 1: RendezvousError: rendezvous: start: rank 0 did not arrive within 0\.5 s, as MPI_Init needs all r"


@needs_mpirun
@pytest.mark.parametrize("how", ["exits", "does not come"])
def test_mpi_init_ends_at_the_timeout(tmp_path, how):
    """Rank 1 begins after the process of rank 0 has ended.  If ranks end in another order, mpirun ends the job."""
    file = tmp_path / "pid"
    text = f"""
from kos.comm.control.identity import process
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    open("{file}.new", "w").write(str(os.getpid()))
    os.rename("{file}.new", "{file}")
    if "{how}" == "exits":
        os._exit(0)
    time.sleep(150)
while not os.path.exists("{file}") or ("{how}" == "exits" and process(open("{file}").read())[0] != "X"):
    time.sleep(0.01)
kos.init(timeout=0.5)
"""
    done = mpirun(2, program(tmp_path, text), fresh=True)
    line = re.search(MISSING + r"anks \(program\.py:\d+\)\n", done.stderr)
    assert line and done.stderr.count("RendezvousError") == 1, done.stderr
    assert done.returncode == EXIT_CODE


@needs_mpirun
def test_ranks_of_other_hosts_are_not_named(tmp_path):
    text = """
os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1"
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    time.sleep(150)
kos.init(timeout=0.5)
"""
    done = mpirun(2, program(tmp_path, text))
    assert "rank 1: RendezvousError: rendezvous: start: MPI_Init did not end within 0.5 s; which ranks" in done.stderr
    assert done.returncode == EXIT_CODE


@needs_mpirun
def test_a_rank_that_has_started_is_not_ended_at_its_turn(tmp_path):
    """The timeout has passed when MPI_Init returns.  The last rank would be ended 4 s later."""
    text = """
import threading
import mpi4py
from kos.comm.control import mpi_job
os.environ |= {"OMPI_COMM_WORLD_RANK": "8", "OMPI_COMM_WORLD_SIZE": "9"}
mpi_job.start(mpi4py.rc, 0.001)
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join(60)
print("runs", flush=True)
from mpi4py import MPI
MPI.Finalize()
"""
    assert output(tmp_path, text, fresh=True) == "runs\n"


@needs_mpirun
def test_a_program_may_have_called_mpi_init(tmp_path):
    text = """
import ctypes, importlib.util
ctypes.CDLL(importlib.util.find_spec("mpi4py.MPI").origin).MPI_Init(None, None)  # as a library of the program does
with kos.init(timeout=60) as comm:
    print(comm.all_reduce(np.ones(1)), flush=True)
"""
    assert output(tmp_path, text, 2, fresh=True) == "[2.]\n" * 2


@needs_mpirun
@pytest.mark.parametrize(
    ("option", "level"), [("rc.thread_level = 'serialized'", "SERIALIZED"), ("rc.threads = False", "SINGLE")]
)
def test_mpi_starts_with_the_settings_of_mpi4py(tmp_path, option, level):
    text = f"""
import mpi4py
mpi4py.{option}
with kos.init(timeout=60):
    from mpi4py import MPI
    print(MPI.Query_thread() <= MPI.THREAD_{level}, flush=True)
try:
    MPI.COMM_WORLD.Send(np.ones(1), 77)
except MPI.Exception:
    print("raises", flush=True)
"""
    assert sorted(output(tmp_path, text, 2, fresh=True).split()) == ["True"] * 2 + ["raises"] * 2
