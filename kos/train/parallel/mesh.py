"""The ranks of a job as a grid: pipeline, data, context and tensor parallelism, an axis each.

``AXES`` states the order, outermost first. Ranks are numbered along ``tp`` first, so the ranks of a tensor-parallel
group are neighbours. They exchange activations several times in each block, and each exchange overlaps only one matrix
product, so they need the fastest links. ``cp`` passes keys and values once in each attention. ``dp`` sums gradients
once a step, beside the backward; it lies next to ``cp`` because the ranks of both hold the same weights and sum one
gradient. ``pp`` sends one activation from stage to stage and can bear the slowest wire, between hosts. Megatron-LM and
torchtitan order alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple, cast

from kos.errors import InvalidArgument, SettingError, plural

if TYPE_CHECKING:
    from kos.comm.communicator import Communicator

DENSE = ("dp", "cp")
"""The axes whose ranks hold the same dense weights."""
NAMED = ("dp", "tp", "pp", "cp")
"""The axes in the order of flags and messages."""


@dataclass(frozen=True)
class Layout:
    """The number of ranks of each axis, the outermost first."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, ranks: int, *, dp: int | None = None, **others: int) -> Layout:
        """The layout of ``ranks`` ranks; ``dp`` takes the rest if it is None. ConfigError if they do not multiply."""
        rest = math.prod(others.values())
        if ranks % rest or dp not in (None, ranks // rest):
            named = {"dp": dp, **others}
            sizes = {axis: n for axis, n in named.items() if n is not None and (n > 1 or axis == "dp")}
            given = " ".join(f"--{axis} {n}" for axis, n in sizes.items())
            product = rest * (dp or 1)
            got = " × ".join(map(str, sizes.values())) + f" = {product}" * (len(sizes) > 1)
            expected = f"a divisor of {ranks} (ranks)" if dp is None else f"{plural(ranks, 'rank')} in all"
            raise SettingError(given, expected, got, hint=f"{plural(product, 'rank')} would do", also=[*sizes])
        return cls(dp=ranks // rest, **others)

    @property
    def ranks(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def replicas(self) -> int:
        """How many ranks hold the same dense weights."""
        return math.prod(getattr(self, axis) for axis in DENSE)

    def describe(self) -> str:
        """``4 ranks (tp 2, cp 2)``, without the axes of one rank; ``4 ranks`` where dp has all."""
        axes = [f"{axis} {size}" for axis in NAMED if (size := getattr(self, axis)) > 1]
        return plural(self.ranks, "rank") + f" ({', '.join(axes)})" * (self.dp < self.ranks)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on each axis."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at a place; an axis that is not named counts as 0."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + coordinates.get(axis, 0)
        return rank


AXES = tuple(field.name for field in fields(Layout))


class DryCommunicator:
    """Stands in for a communicator and moves nothing, in a dry run."""

    device = None

    def __init__(self, rank: int, size: int, exact: int = 1) -> None:
        self.rank, self.size, self._exact = rank, size, exact

    def exact_group_size(self, device: int | None = None) -> int:
        return self._exact

    def _nothing(self, *arrays: object, **options: object) -> DryCommunicator:
        return self

    all_gather = all_reduce = all_to_all = broadcast = reduce = reduce_scatter = _nothing
    send = recv = send_recv = split = synchronize = wait = _nothing


class Axis(NamedTuple):
    """The ranks that differ from this one on one axis, or on several; an axis of one rank has no communicator."""

    rank: int
    size: int
    group: Communicator | None

    @property
    def comm(self) -> Communicator:
        if self.group is None:
            raise InvalidArgument(f"expected an axis of several ranks, got one of {self.size}")
        return self.group


ALONE = Axis(0, 1, None)


class Reduction(NamedTuple):
    """The ranks over which gradients are reduced.

    ``replicas`` hold the same weights: gradients are summed over them, and ZeRO-1 shards the state over them.
    ``batch`` are those of them that have other micro-batches. ``others`` hold the rest of the model: the squares of
    the norm are summed over them.
    """

    replicas: Axis
    batch: Axis
    others: Axis


class Mesh:
    """The grid as one rank sees it. Collective.

    It has an attribute for each axis of the layout, such as ``dp``.  Two more axes join several of these.  The ranks of
    ``replicas`` (the axes in ``DENSE``) hold the same weights.  Those of ``model_parallel`` (all other axes) hold the
    parts of one model.
    """

    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis

    def __init__(self, world: Communicator, layout: Layout | None = None) -> None:
        self.world = world
        self.layout = layout or Layout(dp=world.size)
        if self.layout.ranks != world.size:
            raise InvalidArgument(f"expected a layout of {world.size} ranks, got {self.layout}")
        self.coordinates = self.layout.coordinates(world.rank)
        self._groups: dict[tuple[str, ...], Communicator] = {}
        for axis in AXES:
            setattr(self, axis, self._axis(axis))
        self.replicas, self.model_parallel = self._axis(*DENSE), self._axis(*({*AXES} - {*DENSE}))

    @property
    def dense(self) -> Reduction:
        return Reduction(self.replicas, self.dp, self.model_parallel)

    def exact(self, device: str) -> int:
        """How many ranks of ``replicas`` add gradients exactly before they compress, on ``cpu`` or ``cuda``."""
        comm = self.replicas.group
        return 1 if comm is None else comm.exact_group_size(comm.device if device == "cuda" else None)

    def _axis(self, *names: str) -> Axis:
        """These axes as one. A group of all ranks is the world itself; no group is split twice."""
        names = tuple(name for name in AXES if name in names and getattr(self.layout, name) > 1)
        if not names:
            return Axis(0, 1, None)
        layout = Layout(**{name: getattr(self.layout, name) for name in names})
        place = {name: self.coordinates[name] for name in names}
        if names not in self._groups:
            elsewhere = {name: at for name, at in self.coordinates.items() if name not in names}
            color, key = self.layout.rank(elsewhere), self.layout.rank(place)
            group = self.world if layout.ranks == self.world.size else self.world.split(color, key)
            assert group is not None  # every rank has a color
            self._groups[names] = group
        return Axis(layout.rank(place), layout.ranks, self._groups[names])

    def copies(self, count: int) -> Axis:
        """The ``count`` neighbours along tp that hold a copy of the same kv head."""
        if count == 1:
            return ALONE
        if count == self.tp.size:
            return self.tp
        name, (color, key) = f"copies {count}", divmod(self.tp.rank, count)
        if (name,) not in self._groups:
            group = self.tp.comm.split(color, key)
            assert group is not None  # every rank has a color
            self._groups[name,] = group
        return Axis(key, count, self._groups[name,])

    @classmethod
    def dry(cls, layout: Layout, rank: int = 0, exact: int = 1) -> Mesh:
        """The mesh as ``rank`` of a job of this layout sees it, without the other ranks."""
        return cls(cast("Communicator", DryCommunicator(rank, layout.ranks, exact)), layout)

    def communicators(self) -> list[Communicator]:
        """The world, and the communicators that were split from it."""
        return [self.world, *(group for group in self._groups.values() if group is not self.world)]

    def close(self) -> None:
        """Close the communicators that were split; the world stays."""
        for group in self.communicators()[1:]:
            group.close()
