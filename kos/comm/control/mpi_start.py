"""Starts MPI within a timeout, which MPI_Init does not have: it returns once all ranks of the job have called it.

Called through ctypes, MPI_Init does not hold Python's lock, so a thread can watch it.  Nothing makes MPI_Init return.
At the timeout that thread reports the missing ranks and ends the process with ``EXIT_CODE``.  Ranks that have come are
known to the others of their host by an abstract Unix socket, which ends with the process.  Their exit handlers use
another one (``arrived``).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import socket
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from kos.comm import timeouts
from kos.comm.control.identity import job
from kos.errors import RendezvousError, describe, ranks_in_words
from kos.launcher import launched_place

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
