"""What the hub sends to a rank: answers to exchanges, failures, and between them notices of other ranks and deaths."""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from kos.comm.control.hub import CLOSED, CONNECTION_CLOSED, DIED, FAILURES, FORWARDED, NOTICE
from kos.comm.control.wire import Connection, Waiting
from kos.errors import RendezvousError, by_handler


class Inbox:
    """The messages of one group's hub.  One thread at a time reads; other threads use what it has found."""

    def __init__(self) -> None:
        self.failure: bytes | None = None  # the hub's first message of a failure
        self.deaths: dict[int, str] = {}  # the ranks whose process has ended, and how that was found
        self.notices: defaultdict[str, deque[list[Any]]] = defaultdict(deque)  # by topic
        self.handlers: dict[str, Callable[..., None]] = {}  # of topics whose notices are handled as they are read
        self.forwarded = set[int]()  # the tokens of this rank's notices that the hub has sent to the others
        self.lock = threading.RLock()  # held while a thread reads
        self.exchanging = False  # the thread that holds ``lock`` waits for an answer, and keeps what else arrives
        self.closed = False  # rank 0, or this one, has closed the group: the end of the connection is not its death
        self.ended = False  # nothing more can arrive
        self._receiving: Waiting[bytes] | None = None  # of a message that has arrived in part

    def answer(self, connection: Connection) -> Waiting[bytes]:
        """The hub's answer to an exchange, or its message of a failure.  The caller holds ``lock``."""
        while self.failure is None:
            if (answer := self._sort((yield from self._next(connection)))) is not None:
                return answer
        return self.failure

    def poll(self, connection: Connection) -> None:
        """Read what has arrived.  Does not wait."""
        if self.exchanging or not self.lock.acquire(blocking=False):
            return
        try:
            next(self._sort_all(connection))
        except (OSError, RendezvousError) as error:
            if by_handler(error):
                raise
            self.ended = True
            if not self.closed and self.failure is None:
                self.deaths.setdefault(0, CONNECTION_CLOSED)
        finally:
            self.lock.release()

    def _sort_all(self, connection: Connection) -> Waiting[None]:
        while True:
            self._sort((yield from self._next(connection)))

    def _next(self, connection: Connection) -> Waiting[bytes]:
        """The next message, also if an earlier call was left before it had arrived."""
        self._receiving = self._receiving or connection.receive()
        while True:
            try:
                event = next(self._receiving)
            except StopIteration as end:
                self._receiving = None
                message: bytes = end.value
                return message
            except BaseException:
                self._receiving = None
                raise
            yield event

    def _sort(self, message: bytes) -> bytes | None:
        """The message if it is an answer to an exchange; else it is kept here."""
        kind = message[:1]
        if kind == NOTICE:
            topic, *notice = json.loads(message[1:])
            if (handle := self.handlers.get(topic)) is not None:
                handle(*notice)
            else:
                self.notices[topic].append(notice)
        elif kind == FORWARDED:
            self.forwarded.add(json.loads(message[1:]))
        elif kind == CLOSED:
            self.closed = True
        elif kind in FAILURES:
            if kind == DIED:
                (rank,), why, _ = json.loads(message[1:])
                self.deaths.setdefault(rank, why)
            self.failure = self.failure or message
        else:
            return message
        return None
