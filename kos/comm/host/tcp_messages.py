"""Messages of the tcp transport: one authenticated connection between every two ranks, which all of their groups share.

Short messages are eager: they are sent at once, and the receiver buffers them if no receive is posted yet.  A sender
has ``CREDIT_BYTES`` of credits for them.  Long messages, and short ones beyond the credits, use the rendezvous
protocol: the sender announces them (RTS), and sends the data after the receiver's CTS, straight into the receiver's
array.  A CTS also returns credits.  So no order of sends and receives can block a connection, and no sender can fill a
receiver's memory.

A message carries its dtype, or the fingerprint of its collective where ranks do not compare calls in shared memory.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from operator import attrgetter
from typing import Any

import numpy as np

from kos.comm.control.hub import holds_data
from kos.comm.failures import RECENT_SECONDS
from kos.comm.operation import ANY, COLLECTIVE_TAGS
from kos.comm.transport import remove, take, wrong_message
from kos.dtypes import DTYPE_CODES, dtype_of_code
from kos.errors import KosError, RendezvousError, by_handler, from_record

Array = np.ndarray[Any, Any]

EAGER_BYTES = 256 << 10  # the longest eager message: a segment of a schedule
CREDIT_BYTES = 4 << 20  # of short messages between two ranks that are in flight or buffered
INPUT_BYTES = 16 << 10  # that one read of a socket may give, but for the memory of a long message
OVERHEAD_BYTES = 256  # memory that a buffered message takes beside its own bytes
CONTROL_BYTES = 1 << 19  # the longest control message: an error of 60,000 ranks
REASON_LENGTH = 1000  # characters of a reason or an error
_SIOCOUTQNSD = 0x894B  # of Linux, for ioctl: the bytes that are not sent yet

CLOSED_HERE = "this rank closed the communicator"

HEADER = struct.Struct("!B3xIQQQQ")  # kind, number of the long message, group, tag, bytes, dtype or fingerprint
_VIEWS = attrgetter("views")
EAGER, RTS, CTS, REFUSE, DATA, CALL, CLOSE = range(1, 8)


class TCPMessage:
    """One end of a message in flight."""

    __slots__ = ("call", "complete", "dtype", "error", "peer", "tag", "view")

    def __init__(self, peer: Peer, tag: int, array: Array) -> None:
        self.peer, self.tag, self.dtype = peer, tag, array.dtype
        self.call = DTYPE_CODES[array.dtype] if tag < COLLECTIVE_TAGS else peer.transport.calls.get(tag, NO_CALL)[0]
        self.view = array.view(np.uint8).data
        self.complete = False
        self.error: KosError | None = None

    def done(self) -> bool:
        if self.complete:
            return True
        if self.error is None:
            self.peer.transport.poller.progress()
        if self.error is not None:
            raise self.error
        if not self.complete:
            self.peer.check(self.tag)
        return self.complete


NO_CALL = 0, b""
Arrival = tuple[int, int, memoryview | None, int]
"""A message that arrived: bytes, dtype or fingerprint, the data, and its number if it waits for a CTS instead."""
_arrivals = count()


class _Outgoing:
    """Bytes to be sent: a header, and its data if that follows at once."""

    __slots__ = ("begun", "kind", "message", "peer", "views")

    def __init__(self, kind: int, peer: Peer, views: list[memoryview], message: TCPMessage | None) -> None:
        self.kind, self.peer, self.views, self.message = kind, peer, views, message
        self.begun = False


class Peer:
    """A rank of a group, and its messages; ``link`` is the connection to it."""

    def __init__(self, rank: int, transport: Any, link: Link) -> None:
        self.rank, self.transport, self.link = rank, transport, link
        self.gone = link.lost  # the reason, once the rank has closed or is lost
        self.closed = False  # whether it has closed its communicator, and not crashed
        self._cause: KosError | None = None  # the failure because of which it closed it
        self.posted: dict[int, deque[TCPMessage]] = {}  # receives, by tag
        self._arrived: dict[int, deque[tuple[int, Arrival]]] = {}  # messages without a receive, by tag, in their order
        self.credits = CREDIT_BYTES  # bytes of eager messages that may still be sent
        self.freed = 0  # credits to be returned to the other side
        link.peers[transport.group] = self

    def check(self, tag: int) -> None:
        """Raise if an incomplete message with that tag can no longer complete.

        If another rank than this peer aborts, the wait ends too.  If the process of another rank ends, the wait goes
        on: that rank may have sent all of its data, and the ranks that wait for it report its end.
        """
        failures = self.transport.failures
        failures.raise_reported(tag - COLLECTIVE_TAGS if tag >= COLLECTIVE_TAGS else None)
        if self.gone is not None:
            failures.raise_reported(None)
            raise self.loss()
        if tag < COLLECTIVE_TAGS and failures.left.keys() - {self.rank}:  # what this one has sent is received first
            failures.raise_reported(sys.maxsize)

    def loss(self) -> KosError:
        """The error of a call that waits for this peer, which is gone."""
        window = 0.0 if self.closed else RECENT_SECONDS
        return self.transport.failures.lost(self.rank, str(self.gone), None, self._cause, window)

    def receive(self, message: TCPMessage) -> None:
        """Post a receive, or match it with the message that has arrived."""
        if message.tag not in self._arrived:
            self.posted.setdefault(message.tag, deque()).append(message)
        elif (arrival := take(self._arrived, message.tag)) is not None:
            self._match(message, arrival[1])

    def arrived(self, tag: int) -> tuple[int, int, int] | None:
        """Bytes, dtype and tag of the first message of the program with that tag, or ANY, that has no receive."""
        tags = [each for each in self._arrived if each < COLLECTIVE_TAGS] if tag == ANY else [tag]
        heads = [(*self._arrived[each][0], each) for each in tags if each in self._arrived]
        if not heads:
            return None
        _, (nbytes, code, *_), tag = min(heads)
        return nbytes, code, tag

    def send_control(self, kind: int, tag: int, data: bytes, call: int = 0) -> None:
        """Queue a control message about the group, and send it if the socket allows."""
        self.link.queue(kind, self, tag, 0, len(data), call, memoryview(data))

    def send_close(self, data: bytes) -> None:
        """Queue the last frame of the group.  Messages that wait for a CTS are not sent any more."""
        self.link.cancel_announced(lambda message: message.peer is self)
        self.send_control(CLOSE, 0, data)

    def receives(self, tag: int) -> bool:
        """Whether a message with that tag is still to be received."""
        return tag in self.posted or any(m.tag == tag and m.peer is self for m in self.link.incoming.values())

    def sends(self, tag: int) -> bool:
        """Whether a message with that tag is still to be sent: it waits for a CTS, or for room in the socket."""
        return any(message.tag == tag and message.peer is self for message in self.link.sending())

    def cancel(self, cancelled: Callable[[TCPMessage], bool]) -> None:
        """Cancel messages; their memory is free afterwards."""
        remove(self.posted, cancelled)
        self.link.cancel(lambda message: message.peer is self and cancelled(message))

    @property
    def is_lost(self) -> bool:
        """Whether the rank ended without a report of how far it came."""
        return self.gone not in (None, CLOSED_HERE) and not self.closed

    @property
    def busy(self) -> bool:
        """Whether data for a live peer is still queued here, or in the send buffer of a socket that is then closed."""
        return self.gone is None and self.link.holds_data_of(self)

    def close(self) -> None:
        self.gone = self.gone or CLOSED_HERE
        self.cancel(lambda message: True)
        self._arrived.clear()
        self.link.leave(self)

    def close_by_peer(self, why: str, cause: KosError | None) -> None:
        """The rank has closed its communicator."""
        self.gone, self.closed, self._cause = self.gone or why, True, cause

    def arrive(self, tag: int, arrival: Arrival) -> None:
        if tag >= COLLECTIVE_TAGS and arrival[1]:
            self.transport.compare(tag, self.rank, arrival[1])
        if tag not in self.posted:
            self._arrived.setdefault(tag, deque()).append((next(_arrivals), arrival))
        elif (message := take(self.posted, tag)) is not None:
            self._match(message, arrival)

    def refused(self, message: TCPMessage, expected: int, call: int) -> None:
        """The rank's receive does not fit ``message`` of this one."""
        wanted = expected, dtype_of_code(call) if message.tag < COLLECTIVE_TAGS else message.dtype
        got, transport = (len(message.view), message.dtype), self.transport
        message.error = wrong_message(transport.failures, self.rank, wanted, transport.rank, got)

    def _match(self, message: TCPMessage, arrival: Arrival) -> None:
        """Match a receive with its message."""
        got, call, data, number = arrival
        collective, expected = message.tag >= COLLECTIVE_TAGS, len(message.view)
        fits = expected == got and message.call == call
        if not fits and not (collective and message.call != call):  # all ranks raise that mismatch
            dtype = message.dtype if collective else dtype_of_code(call)
            transport, wanted = self.transport, (expected, message.dtype)
            message.error = wrong_message(transport.failures, transport.rank, wanted, self.rank, (got, dtype))
        if data is not None:
            if fits:
                message.view[:] = data
                message.complete = True
            self.freed += got + OVERHEAD_BYTES
        elif fits:
            self.link.grant(message, number)
        elif message.error is not None:
            self.link.queue(REFUSE, self, message.tag, number, expected, message.call)


