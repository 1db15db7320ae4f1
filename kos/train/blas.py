"""Which kernels OpenBLAS uses. To be decided before NumPy is first imported."""

from __future__ import annotations

import os
import platform
from pathlib import Path

VARIABLE = "OPENBLAS_CORETYPE"
AVX512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"}


def choose_kernels(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Let OpenBLAS use its AVX-512 kernels where it would not by itself, unless the user has chosen.

    OpenBLAS 0.3.30 and 0.3.31 take AMD's Zen 4 and 5 for CPUs without AVX-512: matrix products of the default
    model then run at 130 instead of 250 GFLOP/s a core (Zen 5, November 2026).
    """
    if VARIABLE in os.environ or platform.machine() != "x86_64":
        return
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return
    facts = {key.strip(): value for key, _, value in (line.partition(":") for line in lines)}  # the last core's
    if "AuthenticAMD" in facts.get("vendor_id", "") and set(facts.get("flags", "").split()) >= AVX512:
        os.environ[VARIABLE] = "SkylakeX"
