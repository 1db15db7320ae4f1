"""Authenticated, framed messages over TCP.

Handshake: the listener sends first and the caller proves first, so that an unauthenticated caller learns nothing.
All three messages have a fixed size, and nothing else is read before the proof is verified.

    listener -> caller   magic, epoch, nonce
    caller -> listener   magic, epoch, rank, size, nonce, HMAC-SHA256 over all of it
    listener -> caller   HMAC-SHA256 over all of it (zeros: refused)

The epoch is the number of times that the membership of the job has changed.  Callers of another epoch are refused,
except those of a change of the membership (``grow.py``).  A newcomer, of rank ``JOIN``, has a key of its own.

A message is its length (checked before anything is allocated), its epoch, its HMAC-SHA256 and its bytes.  A message of
another epoch is dropped.  Keys are derived for each connection and direction from both nonces, and the HMAC covers the
message's number, which prevents replays.  Contents are not encrypted.

Generators yield the events they wait for, so that one loop serves hundreds of connections, and a silent caller delays
no other.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import resource
import select
import selectors
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from kos.errors import RendezvousError
from kos.files import lacks_files

T = TypeVar("T")
Waiting = Generator[int, None, T]
"""Yields select.POLLIN or select.POLLOUT whenever the socket is not ready; returns T."""

MAX_MESSAGE = 64 << 20  # bytes
HANDSHAKE_SECONDS = 10.0  # limit for a caller's handshake
MAX_PENDING = 1024  # callers in their handshakes; and at most a third of the files that this process may open
_LOOK_SECONDS = 0.2  # the most between two calls of ``look``, by which a wait checks for failures
_COPIED = 1 << 14  # bytes of a message from which on it is not copied: all ranks' connections share the hub's answer
_MAX_REJECTED = 4  # rejected callers in an error

JOIN = 0xFFFFFFFF  # instead of the rank: a newcomer
_MAGIC = b"kos/tcp4"  # the protocol and its version
_NONCE = 32
_GREETING = struct.Struct(f"!8sI{_NONCE}s")
_HELLO = struct.Struct(f"!8sIII{_NONCE}s")
_PROOF = 32
_REFUSED = bytes(_PROOF)
_HEAD = struct.Struct("!II")  # of a message: its length and its epoch
_NUMBER = struct.Struct("!QII")


class HandshakeError(RendezvousError):
    """The other end does not know the secret or does not speak the protocol.

    ``unproved`` is the rank that a caller claims who has not proved that it knows the secret.
    """

    unproved: int | None = None


class Connection:
    """An authenticated connection to one rank, for messages of one epoch at a time."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes, epoch: int = 0) -> None:
        self.sock, self.epoch = sock, epoch
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0
        self._accepted = 0  # bytes of the first of ``_outgoing`` that the socket has accepted since
        self._outgoing: deque[bytes | memoryview] = deque()

    def post(self, message: bytes, digest: bytes = b"") -> None:
        """Queue one message; ``flush`` sends it.  ``digest`` is ``digest_of(message)``, if that is known."""
        if len(message) > MAX_MESSAGE:
            raise RendezvousError(f"message: expected at most {MAX_MESSAGE} bytes, got {len(message)}")
        number = _NUMBER.pack(self._sent, len(message), self.epoch)
        tag = mac(self._send_key, number, digest or digest_of(message))
        head = _HEAD.pack(len(message), self.epoch) + tag
        self._outgoing += [head + message] if len(message) < _COPIED else [head, message]
        self._sent += 1

    @property
    def sends(self) -> bool:
        """Whether messages are queued."""
        return bool(self._outgoing)

    def drain(self) -> bool:
        """Discard all input; whether the other side has closed the connection."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def flush(self) -> Waiting[None]:
        """Send all queued messages.

        A signal's handler may raise at any call, but not within an assignment.  So ``map`` calls ``send``, and
        ``_outgoing`` and ``_accepted`` change together.  The abort that follows then continues at the right byte.
        """
        while self._outgoing:
            if self._accepted:
                self._outgoing[0], self._accepted = memoryview(self._outgoing[0])[self._accepted :], 0
            elif not self._outgoing[0]:
                self._outgoing.popleft()
            else:
                try:
                    (self._accepted,) = map(self.sock.send, [self._outgoing[0]])
                except BlockingIOError:
                    yield select.POLLOUT

    def receive(self) -> Waiting[bytes]:
        """The next message of this epoch.  Raises ConnectionError at the end, RendezvousError if it was changed."""
        while True:
            head = yield from _read(self.sock, _HEAD.size + _PROOF)
            length, epoch = _HEAD.unpack_from(head)
            if length > MAX_MESSAGE:
                raise RendezvousError(f"message: expected at most {MAX_MESSAGE} bytes, got a header of {length}")
            message = yield from _read(self.sock, length)
            number = _NUMBER.pack(self._received, length, epoch)
            if not hmac.compare_digest(mac(self._receive_key, number, digest_of(message)), head[_HEAD.size :]):
                raise RendezvousError(f"message {self._received}: expected its HMAC, got another")
            self._received += 1
            if epoch == self.epoch:
                return message

    def mask(self, data: bytes, sent: bool) -> bytes:
        """A secret that is ``sent`` or received, encrypted by this connection's keys; the other side decrypts it so.

        One secret for each direction: the key stream is the same each time.
        """
        key, blocks = self._send_key if sent else self._receive_key, range(len(data) // _PROOF + 1)
        stream = b"".join(mac(key, b"mask", number.to_bytes(4)) for number in blocks)
        return bytes(a ^ b for a, b in zip(data, stream, strict=False))

    def close(self) -> None:
        self.sock.close()


def answer(
    sock: socket.socket, key: bytes, epoch: int = 0, join: bytes = b""
) -> Waiting[tuple[int, int, Connection]]:
    """The listener's side of the handshake: the caller's rank and size, and the connection.

    ``join`` is the key of newcomers, if they are admitted.  Raises ConnectionError, HandshakeError.
    """
    greeting = _GREETING.pack(_MAGIC, epoch, os.urandom(_NONCE))
    sock.send(greeting)  # a whole handshake fits the socket's buffer
    # Wrong first bytes end the handshake at once.
    if (magic := (yield from _read(sock, len(_MAGIC)))) != _MAGIC:
        raise HandshakeError(f"handshake: expected {_MAGIC!r}, got {magic!r}")
    hello = magic + (yield from _read(sock, _HELLO.size - len(_MAGIC)))
    proof = yield from _read(sock, _PROOF)
    _, theirs, rank, size, _ = _HELLO.unpack(hello)
    if rank == JOIN:
        if not join:
            raise HandshakeError("handshake: expected a rank, got a newcomer")  # which calls again
        key = join
    if not hmac.compare_digest(proof, mac(key, b"caller", greeting, hello)):
        sock.send(_REFUSED)
        error = HandshakeError("handshake: expected a proof of the secret, got a wrong one")
        error.unproved = rank
        raise error
    if theirs != epoch:
        raise HandshakeError(f"rank {rank}: expected epoch {epoch}, got {theirs}")
    sock.send(mac(key, b"listener", greeting, hello))
    return rank, size, Connection(sock, *_session_keys(key, greeting, hello), epoch=epoch)


def receive_greeting(sock: socket.socket) -> Waiting[bytes]:
    """The listener's greeting.  Raises ConnectionError, HandshakeError."""
    magic = yield from _read(sock, len(_MAGIC))
    if magic != _MAGIC:
        raise HandshakeError(f"expected a rank of kos ({_MAGIC.decode()}), got {magic!r}")
    return magic + (yield from _read(sock, _GREETING.size - len(_MAGIC)))


