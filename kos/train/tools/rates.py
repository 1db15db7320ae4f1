"""What hardware does a second: of GPUs by measurements kept with kos, of this machine's CPU by two made now."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import numpy as np

from kos.errors import ConfigError
from kos.train.engine.machine import DRIVER, PEAK_FLOPS
from kos.train.ops import numpy as numpy_ops
from kos.train.tools.profile import COPIED, ROWS_ON_HOST, Marks


class Rates(NamedTuple):
    """Of the hardware of one rank."""

    name: str
    linear: float  # flops a second of matrix products
    attention: tuple[float, float]  # of its forward and its backward
    memory: float  # bytes a second
    operation: float  # seconds that each takes at least
    wire: float  # bytes a second to another rank
    latency: float  # seconds of a collective, at least
    overlap: bool  # whether collectives go on beside operations


class Gpu(NamedTuple):
    """Of a data sheet: bytes a second of memory and, one way, of NVLink; beside it, bytes of memory that are free."""

    memory: float
    link: float
    free: int
    attention: str  # the family of its kernels


GPUS = {
    "H200": Gpu(4.8e12, 450e9, 149_460_000_000, "hopper"),
    "H100": Gpu(3.35e12, 450e9, 84_000_000_000, "hopper"),
    "A100": Gpu(2.04e12, 300e9, 84_000_000_000, "mma"),
}

# Shares of a GPU's data sheet, measured on H200 and taken for the others. Files are those of benchmarks/results.
LINEAR = 0.71  # of its bf16 flops: profile-8b-h200-8.txt, profile-1b-h200-1.txt, profile-124m-h200-1.txt, rows linear
ATTENTION = {64: (0.42, 0.36), 128: (0.58, 0.42)}  # by head size: the same files, rows attention
COPY = 0.85  # of its memory: the same files, "limits"
WIRE = 0.73  # of NVLink: collectives-h200-4.json, all_reduce; tuning-h200-4.json, all_gather and reduce_scatter
OPERATION = 1.5e-6  # train-h200-1.json, 124m of 4 sequences: 600 operations
LATENCY = 10e-6  # collectives-h200-4.json and tuning-h200-4.json, up to 1 MiB

# Shares of what a CPU reaches in a large product and a copy: ``--profile`` of the preset tiny on a core of an EPYC.
ON_HOST = {"linear": 0.75, "attention": 0.17, "memory": 0.15}
HOST_WIRE, HOST_LATENCY = 0.5, 30e-6  # of a copy, which writes and reads: collectives-epyc-2.json, all_reduce
HOST_OPERATION = 5e-6


def gpu_rates(name: str, head_dim: int) -> Rates:
    """Of the first of ``GPUS`` that is part of ``name``. ConfigError where there is none."""
    known = next((part for part in GPUS if part in name), None)
    if known is None:
        raise ConfigError(f"--gpu: expected one of {', '.join(GPUS)}, got {name!r}")
    gpu, peak = GPUS[known], PEAK_FLOPS[known]
    forward, backward = ATTENTION[128 if head_dim > 64 else 64]
    attention = forward * peak, backward * peak
    return Rates(known, LINEAR * peak, attention, COPY * gpu.memory, OPERATION, WIRE * gpu.link, LATENCY, True)


def cpu_rates(ranks: int) -> Rates:
    """Of each of ``ranks`` ranks that share the cores of this machine. Takes a second."""
    fastest = Marks().fastest
    a, b, c = (np.zeros((ROWS_ON_HOST, ROWS_ON_HOST), np.float32) for _ in range(3))
    source, target = (np.ones(COPIED, np.uint8) for _ in range(2))
    cores = len(os.sched_getaffinity(0))
    flops = 2.0 * ROWS_ON_HOST**3 / fastest(numpy_ops.linear, a, b, c) / ranks
    copied = 2 * COPIED / fastest(numpy_ops.copy, source, target) * min(1.0, cores / ranks)  # by one core
    name = f"the CPU, {cores} core{'s' * (cores > 1)}"
    return Rates(
        name, ON_HOST["linear"] * flops, (ON_HOST["attention"] * flops,) * 2, ON_HOST["memory"] * copied,
        HOST_OPERATION, HOST_WIRE * copied / 2, HOST_LATENCY, False,
    )  # fmt: skip


def gpu_here() -> str | None:
    """The name of this machine's first GPU, without starting CUDA."""
    for path in sorted(DRIVER.glob("gpus/*/information")):
        if name := re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE):
            return name[1]
    return None
