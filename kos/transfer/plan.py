"""Who reads which bytes from whom.

A plan is data: for each part that a subscriber wants, the boxes that it is put together from, and for each box the
publisher ranks that hold it.  Of several ranks that hold the same box (replicas of data parallelism), subscribers and
boxes take turns, so that the load is even.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kos.dtypes import DType
from kos.errors import InvalidArgument, plural
from kos.memory.sharded import Sizes
from kos.transfer.arguments import check_dict, check_kind
from kos.transfer.placement import Part, Placement


class Array(NamedTuple):
    """An array of one rank, without its memory."""

    dtype: DType
    placement: Placement
    gpu: int = 0
    """0: the array is in host memory.  n: it is in memory of the n-th GPU of its rank."""


Layout = Mapping[str, Array]
"""The arrays of a rank by name."""


class Holder(NamedTuple):
    """A publisher rank that holds a box, and where."""

    rank: int
    array: str
    dtype: DType
    part: Part
    gpu: int = 0


class Piece(NamedTuple):
    """A box, by its first index in the tensor and its size, and the ranks that hold all of it."""

    start: Sizes
    size: Sizes
    holders: Sequence[Holder]


class Copy(NamedTuple):
    """One box that a subscriber reads from one publisher rank."""

    start: Sizes
    size: Sizes
    source: Holder
    array: str
    part: Part
    """The subscriber's array, and its part."""

    @property
    def tensor(self) -> str:
        return self.part.tensor

    @property
    def elements(self) -> int:
        """How many it reads."""
        return math.prod(self.size)

    def nbytes(self, dtype: DType) -> int:
        """The bytes that travel if the subscriber wants ``dtype``: of the smaller of both types."""
        return self.elements * min(self.source.dtype.itemsize, dtype.itemsize)


def whole_shapes(groups: Sequence[tuple[Layout, Sequence[int]]]) -> dict[str, Sizes]:
    """Tensor -> the shape of the whole.  ``groups`` are pairs (arrays, ranks).

    Raises InvalidArgument if ranks differ in the shape or the dtype of a tensor.
    """
    found = dict[str, tuple[DType, Sizes, str, int]]()
    for layout, ranks in groups:
        for array, (dtype, placement, _) in layout.items():
            for part in placement.parts:
                here = dtype, part.whole, array, ranks[0]
                if (first := found.setdefault(part.tensor, here))[:2] != here[:2]:
                    expected = "expected one dtype and one shape of the whole tensor on all ranks"
                    got = " and ".join("{} of shape {} (array {} of rank {})".format(*each) for each in (first, here))
                    raise InvalidArgument(f"{part.tensor}: {expected}, got {got}")
    return {tensor: shape for tensor, (_, shape, *_) in found.items()}


class Offers:
    """The arrays of the publisher's ranks by the tensors that they hold.

    ``groups`` are pairs (arrays, ranks): replicas, whose arrays are alike, are listed once.  Raises InvalidArgument if
    ranks differ in the shape or the dtype of a tensor.
    """

    def __init__(self, groups: Sequence[tuple[Layout, Sequence[int]]]) -> None:
        self.groups = groups
        self.ranks = sorted(rank for _, ranks in groups for rank in ranks)
        self.shapes = whole_shapes(groups)
        """Tensor -> the shape of the whole."""
        self._held: dict[str, dict[tuple[Sizes, Sizes], list[Holder]]] = {}
        for layout, ranks in groups:
            for array, (dtype, placement, gpu) in layout.items():
                for part in placement.parts:
                    boxes = self._held.setdefault(part.tensor, {})
                    held = boxes.setdefault((part.start, part.size), [])
                    held += [Holder(rank, array, dtype, part, gpu) for rank in ranks]
        self.replicas = {len(held) for boxes in self._held.values() for held in boxes.values()}
        """The numbers of ranks that hold the same box."""
        self._bounds = {name: _bounds(boxes) for name, boxes in self._held.items()}
        self._found: dict[tuple[str, Sizes, Sizes], list[Piece]] = {}

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Offers:
        """Of the layout of each rank.  Ranks that pass the same object count as replicas.  Raises InvalidArgument."""
        groups: dict[int, tuple[Layout, list[int]]] = {}
        for rank, layout in enumerate(_checked(layouts)):
            groups.setdefault(id(layout), (layout, []))[1].append(rank)
        return cls([*groups.values()])

    def pieces(self, want: Part) -> list[Piece]:
        """The boxes that make up ``want``, each element once.  InvalidArgument if some are held by no rank."""
        key = want.tensor, want.start, want.size
        if key in self._found:
            return self._found[key]
        whole = self.shapes.get(want.tensor)
        if whole is None:
            near = difflib.get_close_matches(want.tensor, self.shapes, 1, 0)
            closest = "".join(f" (closest: {name})" for name in near)
            raise InvalidArgument(f"{want.tensor}: expected a tensor of the publisher, got none of that name{closest}")
        if whole != want.whole:
            expected = f"parts of the published tensor, which has shape {whole}"
            raise InvalidArgument(f"{want.tensor}: expected {expected}, got parts of a tensor of shape {want.whole}")
        missing, found = [(want.start, want.size)], list[Piece]()
        boxes, (low, high) = [*self._held[want.tensor].items()], self._bounds[want.tensor]
        (first,), (end,) = _bounds([(want.start, want.size)])
        for index in np.flatnonzero(((low < end) & (first < high)).all(axis=1)):
            ((start, size), holders), left = boxes[index], []
            for each in missing:
                common = intersect(*each, start, size)
                if common is None:
                    left.append(each)
                else:
                    found.append(Piece(*common, holders))
                    left += subtract(*each, *common)
            missing = left
            if not missing:
                break
        if missing:
            lost = _in_words(*missing[0])
            raise InvalidArgument(f"{want.tensor}: expected every element on a publisher rank, got none for {lost}")
        self._found[key] = found
        return found


