"""What NumPy's BLAS is told: its kernels, before NumPy loads it, and how many threads a process gives it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

KERNELS, TIMEOUT = "OPENBLAS_CORETYPE", "OPENBLAS_THREAD_TIMEOUT"
SPIN = 17
"""OpenBLAS's threads that have no work spin for two to this power cycles, about 50 µs, and then sleep. Its own value
is 26, which is 26 ms of a core that another process could use."""
OF_AVX_2 = {"Haswell", "Zen"}
OF_AVX_512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")  # the first that is set counts, as for OpenBLAS


def prepare(root: Path = Path("/")) -> None:
    """Set what OpenBLAS reads when NumPy loads it, unless the user set it. Has no effect if NumPy is loaded.

    OpenBLAS up to 0.3.31 does not know AMD's Zen 5, and takes its kernels for AVX2. Those for AVX-512, which it calls
    SkylakeX, multiply matrices 1.7 times as fast there.
    """
    if "numpy" in sys.modules:
        return
    os.environ.setdefault(TIMEOUT, str(SPIN))
    if has_avx_512_of_amd(root):
        os.environ.setdefault(KERNELS, "SkylakeX")


def has_avx_512_of_amd(root: Path = Path("/")) -> bool:
    try:
        with open(root / "proc/cpuinfo", "rb", buffering=0) as file:
            first = file.read(8192).decode(errors="replace")  # of the first processor: of many, the whole takes long
    except OSError:
        return False
    return "AuthenticAMD" in first and set(first.split()) >= OF_AVX_512


def slow_kernels(pools: Iterable[Mapping[str, Any]], root: Path = Path("/")) -> str | None:
    """What to do if NumPy was loaded before ``prepare``, and multiplies with kernels that are slow on this CPU."""
    slow = any(pool["internal_api"] == "openblas" and pool.get("architecture") in OF_AVX_2 for pool in pools)
    if not slow or KERNELS in os.environ or not has_avx_512_of_amd(root):
        return None
    return f"OpenBLAS uses no AVX-512 on this CPU: import kos.train before numpy, or set {KERNELS}=SkylakeX"


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
