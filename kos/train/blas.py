"""What NumPy's BLAS is told: how long its threads spin, and how many of them a process has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"
SPIN = 17
"""OpenBLAS's threads that have no work spin for two to this power cycles, about 50 µs, and then sleep. Its own value
is 26, which is 26 ms of a core that another process could use."""
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")  # the first that is set counts, as for OpenBLAS


def prepare() -> None:
    """Set what OpenBLAS reads when NumPy loads it, unless the user set it. Has no effect if NumPy is loaded."""
    os.environ.setdefault(TIMEOUT, str(SPIN))


def cores_of_quota(root: Path = Path("/")) -> float:
    """The processors' time that control groups (version 2 or 1) leave this process; inf if they have no limit."""
    cores, groups = float("inf"), root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = Path(path.lstrip("/"))
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        for group in (top / each for each in (inner, *inner.parents)):
            try:
                names = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]
                quota, period = " ".join((group / name).read_text() for name in names).split()
                if int(quota) > 0:
                    cores = min(cores, int(quota) / int(period))
            except (OSError, ValueError):  # the root has no limit, "max" is none
                continue
    return cores


def most_threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many threads the user allows a process; None: no variable says it."""
    for name in THREADS:
        first = environ.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return None


def threads_of_rank(cores: int, sharing: int, environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """The threads of one of ``sharing`` ranks that share ``cores``: its part of them, or what the user says."""
    return most_threads(environ) or max(1, int(min(cores, cores_of_quota(root))) // sharing)
