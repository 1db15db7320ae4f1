"""The rank that a launcher assigned to this process, and the claim that keeps other processes from taking that rank.

Programs that a rank starts inherit the launcher's environment variables.  With these, ``kos.init`` would make each such
program the same rank.  MPI would then wait forever, or a process that reads the other's messages would crash.
Therefore, ``kos.init`` claims the rank of its job before it connects to anything.  If another process of this host
holds the claim, it raises an error that names this process.  A claim is an abstract Unix socket, which the kernel
closes when its process ends, however it ends.  A rank of another job may start, for example a rank of an mpirun that a
rank has started.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kos.errors import RendezvousError
from kos.launcher import OF_MPI, OF_OTHERS, VARIABLES, launched_place
from kos.memory.ipc import namespace

_PREFIXES = ("OMPI_COMM_", "PMIX_", "PMI_", "MPI_LOCAL")
_RUN = "TORCHELASTIC_RUN_ID"
_JOB = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
_HYDRA = "hydra_pmi_proxy"  # each rank's parent under MPICH's mpirun, which does not name the job

_holders: weakref.WeakSet[Any] = weakref.WeakSet()  # the open groups of this rank
_claims = dict[str, tuple[socket.socket, bool]]()  # of this process, by address; True: of a rank of MPI


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


def _started(parent: int, child: int) -> bool:
    """Whether the process ``parent`` has started the process ``child``, itself or by others."""
    return any(pid == parent for pid, _ in _ancestry(child))


def _launcher() -> str:
    """The id of the process of MPICH's launcher on this host; "" under another launcher."""
    return next((str(pid) for pid, name in _ancestry(os.getpid()) if name == _HYDRA), "")


ENDING_SECONDS = 5.0
"""How long a process waits at most for the end of another one that has the same job and rank."""


@contextmanager
def claimed(by_mpi: bool, timeout: float) -> Iterator[None]:
    """Claim the rank that the environment variables name, while its group is created.  An error frees the claim.

    Raises RendezvousError if another process of this host holds the claim.  If that may be a rank of an earlier run
    which is about to end, as neither of the two processes has started the other one, this one waits for it for at most
    ``timeout`` and ``ENDING_SECONDS`` seconds.  It waits as long for a program that an ended rank has forked to close
    the claim, and then goes on without one.
    """
    making = hold(lambda: None)  # keeps the claim if another group is closed meanwhile
    try:
        with suppress(OSError):  # no file descriptor is left: what comes next says so
            if (address := _address(by_mpi)) not in _claims and (claim := _claim(address, by_mpi, timeout)) is not None:
                _claims[address] = claim, by_mpi
        yield
    finally:
        release(making)