class Plan:
    """What each subscriber rank reads.  ``wants`` are the arrays of each, ``offers`` those of the publisher.

    ``first`` is the number of the first subscriber rank, if the plan is for one rank of several.  ``near`` has sets of
    publisher ranks, the nearest first.  If several ranks hold a box, it is read from those in the first set that has
    any of them.  Raises InvalidArgument if no publisher rank holds a tensor or a part of it, if shapes differ, or if a
    dtype cannot be converted.
    """

    def __init__(self, offers: Offers, wants: Sequence[Layout], first: int = 0, near: Sequence[set[int]] = ()) -> None:
        check_kind("offers", offers, Offers, "Offers")
        self.offers, self.wants, self.first, self._near = offers, _checked(wants), first, near
        self.check()

    def copies(self, rank: int) -> Iterator[Copy]:
        """The boxes that a subscriber rank (counted from ``first``) reads."""
        turn = self.first + rank
        for name, (_, placement, _) in self.wants[rank].items():
            for part in placement.parts:
                for start, size, holders in self.offers.pieces(part):
                    near = ([each for each in holders if each.rank in ranks] for ranks in self._near)
                    holders = next(filter(None, near), holders)
                    yield Copy(start, size, holders[turn % len(holders)], name, part)
                    turn += 1

    def traffic(self) -> Counter[tuple[int, int]]:
        """(publisher rank, subscriber rank) -> bytes.  Subscribers with the same object as layout are counted once."""
        found, known = Counter[tuple[int, int]](), dict[tuple[int, int], Counter[int]]()
        cycle = math.lcm(*self.offers.replicas)  # after so many turns the same ranks are chosen
        for rank, layout in enumerate(self.wants, self.first):
            key = id(layout), rank if self._near else rank % cycle
            if key not in known:
                known[key] = Counter()
                for copy in self.copies(rank - self.first):
                    known[key][copy.source.rank] += copy.nbytes(layout[copy.array].dtype)
            found.update({(source, rank): nbytes for source, nbytes in known[key].items()})
        return found

    def check(self) -> None:
        """InvalidArgument unless every element that is wanted is read exactly once, from a rank that holds it."""
        for layout in {id(layout): layout for layout in self.wants}.values():
            for dtype, placement, _ in layout.values():
                for want in placement.parts:
                    pieces = self.offers.pieces(want)
                    if not _covers(want, pieces):
                        raise InvalidArgument(f"{want.tensor}: expected each element once, from a rank that holds it")
                    for theirs in {holder.dtype for piece in pieces for holder in piece.holders} - {dtype}:
                        if not (theirs.is_float and dtype.is_float):
                            raise InvalidArgument(f"{want.tensor}: expected {theirs}, as published, got {dtype}")

    def describe(self, most: int = 16) -> str:
        """The plan as text: totals, the bytes between ranks, and the copies of the first rank; ``most`` of each."""
        traffic, copies, sent = self.traffic(), [*self.copies(0)] if self.wants else [], Counter[int]()
        for (source, _), nbytes in traffic.items():
            sent[source] += nbytes
        pairs = [f"  {source} -> {target}: {traffic[source, target]:,} bytes" for source, target in sorted(traffic)]
        rows = [
            f"  {copy.tensor}[{_in_words(copy.start, copy.size)}] {copy.source.dtype}: rank {copy.source.rank} "
            f"{copy.source.array}+{copy.source.part.at(copy.start)} -> {copy.array}+{copy.part.at(copy.start)}"
            for copy in copies[:most]
        ]  # fmt: skip
        ranks = f"{plural(len(self.offers.ranks), 'publisher rank')} -> {plural(len(self.wants), 'subscriber rank')}"
        tensors, total = plural(len({copy.tensor for copy in copies}), "tensor"), f"{sum(sent.values()):,} bytes in all"
        least, largest = min(sent.values(), default=0), max(sent.values(), default=0)
        each = f"{least:,} to {largest:,} bytes of each of {len(sent)} ranks"
        more = [f"  ... {len(pairs) - most:,} more pairs"] * (len(pairs) > most)
        rest = [f"  ... {len(copies) - most:,} more copies"] * (len(copies) > most)
        return "\n".join([f"{ranks}: {tensors}, {total}; {each}", *pairs[:most], *more, *rows, *rest])


