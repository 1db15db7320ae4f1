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


def quantize(
    ops: Any, x: Array | None, gate_up: Array | None, rows: Array | None, columns: Array | None, scale: Array,
    arena: Arena,
) -> None:  # fmt: skip
    """``Ops.quantize`` of ``x``, ``quantize_swiglu`` of ``gate_up``, or of both ``quantize_swiglu_backward``."""
    n, f = gate_up.shape if x is None else x.shape  # type: ignore[union-attr]
    f = f if x is not None else f // 2
    for given in (x, gate_up):
        if given is not None and (n % MULTIPLE or f % MULTIPLE or given.dtype.name != "bfloat16"):
            raise InvalidArgument(
                f"quantize: expected bfloat16 of sizes that are multiples of {MULTIPLE}, got {given}"
            )
    packs = n * f // PACK
    assert packs < 1 << 31
    blocks = max(1, min(2 * ops.multiprocessors, -(-packs // BLOCK)))
    form = next(made.dtype.name for made in (rows, columns) if made is not None)
    defines = {
        "SOURCE": 0 if gate_up is None else 1 if x is None else 2, "E5M2": int(form == "float8_e5m2"),
        "ROWS": int(rows is not None), "COLUMNS": int(columns is not None),
    }  # fmt: skip
    sources, made = ([0 if each is None else each for each in pair] for pair in ((x, gate_up), (rows, columns)))
    with arena.scope():
        partial = arena.take((blocks,), UINT32)
        ops.launch("fp8.cu", "largest", blocks, BLOCK, *sources, partial, packs, f, **defines)
        grid = -(-f // TILE_COLUMNS), -(-n // TILE_ROWS)
        ops.launch("fp8.cu", "quantize", grid, BLOCK, *sources, *made, scale, partial, blocks, n, f, **defines)


def scaled_product(
    ops: Any, a: Array, scale_a: Array, b: Array, scale_b: Array, out: Array, residual: Array | None,
    bias: Array | None,
) -> None:  # fmt: skip
    """``Ops.scaled_product``."""
    ops.matmul(a, b, out, transpose_b=True, c=residual, bias=bias, scales=(scale_a, scale_b), fast=FAST)
