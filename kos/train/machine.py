"""Facts about the machine and the software that a run needs, or records."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy  # noqa: F401 - loads BLAS

from kos.comm.communicator import Communicator
from kos.comm.control.base import machine_id
from kos.cuda.devices import visible_devices
from kos.train.ops import compiled
from kos.train.ops.threads import THREADS

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

THREADS_OF_USER = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")  # the first that is set counts, as for OpenBLAS
DRIVER = Path("/proc/driver/nvidia")  # is there where NVIDIA's kernel driver is

PEAK_FLOPS = {"H200": 989.5e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989.5e12, "A100": 312e12}
"""Dense bf16 flops a second by a part of the GPU's name, the first that fits: NVIDIA's data sheets."""

PACKAGES = (
    "kos", "numpy", "ml_dtypes", "mpi4py", "safetensors", "pydantic", "tokenizers", "cuda-core", "nccl4py",
    "nvidia-cuda-nvrtc", "nvmath-python",
)  # fmt: skip


@lru_cache(maxsize=1)
def thread_pools() -> ThreadpoolController:
    """The thread pools of BLAS. Call this before other threads import modules: the look-up holds the lock of the
    dynamic loader and waits for Python's lock, and an import does the opposite, so the two could deadlock."""
    from threadpoolctl import ThreadpoolController  # here, since the benchmarks of collectives do not need it

    return ThreadpoolController()


def limit_threads(comm: Communicator, threads: int | None = None) -> int:
    """Compute with ``threads`` threads, by default OMP_NUM_THREADS, or this rank's share of the cores that it may use.

    Ranks share the cores that they may all run on, within the quota of their control group; where mpirun has bound
    each to its own, they share nothing. Collective.
    """
    cores = sorted(os.sched_getaffinity(0))
    place = f"{machine_id()} {cores}".encode()
    sharing = comm.all_gather_bytes(place).count(place)
    threads = threads or threads_of_rank(len(cores), sharing)
    thread_pools().limit(limits=1)  # products are split over kos.train.ops.threads
    compiled.use_threads(threads)
    THREADS.count = threads
    return threads


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
    for name in THREADS_OF_USER:
        first = environ.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return None


def threads_of_rank(cores: int, sharing: int, environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """The threads of one of ``sharing`` ranks that share ``cores``: its part of them, or what the user says."""
    return most_threads(environ) or max(1, int(min(cores, cores_of_quota(root))) // sharing)


def peak_flops(gpu: str) -> float | None:
    """The peak to which MFU on this GPU refers; None if it is not known."""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in gpu), None)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes of this host's memory that this process may still take, within every limit of its container.

    What a control group (version 2 or 1) has in use counts, but for files that the kernel would drop.
    """
    available = re.search(r"MemAvailable: *(\d+) kB", (root / "proc/meminfo").read_text())
    free = [int(available[1]) << 10] if available else [sys.maxsize]
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, maximum, used = (
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes") if controllers
            else ("", "memory.max", "memory.current")
        )  # fmt: skip
        inner = Path(path.lstrip("/"))
        for group in (root / "sys/fs/cgroup" / top / each for each in (inner, *inner.parents)):
            with contextlib.suppress(OSError, ValueError):  # the root has no limit, "max" is none
                limit, taken = (int((group / name).read_text()) for name in (maximum, used))
                stat = (group / "memory.stat").read_text() if (group / "memory.stat").exists() else ""
                cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
                free.append(max(0, limit - taken + int(max(cached, key=int, default=0))))
    return min(free)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those ``packages`` that are installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def provenance(comm: Communicator) -> dict[str, Any]:
    """Versions, ranks and git commit, for a run's config.json."""
    return {
        "versions": versions_of(PACKAGES),
        "platform": platform.platform(),
        "blas": [f"{x['internal_api']} {x['version']} {x.get('architecture')}" for x in thread_pools().info()],
        "git_commit": git_commit(),
        "ranks": comm.size,
        "backend": comm.backend_name,
        "gpus": [device.name for device in visible_devices()],
    }


def git_commit() -> str | None:
    """The commit of the checkout that kos runs from, "-dirty" where files differ from it; None where it is none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # where kos is installed inside another project, git would answer for that
        return None
    command = [  # which leaves the index as it is; "describe --dirty" writes it
        "git", "-C", str(root), "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    commit = re.search("^# branch.oid ([0-9a-f]+)$", done.stdout, re.MULTILINE)
    return commit and commit[1] + "-dirty" * bool(re.search("^[^#]", done.stdout, re.MULTILINE))
