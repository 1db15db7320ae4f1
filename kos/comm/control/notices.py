"""Notices: short messages between ranks that no rank waits for.  Those of a lost rank just end."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from kos.comm.control.hub import NOTICE
from kos.comm.control.inbox import Inbox
from kos.comm.control.wire import Connection, Waiting
from kos.errors import RendezvousError

FORWARD_SECONDS = 2.0  # limit for the hub's answer that a notice has been forwarded
_tokens = itertools.count()


class Notices:
    """Notices to and from some other ranks, over connections of their own.  One thread at a time uses them."""

    def __init__(self, connections: Iterable[Connection]) -> None:
        self._arrived: list[list[Any]] = []
        self._reading = {connection: self._read(connection) for connection in connections}

    def send(self, notice: list[Any]) -> None:
        """Send a notice, of JSON's types, to each of those ranks."""
        for connection in self._reading:
            connection.post(json.dumps(notice).encode())
        self._flush()

    def receive(self) -> list[list[Any]]:
        """The notices that have arrived; those of one rank are in its order."""
        self._flush()
        for connection, reading in list(self._reading.items()):
            try:
                next(reading)
            except (OSError, RendezvousError):  # the rank has closed it, or is lost
                del self._reading[connection]
                connection.close()
        arrived, self._arrived = self._arrived, []
        return arrived

    def _read(self, connection: Connection) -> Waiting[None]:
        while True:
            data = yield from connection.receive()
            self._arrived.append(json.loads(data))

    def _flush(self) -> None:
        for connection in self._reading:
            with contextlib.suppress(OSError):
                next(connection.flush(), None)

    def close(self) -> None:
        """Free the resources; notices that were sent still arrive."""
        for connection in self._reading:
            connection.drain()  # TCP may discard undelivered data when a connection is closed with unread input
            connection.close()


class Channel:
    """Notices to and from all other ranks of a group, through its hub, for one backend.

    ``number`` is the same on all ranks.  ``post`` sends a message to the hub, ``deaths`` is that of the rendezvous,
    and reads into ``inbox``.
    """

    def __init__(
        self, number: int, post: Callable[[bytes], None], deaths: Callable[[], dict[int, str]], inbox: Inbox
    ) -> None:
        self._number, self._post, self.deaths, self._inbox = number, post, deaths, inbox

    def send(self, notice: list[Any], soon: bool = True, wait: bool = False) -> None:
        """Send a notice, of JSON's types; unless ``soon``, ranks that close the group at once do not get it.

        With ``wait``, return once the hub has sent it to the other ranks, or is lost or late.
        """
        token = next(_tokens) if wait else None
        self._post(NOTICE + json.dumps([soon, token, self._number, notice]).encode())
        deadline = time.monotonic() + FORWARD_SECONDS
        while token is not None and token not in self._inbox.forwarded:
            if 0 in self.deaths() or time.monotonic() > deadline:
                return
            time.sleep(0.0002)
        self._inbox.forwarded.discard(token)

    def receive(self) -> list[list[Any]]:
        """The notices that have arrived; those of one rank are in its order."""
        self.deaths()
        arrived = list[list[Any]]()
        with contextlib.suppress(IndexError):
            while True:
                arrived.append(self._inbox.notices[self._number].popleft())
        return arrived
