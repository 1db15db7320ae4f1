"""One table of the operations: what each rank gives and gets, and by what it runs.

A new collective is a row here and a method of ``collectives.Operations``.  A collective that only moves data then runs
on every backend: in host memory by messages, on GPUs by an exchange of pieces.  The model of its results, with which
the conformance suite checks it, is that of its row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
