"""Matrices in 8 bits on a GPU: quantized by kernels (``kernels/fp8.cu``), multiplied by cuBLASLt.

Scales are in device memory, where kernels write them and cuBLASLt reads them: the host waits for nothing, and a step
can be captured. Needs compute capability 8.9.
"""

from __future__ import annotations

import logging
from typing import Any

from kos.cuda.devices import DeviceInfo
from kos.dtypes import DTYPES
from kos.errors import ConfigError, InvalidArgument
from kos.memory.arena import Arena
from kos.memory.array import Array

log = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 9)
TRIED = ((9, 0),)
MULTIPLE = 16
FAST = False  # whether tensor cores add up with fewer bits (Matmul's ``fast``)
BLOCK, PACK, TILE_ROWS, TILE_COLUMNS = 256, 8, 128, 64  # of fp8.cu
UINT32 = DTYPES["uint32"]


def check_gpu(about: DeviceInfo) -> None:
    """ConfigError if a GPU has no products in 8 bits; a warning where kos has not tried them."""
    got, least = (".".join(map(str, each)) for each in (about.compute_capability, LEAST_CAPABILITY))
    if about.compute_capability < LEAST_CAPABILITY:
        expected = f"a GPU of compute capability {least} or more"
        raise ConfigError(f"--dtype fp8: expected {expected}, got {got} ({about.name})")
    if about.compute_capability not in TRIED:
        log.warning("--dtype fp8 has not been tried on GPUs of compute capability %s (%s)", got, about.name)


def quantize(ops: Any, x: Array, rows: Array | None, columns: Array | None, scale: Array, arena: Arena) -> None:
    """``Ops.quantize``."""
    n, f = x.shape
    if n % MULTIPLE or f % MULTIPLE or x.dtype.name != "bfloat16":
        raise InvalidArgument(f"quantize: expected bfloat16 of sizes that are multiples of {MULTIPLE}, got {x}")
    packs = x.size // PACK
    blocks = max(1, min(2 * ops.multiprocessors, -(-packs // BLOCK)))
    form = next(x.dtype.name for x in (rows, columns) if x is not None)
    defines = {"E5M2": int(form == "float8_e5m2"), "ROWS": int(rows is not None), "COLUMNS": int(columns is not None)}
    with arena.scope():
        partial = arena.take((blocks,), UINT32)
        ops.launch("fp8.cu", "largest", blocks, BLOCK, x, partial, packs, **defines)
        ops.launch(
            "fp8.cu", "quantize", (-(-f // TILE_COLUMNS), -(-n // TILE_ROWS)), BLOCK, x,
            0 if rows is None else rows, 0 if columns is None else columns, scale, partial, blocks, n, f, **defines,
        )  # fmt: skip


def scaled_product(
    ops: Any, a: Array, scale_a: Array, b: Array, scale_b: Array, out: Array, residual: Array | None,
    bias: Array | None,
) -> None:  # fmt: skip
    """``Ops.scaled_product``."""
    ops.matmul(a, b, out, transpose_b=True, c=residual, bias=bias, scales=(scale_a, scale_b), fast=FAST)
