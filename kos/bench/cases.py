"""What is measured: operation, size and type, what goes in and what must come out of every iteration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kos.comm.operation import COLLECTIVES, PART, PARTS, WHOLE
from kos.comm.operation import OPERATIONS as FACTS
from kos.dtypes import DTYPES, DType
from kos.errors import InvalidArgument

Array = np.ndarray[Any, Any]

ROOT = 0
PERIOD = 65_521
"""Elements after which a rank's values repeat: a prime, so that no power of two of them is a whole period."""
STRIDE = 7_919
"""How far the values move from one iteration to the next."""

REDUCING = tuple(name for name, row in COLLECTIVES.items() if row.reduces)
PLACES = {name: (FACTS[name].input != PART, FACTS[name].output != PART) for name in (*COLLECTIVES, "send_recv")}
"""By operation, whether a rank's input and its output have all of the row's elements, or a rank's part of them."""
OPERATIONS = tuple(PLACES)
ROUTING = "routing"
"""The ``all_to_all_v`` of a mixture of experts, measured only if named.  Its size is that of a rank's tokens."""
BARRIER = "barrier"
"""Measured only if named, and once: it has no size.  A row shows one element, which no call moves."""
TOKEN, EXPERTS, TOP_K = 7168, 64, 8
"""Elements of a token, experts of all ranks together, experts of a token."""
IN_PLACE = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "scan", "exscan")

_REDUCE: dict[str, Any] = {
    "sum": np.add.reduce,
    "avg": np.mean,
    "prod": np.multiply.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
}
REDUCE_OPS = tuple(_REDUCE)
MEASURED = tuple(name for name, kind in DTYPES.items() if kind.kind in ("float", "int", "uint"))
"""The dtypes of which values and their exact reductions are made here."""


