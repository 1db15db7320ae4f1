"""The rank that a launcher assigned to this process, and the mark that keeps other processes from taking that rank.

Programs that a rank starts inherit the launcher's environment variables.  With these, ``kos.init`` would make each such
program the same rank.  MPI would then wait forever, or a process that reads the other's messages would crash.
Therefore, ``kos.init`` writes its process and its job to the environment variable ``MARK``.  If it finds there another
process of the same job that still runs, it raises an error.  A rank of another job may start, for example a rank of an
mpirun that a rank has started.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kos.errors import RendezvousError

MARK = "KOS_RANK_PROCESS"
"""The variable that names the rank's process: its id, its start time, the launcher of its job, and its rank there."""
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),  # PMIx has no size
)
"""The variables with the rank and with the number of ranks, for each kind of launcher."""
_OF_OTHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
_LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")
_PREFIXES = ("OMPI_COMM_", "PMIX_", "PMI_", "MPI_LOCAL")
_RUN = "TORCHELASTIC_RUN_ID"
_JOB = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
_HYDRA = "hydra_pmi_proxy"  # each rank's parent under MPICH's mpirun, which does not name the job

_holders: weakref.WeakSet[Any] = weakref.WeakSet()  # the open groups of this rank


def under_mpirun() -> bool:
    """Whether an MPI launcher started this process.  Does not import mpi4py."""
    return any(name in os.environ for name in _LAUNCHER_VARIABLES)


def by_variables() -> bool:
    """Whether the environment sets the rank of this process without MPI, completely or in part.

    A shell of a Slurm allocation has a rank number too.  Slurm's variables therefore count only in a step of srun with
    several tasks.
    """
    return not os.environ.keys().isdisjoint(VARIABLES) or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def launched_rank() -> int:
    """The rank of this process, from the launcher's environment variables, before MPI starts; 0 for a group of one."""
    return launched_place()[0]


def launched_place() -> tuple[int, int]:
    """The rank of this process and the number of ranks, as ``kos.init`` determines them before MPI starts.

    A shell of a Slurm allocation has a rank number too, but is a group of one.
    """
    if not under_mpirun() and not by_variables():
        return 0, 1
    for names in OF_MPI if under_mpirun() else _OF_OTHERS:
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            return int(rank), int(size)
    return 0, 1


def job() -> str:
    """The name of this process's MPI job; "" if it has none.  All ranks of the job on one host return the same name."""
    named = " ".join(filter(None, (os.environ.get(name) for name in _JOB)))
    return named or _launcher()


def process(pid: int | str) -> tuple[str, int]:
    """The state of the process, as a letter of proc(5), and its start time in clock ticks, 0 if it has ended."""
    fields = _stat(pid)[1]
    return fields[0], 0 if fields[0] in "ZX" else int(fields[19])


def _stat(pid: int | str) -> tuple[str, list[str]]:
    """The name of the process, and the fields after it in the process's stat file of proc(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a process may have any bytes as its name
    except (FileNotFoundError, ProcessLookupError):
        return "", ["X", "0"]
    name, _, rest = stat.rpartition(") ")
    return name.partition("(")[2], rest.split()


def _launcher() -> str:
    """The id of the process of MPICH's launcher on this host; "" under another launcher."""
    name, pid = "", os.getpid()
    with suppress(PermissionError):  # /proc may hide other users' processes, but not the launcher's
        while name != _HYDRA and pid > 1:
            child = pid
            name, fields = _stat(pid)
            pid = int(fields[1])
    return str(child) if name == _HYDRA else ""


@contextmanager
def claimed(by_mpi: bool) -> Iterator[None]:
    """Mark this process as its rank while its group is created.  If the creation fails, the mark is removed.

    Raises RendezvousError if another process already holds the rank that the environment variables name.
    """
    me, launcher = os.getpid(), _launcher() if by_mpi else ""
    identity = _identity(by_mpi, launcher)
    with suppress(ValueError, PermissionError):  # no mark, or its process id is now another user's
        pid, began, its_launcher, its_identity = os.environ.get(MARK, "").split(" ", 3)
        same = its_identity == identity and launcher in ("", its_launcher)
        if same and int(pid) != me and process(pid)[1] == int(began):
            raise RendezvousError(_taken(pid, by_mpi))
    claim = hold(lambda: None)  # keeps the mark if another group is closed meanwhile
    os.environ[MARK] = f"{me} {process(me)[1]} {launcher or '-'} {identity}"
    try:
        yield
    finally:
        release(claim)


def _identity(by_mpi: bool, launcher: str) -> str:
    """The job and the rank of this process, from the environment variables that determine them.

    Variables of other launchers do not count.  For example, a torchrun inside a rank of mpirun sets some too.
    """
    names: tuple[str, ...]
    if by_mpi:
        job = _JOB[:1] if launcher or _JOB[0] in os.environ else _JOB[1:]
        names = (*job, *(rank for rank, _ in OF_MPI))
    elif VARIABLES[0] in os.environ:
        names = (_RUN, *VARIABLES)
    else:
        names = (*_JOB[1:], *_OF_OTHERS[1], *VARIABLES[2:])
    given = (f"{name}={os.environ[name]}" for name in names if name in os.environ)
    return " ".join(["mpi" if by_mpi else "tcp", *given])


def _taken(pid: str, by_mpi: bool) -> str:
    """The text of the error in a process that a rank, process ``pid``, has started."""
    rank, size = launched_place()
    if by_mpi:
        names = [f"{each}*" for each in _PREFIXES if any(name.startswith(each) for name in os.environ)]
    else:
        names = [name for name in (*VARIABLES, "SLURM_STEP_NUM_TASKS") if name in os.environ]
    expected = f"expected the process that is rank {rank} of {size}, got a process that this rank has started"
    alone = f"to make it a group of one, start it without the variables {', '.join(names)}"
    job = "to make it a rank of another job, start it with a launcher of that job"
    return f"init: {expected}; {alone}; {job} (the rank is process {pid}, this one is {os.getpid()})"


def hold(group: Any, parent: Any = None) -> Any:
    """Keep the mark until ``group`` is closed or freed; with ``parent``, only if that keeps it.  Returns ``group``."""
    if parent is None or parent in _holders:
        _holders.add(group)
        weakref.finalize(group, _remove_mark).atexit = False  # for a group that is never closed
    return group


def release(group: Any) -> None:
    """Remove the mark if no other group keeps it.  A rank of MPI keeps it until its process ends, as it keeps MPI."""
    _holders.discard(group)
    _remove_mark()


def _held() -> bool:
    while True:
        try:
            return bool([*_holders])
        except RuntimeError:  # another thread added a group meanwhile
            continue


def _remove_mark() -> None:
    MPI = sys.modules.get("mpi4py.MPI")
    mark = os.environ.get(MARK, "").split(" ")
    if _held() or mark[0] != str(os.getpid()) or (mark[3] == "mpi" and MPI is not None and MPI.Is_initialized()):
        return
    del os.environ[MARK]
