"""A process of an MPI job: detects mpirun, starts mpi4py, and ends all ranks of the job together.

An MPI job in which one rank dies of a Python exception hangs: the others wait for it.  After ``guard_job`` an uncaught
exception on any rank, in any thread, ends all ranks at once.  A rank that aborted its communicator and exits also ends
the job, unless the other ranks exit within ``_EXIT_GRACE`` seconds.

MPI_Init has no timeout: it returns once all ranks of the job have called it.  Called through ctypes, it does not hold
Python's lock, so a thread can watch it.  Nothing makes MPI_Init return.  At the timeout that thread reports the missing
ranks and ends the process with ``EXIT_CODE``.  Ranks that have come are known to the others of their host by an
abstract Unix socket, which ends with the process.  Their exit handlers use another one (``arrived``).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from kos.comm import timeouts
from kos.comm.control.grow import GRACE_SECONDS
from kos.comm.control.identity import job
from kos.comm.waits import Backoff, wait
from kos.errors import BackendUnavailable, RankLost, RendezvousError, describe, install, ranks_in_words
from kos.launcher import OF_MPI, launched_place, under_mpirun

EXIT_CODE = 69
"""Of a process that MPI_Init kept beyond the timeout: EX_UNAVAILABLE of sysexits.h."""
TURN_SECONDS = 0.5
"""How much later than the rank before a rank ends the job: Open MPI 5 ends the others 0.25 s after an exit."""
_LEVELS = {"single": 0, "funneled": 1, "serialized": 2, "multiple": 3}  # of Open MPI and MPICH
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def start(rc: Any, timeout: float | None) -> None:
    """Call MPI_Init with the thread level of ``rc``, mpi4py's settings, before mpi4py would.

    ``timeout`` in seconds; None waits forever.  Does nothing where mpi4py is missing, or its MPI is another than Open
    MPI or MPICH, or where the program has called MPI_Init.  Raises OSError if the MPI library cannot be loaded.
    """
    spec = importlib.util.find_spec("mpi4py.MPI")
    if spec is None or spec.origin is None or "mpiabi" in spec.origin:  # the MPI ABI numbers thread levels otherwise
        return
    threads, name = (
        os.environ.get(f"MPI4PY_RC_{key.upper()}", getattr(rc, key, "")) for key in ("threads", "thread_level")
    )
    level = 0 if str(threads).lower() in ("0", "no", "false") else _LEVELS.get(name, 3)
    library, begun = ctypes.CDLL(spec.origin), ctypes.c_int()
    library.MPI_Initialized(ctypes.byref(begun))
    if begun.value:
        return
    rank, size = launched_place()
    returned, deciding = threading.Event(), threading.Lock()
    with arrived(rank, "start"):
        if timeout is not None:
            given = returned, deciding, timeout, rank, size, sys._getframe()
            threading.Thread(target=_watch, args=given, name="kos-mpi-start", daemon=True).start()
        library.MPI_Init_thread(None, None, 3 if rc.initialize is False else level, ctypes.byref(ctypes.c_int()))
        with deciding:  # else that thread ends the process
            returned.set()


def arrived(rank: int, where: str) -> socket.socket:
    """A socket by which the other ranks of this host know, while it is open, that this rank has reached ``where``."""
    here = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform == "linux":
        with suppress(OSError):
            here.bind(_name(rank, where))
    return here


def _name(rank: int, where: str) -> str:
    return f"\0kos-mpi-{hashlib.sha256(job().encode()).hexdigest()[:32]}-{where}-{rank}"


def _watch(
    returned: threading.Event, deciding: threading.Lock, timeout: float, rank: int, size: int, frame: FrameType
) -> None:
    """End this process, unless MPI_Init has ``returned`` by the timeout and this rank's turn."""
    if not returned.wait(timeout + min(rank, 8) * TURN_SECONDS):
        with deciding:
            if not returned.is_set():
                _end(timeout, rank, size, frame)


