"""Operation: a caller's request as data, with its options and, for a message, its ranks and tags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeVar, dataclass_transform

from kos.comm.operations import OPERATIONS
from kos.comm.reduction import Reduction
from kos.memory import Buffer

T = TypeVar("T")

POINT_TO_POINT = frozenset(name for name, row in OPERATIONS.items() if row.message)
"""Messages: operations of two ranks."""
CORE_OPERATIONS = (*(name for name in OPERATIONS if name != "probe"), "_all_gather_frames")
"""Operations that the compiled core may start by itself (``kos/_core/module_eager.c``).  Python starts all others."""
GROUP_CALLS = ("split", "group", "grid", "duplicate")
"""Calls that make groups.  As operations, with which the ranks compare these calls, they are barriers."""
ANY = -1
"""The source of a message that any rank may send."""


class Nobody(IntEnum):
    """The type of ``NOBODY``."""

    NOBODY = -2

    def __repr__(self) -> str:
        return "kos.NOBODY"

    __str__ = __repr__


NOBODY = Nobody.NOBODY
"""Stands for a rank as the source or destination of a message: the call does nothing (MPI_PROC_NULL)."""
AUTO = "auto"
"""The default algorithm."""
COLLECTIVE_TAGS = 1 << 20
"""Smaller tags belong to users; collectives use as many larger ones, by sequence number."""


@dataclass_transform(frozen_default=True)
def _frozen(kind: type[T]) -> type[T]:
    """A dataclass that only mypy treats as frozen: freezing at run time costs 1.2 µs, a sixth of a call."""
    return dataclass(slots=True, eq=False)(kind)


class Message(NamedTuple):
    """Destination and source of a message, as ranks of the group (ANY, NOBODY), and the tag of each direction."""

    dst: int | None = None
    src: int | None = None
    tag: int = 0
    recv_tag: int = 0


NO_MESSAGE = Message()


class Options(NamedTuple):
    """The options of a call.

    ``timeout`` is in seconds (None: no limit).  ``overlap`` runs beside the stream of the arrays (``async_op``).
    ``on_stream``: a barrier of the work on a stream, not of the program.  ``purpose`` names the user's call if this
    operation implements another one.  ``compress`` is the format in which data is sent (``kos.comm.compression``), ""
    for none.
    """

    timeout: float | None = None
    algorithm: str = AUTO
    deterministic: bool = False
    overlap: bool = False
    on_stream: bool = False
    purpose: str = ""
    compress: str = ""


DEFAULTS = Options()


@_frozen
class Operation:
    """A checked request of the caller.  Counts are elements, one for each rank.

    Its buffers are those of the caller, or in a ``Prepared`` their descriptions (``prepared.without_memory``).
    ``residual`` is the array for the error feedback of a compressed reduction, or None.
    """

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
    residual: Buffer | None = None

    @property
    def collective(self) -> bool:
        """Whether all ranks take part; False for messages."""
        return self.name not in POINT_TO_POINT
