"""Whole programs as a user starts them: with mpirun, without it, and without MPI."""

import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from kos.comm.control import mpi_job
from kos.errors import install
from tests.forked import python
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program

ROOT = Path(__file__).resolve().parents[2]


def program(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program.py"
    path.write_text("import os, sys, threading, time\nimport numpy as np\nimport kos\n" + text)
    return str(path)


def environment() -> dict[str, str]:
    """This one's, less what an mpirun around the tests put in it."""
    return {**OUTSIDE, "OMP_NUM_THREADS": "1"}


def start(*command: str) -> subprocess.CompletedProcess[str]:
    return run_program(*command, env=environment(), cwd="/")


def mpirun(ranks: int, path: str, *options: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """``fresh``: each rank is a Python of its own, not forked from one that has imported kos."""
    return start(MPIRUN, *options, "-n", str(ranks), *([sys.executable] if fresh else python()), path)


def output(tmp_path: Path, text: str, ranks: int = 0, fresh: bool = False) -> str:
    """The output of a program that succeeds and writes nothing to stderr; without mpirun if ``ranks`` is 0."""
    path = program(tmp_path, text)
    done = mpirun(ranks, path, fresh=fresh) if ranks else start(sys.executable, path)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@needs_mpirun
def test_what_explain_says_of_sizes_is_what_happens(tmp_path):
    text = """
from kos._core import native as core
from kos.comm.host.mpi import MPITransport
for shared in (True, False):
    os.environ["KOS_HOST"] = "" if shared else os.environ["OMPI_COMM_WORLD_RANK"]
    comm = kos.init(timeout=60)
    native, request = [], MPITransport._native_request
    assert (comm.all_reduce(np.full(4, comm.rank + 1, np.float32), kos.ReduceOp.AVG) == 1.5).all()
    transport = comm.backend.transport
    transport._native_request = lambda o, *rest: (native.append(o.name), request(transport, o, *rest))[1]
    header, *rows = [line.split("  ") for line in comm.explain().splitlines()[-6:]]
    assert header[0].strip() == "float32"
    for name, *cells in rows:
        cells = [cell.strip() for cell in cells if cell]
        for size, cell in list(zip((1 << 10, 1 << 15, 1 << 20), cells)):
            native.clear()
            getattr(comm, name)(np.zeros(size // 4, np.float32), *((0,) if name == "broadcast" else ()))
            said = "shared memory" if shared and core else "native" if native else "ring"
            assert cell == f"mpi {said}", (name, size, cell, said)
"""
    output(tmp_path, text, 2)


@needs_mpirun
@pytest.mark.parametrize(("leaver", "memory"), [(0, "shared"), pytest.param(2, "none", marks=pytest.mark.slow)])
def test_a_rank_that_ends_without_close_is_gone(tmp_path, leaver, memory):
    text = f"""
if "{memory}" == "none":
    os.environ["KOS_HOST"] = os.environ["OMPI_COMM_WORLD_RANK"]
comm = kos.init(timeout=60)
if comm.rank == {leaver}:
    sys.exit(0)
for call in (comm.barrier, lambda: comm.recv(np.ones(1), {leaver}), lambda: comm.split(0)):
    try:
        call()
    except kos.errors.RankLost as error:
        print("lost" if "rank {leaver} is gone: its process ended" in str(error) else error, flush=True)
"""
    assert output(tmp_path, text, 3).split() == ["lost"] * 6


@needs_mpirun
def test_init_is_tried_until_all_have_come(tmp_path):
    """Rank 0 tries twice in vain before rank 1 calls.

    If the job were out of step, the barrier or the exit would hang.
    """
    text = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank:
    MPI.COMM_WORLD.recv()
for attempt in range(9):
    try:
        comm = kos.init(timeout=60 if attempt == 2 or MPI.COMM_WORLD.rank else 0.5)
        break
    except kos.errors.RendezvousError as error:
        print(error, flush=True)
        if attempt == 1:
            MPI.COMM_WORLD.send(None, 1)
comm.barrier()
"""
    assert output(tmp_path, text, 2) == "rendezvous: start: rank 0 waited 0.5 s for rank 1\n" * 2


UNCAUGHT = """
comm = kos.init(timeout=60, process_hooks={hooks})
def call():
    comm.all_reduce(np.ones(2), op="no operation")
{run}
"""


@pytest.mark.parametrize("run", ["call()", "thread = threading.Thread(target=call); thread.start(); thread.join()"])
@pytest.mark.parametrize(("hooks", "debug"), [(True, "0"), (True, "1"), (False, "0")])
def test_an_uncaught_error_without_mpi_is_reported_without_frames_of_kos(tmp_path, run, hooks, debug):
    path, env = program(tmp_path, UNCAUGHT.format(run=run, hooks=hooks)), environment() | {"KOS_DEBUG": debug}
    done = run_program(*python(), path, env=env | {"RANK": "0", "WORLD_SIZE": "1"}, cwd="/")
    text = done.stderr
    assert text.rstrip().endswith("kos.errors.InvalidArgument: op: expected a ReduceOp or PremulSum(factor), got 'no op"
                                  "eration'")  # fmt: skip
    assert text.count(f'File "{path}"') == (2 if run == "call()" else 1), text
    assert (f'File "{ROOT / "kos"}/' in text) == (debug == "1" or not hooks), text


WAIT = "comm.barrier(timeout=300)"

ENDS = {
    "exception": (f"""
with kos.init() as comm:
    if comm.rank == 1: raise ZeroDivisionError("boom on one rank")
    {WAIT}
""", 1, "rank 1: ZeroDivisionError: boom on one rank (program.py:"),
    "exception without with": (f"""
comm = kos.init()
if comm.rank == 1: raise ZeroDivisionError("boom on one rank")
{WAIT}
""", 1, "rank 1: ZeroDivisionError: boom on one rank (program.py:"),
    "thread": (f"""
with kos.init() as comm:
    def body(): raise ZeroDivisionError("boom in a thread")
    if comm.rank == 2: threading.Thread(target=body).start()
    {WAIT}
""", 1, "rank 2: ZeroDivisionError: boom in a thread (program.py:"),
    "sys.exit": (f"""
with kos.init() as comm:
    if comm.rank == 0: sys.exit(7)
    {WAIT}
""", 7, "rank 0 of 3 ends the job: it aborted its communicator by an exception and ranks 1-2 did not end"),
    "one ends, one does not": ("""
try:
    with kos.init() as comm:
        if comm.rank == 0: sys.exit(7)
        comm.barrier(timeout=300)
except kos.errors.RankLost:
    time.sleep(300 * (comm.rank == 2))
""", 7, "rank 0 of 3 ends the job: it aborted its communicator by an exception and rank 2 did not end"),
    "caught, then exit": (f"""
try:
    with kos.init() as comm:
        if comm.rank == 0: raise kos.errors.TrainingError("not finite")
        {WAIT}
except kos.errors.TrainingError:
    sys.exit(2)
""", 1, "rank 0 of 3 ends the job"),
    "killed": (f"""
with kos.init() as comm:
    if comm.rank == 1: os.kill(os.getpid(), 9)
    {WAIT}
""", 137, ""),
    "timeout": ("""
with kos.init() as comm:
    if comm.rank == 1: time.sleep(300)
    comm.all_reduce(np.ones(5), timeout=0.5)
""", 1, ": CollectiveTimeout: world: all_reduce #0 of float64[5] by SUM: not complete after 0.5 s"),
    "late": ("""
import select
from mpi4py import MPI
first = MPI.COMM_WORLD.bcast(os.getpid() if MPI.COMM_WORLD.rank == 0 else None)
if MPI.COMM_WORLD.rank:
    select.select([os.pidfd_open(first)], [], [])
try:
    kos.init(timeout=0.5)
except kos.errors.RendezvousError:
    pass
""", 1, "rank 0 of 3 ends the job: it exits and ranks 1-2 did not end"),
}


RARE = ("exception without with", "caught, then exit", "late")
FORK = """
import warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded")

def code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

with kos.init(timeout=60) as comm:
    part = comm.split(comm.rank)
    for end in (0, 4, "exception", "thread"):
        child = os.fork()
        if child == 0:  # leaves the block as this rank would, and with its hooks
            if end == "thread":
                thread = threading.Thread(target=lambda: 1 / 0)
                thread.start()
                thread.join()
            if end == "exception":
                raise ZeroDivisionError("in a child")
            sys.exit(0 if end == "thread" else end)
        assert code(child) == {"exception": 1, "thread": 0}.get(end, end)
        comm.all_reduce(np.ones(3))
    part.barrier()
    assert comm.all_reduce(np.ones(3)).sum() == 6
print("done", flush=True)
"""


@needs_mpirun
def test_a_process_that_a_rank_forked_is_no_rank(tmp_path):
    done = mpirun(2, program(tmp_path, FORK))
    assert (done.returncode, done.stdout) == (0, "done\n" * 2), done.stderr
    assert "ends the job" not in done.stderr


FINALIZED = """
from mpi4py import MPI
{before}
rank = MPI.COMM_WORLD.rank
MPI.Finalize()
if rank:
    sys.exit()
for given in (None, MPI.COMM_WORLD):
    try:
        kos.init(rendezvous=given, timeout=60)
    except kos.errors.RendezvousError as error:
        print(error, flush=True)
raise SystemError("of the program")
"""


@needs_mpirun
@pytest.mark.parametrize("before", ["", "kos.init(timeout=60).close()"])
def test_after_mpi_finalize(tmp_path, before):
    """kos raises an error where MPI would abort the job.  Then the exception of the program is printed."""
    done = mpirun(2, program(tmp_path, FINALIZED.format(before=before)), fresh=True)
    assert done.stdout == "mpi: expected MPI to run, got kos.init after MPI.Finalize\n" * 2, done.stderr
    assert done.returncode == 1 and "SystemError: of the program" in done.stderr


@needs_mpirun
@pytest.mark.parametrize("hosts", [1, 2])
def test_an_init_that_all_ranks_refuse_frees_its_communicators(tmp_path, hosts):
    text = f"""
from kos.comm.control import mpi_job
from kos.errors import KosError
MPI = mpi_job.load_mpi()
world = MPI.COMM_WORLD
os.environ["KOS_HOST"] = f"host {{world.rank % {hosts}}}"
calls = [dict(backend="mpi", device=0), dict(backend="mock"), dict(backend=("mpi", "tcp")[world.rank])]
calls.append(dict(backend="mpi", nccl={{"max_ctas": 2}}))
for call in calls:
    other = world.Dup()
    free = other.py2f()
    other.Free()
    try:
        kos.init(timeout=60, **call)
    except KosError as error:
        assert error.on_every_rank, call
    else:
        sys.exit("not refused")
    while mpi_job._closing:  # until all ranks have closed them
        mpi_job.free_closed()
    other = world.Dup()
    assert other.py2f() == free, call
    other.Free()
with kos.init("mpi", timeout=60) as comm:
    assert comm.all_reduce(np.ones(1)) == 2
"""
    output(tmp_path, text, 2)


@needs_mpirun
def test_mpi_is_finalized_once(tmp_path):
    """After the exit functions of the program, whoever imports mpi4py; also if the communicator was never closed."""
    text = """
import atexit
comm = kos.init("mpi")
from mpi4py import MPI
atexit.register(lambda: print("active", not MPI.Is_finalized(), flush=True))
MPI.COMM_WORLD.Barrier()
comm.all_reduce(np.ones(3), async_op=True)
"""
    assert output(tmp_path, text, 2, fresh=True) == "active True\n" * 2


@needs_mpirun
@pytest.mark.parametrize("imports", ["", "from mpi4py import MPI"])
def test_mpi_that_the_program_leaves_to_kos_is_finalized(tmp_path, imports):
    text = f"""
import mpi4py
mpi4py.rc.initialize = False
{imports}
print(kos.init("mpi", timeout=60).all_reduce(np.ones(1)))
"""
    assert output(tmp_path, text, 2, fresh=True) == "[2.]\n" * 2


@needs_mpirun
@pytest.mark.parametrize("case", [pytest.param(each, marks=pytest.mark.slow if each in RARE else ()) for each in ENDS])
def test_one_rank_ends_the_job(tmp_path, case):
    text, code, message = ENDS[case]
    first = re.match(r"rank (\d)", message)  # the others leave it the time to end the job, however slow it is
    others = f"os.environ['OMPI_COMM_WORLD_RANK'] != '{first[1]}'" if first else "False"
    patient = f"import kos.comm.control.mpi_job as job\nif {others}: job._EXIT_GRACE = 60\n"
    done = mpirun(3, program(tmp_path, patient + text))
    assert done.returncode == code, done.stderr
    assert message in done.stderr


@needs_mpirun
def test_a_rank_that_waits_for_a_stopped_hub_reports_before_the_job_ends(tmp_path):
    """Rank 0 waits in a group whose hub is rank 2.  It fails some seconds after rank 1, which ends the job."""
    text = """
try:
    with kos.init("mpi", timeout=1.0) as comm:
        part = comm.split([1, 0, 1][comm.rank], [1, 0, 0][comm.rank])
        comm.barrier()
        if comm.rank == 2:  # once the call has been compared
            part.rendezvous.split = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
        if comm.rank == 1:
            comm.barrier()
        time.sleep(0.6)
        part.duplicate()
except kos.errors.KosError as error:
    print(f"rank {comm.rank}: {error.ranks}", flush=True)
    sys.exit(1)
"""
    done = mpirun(3, program(tmp_path, "import signal\n" + text))
    assert "rank 0: (2,)" in done.stdout, done.stderr


def test_requests_given_up_are_kept_until_they_are_over():
    over = set[int]()

    class Request:
        def __init__(self, number):
            self.number = number

        def Test(self):
            return self.number in over

    kept = weakref.WeakValueDictionary[int, Request]()
    for number in range(4):
        mpi_job.keep_unfinished(kept.setdefault(number, Request(number)))
    assert sorted(kept) == [0, 1, 2, 3]
    over |= {0, 2}
    mpi_job.keep_unfinished(kept.setdefault(4, Request(4)))
    assert sorted(kept) == [1, 3, 4]
    over |= {1, 3, 4}


def test_without_mpirun(tmp_path):
    text = """
with kos.init() as comm:
    assert (comm.rank, comm.size, comm.backend_name) == (0, 1, "mock")
    assert comm.all_gather(np.ones(2)).shape == (1, 2)
assert "mpi4py" not in sys.modules
"""
    output(tmp_path, text)


NO_MPI = """
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mpi4py": raise ImportError("No module named 'mpi4py'")
sys.meta_path.insert(0, Nothing())
"""


def test_without_mpi4py(tmp_path, monkeypatch):
    monkeypatch.chdir("/")  # as ``start`` does: the command is for that folder
    text = NO_MPI + """
try:
    kos.init("mpi")
except kos.errors.BackendUnavailable as error:
    print(error)
os.environ["OMPI_COMM_WORLD_SIZE"] = "2"
try:
    kos.init()
except kos.errors.BackendUnavailable as error:
    print(error)
"""
    line = f"mpi: expected mpi4py and an MPI library ({install('mpi')}), got: No module named 'mpi4py'\n"
    assert output(tmp_path, text) == line * 2


@needs_mpirun
@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "3"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMIX_RANK": "1", "SLURM_NTASKS": "3"}, "SLURM_NTASKS"),
    ],
    ids=["mpirun", "srun"],
)
def test_a_launcher_that_mpi_does_not_know(tmp_path, launcher, size):
    """MPI sees one rank where three were started, so each rank would train alone."""
    text = f"""
from mpi4py import MPI  # before the variables are there, which this MPI would follow
os.environ |= {launcher}
try:
    kos.init()
except kos.errors.RendezvousError as error:
    print(error)
"""
    expected = f"{size}: expected 3 ranks in MPI_COMM_WORLD, got 1: the launcher does not match the MPI library in use"
    said = output(tmp_path, text)
    assert said.startswith(expected) and ("srun --mpi=none" in said) == (size == "SLURM_NTASKS")


BUG = """
def step(comm):
    comm.barrier()
    if comm.rank == 1 or len(sys.argv) > 1:
        comm.all_reduce(np.ones((2, 2))[:, 1])
    comm.barrier()
with kos.init() as comm:
    step(comm)
"""


@needs_mpirun
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_bug_is_one_line_and_the_frames_of_the_program(tmp_path, debug):
    path = program(tmp_path, BUG)
    done = run_program(MPIRUN, "-n", "2", sys.executable, path, env={**environment(), "KOS_DEBUG": debug}, cwd="/")
    line, *frames = done.stderr.partition("\n----")[0].splitlines()
    assert line.startswith("rank 1: InvalidArgument: x: expected a C-contiguous array, got")
    assert line.endswith(f" (program.py:{4 + BUG.count(chr(10), 0, BUG.index('comm.all_reduce'))})")
    assert sum("program.py" in frame for frame in frames) == 2
    assert any(str(ROOT / "kos") in frame for frame in frames) == (debug == "1")
    assert "rank 0" not in done.stderr and "MPI_ABORT" not in done.stderr
    assert done.returncode == 1


@needs_mpirun
def test_an_error_of_every_rank_prints_the_frames_of_one(tmp_path):
    """mpirun ends the other ranks by SIGTERM, before which they may dump their flight record."""
    path, more = program(tmp_path, BUG), {"KOS_RECORDER_SIGNAL": "TERM", "KOS_RECORDER_DIR": str(tmp_path)}
    done = run_program(MPIRUN, "-n", "3", sys.executable, path, "all", env={**environment(), **more}, cwd="/")
    lines = done.stderr.partition("\n----")[0].splitlines()
    assert sorted(line[:6] for line in lines if line.startswith("rank ")) == ["rank 0", "rank 1", "rank 2"]
    assert sum("program.py" in line and "File" in line for line in lines) == 2, done.stderr
    assert done.returncode == 1


@needs_mpirun
def test_the_process_stays_as_it_is(tmp_path):
    """With process_hooks=False, kos installs no hooks in the process.  The program then has to end a job that fails."""
    text = """
import ctypes
def state():
    death = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(2, ctypes.byref(death))  # PR_GET_PDEATHSIG
    return sys.excepthook, threading.excepthook, death.value, dict(os.environ), sys.modules["mpi4py"].rc.finalize
import atexit, mpi4py
before, exits = state(), atexit._ncallbacks()
with kos.init("mpi", process_hooks=False, timeout=60) as comm:
    # Those of mpi4py, and of kos to tell other ranks that this one has ended.
    assert state()[:3] == before[:3] and state()[4] == before[4], (state(), before)
    assert os.environ.get("OMPI_MCA_btl") is None
    assert not [hook for hook in dir(kos.comm.control.mpi_job) if hook == "_guarded"
                and kos.comm.control.mpi_job._guarded]
    comm.barrier()
print("same", flush=True)
"""
    outside = {name: value for name, value in environment().items() if name != "OMPI_MCA_btl"}
    command = (MPIRUN, "-n", "2", sys.executable, program(tmp_path, text))
    done = run_program(*command, env=outside, cwd="/")
    assert (done.returncode, done.stdout) == (0, "same\n" * 2), done.stderr


@needs_mpirun
def test_one_rank_of_mpi_without_mpirun(tmp_path):
    text = """
with kos.init("mpi") as comm:
    assert (comm.size, comm.backend_name) == (1, "mpi")
    assert comm.all_reduce(np.ones(2)).sum() == 2
    line = comm.explain().splitlines()[1]
    assert line.startswith("mpi") and line.endswith("; a group of one, as it was not started by mpirun"), line
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
try:
    kos.init("mpi")
except kos.errors.BackendUnavailable as error:
    print(error)
"""
    refused = "mpi: the ranks are not processes of an MPI job (start with mpirun)\n"
    assert output(tmp_path, text) == refused
