"""Rates of hardware: GPUs by measurements in ``rates.toml``, this machine's CPU by two measurements made now."""

from __future__ import annotations

import os
import re
import timeit
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.errors import ConfigError
from kos.train.machine import DRIVER, PEAK_FLOPS
from kos.train.ops import numpy as numpy_ops

COPIED = 128 << 20  # bytes, more than a cache holds
ROWS = 1024  # of the square matrices of a large product


class Rates(NamedTuple):
    """Rates of the hardware of one rank."""

    name: str
    linear: float  # flops a second of matrix products
    attention: tuple[float, float]  # of its forward and its backward
    memory: float  # bytes a second
    operation: float  # seconds that each takes at least
    wire: float  # bytes a second to another rank
    latency: float  # seconds of a collective, at least
    overlap: bool  # whether collectives overlap with operations
    fp8: float = 0.0  # flops a second of products in 8 bits; 0: it has none


class Gpu(NamedTuple):
    """From a data sheet: bytes per second of memory and, in one direction, of NVLink; also the bytes of free memory."""

    memory: float
    link: float
    free: int
    attention: str  # the family of its kernels

    multiprocessors: int = 132  # these of a Hopper, for ``DryCudaOps``
    shared_memory: int = 227 << 10
    one_scale: bool = False
    device: int = 0
    stream: Any = None

    def family(self, dtype: str, head_dim: int) -> str:
        return self.attention if str(head_dim) in GPU["attention"] else "simple"


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
GPUS = {name: Gpu(**sheet) for name, sheet in _TABLES["gpus"].items()}
GPU, HOST = _TABLES["gpu"], _TABLES["host"]
"""Fractions of the hardware's rates, and seconds."""


def gpu_rates(name: str, head_dim: int) -> Rates:
    """Rates of the first of ``GPUS`` whose name is part of ``name``. ConfigError if there is none."""
    known = next((part for part in GPUS if part in name), None)
    if known is None:
        raise ConfigError(f"--gpu: expected one of {', '.join(GPUS)}, got {name!r}")
    gpu, peak = GPUS[known], PEAK_FLOPS[known]
    forward, backward = GPU["attention"]["128" if head_dim > 64 else "64"]
    fp8 = GPU["fp8"] * peak if gpu.attention == "hopper" else 0.0
    return Rates(
        known, GPU["linear"] * peak, (forward * peak, backward * peak), GPU["memory"] * gpu.memory,
        GPU["operation"], GPU["wire"] * gpu.link, GPU["latency"], True, fp8,
    )  # fmt: skip


def cpu_rates(ranks: int) -> Rates:
    """Rates of each of ``ranks`` ranks that share the cores of this machine. Takes a second."""
    a, b, c = (np.zeros((ROWS, ROWS), np.float32) for _ in range(3))
    source, target = (np.ones(COPIED, np.uint8) for _ in range(2))
    cores = len(os.sched_getaffinity(0))
    flops = 2.0 * ROWS**3 / _fastest(lambda: numpy_ops.linear(a, b, c)) / ranks
    copied = 2 * COPIED / _fastest(lambda: numpy_ops.copy(source, target)) * min(1.0, cores / ranks)  # by one core
    name = f"the CPU, {cores} core{'s' * (cores > 1)}"
    return Rates(
        name, HOST["linear"] * flops, (HOST["attention"] * flops,) * 2, HOST["memory"] * copied,
        HOST["operation"], HOST["wire"] * copied / 2, HOST["latency"], False, HOST["linear"] * flops,
    )  # fmt: skip


def _fastest(function: Callable[[], None]) -> float:
    """The seconds of the fastest of five calls."""
    return min(timeit.repeat(function, number=1, repeat=5))


def gpu_here() -> str | None:
    """The name of this machine's first GPU, without starting CUDA."""
    for path in sorted(DRIVER.glob("gpus/*/information")):
        if name := re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE):
            return name[1]
    return None
