"""Messages between the ranks of one host, through their segment.

Every rank has a mailbox for each other rank: a ring of headers, and room for data.  A short message is eager: the
sender copies it into the room and is done.  A long one, or one beyond the room or the credits, uses the rendezvous
protocol: its header (RTS) holds the address, the receiver reads the data in one copy (``direct.py``) and answers.  If
the memory cannot be read, or all answers are in use, the header announces a message of the transport between hosts.

A rank that waits for a message takes all that have arrived.  It keeps those without a receive: their bytes, at most
``CREDIT_BYTES`` of each sender, or their address.  So messages of one tag arrive in order, and no order of tags blocks.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from os import sched_yield
from typing import Any

import numpy as np

from kos.comm.failures import again
from kos.comm.host.fingerprints import DTYPE_CODES, dtype_of_code
from kos.comm.host.shared.calls import CHECK_SECONDS, Calls
from kos.comm.host.shared.direct import CROWDED_SPINS, ENDING_SECONDS, ONE_COPY_SPINS, SPINS, Direct, address_of
from kos.comm.host.shared.plans import ALIGN, MARKED_BYTES
from kos.comm.host.shared.segment import ANSWERS, HEADERS, MAIL_HEAD
from kos.comm.operation import COLLECTIVE_TAGS, Call
from kos.comm.scheduled import wrong_message
from kos.comm.schedules.execute import Request
from kos.errors import KosError

Array = np.ndarray[Any, Any]

CREDIT_BYTES, OVERHEAD_BYTES = 4 << 20, 256
"""Bytes of eager messages of a rank that another may keep, and those that each takes beside its own."""

_SENT, _TAKEN, _RECEIVED, _ANSWERS, _HEADERS = 0, 16, 17, 32, 32 + ANSWERS
"""Words of a mailbox: messages sent; messages taken and eager bytes received; answers to RTS; headers."""
_WHAT, _BYTES, _WHERE, _ANSWER = range(4)
"""Words of a header: tag, dtype and kind; bytes; where the data is; the word of the answer.