def _end(timeout: float, rank: int, size: int, frame: FrameType | None) -> None:
    """Report the missing ranks, and end this process."""
    text, trace = timeouts.unstarted(timeout, missing(rank, size, "start")), None
    error = RendezvousError(f"rendezvous: start: {text}")
    while frame is not None:
        trace, frame = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno), frame.f_back
    with suppress(OSError, ValueError, AttributeError):  # closed streams
        sys.stderr.write(f"rank {rank}: {describe(error.with_traceback(trace))[0]}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(EXIT_CODE)


def missing(rank: int, size: int, where: str) -> str:
    """The names of the ranks that have not reached ``where``; "" if some ranks may be on other hosts."""
    ranks = [other for other in range(size) if other != rank and not _has_come(other, where)]
    local = next((os.environ[name] for name in _LOCAL_SIZE if name in os.environ), "")
    known = ranks and local == str(size) and job() and sys.platform == "linux"
    return ranks_in_words(ranks) if known else ""


def _has_come(rank: int, where: str) -> bool:
    """Whether the rank, which is on this host, has reached ``where``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, suppress(OSError):
        sock.connect(_name(rank, where))
        return True
    return False


log = logging.getLogger(__name__)

_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
# Seconds in which the other ranks may exit before a rank aborts the job.  One that waits for a stopped hub reports
# GRACE_SECONDS after the others.
_EXIT_GRACE = GRACE_SECONDS + 1.0

_unfinished: list[Any] = []  # cancelled requests: MPI may still write to their memory
_keeping = threading.Lock()
# Communicators to be freed, and the request of a barrier of their ranks; each is of the thread that takes it.
_closing = deque[tuple[Any, Any]]()
_at_exit: list[Any] = []  # the socket that tells other ranks that this rank has reached its exit handler
abort_code: int | None = None  # exit code of a rank that aborted its communicator because of an exception
starting: tuple[Any, Any] | None = None  # the job's communicator whose creation timed out, and its request
_loss = False  # whether a rank was lost, and the job continues without it
_guarded = 0  # the process that ``guard_job`` guards; processes that it forks inherit its hooks but are no ranks

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def fault_tolerant() -> bool:
    """Whether the job continues when a rank dies: Open MPI's ``mpirun --with-ft ulfm``."""
    return os.environ.get(_FAULT_TOLERANCE) in ("1", "true")


def load_mpi(process_hooks: bool = True, timeout: float | None = None) -> Any:
    """Import mpi4py.MPI, initialising MPI on the first call, which ends the process after ``timeout`` seconds.

    Raises BackendUnavailable where mpi4py or the MPI library is missing, RendezvousError where MPI does not see the
    ranks that the launcher started.
    """
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None or not MPI.Is_initialized():
        MPI = _start_mpi(process_hooks, timeout)
    if not MPI.Is_finalized():
        _check_world(MPI)
    return MPI


def _start_mpi(process_hooks: bool, timeout: float | None) -> Any:
    first = "mpi4py.MPI" not in sys.modules
    if first and process_hooks:  # Open MPI's "ofi" transport costs a second at start and serves only one-sided calls
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")
    try:
        rc = importlib.import_module("mpi4py").rc
        finalizes = rc.finalize is not False  # else the program does
        start(rc, timeout)
        if first and process_hooks:  # mpi4py's own finalizer would also run in forked processes, and wait there forever
            rc.finalize = False
        # By name: static importers see a compiled module without a matching platform as missing.
        MPI: Any = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError, OSError) as error:
        raise BackendUnavailable(f"mpi: expected mpi4py and an MPI library ({install('mpi')}), got: {error}") from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    for world in () if first else (MPI.COMM_WORLD, MPI.COMM_SELF):  # mpi4py does so when it is imported
        world.Set_errhandler(MPI.ERRORS_RETURN)
    if finalizes:
        atexit.register(_finalize, os.getpid())
    return MPI


def check_running(MPI: Any) -> None:
    """Raise RendezvousError after MPI_Finalize: MPI ends the job at most later calls."""
    if MPI.Is_finalized():
        raise RendezvousError("mpi: expected MPI to run, got kos.init after MPI.Finalize")


def _check_world(MPI: Any) -> None:
    """Raise RendezvousError if the launcher started more ranks than MPI sees: each would be a group of one."""
    for rank, size in OF_MPI:
        started, by_pmix = os.environ.get(size, ""), rank == "PMIX_RANK"
        if not started.isdecimal() or (by_pmix and rank not in os.environ):
            continue
        if int(started) > MPI.COMM_WORLD.size:
            library = MPI.Get_library_version().split(",")[0].strip()
            wrong = f"{size}: expected {started} ranks in MPI_COMM_WORLD, got {MPI.COMM_WORLD.size}"
            remedy = "start the job with the mpirun of that library"
            if by_pmix:
                remedy += ", with another srun --mpi=, or without MPI (srun --mpi=none, MASTER_ADDR, MASTER_PORT)"
            raise RendezvousError(f"{wrong}: the launcher does not match the MPI library in use ({library}): {remedy}")
        return


