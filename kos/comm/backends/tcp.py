"""The tcp backend: host memory over sockets, one authenticated connection between every two ranks.

For jobs that no MPI started.  What does not go through shared memory runs as schedules.  Short messages are
sent at once and, if nobody has asked for them yet, kept by the receiver: more than ``WINDOW_BYTES`` of them are
never on their way or kept.  Those beyond and long ones are announced, and travel when the receiver grants them
room, straight into its memory; it says then which short ones are gone.  So no order of sends and receives can
block a connection, and no sender can fill a receiver's memory.

With a message goes what it belongs to: its dtype, or the fingerprint of the collective where ranks do not compare
their calls in shared memory.  A rank that meets another one, or waits for long, tells its call to the others.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kos.comm.backend import Probe, drop, take, wrong_message
from kos.comm.backends.host import HostBackend
from kos.comm.fingerprints import DTYPE_CODES, KINDS, Fingerprints, described, dtype_of_code
from kos.comm.operation import COLLECTIVE_TAGS, Operation, mismatch
from kos.comm.rendezvous import Rendezvous
from kos.comm.schedules.execute import Request
from kos.comm.tcp import Connection, Network, admit_all
from kos.comm.work import Engine, Idle
from kos.errors import CollectiveError, KosError, RankLost, RendezvousError

Array = np.ndarray[Any, Any]

EAGER_BYTES = 256 << 10  # longest message sent without being asked for: a segment of a schedule
WINDOW_BYTES = 4 << 20  # of short messages between two ranks that are on their way or kept
KEEPING_BYTES = 256  # what keeping a message costs beside its own bytes

_HEADER = struct.Struct("!B3xIIQQ")  # kind, tag, number of the long message, bytes, what it belongs to
_SHORT, _ASK, _GRANT, _REFUSE, _LONG, _CREDIT, _CALL, _FAILED, _LEFT, _BYE = range(1, 11)
_RECENT = 1024  # collectives of which a rank knows what it called
_PATIENCE = 0.05  # seconds of waiting in a collective before a rank tells what it called
_LAST_WORDS = 1000  # characters
_FAREWELL_SECONDS = 0.2  # for what was begun, and last words behind it, when a rank leaves
_NAP_SECONDS = 0.05  # another thread may have taken the event that a waiting one is looking for


class TCPBackend(HostBackend):
    """Carries a group whose ranks found each other over TCP."""

    name = "tcp"

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None, poller: _Poller | None = None) -> None:
        super().__init__(rendezvous, engine)
        self._poller = poller or _Poller()
        self._mesh = self.transport = _Mesh(rendezvous, self._poller)
        self._fingerprints = self._calls or Fingerprints()

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        if rendezvous.network is None:
            return Probe(False, "the ranks did not meet over TCP (start with torchrun, srun, or RANK, WORLD_SIZE, …)")
        return Probe(True, f"sockets between {rendezvous.size} ranks")

    def idle(self) -> Idle:
        return self._poller if self._calls is None else super().idle()

    def split(self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0) -> TCPBackend | None:
        return None if rendezvous is None else TCPBackend(rendezvous, self.engine, self._poller)

    def close(self) -> None:
        super().close()
        self._poller.progress()  # who waits because it called something else has told
        self._mesh.leave(_BYE, "")

    def part(self, reason: str) -> None:
        super().part(reason)
        self._mesh.leave(_BYE, reason)

    def abort(self, reason: str) -> None:
        reason = str(self.broken or reason)  # whose fault it was, if another rank's
        self._mesh.leave(_LEFT, reason)
        super().abort(reason)

    def agree(self, operation: Operation) -> Callable[[], bool] | None:
        """Between hosts nobody waits for that: messages of another call raise, or the words of who waits."""
        here, mesh = super().agree(operation), self._mesh
        if self.one_host:
            return here
        tag, tell_at = self._tag(operation), time.monotonic() + _PATIENCE
        mesh.begin(operation, tag, self._fingerprints)

        def go_on() -> bool:
            nonlocal tell_at
            if time.monotonic() > tell_at:
                tell_at = math.inf
                mesh.announce(tag)
            if mesh.failure is not None:
                mesh.check(tag)
            return here is None or here()

        return go_on

    def awaited(self, operation: Operation) -> list[int]:
        return self._mesh.awaited(self._tag(operation))

    def failed(self, operation: Operation, error: Exception) -> KosError:
        first, tag = self.broken is None, self._tag(operation)
        failure = super().failed(operation, error)
        if operation.collective:
            self._mesh.forget(lambda message: message.tag == tag)
            if first:
                self._mesh.fail(tag, failure)
        return failure


class _Poller:
    """All connections of this rank, of a communicator and its splits: a wait for one sees them all."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        # Weakly: a communicator that is dropped takes its connections with it, and epoll forgets what is closed.
        self._peers: weakref.WeakValueDictionary[int, _Peer] = weakref.WeakValueDictionary()

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