def _checked(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts, with a tensor named in each part.  Ranks that share a layout still do.  Raises InvalidArgument."""
    check_kind("layouts", layouts, Sequence, "a list with the layout of each rank")
    found = dict[int, Layout]()
    for layout in layouts:
        if id(layout) in found:
            continue
        for name, array in check_dict("layout", layout, "kos.transfer.Array").items():
            check_kind(name, array, Array, "a kos.transfer.Array")
            check_kind(name, array.placement, Placement, "a Placement")
            if not isinstance(array.dtype, DType):
                raise InvalidArgument(f"{name}: expected a dtype of kos.dtypes.DTYPES, got {array.dtype!r}")
        named = {name: array._replace(placement=array.placement.named(name)) for name, array in layout.items()}
        found[id(layout)] = named
    return [found[id(layout)] for layout in layouts]


def _covers(want: Part, pieces: Sequence[Piece]) -> bool:
    """Whether the pieces are ``want``, without an element twice, and all of each piece lies at each holder."""
    low, high = _bounds([(piece.start, piece.size) for piece in pieces])
    inside = (low >= want.start).all() and (high <= np.add(want.start, want.size)).all()
    shared = ((low[:, None] < high) & (low < high[:, None])).all(axis=2).sum() - len(pieces)
    total = sum(math.prod(piece.size) for piece in pieces)
    held = all(
        piece.holders and all(intersect(*piece[:2], *box) == piece[:2] for box in
                              {(each.part.start, each.part.size) for each in piece.holders}) for piece in pieces
    )  # fmt: skip
    return bool(inside and not shared and total == math.prod(want.size) and held)


def _bounds(boxes: Iterable[tuple[Sizes, Sizes]]) -> tuple[np.ndarray, np.ndarray]:
    """The first index of each box, and the index after its last element: (boxes, axes) each."""
    pairs = [*boxes]
    low = np.array([start for start, _ in pairs], np.int64).reshape(len(pairs), len(pairs[0][0]) if pairs else 0)
    return low, low + np.array([size for _, size in pairs], np.int64).reshape(low.shape)


def intersect(start: Sizes, size: Sizes, other: Sizes, of: Sizes) -> tuple[Sizes, Sizes] | None:
    """The box that two boxes have in common, as first index and size; None if they share no element."""
    first, sizes = [], []
    for a, n, b, m in zip(start, size, other, of, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        first.append(low)
        sizes.append(high - low)
    return tuple(first), tuple(sizes)


def subtract(start: Sizes, size: Sizes, hole: Sizes, of: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    """Boxes that make up a box without ``hole``, a box within it."""
    start, size = tuple(start), tuple(size)
    for axis, (first, count) in enumerate(zip(hole, of, strict=True)):
        for low, high in ((start[axis], first), (first + count, start[axis] + size[axis])):
            if low < high:
                yield (*start[:axis], low, *start[axis + 1 :]), (*size[:axis], high - low, *size[axis + 1 :])
        start, size = (*start[:axis], first, *start[axis + 1 :]), (*size[:axis], count, *size[axis + 1 :])


def _in_words(start: Sizes, size: Sizes) -> str:
    return ", ".join(f"{first}:{first + count}" for first, count in zip(start, size, strict=True)) or "()"
