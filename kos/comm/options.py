"""The keywords that operations share, written once: their types, their defaults, their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar, get_args, get_type_hints

from kos.comm.arguments import check_timeout
from kos.comm.operation import Operation
from kos.comm.schedules import algorithms, collectives
from kos.errors import InvalidArgument

Call = TypeVar("Call", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """Of every operation."""

    async_op: bool
    timeout: float | None


class CollectiveOptions(Options, total=False):
    """Of those that schedules carry."""

    algorithm: str


class ReductionOptions(CollectiveOptions, total=False):
    """Of those that add."""

    deterministic: bool


_DEFAULTS = {"async_op": False, "timeout": None, "algorithm": "auto", "deterministic": False}
_OF_OPERATION: dict[str, frozenset[str]] = {}


def operation(call: Call) -> Call:
    """Note which options a method takes, and show them by name to ``help`` and ``inspect.signature``."""
    (options,) = get_args(get_type_hints(call)["options"])
    _OF_OPERATION[call.__name__] = frozenset(options.__annotations__)
    signature = inspect.signature(call)
    parameters = list(signature.parameters.values())[:-1]
    for name, kind in options.__annotations__.items():
        only, default = inspect.Parameter.KEYWORD_ONLY, _DEFAULTS[name]
        parameters.append(inspect.Parameter(name, only, default=default, annotation=kind.__forward_arg__))
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def apply(options: Mapping[str, Any], o: Operation) -> bool:
    """Set in ``o`` what the call's options say; returns ``async_op``."""
    if not options.keys() <= (known := _OF_OPERATION[o.name]):
        raise TypeError(f"{o.name}() got an unexpected keyword argument {min(options.keys() - known)!r}")
    get = options.get
    if (timeout := get("timeout")) is not None:
        o.timeout = check_timeout(timeout)
    o.deterministic = bool(get("deterministic"))
    if (algorithm := get("algorithm", "auto")) != "auto":
        o.algorithm = algorithm
        _check_algorithm(o)
    return bool(get("async_op"))


def _check_algorithm(o: Operation) -> None:
    allowed = algorithms(o.name, ordered=True if o.deterministic else None) if o.name in collectives() else ()
    if o.algorithm not in allowed:
        why = " that add in rank order (deterministic=True)" if o.deterministic else ""
        names = f" or one of {', '.join(allowed)}{why}" if allowed else ""
        raise InvalidArgument(f"algorithm: expected 'auto'{names} for {o.name}, got {o.algorithm!r}")
