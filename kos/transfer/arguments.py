"""Checks of the arguments of ``kos.transfer``, made before anything is sent; errors name expected and got."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kos.comm.arguments import check_int
from kos.errors import InvalidArgument, raised_as


def check_name(what: str, name: Any) -> str:
    """The name of an array or a tensor.  An empty name stands for the name of the array."""
    if not isinstance(name, str):
        raise InvalidArgument(f"{what}: expected a string, got {name!r:.80}")
    return name


def check_at_least(what: str, value: Any, low: int) -> int:
    """``value`` as an int, which must be at least ``low``."""
    if (number := check_int(what, value, f" from {low} on")) < low:
        raise InvalidArgument(f"{what}: expected a whole number from {low} on, got {value!r}")
    return number


def check_shape(what: str, shape: Any) -> tuple[int, ...]:
    """A shape as a tuple of ints."""
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:  # not a sequence, or not of whole numbers
        sizes = (-1,)
    if min(sizes, default=0) < 0:
        raise InvalidArgument(f"{what}: expected a shape, such as (4, 4), got {shape!r:.80}")
    return sizes


def check_one_of(what: str, value: Any, *known: str) -> None:
    """``value`` must be one of ``known``."""
    if value not in known:
        expected = ", ".join(map(repr, known[:-1]))
        raise InvalidArgument(f"{what}: expected {expected} or {known[-1]!r}, got {value!r:.80}")


def check_patience(patience: Any, comm: Any) -> float:
    """``patience`` in seconds.  It must be less than the timeout of ``comm``, whose other ranks wait meanwhile."""
    real = isinstance(patience, int | float | np.integer | np.floating) and not isinstance(patience, bool)
    if not real or not 0 <= patience < math.inf:
        raise InvalidArgument(f"patience: expected a number of seconds from 0 on, got {patience!r}")
    if comm is not None and patience >= comm.timeout:
        expected = f"less than the communicator's timeout of {comm.timeout:g} s"
        raise InvalidArgument(f"patience: expected {expected}, got {patience:g}")
    return float(patience)


def check_axis(what: str, axis: Any, shape: tuple[int, ...]) -> int:
    """``axis`` as an int, which must be an axis of this shape."""
    if check_int(f"{what}: axis", axis) not in range(len(shape)):
        raise InvalidArgument(f"{what}: expected an axis of shape {shape} from 0 on, got axis {axis}")
    return int(axis)


def check_kind(what: str, value: Any, kind: type, expected: str) -> None:
    """An instance of ``kind``, which ``expected`` describes."""
    if not isinstance(value, kind):
        raise InvalidArgument(f"{what}: expected {expected}, got {type(value).__name__}")


def check_dict(what: str, values: Any, of: str) -> Mapping[str, Any]:
    """A mapping from names to values.  Errors describe the values as ``of``."""
    check_kind(what, values, Mapping, f"a dict of name -> {of}")
    for name in values:
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"{what}: expected non-empty strings as names, got {name!r:.80}")
    return values


def check_shapes(what: str, shapes: Any) -> dict[str, tuple[int, ...]]:
    """A mapping from names to shapes, which become tuples of ints."""
    return {name: check_shape(name, shape) for name, shape in check_dict(what, shapes, "shape").items()}


def check_arrays(arrays: Any, *kinds: type) -> Mapping[str, tuple[Any, Any]]:
    """A mapping from names to pairs (array, instance of one of ``kinds``).  ``LocalArrays`` checks the arrays."""
    pair = f"(array, {' or '.join(kind.__name__ for kind in kinds)})"
    for name, found in check_dict("arrays", arrays, pair).items():
        if not isinstance(found, tuple | list) or len(found) != 2 or not isinstance(found[1], kinds):
            got = type(found).__name__
            if isinstance(found, tuple | list):
                got = f"({', '.join(type(each).__name__ for each in found)})"
            raise InvalidArgument(f"{name}: expected a pair {pair}, got {got}")
    return arrays


def check_comm(comm: Any) -> None:
    """None, a communicator, or another object that has its method ``all_gather_bytes``."""
    if comm is not None and not hasattr(comm, "all_gather_bytes"):
        raise InvalidArgument(f"comm: expected a communicator or None, got {type(comm).__name__}")


def check_expression(what: str, pattern: Any) -> re.Pattern[str]:
    """The compiled regular expression."""
    if not isinstance(pattern, str):
        raise InvalidArgument(f"{what}: expected a regular expression, got {pattern!r:.80}")
    with raised_as(InvalidArgument, f"{what}: expected {pattern!r} to be a regular expression", re.error):
        return re.compile(pattern)