class _Place:
    """Memory to read bytes to."""

    __slots__ = ("view",)

    def __init__(self, nbytes: int) -> None:
        self.view = memoryview(bytearray(nbytes))


class _Message(_Place):
    """A message in flight, of one or the other end."""

    __slots__ = ("call", "complete", "dtype", "error", "peer", "tag")

    def __init__(self, peer: _Peer, tag: int, array: Array) -> None:
        self.peer, self.tag, self.dtype = peer, tag, array.dtype
        self.call = DTYPE_CODES[array.dtype] if tag < COLLECTIVE_TAGS else peer.mesh.called(tag)[0]
        self.view = array.view(np.uint8).data
        self.complete = False
        self.error: KosError | None = None

    def done(self) -> bool:
        if not self.complete and self.error is None:
            self.peer.mesh.poller.progress()
        if self.error is not None:
            raise self.error
        if not self.complete:
            self.peer.check(self.tag)
        return self.complete

    def forget(self) -> None:
        self.peer.forget(lambda message: message is self)


class _Mesh:
    """The transport: the connections of one group."""

    def __init__(self, rendezvous: Rendezvous, poller: _Poller) -> None:
        self.rank, self.poller = rendezvous.rank, poller
        self.lost: str | None = None  # the first rank that left without a goodbye
        self.failure: tuple[int, KosError] | None = None  # the first collective that a rank failed in, by its tag
        self._calls: dict[int, tuple[int, bytes]] = {}  # this rank's last, by tag: fingerprint and description
        self._heard: dict[int, dict[int, tuple[int, bytes]]] = {}  # others', by rank, where it has called nothing yet
        self._group = ""
        self.peers = {rank: _Peer(rank, self, sock) for rank, sock in _connect_all(rendezvous).items()}
        for peer in self.peers.values():
            poller.add(peer)

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        return self.peers[peer].send(array, tag)

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        return self.peers[peer].receive(array, tag)

    def awaited(self, tag: int) -> list[int]:
        """Ranks from which messages with that tag have not come."""
        return sorted(rank for rank, peer in self.peers.items() if peer.awaits(tag))

    def forget(self, given_up: Callable[[_Message], bool]) -> None:
        """Nobody waits any more for these messages, and their memory is given back."""
        for peer in self.peers.values():
            peer.forget(given_up)

    def fail(self, tag: int, failure: KosError) -> None:
        """Have all ranks that are or come to be in that collective, or a later one, raise the same error."""
        self.heed(tag, failure)
        for peer in self.peers.values():
            peer.say(_FAILED, tag, [type(failure).__name__, str(failure)[:_LAST_WORDS]])

    def begin(self, o: Operation, tag: int, fingerprints: Fingerprints) -> None:
        """Compare ``o`` with what other ranks called as their collective of that tag, and told or will tell."""
        mark, self._group = fingerprints.mark(o), o.group
        self._calls[tag] = mark, fingerprints.texts[mark]
        self._calls.pop(COLLECTIVE_TAGS + (tag - _RECENT) % COLLECTIVE_TAGS, None)
        for rank, call in self._heard.pop(tag, {}).items():
            self.compare(tag, rank, *call)

    def called(self, tag: int) -> tuple[int, bytes]:
        """What this rank called as its collective of that tag."""
        return self._calls.get(tag, (0, b""))

    def announce(self, tag: int) -> None:
        for peer in self.peers.values():
            peer.describe(tag)

    def compare(self, tag: int, rank: int, mark: int, text: bytes = b"") -> None:
        """Have all ranks raise what differs between that rank's call and this one's, of the same tag.

        Without its ``text`` it is told this rank's, and sees to that.
        """
        mine, mine_text = self.called(tag)
        if mine == mark:
            return
        if mine and not text:
            self.peers[rank].describe(tag)
        elif mine:
            sequence = tag - COLLECTIVE_TAGS  # or some rounds of the tags more
            calls = (self.rank, *described(mine_text, sequence)), (rank, *described(text, sequence))
            self.fail(tag, mismatch(self._group, *calls))
        elif len(self._heard) < _RECENT:
            heard = self._heard.setdefault(tag, {})
            if text or rank not in heard:
                heard[rank] = mark, text

    def heed(self, tag: int, failure: KosError) -> None:
        """A rank failed in the collective of that tag; the earliest counts."""
        if self.failure is None or not _concerns(self.failure[0], tag):
            self.failure = tag, failure

    def check(self, tag: int) -> None:
        """Raise what a rank failed of, if that concerns what has this tag: a later collective, or any message."""
        if self.failure is not None:
            failed, error = self.failure
            if tag < COLLECTIVE_TAGS or _concerns(failed, tag):
                raise type(error)(str(error))

    def leave(self, kind: int, why: str) -> None:
        """Close all connections, after a last word for whose way there is a moment."""
        if self.failure is not None:  # which this rank may have heard alone, in a message
            self.fail(*self.failure)
        for peer in self.peers.values():
            peer.say(kind, 0, why[:_LAST_WORDS])
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while any(peer.busy for peer in self.peers.values()) and time.monotonic() < deadline:
            self.poller.pause(seconds=0.001)
            self.poller.progress()
        for peer in self.peers.values():
            peer.hang_up()


