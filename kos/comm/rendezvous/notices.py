"""Notices: short messages between ranks that no rank waits for.  Those of a lost rank just end."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np

from kos.comm.rendezvous.mpi_job import keep_unfinished
from kos.comm.rendezvous.wire import Connection, Waiting
from kos.errors import RendezvousError

_receiving = threading.RLock()  # threads that read for several groups would change the order of a rank's notices


class Notices(Protocol):
    """Notices to and from some other ranks of a group.  One thread at a time uses them."""

    def send(self, notice: list[Any]) -> None:
        """Send a notice, of JSON's types, to each of those ranks."""

    def receive(self) -> list[list[Any]]:
        """The notices that have arrived; those of one rank are in its order."""

    def close(self) -> None:
        """Free the resources; notices that were sent still arrive."""


class TCPNotices:
    """Notices over connections of their own."""

    def __init__(self, connections: Iterable[Connection]) -> None:
        self._arrived: list[list[Any]] = []
        self._reading = {connection: self._read(connection) for connection in connections}

    def send(self, notice: list[Any]) -> None:
        for connection in self._reading:
            connection.post(json.dumps(notice).encode())
        self._flush()

    def receive(self) -> list[list[Any]]:
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
        for connection in self._reading:
            connection.drain()  # TCP may discard undelivered data when a connection is closed with unread input
            connection.close()


class MPINotices:
    """Notices of the group ``name`` to ``ranks`` of an MPI communicator, which may have more ranks.

    ``readers`` are those of all groups that share the communicator.  It is never freed: Open MPI would deliver a late
    message to the next communicator.
    """

    def __init__(
        self, MPI: Any, comm: Any, readers: WeakValueDictionary[str, MPINotices], name: str, ranks: list[int]
    ) -> None:
        self._MPI, self._comm, self._readers, self._name, self._ranks = MPI, comm, readers, name, ranks
        self._status, self._arrived = MPI.Status(), deque[list[Any]]()
        readers[name] = self

    def send(self, notice: list[Any]) -> None:
        data = np.frombuffer(json.dumps([self._name, notice]).encode(), np.uint8)
        with contextlib.suppress(self._MPI.Exception):  # a rank is lost
            for rank in [] if self._MPI.Is_finalized() else self._ranks:
                keep_unfinished(self._comm.Isend([data, self._MPI.BYTE], rank))

    def receive(self) -> list[list[Any]]:
        MPI = self._MPI
        with _receiving, contextlib.suppress(MPI.Exception):
            while not MPI.Is_finalized() and (probed := self._comm.Improbe(status=self._status)):
                data = bytearray(self._status.Get_count())
                probed.Recv([data, MPI.BYTE])
                name, notice = json.loads(data)
                if (reader := self._readers.get(name)) is not None:  # else that group was closed
                    reader._arrived.append(notice)
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def close(self) -> None:
        self.receive()
