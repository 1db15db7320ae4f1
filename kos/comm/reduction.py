"""Reduce operations: their names, the dtypes they accept, and their implementation on host memory."""

from __future__ import annotations

import contextvars
import enum
import math
import numbers
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kos.dtypes import DTYPES, DType
from kos.errors import InvalidArgument

Array = np.ndarray[Any, Any]
Combine = Callable[[Array, Array], None]  # (dst, src): dst = op(dst, src)


class ReduceOp(enum.Enum):
    """The reduce operations, named as torch.distributed names them; PRODUCT is torch's name of PROD."""

    SUM = "sum"
    PROD = "prod"
    PRODUCT = PROD
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    PREMUL_SUM = "premul_sum"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python, on every lookup


@dataclass(frozen=True, slots=True)
class PremulSum:
    """PREMUL_SUM with its factor: every rank multiplies its input by its own factor before the sum.

    The factor is a real number, or an array of NumPy without dimensions, also for complex arrays.  A finite factor
    must be finite in the arrays' dtype.
    """

    factor: float

    def __post_init__(self) -> None:
        if isinstance(self.factor, np.ndarray) and self.factor.ndim == 0:  # NumPy's form of a single number
            object.__setattr__(self, "factor", self.factor[()])

    def __eq__(self, other: object) -> bool:
        if type(other) is not PremulSum or self.factor != other.factor:
            return self is other
        return self.factor != 0 or str(self.factor) == str(other.factor)  # products with 0.0 and -0.0 differ


_ACCUMULATING = frozenset({ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM, ReduceOp.PROD})
_COMPARING = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_INTEGER = frozenset({ReduceOp.SUM, ReduceOp.PROD}) | _COMPARING | _BITWISE
_ALLOWED: dict[str, frozenset[ReduceOp]] = {
    "float": _ACCUMULATING | _COMPARING,
    "complex": _ACCUMULATING,
    "int": _INTEGER,
    "uint": _INTEGER,
    "bool": _COMPARING | _BITWISE,
}


class _Quiet(threading.local):
    """A context for each thread, in which overflow and NaN raise no warning.

    ``np.errstate`` would cost more than adding a few thousand numbers.
    """

    def __init__(self) -> None:
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        self.run = context.run


_quiet = _Quiet()


def _combine(ufunc: np.ufunc) -> Combine:
    def combine(dst: Array, src: Array) -> None:
        _quiet.run(ufunc, dst, src, out=dst)

    return combine


def _complex_product(dst: Array, src: Array) -> None:
    # Into a temporary: if the output is an input, NumPy rounds a product of single complex numbers differently.
    np.copyto(dst, _quiet.run(np.multiply, dst, src))


_UFUNCS = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM), np.add),
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_COMBINE = {ufunc: _combine(ufunc) for ufunc in _UFUNCS.values()}


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduce operation resolved for one dtype and one group size.

    ``stage`` converts a contribution to the type of the reduction (fp32 for 16-bit and 8-bit floats), ``combine`` adds
    one contribution to another, ``finish`` scales and rounds once.  A boolean is true if its byte is not 0, and
    ``stage`` makes that byte 1.
    """

    op: ReduceOp
    dtype: DType
    size: int
    factor: float
    carrier: np.dtype[Any]
    combine: Combine
    is_plain: bool  # contributions need no scaling or conversion
    element: DType  # what the kernels add: of complex numbers, but for products, the parts
    parts: int  # such elements in an element of the arrays

    def stage(self, x: Array, out: Array | None) -> Array:
        """A writable copy of the 1-D ``x`` in the carrier type: in ``out`` if that has this type, else new."""
        if out is None or out.dtype != self.carrier:
            out = np.empty(x.shape, self.carrier)
        if self.dtype.kind == "bool":
            np.not_equal(x.view(np.uint8), 0, out=out)
        elif out is not x:
            np.copyto(out, x, casting="unsafe")
        if self.op is ReduceOp.PREMUL_SUM:
            parts = out.view(out.real.dtype)  # of complex numbers: NumPy's products of those round differently
            _quiet.run(np.multiply, parts, parts.dtype.type(self.factor), out=parts)
        return out

    def finish(self, reduced: Array, out: Array) -> None:
        """Write the reduced carrier values to ``out`` (which may be the same array)."""
        if self.op is ReduceOp.AVG:
            _quiet.run(np.divide, reduced, self.carrier.type(self.size), out=reduced)
        if out is not reduced:
            with np.errstate(all="ignore"):
                np.copyto(out, reduced, casting="unsafe")


def resolve(op: Any, dtype: DType, size: int) -> Reduction:
    """Check that ``op`` is valid for ``dtype``; raises InvalidArgument naming both if it is not."""
    return (_resolve if type(op) is ReduceOp else _resolve.__wrapped__)(op, dtype, size)


def _factor(given: Any, dtype: DType) -> float:
    """The factor of a PremulSum, which must not overflow in ``dtype``."""
    if isinstance(given, numbers.Real):
        # float() of a whole number beyond float64; NumPy counts its durations among the real numbers
        with suppress(OverflowError, TypeError), np.errstate(all="ignore"):
            factor = float(given)
            if not math.isfinite(factor) or np.isfinite(np.array(factor).astype(dtype.numpy)):
                return factor
    raise InvalidArgument(f"op: expected PremulSum of a real number that {dtype.name} can hold, got {given!r:.40}")


@lru_cache
def _resolve(op: Any, dtype: DType, size: int) -> Reduction:
    factor = 1.0
    if isinstance(op, PremulSum):
        op, factor = ReduceOp.PREMUL_SUM, _factor(op.factor, dtype)
    elif op is ReduceOp.PREMUL_SUM:
        raise InvalidArgument("op: expected PremulSum(factor) for PREMUL_SUM, got ReduceOp.PREMUL_SUM alone")
    if not isinstance(op, ReduceOp):
        raise InvalidArgument(f"op: expected a ReduceOp or PremulSum(factor), got {op!r}")
    allowed = _ALLOWED[dtype.kind]
    if op not in allowed:
        names = ", ".join(o.name for o in ReduceOp if o in allowed)
        raise InvalidArgument(f"op: expected one of {names} for {dtype.name}, got {op.name}")
    carrier = dtype.accumulate if op in _ACCUMULATING else dtype.numpy
    combine = _complex_product if op is ReduceOp.PROD and dtype.kind == "complex" else _COMBINE[_UFUNCS[op]]
    plain = carrier == dtype.numpy and op is not ReduceOp.PREMUL_SUM and dtype.kind != "bool"
    paired = dtype.kind == "complex" and op is not ReduceOp.PROD
    element = DTYPES[f"float{4 * dtype.itemsize}"] if paired else dtype
    return Reduction(op, dtype, size, factor, carrier, combine, plain, element, 2 if paired else 1)