The data is at an offset in the room, at an address, or in a message of the network's transport with that tag.
"""
_DTYPE, _KIND = 48, 56
_TAG, _RTS, _OTHER = (1 << _DTYPE) - 1, 1 << _KIND, 2 << _KIND
_READ, _CANCELLED, _REFUSED = 1, 2, 1 << 63
"""Answers.  The sender writes the second itself.  The third is a bit, beside the bytes and the dtype expected."""


class SharedMessages:
    """The transport of one rank; ``other`` carries memory that other ranks cannot read."""

    def __init__(self, calls: Calls, direct: Direct, crowded: bool) -> None:
        segment = calls.segment
        self.calls, self.direct, self.rank = calls, direct, segment.rank
        self.other: Any = None
        self.batch = False  # whether other messages begin at once, which this one may need
        self._control, self._failure, self._next_check = segment.words, segment.layout.failure, 0.0
        self._boxes = {rank: _Box(self, rank) for rank in range(segment.size) if rank != segment.rank}
        self._crowded, self._spins = crowded, CROWDED_SPINS if crowded else SPINS

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        return _Message(self._boxes[peer], array, tag, receives=False).post()

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        return _Message(self._boxes[peer], array, tag, receives=True).post()

    def start(self, call: Call) -> list[_Message]:
        """Begin a send, recv or send_recv, and wait briefly; returns its messages that are not complete."""
        plan, exchange = call.plan or self._prepare(call)
        if exchange is None or self.batch:
            for message in plan:
                message.post()
        elif exchange():
            return []
        crowded, spins = self._crowded, 0 if self.batch or call.operation.options.overlap else self._spins
        for message in plan:
            if message.complete:
                continue
            box = message.box
            words, at = box.words, message.answer
            if at:
                if message is not plan[0] and not crowded:
                    spins = ONE_COPY_SPINS  # this rank has read: the other one reads now
                while not words[at] and spins:
                    spins -= 1
                    if crowded:
                        sched_yield()
                message.answered()
            at = box.into
            while not message.complete:
                taken = box.taken
                while words[at] == taken and spins:
                    spins -= 1
                    if crowded:
                        sched_yield()
                box.take(message)
                if not spins or message.answer or message.request is not None or message.error is not None:
                    return [each for each in plan if not each.complete]
        return []

    def _prepare(self, call: Call) -> tuple[list[_Message], Callable[[], bool] | None]:
        """Make the messages of a call, which all its launches use, and the fast path ``_exchange`` if it applies."""
        o, (dst, src, tag, recv_tag) = call.operation, call.operation.message
        ends = (o.recv, src, recv_tag, True), (o.send, dst, tag, False)
        plan = [
            _Message(self._boxes[peer], end.flat, tag, receives)
            for end, peer, tag, receives in ends if end is not None and peer is not None
        ]  # fmt: skip
        long = len(plan) == 2 and all(message.nbytes > message.box.eager for message in plan)
        address = plan[1].readable() if long and not self._crowded and not o.options.overlap else 0
        call.plan = plan, _exchange(plan[0], plan[1], address) if address else None
        return call.plan

    def cancel(self, cancelled: Callable[[Any], bool]) -> None:
        others = []
        for box in self._boxes.values():
            for queue in (box.posted, box.waiting, box.active):
                for message in [each for each in queue if cancelled(each)]:
                    queue.remove(message)
                    others.append(message.request)
                    if message.answer and box.words:  # else this rank aborts, which all find
                        box.words[message.answer] = _CANCELLED
        if self.other is not None:
            self.other.cancel(lambda each: each in others)

    def in_flight(self, rank: int, tag: int, receives: bool) -> bool:
        return any((each.tag, each.receives) == (tag, receives) for each in self._boxes[rank].messages())

    def awaited(self, tag: int) -> list[int]:
        return [rank for rank, box in self._boxes.items() if any(each.tag == tag for each in box.messages())]

    def close(self) -> None:
        """Release all views of the segment, which hold its memory."""
        del self.direct
        for box in self._boxes.values():
            box.words = box.bytes = box.control = self._control = memoryview(b"")

    def progress(self) -> None:
        """Take what has arrived, send what had no header, and find the ranks that have ended."""
        now = time.monotonic()
        for box in self._boxes.values():
            box.take()
            while box.waiting and box.put(box.waiting[0]):
                box.waiting.popleft()
            if now >= self._next_check and any(box.messages()):
                # The last messages of a rank may arrive after its end was seen: two checks must see it.
                box.suspected, box.end = box.end, self.calls.end_of(box.rank)
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS

    def failed(self, tag: int) -> KosError | None:
        """The failure of the group that ends the messages with that tag."""
        if not self._control[self._failure] or (known := self.calls.failure()) is None:
            return None
        sequence = tag - COLLECTIVE_TAGS if tag >= COLLECTIVE_TAGS else sys.maxsize
        return known[0] if known[1] <= sequence else None


class _Box:
    """The mailboxes between this rank and another one."""

    def __init__(self, mail: SharedMessages, rank: int) -> None:
        segment, self.mail, self.rank = mail.calls.segment, mail, rank
        layout = segment.layout
        self.control, self.failure = segment.words, layout.failure
        out, into = layout.mailbox(segment.rank, rank), layout.mailbox(rank, segment.rank)
        self.bytes = segment.bytes[layout.mail : layout.total]
        self.words = self.bytes.cast("Q")
        self.out, self.into = out // 8, into // 8
        self._out_room, self._in_room, self._room = out + MAIL_HEAD, into + MAIL_HEAD, layout.room
        self.eager = min(self._room // 8, mail.direct.most)
        self.sent = self._at = self._eager_bytes = 0  # messages, the first free byte of the room, bytes ever sent
        self.free = [self.out + _ANSWERS + index for index in range(ANSWERS)]  # words for answers
        self.taken = 0  # messages
        self.waiting: deque[_Message] = deque()  # sends without a header
        self.posted: list[_Message] = []  # receives without a message
        self.active: list[_Message] = []  # other messages that are not complete
        self.arrived: list[tuple[int, int, Any, int]] = []  # messages without a receive: their headers, with the data
        self.suspected: KosError | None = None  # ``end`` at the check before
        self.end: KosError | None = None  # the error if the rank had ended at the last check

    def messages(self) -> Iterator[_Message]:
        """Those that are not complete."""
        yield from self.posted
        yield from self.waiting
        yield from self.active

    def put(self, message: _Message) -> bool:
        """Write a message, or its RTS, to the mailbox; False if all headers are in use."""
        words, out, sent, nbytes, what = self.words, self.out, self.sent, message.nbytes, message.what
        unread = sent - words[out + _TAKEN]
        if unread == HEADERS:
            return False
        header, at = out + _HEADERS + 8 * (sent % HEADERS), self._at if unread else 0
        if (
            nbytes <= self.eager and at + nbytes <= self._room
            and (eager_bytes := self._eager_bytes + nbytes + OVERHEAD_BYTES) - words[out + _RECEIVED] <= CREDIT_BYTES
        ):  # fmt: skip
            start = self._out_room + at
            self.bytes[start : start + nbytes] = message.view
            words[header + _WHERE] = at
            self._eager_bytes, message.complete, at = eager_bytes, True, at + (nbytes + 63 & -64)
        else:
            self.active.append(message)
            if self.free and (address := message.address or message.readable()):
                what |= _RTS
                words[header + _WHERE] = address
                words[header + _ANSWER] = message.answer = self.free.pop()
            else:
                what |= _OTHER
                words[header + _WHERE] = tag = self.mail.other.tag_of(message.array, message.tag)
                message.request = self.mail.other.isend(message.array, self.rank, tag)
        words[header + _WHAT], words[header + _BYTES] = what, nbytes
        self._at, self.sent = at, sent + 1
        words[out + _SENT] = sent + 1
        return True

    def take(self, until: _Message | None = None) -> None:
        """Take the messages that have arrived, or those up to the receive ``until``, which may be copied less often."""
        words, into, taken = self.words, self.into, self.taken
        while words[into] != taken and (until is None or not until.complete):
            header = into + _HEADERS + 8 * (taken % HEADERS)
            what, nbytes, where = words[header], words[header + _BYTES], words[header + _WHERE]
            data: Any = self.bytes[(at := self._in_room + where) : at + nbytes] if what < _RTS else where
            answer = words[header + _ANSWER]
            for message in self.posted:
                if message.tag == what & _TAG:
                    if self.deliver(message, what, nbytes, data, answer):
                        self.posted.remove(message)
                    break
            else:
                self.arrived.append((what, nbytes, bytes(data) if what < _RTS else where, answer))
            if what < _RTS and nbytes >= MARKED_BYTES:  # the sender uses these lines again, as in ``plans.py``
                np.frombuffer(data, np.uint8)[::ALIGN] = 0
            self.taken = taken = taken + 1
            words[into + _TAKEN] = taken

    def deliver(self, message: _Message, what: int, nbytes: int, data: Any, answer: int) -> bool:
        """Receive a message: its bytes, or those at an address; False if the sender has cancelled it."""
        words = self.words
        if what < _RTS:
            words[self.into + _RECEIVED] += nbytes + OVERHEAD_BYTES
            if what == message.what and nbytes == message.nbytes:
                message.view[:] = data
                message.complete = True
                return True
        elif what ^ _RTS == message.what and nbytes == message.nbytes:
            if words[answer]:
                return False
            try:
                (message.read or message.reader())(data, nbytes)
            except OSError as error:  # the rank has failed and freed its memory, or has ended: the checks find it
                message.error, message.until = error, time.monotonic() + ENDING_SECONDS
                self.active.append(message)
                return True
            if words[answer]:
                return False
            words[answer] = _READ
            # A rank that has failed may have changed the data.
            message.complete = not self.control[self.failure] or self.mail.failed(message.tag) is None
            return True
        elif what >= _OTHER:
            self.active.append(message)
            message.request = self.mail.other.irecv(message.array, self.rank, data)
            return True
        got = nbytes, dtype_of_code(what >> _DTYPE & 255)
        expected = message.nbytes, message.array.dtype
        message.error = wrong_message(self.mail.calls.ledger, self.mail.rank, expected, self.rank, got)
        if what >= _RTS:
            words[answer] = _REFUSED | message.nbytes << 8 | message.what >> _DTYPE
        return True


class _Message:
    """One end of a message, which may be posted again once it is complete."""

    __slots__ = (
        "address", "answer", "array", "box", "complete", "error", "nbytes", "read", "receives", "request", "tag",
        "until", "view", "what",
    )  # fmt: skip

    def __init__(self, box: _Box, array: Array, tag: int, receives: bool) -> None:
        self.box, self.array, self.tag, self.receives = box, array, tag, receives
        self.what, self.nbytes = tag | DTYPE_CODES[array.dtype] << _DTYPE, array.nbytes
        self.view = array.view(np.uint8).data
        self.address: int | None = None  # None: not checked yet; 0: other ranks cannot read the array
        self.read: Any = None  # copies to the array from an address in the other rank's memory
        self.complete, self.answer = False, 0  # the word of the receiver's answer, while an RTS waits for it
        self.request: Request | None = None  # of the transport between hosts
        self.error: Exception | None = None
        self.until = 0.0  # when an OSError is raised

    def post(self) -> _Message:
        """Begin to send or receive."""
        box, self.complete, self.error, self.request, self.answer = self.box, False, None, None, 0
        if not self.receives:
            if box.control[box.failure] and (failure := box.mail.failed(self.tag)) is not None:
                raise failure
            if box.waiting or not box.put(self):
                box.waiting.append(self)
            return self
        for index, arrival in enumerate(box.arrived) if box.arrived else ():
            if arrival[0] & _TAG == self.tag:
                del box.arrived[index]
                return self if box.deliver(self, *arrival) else self.post()
        box.posted.append(self)
        return self

    def readable(self) -> int:
        """The address of the array; 0 if other ranks cannot read it."""
        if self.address is None:
            direct, address = self.box.mail.direct, address_of(self.array)
            self.address = address if direct.usable and direct.reads(self.box.mail.rank, address) else 0
        return self.address

    def reader(self) -> Any:
        """Make the function ``read``."""
        self.read = self.box.mail.direct.reader(self.box.rank, address_of(self.array))
        return self.read

    def answered(self) -> bool:
        """Whether the receiver has answered this RTS."""
        box = self.box
        at, words = self.answer, box.words
        if not at or not (answer := words[at]):
            return False
        words[at] = 0
        box.free.append(at)
        box.active.remove(self)
        self.answer, self.complete = 0, answer == _READ
        if not self.complete:
            expected = (answer & ~_REFUSED) >> 8, dtype_of_code(answer & 255)
            sent = self.nbytes, self.array.dtype
            self.error = wrong_message(box.mail.calls.ledger, box.rank, expected, box.mail.rank, sent)
        return True

    def done(self) -> bool:
        box = self.box
        if not self.complete:
            box.mail.progress()
            self.answered()
            if self.request is not None and self.request.done():
                self.complete = True
                box.active.remove(self)
        if self.complete:
            return True
        if self.error is not None and time.monotonic() >= self.until:
            raise self.error
        if (failure := box.mail.failed(self.tag)) is not None:
            raise failure
        if box.suspected is not None and box.end is not None:
            raise again(box.end)
        return False


def _exchange(recv: _Message, send: _Message, address: int) -> Callable[[], bool]:
    """The fast path of a send_recv of two long messages, as a function that returns whether both are complete.

    It inlines ``post``, ``put``, ``take``, ``deliver`` and ``answered``.  It applies if both ranks arrive at about the
    same time and no other messages are pending; else it posts the messages.  A large copy evicts the code from the
    caches, and then each call of a function takes up to a microsecond.  ``address`` is that of the data to send.
    """
    mail, source, to = recv.box.mail, recv.box, send.box
    into, out, arrivals, headers = source.into, to.out, source.into + _HEADERS, to.out + _HEADERS
    expected, nbytes, read = recv.what | _RTS, recv.nbytes, recv.reader()
    rts, length = send.what | _RTS, send.nbytes

    def exchange() -> bool:
        words, sent, taken = source.words, to.sent, source.taken
        if (
            source.posted or source.arrived or to.waiting or not to.free or sent - words[out + _TAKEN] == HEADERS
            or source.control[source.failure]
        ):  # fmt: skip
            recv.post()
            send.post()
            return False
        header, answer = headers + 8 * (sent % HEADERS), to.free.pop()
        words[header], words[header + _BYTES] = rts, length
        words[header + _WHERE], words[header + _ANSWER] = address, answer
        to.sent = words[out] = sent + 1
        left, received = ONE_COPY_SPINS, False
        while words[into] == taken and left:
            left -= 1
        header = arrivals + 8 * (taken % HEADERS)
        reply = words[header + _ANSWER]
        if left and words[header] == expected and words[header + _BYTES] == nbytes and not words[reply]:
            try:
                read(words[header + _WHERE], nbytes)
                received = not words[reply]
            except OSError:  # ``deliver`` reads again, and handles the error
                received = False
        if received:
            words[reply] = _READ
            source.taken = words[into + _TAKEN] = taken + 1
            while not words[answer] and left:
                left -= 1
            if words[answer] == _READ and not source.control[source.failure]:
                words[answer] = 0
                to.free.append(answer)
                return True
        for message in (recv, send):
            message.complete, message.error, message.request = False, None, None
        send.answer = answer
        to.active.append(send)
        if received:
            recv.complete = mail.failed(recv.tag) is None
        else:
            source.posted.append(recv)
        return False

    return exchange
