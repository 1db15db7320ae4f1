"""Messages of the tcp backend: one authenticated connection between every two ranks of a group.

Short messages are eager: they are sent at once and, if no receive is posted yet, kept by the receiver.  A sender
has ``CREDIT_BYTES`` of credits for them.  Long messages, and short ones beyond the credits, take the rendezvous
protocol: the sender announces them (RTS), and sends the data when the receiver says so (CTS), straight into its
memory.  A CTS also returns credits.  So no order of sends and receives can block a connection, and no sender can
fill a receiver's memory.

With a message goes what it belongs to: its dtype, or the fingerprint of the collective where ranks do not compare
their calls in shared memory.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from kos.comm.failures import ABRUPT_SECONDS, Ledger, from_record, to_record
from kos.comm.host.fingerprints import DTYPE_CODES, dtype_of_code
from kos.comm.operation import COLLECTIVE_TAGS
from kos.comm.rendezvous.wire import Waiting, fill
from kos.comm.scheduled import drop, take, wrong_message
from kos.errors import KosError, RendezvousError

Array = np.ndarray[Any, Any]

EAGER_BYTES = 256 << 10  # the longest eager message: a segment of a schedule
CREDIT_BYTES = 4 << 20  # of short messages between two ranks that are on their way or kept
KEEPING_BYTES = 256  # what keeping a message costs beside its own bytes
CONTROL_BYTES = 20_000  # of a control message, at most
REASON_LENGTH = 1000  # characters of a reason or an error

HEADER = struct.Struct("!B3xQIQQ")  # kind, tag, number of the long message, bytes, what it belongs to
EAGER, RTS, CTS, REFUSE, DATA, CALL, FAILED, ABORT, CLOSE = range(1, 10)


class Poller(Protocol):
    """What waits for all connections of a rank."""

    def progress(self) -> None: ...

    def want_write(self, peer: Peer, wanted: bool) -> None: ...

    def remove(self, peer: Peer) -> None: ...


class Mesh(Protocol):
    """The connections of a group, of which a ``Peer`` is one."""

    rank: int
    lost: Peer | None
    ledger: Ledger

    @property
    def poller(self) -> Poller: ...

    def called(self, tag: int) -> tuple[int, bytes]: ...

    def compare(self, tag: int, rank: int, mark: int, text: bytes = b"") -> None: ...

class _Message:
    """A message in flight, of one or the other end."""

    __slots__ = ("call", "complete", "dtype", "error", "peer", "tag", "view")

    def __init__(self, peer: Peer, tag: int, array: Array) -> None:
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


class _Arrival(NamedTuple):
    """A message that came: its bytes, or the number of one that waits for a CTS."""

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
        if not self.views and self.message is not None and self.kind != RTS:
            self.message.complete = True
        return used


class Peer:
    """The connection to one rank of a group."""

    def __init__(self, rank: int, mesh: Mesh, sock: socket.socket) -> None:
        self.rank, self.mesh, self.sock = rank, mesh, sock
        self.gone: str | None = None  # why, once it is gone
        self._cause: KosError | None = None  # the failure that made it abort
        self._cause_window: float | None = ABRUPT_SECONDS  # of a failure that may be the cause
        self._posted: dict[int, deque[_Message]] = {}  # receives, by tag
        self._arrived: dict[int, deque[_Arrival]] = {}  # messages without a receive, by tag
        self._outgoing: deque[_Outgoing] = deque()
        self._announced: dict[int, _Message] = {}  # sends that wait for a CTS, by number
        self._landing: dict[int, _Message] = {}  # receives of those on their way, by number; 0: of a short one
        self._credits = CREDIT_BYTES  # bytes of eager messages that may still be sent
        self._freed = 0  # credits to be returned to the peer
        self._count = 0
        self._wants_write = False
        self._reader = self._read()

    def __del__(self) -> None:
        self.sock.close()

    def check(self, tag: int) -> None:
        """Raise if what is not complete by now cannot become so."""
        mesh, ledger = self.mesh, self.mesh.ledger
        ledger.check(tag - COLLECTIVE_TAGS if tag >= COLLECTIVE_TAGS else None)
        # A rank that aborted because of a later collective has done its part of this one, or ranks that wait report it.
        later = ledger.failure is not None and tag >= COLLECTIVE_TAGS
        lost = self if self.gone is not None else None if later else mesh.lost
        if lost is not None and lost.gone is not None:
            ledger.check(None)
            raise ledger.lost(lost.rank, lost.gone, None, lost._cause, lost._cause_window)

    def send(self, array: Array, tag: int) -> _Message:
        self.check(tag)
        message = _Message(self, tag, array)
        nbytes = len(message.view)
        if nbytes <= EAGER_BYTES and nbytes + KEEPING_BYTES <= self._credits:
            self._credits -= nbytes + KEEPING_BYTES
            self._queue(EAGER, tag, 0, nbytes, message.call, message.view, message)
        else:
            self._count = self._count % 0xFFFFFFFF + 1
            self._announced[self._count] = message
            self._queue(RTS, tag, self._count, nbytes, message.call, None, message)
        return message

    def receive(self, array: Array, tag: int) -> _Message:
        message = _Message(self, tag, array)
        arrival = take(self._arrived, tag)
        if arrival is None:
            self._posted.setdefault(tag, deque()).append(message)
        else:
            self._settle(message, arrival)
        return message

    def send_control(self, kind: int, tag: int, data: bytes, call: int = 0) -> None:
        """Queue a control message about the group, and send it if there is room."""
        self._queue(kind, tag, 0, len(data), call, memoryview(data))

    def in_flight(self, tag: int, receives: bool) -> bool:
        """Whether a message of that tag is still to be received, or sent."""
        if receives:
            return tag in self._posted or any(message.tag == tag for message in self._landing.values())
        queued = (item.message for item in self._outgoing if item.message is not None)
        return any(message.tag == tag for message in (*self._announced.values(), *queued))

    def awaits(self, tag: int) -> bool:
        under_way = [*self._landing.values(), *self._announced.values()]
        return tag in self._posted or any(message.tag == tag for message in under_way)

    def cancel(self, cancelled: Callable[[_Message], bool]) -> None:
        """These messages are no longer waited for, and their memory is free."""
        drop(self._posted, cancelled)
        self._announced = {number: message for number, message in self._announced.items() if not cancelled(message)}
        for message in self._landing.values():
            if cancelled(message):
                message.view = memoryview(bytearray(len(message.view)))
        for item in list(self._outgoing):
            if item.message is None or not cancelled(item.message):
                continue
            if item.begun or item.kind == DATA:  # the other side counts on it
                item.views = [memoryview(bytes(view)) for view in item.views]
                continue
            self._outgoing.remove(item)
            if item.kind == EAGER:
                self._credits += len(item.message.view) + KEEPING_BYTES

    def progress(self) -> None:
        """Read and send as much as goes without waiting."""
        try:
            next(self._reader)
            self._flush()
        except StopIteration as closed:
            self._lose(closed.value, orderly=True)
        except OSError:
            self._lose("its connection was closed")
        except (RendezvousError, ValueError) as error:
            self._lose(str(error))
        except BaseException:  # a Ctrl-C, of whatever communicator's wait: at an unknown place in a message
            self._lose("reading from it was interrupted")
            raise

    @property
    def busy(self) -> bool:
        """Whether something is still to be sent, to a peer that is there."""
        return self.gone is None and bool(self._outgoing)

    def close(self) -> None:
        if self.gone is None:
            self._lose("this rank closed the communicator", orderly=True)

    def _lose(self, why: str, orderly: bool = False) -> None:
        self.gone = why
        if not orderly and self.mesh.lost is None:
            self.mesh.lost = self
        self.mesh.poller.remove(self)
        self.sock.close()

    def _queue(
        self, kind: int, tag: int, number: int, nbytes: int, call: int, data: memoryview | None = None,
        message: _Message | None = None,
    ) -> None:  # fmt: skip
        """Send a header, and the ``data`` behind it, as soon as there is room; to a rank that is gone, nothing."""
        if self.gone is not None:
            return
        header = memoryview(HEADER.pack(kind, tag, number, nbytes, call))
        self._outgoing.append(_Outgoing(kind, [header, data] if data else [header], message))
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
        if self._wants_write != bool(self._outgoing):
            self._wants_write = bool(self._outgoing)
            self.mesh.poller.want_write(self, self._wants_write)

    def _read(self) -> Waiting[str]:
        """All that the peer sends, until it closes; yields when there is nothing to read."""
        header = memoryview(bytearray(HEADER.size))
        while True:
            yield from fill(self.sock, lambda: header)
            kind, tag, number, nbytes, call = HEADER.unpack(header)
            if kind == EAGER and nbytes <= EAGER_BYTES:
                posted = self._posted.get(tag)
                if posted is not None and len(posted[0].view) == nbytes and posted[0].call == call:
                    self._landing[0] = posted[0]
                    take(self._posted, tag)
                    yield from self._land(0)
                    self._freed += nbytes + KEEPING_BYTES
                else:
                    kept = yield from self._bytes(nbytes)  # until the next: else its pages go back to the system
                    self._arrive(tag, _Arrival(nbytes, call, kept))
            elif kind == RTS:
                self._arrive(tag, _Arrival(nbytes, call, None, number))
            elif kind == CTS:
                self._credits += nbytes
                if (message := self._announced.pop(number, None)) is not None:  # else it was cancelled
                    self._queue(DATA, tag, number, len(message.view), call, message.view, message)
            elif kind == REFUSE:
                if (message := self._announced.pop(number, None)) is not None:
                    expected = nbytes, dtype_of_code(call) if tag < COLLECTIVE_TAGS else message.dtype
                    got = len(message.view), message.dtype
                    message.error = wrong_message(self.rank, expected, self.mesh.rank, got)
            elif kind == DATA and number in self._landing and len(self._landing[number].view) == nbytes:
                yield from self._land(number)
            elif kind in (CALL, FAILED, ABORT, CLOSE) and nbytes <= CONTROL_BYTES:
                data = bytes((yield from self._bytes(nbytes)))
                if kind == CALL:
                    self.mesh.compare(tag, self.rank, call, data)
                    continue
                record = json.loads(data)
                if kind == FAILED:
                    self.mesh.ledger.record(tag - COLLECTIVE_TAGS, from_record(record))
                    continue
                why, cause = record
                self._cause = None if cause is None else from_record(cause)
                self._cause_window = 0.0 if kind == CLOSE and cause is None else None
                if kind == CLOSE:
                    return str(why)
                raise RendezvousError(why)
            else:
                raise RendezvousError(f"expected the header of a message, got kind {kind} of {nbytes} bytes")

    def _land(self, number: int) -> Waiting[None]:
        message = self._landing[number]
        yield from fill(self.sock, lambda: message.view)
        del self._landing[number]
        message.complete = True

    def _bytes(self, nbytes: int) -> Waiting[memoryview]:
        data = memoryview(bytearray(nbytes))
        yield from fill(self.sock, lambda: data)
        return data

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
        if not fits and not (collective and message.call != arrival.call):  # which all ranks raise as a mismatch
            dtype = message.dtype if collective else dtype_of_code(arrival.call)
            message.error = wrong_message(self.mesh.rank, (expected, message.dtype), self.rank, (got, dtype))
        if arrival.data is not None:
            if fits:
                message.view[:] = arrival.data
                message.complete = True
            self._freed += got + KEEPING_BYTES
        elif fits:
            self._landing[arrival.number] = message
            # Credits are returned only with a CTS: a sender that does not wait for one may have closed, and TCP would
            # throw away what it has sent.
            self._queue(CTS, message.tag, arrival.number, self._freed, message.call)
            self._freed = 0
        elif message.error is not None:
            self._queue(REFUSE, message.tag, arrival.number, expected, message.call)


def to_bytes(failure: KosError) -> bytes:
    """The record of a failure, short enough to be sent."""
    kind, text, ranks = to_record(failure)
    return json.dumps([kind, text[:REASON_LENGTH], ranks]).encode()
