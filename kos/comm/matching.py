"""Matching: receives whose sender or length is not known until a message arrives, and probes.

A receive of an array from a named rank goes to the transport at once.  Any other receive waits here for an *envelope*:
sender, dtype and length of the first message that has arrived and that no receive has taken (``Backend.arrived``).
Then both are known, and it goes to the transport too, which delivers the message or raises its mismatch.

Receives with one tag match in the order in which they were posted, as in MPI: one that is posted after a waiting
receive, and that could take its message, waits behind it.  The caller holds the lock of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kos.comm.failures import FailureLog
from kos.comm.operation import ANY
from kos.comm.records import again
from kos.dtypes import dtype_of_code
from kos.errors import KosError, RankLost

Array = np.ndarray[Any, Any]
BYTES = np.dtype(np.uint8)


class Envelope(NamedTuple):
    """What is known of a message before it is received: ``size`` elements of ``dtype`` from rank ``src``."""

    src: int
    dtype: np.dtype[Any]
    size: int

    @property
    def nbytes(self) -> int:
        """The bytes of the message."""
        return self.size * self.dtype.itemsize


def envelope(src: int, nbytes: int, code: int) -> Envelope:
    """The envelope of a message of so many bytes, from the code of its dtype."""
    dtype = dtype_of_code(code)
    return Envelope(src, dtype, nbytes // dtype.itemsize)


class Matching:
    """The receives of one rank of a group that wait for an envelope, by tag and in posted order."""

    def __init__(self, rank: int, size: int, messages: Any, failures: FailureLog) -> None:
        """``messages`` has the methods of a Backend for host memory."""
        self.messages, self.failures = messages, failures
        self._others = [(rank + step) % size for step in range(1, size)]
        self.waiting: dict[int, list[Receive]] = {}
        self._polled: dict[int, Expected] = {}  # by source, until a message or an end is found

    def receive(self, array: Array | None, src: int, tag: int) -> Any:
        """The request of a receive from rank ``src`` or ANY; without an ``array``, of bytes of any length."""
        if array is not None and src != ANY and tag not in self.waiting:
            return self.messages.irecv(array, src, tag)
        receive = Receive(self, src, tag, array)
        self.waiting.setdefault(tag, []).append(receive)
        self.match(tag)
        return receive

    def poll(self, src: int, tag: int) -> Envelope | None:
        """The envelope of the next message, None if none has arrived.  Raises if none can come."""
        expected = self._polled.setdefault(src, Expected(self, src, tag))
        expected.tag = tag  # the polls after which the last messages have arrived count for all tags
        try:
            if not expected.done():
                return None
        except KosError:
            del self._polled[src]
            raise
        return self._polled.pop(src).envelope

    def sources(self, src: int) -> Sequence[int]:
        """The ranks that may send a message from ``src``; first the one after the last that was matched."""
        return self._others if src == ANY else (src,)

    def match(self, tag: int) -> set[int]:
        """Give arrived messages to the receives that wait; returns the ranks whose next message is for one of them."""
        taken: set[int] = set()
        for receive in list(self.waiting.get(tag, ())):
            if len(taken) == len(self._others):
                break
            ranks = [rank for rank in self.sources(receive.src) if rank not in taken]
            if ranks and receive.begin(ranks):
                self._remove(receive)
            else:
                taken.update(self.sources(receive.src))
        return taken

    def found(self, src: int) -> None:
        """Prefer other ranks to ``src`` next, so that no rank waits for ever beside one that sends much."""
        at = self._others.index(src) + 1
        self._others = self._others[at:] + self._others[:at]

    def awaits(self, rank: int, tag: int) -> bool:
        """Whether a receive that waits may take the next message of that rank."""
        return any(rank in self.sources(receive.src) for receive in self.waiting.get(tag, ()))

    def cancel(self, requests: Sequence[Any]) -> None:
        """Cancel requests of ``receive`` and of the transport; their memory is free afterwards."""
        for each in requests:
            if isinstance(each, Receive) and each.request is None:
                self._remove(each)
        begun = [each.request if isinstance(each, Receive) else each for each in requests]
        self.messages.cancel(lambda message: message in begun)

    def _remove(self, receive: Receive) -> None:
        waiting = self.waiting.get(receive.tag, [])
        if receive in waiting:
            waiting.remove(receive)
            if not waiting:
                del self.waiting[receive.tag]


class Expected:
    """A message that has not arrived.  Alone it is a probe: it looks for the envelope, and takes nothing."""

    def __init__(self, matching: Matching, src: int, tag: int) -> None:
        self.matching, self.src, self.tag = matching, src, tag
        self.envelope: Envelope | None = None
        messages = matching.messages
        self._check_at, self._polls = time.monotonic() + messages.check_seconds, messages.last_polls

    def done(self) -> bool:
        """Whether it has arrived.  Raises if it cannot come, because of a failure or the end of ranks."""
        if self._look():
            return True
        end = self._end()
        if end is None:
            return False
        if self._look():  # the last message of a rank may have arrived before its end
            return True
        raise end

    def _look(self) -> bool:
        taken = self.matching.match(self.tag)
        ranks = [rank for rank in self.matching.sources(self.src) if rank not in taken]
        self.envelope = self.matching.messages.arrived(ranks, self.tag) if ranks else None
        return self.envelope is not None

    def _end(self) -> KosError | None:
        """The failure of a rank that may send it, or the end of all of them."""
        messages, sources = self.matching.messages, self.matching.sources(self.src)
        if (now := time.monotonic()) < self._check_at:
            return None
        ends = {rank: end for rank in sources if (end := messages.end_of(rank)) is not None}
        failed = [end for end in ends.values() if not end.orderly]
        if not failed and len(ends) < len(sources):  # others may send after a rank has closed the communicator
            self._check_at = now + messages.check_seconds
            return None
        if self._polls:
            self._polls -= 1
            return None
        if failed or len(ends) == 1:
            return again((failed or [*ends.values()])[0])
        failures, ranks = self.matching.failures, sorted(ends)
        text = f"{failures.names(ranks)} are gone: they closed their communicators"
        return RankLost(text, ranks=failures.in_world(ranks))


class Receive(Expected):
    """A receive that waits for an envelope, or behind another one.  ``array`` is None until the length is known."""

    def __init__(self, matching: Matching, src: int, tag: int, array: Array | None) -> None:
        super().__init__(matching, src, tag)
        self.array = array
        self.request: Any = None  # of the transport, once it has begun
        self._error: Exception | None = None

    def done(self) -> bool:
        if self.request is None and not super().done():
            return False
        if self._error is not None:
            raise self._error
        return bool(self.request.done())

    def _look(self) -> bool:
        self.matching.match(self.tag)
        return self.request is not None or self._error is not None

    def begin(self, ranks: Sequence[int]) -> bool:
        """Receive the first message of one of ``ranks``; False if it must arrive first."""
        src, messages = self.src, self.matching.messages
        if self.array is None or src == ANY:
            self.envelope = messages.arrived(ranks, self.tag)
            if self.envelope is None:
                return False
            src = self.envelope.src
            if self.src == ANY:
                self.matching.found(src)
        try:
            if self.array is None:
                assert self.envelope is not None
                self.array = np.empty(self.envelope.nbytes, BYTES)
            self.request = messages.irecv(self.array, src, self.tag)
        except (KosError, MemoryError) as error:  # which its own ``done`` raises, not that of another receive
            self._error = error
        return True
