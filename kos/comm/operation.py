"""Operation: a caller's request as data, with its options and, for a message, its ranks and tags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, dataclass_transform

from kos.comm.reduction import Reduction
from kos.memory import Buffer

T = TypeVar("T")

POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
EAGER = (
    "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all", "scan",
    "exscan", "barrier", "send", "recv", "send_recv", "reduce_scatter_v", "all_gather_v", "gather_v", "scatter_v",
    "all_to_all_v",
)  # fmt: skip
"""Operations that the compiled core may make by itself (``kos/_core/module_eager.c``)."""
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
    ``on_stream``: a barrier of work on a stream, not of the host.  ``purpose`` names the user's call if this operation
    implements another one.  ``compress``: the format in which data travels, of ``kos.comm.compression``; "" for none.
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

    Its buffers are those of the caller, or in a ``Prepared`` their descriptions, without memory (``without_memory``).
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

    @property
    def ranks(self) -> Any:
        """The ranks and counts that the caller named: root, message, or root with counts."""
        if self.send_counts is not None or self.recv_counts is not None:
            return self.root, self.send_counts, self.recv_counts
        return self.root if self.collective else self.message

    def without_memory(self) -> Operation:
        """The same request of any arrays that are alike; see ``Buffer.without_memory``."""
        send = self.send and self.send.without_memory(0)
        recv = send if self.recv is self.send else self.recv and self.recv.without_memory(1)
        return replace(self, send=send, recv=recv)

    def values(self, backend: str, kernel: str | None) -> dict[str, Any]:
        """All properties of a call that must be equal on all ranks."""
        buffer = self.send or self.recv
        values: dict[str, Any] = {
            "operation": self.name,
            "dtype": buffer.dtype.name if buffer else None,
            "count": self.common_count(),
            "op": self.reduction.op.name if self.reduction else None,
            "root": self.root,
            "algorithm": self.options.algorithm,
            "deterministic": self.options.deterministic,
            "purpose": self.options.purpose or None,
            "compress": self.options.compress or None,
            "backend": backend,
            "kernel": kernel,
        }
        if self.name in ("all_gather_v", "reduce_scatter_v", "gather_v", "scatter_v"):
            values["counts"] = list(self.recv_counts or self.send_counts or ())
        return values

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
        if self.options.compress:
            text += f", compressed by {self.options.compress}"
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
