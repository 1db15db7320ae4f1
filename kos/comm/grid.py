"""Grid: the communicators of the axes of a grid of ranks, and each rank's neighbours in it."""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

import numpy as np

from kos.comm.arguments import check_bool, check_int, check_shape, number_in
from kos.comm.operation import NOBODY
from kos.errors import InvalidArgument

C = TypeVar("C")


class Grid(tuple[C, ...], Generic[C]):
    """The communicators of ``Communicator.grid``, one for each axis, as a tuple.

    ``shape`` are the sizes of the axes.  ``coordinates`` are those of this rank.
    """

    shape: tuple[int, ...]
    coordinates: tuple[int, ...]

    def shift(self, axis: int, by: int = 1, *, periodic: bool = False) -> tuple[int, int]:
        """The ranks ``by`` steps before and after this one along ``axis``: source and destination (MPI_Cart_shift).

        They are ranks of the communicator whose grid this is.  Where the grid ends, ``kos.NOBODY`` stands for a rank,
        unless the axis is ``periodic``.  Then the last rank is before the first one, so on an axis of one rank both are
        this rank, to which it cannot send.  Raises InvalidArgument for an ``axis`` that the grid does not have.

            left, right = grid.shift(0)
            comm.send_recv(row, halo, dst=right, src=left)
        """
        axis, by = number_in("axis", axis, 0, len(self) - 1), check_int("by", by)
        periodic, size = check_bool("periodic", periodic), self.shape[axis]
        ends = [self.coordinates[axis] + step for step in (-by, by)]
        source, destination = (self._rank(axis, end % size if periodic else end) for end in ends)
        return source, destination

    def _rank(self, axis: int, at: int) -> int:
        """The rank whose coordinates are those of this one, except for ``at`` along ``axis``."""
        place = (*self.coordinates[:axis], at, *self.coordinates[axis + 1 :])
        return int(np.ravel_multi_index(place, self.shape)) if 0 <= at < self.shape[axis] else NOBODY


def grid_sizes(shape: Any, ranks: int) -> tuple[int, ...]:
    """The sizes of the axes of a grid of all ranks; a -1 is inferred from the product, ``ranks``."""
    given = tuple(check_int("shape", size) for size in (shape if isinstance(shape, tuple | list) else (shape,)))
    known = math.prod(check_shape([size for size in given if size != -1]))
    if given.count(-1) > 1:
        raise InvalidArgument(f"shape: expected at most one -1, got {given}")
    sizes = tuple(ranks // (known or 1) if size == -1 else size for size in given)
    if math.prod(sizes) != ranks:
        raise InvalidArgument(f"shape: expected a product of {ranks}, the number of ranks, got {given}")
    return sizes
