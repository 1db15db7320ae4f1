"""The semantics of every operation, as a serial model in NumPy: arguments, results, calls in place, rounding.

A ``Step`` describes one call.  ``contributions`` returns its inputs on all ranks, and ``result`` what a rank gets.  A
``Trial`` makes the call on one rank and checks what it returned and wrote.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from threading import Lock
from typing import Any

import ml_dtypes
import numpy as np

from kos.comm import Communicator, PremulSum, ReduceOp
from kos.comm.compression import FORMATS, IN_PHASES, Format
from kos.comm.operation import COLLECTIVES, OPERATIONS, PART, PARTS
from kos.comm.schedules import algorithms, collectives
from kos.dtypes import dtype_of
from kos.testing.conformance.values import Array, assert_bits, assert_numbers, poison, vector, wrong_elements

REDUCING = tuple(name for name, row in COLLECTIVES.items() if row.reduces)
MOVING = (*(name for name, row in COLLECTIVES.items() if not row.reduces), "send_recv")
"""Those that move data, in host memory and on GPUs.  ``send_recv`` is last: groups of one rank leave it out."""
ROOTED = tuple(name for name, row in COLLECTIVES.items() if row.rooted)
GATHERING, SCATTERING, EXCHANGING = (
    tuple(name for name, row in COLLECTIVES.items() if (row.input, row.output) == shape)
    for shape in ((PART, PARTS), (PARTS, PART), (PARTS, PARTS))
)
IN_PLACE = tuple(name for name, row in COLLECTIVES.items() if row.in_place)
COMPRESSED = tuple(name for name, row in COLLECTIVES.items() if row.compresses)

UFUNCS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or, ReduceOp.BXOR: np.bitwise_xor,
}  # fmt: skip

SUMS_IN_16_BITS = ContextVar("SUMS_IN_16_BITS", default=False)
"""Whether a sum of 16-bit floats may be rounded at every rank, as NCCL's own sums are."""


@dataclass(frozen=True)
class Step:
    """One call; values that depend on the size of the group are taken modulo that size."""

    name: str
    count: int = 6  # elements
    dtype: Any = np.float32
    op: Any = ReduceOp.SUM
    root: int = 0
    algorithm: int = 0  # 0: auto; else by number
    deterministic: bool = False
    in_place: bool = False
    sized: bool = field(default=True, kw_only=True)  # whether a form with counts gets them
    made: bool = field(default=False, kw_only=True)  # whether the call makes the array of its result
    other: bool = field(default=False, kw_only=True)  # ranks other than the root pass None, or an unused array
    counts: Any = field(default=None, kw_only=True)  # a tuple, for a form with counts; None: they follow from count
    compress: str = field(default="", kw_only=True)
    values: str = field(default="any", kw_only=True)  # the kind of numbers: see ``vector``

    def __str__(self) -> str:
        """The call as text, such as ``broadcast of 7 x float32, root 1``."""
        shown = {"op": self.op if self.name in REDUCING else None, "root": self.root if self.name in ROOTED else None}
        for name in ("algorithm", "deterministic", "in_place", "made", "other", "compress"):
            shown[name] = getattr(self, name) or None
        words = [f"{name} {value}" for name, value in shown.items() if value is not None]
        return ", ".join([f"{self.name} of {self.count} x {np.dtype(self.dtype)}", *words])

    @property
    def is_exact(self) -> bool:
        """Whether ``result`` has the bits of the call: nothing is added, or in rank order, or without rounding."""
        if self.name in MOVING or self.compress or self.values == "whole":
            return True
        in_order = self.deterministic or self.name in ("scan", "exscan")
        return in_order and self.op is ReduceOp.SUM and np.dtype(self.dtype).kind != "c"


def uneven(step: Step, n: int) -> list[int]:
    """The elements of each rank in a form with one list of counts."""
    if step.counts is not None:
        return [*step.counts]
    return [step.count + 3 * rank if step.compress else (step.count + rank) % 4 for rank in range(n)]


def pairs(step: Step, n: int) -> list[list[int]]:
    """The elements from each rank (row) to each (column) in an all_to_all_v."""
    if step.counts is not None or step.compress:
        return [[*row] for row in step.counts or [uneven(step, n)] * n]
    return [[(step.count + 2 * row + column) % 3 for column in range(n)] for row in range(n)]


