"""The hub of a group: a thread on its rank 0 that collects every rank's bytes and sends them to all.

The topology is a star: each rank has one connection, to the hub (rank 0 by a socket pair).  As a thread, the hub always
knows which ranks have arrived and which are lost, even while rank 0 computes.  It forwards notices, and at once reports
a rank whose connection ends to all others.  It serves the group until all ranks have closed it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import select
import selectors
import socket
import struct
import termios
import threading
import time
import weakref
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kos.comm import timeouts
from kos.comm.control.store import STORE, STORED, Table, pack, unpack
from kos.comm.control.wire import MAX_MESSAGE, Acceptor, Connection, Waiting, adopt, connect, digest_of, drive
from kos.comm.failures import HOST_SECONDS, FailureLog
from kos.comm.waits import wait
from kos.errors import KosError, RendezvousError, ignored, to_record
from kos.files import lack_of_files, lacks_files

log = logging.getLogger(__name__)

# The first byte of each message: of the ranks, and of the hub's answers.
DATA, CLOSE, ABORT = b"D", b"B", b"L"
RESULT, PACKED, LOST, DIED, FAILED = b"R", b"Z", b"G", b"X", b"F"  # PACKED: a result, compressed by zlib
NOTICE, CLOSED = b"N", b"C"  # of a rank to all others, both ways; rank 0 has closed the group
FORWARDED = b"S"  # with a notice's token: the notice has been sent to the others

FAILURES = (LOST, DIED, FAILED)

CONNECTION_CLOSED = "its connection was closed"

PACKED_RANKS = 64  # from which number of ranks results are compressed: they are sent to each, and much of them repeats
CLOSE_SECONDS = 2.0  # limit for delivering the last messages before rank 0 ends; of a failure, more for many ranks
_POLL_SECONDS = 0.1  # between two polls of ranks that have not closed yet
_LAZY_SECONDS = 0.05  # after which a notice that is not urgent is forwarded
RESENDS = 3  # of the same data, in 1.4 s or more, after which a host counts as cut off
_ACKNOWLEDGE_SECONDS = 1.5  # in which a host acknowledges what was sent, or counts as cut off


class _Failure(Exception):
    """The group has failed; holds a message for all ranks."""

    aborted = False
    """Whether a rank aborted the group and gave the reason."""

    def __init__(self, kind: bytes, ranks: list[int], why: str, cause: list[Any] | None = None) -> None:
        self.message = kind + json.dumps([ranks, why, cause]).encode()  # the cause as a record of failures.py


class Hub(threading.Thread):
    """Serves one group, the one of ``failures``, until its rank 0 closes it.

    ``own`` is the hub's end of rank 0's connection; other ranks call at ``listener``, with ``key``, except the
    ``connected`` ones.  ``warns``: log callers with another secret; False where ranks of other jobs call too.
    """

    def __init__(
        self, own: Connection, listener: socket.socket, key: bytes, failures: FailureLog, timeout: float, where: str,
        warns: bool = True, epoch: int = 0, connected: Mapping[int, Connection] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        super().__init__(name="kos rendezvous", daemon=True)
        self._size, self._failures, self.timeout = len(failures.world), failures, timeout
        self._where = where and f" (rank 0 listens at {where})"  # a group that has grown needs no address
        self._warns = warns
        self._members: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()  # of the members; a poll of all for each message would be n² work
        self._reading: dict[int, Waiting[bytes]] = {}  # ranks whose message has arrived in part
        self._joined: set[int] = set()  # the members, and the ranks that have closed the group
        self._closed: set[int] = set()
        self._refused: list[Connection] = []
        self._expected = 0  # ranks that may still join a group that has failed
        self._acceptor = Acceptor(listener, key, epoch, reserved=self._size - 1 - len(connected))
        self._lazy: list[tuple[float, int, bytes]] = []  # when to forward a notice, its sender, and the notice
        self._store = Table()
        self._left: set[int] = set()  # the ranks that have aborted the group, or whose death was reported
        self.report_seconds = CLOSE_SECONDS + min(self._size / 64, 20.0)  # 512 ranks on 2 cores read it within 2.5 s
        self.reported = threading.Event()  # set once the failure has been sent to all ranks that have joined
        self.released = threading.Event()  # set once rank 0 has closed the group: its process may end
        for rank, connection in {0: own, **connected}.items():
            self._join(rank, connection)

    def run(self) -> None:
        try:
            slots = self._admit_all()
            self._acceptor.close()
            while self._exchange(slots):
                slots = {}
        except _Failure as failure:
            self._report(failure.message)
            self._post(CLOSED, self._members)  # the end of the connections is not the death of rank 0
        finally:
            self.reported.set()
            self.released.set()
            self._acceptor.close()
            for connection in [*self._members.values(), *self._refused]:
                connection.close()
            self._selector.close()

    def _join(self, rank: int, connection: Connection) -> None:
        """Make the connection's rank a member."""
        self._members[rank] = connection
        self._joined.add(rank)
        self._selector.register(connection.sock, selectors.EVENT_READ, rank)

    def _remove(self, rank: int) -> None:
        """Close the connection of a member."""
        connection = self._members.pop(rank)
        self._selector.unregister(connection.sock)
        connection.close()

    def _wait_seconds(self, began: float, present: Collection[int]) -> float:
        """Seconds of the next wait.  Raises _Failure at the timeout."""
        remaining = began + self.timeout - time.monotonic()
        if remaining <= 0:
            missing = [rank for rank in range(self._size) if rank not in present]
            why = timeouts.late("", within=self.timeout).strip()  # each rank adds the names to its own error
            rejected = f"; {timeouts.rejected(callers)}" if (callers := self._acceptor.rejected) else ""
            raise _Failure(FAILED, missing, f"{why}{self._where}{rejected}")
        return min(remaining, 1.0)

    def _admit_all(self) -> dict[int, bytes]:
        """Admit all ranks.  Returns the messages received meanwhile.  An abort fails the group at once."""
        began, slots, lost = time.monotonic(), dict[int, bytes](), set[int]()
        while len(self._joined) < self._size:
            if 0 in self._closed:  # a rank has no files for the group, and all know it
                raise _Failure(LOST, [0], "it closed the group")
            caller = self._admit(self._wait_seconds(began, self._joined))
            for rank in self._ready(0.0):
                try:
                    self._receive(rank, slots)
                except _Failure as failure:
                    if failure.aborted:
                        self._refused += [] if caller is None else [caller[2]]
                        self._expected = self._size - len(self._joined) - (caller is not None)
                        raise
                    if rank not in slots:
                        lost.add(rank)  # found again once all ranks have joined, unless it rejoins
            if caller is None:
                continue
            rank, size, connection = caller
            problem = ""
            if size != self._size:
                problem = f"rank {rank} joined with a world size of {size}, expected {self._size} as on rank 0"
            elif rank >= self._size:
                problem = f"expected ranks 0 to {self._size - 1}, got rank {rank}"
            elif rank in self._members and rank not in lost:
                problem = f"rank {rank} joined twice: expected one process of each rank"
            if problem:  # all ranks raise it, including the caller
                self._refused.append(connection)
                self._expected = self._size - len(self._joined) - 1
                raise _Failure(FAILED, [], f"rendezvous: {problem}{self._where}")
            if rank in lost:
                lost.remove(rank)
                self._remove(rank)
            self._join(rank, connection)
        return slots

    def _admit(self, seconds: float) -> tuple[int, int, Connection] | None:
        """The next caller.  Raises _Failure, with rank 0 as the cause, if there is no file descriptor for it."""
        known = len(self._acceptor.rejected)
        try:
            return self._acceptor.admit(min(seconds, _POLL_SECONDS))
        except OSError as error:
            self._expected = self._size - len(self._joined)
            me = self._failures.world[0]
            why = lack_of_files(error) if lacks_files(error) else error
            cause = RendezvousError(f"rank {me} cannot open its connections: {why}", ranks=[me])
            raise _Failure(LOST, [0], "", to_record(cause)) from None
        finally:
            if self._warns and (new := self._acceptor.rejected[known:]):
                log.warning("rendezvous: %s", timeouts.rejected(new))

    def _exchange(self, slots: dict[int, bytes]) -> bool:
        """Collect a message of each rank, and send all of them to all; False once all ranks have closed the group.

        ``slots`` holds the messages received so far.
        """
        began = time.monotonic() if slots else 0.0  # when the first message arrived
        while len(slots) < self._size:
            seconds = self._wait_seconds(began, slots) if slots else 1.0
            for rank in self._ready(min(seconds, self._forward_lazy())):
                self._receive(rank, slots)
                began = began or (time.monotonic() if slots else 0.0)
            gone = self._closed - slots.keys()
            if slots and gone:
                raise _Failure(LOST, [min(gone)], "it closed the group")
            if not self._members:
                return False
        total = sum(map(len, slots.values()))
        if 1 + 4 * self._size + total > MAX_MESSAGE:
            why = f"allgather: expected less than {MAX_MESSAGE} bytes in all, got {total}"
            raise _Failure(FAILED, [], why)
        parts = [slots[rank] for rank in range(self._size)]
        answer = RESULT + struct.pack(f"!{self._size}I", *map(len, parts)) + b"".join(parts)
        if self._size >= PACKED_RANKS:
            answer = min(PACKED + zlib.compress(answer[1:], 1), answer, key=len)
        digest = digest_of(answer)
        for connection in self._members.values():
            connection.post(answer, digest)
        deadline = time.monotonic() + self.timeout
        self._flush(self._members.keys() - {0}, deadline)  # some may have closed the group without waiting for it
        self._flush(self._members.keys() & {0}, deadline)  # last: its process may end once it has the answer
        return True

    def _flush(self, ranks: set[int], deadline: float) -> None:
        """Send the queued messages of those ranks, in parallel."""
        poll, blocked = select.poll(), dict[int, int]()
        while ranks:
            for rank in ranks:
                connection = self._members[rank]
                try:
                    done = next(connection.flush(), None) is None
                except OSError:
                    raise _Failure(LOST, [rank], CONNECTION_CLOSED) from None
                descriptor = connection.sock.fileno()
                if not done:
                    poll.register(connection.sock, select.POLLOUT)
                    blocked[descriptor] = rank
                elif blocked.pop(descriptor, None) is not None:
                    poll.unregister(connection.sock)
            ready = poll.poll(max(deadline - time.monotonic(), 0.0) * 1000) if blocked else []
            if blocked and not ready:
                raise _Failure(FAILED, [min(blocked.values())], f"read nothing for {self.timeout:g} s")
            ranks = {blocked[descriptor] for descriptor, _ in ready}

    def _ready(self, seconds: float) -> list[int]:
        """The ranks whose connection can be read, within ``seconds``; also sends queued notices."""
        found = []
        for key, events in self._selector.select(max(seconds, 0.0)):
            if events & selectors.EVENT_WRITE:
                self._send_queued(key.data)
            if events & selectors.EVENT_READ:
                found.append(key.data)
        return found

    def _send_queued(self, rank: int) -> None:
        """Send what the rank's connection takes without waiting."""
        connection, events = self._members[rank], selectors.EVENT_READ
        with contextlib.suppress(OSError):  # whoever reads from it next finds its end
            events |= selectors.EVENT_WRITE * (next(connection.flush(), None) is not None)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, rank)

    def _post(self, message: bytes, ranks: Iterable[int]) -> None:
        digest = digest_of(message)
        for rank in ranks:
            self._members[rank].post(message, digest)
            self._send_queued(rank)

    def _forward_lazy(self) -> float:
        """Forward the notices that are due.  Returns the seconds until the next is due."""
        now = time.monotonic()
        due, self._lazy = [each for each in self._lazy if each[0] <= now], [e for e in self._lazy if e[0] > now]
        for _, sender, notice in due:
            self._post(notice, self._members.keys() - {sender})
        return self._lazy[0][0] - now if self._lazy else 1.0

    def _receive(self, rank: int, slots: dict[int, bytes]) -> None:
        """Read what there is of a rank's message: the hub waits for no rank within one."""
        connection = self._members[rank]
        reading = self._reading.pop(rank, None) or connection.receive()
        try:
            next(reading)
        except StopIteration as end:
            message: bytes = end.value
        except OSError:
            raise _Failure(DIED, [rank], CONNECTION_CLOSED) from None
        except RendezvousError as error:
            raise _Failure(LOST, [rank], str(error)) from None
        else:
            self._reading[rank] = reading
            return
        kind = message[:1]
        if kind == DATA:
            slots[rank] = message[1:]
        elif kind == NOTICE:
            soon, token, *notice = json.loads(message[1:])
            forwarded = NOTICE + json.dumps(notice).encode()
            self._lazy.append((time.monotonic() + (0.0 if soon else _LAZY_SECONDS), rank, forwarded))
            self._lazy.sort(key=lambda each: each[0])
            self._forward_lazy()
            if token is not None:
                self._post(FORWARDED + json.dumps(token).encode(), [rank])
        elif kind == STORE:
            for to, token, (result, value) in self._store.serve(rank, *unpack(message[1:])):
                self._post(STORED + pack([token, result], value), self._members.keys() & {to})
        elif kind == CLOSE:
            self._closed.add(rank)
            self._remove(rank)
            if rank == 0:
                self._post(CLOSED, self._members)
                self.released.set()
        elif kind == ABORT:
            self._left.add(rank)
            failure = _Failure(LOST, [rank], *json.loads(message[1:]))
            failure.aborted = True
            raise failure
        else:
            why = f"expected a message of the rendezvous, got one of kind {kind!r}"
            raise _Failure(LOST, [rank], why)

    def _report(self, failure: bytes) -> None:
        """Send the failure to all ranks, including late ones, and serve them until they have closed.

        Ranks that have not joined a group started wrongly are awaited for ``report_seconds`` after rank 0 has closed.
        TCP may discard undelivered data when a connection is closed with unread input.
        """
        if failure[:1] == DIED:
            self._left.update(json.loads(failure[1:])[0])
        self._post(failure, self._members)
        late, new = list[Connection](), list(self._refused)  # of ranks that are no members
        deadline = float("inf")
        while (self._members or new or late or self._expected > 0) and time.monotonic() < deadline:
            for connection in new:
                connection.post(failure)
            late += new
            for connection in late:
                with contextlib.suppress(OSError):
                    next(connection.flush(), None)
            self.reported.set()
            for connection in [each for each in late if each.drain()]:
                late.remove(connection)
                connection.close()  # this process may have no other file descriptor for a late rank
            accepts = self._acceptor.is_open and bool(self._members or late or self._expected > 0)
            for rank in self._ready(0.0 if accepts else self._forward_lazy()):
                self._receive_after_failure(rank)
            if 0 not in self._members:
                deadline = min(deadline, time.monotonic() + self.report_seconds)
            caller = None
            if accepts:
                try:
                    caller = self._acceptor.admit(min(_POLL_SECONDS, self._forward_lazy()))
                except OSError:  # no file descriptor, until another connection is closed
                    time.sleep(_POLL_SECONDS)
            new = [] if caller is None else [caller[2]]
            self._expected -= len(new)
            self._refused += new

    def _receive_after_failure(self, rank: int) -> None:
        """Read from a rank of the failed group: it may send notices, close, or end."""
        try:
            self._receive(rank, {})
        except _Failure as failure:
            if failure.aborted:
                return
            self._remove(rank)
            if rank not in self._left and failure.message[:1] == DIED:
                self._left.add(rank)
                self._post(failure.message, self._members)


