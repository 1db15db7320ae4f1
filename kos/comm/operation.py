"""One table of the operations: what each rank gives and gets, and by what it runs; and a request as data.

A new collective is a row here and a method of ``collectives.Operations``.  A collective that only moves data then runs
on every backend: in host memory by messages, on GPUs by an exchange of pieces.  The model of its results, with which
the conformance suite checks it, is that of its row.

An ``Operation`` is a caller's request for one of them, with its options and, for a message, its ranks and tags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeVar, dataclass_transform

from kos.comm.reduction import Reduction
from kos.memory import Buffer

Pairs = Callable[[int, int, int, int], bool]
"""``(src, dst, root, size)``: whether the result of rank dst depends on the input of rank src."""
WHOLE, PART, PARTS = "whole", "part", "parts"
"""An array of the same size on all ranks; one rank's part; the parts of all ranks, in rank order."""


def _all(src: int, dst: int, root: int, size: int) -> bool:
    return True


def _from_root(src: int, dst: int, root: int, size: int) -> bool:
    return src == root


def _to_root(src: int, dst: int, root: int, size: int) -> bool:
    return dst == root


def _up_to(src: int, dst: int, root: int, size: int) -> bool:
    return src <= dst


def _below(src: int, dst: int, root: int, size: int) -> bool:
    return src < dst


def _to_next(src: int, dst: int, root: int, size: int) -> bool:
    return dst == (src + 1) % size


@dataclass(frozen=True, slots=True)
class Facts:
    """A row of the table."""

    pairs: Pairs
    input: str
    output: str
    result: str = "T"
    """The type of what the call returns: T is the type of ``out``, or of ``x`` where ``out`` may be left out."""
    reduces: bool = False
    in_place: bool = False
    """Whether the call overwrites ``x`` if it gets no ``out``."""
    varies: bool = False
    """Whether the parts have sizes of their own, which are the call's counts."""
    compresses: bool = False
    message: bool = False
    """Whether two ranks take part, not all.  In the model and in benchmarks, a rank then sends to the next one."""
    schedule: str = ""
    """The default schedule of messages between hosts; without one, each piece is a message."""
    ordered: str = ""
    """The default schedule that adds in rank order."""
    hierarchical: bool = False
    """Whether it runs in phases, within hosts and between them, if hosts have several ranks each."""
    core: int | None = None
    """The ``enum kos_operation`` of ``kos/_core/core.h``, as which the core runs it within a host."""

    @property
    def rooted(self) -> bool:
        """Whether it has a root."""
        return self.root_gives or self.pairs is _to_root

    @property
    def root_gives(self) -> bool:
        """Whether only the root's input counts."""
        return self.pairs is _from_root

    def sources(self, rank: int, root: int, size: int) -> list[int]:
        """The ranks on whose input the result of ``rank`` depends."""
        return [src for src in range(size) if self.pairs(src, rank, root, size)]


OPERATIONS = {
    "all_reduce": Facts(_all, WHOLE, WHOLE, reduces=True, in_place=True, compresses=True, schedule="ring",
                        ordered="two_shot", hierarchical=True, core=3),
    "reduce": Facts(_to_root, WHOLE, WHOLE, "T | None", reduces=True, in_place=True, schedule="tree",
                    ordered="one_shot", hierarchical=True, core=2),
    "reduce_scatter": Facts(_all, PARTS, PART, reduces=True, compresses=True, schedule="ring", ordered="one_shot",
                            hierarchical=True, core=8),
    "reduce_scatter_v": Facts(_all, PARTS, PART, reduces=True, varies=True, compresses=True, core=8),
    "scan": Facts(_up_to, WHOLE, WHOLE, reduces=True, in_place=True, schedule="chain", ordered="chain", core=9),
    "exscan": Facts(_below, WHOLE, WHOLE, "T | None", reduces=True, in_place=True, schedule="chain", ordered="chain",
                    core=10),
    "broadcast": Facts(_from_root, WHOLE, WHOLE, in_place=True, schedule="tree", hierarchical=True, core=1),
    "all_gather": Facts(_all, PART, PARTS, compresses=True, schedule="ring", hierarchical=True, core=4),
    "all_gather_v": Facts(_all, PART, PARTS, varies=True, compresses=True, core=4),
    "all_to_all": Facts(_all, PARTS, PARTS, compresses=True, schedule="pairwise", core=7),
    "all_to_all_v": Facts(_all, PARTS, PARTS, varies=True, compresses=True, core=7),
    "gather": Facts(_to_root, PART, PARTS, "T | None", schedule="direct", core=5),
    "gather_v": Facts(_to_root, PART, PARTS, "T | None", varies=True, core=5),
    "scatter": Facts(_from_root, PARTS, PART, schedule="direct", core=6),
    "scatter_v": Facts(_from_root, PARTS, PART, varies=True, core=6),
    "send_recv": Facts(_to_next, WHOLE, WHOLE, message=True, core=13),
    "send": Facts(_to_next, WHOLE, WHOLE, "None", message=True, core=11),
    "recv": Facts(_to_next, WHOLE, WHOLE, message=True, core=12),
    "send_bytes": Facts(_to_next, WHOLE, WHOLE, "None", message=True),
    "recv_bytes": Facts(_to_next, WHOLE, WHOLE, "bytes", message=True),
    "probe": Facts(_to_next, WHOLE, WHOLE, "", message=True),
    "barrier": Facts(_all, WHOLE, WHOLE, "None", core=0),
}  # fmt: skip
"""The operations by name."""
COLLECTIVES = {name: row for name, row in OPERATIONS.items() if not row.message and name != "barrier"}
"""Those that move or reduce arrays of all ranks."""


T = TypeVar("T")

POINT_TO_POINT = frozenset(name for name, row in OPERATIONS.items() if row.message)
"""Messages: operations of two ranks."""
CORE_OPERATIONS = (*(name for name in OPERATIONS if name != "probe"), "_all_gather_frames")
"""Operations that the compiled core may start by itself (``kos/_core/module_eager.c``).  Python starts all others."""
GROUP_CALLS = ("split", "group", "grid", "duplicate")
"""Calls that make groups.  As operations, with which the ranks compare these calls, they are barriers."""


class Wildcard(IntEnum):
    """The type of ``ANY`` and ``NOBODY``."""

    ANY = -1
    NOBODY = -2

    def __repr__(self) -> str:
        return f"kos.{self.name}"

    __str__ = __repr__


ANY = Wildcard.ANY
"""Stands for any tag in a receive or probe (MPI_ANY_TAG); internally also for any source."""
NOBODY = Wildcard.NOBODY
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
    """Destination and source of a message, as ranks of the group (ANY, NOBODY), and the tag of each direction (ANY)."""

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
