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

    copies: int = 1
    """How many neighbours along tp hold this part of a tensor that is split."""

    @classmethod
    def split(cls, shape: tuple[int, ...], dim: int, shard: int, shards: int, most: int | None = None) -> Placement:
        """Part ``shard`` of ``shards`` equal ones; of only ``most`` if that is less, each held by several ranks."""
        parts = min(shards, most or shards)
        size, copies = shape[dim] // parts, shards // parts
        return cls(shape, dim, shard // copies * size, size, copies)

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