class _Peer:
    """The connection to one rank of a group."""

    def __init__(self, rank: int, mesh: _Mesh, sock: socket.socket) -> None:
        self.rank, self.mesh, self.sock = rank, mesh, sock
        self.gone: str | None = None
        self._posted: dict[int, deque[_Message]] = {}  # receives, by tag
        self._arrived: dict[int, deque[_Arrival]] = {}  # what nobody has asked for yet, by tag
        self._outgoing: deque[_Outgoing] = deque()
        self._asked: dict[int, _Message] = {}  # sends that wait for room, by number
        self._granted: dict[int, _Message] = {}  # receives of those on their way, by number
        self._landing: _Message | None = None  # what is being read
        self._window = WINDOW_BYTES  # of which so much is left to send
        self._taken = 0  # of what came in the peer's window and is gone, but the peer does not know yet
        self._count = 0
        self._wants_room = False
        self._reader = self._read()

    def __del__(self) -> None:
        self.sock.close()

    def check(self, tag: int) -> None:
        """Raise if what is not complete by now cannot become so."""
        self.mesh.check(tag)
        if (why := self.mesh.lost or self.gone) is not None:
            self.mesh.check(0)  # a rank that failed in a later collective left for that
            raise RankLost(why)

    def send(self, array: Array, tag: int) -> _Message:
        self.check(tag)
        message = _Message(self, tag, array)
        nbytes = len(message.view)
        if nbytes <= EAGER_BYTES and nbytes + KEEPING_BYTES <= self._window:
            self._window -= nbytes + KEEPING_BYTES
            self._queue(_SHORT, tag, 0, nbytes, message.call, message)
        else:
            self._count = (self._count + 1) % (1 << 32)
            self._asked[self._count] = message
            self._queue(_ASK, tag, self._count, nbytes, message.call, message)
        return message

    def receive(self, array: Array, tag: int) -> _Message:
        message = _Message(self, tag, array)
        arrival = take(self._arrived, tag)
        if arrival is None:
            self._posted.setdefault(tag, deque()).append(message)
        else:
            self._settle(message, arrival)
        return message

    def describe(self, tag: int) -> None:
        """Tell the peer what this rank called as its collective of that tag."""
        mark, text = self.mesh.called(tag)
        if self.gone is None:
            self._queue(_CALL, tag, 0, len(text), mark, data=memoryview(text))

    def awaits(self, tag: int) -> bool:
        return tag in self._posted or any(
            message.tag == tag for message in [*self._granted.values(), *self._asked.values()]
        )

    def forget(self, given_up: Callable[[_Message], bool]) -> None:
        drop(self._posted, given_up)
        self._asked = {number: message for number, message in self._asked.items() if not given_up(message)}
        for message in [*self._granted.values(), self._landing]:
            if message is not None and given_up(message):
                message.view = memoryview(bytearray(len(message.view)))
        for item in list(self._outgoing):
            if item.message is None or not given_up(item.message):
                continue
            if item.begun or item.kind == _LONG:  # the other side counts on it
                item.views = [memoryview(bytes(view)) for view in item.views]
                continue
            self._outgoing.remove(item)
            if item.kind == _SHORT:
                self._window += len(item.message.view) + KEEPING_BYTES

    def progress(self) -> None:
        """Read and send as much as goes without waiting."""
        try:
            next(self._reader)
            self._flush()
        except StopIteration as goodbye:
            self._lose(goodbye.value or "it closed its communicator", orderly=True)
        except OSError:
            self._lose("its connection was closed")
        except (RendezvousError, ValueError) as error:
            self._lose(str(error))

    def say(self, kind: int, tag: int, words: Any) -> None:
        """Queue a few words about the group, and send them if there is room."""
        if self.gone is None:
            data = json.dumps(words).encode()
            self._queue(kind, tag, 0, len(data), 0, data=memoryview(data))

    @property
    def busy(self) -> bool:
        """Whether something is still to be sent, to a peer that is there."""
        return self.gone is None and bool(self._outgoing)

    def hang_up(self) -> None:
        if self.gone is None:
            self._lose("this rank closed the communicator", orderly=True)

    def _lose(self, why: str, orderly: bool = False) -> None:
        self.gone = f"rank {self.rank} is gone: {why}"
        if not orderly and self.mesh.lost is None:
            self.mesh.lost = self.gone
        self.mesh.poller.remove(self)
        self.sock.close()

    def _queue(
        self, kind: int, tag: int, number: int, nbytes: int, call: int, message: _Message | None = None,
        data: memoryview | None = None,
    ) -> None:  # fmt: skip
        """Send a header, and the ``data`` behind it, as soon as there is room."""
        if message is not None and kind != _ASK:
            data = message.view
        views = [memoryview(_HEADER.pack(kind, tag, number, nbytes, call))]
        self._outgoing.append(_Outgoing(kind, [*views, data] if data else views, message))
        if len(self._outgoing) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            views = [view for item in islice(self._outgoing, 8) for view in item.views]
            try:
                sent = self.sock.sendmsg(views)
            except OSError:  # no room; or broken, which shows when it is read, after what it still brings
                break
            while sent:
                sent -= self._outgoing[0].advance(sent)
                if not self._outgoing[0].views:
                    self._outgoing.popleft()
        if self._wants_room != bool(self._outgoing):
            self._wants_room = bool(self._outgoing)
            self.mesh.poller.want_room(self, self._wants_room)

    def _read(self) -> Generator[None, None, str]:
        """All that the peer sends, until it says goodbye; yields when there is nothing to read."""
        header = _Place(_HEADER.size)
        while True:
            yield from self._fill(header)
            kind, tag, number, nbytes, call = _HEADER.unpack(header.view)
            if kind == _SHORT and nbytes <= EAGER_BYTES:
                posted = self._posted.get(tag)
                if posted is not None and len(posted[0].view) == nbytes and posted[0].call == call:
                    yield from self._land(take(self._posted, tag))
                    self._taken += nbytes + KEEPING_BYTES
                else:
                    place = _Place(nbytes)
                    yield from self._fill(place)
                    self._arrive(tag, _Arrival(nbytes, call, place.view))
            elif kind == _ASK:
                self._arrive(tag, _Arrival(nbytes, call, None, number))
            elif kind == _GRANT:
                message = self._asked.pop(number, None)
                if message is not None:  # else nobody waits for it any more
                    self._queue(_LONG, tag, number, nbytes, call, message)
            elif kind == _REFUSE:
                message = self._asked.pop(number, None)
                if message is not None:
                    expected = nbytes, dtype_of_code(call) if tag < COLLECTIVE_TAGS else message.dtype
                    got = len(message.view), message.dtype
                    message.error = wrong_message(self.rank, expected, self.mesh.rank, got)
            elif kind == _LONG and number in self._granted and len(self._granted[number].view) == nbytes:
                yield from self._land(self._granted.pop(number))
            elif kind == _CREDIT:
                self._window += nbytes
            elif kind in (_CALL, _FAILED, _LEFT, _BYE) and nbytes <= 20 * _LAST_WORDS:
                place = _Place(nbytes)
                yield from self._fill(place)
                if kind == _CALL:
                    self.mesh.compare(tag, self.rank, call, bytes(place.view))
                    continue
                words = json.loads(bytes(place.view))
                if kind == _BYE:
                    return str(words)
                if kind == _LEFT:
                    raise RendezvousError(words)
                self.mesh.heed(tag, KINDS.get(words[0], CollectiveError)(words[1]))
            else:
                raise RendezvousError(f"expected the header of a message, got kind {kind} of {nbytes} bytes")

    def _fill(self, place: _Place) -> Generator[None, None, None]:
        filled, length = 0, len(place.view)
        while filled < length:
            try:
                got = self.sock.recv_into(place.view[filled:])
            except BlockingIOError:
                yield
                continue
            if not got:
                raise ConnectionError
            filled += got

    def _land(self, message: _Message | None) -> Generator[None, None, None]:
        assert message is not None
        self._landing = message
        yield from self._fill(message)
        self._landing = None
        message.complete = True

    def _arrive(self, tag: int, arrival: _Arrival) -> None:
        if tag >= COLLECTIVE_TAGS and arrival.call:
            self.mesh.compare(tag, self.rank, arrival.call)
        message = take(self._posted, tag)
        if message is None:
            self._arrived.setdefault(tag, deque()).append(arrival)
        else:
            self._settle(message, arrival)

    def _settle(self, message: _Message, arrival: _Arrival) -> None:
        """A receive meets the message that it is for."""
        collective, expected, got = message.tag >= COLLECTIVE_TAGS, len(message.view), arrival.nbytes
        fits = expected == got and message.call == arrival.call
        if not fits and not (collective and message.call != arrival.call):  # of which all will hear
            dtype = message.dtype if collective else dtype_of_code(arrival.call)
            message.error = wrong_message(self.mesh.rank, (expected, message.dtype), self.rank, (got, dtype))
        if arrival.data is not None:
            if fits:
                message.view[:] = arrival.data
                message.complete = True
            self._taken += got + KEEPING_BYTES
        elif fits:
            self._granted[arrival.number] = message
            # Said only to who waits for a grant: it may have closed else, and what it has sent would be thrown away.
            if self._taken:
                self._queue(_CREDIT, 0, 0, self._taken, 0)
                self._taken = 0
            self._queue(_GRANT, message.tag, arrival.number, got, message.call)
        elif message.error is not None:
            self._queue(_REFUSE, message.tag, arrival.number, expected, message.call)