class Link:
    """The connection to one process.  All groups with a rank in it share it: ``peers`` has that rank by group."""

    def __init__(self, sock: socket.socket, poller: Any) -> None:
        self.sock, self._poller = sock, poller
        self.peers: weakref.WeakValueDictionary[int, Peer] = weakref.WeakValueDictionary()
        self.lost: str | None = None  # why the connection has ended
        self.incoming: dict[int, TCPMessage] = {}  # receives whose data is in flight, by number; 0: of a short message
        self._outgoing: deque[_Outgoing] = deque()
        self._announced: dict[int, TCPMessage] = {}  # sends that wait for a CTS, by number
        self._count = 0
        self._accepted = 0  # bytes of ``_outgoing`` that the socket has accepted since these were last shortened
        self._wants_write = False
        self._header = self._buffer = memoryview(bytearray(HEADER.size))
        self._frame: tuple[int, int, Peer | None, int, int, int] | None = None  # that is read, once its header is known
        self._message: TCPMessage | None = None  # whose memory the frame is read into; None: into ``_buffer``
        self._got = 0  # bytes of it, or of the header, that have been read
        self._input = memoryview(bytearray(INPUT_BYTES))  # what the socket has given
        self._start = self._end = 0  # the part of ``_input`` that is not read yet
        self._received: int | None = None  # bytes that the socket has given since, there or in the frame's memory
        self._kept = self._buffer  # the last message that was buffered: freed pages return to the system
        poller.add(self)

    def __del__(self) -> None:
        self.sock.close()

    def send(self, message: TCPMessage) -> None:
        nbytes = len(message.view)
        if nbytes <= EAGER_BYTES and nbytes + OVERHEAD_BYTES <= message.peer.credits:
            message.peer.credits -= nbytes + OVERHEAD_BYTES
            self.queue(EAGER, message.peer, message.tag, 0, nbytes, message.call, message.view, message)
        else:
            self._count = self._count % 0xFFFFFFFF + 1
            self._announced[self._count] = message
            self.queue(RTS, message.peer, message.tag, self._count, nbytes, message.call, None, message)

    def grant(self, message: TCPMessage, number: int) -> None:
        """Ask for the data of an announced message.

        Credits return only with a CTS: a sender that waits for none may have closed, and writing to it would make TCP
        discard its last messages.
        """
        self.incoming[number], peer = message, message.peer
        freed, peer.freed = peer.freed, 0
        self.queue(CTS, peer, message.tag, number, freed, message.call)

    def sending(self) -> Iterator[TCPMessage]:
        """The messages that are not sent yet."""
        yield from self._announced.values()
        yield from (item.message for item in self._outgoing if item.message is not None)

    def cancel(self, cancelled: Callable[[TCPMessage], bool]) -> None:
        if self._accepted and self.lost is None:  # a signal's handler has ended ``_send``
            self._flush()
        self.cancel_announced(cancelled)
        for message in self.incoming.values():
            if cancelled(message):
                message.view = memoryview(bytearray(len(message.view)))
        for item in list(self._outgoing):
            if item.message is None or not cancelled(item.message):
                continue
            if item.begun or item.kind == DATA:  # the receiver expects these bytes
                item.views = [memoryview(bytes(view)) for view in item.views]
                continue
            self._outgoing.remove(item)
            if item.kind == EAGER:
                item.peer.credits += len(item.message.view) + OVERHEAD_BYTES

    def cancel_announced(self, cancelled: Callable[[TCPMessage], bool]) -> None:
        self._announced = {number: message for number, message in self._announced.items() if not cancelled(message)}

    def holds_data_of(self, peer: Peer) -> bool:
        """See ``Peer.busy``."""
        if len(self.peers) > 1:
            return any(item.peer is peer for item in self._outgoing)
        return bool(self._outgoing) or holds_data(self.sock, _SIOCOUTQNSD)

    def leave(self, peer: Peer) -> None:
        """A group closes its use of the link.  The last one closes the link."""
        if self.peers.pop(peer.transport.group, None) is not None and not self.peers:
            self._close(CLOSED_HERE)

    def _close(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            self._poller.remove(self)
            self.sock.close()

    def progress(self, poller: Any) -> None:
        """Read and send without waiting."""
        try:
            self._read()
            if self._outgoing:
                self._flush()
        except BaseException as error:
            if by_handler(error) or not isinstance(error, OSError | RendezvousError | ValueError):
                raise
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Lose the peer because of an error of its connection."""
        live = [peer for peer in self.peers.values() if peer.gone is None]
        why = "its connection was closed" if isinstance(error, OSError) else str(error)
        died = bool(live) and isinstance(error, OSError)
        if died:
            failures = live[0].transport.failures
            world, status = failures.world[live[0].rank], failures.status
            status.await_end(world)  # why it ended may arrive later, through the hub
        for peer in live:
            peer.gone = why
        self._close(why)
        if died:
            hosts = status.hosts
            if world in hosts and hosts[world] == hosts[min(hosts)]:  # that of the hub: nobody else reports it
                status.ends.setdefault(world, why)
            failures.ended_with(live[0].rank, self._poller.progress)

    def queue(
        self, kind: int, peer: Peer, tag: int, number: int, nbytes: int, call: int, data: memoryview | None = None,
        message: TCPMessage | None = None,
    ) -> None:  # fmt: skip
        """Queue a header and its ``data``, and send them if the socket allows; does nothing for a lost rank."""
        if peer.gone is not None:
            return
        header = memoryview(HEADER.pack(kind, number, peer.transport.group, tag, nbytes, call))
        self._outgoing.append(_Outgoing(kind, peer, [header, data] if data else [header], message))
        if not self._wants_write:
            self._flush()

    def _flush(self) -> None:
        try:
            self._send()
        except BaseException:  # such as that of a signal's handler: the rest is sent by the next ``progress``
            self._wants_write = True
            self._poller.want_write(self, True)
            raise
        if self._wants_write != bool(self._outgoing):
            self._wants_write = bool(self._outgoing)
            self._poller.want_write(self, self._wants_write)

    def _send(self) -> None:
        """Send what is queued, as far as the socket allows.

        A signal's handler may raise at any call, but not within an assignment.  So ``map`` calls ``sendmsg``, and the
        views and ``_accepted`` change together.  The abort that follows then continues at the right byte.
        """
        while self._outgoing:
            item = self._outgoing[0]
            if not item.views:
                if item.message is not None and item.kind != RTS:
                    item.message.complete = True
                self._outgoing.popleft()
            elif self._accepted:
                first, *others = item.views
                rest, left = first[self._accepted :], max(self._accepted - len(first), 0)
                views = [rest, *others] if rest.nbytes else others
                item.begun = True
                item.views, self._accepted = views, left
            else:
                views = [*chain.from_iterable(map(_VIEWS, islice(self._outgoing, 8)))]
                try:
                    (self._accepted,) = map(self.sock.sendmsg, [views])
                except OSError as error:  # full, or broken: then the read raises, after the last messages
                    if by_handler(error):
                        raise
                    break

    def _read(self) -> None:
        """Read what has arrived.  Raises ConnectionError at the end.

        As in ``_send``, what a signal's handler raises leaves the position in the stream right.  Only the message that
        is handled meanwhile may be lost, whose group is then aborted.
        """
        is_empty = False
        while True:
            message, buffer, got = self._message, self._buffer, self._got
            view = buffer if message is None else message.view
            missing = len(view) - got
            if (received := self._received) is not None:
                if not received:
                    raise ConnectionError("the connection was closed")
                if missing >= INPUT_BYTES:
                    self._got, self._received = got + received, None
                else:
                    self._start, self._end, self._received = 0, received, None
            elif missing and (start := self._start) < self._end:
                stop = min(start + missing, self._end)
                view[got : got + stop - start] = self._input[start:stop]
                self._got, self._start = got + stop - start, stop
            elif missing:
                if is_empty:
                    return
                memory = self._input if missing < INPUT_BYTES else view[got:]
                try:
                    (self._received,) = map(self.sock.recv_into, [memory])
                except BlockingIOError:  # ``by_handler`` takes long
                    return
                is_empty = memory is self._input and 0 < self._received < INPUT_BYTES
            elif (frame := self._frame) is None:
                self._begin_frame(*HEADER.unpack(self._header))
            else:
                try:
                    self._frame, self._message, self._buffer, self._got = None, None, self._header, 0
                    self._end_frame(*frame, message, buffer)
                except BaseException as error:
                    if by_handler(error) and frame[2] is not None:
                        frame[2].transport.failures.cut_short()
                    raise

    def _begin_frame(self, kind: int, number: int, group: int, tag: int, nbytes: int, call: int) -> None:
        """Prepare to read what follows a header."""
        peer, message, follows = self.peers.get(group), None, 0
        if kind == EAGER and nbytes <= EAGER_BYTES:
            follows = nbytes
            if peer is not None and tag in peer.posted:
                first = peer.posted[tag][0]
                if len(first.view) == nbytes and first.call == call:
                    self.incoming[0] = message = first
        elif kind == DATA and number in self.incoming and len(self.incoming[number].view) == nbytes:
            message = self.incoming[number]
        elif kind in (CALL, CLOSE) and nbytes <= CONTROL_BYTES:
            follows = nbytes
        elif kind not in (RTS, CTS, REFUSE):
            raise RendezvousError(f"expected the header of a message, got kind {kind} of {nbytes} bytes")
        buffer = memoryview(bytearray(follows if message is None else 0))
        frame = kind, number, peer, tag, nbytes, call
        self._frame, self._message, self._buffer, self._got = frame, message, buffer, 0

    def _end_frame(
        self, kind: int, number: int, peer: Peer | None, tag: int, nbytes: int, call: int, message: TCPMessage | None,
        buffer: memoryview,
    ) -> None:  # fmt: skip
        """Handle a frame that has been read whole.  Frames of a group that this rank has closed are dropped."""
        if message is not None:
            del self.incoming[number]
            receiver = message.peer
            if tag in receiver.posted and receiver.posted[tag][0] is message:  # else it was cancelled
                take(receiver.posted, tag)
            message.complete = True
            if kind == EAGER:
                receiver.freed += nbytes + OVERHEAD_BYTES
        elif kind == CTS:
            if peer is not None:
                peer.credits += nbytes
            if (sent := self._announced.pop(number, None)) is not None:  # else it was cancelled
                self.queue(DATA, sent.peer, tag, number, len(sent.view), call, sent.view, sent)
        elif kind == REFUSE:
            if (sent := self._announced.pop(number, None)) is not None:
                sent.peer.refused(sent, nbytes, call)
        elif peer is None:
            return
        elif kind == EAGER:
            self._kept = buffer
            peer.arrive(tag, (nbytes, call, buffer, 0))
        elif kind == RTS:
            peer.arrive(tag, (nbytes, call, None, number))
        elif kind == CALL:
            peer.transport.compare(tag, peer.rank, call, bytes(buffer))
        else:
            why, cause = json.loads(bytes(buffer))
            self.incoming = {n: each for n, each in self.incoming.items() if each.peer is not peer}  # nothing follows
            peer.close_by_peer(str(why), None if cause is None else from_record(cause))
