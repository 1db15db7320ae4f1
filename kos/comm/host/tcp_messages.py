"""Messages of the tcp transport: one authenticated connection between every two ranks of a group.

Short messages are eager: they are sent at once, and the receiver buffers them if no receive is posted yet.  A sender
has ``CREDIT_BYTES`` of credits for them.  Long messages, and short ones beyond the credits, use the rendezvous
protocol: the sender announces them (RTS), and sends the data after the receiver's CTS, straight into the receiver's
array.  A CTS also returns credits.  So no order of sends and receives can block a connection, and no sender can fill a
receiver's memory.

A message carries its dtype, or the fingerprint of its collective where ranks do not compare calls in shared memory.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

from kos.comm.control.hub import holds_data
from kos.comm.control.wire import Waiting, fill
from kos.comm.failures import RECENT_SECONDS
from kos.comm.operation import COLLECTIVE_TAGS
from kos.comm.transport import remove, take, wrong_message
from kos.dtypes import DTYPE_CODES, dtype_of_code
from kos.errors import KosError, RendezvousError, by_handler, from_record

Array = np.ndarray[Any, Any]

EAGER_BYTES = 256 << 10  # the longest eager message: a segment of a schedule
CREDIT_BYTES = 4 << 20  # of short messages between two ranks that are in flight or buffered
OVERHEAD_BYTES = 256  # memory that a buffered message takes beside its own bytes
CONTROL_BYTES = 1 << 19  # the longest control message: an error of 60,000 ranks
REASON_LENGTH = 1000  # characters of a reason or an error
_SIOCOUTQNSD = 0x894B  # of Linux, for ioctl: the bytes that are not sent yet
_SLEEP_SECONDS = 0.05  # the longest poll: another thread may consume the awaited event, or end the operation

CLOSED_HERE = "this rank closed the communicator"

HEADER = struct.Struct("!B3xQIQQ")  # kind, tag, number of the long message, bytes, dtype or fingerprint
EAGER, RTS, CTS, REFUSE, DATA, CALL, CLOSE = range(1, 8)


class Poller:
    """All connections of this rank, over a communicator and its splits; a wait polls all of them."""

    def __init__(self) -> None:
        self._epoll, self._events = select.epoll(), 0
        # Weak: connections end with their communicator, and epoll removes closed sockets.
        self._peers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, peer: Any) -> None:
        """Poll the connection ``peer.sock``: of a Peer, or the Channel of a group."""
        self._peers[peer.sock.fileno()] = peer
        self._epoll.register(peer.sock, select.EPOLLIN)

    def want_write(self, peer: Peer, wanted: bool) -> None:
        self._epoll.modify(peer.sock, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def remove(self, peer: Any) -> None:
        del self._peers[peer.sock.fileno()]
        self._epoll.unregister(peer.sock)

    def progress(self) -> None:
        """Read and write without waiting."""
        for descriptor, _ in self._epoll.poll(0):
            self._events += 1
            if (peer := self._peers.get(descriptor)) is not None:
                peer.progress(self)

    def mark(self) -> int:
        """See ``Backend.waiter``."""
        return self._events

    def pause(self, mark: int | None = None, seconds: float | None = None) -> None:
        """See ``Backend.waiter``.  Without a ``mark``, it waits until a socket is ready.

        It returns at once if an event since ``mark`` was handled, as this may have completed a message after its
        operation was polled.  An event that was not handled keeps its socket ready.
        """
        if mark is None or mark == self._events:
            self._epoll.poll(_SLEEP_SECONDS if seconds is None else min(seconds, _SLEEP_SECONDS))


class TCPMessage:
    """One end of a message in flight."""

    __slots__ = ("call", "complete", "dtype", "error", "peer", "tag", "view")

    def __init__(self, peer: Peer, tag: int, array: Array) -> None:
        self.peer, self.tag, self.dtype = peer, tag, array.dtype
        self.call = DTYPE_CODES[array.dtype] if tag < COLLECTIVE_TAGS else peer.transport.called(tag)[0]
        self.view = array.view(np.uint8).data
        self.complete = False
        self.error: KosError | None = None

    def done(self) -> bool:
        if not self.complete and self.error is None:
            self.peer.transport.poller.progress()
        if self.error is not None:
            raise self.error
        if not self.complete:
            self.peer.check(self.tag)
        return self.complete


Arrival = tuple[int, int, memoryview | None, int]
"""A message that arrived: bytes, dtype or fingerprint, the data, and its number if it waits for a CTS instead."""


class _Outgoing:
    """Bytes to be sent: a header, and its data if that follows at once."""

    __slots__ = ("begun", "kind", "message", "views")

    def __init__(self, kind: int, views: list[memoryview], message: TCPMessage | None) -> None:
        self.kind, self.views, self.message = kind, views, message
        self.begun = False


class Peer:
    """The connection to one rank of a group."""

    def __init__(self, rank: int, transport: Any, sock: socket.socket) -> None:
        self.rank, self.transport, self.sock = rank, transport, sock
        self.gone: str | None = None  # the reason, once the rank has closed or is lost
        self.closed = False  # whether it has closed its communicator, and not crashed
        self._cause: KosError | None = None  # the failure because of which it closed it
        self._posted: dict[int, deque[TCPMessage]] = {}  # receives, by tag
        self._arrived: dict[int, deque[Arrival]] = {}  # messages without a receive, by tag
        self._outgoing: deque[_Outgoing] = deque()
        self._announced: dict[int, TCPMessage] = {}  # sends that wait for a CTS, by number
        self._incoming: dict[int, TCPMessage] = {}  # receives whose data is in flight, by number; 0: of a short message
        self._credits = CREDIT_BYTES  # bytes of eager messages that may still be sent
        self._freed = 0  # credits to be returned to the peer
        self._count = 0
        self._accepted = 0  # bytes of ``_outgoing`` that the socket has accepted since these were last shortened
        self._wants_write = False
        self._reader = self._read()

    def __del__(self) -> None:
        self.sock.close()

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

    def send(self, array: Array, tag: int) -> TCPMessage:
        self.check(tag)
        message = TCPMessage(self, tag, array)
        nbytes = len(message.view)
        if nbytes <= EAGER_BYTES and nbytes + OVERHEAD_BYTES <= self._credits:
            self._credits -= nbytes + OVERHEAD_BYTES
            self._queue(EAGER, tag, 0, nbytes, message.call, message.view, message)
        else:
            self._count = self._count % 0xFFFFFFFF + 1
            self._announced[self._count] = message
            self._queue(RTS, tag, self._count, nbytes, message.call, None, message)
        return message

    def receive(self, array: Array, tag: int) -> TCPMessage:
        message = TCPMessage(self, tag, array)
        arrival = take(self._arrived, tag)
        if arrival is None:
            self._posted.setdefault(tag, deque()).append(message)
        else:
            self._match(message, arrival)
        return message

    def arrived(self, tag: int) -> tuple[int, int] | None:
        """Bytes and dtype of the first message of the program with that tag that has no receive; None without one."""
        return self._arrived[tag][0][:2] if tag in self._arrived else None

    def send_control(self, kind: int, tag: int, data: bytes, call: int = 0) -> None:
        """Queue a control message about the group, and send it if the socket allows."""
        self._queue(kind, tag, 0, len(data), call, memoryview(data))

    def receives(self, tag: int) -> bool:
        """Whether a message with that tag is still to be received."""
        return tag in self._posted or any(message.tag == tag for message in self._incoming.values())

    def sends(self, tag: int) -> bool:
        """Whether a message with that tag is still to be sent: it waits for a CTS, or for room in the socket."""
        outgoing = (item.message for item in self._outgoing if item.message is not None)
        return any(message.tag == tag for message in (*self._announced.values(), *outgoing))

    def cancel(self, cancelled: Callable[[TCPMessage], bool]) -> None:
        """Cancel messages; their memory is free afterwards."""
        if self._accepted and self.gone is None:  # a signal's handler has ended ``_send``
            self._flush()
        remove(self._posted, cancelled)
        self._announced = {number: message for number, message in self._announced.items() if not cancelled(message)}
        for message in self._incoming.values():
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
                self._credits += len(item.message.view) + OVERHEAD_BYTES

    def progress(self, poller: Poller) -> None:
        """Read and send without waiting."""
        try:
            next(self._reader)
            self._flush()
        except StopIteration as closed:
            self.closed = True
            self._lose(closed.value)
        except BaseException as error:
            if by_handler(error) or not isinstance(error, OSError | RendezvousError | ValueError):
                self._reader = self._discard()
                self.transport.failures.cut_short()
                raise
            self._fail(error)

    def _discard(self) -> Waiting[str]:
        """Read what nobody can use: a signal's handler has ended ``_read`` within a message."""
        data = memoryview(bytearray(1 << 16))
        while True:
            yield from fill(self.sock, lambda: data)

    def _fail(self, error: BaseException) -> None:
        """Lose the peer because of an error of its connection."""
        if isinstance(error, OSError):
            failures = self.transport.failures
            world, why = failures.world[self.rank], "its connection was closed"
            failures.status.await_end(world)  # why it ended may arrive later, through the hub
            self._lose(why)
            hosts = failures.status.hosts
            if world in hosts and hosts[world] == hosts[min(hosts)]:  # that of the hub: nobody else reports it
                failures.status.ends.setdefault(world, why)
            failures.ended_with(self.rank, self.transport.poller.progress)
        else:
            self._lose(str(error))

    @property
    def is_lost(self) -> bool:
        """Whether the rank ended without a report of how far it came."""
        return self.gone not in (None, CLOSED_HERE) and not self.closed

    @property
    def busy(self) -> bool:
        """Whether data for a live peer is still queued, in this object or in the send buffer of its socket."""
        return self.gone is None and (bool(self._outgoing) or holds_data(self.sock, _SIOCOUTQNSD))

    def close(self) -> None:
        if self.gone is None:
            self._lose(CLOSED_HERE)

    def _lose(self, why: str) -> None:
        self.gone = why
        self.transport.poller.remove(self)
        self.sock.close()

    def _queue(
        self, kind: int, tag: int, number: int, nbytes: int, call: int, data: memoryview | None = None,
        message: TCPMessage | None = None,
    ) -> None:  # fmt: skip
        """Queue a header and its ``data``, and send them if the socket allows; does nothing for a lost rank."""
        if self.gone is not None:
            return
        header = memoryview(HEADER.pack(kind, tag, number, nbytes, call))
        self._outgoing.append(_Outgoing(kind, [header, data] if data else [header], message))
        if not self._wants_write:
            self._flush()

    def _flush(self) -> None:
        try:
            self._send()
        except BaseException:  # such as that of a signal's handler: the rest is sent by the next ``progress``
            self._wants_write = True
            self.transport.poller.want_write(self, True)
            raise
        if self._wants_write != bool(self._outgoing):
            self._wants_write = bool(self._outgoing)
            self.transport.poller.want_write(self, self._wants_write)

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
                views = [view for item in islice(self._outgoing, 8) for view in item.views]
                try:
                    (self._accepted,) = map(self.sock.sendmsg, [views])
                except OSError as error:  # full, or broken: then the read raises, after the last messages
                    if by_handler(error):
                        raise
                    break

    def _read(self) -> Waiting[str]:
        """Read all messages until the peer closes; yields when there is nothing to read."""
        header = memoryview(bytearray(HEADER.size))
        while True:
            yield from fill(self.sock, lambda: header)
            kind, tag, number, nbytes, call = HEADER.unpack(header)
            if kind == EAGER and nbytes <= EAGER_BYTES:
                posted = self._posted.get(tag)
                if posted is not None and len(posted[0].view) == nbytes and posted[0].call == call:
                    self._incoming[0] = posted[0]
                    take(self._posted, tag)
                    yield from self._read_into(0)
                    self._freed += nbytes + OVERHEAD_BYTES
                else:
                    buffered = yield from self._bytes(nbytes)  # held until the next: freed pages return to the system
                    self._arrive(tag, (nbytes, call, buffered, 0))
            elif kind == RTS:
                self._arrive(tag, (nbytes, call, None, number))
            elif kind == CTS:
                self._credits += nbytes
                if (message := self._announced.pop(number, None)) is not None:  # else it was cancelled
                    self._queue(DATA, tag, number, len(message.view), call, message.view, message)
            elif kind == REFUSE:
                if (message := self._announced.pop(number, None)) is not None:
                    expected = nbytes, dtype_of_code(call) if tag < COLLECTIVE_TAGS else message.dtype
                    got = len(message.view), message.dtype
                    transport = self.transport
                    message.error = wrong_message(transport.failures, self.rank, expected, transport.rank, got)
            elif kind == DATA and number in self._incoming and len(self._incoming[number].view) == nbytes:
                yield from self._read_into(number)
            elif kind in (CALL, CLOSE) and nbytes <= CONTROL_BYTES:
                data = bytes((yield from self._bytes(nbytes)))
                if kind == CALL:
                    self.transport.compare(tag, self.rank, call, data)
                    continue
                why, cause = json.loads(data)
                self._cause = None if cause is None else from_record(cause)
                return str(why)
            else:
                raise RendezvousError(f"expected the header of a message, got kind {kind} of {nbytes} bytes")

    def _read_into(self, number: int) -> Waiting[None]:
        message = self._incoming[number]
        yield from fill(self.sock, lambda: message.view)
        del self._incoming[number]
        message.complete = True

    def _bytes(self, nbytes: int) -> Waiting[memoryview]:
        data = memoryview(bytearray(nbytes))
        yield from fill(self.sock, lambda: data)
        return data

    def _arrive(self, tag: int, arrival: Arrival) -> None:
        if tag >= COLLECTIVE_TAGS and arrival[1]:
            self.transport.compare(tag, self.rank, arrival[1])
        message = take(self._posted, tag)
        if message is None:
            self._arrived.setdefault(tag, deque()).append(arrival)
        else:
            self._match(message, arrival)

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
            self._freed += got + OVERHEAD_BYTES
        elif fits:
            self._incoming[number] = message
            # Credits return only with a CTS: a sender that waits for none may have closed, and writing to it would make
            # TCP discard its last messages.
            self._queue(CTS, message.tag, number, self._freed, message.call)
            self._freed = 0
        elif message.error is not None:
            self._queue(REFUSE, message.tag, number, expected, message.call)
