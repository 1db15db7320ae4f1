"""Matmuls whose sums are added part by part, in a fixed order."""

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
OVERHEAD = 2048  # bytes: barriers, and padding that aligns the stages
MAX_TOKENS_OF_A_PART = 8192
MAX_OUTPUTS_TO_SPLIT = 1 << 23  # elements


class PartsOps:
    """The matmuls of ``CudaOps`` that are computed in parts. ``CudaOps`` launches their kernels."""

    sequential: bool
    hopper: bool
    multiprocessors: int
    shared_memory: int
    launch: Any
    add_tree: Any
    matmul: Any
    bits_of_parts: Any

    def product_of_parts(
        self, x: Array, weight: Array, out: Array, transposed: bool, parts: Sequence[Sequence[slice]], arena: Arena
    ) -> bool:
        """``Ops.product_of_parts`` on Hopper, for parts whose sizes are multiples of 64.

        The kernel is ``kernels/linear_parts_hopper.cu``.
        """
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

    def linear_weight_gradient(
        self, d_out: Array, x: Array, d_weight: Array, accumulate: bool, arena: Arena, outputs: int | None = None
    ) -> None:
        """``Ops.linear_weight_gradient``. If the sum over tokens is split, its parts are added as a binary tree."""
        parts = 1 if outputs is None or accumulate else self.parts_of_tokens(len(x), x.dtype, outputs)
        if parts == 1:
            self.matmul(d_out, x, d_weight, transpose_a=True, c=d_weight if accumulate else None)
            return
        rows = len(x) // parts
        with arena.scope():
            terms = arena.take((parts, *d_weight.shape), FLOAT32)
            if type(d_out) is type(x) is Array:
                self.matmul(*(each.reshape(parts, rows, -1) for each in (d_out, x)), terms, transpose_a=True)
            else:  # columns of a matrix, whose rows do not follow one another in memory
                for part, n in enumerate(slice(at, at + rows) for at in range(0, len(x), rows)):
                    self.matmul(d_out[n], x[n], terms[part], transpose_a=True)
            self.add_tree(terms, d_weight)

    def parts_of_tokens(self, tokens: int, dtype: Any, outputs: int) -> int:
        """The number of parts into which a weight gradient's sum over tokens is split.

        The number is the smallest power of two for which a part has at most ``MAX_TOKENS_OF_A_PART`` tokens. The sum
        is not split, and the number is 1, if that power of two does not divide ``tokens``, if there are more than
        ``MAX_OUTPUTS_TO_SPLIT`` outputs, or if ``bits_of_parts`` is false.

        ``Matmul`` with ``sequential`` never splits a sum itself. If there are many tokens and few outputs, the
        algorithms that cuBLASLt chooses without splitting leave most of the GPU idle. On an H200, with 32,768 tokens
        and up to a million outputs, they take 8 to 30 times as long as with a sum that is split.
        """
        parts = 1 << max(0, -(-tokens // MAX_TOKENS_OF_A_PART) - 1).bit_length()
        return 1 if tokens % parts or outputs > MAX_OUTPUTS_TO_SPLIT or not self.bits_of_parts(dtype) else parts