def epoch_of(greeting: bytes) -> int:
    """The epoch of a listener, of its greeting or of the first part of it; 0 if that is missing."""
    return int.from_bytes(greeting[8:12])


def authenticate(
    sock: socket.socket, greeting: bytes, key: bytes, rank: int, size: int, epoch: int | None = 0
) -> Waiting[Connection]:
    """The caller's side of the handshake, after the greeting.  Raises ConnectionError, HandshakeError.

    ``epoch`` None is that of the listener.
    """
    theirs = epoch_of(greeting)
    epoch = theirs if epoch is None else epoch
    if theirs != epoch:
        raise HandshakeError(f"expected epoch {epoch} of the membership, got {theirs}")
    hello = _HELLO.pack(_MAGIC, epoch, rank, size, os.urandom(_NONCE))
    sock.send(hello + mac(key, b"caller", greeting, hello))
    proof = yield from _read(sock, _PROOF)
    if not hmac.compare_digest(proof, mac(key, b"listener", greeting, hello)):
        raise HandshakeError("expected the same secret (KOS_SECRET) on all ranks, got different ones")
    receive_key, send_key = _session_keys(key, greeting, hello)
    return Connection(sock, send_key, receive_key, epoch)


class Acceptor:
    """Accepts callers that complete the handshake.  With ``hello``, each caller adds a first message to it, in JSON.

    File descriptors for the first ``reserved`` callers are reserved now.
    """

    def __init__(self, listener: socket.socket, key: bytes, epoch: int = 0, hello: bool = False, reserved: int = 0):
        self._listener, self._key, self._selector = listener, key, selectors.DefaultSelector()
        self._epoch, self._hello, self._reserved = epoch, hello, list[int]()
        self.join = b""  # the key of newcomers, if they are admitted
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # -1: no limit
        self._most = MAX_PENDING if files < 0 else min(MAX_PENDING, files // 3)
        self._callers: dict[socket.socket, float] = {}  # callers in their handshakes -> deadline, oldest first
        self._admitted: deque[tuple[int, Any, Connection]] = deque()
        self.rejected: list[str] = []  # callers with another secret, the first few
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        try:
            for _ in range(reserved):
                self._reserved.append(os.dup(self._selector.fileno()))
        except OSError:
            self._free_reserved()
            raise

    @property
    def is_open(self) -> bool:
        """Whether callers are accepted."""
        return self._listener.fileno() >= 0

    def close(self) -> None:
        """Stop accepting callers."""
        self.rejected.clear()
        for sock in list(self._callers):
            self._reject(sock)
        while self._admitted:  # callers admitted together with the last expected one
            self._admitted.popleft()[2].close()
        self._free_reserved()
        self._listener.close()
        self._selector.close()

    def _free_reserved(self) -> None:
        while self._reserved:
            os.close(self._reserved.pop())

    def admit(self, seconds: float) -> tuple[int, Any, Connection] | None:
        """Rank, size or first message, and connection of the next authenticated caller; None after ``seconds``.

        Raises OSError if this process has no file descriptor left for a caller.
        """
        deadline = time.monotonic() + seconds
        if not self.is_open:
            time.sleep(seconds)
            return None
        while not self._admitted:
            remaining = deadline - time.monotonic()
            while self._callers and self._callers[first := next(iter(self._callers))] <= time.monotonic():
                self._reject(first)
            for key, _ in self._selector.select(max(min(remaining, 1.0), 0.0)):
                key.data()
            if remaining <= 0:
                break
        return self._admitted.popleft() if self._admitted else None

    def _accept(self) -> None:
        if self._reserved:
            os.close(self._reserved.pop())
        try:
            sock, (host, *_) = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not lacks_files(error):
                return  # the caller has gone
            if not self._callers:
                raise
            self._reject(next(iter(self._callers)))  # perhaps a stranger, who makes room for this caller
            return
        prepare(sock)
        if len(self._callers) >= self._most:
            self._reject(next(iter(self._callers)))
        self._callers[sock] = time.monotonic() + HANDSHAKE_SECONDS
        handshake: Waiting[Any] = answer(sock, self._key, self._epoch, self.join)
        handshake = _with_hello(handshake) if self._hello else handshake
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._advance(sock, host, handshake))
        self._advance(sock, host, handshake)

    def _advance(self, sock: socket.socket, host: str, handshake: Waiting[tuple[int, Any, Connection]]) -> None:
        if sock not in self._callers:
            return  # rejected by an earlier event of the same poll
        try:
            next(handshake)
        except StopIteration as end:
            self._selector.unregister(sock)
            del self._callers[sock]
            self._admitted.append(end.value)
        except (OSError, RendezvousError, ValueError) as error:
            self._reject(sock)
            rank = error.unproved if isinstance(error, HandshakeError) else None
            if rank is not None and len(self.rejected) < _MAX_REJECTED:
                who = "a newcomer" if rank == JOIN else f"rank {rank}"
                caller = f"{who} at {host.removeprefix('::ffff:')}"
                self.rejected += [] if caller in self.rejected else [caller]

    def _reject(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._callers[sock]
        sock.close()


def _with_hello(handshake: Waiting[tuple[int, int, Connection]]) -> Waiting[tuple[int, Any, Connection]]:
    rank, _, connection = yield from handshake
    return rank, json.loads((yield from connection.receive())), connection


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """A connected, non-blocking socket.  Raises OSError."""
    sock = socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.001))
    try:
        itself = sock.getsockname() == sock.getpeername()
    except OSError as error:  # ENOTCONN, which is no ConnectionError
        sock.close()
        raise ConnectionResetError(f"{host}:{port}: closed the connection at once") from error
    if itself:  # TCP connected the socket to itself, because the kernel chose this port for its own end
        sock.close()
        raise ConnectionRefusedError(f"{host}:{port}: no process listens")
    prepare(sock)
    return sock


