"""Message matching: receives whose sender or length is unknown until a message arrives, and probes.

A receive of an array from a named rank is passed to the transport at once.  Any other receive waits here for an
*envelope*: the sender, dtype and length of the first message that has arrived and that no receive has taken
(``Backend.arrived``).  With the envelope, sender and length are known, and the receive is passed to the transport.  The
transport delivers the message, or raises its mismatch.

Receives match in the order in which they were posted, as in MPI.  So a receive waits behind an earlier one that could
take the same message: with the same tag, or of any tag.  The caller of these functions holds the lock of the engine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from kos.comm.failures import FailureLog
from kos.comm.operation import ANY
from kos.dtypes import dtype_of_code
from kos.errors import KosError, RankLost

Array = np.ndarray[Any, Any]
BYTES = np.dtype(np.uint8)


class Envelope(NamedTuple):
    """The properties of a message that has arrived: ``size`` elements of ``dtype`` from rank ``src`` with ``tag``."""

    src: int
    dtype: np.dtype[Any]
    size: int
    tag: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the message."""
        return self.size * self.dtype.itemsize


def envelope(src: int, nbytes: int, code: int, tag: int) -> Envelope:
    """The envelope of a message of ``nbytes`` bytes.  ``code`` is the code of its dtype."""
    dtype = dtype_of_code(code)
    return Envelope(src, dtype, nbytes // dtype.itemsize, tag)


class Matching:
    """The receives of one rank of a group that wait for an envelope, by tag and in the order of posting."""

    def __init__(self, rank: int, size: int, messages: Any, failures: FailureLog) -> None:
        """``messages`` has the methods of a Backend for host memory."""
        self.messages, self.failures = messages, failures
        self._rank, self._size = rank, size
        self.turns: Any = getattr(messages, "turns", self)
        """Where ``last_source`` is, the last rank from which a receive from any rank has got a message."""
        self.turns.last_source = rank
        self.waiting: dict[int, list[Receive]] = {}
        self._numbers = itertools.count()
        self._polled: dict[int, Receive] = {}  # by source, until a message or an end is found

    def receive(self, array: Array | None, src: int, tag: int) -> Any:
        """Post a receive from rank ``src`` or ANY.  Without an ``array``, it receives bytes of any length."""
        if array is not None and ANY not in (src, tag) and tag not in self.waiting and ANY not in self.waiting:
            return self.messages.irecv(array, src, tag)
        receive = Receive(self, src, tag, array)
        receive.number = next(self._numbers)
        self.waiting.setdefault(tag, []).append(receive)
        self.match(tag)
        return receive

    def poll(self, src: int, tag: int) -> Envelope | None:
        """The envelope of the next message; None if none has arrived.  Raises if no message can arrive any more."""
        probe = self._polled.setdefault(src, Receive(self, src, tag, probe=True))
        probe.tag = tag  # the checks that wait for the last messages of a rank count for all tags
        try:
            if not probe.done():
                return None
        except KosError:
            del self._polled[src]
            raise
        return self._polled.pop(src).envelope

    def sources(self, src: int) -> Sequence[int]:
        """The ranks that ``src`` stands for.  For ANY, the rank after the last sender comes first."""
        if src != ANY:
            return (src,)
        last = self.turns.last_source
        return [rank for step in range(1, self._size + 1) if (rank := (last + step) % self._size) != self._rank]

    def match(self, tag: int) -> set[int]:
        """Match waiting receives with arrived messages.

        Returns the ranks whose next message with ``tag``, or of any tag, a receive waits for.
        """
        if tag == ANY or ANY in self.waiting:
            return self._match_all(tag)
        taken: set[int] = set()
        for receive in list(self.waiting.get(tag, ())):
            if len(taken) == self._size - 1:
                break
            ranks = [rank for rank in self.sources(receive.src) if rank not in taken]
            if ranks and receive.begin(ranks):
                self._remove(receive)
            else:
                taken.update(self.sources(receive.src))
        return taken

    def _match_all(self, tag: int) -> set[int]:
        """``match`` where a receive takes any tag: each receive comes after all that were posted before it."""
        earlier = list[Receive]()

        def taken(tag: int) -> set[int]:
            return {rank for each in earlier if each.tag in (tag, ANY) for rank in self.sources(each.src)}

        for receive in sorted(itertools.chain(*self.waiting.values()), key=attrgetter("number")):
            blocked = taken(receive.tag)
            ranks = [rank for rank in self.sources(receive.src) if rank not in blocked]
            if ranks and receive.begin(ranks, earlier):
                self._remove(receive)
            else:
                earlier.append(receive)
        return taken(tag)

    def find(self, ranks: Sequence[int], tag: int, earlier: Collection[Receive] | None = None) -> Envelope | None:
        """The envelope of the first message of ``ranks`` with ``tag``, unless one of the ``earlier`` receives takes it.

        That matters for any tag only.  By default, all receives are earlier.
        """
        found: Envelope | None = self.messages.arrived(ranks, tag)
        if found is None or tag != ANY:
            return found
        rivals = self.waiting.get(found.tag, ()) if earlier is None else [e for e in earlier if e.tag == found.tag]
        return None if any(found.src in self.sources(each.src) for each in rivals) else found

    def awaits(self, rank: int, tag: int) -> bool:
        """Whether a waiting receive may take the next message of that rank with ``tag``."""
        tags = [*self.waiting] if tag == ANY else [tag, ANY]
        return any(rank in self.sources(receive.src) for each in tags for receive in self.waiting.get(each, ()))

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


class Receive:
    """Waits for a message whose sender or length is not known, or that an earlier receive may take.

    ``array`` is None until the length is known.  A ``probe`` only finds the envelope, and leaves the message in place.
    """

    def __init__(
        self, matching: Matching, src: int, tag: int, array: Array | None = None, probe: bool = False
    ) -> None:  # fmt: skip
        self.matching, self.src, self.tag, self.array, self._probe = matching, src, tag, array, probe
        self.number = 0  # in the order of posting
        self.envelope: Envelope | None = None
        self.request: Any = None  # of the transport, once it has begun
        self._error: Exception | None = None
        messages = matching.messages
        self._check_at, self._checks = time.monotonic() + messages.check_seconds, messages.last_checks

    def done(self) -> bool:
        """Whether the message has arrived.  Raises if it cannot, because ranks failed or ended."""
        if self.request is None and not self._look():
            end = self._end()
            if end is None:
                return False
            if not self._look():  # the last message of a rank may have arrived before its end
                raise end
        if self._error is not None:
            raise self._error
        return self._probe or bool(self.request.done())

    def _look(self) -> bool:
        taken = self.matching.match(self.tag)
        if not self._probe:
            return self.request is not None or self._error is not None
        ranks = [rank for rank in self.matching.sources(self.src) if rank not in taken]
        self.envelope = self.matching.find(ranks, self.tag) if ranks else None
        return self.envelope is not None

    def _end(self) -> KosError | None:
        """The failure of a rank that could have sent the message, or the end of all such ranks."""
        messages, sources = self.matching.messages, self.matching.sources(self.src)
        if (now := time.monotonic()) < self._check_at:
            return None
        self._check_at = now + messages.check_seconds
        ends = {rank: end for rank in sources if (end := messages.end_of(rank)) is not None}
        failed = [end for end in ends.values() if not end.orderly]
        if not failed and len(ends) < len(sources):  # after a rank has closed, others may still send
            return None
        if self._checks:
            self._checks -= 1
            return None
        if failed or len(ends) == 1:
            return (failed or [*ends.values()])[0].copy()
        failures, ranks = self.matching.failures, sorted(ends)
        text = f"{failures.names(ranks)} are gone: they closed their communicators"
        return RankLost(text, ranks=failures.in_world(ranks))

    def begin(self, ranks: Sequence[int], earlier: Collection[Receive] = ()) -> bool:
        """Start to receive the first message from one of ``ranks``, which none of the ``earlier`` receives may take.

        Returns False if no such message has arrived.
        """
        src, tag, messages = self.src, self.tag, self.matching.messages
        if self.array is None or ANY in (src, tag):
            self.envelope = self.matching.find(ranks, tag, earlier)
            if self.envelope is None:
                return False
            src, tag = self.envelope.src, tag if tag != ANY else self.envelope.tag
            if self.src == ANY:  # it comes last from now on: a rank that sends a lot does not starve the others
                self.matching.turns.last_source = src
        try:
            if self.array is None:
                assert self.envelope is not None
                self.array = np.empty(self.envelope.nbytes, BYTES)
            self.request = messages.irecv(self.array, src, tag)
        except (KosError, MemoryError) as error:  # raised by this receive's own ``done``
            self._error = error
        return True
