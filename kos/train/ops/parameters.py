"""Named tensors inside one flat array.

Weights, gradients and the state of the optimizer share one layout: the order in which the backward finishes the
gradients. A bucket of gradients is then a slice of the flat array and is communicated as it lies, the
optimizer walks each array once from end to end, and neighbours (q, k, v) can be seen as one matrix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Shape = tuple[int, ...]


class FlatTensors:
    """Named tensors in one flat array, or the parts of them that a rank holds."""

    shapes: dict[str, Shape]
    spans: dict[str, slice]
    """Where each tensor lies in the layout."""
    flat: Any

    def parts(self) -> list[tuple[slice, slice]]:
        """The parts of the layout that are held here, and their places in ``flat``: all of it."""
        return [(slice(0, self.flat.size), slice(0, self.flat.size))]

    @property
    def end(self) -> int:
        """Where the last tensor ends. What is beyond depends on the number of ranks."""
        return max((span.stop for span in self.spans.values()), default=0)

    def held(self, span: slice) -> Iterator[tuple[int, int, int]]:
        """What is held of a span of the layout: from where to where, and its place in ``flat``."""
        for part, local in self.parts():
            if both := overlap(span, part):
                yield both.start, both.stop, local.start + both.start - part.start


class Parameters(FlatTensors, Mapping[str, np.ndarray]):
    """Views by name of one contiguous array ``flat``, laid out in the order of ``shapes``.

    ``groups`` names runs of neighbouring tensors that agree in all but their first dimension; a group's
    name gives the tensors stacked along it, as a view (``qkv_proj`` for ``q_proj, k_proj, v_proj``).
    Iterating gives the tensors' own names only.  ``zeros(size, dtype)`` makes the flat array: NumPy's, or
    another kind that slices and reshapes like it (``kos.memory.array.Array``).  It is rounded up to a
    ``multiple`` of elements, the rest of which stay 0; so is each of its ``regions``, of ``counts`` tensors.
    """

    def __init__(
        self, shapes: Mapping[str, Shape], dtype: Any = np.float32, groups: Mapping[str, Sequence[str]] | None = None,
        zeros: Callable[[int, Any], Any] = np.zeros, multiple: int = 1, counts: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.shapes, self.counts = dict(shapes), counts or (len(shapes),)
        self.groups = {name: tuple(members) for name, members in (groups or {}).items()}
        self.spans: dict[str, slice] = {}
        self.regions: list[slice] = []
        offset, tensors = 0, iter(self.shapes.items())
        for count in self.counts:
            start = offset
            for name, shape in itertools.islice(tensors, count):
                size = math.prod(shape)
                self.spans[name] = slice(offset, offset + size)
                offset += size
            offset = -(-max(offset, 1) // multiple) * multiple  # 1: a rank may have no such tensors
            self.regions.append(slice(start, offset))
        self.zeros, self.multiple = zeros, multiple
        self.flat = zeros(offset, dtype)
        self._views = {name: self.flat[span].reshape(self.shapes[name]) for name, span in self.spans.items()}
        for group, members in self.groups.items():
            self._views[group] = self._stack(group, members)

    def _stack(self, group: str, members: Sequence[str]) -> np.ndarray:
        first, last = self.spans[members[0]], self.spans[members[-1]]
        tail = self.shapes[members[0]][1:]
        end = first.start
        for member in members:
            if self.spans[member].start != end or self.shapes[member][1:] != tail:
                raise ValueError(f"group {group}: expected neighbours of shape (*, {tail}), got {members}")
            end = self.spans[member].stop
        return self.flat[first.start : last.stop].reshape(-1, *tail)

    def like(self, dtype: Any = None) -> Parameters:
        """Zeros in the same layout, of the same dtype or another."""
        dtype = self.flat.dtype if dtype is None else dtype
        return Parameters(self.shapes, dtype, self.groups, self.zeros, self.multiple, self.counts)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._views[name]

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class OwnedSlices(FlatTensors):
    """Parts of a layout that one rank holds, one after another in ``flat``."""

    def __init__(self, layout: Parameters, slices: Sequence[slice], dtype: Any = np.float32) -> None:
        self.layout, self.slices = layout, list(slices)
        self.shapes, self.spans = layout.shapes, layout.spans
        self.flat = layout.zeros(sum(part.stop - part.start for part in self.slices), dtype)

    def parts(self) -> list[tuple[slice, slice]]:
        """The parts of the layout that are held here, and their places in ``flat``."""
        return packed(self.slices)


class OnFirstRead(Mapping[str, Any]):
    """A mapping with the names of ``weights``.  The first read of a name stores ``first(name)`` as its value."""

    def __init__(self, weights: Mapping[str, Any], first: Callable[[str], Any]) -> None:
        self._weights, self._first, self._read = weights, first, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            self._read[name] = self._first(name)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def packed(slices: Sequence[slice]) -> list[tuple[slice, slice]]:
    """Each of ``slices``, and its place where they lie one after another."""
    ends = list(itertools.accumulate((part.stop - part.start for part in slices), initial=0))
    return [*zip(slices, map(slice, ends, ends[1:]), strict=True)]


def overlap(a: slice, b: slice) -> slice | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return slice(start, stop) if start < stop else None
