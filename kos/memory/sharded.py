"""Where the part of a tensor that a rank holds lies in the whole: a box, cut along named axes of ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

Sizes = tuple[int, ...]


class Split(NamedTuple):
    """The ranks of ``axis`` hold ``parts`` equal parts along dimension ``dim``; this rank holds number ``part``.

    ``copies`` neighbours along the axis hold the same part.
    """

    axis: str
    dim: int
    part: int
    parts: int
    copies: int


class Sharded(NamedTuple):
    """A tensor of ``shape``, of which a rank holds the box that remains after ``splits``, one after another.

    The ranks of an axis that is in no split hold the same box.
    """

    shape: Sizes
    splits: tuple[Split, ...] = ()
    initial: float | None = None
    """The value with which all elements begin; None: they begin with different values."""

    def split(self, axis: str, dim: int, rank: int, ranks: int, most: int | None = None) -> Sharded:
        """The part of rank ``rank`` of the ``ranks`` on an axis; ``ranks`` must divide dimension ``dim`` of the box.

        ``most``: there are at most so many parts (key/value heads), and neighbours hold copies of one.
        """
        parts = min(ranks, most or ranks)
        copies = ranks // parts
        return self._replace(splits=(*self.splits, Split(axis, dim, rank // copies, parts, copies)))

    def along(self, axis: str) -> Split | None:
        """How the ranks of an axis split the tensor; None if each of them holds the same box."""
        return next((split for split in self.splits if split.axis == axis), None)

    @property
    def box(self) -> tuple[slice, ...]:
        """What this rank holds along each dimension."""
        box = [slice(0, size) for size in self.shape]
        for _, dim, part, parts, _ in self.splits:
            first, size = box[dim].start, (box[dim].stop - box[dim].start) // parts
            box[dim] = slice(first + part * size, first + (part + 1) * size)
        return tuple(box)

    @property
    def local(self) -> Sizes:
        """The shape of the box."""
        return tuple(each.stop - each.start for each in self.box)

    @property
    def size(self) -> int:
        """The number of elements in the box."""
        return math.prod(self.local)

    @property
    def transposed(self) -> Sharded:
        """The same elements of the tensor with its dimensions in reverse order."""
        last = len(self.shape) - 1
        return self._replace(
            shape=self.shape[::-1], splits=tuple(each._replace(dim=last - each.dim) for each in self.splits)
        )

    def rows(self, start: int, stop: int) -> tuple[slice, ...]:
        """The index, into the whole tensor, of rows ``start`` to ``stop`` of the box."""
        first, *others = self.box
        return (slice(first.start + start, first.start + stop), *others)