def pair(epoch: int = 0) -> tuple[Connection, Connection]:
    """Both ends of a connection within this process; it needs no handshake."""
    ends = socket.socketpair()
    for sock in ends:
        adopt(sock)
    return Connection(ends[0], b"rank 0", b"hub", epoch), Connection(ends[1], b"hub", b"rank 0", epoch)


def send(connection: Connection, message: bytes) -> None:
    """Send a message at once, unless the other side has ended."""
    connection.post(message)
    with ignored(OSError):  # the other side closed it first
        drive(connection.flush(), connection.sock, time.monotonic() + CLOSE_SECONDS)


def is_cut_off(sock: socket.socket) -> bool:
    """Whether the other side's host has acknowledged nothing while this one sent the same data several times (Linux).

    A host also acknowledges data for a process that is stopped.
    """
    with ignored(AttributeError, OSError):
        _, _, resent, probes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)  # without an answer
        return max(resent, probes) >= RESENDS  # probes: where the data has not left this host
    return False


def holds_data(sock: socket.socket, request: int) -> bool:
    """Whether the send buffer of a socket has data, by a ``request`` of ioctl(2) that counts some of its bytes.

    False on a system without this request, and for a closed socket.
    """
    with ignored(OSError, ValueError):
        return fcntl.ioctl(sock, request, bytes(4)) != bytes(4)
    return False