def shards(step: Step, n: int) -> list[list[int]]:
    """The elements of each part of the longer array of each rank, one row per rank."""
    if step.name == "all_to_all_v":
        return pairs(step, n)
    return [uneven(step, n) if step.name.endswith("_v") else [step.count] * n] * n


def lengths(step: Step, n: int) -> list[int]:
    """The elements of each rank's input."""
    rows = shards(step, n)
    return [sum(row) for row in rows] if OPERATIONS[step.name].input == PARTS else rows[0]


def in_place(step: Step, n: int, me: int, x: Array, out: Array) -> tuple[Array, Array]:
    """The arrays of the call in place, which hold what ``x`` does: the same one twice, or one is a part of the other.

    Those given, for an operation that has no such form or a rank that passes one array.
    """
    counts, whole = shards(step, n)[me], me == step.root % n or step.name not in ROOTED
    part = slice(sum(counts[:me]), sum(counts[: me + 1]))
    if step.name in IN_PLACE:
        return x, x
    if step.name in GATHERING and whole:
        out[part] = x
        return out[part], out
    return (x, x[part]) if step.name in SCATTERING and whole else (x, out)


def contributions(seed: int, step: Step, n: int) -> list[Array]:
    """The input of each rank, which any rank can generate."""
    return [vector([seed, rank], length, step.dtype, step.values) for rank, length in enumerate(lengths(step, n))]


_inputs = lru_cache(8)(contributions)
_inputs_lock = Lock()  # ranks that are threads need the same inputs: one generates them, and the others wait


def parts(step: Step, xs: list[Array], me: int) -> list[Array] | None:
    """The parts of rank ``me``'s result, to be reduced or concatenated; None if it has no result."""
    if step.name == "barrier":
        return None
    n, row = len(xs), OPERATIONS[step.name]
    mine = xs
    if row.input == PARTS:
        starts = [list(pairwise(np.cumsum([0, *counts])))[me] for counts in shards(step, n)]
        mine = [x[start:end] for x, (start, end) in zip(xs, starts, strict=True)]
    return [mine[source] for source in row.sources(me, step.root % n, n)] or None


def result(step: Step, xs: list[Array], me: int, exact: int = 1) -> Array | None:
    """What rank ``me`` gets, as one vector; None if it has no result.

    Reductions add in rank order, 16-bit and 8-bit floats in fp32, and round once.  With compression, the
    receiver decodes what arrives, and an all_reduce compresses the sums again before it sends them.  Before an
    all_reduce or a reduce_scatter compresses, each ``exact`` ranks with consecutive numbers add exactly.
    """
    mine, n = parts(step, xs, me), len(xs)
    if mine is None:
        return None
    form = FORMATS[step.compress] if step.compress and n > 1 else None
    if form is not None and step.name in IN_PHASES and not step.deterministic:
        mine = [in_rank_order(mine[at : at + exact], step.op) for at in range(0, n, exact)]
    with np.errstate(all="ignore"):
        got = mine if form is None else [decoded(form, x) for x in mine]
        if step.name not in REDUCING:
            return np.concatenate(got).astype(step.dtype)
        total = in_rank_order(got, step.op).astype(step.dtype)
        if form is None or step.name != "all_reduce":
            return total
        return decoded(form, total).astype(step.dtype)


@lru_cache(32)  # the forms of a call have the same inputs, and ranks may be threads
def _known(step: Step, seed: int, n: int, me: int, exact: int) -> tuple[Array, list[Array] | None, Array | None]:
    """What rank ``me`` gives, the parts of its result, and its result (an array of that size if it is not exact)."""
    with _inputs_lock:
        xs = _inputs(seed, replace(step, op=ReduceOp.SUM, root=0, deterministic=False), n)
    mine = parts(step, xs, me)
    if step.is_exact or mine is None:
        return xs[me], mine, result(step, xs, me, exact)
    return xs[me], mine, mine[0]


def factors_of(size: int) -> list[float]:
    """The factor of each rank for PREMUL_SUM."""
    return [0.5 + 0.25 * rank for rank in range(size)]