def busbw_factor(op: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: the part of the row's bytes that each link must carry.

    It is that of nccl-tests (doc/PERFORMANCE.md).  With uneven parts, the rank with the smallest part has the busiest
    link.
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("broadcast", "reduce", "send_recv", "scan", "exscan"):
        return 1.0
    own = min(uneven(2 * ranks, ranks)) / 2 if op.endswith("_v") else 1
    return (ranks - own) / ranks


def bandwidths(factor: float, nbytes: int, time_us: float) -> tuple[float, float]:
    """Algorithm and bus bandwidth of a row in GB/s (10^9 bytes); ``factor`` is their ratio."""
    algbw = nbytes / time_us / 1e3
    return algbw, algbw * factor


def uneven(count: int, ranks: int) -> list[int]:
    """The ranks' parts of ``count``, a multiple of ``ranks``, in the operations that end in ``_v``.

    Ranks 0, 2, ... have an equal part less half of it (rounded down), and ranks 1, 3, ... as much more.  The last of an
    odd number of ranks has an equal part.
    """
    part = count // ranks
    return [part if r == ranks - 1 and ranks % 2 else part + (-1, 1)[r % 2] * (part // 2) for r in range(ranks)]


def routed(tokens: int, rank: int, ranks: int) -> list[int]:
    """How many of a rank's ``tokens`` go to each rank.

    The experts of a token are drawn uniformly, without repetition.  All ranks hold the same number of experts.  A token
    goes once to each rank that holds one of its experts.
    """
    chosen = np.random.default_rng(rank).random((tokens, EXPERTS)).argpartition(TOP_K, axis=1)[:, :TOP_K]
    holders = chosen * ranks // EXPERTS
    return [int((holders == r).any(axis=1).sum()) for r in range(ranks)]


@dataclass(frozen=True)
class Case:
    """One size of one operation.  ``count`` is nccl-tests': the larger of a rank's input and output, in elements."""

    op: str
    count: int
    dtype: DType
    redop: str
    ranks: int
    in_place: bool

    @classmethod
    def of(cls, op: str, nbytes: int, dtype: str, redop: str, ranks: int, in_place: bool) -> Case:
        """The case of about ``nbytes``: whole elements, as many for each rank where it has a part."""
        kind = DTYPES[dtype]
        count = nbytes // kind.itemsize
        if op == BARRIER:
            count = 1
        elif op == ROUTING:
            count -= count % TOKEN
        elif (FACTS[op].input, FACTS[op].output) != (WHOLE, WHOLE):
            count -= count % ranks
        if count == 0:
            least = f"a token of {TOKEN} {dtype}" if op == ROUTING else f"one {dtype} for each of {ranks} ranks"
            raise InvalidArgument(f"{op}: expected at least {least}, got {nbytes} bytes")
        case = cls(op, count, kind, redop if op in REDUCING else "none", ranks, in_place)
        value_range(case)
        return case

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def function(self) -> str:
        """The operation that is called."""
        return "all_to_all_v" if self.op == ROUTING else self.op

    @cached_property
    def parts(self) -> list[int]:
        """Elements of each rank's part."""
        return uneven(self.count, self.ranks) if self.op.endswith("_v") else [self.count // self.ranks] * self.ranks

    @cached_property
    def pieces(self) -> list[list[int]]:
        """Elements from each rank to each, itself included, of operations that only move data."""
        n, parts = self.ranks, self.parts
        if self.op == ROUTING:
            return [[TOKEN * tokens for tokens in routed(self.count // TOKEN, rank, n)] for rank in range(n)]
        row = FACTS[self.op]

        def length(rank: int, to: int) -> int:
            if (row.input, row.output) == (PARTS, PARTS):
                return parts[(to - rank) % n]
            return parts[rank] if row.output == PARTS else parts[to] if row.input == PARTS else self.count

        return [[length(rank, to) if row.pairs(rank, to, ROOT, n) else 0 for to in range(n)] for rank in range(n)]

    def start(self, rank: int, to: int) -> int:
        """Where in the input of ``rank`` its piece for ``to`` begins, in elements."""
        return sum(self.pieces[rank][:to]) if FACTS[self.function].input == PARTS else 0

    def counts(self, rank: int) -> tuple[list[int], list[int]]:
        """A rank's elements for each rank and from each rank in an all_to_all_v; empty for other operations."""
        if self.function != "all_to_all_v":
            return [], []
        return self.pieces[rank], [row[rank] for row in self.pieces]

    def sends(self, rank: int) -> int:
        """Elements of a rank's input."""
        if self.op == ROUTING:
            return sum(self.counts(rank)[0])
        return self.count if self.op == BARRIER or PLACES[self.op][0] else self.parts[rank]

    def receives(self, rank: int) -> int:
        """Elements of a rank's output."""
        if self.op == ROUTING:
            return sum(self.counts(rank)[1])
        return self.count if self.op == BARRIER or PLACES[self.op][1] else self.parts[rank]

    @property
    def largest(self) -> tuple[int, int]:
        """Elements of the largest input and of the largest output."""
        return max(map(self.sends, range(self.ranks))), max(map(self.receives, range(self.ranks)))

    @property
    def busbw_factor(self) -> float:
        """Elements that the busiest link must carry, divided by ``count``."""
        if self.op == BARRIER:
            return 0.0
        if self.op != ROUTING:
            return busbw_factor(self.op, self.ranks)
        ends = (self.sends, self.receives)
        return max(end(r) - self.pieces[r][r] for end in ends for r in range(self.ranks)) / self.count


class Segment(NamedTuple):
    """``length`` elements of a table, from ``phase`` + the iteration's shift on."""

    table: int
    phase: int
    length: int

    def start(self, iteration: int) -> int:
        return (self.phase + iteration * STRIDE) % PERIOD


REDUCED = -1
"""The table of what the reduction of all ranks' values gives; the others are the ranks' own."""


class Data:
    """Inputs and outputs of a case on one rank, as segments of tables that repeat after PERIOD elements.

    ``tables`` has one period of each, and ``lengths`` how many elements of it are asked for at most.
    """

    def __init__(self, case: Case, rank: int, seed: int) -> None:
        self.input = Segment(rank, 0, case.sends(rank))
        self.output = _output(case, rank)
        self.lengths: dict[int, int] = {}
        for segment in (self.input, *self.output):
            self.lengths[segment.table] = max(self.lengths.get(segment.table, 0), segment.length + PERIOD)
        periods = [values(case, r, seed) for r in range(case.ranks)]
        self.tables: dict[int, Array] = {}
        added = FACTS[case.op].sources(rank, ROOT, case.ranks) if case.op in REDUCING else []
        for table in self.lengths:
            reduced = [periods[r] for r in added]
            period = _REDUCE[case.redop](np.stack(reduced), axis=0) if table == REDUCED else periods[table]
            self.tables[table] = period.astype(case.dtype.numpy)


def _output(case: Case, rank: int) -> list[Segment]:
    if case.op == BARRIER:
        return []
    if case.op not in REDUCING:
        return [Segment(r, case.start(r, rank), row[rank]) for r, row in enumerate(case.pieces) if row[rank]]
    if not FACTS[case.op].sources(rank, ROOT, case.ranks):
        return []
    return [Segment(REDUCED, sum(case.parts[:rank]) if case.receives(rank) != case.count else 0, case.receives(rank))]


def value_range(case: Case) -> tuple[int, int]:
    """The least and one above the largest of a rank's values; InvalidArgument where no reduction of any is exact."""
    name, n = case.dtype.name, case.ranks
    kind = case.dtype.numpy
    # Up to this number, all integers are values of the dtype.
    largest = 2 ** (ml_dtypes.finfo(kind).nmant + 1) if case.dtype.is_float else int(np.iinfo(kind).max)
    if case.redop == "prod":
        exact = n <= largest.bit_length() - 1 or case.dtype.is_float  # powers of two
        low, high = 1, 3 if exact else 2
    else:
        low, high = 0, min(64, largest // (n if case.redop in ("sum", "avg") else 1))
    if high - low < 2:
        raise InvalidArgument(f"{case.redop}: no values of {name} have an exact result on {n} ranks")
    if case.redop == "avg" and case.op in ("scan", "exscan"):
        raise InvalidArgument(f"avg: expected an operation that has an average, got {case.op}")
    if case.redop == "avg" and (n & (n - 1) or not case.dtype.is_float):
        raise InvalidArgument(f"avg: expected floats on 2, 4, 8, ... ranks, whose average is exact, got {name} on {n}")
    return low, high


def values(case: Case, rank: int, seed: int) -> Array:
    """One period of a rank's values: integers in float64 whose reduction is exact in the case's type."""
    return np.random.default_rng([seed, rank]).integers(*value_range(case), PERIOD).astype(np.float64)
