"""ZeRO-1 with ``--dtype fp8``: the matrices of linear layers are gathered in 8 bits, half the bytes of bfloat16.

A rank's part of a bucket (``kos.train.parallel.data``) may end within a block that has one scale. So ranks first find
the largest magnitudes of all blocks, by one all-reduce of one number per 16,384 weights. Each rank quantizes its own
parts, and buckets are gathered as in 16 bits. The first read of a matrix transposes it. The result has the bits that
``Fp8Weights`` computes after a gather in 16 bits.

Vectors, such as norms, go with the magnitudes. Buckets with other matrices, such as the embedding, are gathered in 16
bits, and in 8 too if they have some of both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from kos.comm.reduction import ReduceOp
from kos.memory.arena import Arena
from kos.train.model.parameters import Parameters, packed
from kos.train.ops import SCALE_BLOCK, Array, Ops, Scaled, scales_shape
from kos.train.ops.fp8 import SCALE, WEIGHTS, Fp8Weights, Quantized
from kos.train.optim import elements, overlap
from kos.train.parallel.data import DataParallel, GatheredWeights


class Piece(NamedTuple):
    """The elements of a matrix in this rank's part of a bucket."""

    name: str
    band: slice  # the rows of its blocks
    part: slice  # the elements, counted from the start of the band
    blocks: slice  # in ``Fp8Gather.largest``


class Fp8Gather:
    """Gathers weights in the ``layout`` that ``parallel`` shards. Passes read the weights ``names`` only in 8 bits.

    ``zeros(size, dtype)`` allocates the memory into which ranks gather. ``store`` has the gathered matrices by name.
    """

    def __init__(
        self, layout: Parameters, names: Collection[str], parallel: DataParallel, ops: Ops,
        zeros: Callable[[int, Any], Array],
    ) -> None:  # fmt: skip
        self.parallel, self.ops, self.store = parallel, ops, dict[str, Quantized]()
        members = {name: layout.groups.get(name, (name,)) for name in names}
        spans = {name: slice(layout.spans[of[0]].start, layout.spans[of[-1]].stop) for name, of in members.items()}
        others = [name for name in layout if name not in {each for of in members.values() for each in of}]
        vectors = [layout.spans[name] for name in others if len(layout.shapes[name]) == 1]
        tables = [layout.spans[name] for name in others if len(layout.shapes[name]) > 1]
        self.in_8, self.in_16 = (
            [bucket for bucket in parallel.buckets if any(overlap(bucket, span) for span in of)]
            for of in (spans.values(), tables)
        )
        self.first = self.in_8[0].start
        self.codes = zeros(self.in_8[-1].stop - self.first, np.dtype(np.uint8))
        self.blocks, self.pieces, count = dict[str, slice](), list[Piece](), 0
        for name, span in spans.items():
            n, f = layout[name].shape
            values = self.codes[span.start - self.first : span.stop - self.first].view(WEIGHTS.dtype).reshape(n, f)
            columns = Scaled(ops.zeros((f, n), WEIGHTS.dtype), self._scales(f, n))
            self.store[name] = Quantized(Scaled(values, self._scales(n, f)), columns, name=name)
            self.blocks[name] = slice(count, count := count + -(-n // SCALE_BLOCK) * -(-f // SCALE_BLOCK))
            parts = filter(None, (overlap(part, span) for part in parallel.own()))
            self.pieces += [self._piece(name, part.start - span.start, part.stop - span.start, n, f) for part in parts]
        self.shared = ops.zeros(count + elements(vectors), np.dtype(np.uint32))
        """The largest magnitude of each block, as the bits of a float; then all vectors."""
        self.of_vectors, places = self.shared[count:].view(SCALE), packed(vectors)
        self.vectors = places, [
            (cut, slice(at.start + cut.start - span.start, at.start + cut.stop - span.start))
            for span, at in places for part in parallel.own() if (cut := overlap(part, span))
        ]  # fmt: skip
        """The places of all vectors in the layout and in ``of_vectors``, and of this rank's parts of them."""

    def _scales(self, n: int, f: int) -> Array:
        return self.ops.zeros(scales_shape(n, f, False, one=self.ops.one_scale), SCALE)

    def _piece(self, name: str, start: int, stop: int, n: int, f: int) -> Piece:
        """The elements from ``start`` to ``stop`` of a matrix (n, f)."""
        band, across = SCALE_BLOCK * f, -(-f // SCALE_BLOCK)
        first, last, blocks = start // band, -(-stop // band), self.blocks[name].start
        rows = slice(first * SCALE_BLOCK, min(n, last * SCALE_BLOCK))
        part = slice(start - first * band, stop - first * band)
        return Piece(name, rows, part, slice(blocks + first * across, blocks + last * across))

    def gather(self, weights: Parameters, arena: Arena) -> Fp8Weights:
        """Start to gather ``weights`` from the parts of all ranks; the first read of a weight waits for it."""
        ops, parallel, shared = self.ops, self.parallel, self.shared
        every, mine = self.vectors
        with ops.step(arena):
            ops.zero(shared)
            for name, band, part, blocks in self.pieces:
                ops.largest_of_part(weights[name][band], part, shared[blocks], arena)
            for source, at in mine:
                ops.copy(weights.flat[source], self.of_vectors[at])
            parallel.replicas.comm.all_reduce(shared, ReduceOp.MAX)
            for out, at in every:
                ops.copy(self.of_vectors[at], weights.flat[out])
            for name, band, part, blocks in self.pieces:
                values, scales = self.store[name].rows  # type: ignore[misc]
                largest = shared[self.blocks[name] if ops.one_scale else blocks]
                ops.quantize_part(weights[name][band], part, largest, Scaled(values[band], scales), arena)
        codes, works = dict[int, Any](), dict[int, Any]()
        for bucket in reversed(parallel.buckets):  # as in ``DataParallel.gather``
            if bucket in self.in_16:
                works[bucket.start] = bucket, parallel.all_gather(bucket, weights.flat[bucket], async_op=True)
            if bucket in self.in_8:
                values = self.codes[bucket.start - self.first : bucket.stop - self.first]
                codes[bucket.start] = bucket, parallel.all_gather(bucket, values, async_op=True)
        return _Gathered(self, GatheredWeights(weights, works), GatheredWeights(weights, codes), arena)

    @property
    def extra_bytes(self) -> int:
        """Bytes held besides the matrices in 8 bits."""
        held = sum(made.rows.values.nbytes for made in self.store.values() if made.rows)
        return int(self.codes.nbytes - held + self.shared.nbytes)


class _Gathered(Fp8Weights):
    """Weights that are being gathered: those in 8 bits wait for ``codes``, the others for ``weights``."""

    def __init__(self, gather: Fp8Gather, weights: GatheredWeights, codes: GatheredWeights, arena: Arena) -> None:
        super().__init__(weights, gather.store, gather.ops, arena)
        self._gather, self._codes = gather, codes

    def _quantize(self, name: str, made: Quantized) -> None:
        self._codes[name]
        assert made.rows is not None and made.columns is not None
        self._ops.quantize_rest(self._gather.shared[self._gather.blocks[name]], made.rows, made.columns)