def wait_request(request: Any, timeout: float | None, look: Callable[[], None] = lambda: None) -> bool:
    """Poll one MPI request; False when ``timeout`` seconds (None: no limit) pass first.

    Meanwhile ``look`` is called, which may raise.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    if not (done := bool(wait(request.Test, deadline, look, Backoff()))):
        keep_unfinished(request)
    return done


def failed_ranks(comm: Any) -> list[int]:
    """The ranks of ``comm`` that MPI knows to have failed; empty unless the job is fault-tolerant."""
    if not fault_tolerant():
        return []
    failed = comm.Get_failed()
    return list(failed.Translate_ranks(range(failed.size), comm.Get_group()))


def record_loss() -> None:
    """Record the death of a rank.  If the job continues, this process will not call MPI_Finalize nor wait at exit.

    In Open MPI 5.0.11 MPI_Finalize sometimes waits for dead ranks, and ranks with a nonzero exit code are not reported.
    """
    global _loss
    _loss = True


def keep_unfinished(request: Any) -> None:
    """Hold a cancelled request, and with it the memory that MPI may still use.  Any thread may call it.

    It is None if a signal's handler ended a poll that had found its message complete.
    """
    if request is None:
        return
    with _keeping:
        _unfinished[:] = [each for each in _unfinished if not is_over(each)]
        _unfinished.append(request)


def free_after_all(comm: Any) -> None:
    """Free a communicator once all of its ranks have called this, perhaps in a later call.  Does not wait.

    Open MPI 5.0.11 delivers a message that arrives after MPI_Comm_free to the next communicator of that number.
    """
    _closing.append((comm, comm.Ibarrier()))
    free_closed()


def free_closed() -> None:
    """Free the communicators that all of their ranks have closed."""
    for _ in range(len(_closing)):
        try:
            comm, request = _closing.popleft()
        except IndexError:
            return
        if is_over(request):
            comm.Free()
        else:
            _closing.append((comm, request))


def is_over(request: Any) -> bool:
    """Whether MPI no longer uses the request.  After MPI_Finalize, a test would end the job."""
    MPI = load_mpi()
    try:
        return MPI.Is_finalized() or bool(request.Test())
    except MPI.Exception:  # MPI has ended and freed it
        return True


def _finalize(process: int) -> None:
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None or os.getpid() != process or _loss:
        return
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def guard_job() -> None:
    """Make an uncaught exception, an exit after one, and the death of mpirun end the whole job.  Idempotent."""
    global _guarded
    if _guarded:
        return
    _guarded = os.getpid()
    if under_mpirun() and sys.platform == "linux":  # die with mpirun: a rank that only computes would not notice
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    previous, previous_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        usual = partial(previous, kind, value, trace)
        _end_by(value, None if previous is sys.__excepthook__ else usual, usual)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        usual = partial(previous_thread, args)
        if args.exc_value is None or args.exc_type is SystemExit:
            usual()
        else:
            _end_by(args.exc_value, None if previous_thread is threading.__excepthook__ else usual, usual)

    sys.excepthook, threading.excepthook = hook, thread_hook
    atexit.register(_exit_job)


def _end_by(error: BaseException, own: Callable[[], object] | None, usual: Callable[[], object]) -> None:
    """Report an uncaught exception and end the job: one line on each rank that raised, the frames on one of them.

    ``own`` is the program's own hook, if it has one; ``usual`` is the report of a process that is not a rank.
    """
    MPI = load_mpi()
    if os.getpid() != _guarded or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1:
        usual()
        return
    world = MPI.COMM_WORLD
    if isinstance(error, RankLost):
        time.sleep(_EXIT_GRACE + 1)  # the rank that failed ends the job, with its own report and exit code
    line, frames = describe(error)
    sys.stderr.write(f"rank {world.rank}: {line}\n")
    sys.stderr.flush()
    time.sleep(min(world.rank, 8) * TURN_SECONDS)  # the first rank ends the job before others print frames
    if own is not None:
        own()
    else:
        sys.stderr.write(frames)
    _end_job(130 if isinstance(error, KeyboardInterrupt) else 1)


def _end_job(code: int) -> None:
    MPI = load_mpi()
    if os.getpid() != _guarded or MPI.Is_finalized():
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if "OMPI_COMM_WORLD_SIZE" in os.environ and not fault_tolerant():
        os._exit(code)  # mpirun ends the other ranks, with less output than for MPI_Abort
    MPI.COMM_WORLD.Abort(code)


def _exit_job() -> None:
    """Wait for all ranks at exit: MPI_Finalize would wait forever for a missing rank."""
    MPI = load_mpi()
    if os.getpid() != _guarded or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1:
        return
    if _loss and abort_code is None:
        return
    goes_on, world = fault_tolerant(), MPI.COMM_WORLD
    with contextlib.suppress(OSError):  # no file descriptor is left; other ranks then report this rank as missing
        _at_exit.append(arrived(world.rank, "exit"))
    grace = _EXIT_GRACE if goes_on or starting or abort_code is not None else None
    together, began = False, time.monotonic()
    with contextlib.suppress(MPI.Exception):  # a late rank may make other calls, and one may be lost
        if starting is None or wait_request(starting[1], grace):  # MPI matches calls in order
            together = wait_request(world.Ibarrier(), grace)
    if together:
        return
    if goes_on and abort_code is None:
        record_loss()  # MPI_Finalize would wait for dead ranks
    else:
        time.sleep(max(began + (grace or 0.0) - time.monotonic(), 0.0))  # others still report what they have met
        why = "exits" if abort_code is None else "aborted its communicator by an exception"
        late = missing(world.rank, world.size, "exit") or "other ranks"
        time.sleep(min(world.rank, 8) * TURN_SECONDS)  # mpirun of Open MPI 5 may hang if two abort at once
        log.critical("rank %d of %d ends the job: it %s and %s did not end", world.rank, world.size, why, late)
        _end_job(abort_code or 1)
