"""The hub of a group: a thread beside its rank 0 that collects every rank's bytes and hands them to all.

A star: each rank has one connection, to the hub (rank 0's is a socket pair).  The hub is a thread so that it
knows at any time who came and who is gone, whatever rank 0 is doing: it names the ranks that are missing.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import threading
import time
from typing import Any

from kos.comm.rendezvous.wire import MAX_MESSAGE, Connection, Door, Waiting
from kos.errors import RendezvousError

# What ranks say, and what the hub answers: the first byte of each message.
DATA, BYE, LEFT = b"D", b"B", b"L"
RESULT, LOST, FAILED = b"R", b"G", b"F"

FAILURES = (LOST, FAILED)

FAREWELL_SECONDS = 2.0  # what rank 0 gives the others to take their last answers


class Hub(threading.Thread):
    """Serves one group.  It ends when rank 0 has left and what others wait for is sent.

    ``own`` is the hub's end of rank 0's connection; other ranks call at ``listener``, with ``key``.
    """

    def __init__(
        self, own: Connection, listener: socket.socket, key: bytes, size: int, timeout: float, where: str
    ) -> None:
        super().__init__(name="kos rendezvous", daemon=True)
        self._size, self.timeout, self._where = size, timeout, where
        self._selector = selectors.DefaultSelector()
        self._members: dict[int, Connection] = {}
        self._refused: list[Connection] = []
        self._left: dict[int, str] = {}  # rank -> why
        self._slots: dict[int, bytes] = {}  # what came for the exchange in progress
        self._began: float | None = None  # when the first of them came
        self._failure: bytes | None = None
        self._closing: float | None = None
        self._door = Door(listener, key, self._selector, self._admit)
        self._admit(0, size, own)

    def run(self) -> None:
        try:
            while not self._done():
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                self._door.expire()
                self._look_at_clock()
        finally:
            self._door.close()
            for connection in [*self._members.values(), *self._refused]:
                connection.close()
            self._selector.close()

    def _done(self) -> bool:
        if self._closing is None:
            return False
        if time.monotonic() >= self._closing or not self._members:
            return True
        # After a failure the others hang up themselves, once they have read of it.
        return self._failure is None and not any(c.waiting for c in self._members.values())

    def _patience(self) -> float:
        """Seconds until the clock must be looked at; strangers are dismissed about once a second."""
        deadlines = [t for t in (self._deadline(), self._closing) if t is not None]
        return max(0.0, min([t - time.monotonic() for t in deadlines] + [1.0]))

    def _deadline(self) -> float | None:
        """Of the exchange in progress; rank 0 may have set the timeout since another rank began it."""
        return None if self._began is None else self._began + self.timeout

    def _look_at_clock(self) -> None:
        deadline = self._deadline()
        if deadline is not None and time.monotonic() >= deadline:
            missing = [rank for rank in range(self._size) if rank not in self._slots]
            strangers = self._door.strangers
            refused = f"; callers that did not know the secret: {strangers}" if strangers else ""
            why = f"did not come within {self.timeout:g} s (rank 0 listens at {self._where}{refused})"
            self._fail(FAILED, missing, why)

    def _admit(self, rank: int, size: int, connection: Connection) -> None:
        """A process that knows the secret says which rank it is."""
        problem = ""
        if size != self._size:
            problem = f"rank {rank} came with a world size of {size}, expected {self._size} as on rank 0"
        elif rank >= self._size:
            problem = f"expected ranks 0 to {self._size - 1}, got rank {rank}"
        elif rank in self._members or rank in self._left:
            problem = f"rank {rank} came twice: expected one process of each rank"
        if problem:
            # The job was started wrongly: everybody hears it, the newcomer too.
            problem = f"rendezvous: {problem} (rank 0 listens at {self._where})"
            connection.post(_failure(FAILED, [], problem))
            with contextlib.suppress(OSError):
                next(connection.flush(), None)
            # Not closed yet: what it said and nobody read would make TCP throw our last word away.
            self._refused.append(connection)
            self._fail(FAILED, [], problem)
            return
        self._members[rank] = connection
        listening = self._listen_to(rank, connection)
        self._selector.register(
            connection.sock, selectors.EVENT_READ, lambda: self._advance(rank, connection, listening)
        )
        if self._failure is not None:
            self._send(rank, self._failure)
        if len(self._members) + len(self._left) == self._size:
            self._door.close()
        self._advance(rank, connection, listening)

    def _advance(self, rank: int, connection: Connection, listening: Waiting[None]) -> None:
        """Go on with one rank, which has something to say or room to listen."""
        if self._members.get(rank) is not connection:
            return  # dismissed by an earlier event of the same round
        self._flush(rank)
        if rank not in self._members:
            return
        try:
            next(listening)
        except StopIteration:
            self._dismiss(rank)
        except OSError:
            self._leave(rank, "its connection was closed")
        except RendezvousError as error:
            self._leave(rank, str(error))

    def _listen_to(self, rank: int, connection: Connection) -> Waiting[None]:
        """All that one rank says, until it says goodbye."""
        while True:
            message = yield from connection.receive()
            kind = message[:1]
            if kind == DATA:
                self._collect(rank, message[1:])
            elif kind == BYE:
                self._left[rank] = "it closed the group"
                self._check_open_exchange()
                return
            elif kind == LEFT:
                self._leave(rank, *json.loads(message[1:]))
                return
            else:
                raise RendezvousError(f"expected a message of the rendezvous, got one of kind {kind!r}")

    def _collect(self, rank: int, data: bytes) -> None:
        if self._failure is not None:
            return  # told already
        if not self._slots:
            self._began = time.monotonic()
        self._slots[rank] = data
        if len(self._slots) < self._size:
            self._check_open_exchange()
            return
        slots = [self._slots[r] for r in range(self._size)]
        self._slots, self._began = {}, None
        total = sum(map(len, slots))
        if 1 + 4 * self._size + total > MAX_MESSAGE:
            self._fail(FAILED, [], f"allgather: expected less than {MAX_MESSAGE} bytes in all, got {total}")
            return
        lengths = struct.pack(f"!{self._size}I", *map(len, slots))
        self._tell_all(RESULT + lengths + b"".join(slots))

    def _check_open_exchange(self) -> None:
        """An exchange that waits for a rank that closed the group waits in vain."""
        gone = [rank for rank in self._left if rank not in self._slots]
        if self._slots and gone:
            self._fail(LOST, gone[:1], self._left[gone[0]])

    def _leave(self, rank: int, why: str, cause: list[Any] | None = None) -> None:
        """A rank is gone without a goodbye: the group has failed."""
        self._dismiss(rank)
        self._left[rank] = why
        self._fail(LOST, [rank], why, cause)

    def _fail(self, kind: bytes, ranks: list[int], why: str, cause: list[Any] | None = None) -> None:
        """Tell all ranks, those that come later too; the first failure stays.  ``cause`` is a record of failures.py."""
        if self._failure is None:
            self._failure, self._slots, self._began = _failure(kind, ranks, why, cause), {}, None
            self._tell_all(self._failure)

    def _tell_all(self, message: bytes) -> None:
        # Rank 0 last: it may end the process once it has its answer.
        for rank in sorted(self._members, reverse=True):
            if rank in self._members:  # sending to one may end another
                self._send(rank, message)

    def _send(self, rank: int, message: bytes) -> None:
        self._members[rank].post(message)
        self._flush(rank)

    def _flush(self, rank: int) -> None:
        connection = self._members[rank]
        try:
            waits = next(connection.flush(), None) is not None
        except OSError:
            self._leave(rank, "its connection was closed")
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
        key = self._selector.get_key(connection.sock)
        if key.events != events:
            self._selector.modify(connection.sock, events, key.data)

    def _dismiss(self, rank: int) -> None:
        connection = self._members.pop(rank, None)
        if connection is not None:
            self._selector.unregister(connection.sock)
            connection.close()
        if rank == 0 and self._closing is None:
            self._closing = time.monotonic() + FAREWELL_SECONDS


def _failure(kind: bytes, ranks: list[int], why: str, cause: list[Any] | None = None) -> bytes:
    return kind + json.dumps([ranks, why, cause]).encode()


def pair() -> tuple[Connection, Connection]:
    """Both ends of a connection within this process; it needs no handshake."""
    ends = socket.socketpair()
    for sock in ends:
        sock.setblocking(False)
    return Connection(ends[0], b"rank 0", b"hub"), Connection(ends[1], b"hub", b"rank 0")
