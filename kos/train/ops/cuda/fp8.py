"""Matrices in 8 bits on a GPU: quantized by kernels (``kernels/fp8.cu``), multiplied by cuBLASLt.

Scales are in device memory, where kernels write them and cuBLASLt reads them: the host waits for nothing, and a step
can be captured. Needs compute capability 8.9.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from kos.cuda.devices import DeviceInfo
from kos.dtypes import DTYPES
from kos.errors import InvalidArgument, SettingError
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops import SCALE_BLOCK, Scaled, scales_shape

log = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 9)
TRIED = ((9, 0),)
MULTIPLE = 16
OF_BLOCKS = (9, 0)  # the capability whose products take scales of blocks
THREADS, ONE = 512, 3  # of fp8.cu
UINT32 = DTYPES["uint32"]


def check_gpu(about: DeviceInfo) -> None:
    """ConfigError if a GPU has no products in 8 bits; a warning where kos has not tried them."""
    got, least = (".".join(map(str, each)) for each in (about.compute_capability, LEAST_CAPABILITY))
    if about.compute_capability < LEAST_CAPABILITY:
        expected = f"a GPU of compute capability {least} or more"
        raise SettingError("--dtype fp8", expected, f"{got} ({about.name})")
    if about.compute_capability not in TRIED:
        log.warning("--dtype fp8 has not been tried on GPUs of compute capability %s (%s)", got, about.name)


def quantize(
    ops: Any, x: Array | None, more: Array | None, rows: Scaled | None, columns: Scaled | None, arena: Arena,
    rstd: Array | None = None,
) -> None:  # fmt: skip
    """``Ops.quantize`` of ``x``; with ``more``, gate_up, ``quantize_swiglu``, or of both ``quantize_swiglu_backward``.

    With ``rstd`` of the RMSNorm of ``x``, ``more`` are its weights.
    """
    n, f = more.shape if x is None else x.shape  # type: ignore[union-attr]
    f = f if x is not None else f // 2
    source = 3 if rstd is not None else 0 if more is None else 1 if x is None else 2
    multiple = SCALE_BLOCK if source == 2 else MULTIPLE  # blocks are of gate or of up
    for given in (x, more):
        if given is not None and (n % MULTIPLE or f % multiple or given.dtype.name != "bfloat16"):
            raise InvalidArgument(f"quantize: expected bfloat16 of sizes that are multiples of {multiple}, got {given}")
    part = rows.scales.shape[-1] if rows is not None else 1
    sources = [0 if each is None else each for each in (x, more, rstd)]
    made = [array for each in (rows, columns) for array in (each or (0, 0))]
    launch = partial(_launch, ops, (n, f), rows, columns, {"SOURCE": source})
    tiles = -(-f // SCALE_BLOCK) * -(-n // SCALE_BLOCK)
    with arena.scope():
        largest: Any = 0
        if ONE in map(_scales, (rows, columns)):
            largest = arena.take((tiles,), UINT32)
            launch("largest", *sources, largest, n, f)
        launch("quantize", *sources, *made, largest, tiles, n, f, part)


def _launch(
    ops: Any, shape: Sequence[int], rows: Scaled | None, columns: Scaled | None, macros: dict[str, int], name: str,
    *arguments: Any,
) -> None:  # fmt: skip
    """Queue a kernel of fp8.cu, a thread block for each block of a matrix of ``shape``."""
    forms = [made.values.dtype.name for made in (rows, columns) if made is not None]
    n, f = (-(-size // SCALE_BLOCK) for size in shape)
    ops.launch(
        "fp8.cu", name, (f, n), THREADS, *arguments, E5M2=int("float8_e5m2" in forms), ROWS=_scales(rows),
        COLUMNS=_scales(columns), **macros,
    )  # fmt: skip


def _scales(made: Scaled | None) -> int:
    """-DROWS or -DCOLUMNS of fp8.cu."""
    if made is None:
        return 0
    rows, columns = made.values.shape
    one, second = (1,), scales_shape(rows, columns, first=False)
    return {one: ONE, second: 2}.get(made.scales.shape, 1)
