"""The commands that kos prints for the user to paste in the same folder: this Python, its pip and its mpirun."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

_VERSION_SECONDS = 10.0
AS_ROOT = "--allow-run-as-root"
OVERSUBSCRIBE = ("--map-by", ":OVERSUBSCRIBE")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
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


def python_code(code: str, *arguments: str | Path) -> str:
    """A command that runs ``code``, which has no double quotes; ``arguments``, of any characters, are in sys.argv."""
    return f'{shlex.quote(python())} -c "{code}" {shlex.join(map(str, arguments))}'


def pip_install(*words: str, here: bool = True) -> str:
    """A command that installs packages for this Python.  The ``pip`` on the PATH may be that of another Python.

    An environment that uv made has no pip, so the command is uv's.  ``here``: the user types it in the current folder.
    """
    this = python() if here else sys.executable or "python"
    installer = ["uv", "pip", "install", "--python", this] if _made_by_uv() else [this, "-m", "pip", "install"]
    return shlex.join([*installer, *words])


def _made_by_uv() -> bool:
    """Whether uv made the virtual environment of this Python."""
    try:
        settings = (Path(sys.executable).parent.parent / "pyvenv.cfg").read_text(errors="replace")
    except OSError:  # no virtual environment
        return False
    return any(line.startswith("uv =") for line in settings.splitlines())


def mpirun(ranks: int, here: bool = True) -> list[str]:
    """The words that start ``ranks`` ranks: the mpirun beside this Python, else that on the PATH.

    If an mpirun has started this process, the words contain its options. They always contain Open MPI's flag for root,
    and, if the ranks run on this host (``here``), that for more ranks than cores: the environment may allow these for
    this process alone, as that of ``make train`` does.
    """
    launcher = find_mpirun()
    options = _options_of_mpirun() or ["-n", str(ranks)]
    if launcher is None:
        return ["mpirun", *options]
    program = near(launcher) if Path(launcher).parent == Path(sys.executable).parent else "mpirun"
    if mpi_of(launcher) == "Open MPI":
        ranks_here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", ranks))
        if here and ranks_here > _cores() and not {"--map-by", "--oversubscribe"} & {*options}:
            options = [*OVERSUBSCRIBE, *options]
        if os.geteuid() == 0 and AS_ROOT not in options:
            options = [AS_ROOT, *options]
    return [program, *options]


def several_programs() -> bool:
    """Whether the mpirun that is this process's parent has started several programs (MPMD)."""
    return ":" in _mpirun_command()


def _mpirun_command() -> list[str]:
    """The command of the mpirun that is this process's parent, as the user typed it; empty if there is none."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
    except (OSError, ValueError):
        return []
    return words if words and Path(words[0]).name in ("mpirun", "mpiexec", "orterun", "prterun") else []


def _options_of_mpirun() -> list[str]:
    """The options of the mpirun that is this process's parent; empty if there is none, or for several programs."""
    words = _mpirun_command()
    for own in (sys.orig_argv, sys.orig_argv[1:]):  # of a script: the first word is its Python
        at = len(words) - len(own)
        if at > 0 and Path(words[at]).name == Path(own[0]).name and words[at + 1 :] == own[1:]:
            return [] if ":" in words[:at] else words[1:at]
    return []


def _cores() -> int:
    """The number of cores that Open MPI counts: those of mpirun, which may have bound this process to one of them."""
    pid = os.getppid() if "OMPI_COMM_WORLD_LOCAL_SIZE" in os.environ else 0
    allowed = os.sched_getaffinity(pid)
    try:
        return len({Path(SIBLINGS.format(cpu)).read_text() for cpu in allowed})
    except OSError:
        return len(allowed)


def refuses_root(launcher: str) -> bool:
    """Whether this mpirun refuses to start: it is Open MPI's, the user is root, and ``ROOT`` is not set."""
    allowed = os.geteuid() != 0 or all(os.environ.get(name) == "1" for name in ROOT)
    return not allowed and mpi_of(launcher) == "Open MPI"


def find_mpirun() -> str | None:
    """The path of the mpirun beside this Python, else of the one on the PATH."""
    import shutil  # imported here and below: at the top, every program that imports kos would load it

    beside = Path(sys.executable).with_name("mpirun") if sys.executable else None
    return str(beside) if beside is not None and beside.exists() else shutil.which("mpirun")


def mpi_of(launcher: str) -> str:
    """The MPI library of this mpirun: ``Open MPI``, ``Intel``, ``MPICH``, or an empty text if unknown."""
    import subprocess

    try:
        done = subprocess.run([launcher, "--version"], capture_output=True, timeout=_VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    named = next((name for name in ("Open MPI", "Intel") if name.encode() in done.stdout), "")
    return named or ("MPICH" if b"HYDRA" in done.stdout else "")
