"""Operation: a caller's request as data.  Call: an operation as a communicator launches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, dataclass_transform

from kos.comm.reduction import Reduction
from kos.memory import Buffer

T = TypeVar("T")

POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
AUTO = "auto"
"""The default algorithm."""
COLLECTIVE_TAGS = 1 << 20
"""Smaller tags belong to users; collectives use as many larger ones, by sequence number."""


@dataclass_transform(frozen_default=True)
def _frozen(kind: type[T]) -> type[T]:
    """A dataclass that only mypy treats as frozen: freezing at run time costs 1.2 µs, a sixth of a call."""
    return dataclass(slots=True, eq=False)(kind)


class Message(NamedTuple):
    """Destination and source of a message, as ranks of the group, and the tag of each direction."""

    dst: int | None = None
    src: int | None = None
    tag: int = 0
    recv_tag: int = 0


NO_MESSAGE = Message()


@_frozen
class Options:
    """The options of a call.

    ``timeout`` is in seconds (None: no limit).  ``overlap`` runs beside the stream of the arrays (``async_op``).
    ``purpose`` names the user's call if this operation implements another one.
    """

    timeout: float | None = None
    algorithm: str = AUTO
    deterministic: bool = False
    overlap: bool = False
    stream: Any = None
    purpose: str = ""


DEFAULTS = Options()


@_frozen
class Operation:
    """A checked request of the caller.  Counts are elements, one for each rank."""

    name: str
    rank: int
    options: Options = DEFAULTS
    send: Buffer | None = None
    recv: Buffer | None = None
    reduction: Reduction | None = None
    root: int | None = None
    message: Message = NO_MESSAGE
    send_counts: Sequence[int] | None = None
    recv_counts: Sequence[int] | None = None

    @property
    def collective(self) -> bool:
        """Whether all ranks take part; False for messages."""
        return self.name not in POINT_TO_POINT

    def common_count(self) -> int | None:
        """Elements that each rank contributes, or gets, in this collective; None if ranks may differ."""
        if self.name == "barrier" or self.name.endswith("_v"):
            return None
        if self.name in ("scatter", "reduce_scatter"):
            return self.recv.count if self.recv else None
        buffer = self.send or self.recv
        return buffer.count if buffer else None

    def __str__(self) -> str:
        return self.text()

    def text(self, of: str = "") -> str:
        """`` of float32[4] by SUM``: everything but the name.  ``of`` follows the number of a rank."""
        text, message = "", self.message
        buffer = self.send or self.recv
        if buffer is not None:
            text += f" of {buffer}"
        if self.reduction is not None:
            text += f" by {self.reduction.op.name}"
        if self.root is not None:
            text += f", root {self.root}{of}"
        same = message.dst is not None and (message.dst, message.tag) == (message.src, message.recv_tag)
        if message.dst is not None:
            text += f", to {'and from ' * same}rank {message.dst}{of} with tag {message.tag}"
        if message.src is not None and not same:
            text += f", from rank {message.src}{of} with tag {message.recv_tag}"
        if self.options.purpose:
            text += f", for {self.options.purpose}"
        return text


@dataclass(slots=True, eq=False, weakref_slot=True)
class Route:
    """How a backend runs an operation, chosen by its ``prepare``.  Calls with the same arguments may share one."""

    backend: Any
    """The backend that runs it; under ``auto``, one of its backends."""
    launch: Callable[[int], None] | None = None
    """Queues it on the stream with that handle (GPU backends)."""
    kernel: str | None = None
    """The kernel, if it depends on more than the arguments and must be the same on all ranks."""
    overlap: bool = False
    """Whether it runs beside the stream of the arrays."""
    mark: int = 0
    """The fingerprint of the calls that share this route; 0: each call has its own, or none."""
    fixed: bool = True
    """Whether the call takes the same route inside and outside a graph."""


class Call:
    """An operation as a communicator launches it, once or many times.

    The communicator sets ``group`` (its name), ``of_group`` (of its ``Ledger``) and ``sequence``.  Collectives and
    messages have separate sequence numbers; those of collectives are equal on all ranks.  The backend sets ``route``,
    ``mark`` (the fingerprint, 0 until computed), and on a GPU ``stream`` (a handle) and ``queue`` (the stream object,
    which keeps it valid), or on a host ``plan``, made at the first launch.
    ``record`` and ``description`` belong to the flight recorder.
    """

    __slots__ = (
        "__weakref__", "collective", "description", "group", "mark", "of_group", "operation", "plan", "queue", "record",
        "route", "sequence", "stream",
    )  # fmt: skip

    stream: int
    queue: Any
    record: list[Any] | None
    description: tuple[Any, ...] | None

    def __init__(self, operation: Operation, group: str = "", sequence: int = -1, of_group: str = "") -> None:
        self.operation, self.group, self.sequence, self.of_group = operation, group, sequence, of_group
        self.collective = operation.name not in POINT_TO_POINT
        self.route: Route | None = None
        self.plan: Any = None
        self.mark = 0
        self.record = self.description = None

    @property
    def name(self) -> str:
        """The operation's name, such as "all_reduce"."""
        return self.operation.name

    def fingerprint(self) -> dict[str, Any]:
        """All properties of the call that must be equal on all ranks."""
        o, route = self.operation, self.route
        buffer = o.send or o.recv
        print_: dict[str, Any] = {
            "operation": o.name,
            "dtype": buffer.dtype.name if buffer else None,
            "count": o.common_count(),
            "op": o.reduction.op.name if o.reduction else None,
            "root": o.root,
            "algorithm": o.options.algorithm,
            "deterministic": o.options.deterministic,
            "purpose": o.options.purpose or None,
            "backend": route.backend.name if route is not None else None,
            "kernel": route.kernel if route is not None else None,
        }
        if o.name in ("all_gather_v", "reduce_scatter_v", "gather_v", "scatter_v"):
            print_["counts"] = list(o.recv_counts or o.send_counts or ())
        return print_

    def __str__(self) -> str:
        return f"{self.group}: {self.text}" if self.group else self.text

    @property
    def text(self) -> str:
        """``all_reduce #5 of float32[4] by SUM``: the text without the communicator."""
        return f"{self.operation.name} #{self.sequence}{self.arguments}"

    @property
    def arguments(self) -> str:
        """`` of float32[4], root 1 of the group``: what follows the number."""
        return self.operation.text(self.of_group)