def claimant(by_mpi: bool) -> int | None:
    """The id of the process that has claimed this process's rank; None if there is none, 0 if the id is unknown."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(_address(by_mpi))
        except BlockingIOError:  # so many processes have asked before
            return 0
        except OSError:
            return None
        return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def _address(by_mpi: bool) -> str:
    """The address of the claim: the same in all processes of a user and host that have the same job and rank.

    Abstract sockets belong to a network namespace.  Ids of processes, in names of jobs, belong to a PID namespace.
    """
    text = " ".join([str(os.getuid()), namespace("pid"), "mpi" if by_mpi else "tcp", *_identity(by_mpi)])
    return f"\0kos-rank-{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:32]}"


def _identity(by_mpi: bool) -> tuple[str, str]:
    """The name of the job, "" if it has none, and the rank there, from the environment variables that determine them.

    Variables of other launchers do not count.  For example, a torchrun inside a rank of mpirun sets some too.
    """
    launcher, of_job, of_rank = "", list[str](), [*VARIABLES[:2]]
    if by_mpi:
        launcher = _launcher()
        of_job += _JOB[:1] if launcher or _JOB[0] in os.environ else _JOB[1:]
        of_rank = [rank for rank, _ in OF_MPI]
    elif VARIABLES[0] in os.environ:
        of_job += [_RUN, *VARIABLES[2:]]
    else:
        of_job, of_rank = [*_JOB[1:], *VARIABLES[2:]], [*OF_OTHERS[1]]
    given = [[f"{name}={os.environ[name]}" for name in names if name in os.environ] for names in (of_job, of_rank)]
    return launcher + " ".join(given[0]), " ".join(given[1])


def _claim(address: str, by_mpi: bool, timeout: float) -> socket.socket | None:
    """The socket of a new claim; None where none can be made.  Raises RendezvousError if another process holds it.

    It is also raised in a child of multiprocessing under MPI, which starts once in a rank: if the child started MPI and
    ended, the rank could not start it any more.
    """
    end, me = time.monotonic() + min(timeout, ENDING_SECONDS), os.getpid()
    while True:
        if (pid := claimant(by_mpi)) is not None:
            late, ended = time.monotonic() > end, _has_ended(pid)
            if pid == me or (late if ended else _is_of_another_job(pid, by_mpi)):
                return None
            if not ended and (late or _started(pid, me) or _started(me, pid)):
                raise RendezvousError(_refusal(by_mpi, pid))
            time.sleep(0.01)
            continue
        multiprocessing = sys.modules.get("multiprocessing.process")
        parent = multiprocessing.parent_process() if by_mpi and multiprocessing is not None else None
        if parent is not None:
            raise RendezvousError(_refusal(by_mpi, parent.pid, "multiprocessing"))
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(address)
            claim.listen(4096)
            return claim
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                return None
        if time.monotonic() > end:
            raise RendezvousError(_refusal(by_mpi, 0))
        time.sleep(0.001)  # another process has bound the socket, and does not listen yet


def _has_ended(pid: int) -> bool:
    """Whether the process that made the claim has ended.  A program that it has forked may hold the claim.

    In a program of Python, a hook closes it at once.  A program that a library has forked may hold it for long.
    """
    with suppress(PermissionError):
        return pid > 0 and process(pid)[0] in "ZX"
    return False


def _is_of_another_job(pid: int, by_mpi: bool) -> bool:
    """Whether the process that holds the claim may be of another job.

    The launcher gives jobs no name that kos knows, and none of the two processes has started the other one.
    """
    me = os.getpid()
    return not (_identity(by_mpi)[0] or _started(pid, me) or _started(me, pid))


def _refusal(by_mpi: bool, pid: int, method: str = "") -> str:
    """The text of the error in a process whose rank is process ``pid``, or which that has started by ``method``."""
    (rank, size), me = launched_place(), os.getpid()
    other = me
    if method:
        text = f"expected the process that a launcher has started as rank {rank} of {size}, got process {me}"
        text += f", which process {pid} has started by {method}"
    else:
        how = ", which has started this one," if _started(pid, me) else ""
        if _started(me, pid):
            how, other = ", which this one has started,", pid
        claimant, how = f"process {pid}" if pid else "another process", how or ", perhaps of an earlier run,"
        text = f"{claimant}{how} is already rank {rank} of {size} of this job: expected no second one, got process {me}"
    if by_mpi:
        names = [f"{each}*" for each in _PREFIXES if any(name.startswith(each) for name in os.environ)]
    else:
        names = [name for name in (*VARIABLES, "SLURM_STEP_NUM_TASKS") if name in os.environ]
    alone = f"to make process {other} a group of one, start it without the variables {', '.join(names)}"
    return f"init: {text}; {alone}; to make it a rank of another job, start it with a launcher of that job"


def hold(group: Any, parent: Any = None) -> Any:
    """Keep the claim until ``group`` is closed or freed; with ``parent``, only if that keeps it.  Returns ``group``."""
    if parent is None or parent in _holders:
        _holders.add(group)
        weakref.finalize(group, _free_claims).atexit = False  # for a group that is never closed
    return group


def release(group: Any) -> None:
    """Free the claim if no other group keeps it.  A rank of MPI keeps it until its process ends, as it keeps MPI."""
    _holders.discard(group)
    _free_claims()


def _held() -> bool:
    while True:
        try:
            return bool([*_holders])
        except RuntimeError:  # another thread added a group meanwhile
            continue


def _free_claims() -> None:
    if _held():
        return
    MPI = sys.modules.get("mpi4py.MPI")
    kept = MPI is not None and MPI.Is_initialized()
    for address, (claim, by_mpi) in [*_claims.items()]:
        if not (by_mpi and kept):
            _claims.pop(address, None)
            claim.close()


def _forked() -> None:
    """Close the claims in a forked process: it is not the rank, and may live longer."""
    for claim, _ in _claims.values():
        claim.close()
    _claims.clear()
    _holders.clear()


os.register_at_fork(after_in_child=_forked)
