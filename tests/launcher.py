"""mpirun as tests find it, and an environment that knows nothing of a job that the tests themselves are run by."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kos import cuda
from kos.bench.report import NOTED
from kos.comm.gpu.nccl_binding import ranks_may_share_a_gpu
from tests.forked import PATHS, remove_session
from tests.run import NEVER_STARTED

_FOUND = shutil.which(
    os.environ.get("MPIRUN") or "mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
)
MPIRUN = os.path.abspath(_FOUND) if _FOUND else ""
needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="mpirun was not found beside Python or in PATH")
_INSIDE = ("PMIX_", "PMI_", "OMPI_COMM_", "PYTEST_XDIST_", *NOTED)
OUTSIDE = {k: v for k, v in os.environ.items() if not k.startswith(_INSIDE)}
OUTSIDE |= {"LC_ALL": "C.UTF-8", "PYTHONPATH": PATHS, "PYTHONUNBUFFERED": ""}
"""The environment of a program of its own: neither a rank nor a worker of pytest-xdist, whose language is English.

The program finds the packages that this process finds.  Its lines are not written in parts, between which mpirun of
Open MPI 4 may print those of other ranks.
"""
SECONDS = 200  # of any program here: much more than it needs, less than what pytest gives a test


@cache
def nccl_ranks() -> int:
    """The most ranks that can use nccl here."""
    return 8 if ranks_may_share_a_gpu() else len(cuda.visible_devices())


@cache
def open_mpi() -> int:
    """The major version of Open MPI.  0 if there is no mpirun, or it belongs to another MPI."""
    version = run_program(MPIRUN, "--version").stdout if MPIRUN else ""
    found = re.match(r"\S+ \(Open MPI\) (\d+)", version)
    return int(found[1]) if found else 0


def run_program(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run`` does.  If mpirun never started the job, it is tried again.

    The environment is ``OUTSIDE`` unless ``env`` is given.
    """
    options.setdefault("env", OUTSIDE)
    if options.pop("capture_output", True):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for _ in range(3):
        with subprocess.Popen(command, text=True, start_new_session=True, **options) as process:
            try:
                output = process.communicate(timeout=SECONDS)
            finally:
                _kill(process)
        done = subprocess.CompletedProcess(command, process.returncode, *output)
        if done.returncode != NEVER_STARTED:
            break
    return done


@contextlib.contextmanager
def running_program(
    reached: Callable[[str], bool], *command: str | Path, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a program and yield it once it prints a line for which ``reached`` is true; kill it at the end.

    The program is also killed after ``SECONDS``. A job that mpirun never started is started again. If the program ends
    before that line, AssertionError is raised with its output, standard error included.  The environment is as of
    ``run_program``.
    """
    options.setdefault("env", OUTSIDE)
    for _ in range(3):
        printed = []
        with subprocess.Popen(
            [*map(str, command)], text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            **options,
        ) as process:  # fmt: skip
            watch = threading.Timer(SECONDS, _kill, (process,))
            watch.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    printed.append(line)
                    if reached(line):
                        yield process
                        return
                process.wait()
            finally:
                watch.cancel()
                _kill(process)
        if process.returncode != NEVER_STARTED:
            break
    raise AssertionError(f"the program ended early with exit code {process.returncode}:\n{''.join(printed)}")


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    remove_session(process.pid)


def skip_without_semaphores() -> None:
    """Skip a test with a pool of multiprocessing where POSIX semaphores, files of /dev/shm, cannot be made."""
    try:
        multiprocessing.get_context("spawn").Lock()
    except OSError as error:
        pytest.skip(f"multiprocessing makes no semaphore: {error}")
