"""Where a rank's part of a tensor lies in the whole tensor."""

from __future__ import annotations

from typing import NamedTuple


class Placement(NamedTuple):
    """Where a rank's part of a tensor lies: ``size`` from ``start`` on along ``dim``; all of it if that is None."""

    shape: tuple[int, ...]
    """Of the whole tensor."""

    dim: int | None = None
    start: int = 0
    size: int = 0

    @classmethod
    def split(cls, shape: tuple[int, ...], dim: int, shard: int, shards: int) -> Placement:
        """Part ``shard`` of ``shards`` equal ones."""
        size = shape[dim] // shards
        return cls(shape, dim, shard * size, size)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(self.size if dim == self.dim else size for dim, size in enumerate(self.shape))

    @property
    def shards(self) -> int:
        return 1 if self.dim is None else self.shape[self.dim] // self.size

    def rows(self, start: int, stop: int) -> tuple[slice, ...]:
        """The index, into the whole tensor, of these rows of the part."""
        index = [slice(0, size) for size in self.shape]
        if self.dim is not None:
            index[self.dim] = slice(self.start, self.start + self.size)
        first = index[0].start
        return (slice(first + start, first + stop), *index[1:])
