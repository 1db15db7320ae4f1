"""Messages of the mpi transport: bytes with their dtype."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import numpy as np

from kos.comm.control import mpi_job
from kos.comm.operation import COLLECTIVE_TAGS
from kos.dtypes import DTYPE_CODES
from kos.errors import CollectiveMismatch

Array = np.ndarray[Any, Any]

_BYTES = np.dtype(np.uint8)
DTYPE_SHIFT = (2 * COLLECTIVE_TAGS).bit_length() - 1  # an MPI tag holds kos's tag and, above it, a dtype's code
TAG = (1 << DTYPE_SHIFT) - 1
LAST_CHECKS = 100  # checks for the last messages of a rank that has ended; together, they take a second or more
REFUSED_SECONDS = 1.0  # how long a mismatched message is still received, so that its sender does not wait
LARGEST = 2**31 - 1  # the largest count; Open MPI 5 has no large counts
_BLOCK = 1 << 16


class MPIMessage:
    """One end of a message; ``transport`` is its MPITransport."""

    __slots__ = (
        "_checked", "_checks_left", "_error", "_refused_until", "_transport", "array", "complete", "peer", "receives",
        "request", "tag", "wire_tag",
    )  # fmt: skip

    def __init__(self, transport: Any, array: Array, peer: int, tag: int) -> None:
        self._transport, self.array, self.peer, self.tag = transport, array, peer, tag & TAG
        self.wire_tag = self.tag | DTYPE_CODES[array.dtype] << DTYPE_SHIFT
        self.request: Any = None  # while MPI holds the message
        self.complete = self.receives = False
        self._error: CollectiveMismatch | None = None  # of a mismatched message, which is received and discarded
        self._refused_until = 0.0
        self._checked, self._checks_left = transport.checks, LAST_CHECKS

    def post(self, request: Any) -> None:
        self.request = request
        self._transport.active.add(self)

    def refuse(self, request: Any, error: CollectiveMismatch) -> None:
        """Receive and discard the message that arrived instead, for at most ``REFUSED_SECONDS``; then ``done`` raises.

        Between processes that may not read each other's memory, Open MPI completes a send of more than 4 KiB only while
        the receiver calls MPI.  After the error, the receiver's program may never call it again.
        """
        self._error, self._refused_until = error, time.monotonic() + REFUSED_SECONDS
        self.post(request)

    def done(self) -> bool:
        transport = self._transport
        if self.request is None and not self.complete:
            transport.match(self)
        if self._error is not None:
            if self.request is not None:
                if not mpi_job.is_over(self.request) and time.monotonic() < self._refused_until:
                    return False
                mpi_job.keep_unfinished(self.request)
                self.request = None
                transport.active.discard(self)
            raise self._error
        if self.request is not None:
            try:
                self.complete = self.request.Test()
            except Exception:
                transport.active.discard(self)  # MPI has ended and freed it
                raise
            if self.complete:
                self.request = None
                transport.active.discard(self)
                if self.receives and self.tag < COLLECTIVE_TAGS:
                    transport.check_sender(self.peer)
        if not self.complete:
            if time.monotonic() >= transport.next_check:
                transport.receive_notices()
            if self._checked != transport.checks:
                self._check()
        return self.complete

    def _check(self) -> None:
        """Raise if the message cannot complete."""
        self._checked, error = self._transport.checks, self._transport.end_of(self.peer)
        if error is None or self._transport.may_complete(self.peer, self.tag):
            return
        if not self._checks_left:
            raise error
        self._checks_left -= 1


def as_bytes(array: Array, MPI: Any) -> list[Any]:
    memory = array.view(_BYTES)
    return [memory, MPI.BYTE] if memory.nbytes <= LARGEST else [memory, 1, _long_type(memory.nbytes, MPI)]


@lru_cache
def _long_type(nbytes: int, MPI: Any) -> Any:
    """The type of a message of more bytes than MPI can count."""
    blocks, rest = divmod(nbytes, _BLOCK)
    block = MPI.BYTE.Create_contiguous(_BLOCK)
    return MPI.Datatype.Create_struct([blocks, rest], [0, blocks * _BLOCK], [block, MPI.BYTE]).Commit()
