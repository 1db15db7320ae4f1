"""Where the elements of an array lie in the tensors of a model.

A ``Placement`` is a list of parts.  A ``Part`` is a box of one tensor, and the addresses of its elements in the array.
All layouts are such lists: a whole tensor, a slice along an axis, the q, k and v rows of a fused matrix, a transposed
matrix, and the pieces of flattened tensors that a rank of ZeRO holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from kos.comm.arguments import check_int, check_rank
from kos.dtypes import DType
from kos.errors import InvalidArgument, raised_as
from kos.memory.array import Array
from kos.memory.sharded import Sharded, Sizes
from kos.transfer.arguments import check_at_least, check_axis, check_name, check_shape


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, and where its elements lie in the array."""

    tensor: str
    """The name of the tensor; "" stands for the name of the array."""
    whole: Sizes
    """The shape of the whole tensor."""
    start: Sizes
    size: Sizes
    """The first index and the number of elements of the box along each axis of the tensor."""
    offset: int
    """The place of the box's first element in the flattened array."""
    strides: Sizes
    """The distance, in elements of the array, between neighbours along each axis of the tensor."""

    def at(self, start: Sizes) -> int:
        """The place in the flattened array of the element with this index in the tensor."""
        steps = zip(start, self.start, self.strides, strict=True)
        return self.offset + sum((index - first) * stride for index, first, stride in steps)

    def view(self, flat: Flat, start: Sizes, size: Sizes) -> Any:
        """The box of ``size`` that begins at ``start``, in the memory of the flattened array."""
        return box(flat, self.at(start), size, self.strides)


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of an array on a GPU, or in pinned memory."""

    pointer: int
    """The address of the first element."""
    dtype: DType
    size: Sizes
    strides: Sizes
    """In elements."""


Flat = np.ndarray | Array
"""The memory of an array, flattened."""


def box(flat: Flat, offset: int, size: Sizes, strides: Sizes) -> Any:
    """The elements of ``flat`` from ``offset`` on, of shape ``size``: an ndarray, or a Box of memory on a GPU.

    ``strides`` are in elements.

    Raises InvalidArgument if one lies outside of ``flat``.
    """
    last = offset + sum((count - 1) * stride for count, stride in zip(size, strides, strict=True))
    within = offset >= 0 and last < flat.size >= math.prod(size)  # the product: else strides of 0 make it any size
    if not within or min(strides, default=0) < 0 or min(size, default=1) < 1:
        got = f"elements {offset} to {last} (shape {size}, strides {strides})"
        raise InvalidArgument(f"box: expected elements within an array of {flat.size}, got {got}")
    if isinstance(flat, Array):
        return Box(flat.pointer + offset * flat.dtype.itemsize, flat.dtype, size, strides)
    steps = [stride * flat.itemsize for stride in strides]  # as_strided does not know the types of ml_dtypes
    return np.ndarray(size, flat.dtype, flat.view(np.uint8).data, offset * flat.itemsize, steps)


@dataclass(frozen=True, slots=True)
class Placement:
    """The tensors' elements that an array of ``shape`` holds.  Every element of the array belongs to one part."""

    shape: Sizes
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, shape: Sequence[int], tensor: str = "") -> Placement:
        """All of a tensor of this shape.  The default name of the tensor is that of the array."""
        return cls.of(Sharded(check_shape(check_name("tensor", tensor) or "whole", shape)), tensor)

    @classmethod
    def of(cls, sharded: Sharded, tensor: str = "") -> Placement:
        """The box of a tensor that a rank holds."""
        local, start = sharded.local, tuple(each.start for each in sharded.box)
        return cls(local, (Part(tensor, sharded.shape, start, local, 0, c_strides(local)),))

    @classmethod
    def cut(cls, shape: Sequence[int], axis: int, start: int, size: int, tensor: str = "") -> Placement:
        """``size`` elements from ``start`` on along ``axis`` of a tensor of ``shape``."""
        who = check_name("tensor", tensor) or "cut"
        axis = check_axis(who, axis, shape := check_shape(who, shape))
        start, size = check_int(f"{who}: start", start), check_int(f"{who}: size", size)
        if not 0 <= start <= start + size <= shape[axis]:
            got = f"{start}:{start + size} along axis {axis}"
            raise InvalidArgument(f"{who}: expected a slice within shape {shape}, got {got}")
        local = tuple(size if index == axis else each for index, each in enumerate(shape))
        first = tuple(start if index == axis else 0 for index in range(len(shape)))
        return cls(local, (Part(tensor, shape, first, local, 0, c_strides(local)),))

    @classmethod
    def shard(
        cls, shape: Sequence[int], axis: int, rank: int, ranks: int, tensor: str = "", most: int | None = None
    ) -> Placement:
        """Part ``rank`` of ``ranks`` equal ones along ``axis``.

        ``most``: the tensor is split into only so many parts (key/value heads); neighbouring ranks hold the same part.
        """
        who = check_name("tensor", tensor) or "shard"
        axis = check_axis(who, axis, shape := check_shape(who, shape))
        ranks = check_at_least(f"{who}: ranks", ranks, 1)
        rank = check_rank(f"{who}: rank", rank, ranks)
        parts = ranks if most is None else min(ranks, check_at_least(f"{who}: most", most, 1))
        if ranks % parts:
            raise InvalidArgument(f"{who}: expected a number of ranks that is a multiple of most={most}, got {ranks}")
        if shape[axis] % parts:
            expected = f"a multiple of {parts} elements along axis {axis}, for equal parts"
            raise InvalidArgument(f"{who}: expected {expected}, got shape {shape}")
        return cls.of(Sharded(shape).split("", axis, rank, ranks, parts), tensor)

    @classmethod
    def joined(cls, placements: Sequence[Placement]) -> Placement:
        """Arrays one after another in memory, as one array: stacked along their first axis."""
        if not isinstance(placements, Sequence) or not all(isinstance(each, Placement) for each in placements):
            raise InvalidArgument(f"joined: expected Placements, got {placements!r:.80}")
        if len({each.shape[1:] for each in placements}) != 1 or not all(each.shape for each in placements):
            got = [each.shape for each in placements]
            raise InvalidArgument(f"joined: expected shapes that differ in their first axis only, got {got}")
        shape = sum(each.shape[0] for each in placements), *placements[0].shape[1:]
        ends = accumulate((each.count for each in placements), initial=0)
        pairs = [(part, end) for each, end in zip(placements, ends, strict=False) for part in each.parts]
        return cls(shape, tuple(replace(part, offset=part.offset + end) for part, end in pairs))

    @property
    def count(self) -> int:
        """The number of elements of the array."""
        return math.prod(self.shape)

    @property
    def transposed(self) -> Placement:
        """The same elements in an array of which the axes have the reverse order."""
        part = self._only("transposed")
        strides = tuple(reversed(c_strides(tuple(reversed(part.size)))))
        return Placement(tuple(reversed(self.shape)), (replace(part, strides=strides),))

    def flat(self, start: int, stop: int) -> Placement:
        """The elements ``start`` to ``stop`` of the flattened array: the slice that a rank of ZeRO holds of it."""
        part = self._only("flat")
        start, stop = check_int("flat: start", start), check_int("flat: stop", stop)
        if not 0 <= start <= stop <= self.count:
            raise InvalidArgument(f"flat: expected a slice of {self.count} elements, got {start}:{stop}")
        turned = part.strides != c_strides(part.size)  # transposed
        found = []
        for first, size in _boxes(self.shape, start, stop):
            if turned:
                first, size = first[::-1], size[::-1]
            at = tuple(map(sum, zip(part.start, first, strict=True)))
            found.append(replace(part, start=at, size=size, offset=part.at(at) - start))
        return Placement((stop - start,), tuple(found))

    def named(self, name: str) -> Placement:
        """With the name of the array where a part names no tensor.  Parts without elements are left out."""
        if not all(isinstance(part, Part) for part in self.parts):
            raise InvalidArgument(f"{name}: expected parts of the class Part, got {self.parts!r:.80}")
        parts = (replace(part, tensor=part.tensor or name) for part in self.parts if math.prod(part.size))
        return Placement(self.shape, tuple(parts))

    def _only(self, what: str) -> Part:
        if len(self.parts) != 1 or self.count != math.prod(self.parts[0].size):
            raise InvalidArgument(f"{what}: expected a placement of one part, got one of {len(self.parts)}")
        return self.parts[0]

    def check(self, what: str) -> None:
        """Raise InvalidArgument unless each element belongs to exactly one part, and each part is within its tensor."""
        seen = np.zeros(self.count, np.uint8)
        for part in self.parts:
            axes = (len(part.start), len(part.size), len(part.strides)) == (len(part.whole),) * 3
            bounds = zip(part.start, part.size, part.whole, strict=False)
            expected = f"{what}: expected parts within the array and their tensors"
            with raised_as(InvalidArgument, expected, InvalidArgument):
                if not axes or not all(0 <= first <= first + count <= whole for first, count, whole in bounds):
                    got = f"start {part.start}, size {part.size} and strides {part.strides}"
                    raise InvalidArgument(f"{got} in a tensor of shape {part.whole}")
                view = part.view(seen, part.start, part.size)
            view += 1
        if not (seen == 1).all():
            raise InvalidArgument(f"{what}: expected each element in one part, got {int((seen != 1).sum())} others")

    def to_json(self) -> list[Any]:
        return [self.shape, [[p.tensor, p.whole, p.start, p.size, p.offset, p.strides] for p in self.parts]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Placement:
        shape, parts = value
        found = [Part(n, tuple(w), tuple(at), tuple(size), first, tuple(by)) for n, w, at, size, first, by in parts]
        return cls(tuple(shape), tuple(found))


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to a multiple of 64."""
    return -(-nbytes // 64) * 64


def c_strides(shape: Sizes) -> Sizes:
    """The strides, in elements, of a C-contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _boxes(shape: Sizes, start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    """The boxes (first index, size) whose elements are ``start`` to ``stop`` of the flattened array, in order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    (first, skipped), (last, more) = divmod(start, row), divmod(stop, row)
    if skipped or first == last:
        end = min(stop, (first + 1) * row)
        yield from (((first, *at), (1, *size)) for at, size in _boxes(shape[1:], skipped, end - first * row))
        first, start = first + 1, end
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if more and first <= last and start < stop:
        yield from (((last, *at), (1, *size)) for at, size in _boxes(shape[1:], 0, more))


Arrays = Mapping[str, tuple[Any, Any]]
"""Name -> an array, and what it holds: a ``Placement``, or a subscriber's ``BlockScales``."""


class Current(NamedTuple):
    """An array that is looked up at each use, such as a parameter whose memory may be replaced."""

    look_up: Callable[[], Any]


def current(array: Any) -> Any:
    """The array itself.  A Parameter of torch that is trained is detached: torch does not share one with gradients."""
    if isinstance(array, Current):
        return array.look_up()
    return array.detach() if getattr(array, "requires_grad", False) is True else array
