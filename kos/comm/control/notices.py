"""What the hub of a group sends to a rank, and notices: short messages to all other ranks, for which no rank waits.

Notices carry the failures and ends of ranks between processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from kos.comm import waits
from kos.comm.control.hub import CLOSED, CONNECTION_CLOSED, DIED, FAILURES, FORWARDED, NOTICE
from kos.comm.control.store import STORED, Answer, unpack
from kos.comm.control.wire import Connection, Waiting
from kos.errors import KosError, RendezvousError, by_handler, from_record, to_record


class Inbox:
    """The messages of one group's hub.  One thread at a time reads; other threads use what it has found."""

    def __init__(self) -> None:
        self.failure: bytes | None = None  # the hub's first message of a failure
        self.deaths: dict[int, str] = {}  # the ranks whose process has ended, and how that was found
        self.notices: defaultdict[str, deque[list[Any]]] = defaultdict(deque)  # by topic
        self.handlers: dict[str, Callable[..., None]] = {}  # of topics whose notices are handled as they are read
        self.forwarded = set[int]()  # the tokens of this rank's notices that the hub has sent to the others
        self.answers: dict[int, Answer] = {}  # of the store, by the token of the request
        self.expected = set[int]()  # the tokens of requests that wait for their answer
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
        elif kind == STORED:
            (token, result), value = unpack(message[1:])
            if token in self.expected:
                self.answers[token] = result, value
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


FORWARD_SECONDS = 2.0  # limit for the hub's answer that a notice has been forwarded
_CHARACTERS = 2000  # of a reason or an error
_tokens = itertools.count()


class Channel:
    """The notices of ``group``, a TCPControlPlane.  It is a reporter of the group's failure log.

    The failures and ends that other ranks report are recorded as soon as a thread reads them.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.holds: Callable[[], bool] = lambda: False
        """Whether another rank may still read memory of this one: a report is then forwarded before it goes on."""
        group.inbox.handlers.update(failure=self._failed, end=self._left)

    def send(
        self, topic: str, *what: Any, soon: bool = True, wait: bool = False, timeout: float = FORWARD_SECONDS
    ) -> bool:
        """Send a notice, of JSON's types; unless ``soon``, ranks that close the group at once do not get it.

        With ``wait``, return once the hub has forwarded it to the other ranks, or is closed or lost; False if neither
        happens within ``timeout`` seconds.
        """
        token, inbox = next(_tokens) if wait else None, self._group.inbox
        self._group.post(NOTICE + json.dumps([soon, token, topic, self._group.rank, *what]).encode())
        if token is None:
            return True

        def forwarded() -> bool:
            return token in inbox.forwarded or 0 in self._group.deaths() or inbox.closed

        sent = waits.wait(forwarded, time.monotonic() + timeout, waiter=0.0002)
        inbox.forwarded.discard(token)
        return sent

    def receive(self, topic: str) -> list[list[Any]]:
        """The notices of that topic that have arrived, each after the rank of its sender; those of one in its order."""
        self._group.deaths()
        arrived = list[list[Any]]()
        with contextlib.suppress(IndexError):
            while True:
                arrived.append(self._group.inbox.notices[topic].popleft())
        return arrived

    def record_deaths(self) -> None:
        """Record the ranks whose process has ended.  Any thread may do so."""
        for rank, why in self._group.deaths().items():
            self._group.failures.record_left(rank, 0, why)

    # A wait for events of sockets polls the connection to the hub too.

    @property
    def sock(self) -> socket.socket | None:
        """The connection to the hub; None once the group is closed."""
        connection = self._group.connection
        return None if connection is None else connection.sock

    def progress(self, poller: Any) -> None:
        """Read what has arrived."""
        self._group.deaths()
        if self._group.inbox.ended and self.sock is not None:
            poller.remove(self)

    # Reports of failures.

    def _failed(self, rank: int, sequence: int, *record: Any) -> None:
        self._group.failures.record(sequence, from_record(record))

    def _left(self, rank: int, sequence: int, why: str, cause: list[Any] | None) -> None:
        self._group.failures.record_left(rank, sequence, why, None if cause is None else from_record(cause))

    def report_failure(self, failure: KosError, sequence: int) -> None:
        """Make the other ranks raise the failure from collective ``sequence`` on."""
        self.send("failure", sequence, *to_record(failure, _CHARACTERS), wait=self.holds())

    def report_end(self, sequence: int, why: str, cause: KosError | None, soon: bool = True) -> None:
        """Report that this rank begins no collective from ``sequence`` on; ``soon`` is as in ``send``."""
        record = None if cause is None else to_record(cause, _CHARACTERS)
        self.send("end", sequence, why[:_CHARACTERS], record, soon=soon, wait=self.holds())

    def find_failure(self) -> KosError | None:
        """The loss of a rank whose process has ended.  Any thread may ask."""
        failures = self._group.failures
        return next((failures.lost(rank, why, None, None, 0.0) for rank, why in self._group.deaths().items()), None)
