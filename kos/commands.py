"""The commands that kos prints for the user to paste in the same folder: this Python, its pip and its mpirun."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

_VERSION_SECONDS = 10.0
AS_ROOT = "--allow-run-as-root"
ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""Open MPI's mpirun refuses to run as root without that flag or these two variables."""


typed = ""
"""The command that ``python -m kos`` runs, as the user typed it: ``kos doctor``."""


def program(module: str) -> str:
    """The command that runs ``module``, for its usage and errors: ``kos doctor`` or ``python -m kos.doctor``."""
    return typed or f"python -m {module}"


def near(path: str | Path) -> str:
    """A path as a user would type it: relative if it lies within the current folder."""
    try:
        typed = os.path.relpath(path)
    except (OSError, ValueError):  # the current folder is gone; the path is empty
        return str(path)
    if typed.startswith(".."):
        return str(path)
    return typed if os.sep in typed or os.path.isdir(typed) else os.path.join(".", typed)  # else looked up on PATH


def python() -> str:
    """This Python."""
    return near(sys.executable) if sys.executable else "python"


def pip_install(*words: str, here: bool = True) -> str:
    """A command that installs packages for this Python.  The ``pip`` on the PATH may be that of another Python.

    ``here``: the user types it in the current folder.
    """
    return shlex.join([python() if here else sys.executable or "python", "-m", "pip", "install", *words])


def mpirun(ranks: int) -> list[str]:
    """The words that start ``ranks`` ranks: the mpirun beside this Python, else that on the PATH.

    For root they always have the flag: ``ROOT`` may be set for this process alone, as by ``make train``.
    """
    launcher = find_mpirun()
    if launcher is None:
        return ["mpirun", "-n", str(ranks)]
    program = near(launcher) if Path(launcher).parent == Path(sys.executable).parent else "mpirun"
    return [program, *[AS_ROOT] * _is_root_of_open_mpi(launcher), "-n", str(ranks)]


def refuses_root(launcher: str) -> bool:
    """Whether this mpirun refuses to start: it is Open MPI's, the user is root, and ``ROOT`` is not set."""
    return _is_root_of_open_mpi(launcher) and not all(os.environ.get(name) == "1" for name in ROOT)


def _is_root_of_open_mpi(launcher: str) -> bool:
    return os.geteuid() == 0 and mpi_of(launcher) == "Open MPI"


def find_mpirun() -> str | None:
    """The path of the mpirun beside this Python, else of the one on the PATH."""
    import shutil  # imported here and below: at the top, every program that imports kos would load it

    beside = Path(sys.executable).with_name("mpirun") if sys.executable else None
    return str(beside) if beside is not None and beside.exists() else shutil.which("mpirun")


def mpi_of(launcher: str) -> str:
    """The MPI library of this mpirun: ``Open MPI``, ``Intel``, ``MPICH``, or an empty text if unknown."""
    import subprocess

    try:
        done = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    named = next((name for name in ("Open MPI", "Intel") if name in done.stdout), "")
    return named or ("MPICH" if "HYDRA" in done.stdout else "")