def silent_ranks(failures: FailureLog, sock: socket.socket) -> list[int]:
    """The ranks to name if the hub does not answer: rank 0, or all ranks of its host if that host is cut off.

    ``sock`` is the connection to the hub.  Waits until the other side has acknowledged what was sent, or counts as cut
    off, for at most ``_ACKNOWLEDGE_SECONDS``.  A stopped process does not delay this, as its host acknowledges.
    """

    def is_decided() -> bool:
        return is_cut_off(sock) or not holds_data(sock, termios.TIOCOUTQ)

    wait(is_decided, time.monotonic() + _ACKNOWLEDGE_SECONDS, waiter=0.01)
    return failures.on_hosts_of([0]) if is_cut_off(sock) else [0]


def look_beside_hub(failures: FailureLog, addresses: Sequence[tuple[str, int]]) -> None:
    """Record which other ranks of the lost hub's host have ended, which no hub reports; ``addresses``: of all ranks."""
    others = failures.on_hosts_of([0])[1:]
    if others and failures.rank not in others and addresses:
        time.sleep(HOST_SECONDS)
        for rank in others:
            try:
                connect(*addresses[rank], time.monotonic() + HOST_SECONDS).close()
            except ConnectionRefusedError:
                failures.status.ends.setdefault(failures.world[rank], CONNECTION_CLOSED)
            except OSError:
                return


reporting: weakref.WeakSet[Hub] = weakref.WeakSet()
"""The hubs of aborted groups.  Each sends the reason to the other ranks, and runs until they have read it."""


@atexit.register
def _wait_for_reports() -> None:
    """Wait for a limited time until the other ranks have read why a group was aborted."""
    began = time.monotonic()
    for hub in list(reporting):
        hub.join(max(began + hub.report_seconds - time.monotonic(), 0.0))


def stop(connection: Connection, hub: Hub, process: int) -> None:
    """Close the group on rank 0: the hub ends once the others have received their messages."""
    if os.getpid() != process:
        return  # a process forked from rank 0 ends, not rank 0
    if connection.sock.fileno() >= 0:
        send(connection, CLOSE)
        connection.close()
    if hub is not threading.current_thread():  # the garbage collector may free the group on the hub's thread
        hub.released.wait(CLOSE_SECONDS)


def abort_message(why: str, cause: KosError | None) -> bytes:
    """The message to the hub of a rank that leaves the group before the others."""
    return ABORT + json.dumps([why, None if cause is None else to_record(cause)]).encode()
