"""Muon for the hidden matrices of a model, AdamW for all else.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (kellerjordan.github.io/posts/muon), with
the conventions of ``torch.optim.Muon``: ``m = mu m + (1 - mu) g``, and by Nesterov ``u = (1 - mu) g + mu m``. Five
Newton-Schulz steps bring the singular values of u near 1 (``Ops.orthogonalize``). What is subtracted is that times
``0.2 sqrt(max(rows, columns))`` and the learning rate: so its root mean square is about AdamW's, and one learning rate
and weight decay fit both (Liu et al. 2025, arXiv:2502.16982).

A matrix is held whole by one rank of ZeRO-1. Ranks of tp gather their shards of u, and orthogonalise the same matrix.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kos.errors import InvalidArgument
from kos.memory.arena import ALIGNMENT
from kos.memory.sharded import Sharded
from kos.train.ops.parameters import FlatTensors, OwnedSlices, Parameters
from kos.train.optim import MatrixRule, Optimizer

PARTIAL = 256  # bytes: of the sums of a norm
STACKED = 3  # matrices in one tensor of q, k and v


class Matrix(NamedTuple):
    """A matrix, or this rank's tensor-parallel part of it."""

    name: str
    shape: tuple[int, int]
    """Of the whole matrix."""

    own: tuple[slice, slice]
    """The rows and columns of this rank's part."""

    span: slice
    """Where the part lies in the layout."""

    offset: int
    """Elements of its tensor before it."""

    copies: int
    """How many neighbours of tp hold the same part."""

    @property
    def part(self) -> tuple[int, int]:
        """The shape of this rank's part."""
        rows, columns = (each.stop - each.start for each in self.own)
        return rows, columns

    @property
    def factor(self) -> float:
        """What multiplies the learning rate."""
        return 0.2 * math.sqrt(max(self.shape))


@dataclass
class Muon(MatrixRule):
    """``placements``: those of its matrices, by name.

    Names that end with ``stacked`` are of three matrices, one below another.
    """

    placements: Mapping[str, Sharded]
    stacked: tuple[str, ...] = ()
    momentum: float = 0.95

    options: ClassVar[tuple[str, ...]] = ("momentum", "muon_lr")
    kernel: ClassVar[str] = "muon"
    about: ClassVar[str] = "Muon's momentum"
    state: ClassVar[Mapping[str, str]] = MappingProxyType({"momentum": "float32"})

    def matrices(self, momentum: FlatTensors) -> Iterator[Matrix]:
        """Those that this rank updates: it holds their ``momentum``."""
        for name, placement in self.placements.items():
            count = STACKED if name.endswith(self.stacked) else 1
            (rows, columns), split, size = placement.box, placement.along("tp"), placement.size // count
            own = slice(rows.start, rows.start + (rows.stop - rows.start) // count), columns
            shape, copies = (placement.shape[0] // count, placement.shape[1]), 1 if split is None else split.copies
            for offset in range(0, count * size, size):
                start = momentum.spans[name].start + offset
                if place(momentum, span := slice(start, start + size)) is not None:
                    yield Matrix(name, shape, own, span, offset, copies)

    def batches(self, momentum: OwnedSlices, most: int) -> Iterator[list[Matrix]]:
        found = defaultdict[Any, list[Matrix]](list)
        for matrix in self.matrices(momentum):
            found[matrix.shape, matrix.part].append(matrix)
        for (shape, _), alike in found.items():
            count = max(1, most // math.prod(shape))
            yield from (alike[start : start + count] for start in range(0, len(alike), count))

    def update_matrices(self, optimizer: Optimizer, gradients: Parameters, lr_scale: float, decay: float) -> None:
        most = 0 if optimizer.exact else optimizer.ops.matrix_batch  # the number of matrices may change bits
        for matrices in self.batches(optimizer.state["momentum"], most):
            with optimizer.arena.scope(), np.errstate(all="ignore"):
                self._update(optimizer, gradients, matrices, lr_scale, decay)

    def _update(
        self, optimizer: Optimizer, gradients: Parameters, matrices: Sequence[Matrix], lr_scale: float, decay: float
    ) -> None:
        weights, copy, tp, arena = optimizer.weights, optimizer.copy, optimizer.tp, optimizer.arena
        count, (shape, part), size = len(matrices), (matrices[0].shape, matrices[0].part), math.prod(matrices[0].part)
        momentum, dtype = optimizer.state["momentum"], (copy or weights).flat.dtype

        def launch(name: str, threads: int, *arguments: Any) -> None:
            grid = max(1, min(-(-threads // 256), 16 * optimizer.ops.multiprocessors))
            macros = optimizer.macros(gradients.flat)
            optimizer.ops.launch(f"{self.kernel}.cu", name, grid, 256, *arguments, DTYPE=dtype.name, **macros)

        u = x = arena.take((count, *part), dtype)
        for each, matrix in enumerate(matrices):
            g, m = gradients.flat[matrix.span], momentum.flat[place(momentum, matrix.span)]
            launch("muon_momentum", size // 4, g, m, u[each], size, optimizer.scalars, self.momentum)
        if part != shape:
            parts, x = arena.take((tp.size, count, *part), dtype), arena.take((count, *shape), dtype)
            tp.comm.all_gather(u, parts)
            copies = matrices[0].copies
            launch("arrange", x.size, parts, x, count, tp.size // copies, copies, *part, int(part[1] == shape[1]))
        optimizer.ops.orthogonalize(x, arena)
        for each, matrix in enumerate(matrices):
            w = weights.flat[place(weights, matrix.span)]
            first = matrix.own[0].start * shape[1] + matrix.own[1].start
            launch(
                "muon_update", size // 4, w, x[each].reshape(-1)[first:], w if copy is None else copy.flat[matrix.span],
                size, part[1], shape[1], optimizer.scalars, float(lr_scale), float(decay), matrix.factor,
                optimizer.seed, optimizer.places[matrix.name] + matrix.offset,
            )  # fmt: skip

    def scratch_bytes(self, momentum: OwnedSlices, itemsize: int, most: int) -> int:
        sizes = [0]
        for matrices in self.batches(momentum, most):
            (rows, columns), part = matrices[0].shape, math.prod(matrices[0].part)
            gathered = (1 + matrices[0].copies) * rows * columns * (part < rows * columns)
            elements = part + gathered + rows * columns + 2 * min(rows, columns) ** 2
            sizes.append(len(matrices) * (elements * itemsize + PARTIAL) + 8 * ALIGNMENT)
        return max(sizes)


def place(held: FlatTensors, span: slice) -> slice | None:
    """Where a span of the layout lies in ``held.flat``; None: elsewhere. InvalidArgument if only a part of it does."""
    for start, stop, at in held.held(span):
        if (start, stop) != (span.start, span.stop):
            raise InvalidArgument(f"Muon: expected whole matrices, got {slice(start, stop)} of {span}")
        return slice(at, at + stop - start)
    return None
