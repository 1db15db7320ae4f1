"""The tcp backend: host memory over sockets, one authenticated connection between every two ranks.

For jobs that no MPI started.  What does not go through shared memory runs as schedules.  Short messages are
sent at once and, if nobody has asked for them yet, kept by the receiver; long ones are announced, and travel
when the receiver grants them room, straight into its memory.  So no order of sends and receives can block a
connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Generator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kos.comm.backend import Probe, Request
from kos.comm.backends.host import HostBackend
from kos.comm.mpi_job import Backoff
from kos.comm.operation import Operation
from kos.comm.rendezvous import Rendezvous
from kos.comm.tcp import Connection, Network, admit_all
from kos.comm.work import Engine, Idle
from kos.errors import CollectiveMismatch, KosError, RankLost, RendezvousError

Array = np.ndarray[Any, Any]
T = TypeVar("T")

EAGER_BYTES = 256 << 10  # longest message sent without being asked for: a segment of a schedule

_HEADER = struct.Struct("!B3xIIQ")  # kind, tag, number of the long message, bytes
_SHORT, _ASK, _GRANT, _LONG, _BYE, _LEFT = range(1, 7)
_NO_TAG = -1
_LAST_WORDS = 1000  # bytes
_NAP_SECONDS = 0.05  # another thread may have taken the event that a waiting one is looking for


class TCPBackend(HostBackend):
    """Carries a group whose ranks found each other over TCP."""

    name = "tcp"

    def __init__(
        self, rendezvous: Rendezvous, engine: Engine | None = None, poller: _Poller | None = None
    ) -> None:
        super().__init__(rendezvous, engine)
        self._poller = poller or _Poller()
        self._mesh = self.transport = _Mesh(rendezvous, self._poller)

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        if rendezvous.network is None:
            return Probe(
                False, "the ranks did not meet over TCP (start with torchrun, srun, or RANK, WORLD_SIZE, …)"
            )
        return Probe(True, f"sockets between {rendezvous.size} ranks")

    def idle(self) -> Idle:
        return self._poller if self._calls is None else _Watch(self._poller, self.crowded)

    def split(
        self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0
    ) -> TCPBackend | None:
        return None if rendezvous is None else TCPBackend(rendezvous, self.engine, self._poller)

    def close(self) -> None:
        super().close()
        self._mesh.leave(_BYE, "")

    def abort(self, reason: str) -> None:
        super().abort(self.broken or reason)
        self._mesh.leave(_LEFT, self.broken or reason)  # whose fault it was, if another rank's

    def awaited(self, operation: Operation) -> list[int]:
        return self._mesh.awaited(self._tag(operation))

    def failed(self, operation: Operation, error: Exception) -> KosError:
        if operation.collective:
            self._mesh.forget(self._tag(operation))
        if isinstance(error, RankLost) and str(operation) not in str(error):
            error = RankLost(f"{operation}: {error}")
        return super().failed(operation, error)


class _Poller:
    """All connections of this rank, of a communicator and its splits: a wait for one sees them all."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._peers: dict[int, _Peer] = {}

    def add(self, peer: _Peer) -> None:
        self._peers[peer.sock.fileno()] = peer
        self._epoll.register(peer.sock, select.EPOLLIN)

    def want_room(self, peer: _Peer, wanted: bool) -> None:
        self._epoll.modify(peer.sock, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def remove(self, peer: _Peer) -> None:
        del self._peers[peer.sock.fileno()]
        self._epoll.unregister(peer.sock)

    def progress(self) -> None:
        """Read and write whatever is ready; never waits."""
        for descriptor, _ in self._epoll.poll(0):
            if (peer := self._peers.get(descriptor)) is not None:
                peer.progress()

    def mark(self) -> int:
        return 0

    def pause(self, mark: int = 0, seconds: float | None = None) -> None:
        # What is ready stays ready until it is read, so nothing that came since ``mark`` is missed.
        self._epoll.poll(_NAP_SECONDS if seconds is None else min(seconds, _NAP_SECONDS))


class _Watch(Backoff):
    """Words in shared memory make no event: polls, and sees the connections when it comes to sleep."""

    __slots__ = ("_naps_at", "_poller")

    def __init__(self, poller: _Poller, crowded: bool) -> None:
        super().__init__()
        self._poller, self._naps_at = poller, time.monotonic() + self.SLEEP_AFTER
        self._polls = self.SPINS if crowded else 0

    def mark(self) -> int:
        return 0

    def pause(self, mark: int = 0, seconds: float | None = None) -> None:
        if time.monotonic() < self._naps_at:
            super().pause()
        else:
            self._poller.pause(mark, self.SLEEP)


class _Message:
    """A message in flight; also a place to read bytes to."""

    __slots__ = ("complete", "error", "peer", "tag", "view")

    def __init__(self, peer: _Peer, tag: int, view: memoryview) -> None:
        self.peer, self.tag, self.view = peer, tag, view
        self.complete = False
        self.error: KosError | None = None

    def fits(self, nbytes: int) -> bool:
        """Whether a message of that many bytes is what this receive expects; if not, it has failed."""
        if nbytes != len(self.view):
            expected = f"expected {len(self.view)} bytes from rank {self.peer.rank} with tag {self.tag}"
            self.error = CollectiveMismatch(f"{expected}, got {nbytes}")
        return self.error is None

    def done(self) -> bool:
        if not self.complete and self.error is None:
            self.peer.mesh.poller.progress()
        if self.error is not None:
            raise self.error
        if not self.complete:
            self.peer.check()
        return self.complete

    def forget(self) -> None:
        self.peer.forget(lambda message: message is self)


class _Mesh:
    """The transport: the connections of one group."""

    def __init__(self, rendezvous: Rendezvous, poller: _Poller) -> None:
        self.poller = poller
        self.failure: str | None = None  # the first rank that left without a goodbye
        self.peers = {rank: _Peer(rank, self, sock) for rank, sock in _connect_all(rendezvous).items()}
        for peer in self.peers.values():
            poller.add(peer)

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        return self.peers[peer].send(tag, array.view(np.uint8).data)

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        return self.peers[peer].receive(tag, array.view(np.uint8).data)

    def awaited(self, tag: int) -> list[int]:
        """Ranks from which messages with that tag have not come."""
        return sorted(rank for rank, peer in self.peers.items() if peer.awaits(tag))

    def forget(self, tag: int) -> None:
        """Nobody waits any more for messages with that tag, and their memory is given back."""
        for peer in self.peers.values():
            peer.forget(lambda message: message.tag == tag)

    def leave(self, kind: int, why: str) -> None:
        for peer in self.peers.values():
            peer.hang_up(kind, why)


class _Peer:
    """The connection to one rank of a group."""

    def __init__(self, rank: int, mesh: _Mesh, sock: socket.socket) -> None:
        self.rank, self.mesh, self.sock = rank, mesh, sock
        self.gone: str | None = None
        self._posted: dict[int, deque[_Message]] = {}  # receives, by tag
        self._arrived: dict[int, deque[_Arrival]] = {}  # what nobody has asked for yet, by tag
        self._outgoing: deque[_Outgoing] = deque()
        self._asked: dict[int, _Message] = {}  # long sends that wait for room, by number
        self._granted: dict[int, _Message] = {}  # long receives on their way, by number
        self._landing: _Message | None = None  # what is being read
        self._count = 0
        self._wants_room = False
        self._reader = self._read()

    def check(self) -> None:
        """Raise RankLost if what is not complete by now cannot become so."""
        if (why := self.mesh.failure or self.gone) is not None:
            raise RankLost(why)

    def send(self, tag: int, view: memoryview) -> _Message:
        self.check()
        message = _Message(self, tag, view)
        if view.nbytes <= EAGER_BYTES:
            self._queue(_SHORT, 0, message)
        else:
            self._count = (self._count + 1) % (1 << 32)
            self._asked[self._count] = message
            self._queue(_ASK, self._count, message)
        return message

    def receive(self, tag: int, view: memoryview) -> _Message:
        message = _Message(self, tag, view)
        arrival = _take(self._arrived, tag)
        if arrival is None:
            self._posted.setdefault(tag, deque()).append(message)
        else:
            self._settle(message, arrival)
        return message

    def awaits(self, tag: int) -> bool:
        return tag in self._posted or any(
            message.tag == tag for message in [*self._granted.values(), *self._asked.values()]
        )

    def forget(self, given_up: Callable[[_Message], bool]) -> None:
        posted = {tag: deque(m for m in queue if not given_up(m)) for tag, queue in self._posted.items()}
        self._posted = {tag: queue for tag, queue in posted.items() if queue}
        self._asked = {number: message for number, message in self._asked.items() if not given_up(message)}
        for message in [*self._granted.values(), self._landing]:
            if message is not None and given_up(message):
                message.view = memoryview(bytearray(len(message.view)))
        self._outgoing = deque(item for item in self._outgoing if not given_up(item.message) or item.detach())

    def progress(self) -> None:
        """Read and send as much as goes without waiting."""
        try:
            next(self._reader)
            self._flush()
        except StopIteration:
            self._lose("it closed the communicator", orderly=True)
        except OSError:
            self._lose("its connection was closed")
        except RendezvousError as error:
            self._lose(str(error))

    def hang_up(self, kind: int, why: str) -> None:
        """Close, with a last word unless a message is half sent."""
        if self.gone is None:
            text = why.encode()[:_LAST_WORDS]
            if not self._outgoing:
                with contextlib.suppress(OSError):
                    self.sock.send(_HEADER.pack(kind, 0, 0, len(text)) + text)
            self._lose("this rank closed the communicator", orderly=True)

    def _lose(self, why: str, orderly: bool = False) -> None:
        self.gone = f"rank {self.rank} is gone: {why}"
        if not orderly and self.mesh.failure is None:
            self.mesh.failure = self.gone
        self.mesh.poller.remove(self)
        self.sock.close()

    def _queue(self, kind: int, number: int, message: _Message) -> None:
        """Send a header that concerns ``message``, or that and the message itself, as soon as there is room."""
        nbytes = len(message.view)
        views = [memoryview(_HEADER.pack(kind, message.tag, number, nbytes))]
        carries = kind in (_SHORT, _LONG)
        if carries and nbytes:
            views.append(message.view)
        self._outgoing.append(_Outgoing(views, message, carries))
        if len(self._outgoing) == 1:
            # A connection that is broken shows it when it is read, after what it still brings.
            with contextlib.suppress(OSError):
                self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            views = [view for item in islice(self._outgoing, 8) for view in item.views]
            try:
                sent = self.sock.sendmsg(views)
            except BlockingIOError:
                break
            while sent:
                sent -= self._outgoing[0].advance(sent)
                if not self._outgoing[0].views:
                    self._outgoing.popleft()
        if self._wants_room != bool(self._outgoing):
            self._wants_room = bool(self._outgoing)
            self.mesh.poller.want_room(self, self._wants_room)

    def _read(self) -> Generator[None, None, None]:
        """All that the peer sends, until it says goodbye; yields when there is nothing to read."""
        header = _Message(self, _NO_TAG, memoryview(bytearray(_HEADER.size)))
        while True:
            yield from self._fill(header)
            kind, tag, number, nbytes = _HEADER.unpack(header.view)
            if kind == _SHORT and nbytes <= EAGER_BYTES:
                message = _take(self._posted, tag)
                if message is not None and message.fits(nbytes):
                    yield from self._fill(message)
                    message.complete = True
                    continue
                data = bytearray(nbytes)
                yield from self._fill(_Message(self, _NO_TAG, memoryview(data)))
                if message is None:
                    self._arrive(tag, _Arrival(nbytes, data))
            elif kind == _ASK:
                self._arrive(tag, _Arrival(nbytes, None, number))
            elif kind == _GRANT:
                message = self._asked.pop(number, None)
                if message is not None:  # else nobody waits for it any more
                    self._queue(_LONG, number, message)
            elif kind == _LONG and number in self._granted and len(self._granted[number].view) == nbytes:
                message = self._granted.pop(number)
                yield from self._fill(message)
                message.complete = True
            elif kind == _BYE:
                return
            elif kind == _LEFT and nbytes <= _LAST_WORDS:
                words = bytearray(nbytes)
                yield from self._fill(_Message(self, _NO_TAG, memoryview(words)))
                raise RendezvousError(words.decode(errors="replace"))
            else:
                raise RendezvousError(f"expected the header of a message, got kind {kind} of {nbytes} bytes")

    def _fill(self, message: _Message) -> Generator[None, None, None]:
        self._landing = message
        filled, length = 0, len(message.view)
        while filled < length:
            try:
                got = self.sock.recv_into(message.view[filled:])
            except BlockingIOError:
                yield
                continue
            if not got:
                raise ConnectionError
            filled += got
        self._landing = None

    def _arrive(self, tag: int, arrival: _Arrival) -> None:
        message = _take(self._posted, tag)
        if message is None:
            self._arrived.setdefault(tag, deque()).append(arrival)
        else:
            self._settle(message, arrival)

    def _settle(self, message: _Message, arrival: _Arrival) -> None:
        """A receive meets the message that it is for."""
        if not message.fits(arrival.nbytes):
            return
        if arrival.data is None:
            self._granted[arrival.number] = message
            self._queue(_GRANT, arrival.number, message)
        else:
            message.view[:] = arrival.data
            message.complete = True


class _Arrival(NamedTuple):
    """A message that came: its bytes, or the number of a long one that waits for room."""

    nbytes: int
    data: bytearray | None
    number: int = 0


class _Outgoing:
    """Bytes to be sent: a header that concerns a message, and the message behind it if it carries that."""

    __slots__ = ("_begun", "_carries", "message", "views")

    def __init__(self, views: list[memoryview], message: _Message, carries: bool) -> None:
        self.views, self.message, self._carries = views, message, carries
        self._begun = False

    def advance(self, sent: int) -> int:
        """Take note that up to ``sent`` bytes are sent; how many of them were of this message."""
        self._begun, used = True, 0
        while self.views and used < sent:
            part = min(sent - used, len(self.views[0]))
            used += part
            self.views[0] = self.views[0][part:]
            if not self.views[0]:
                del self.views[0]
        if not self.views and self._carries:
            self.message.complete = True
        return used

    def detach(self) -> bool:
        """Let go of the sender's memory; False if nothing is sent yet, so that nothing need be."""
        self.views = [memoryview(bytes(view)) for view in self.views]
        return self._begun


def _take(queues: dict[int, deque[T]], tag: int) -> T | None:
    """The first entry of that tag's queue; an empty queue is not kept."""
    queue = queues.get(tag)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[tag]
    return first


def _connect_all(rendezvous: Rendezvous) -> dict[int, socket.socket]:
    """A connection to every other rank: each rank calls those below it, then lets in those above."""
    rank, size = rendezvous.rank, rendezvous.size
    if size == 1:
        return {}
    network: Network = rendezvous.network
    deadline = time.monotonic() + rendezvous.timeout
    with network.listen() as listener:
        card = [network.host, listener.getsockname()[1], os.urandom(16).hex()]
        cards = [json.loads(c) for c in rendezvous.allgather(json.dumps(card).encode())]
        found: dict[int, Connection] = {}
        try:
            for peer in range(rank):
                host, port, purpose = cards[peer]
                found[peer] = network.call(host, port, purpose.encode(), rank, size, deadline)
            above = set(range(rank + 1, size))
            found |= admit_all(listener, network.key(card[2].encode()), above, size, deadline)
        except (OSError, RendezvousError) as error:
            for connection in found.values():
                connection.close()
            raise RendezvousError(f"tcp: rank {rank} did not reach rank {len(found)}: {error}") from error
    return {peer: connection.sock for peer, connection in found.items()}
