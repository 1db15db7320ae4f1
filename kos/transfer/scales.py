"""Matrices of a subscriber in 8 bits, with a scale for each block, as ``weight_scale_inv`` of DeepSeek-V3 and vLLM.

Such a matrix is read as bfloat16 into staging memory.  It is quantized when all ranks have the whole version, on GPUs
by ``quantize_blocks.cu``.  The blocks are those of the subscriber's own matrix, also if that is a part of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.comm.gpu.devices import check_float8
from kos.cuda.kernels import load_kernel
from kos.dtypes import DTYPES
from kos.errors import InvalidArgument
from kos.memory.array import Array
from kos.memory.buffer import as_buffer
from kos.transfer.arguments import check_at_least, check_name, check_shape
from kos.transfer.gpu import Copiers
from kos.transfer.placement import Arrays, Flat, current
from kos.transfer.plan import Array as Described

_KERNEL = Path(__file__).parents[1] / "comm/gpu/kernels/quantize_blocks.cu"
_THREADS, _MOST_BLOCKS = 256, 4096
AT_ONCE = 1 << 20  # elements that are quantized at once on the host
_LARGEST = np.float32(448)  # of float8_e4m3fn


@dataclass(frozen=True, slots=True)
class BlockScales:
    """What a subscriber's array holds: the scales of its float8_e4m3fn matrix ``of``, one for each block.

    A weight is its element of ``of`` times the scale of its block.  The array is float32, and has the shape
    (ceil(rows / block[0]), ceil(columns / block[1])).  With a block of (1, columns), each row has a scale.
    """

    of: str
    block: tuple[int, int] = (128, 128)
    """Rows and columns."""

    def __post_init__(self) -> None:
        check_name("of", self.of)
        if not isinstance(self.block, tuple | list) or len(self.block) != 2:
            raise InvalidArgument(f"block of {self.of}: expected (rows, columns), got {self.block!r:.80}")
        for each in self.block:
            check_at_least(f"block of {self.of}", each, 1)

    def shape(self, matrix: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a matrix of this shape."""
        if len(check_shape(self.of, matrix)) != 2:
            raise InvalidArgument(f"{self.of}: expected the shape of a matrix, such as (4, 4), got {matrix}")
        return tuple(-(-count // each) for count, each in zip(matrix, self.block, strict=True))


class Quantized(NamedTuple):
    """A matrix in 8 bits, and its scales."""

    shape: tuple[int, ...]
    block: tuple[int, int]
    matrix: Any
    scales: Any
    """The matrix and its scales, flattened: ndarrays, or Arrays on a GPU."""

    def write(self, source: Any, copiers: Copiers) -> None:
        """Quantize ``source``, the matrix in bfloat16.  On a GPU, this only queues the kernel."""
        if 0 in self.shape:
            return
        if isinstance(source, Array):
            pointers = self.matrix.pointer, self.scales.pointer, source.pointer
            blocks = min(-(-self.scales.size * 32 // _THREADS), _MOST_BLOCKS)  # a warp quantizes a block
            kernel = load_kernel(_KERNEL, "quantize_blocks", source.device)
            launch = kernel.bind(blocks, _THREADS, *pointers, *self.shape, *self.block)
            copiers[source.device].queue([launch])
        else:
            self._on_host(source.reshape(self.shape), self.matrix.reshape(self.shape))

    def _on_host(self, source: np.ndarray, target: np.ndarray) -> None:
        (rows, columns), (height, width) = self.shape, self.block
        scales, left = self.scales.reshape(-1, -(-columns // width)), range(0, columns, width)
        step = height * max(1, AT_ONCE // (height * max(1, columns)))
        for first in range(0, rows, step):
            part = source[first : first + step].astype(np.float32)
            top = range(0, len(part), height)
            largest = np.fmax.reduceat(np.fmax.reduceat(np.abs(part), left, axis=1), top, axis=0)
            scale = scales[first // height :][: len(top)]
            scale[...] = np.where(largest > 0, largest / _LARGEST, 1)
            with np.errstate(invalid="ignore"):  # infinity / infinity
                part /= np.repeat(np.repeat(scale, height, axis=0)[: len(part)], width, axis=1)[:, :columns]
            target[first : first + step] = part


def quantized(arrays: Arrays, flat: dict[str, Flat], layout: dict[str, Described]) -> dict[str, Quantized]:
    """The matrices of ``arrays`` that have scales, by name.  ``layout`` gets the dtype in which they are read
    (bfloat16).

    Raises InvalidArgument if scales belong to no 8-bit matrix, if their shape, dtype or device is wrong, or if the GPU
    has no 8-bit floats.
    """
    found = dict[str, Quantized]()
    for name, (array, placed) in arrays.items():
        if not isinstance(placed, BlockScales):
            continue
        of = layout.get(placed.of)
        if of is None or placed.of in found or of.dtype.name != "float8_e4m3fn" or len(of.placement.shape) != 2:
            got = "but no array has this name" if of is None else f"which is {of.dtype} of shape {of.placement.shape}"
            got = "which has scales already" if placed.of in found else got
            expected = "expected the scales of a float8_e4m3fn matrix"
            raise InvalidArgument(f"{name}: {expected}, got those of {placed.of}, {got}")
        shape, matrix, buffer = placed.shape(of.placement.shape), flat[placed.of], as_buffer(current(array), name, True)
        device = matrix.device if isinstance(matrix, Array) else None
        if (buffer.shape, buffer.dtype.name, buffer.device) != (shape, "float32", device):
            got = f"{buffer.dtype} of shape {buffer.shape} on {buffer.place}"
            expected = f"float32 of shape {shape} on {'the host' if device is None else f'cuda:{device}'}"
            raise InvalidArgument(f"{name}: expected {expected}, as {placed.of} needs, got {got}")
        if device is not None:
            check_float8(placed.of, of.dtype, device)
        found[placed.of] = Quantized(of.placement.shape, placed.block, matrix, flat[name])
        layout[placed.of] = of._replace(dtype=DTYPES["bfloat16"])
    return found