def drive(waiting: Waiting[T], sock: socket.socket, deadline: float, look: Callable[[], None] | None = None) -> T:
    """Run a generator of this file to its end.  Raises TimeoutError at the deadline (time.monotonic).

    ``look`` is called every ``_LOOK_SECONDS`` and may raise.
    """
    while True:
        try:
            events = next(waiting)
        except StopIteration as end:
            result: T = end.value
            return result
        poll = select.poll()
        poll.register(sock, events)
        while (remaining := deadline - time.monotonic()) > 0:
            if poll.poll((remaining if look is None else min(remaining, _LOOK_SECONDS)) * 1000):
                break
            if look is not None:
                look()
        else:
            raise TimeoutError("it accepted the connection, but did not answer in time: it may be stopped, or not kos")


_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


# A forked process closes its copies of the connections, so that they end with the rank.
os.register_at_fork(after_in_child=lambda: [*map(socket.socket.close, _open)])


def adopt(sock: socket.socket) -> None:
    """Make it non-blocking, and have a process that this one forks close its copy."""
    _open.add(sock)
    sock.setblocking(False)


def copied(listener: socket.socket) -> socket.socket:
    """A copy of the listener for another owner.  Callers reach it until all copies are closed."""
    copy = listener.dup()
    adopt(copy)
    return copy


def prepare(sock: socket.socket) -> None:
    """``adopt`` a connection, which sends each message at once."""
    adopt(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def fill(sock: socket.socket, place: Callable[[], memoryview]) -> Waiting[None]:
    """Read until ``place()``, which may change between reads, is full.  Raises ConnectionError at the end."""
    filled = 0
    while rest := place()[filled:]:
        try:
            got = sock.recv_into(rest)
        except BlockingIOError:
            yield select.POLLIN
            continue
        if not got:
            raise ConnectionError("the connection was closed")
        filled += got


def _read(sock: socket.socket, count: int) -> Waiting[bytes]:
    data = memoryview(bytearray(count))
    yield from fill(sock, lambda: data)
    return bytes(data)


def digest_of(message: bytes) -> bytes:
    """What the HMAC of a message covers: one message to many ranks is read once."""
    return hashlib.sha256(message).digest()


def mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _session_keys(key: bytes, greeting: bytes, hello: bytes) -> tuple[bytes, bytes]:
    """The keys of (what the listener sends, what the caller sends)."""
    return mac(key, b"to caller", greeting, hello), mac(key, b"to listener", greeting, hello)
