"""Layouts of publishers and subscribers for the tensors of ``publishing.SHAPES``."""

from collections.abc import Mapping

from kos.transfer import Placement
from tests.transfer.publishing import SHAPES

Layout = Mapping[str, Placement]
WHOLE = {name: Placement.whole(shape) for name, shape in SHAPES.items()}


def zero(rank: int, ranks: int) -> Layout:
    """Slices of each flattened tensor."""
    wholes = {name: Placement.whole(shape) for name, shape in SHAPES.items()}
    return {n: p.flat(p.count * rank // ranks, p.count * (rank + 1) // ranks) for n, p in wholes.items()}


def tensor(rank: int, ranks: int) -> Layout:
    """Rows of one matrix and columns of the other."""
    cut = {"a.weight": Placement.shard((12, 8), 0, rank, ranks), "b.weight": Placement.shard((6, 6), 1, rank, ranks)}
    return {**WHOLE, **cut}


def zero_of_tensor(rank: int, ranks: int = 4) -> Layout:
    """dp 2 x tp 2: half of the flattened part of a rank of tp."""
    held = tensor(rank % 2, 2)
    return {n: p.flat(p.count * (rank // 2) // 2, p.count * (rank // 2 + 1) // 2) for n, p in held.items()}


def stages(rank: int, ranks: int) -> Layout:
    """A pipeline: each rank has some of the tensors."""
    return {name: WHOLE[name] for name in [*SHAPES][rank::ranks]}


def last_alone(rank: int, ranks: int) -> Layout:
    """The other ranks have nothing, as some do with Muon and ZeRO."""
    return WHOLE if rank == ranks - 1 else {}


def one_array(rank: int, ranks: int) -> Layout:
    """As the trainer has it: slices of all tensors in one flat array."""
    flats = [Placement.whole(shape, name) for name, shape in SHAPES.items()]
    flats = [each.flat(each.count * rank // ranks, each.count * (rank + 1) // ranks) for each in flats]
    return {"flat": Placement.joined(flats)}


FUSED = {"ab": Placement.joined([Placement.shard((12, 8), 0, 1, 2, "a.weight"), Placement.cut((12, 8), 0, 0, 3,
         "a.weight")]), "turned": Placement.whole((6, 6), "b.weight").transposed}  # fmt: skip
