"""The rank that a launcher assigned to this process, and a claim: programs that it starts cannot take it.

Programs that a rank starts inherit the launcher's environment variables.  With these, ``kos.init`` would make each such
program the same rank.  MPI would then wait forever, or a process that reads the other's messages would crash.
Therefore, ``kos.init`` sets one more variable, with the id of this process.  A process that inherits it raises an error
that names the rank's process, while that process runs.

The ranks of a job share a secret, from the environment or a file of this user (``load_secret``).
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from kos.environment import KOS_CLAIM, KOS_SECRET
from kos.errors import RendezvousError
from kos.files import cache_folder
from kos.launcher import VARIABLES, launched_place, under_mpirun

_PREFIXES = ("OMPI_COMM_", "PMIX_", "PMI_", "MPI_LOCAL")
_JOB = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
_HYDRA = "hydra_pmi_proxy"  # each rank's parent under MPICH's mpirun, which does not name the job

_holders: weakref.WeakSet[Any] = weakref.WeakSet()  # the open groups of this rank


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


def _ancestry(pid: int) -> Iterator[tuple[int, str]]:
    """The process, its parent, the parent's parent and so on: the id and the name of each."""
    with suppress(PermissionError):  # /proc may hide other users' processes
        while pid > 0:
            name, fields = _stat(pid)
            yield pid, name
            pid = int(fields[1])


def _launcher() -> str:
    """The id of the process of MPICH's launcher on this host; "" under another launcher."""
    return next((str(pid) for pid, name in _ancestry(os.getpid()) if name == _HYDRA), "")


@contextmanager
def claimed(by_mpi: bool) -> Iterator[None]:
    """Claim the rank that the environment variables name, while its group is created.  An error frees the claim.

    Raises RendezvousError if this process has inherited the claim of another one, which runs.
    """
    pid = KOS_CLAIM.get()
    if pid.isdecimal() and pid != str(os.getpid()) and process(pid)[1]:
        raise RendezvousError(_refusal(by_mpi, pid))
    making = hold(lambda: None)  # keeps the claim if another group is closed meanwhile
    os.environ[KOS_CLAIM.name] = str(os.getpid())
    try:
        yield
    finally:
        release(making)


def _refusal(by_mpi: bool, pid: str) -> str:
    """The text of the error in a process that has inherited the claim of process ``pid``."""
    (rank, size), me = launched_place(), os.getpid()
    text = f"process {pid}, which has started this one, is already rank {rank} of {size} of this job"
    if by_mpi:
        names = [f"{each}*" for each in _PREFIXES if any(name.startswith(each) for name in os.environ)]
    else:
        names = [name for name in (*VARIABLES, "SLURM_STEP_NUM_TASKS") if name in os.environ]
    alone = f"to make process {me} a group of one, start it without the variables {', '.join(names)}"
    another = f"to make it a rank of another job, start it without {KOS_CLAIM.name}"
    return f"init: {text}: expected no second one, got process {me}; {alone}; {another}"


def hold(group: Any, parent: Any = None) -> Any:
    """Keep the claim until ``group`` is closed; with ``parent``, only if that keeps it.  Returns ``group``."""
    if parent is None or parent in _holders:
        _holders.add(group)
    return group


def release(group: Any) -> None:
    """Free the claim if no other group keeps it.  A rank of MPI keeps it until its process ends, as it keeps MPI."""
    _holders.discard(group)
    MPI = sys.modules.get("mpi4py.MPI")
    kept = len(_holders) or (under_mpirun() and MPI is not None and MPI.Is_initialized())
    if not kept and KOS_CLAIM.get() == str(os.getpid()):  # not that of a parent
        del os.environ[KOS_CLAIM.name]


def load_secret(environ: Mapping[str, str]) -> bytes:
    """The secret of this job: the value of ``KOS_SECRET``, else the user's secret.

    A user's secret is a file that only this user can read, created on first use.  Ranks on several hosts need
    ``KOS_SECRET``, unless they share the user's home.  Raises RendezvousError if the secret is empty, or its file
    cannot be used or is readable by others.
    """
    given = KOS_SECRET.name in environ
    secret = KOS_SECRET.get(environ).encode(errors="surrogateescape") if given else _users_own(environ)
    if not secret:
        raise RendezvousError("KOS_SECRET: expected a secret, got an empty one")
    return secret


def _users_own(environ: Mapping[str, str]) -> bytes:
    """This user's secret on this host; the first process creates it."""
    folder = cache_folder(environ)
    path = folder / "secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with NamedTemporaryFile(dir=folder, prefix=".secret-") as draft:  # of mode 0600
                draft.write(secrets.token_hex(32).encode())
                draft.flush()
                os.fsync(draft.fileno())
                with suppress(FileExistsError):
                    os.link(draft.name, path)  # atomic: of several processes, one succeeds
        with open(path, "rb") as file:
            status, text = os.fstat(file.fileno()), file.read()
    except OSError as error:
        expected = f"expected {folder} to be writable and {path} to be readable, or KOS_SECRET to be set"
        raise RendezvousError(f"secret: {expected}, got: {error}") from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise RendezvousError(f"secret: expected {path} to be its owner's alone, got mode {mode:04o}")
    if status.st_uid not in (os.geteuid(), 0):
        raise RendezvousError(f"secret: expected {path} to belong to user {os.geteuid()}, got user {status.st_uid}")
    return text.strip()