def _concerns(failed: int, tag: int) -> bool:
    """Whether the collective of ``tag`` is the one that failed, or came after it; tags go round."""
    return (tag - failed) % COLLECTIVE_TAGS < COLLECTIVE_TAGS // 2


class _Arrival(NamedTuple):
    """A message that came: its bytes, or the number of one that waits for room."""

    nbytes: int
    call: int
    data: memoryview | None
    number: int = 0


class _Outgoing:
    """Bytes to be sent: a header, and what it announces if that goes with it."""

    __slots__ = ("begun", "kind", "message", "views")

    def __init__(self, kind: int, views: list[memoryview], message: _Message | None) -> None:
        self.kind, self.views, self.message = kind, views, message
        self.begun = False

    def advance(self, sent: int) -> int:
        """Take note that up to ``sent`` bytes are sent; how many of them were of this item."""
        self.begun, used = True, 0
        while self.views and used < sent:
            part = min(sent - used, len(self.views[0]))
            used += part
            self.views[0] = self.views[0][part:]
            if not self.views[0]:
                del self.views[0]
        if not self.views and self.message is not None and self.kind != _ASK:
            self.message.complete = True
        return used


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
            others, missing = admit_all(listener, network.key(card[2].encode()), above, size, deadline)
            found |= others
            if missing:
                raise RendezvousError(f"ranks {missing} did not connect in time")
        except (OSError, RendezvousError) as error:
            for connection in found.values():
                connection.close()
            raise RendezvousError(f"tcp: rank {rank} did not reach rank {len(found)}: {error}") from error
    return {peer: connection.sock for peer, connection in found.items()}
