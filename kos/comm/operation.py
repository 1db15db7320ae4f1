"""Operation: one call of a collective, or one message, as data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kos.comm.reduction import Reduction
from kos.memory import Buffer

POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
AUTO = "auto"
"""The algorithm of calls that name none."""
OF_BYTES = "all_gather_bytes"
"""The way of the two operations that the call of this name is made of."""
COLLECTIVE_TAGS = 1 << 20
"""Tags below are the users'; collectives use as many above, by sequence number."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Operation:
    """What the Communicator checked and hands to one backend.

    ``sequence`` counts the collectives of a communicator (equal on all ranks) and, apart from them, this
    rank's own messages.  Counts are elements, ``timeout`` is seconds (None waits for ever).
    """

    name: str
    rank: int
    send: Buffer | None = None
    recv: Buffer | None = None
    reduction: Reduction | None = None
    root: int | None = None
    dst: int | None = None
    src: int | None = None
    tag: int = 0
    recv_tag: int = 0
    send_counts: Sequence[int] | None = None
    recv_counts: Sequence[int] | None = None
    algorithm: str = AUTO
    deterministic: bool = False
    timeout: float | None = None
    sequence: int = -1
    group: str = ""  # the communicator's name
    stream: int = 0  # handle of the stream that GPU arrays are used in the order of
    queue: Any = None  # that stream itself, kept as long as its handle is
    overlap: bool = False  # on a GPU: beside that stream
    launch: Callable[[int], None] | None = None  # what a backend for GPUs resolved: queues it on a stream
    via: Any = None  # the backend that carries it, where one stands for several
    way: str | None = None  # how it goes there, where that depends on more than the arguments and must be one way
    mark: int = 0  # its fingerprint as a number, once it was announced to the ranks of the host
    record: list[Any] | None = None  # the flight recorder's slot
    said: tuple[Any, ...] | None = None  # what the flight recorder notes of it at each launch
    lasts: bool = True  # whether the same call is the same operation, within a graph or not
    asked: Any = None  # of one that is kept for the same call on the same arrays: the op or the root,
    output: weakref.ref[Any] | None = None  # the array of its result, unless it works in place,
    other: weakref.ref[Operation] | None = None  # and what other communicators keep for its input

    @property
    def collective(self) -> bool:
        return self.name not in POINT_TO_POINT

    def fingerprint(self) -> dict[str, Any]:
        """Everything that must be equal on all ranks for the call to belong together."""
        buffer = self.send or self.recv
        reduction = self.reduction
        print_: dict[str, Any] = {
            "operation": self.name,
            "dtype": buffer.dtype.name if buffer else None,
            "count": self._common_count(),
            "op": reduction.op.name if reduction else None,
            "root": self.root,
            "algorithm": self.algorithm,
            "deterministic": self.deterministic,
            "backend": self.via.name if self.via is not None else None,
            "way": self.way,
        }
        if self.name in ("all_gather_v", "reduce_scatter_v"):
            print_["counts"] = list(self.recv_counts or self.send_counts or ())
        return print_

    def _common_count(self) -> int | None:
        """Elements that each rank contributes, or gets, in this collective."""
        if self.name in ("all_gather_v", "reduce_scatter_v", "all_to_all_v", "barrier"):
            return None
        if self.name in ("scatter", "reduce_scatter"):
            return self.recv.count if self.recv else None
        buffer = self.send or self.recv
        return buffer.count if buffer else None

    def __str__(self) -> str:
        return f"{self.group}: {self.call}" if self.group else self.call

    @property
    def call(self) -> str:
        """``all_reduce #5 of float32[4] by SUM``: the text without the communicator."""
        text = f"{self.name} #{self.sequence}"
        buffer = self.send or self.recv
        if buffer is not None:
            text += f" of {buffer}"
        if self.reduction is not None:
            text += f" by {self.reduction.op.name}"
        if self.root is not None:
            text += f", root {self.root}"
        if self.dst is not None:
            text += f", to rank {self.dst} with tag {self.tag}"
        if self.src is not None:
            text += f", from rank {self.src} with tag {self.recv_tag}"
        if self.way == OF_BYTES:
            text += f", for {OF_BYTES}"
        return text