def reduced(xs: Sequence[Array], op: ReduceOp, factors: Sequence[float], wide: Any) -> Array:
    """((x0 + x1) + x2) + ... in the dtype ``wide``; ``factors`` are those of PREMUL_SUM."""
    each = [x.view(np.uint8) != 0 if x.dtype == np.bool_ else x.astype(wide) for x in xs]
    if op is ReduceOp.PREMUL_SUM:
        each = [x * x.dtype.type(factor) for x, factor in zip(each, factors, strict=False)]
    total: Array = each[0]
    for x in each[1:]:
        total = UFUNCS.get(op, np.add)(total, x)
    return total / total.dtype.type(len(xs)) if op is ReduceOp.AVG else total


def in_rank_order(xs: Sequence[Array], op: ReduceOp = ReduceOp.SUM, factors: Sequence[float] = ()) -> Array:
    """((x0 + x1) + x2) + ... in fp32 or wider, rounded once; ``factors`` are those of PREMUL_SUM."""
    dtype = xs[0].dtype
    with np.errstate(all="ignore"):
        return reduced(xs, op, factors or factors_of(len(xs)), dtype_of(dtype).accumulate).astype(dtype)


def check(got: Array, contributions: list[Array], op: ReduceOp, factors: list[float]) -> None:
    """Check a result: integers and comparisons exactly, sums and products within the rounding of their type.

    The expected result is computed in 64 bits.  With any operation, a NaN of one rank makes the result NaN.  The
    minimum and the maximum of 0.0 and -0.0 may be either.
    """
    dtype = contributions[0].dtype
    wide = {"i": np.int64, "u": np.uint64, "b": np.bool_, "c": np.complex128}.get(dtype.kind, np.float64)
    expected = reduced(contributions, op, factors, wide)
    if dtype.kind in "iub":
        return assert_bits(got, expected.astype(dtype), str(op))
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        zero = dtype.type(0)  # -0.0 + 0.0 is 0.0
        return assert_numbers(got + zero, expected.astype(dtype) + zero, str(op))
    n = len(contributions)
    carrier = dtype_of(dtype).accumulate
    if SUMS_IN_16_BITS.get() and dtype.itemsize == 2:
        carrier = dtype
    eps = float(ml_dtypes.finfo(carrier).eps)
    magnitude = reduced([np.abs(c.astype(wide)) for c in contributions], op, [abs(f) for f in factors], np.float64)
    bound = (n + 2) * (eps * magnitude + float(ml_dtypes.finfo(carrier).smallest_subnormal))
    result: Array = got.astype(wide)
    good = np.abs(result - expected) <= 4 * bound
    low, high = expected - bound, expected + bound
    if carrier != dtype:
        # The result is rounded once. It lies between the exact result minus and plus the
        # error of the type that carries the sum, each rounded.
        low, high = (each.astype(np.float32).astype(dtype).astype(np.float64) for each in (low, high))
        good = (low <= result) & (result <= high)
    good |= np.isnan(result) & (np.isnan(low) | np.isnan(high))
    assert good.all(), f"{op} of {dtype} on {n}: {wrong_elements(~good, got, expected)}"


def decoded(form: Format, x: Array) -> Array:
    """``x`` after it was encoded and decoded, as float32."""
    out = np.empty(x.size, np.float32)
    form.decode(form.encode(np.ascontiguousarray(x)), out)
    return out


def fed_back(form: Format, x: Array, residual: Array) -> tuple[Array, Array]:
    """What a compressed call with a ``residual`` sends for ``x``, and the residual after the call.

    A finite number stays finite.  If a number does not arrive as a finite one, its residual is 0.
    """
    largest = float(ml_dtypes.finfo(x.dtype).max)
    with np.errstate(all="ignore"):
        total = x.astype(np.float32) + residual.astype(np.float32)
        sent = np.where(np.isfinite(x.astype(np.float32)), np.clip(total, -largest, largest), total).astype(x.dtype)
        lost = sent.astype(np.float32) - decoded(form, sent)
    return sent, np.where(np.isfinite(lost), lost, 0).astype(x.dtype)


