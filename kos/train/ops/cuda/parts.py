"""Matmuls whose sums are added part by part, in a fixed order (``kernels/linear_parts_hopper.cu``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops.cuda.attention import Tokens
from kos.train.ops.cuda.norms import FLOAT32

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
    add_tree: Any

    def product_of_parts(
        self, x: Array, weight: Array, out: Array, transposed: bool, parts: Sequence[Sequence[slice]], arena: Arena
    ) -> bool:
        """``Ops.product_of_parts`` on Hopper, of sizes of parts that are multiples of 64."""
        (m, n), count = out.shape, len(parts)
        sizes = [each.stop - each.start for each in parts[0]]
        if not (self.hopper and self.sequential and len(sizes) <= MEMBERS and count in (1, 2, 4, 8)):
            return False
        if any(type(each) is not Array or each.pointer % 16 or each.shape[1] % 8 for each in (x, weight, out)):
            return False
        if any(each % 64 for each in sizes) or {x.dtype.name, weight.dtype.name} != {"bfloat16"}:
            return False
        tiles = -(-m // TILE) * -(-n // TILE)
        spans = [(each.start, size) for each, size in zip(parts[0], sizes, strict=True)] + [(0, 0)] * MEMBERS

        def launch(terms: Array, at_once: int, apart: int) -> None:
            narrow = terms.dtype.name == "bfloat16"
            fixed = OVERHEAD + 2 * TILE * TILE * narrow + 4 * TILE * TILE * (at_once >= 4)
            stages = (self.shared_memory - fixed) // STAGE
            maps = [Tokens(each, 1, len(each)) for each in (x, weight, terms if narrow else x)]
            self.launch(
                "linear_parts_hopper.cu", "linear_parts", min(apart * tiles, self.multiprocessors), THREADS, *maps,
                terms, m, n, *chain(*spans[:MEMBERS]), shared=fixed + stages * STAGE,
                PARTS=at_once, APART=apart, STAGES=stages, B_ROWS=int(transposed), OUT=terms.dtype.name,
            )  # fmt: skip

        if count == 1 or tiles >= self.multiprocessors:
            launch(out, count, 1)
            return True
        with arena.scope():
            terms = arena.take((count, m, n), FLOAT32)
            launch(terms, 1, count)
            self.add_tree(terms, out)
        return True
