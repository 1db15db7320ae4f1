"""Matmuls whose sums are added part by part, in a fixed order (``kernels/linear_parts_hopper.cu``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kos.memory.array import Array
from kos.train.ops.cuda.attention import Tokens

TILE, THREADS, MEMBERS = 128, 384, 3  # rows and columns of a tile, threads of a block, the most members of a part
STAGE = 4 * 64 * TILE  # bytes
OVERHEAD = 2048  # bytes: barriers, and what aligns the stages


class PartsOps:
    """The matmuls of ``CudaOps`` in parts, which launches their kernels."""

    sequential: bool
    hopper: bool
    multiprocessors: int
    shared_memory: int
    launch: Any

    def product_of_parts(
        self, x: Array, weight: Array, out: Array, transposed: bool, parts: Sequence[Sequence[slice]]
    ) -> bool:
        """``Ops.product_of_parts``, where the output has at least a tile for each multiprocessor."""
        (m, n), of_first = out.shape, parts[0]
        sizes = [each.stop - each.start for each in of_first]
        takes = self.hopper and self.sequential and len(of_first) <= MEMBERS and len(parts) in (1, 2, 4, 8)
        takes = takes and all(type(each) is Array and each.dtype.name == "bfloat16" for each in (x, weight))
        if not takes or any(each % 64 for each in sizes) or (x.shape[1] | weight.shape[1] | n) % 8:
            return False
        if any(each.pointer % 16 for each in (x, weight, out)):
            return False
        tiles = -(-m // TILE) * -(-n // TILE)
        if tiles < self.multiprocessors:
            return False
        narrow = out.dtype.name == "bfloat16"
        fixed = OVERHEAD + 2 * TILE * TILE * narrow + 4 * TILE * TILE * (len(parts) >= 4)
        stages = (self.shared_memory - fixed) // STAGE
        maps = [Tokens(each, 1, len(each)) for each in (x, weight, out if narrow else x)]
        spans = [(each.start, size) for each, size in zip(of_first, sizes, strict=True)]
        spans += [(0, 0)] * (MEMBERS - len(spans))
        self.launch(
            "linear_parts_hopper.cu", "linear_parts", min(tiles, self.multiprocessors), THREADS, *maps, out, m, n,
            *(number for span in spans for number in span), shared=fixed + stages * STAGE,
            PARTS=len(parts), STAGES=stages, B_ROWS=int(transposed), OUT=out.dtype.name,
        )  # fmt: skip
        return True
