"""What is measured: operation, size and type, what goes in and what must come out of every iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kos.dtypes import DTYPES, DType
from kos.errors import InvalidArgument

Array = np.ndarray[Any, Any]

ROOT = 0
PERIOD = 65_521
"""Elements after which a rank's values repeat: a prime, so that no power of two of them is a whole period."""
STRIDE = 7_919
"""How far the values move from one iteration to the next."""

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
PLACES = {
    "all_reduce": (True, True),
    "reduce": (True, True),
    "broadcast": (True, True),
    "send_recv": (True, True),
    "all_to_all": (True, True),
    "all_gather": (False, True),
    "gather": (False, True),
    "reduce_scatter": (True, False),
    "scatter": (True, False),
}
"""By operation, whether a rank's input and its output have all of the row's elements, or a rank's part of them."""
OPERATIONS = tuple(PLACES)
IN_PLACE = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")

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
_LARGEST_INTEGER = {
    "float64": 2**53, "float32": 2**24, "float16": 2**11, "bfloat16": 2**8, "float8_e4m3fn": 2**4, "float8_e5m2": 2**3
}  # fmt: skip


def busbw_factor(op: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: the part of the row's bytes that each link must carry.

    As in doc/PERFORMANCE.md of nccl-tests.
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if op in ("broadcast", "reduce", "send_recv") else (ranks - 1) / ranks


def bandwidths(op: str, ranks: int, nbytes: int, time_us: float) -> tuple[float, float]:
    """Algorithm and bus bandwidth of a row in GB/s (10^9 bytes)."""
    algbw = nbytes / time_us / 1e3
    return algbw, algbw * busbw_factor(op, ranks)


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
        if not all(PLACES[op]) or op == "all_to_all":
            count -= count % ranks
        if count == 0:
            raise InvalidArgument(f"{op}: expected at least one {dtype} for each of {ranks} ranks, got {nbytes} bytes")
        case = cls(op, count, kind, redop if op in REDUCING else "none", ranks, in_place)
        value_range(case)
        return case

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def part(self) -> int:
        """Elements of a rank's part."""
        return self.count // self.ranks

    @property
    def sends(self) -> int:
        """Elements of a rank's input."""
        return self.count if PLACES[self.op][0] else self.part

    @property
    def receives(self) -> int:
        """Elements of a rank's output."""
        return self.count if PLACES[self.op][1] else self.part


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
        self.input = Segment(rank, 0, case.sends)
        self.output = _output(case, rank)
        self.lengths: dict[int, int] = {}
        for segment in (self.input, *self.output):
            self.lengths[segment.table] = max(self.lengths.get(segment.table, 0), segment.length + PERIOD)
        periods = [values(case, r, seed) for r in range(case.ranks)]
        self.tables: dict[int, Array] = {}
        for table in self.lengths:
            period = _REDUCE[case.redop](np.stack(periods), axis=0) if table == REDUCED else periods[table]
            self.tables[table] = period.astype(case.dtype.numpy)


def _output(case: Case, rank: int) -> list[Segment]:
    op, part = case.op, case.part
    if op in ("reduce", "gather") and rank != ROOT:
        return []
    whole = {"all_reduce": REDUCED, "reduce": REDUCED, "broadcast": ROOT, "send_recv": (rank - 1) % case.ranks}
    if op in whole:
        return [Segment(whole[op], 0, case.count)]
    if op in ("reduce_scatter", "scatter"):
        return [Segment(REDUCED if op == "reduce_scatter" else ROOT, rank * part, part)]
    phase = rank * part if op == "all_to_all" else 0
    return [Segment(r, phase, part) for r in range(case.ranks)]


def value_range(case: Case) -> tuple[int, int]:
    """The least and one above the largest of a rank's values; InvalidArgument where no reduction of any is exact."""
    name, n = case.dtype.name, case.ranks
    largest = _LARGEST_INTEGER.get(name) or int(np.iinfo(case.dtype.numpy).max)
    if case.redop == "prod":
        exact = n <= largest.bit_length() - 1 or case.dtype.is_float  # powers of two
        low, high = 1, 3 if exact else 2
    else:
        low, high = 0, min(64, largest // (n if case.redop in ("sum", "avg") else 1))
    if high - low < 2:
        raise InvalidArgument(f"{case.redop}: no values of {name} have an exact result on {n} ranks")
    if case.redop == "avg" and (n & (n - 1) or not case.dtype.is_float):
        raise InvalidArgument(f"avg: is exact, and so checked, for floats on 2, 4, 8... ranks, got {name} on {n}")
    return low, high


def values(case: Case, rank: int, seed: int) -> Array:
    """One period of a rank's values: integers in float64 whose reduction is exact in the case's type."""
    return np.random.default_rng([seed, rank]).integers(*value_range(case), PERIOD).astype(np.float64)


def parse_size(text: str) -> int:
    """Bytes from "64", "1K", "64M" or "1G" (powers of 1024)."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    unit = units.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdigit() or int(digits) == 0:
        raise ValueError(f"expected a size such as 512, 64K or 16M, got {text!r}")
    return int(digits) * unit


def parse_sizes(text: str) -> list[int]:
    """Bytes from "first:last:xFACTOR" ("1K:64M:x2"), or from a list ("64K,1M")."""
    if ":" not in text:
        return [parse_size(part) for part in text.split(",")]
    parts = text.split(":")
    if len(parts) != 3 or not parts[2].startswith("x") or not parts[2][1:].isdigit() or int(parts[2][1:]) < 2:
        raise ValueError(f"expected first:last:xFACTOR such as 1K:64M:x2, got {text!r}")
    sizes, last = [parse_size(parts[0])], parse_size(parts[1])
    if last < sizes[0]:
        raise ValueError(f"expected sizes that grow, got {text!r}")
    while (larger := sizes[-1] * int(parts[2][1:])) <= last:
        sizes.append(larger)
    return sizes