def arguments(comm: Any, step: Step, x: Any, out: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the call; without ``out`` it makes an array, or works in place."""
    n, me, root = comm.size, comm.rank, step.root % comm.size
    op = PremulSum(factors_of(n)[me]) if step.op is ReduceOp.PREMUL_SUM else step.op
    options: dict[str, Any] = {}
    if step.name in REDUCING[:3]:
        options = {"op": op, "deterministic": step.deterministic}
    if step.name in collectives() and step.algorithm:
        known = algorithms(step.name, ordered=True if options.get("deterministic") else None)
        options["algorithm"] = known[step.algorithm % len(known)]
    if step.name in IN_PLACE and not step.in_place:
        options["out"] = out
    if step.compress:
        options["compress"] = step.compress
    table, row = shards(step, n), OPERATIONS[step.name]
    if row.root_gives and me != root and step.other == row.in_place:
        x = None
    counts, from_each = (table[me], [each[me] for each in table]) if step.sized else (None, None)
    values = {
        "x": x, "op": op, "root": root, "counts": counts, "send_counts": table[me], "recv_counts": from_each,
        "dst": (me + 1) % n, "src": (me - 1) % n,
        "out": None if row.rooted and not row.root_gives and me != root else out,
    }  # fmt: skip
    return [values[name] for name in _positional(step.name) if name not in options and name in values], options


@lru_cache
def _positional(name: str) -> list[str]:
    """The arguments of an operation that a call may pass without their names, but for the ``out`` of one in place."""
    parameters = inspect.signature(getattr(Communicator, name)).parameters.values()
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][1:]


def call(comm: Any, step: Step, x: Any, out: Any, **more: Any) -> Any:
    """Make the call; returns its result."""
    given, options = arguments(comm, step, x, out)
    return getattr(comm, step.name)(*given, **options, **more)


class Trial:
    """One call on this rank: its arrays, and a check of what it returned and wrote."""

    def __init__(self, comm: Any, step: Step, seed: int) -> None:
        self.comm, self.step = comm, step
        self.fill(seed)
        self.x, self.out = self._arrays()

    def _arrays(self) -> tuple[Array, Array]:
        n, me, step, x = self.comm.size, self.comm.rank, self.step, self.given.copy()
        out = poison((x if self.expected is None else self.expected).size, step.dtype)
        return in_place(step, n, me, x, out) if step.in_place else (x, out)

    def fill(self, seed: int) -> None:
        """Write other inputs into the arrays, for one more call."""
        call = replace(self.step, algorithm=0, in_place=False, sized=True, made=False, other=False)
        self.given, self.mine, self.expected = _known(
            call, seed, self.comm.size, self.comm.rank, self.comm.exact_group_size()
        )
        self.kept, self.untouched = self._arrays()
        if hasattr(self, "x"):
            self.x[...], self.out[...] = self._arrays()

    def start(self, **more: Any) -> Any:
        """Make the call; see ``call``."""
        return call(self.comm, self.step, self.x, None if self.step.made else self.out, **more)

    def check(self, got: Any = ...) -> Any:
        """Check what the call returned, if given, and that it wrote its result and nothing else; returns the result."""
        step, flat = self.step, None
        got = (None if self.expected is None else self.out) if got is ... else got
        assert (got is None) == (self.expected is None), f"{step} returned {got}"
        if self.expected is not None:
            assert step.made or got is self.out, f"{step} returned another array"
            flat = got.reshape(-1)
            if not step.is_exact:
                check(flat, self.mine or [], step.op, factors_of(self.comm.size))
            else:
                (assert_numbers if step.compress else assert_bits)(flat, self.expected, str(step))
        if flat is not None and not step.made:
            self.untouched[...] = self.out
        assert_bits(self.out, self.untouched, f"out of another rank in {step}")
        assert_bits(self.x, self.kept, f"input of {step}")
        return flat

    def run(self) -> Any:
        """Make the call and check it; returns the result as one vector."""
        return self.check(self.start())


def forms(step: Step) -> list[Step]:
    """The other forms of a call: it makes its result, sizes travel first, it works in place."""
    row = OPERATIONS[step.name]
    more = [replace(step, made=True)] if row.output == PARTS and not step.compress else []
    more += [replace(step, other=True)] if row.root_gives else []
    sizes = [step]
    if step.name.endswith("_v") and not step.compress:
        sizes.append(replace(step, sized=False))
        more.append(sizes[1])
    if step.name in (*IN_PLACE, *GATHERING, *SCATTERING):
        more += [replace(each, in_place=True) for each in sizes]
    return more
