"""Protection of a job on a network: the handshake, proofs and size limits of messages, strangers, and the secret."""

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kos.comm.control import wire as tcp
from kos.comm.control.identity import load_secret
from kos.comm.control.network import Network, admit_all
from kos.comm.control.wire import Connection, HandshakeError, drive
from kos.errors import RankLost, RendezvousError
from tests.comm.tcp_ranks import environment, errors_of, free_port, run_ranks, run_threads

GREETING = 8 + 4 + 32  # bytes: magic, epoch, nonce
HELLO = 8 + 4 + 4 + 4 + 32 + 32  # bytes: magic, epoch, rank, size, nonce, proof


def soon() -> float:
    return time.monotonic() + 30.0


# Strangers.


@contextlib.contextmanager
def strangers(port: int) -> Iterator[None]:
    """Callers of all kinds that come before the ranks and stay."""
    calls = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"kos", b"kos/tcp4", os.urandom(200), b"\0" * 500]
    calls += [b"kos/tcp4" + os.urandom(HELLO - 8)] * 3 + [b""] * 20
    with contextlib.ExitStack() as stack:
        for data in calls:
            while True:
                try:
                    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)  # rank 0 is about to listen
            stack.enter_context(sock)
            sock.sendall(data)
        yield


def test_strangers_disturb_nobody():
    """In particular, the ranks do not wait for strangers, whose handshakes may take longer than the group's timeout."""
    port = free_port()

    def others():
        with strangers(port):
            return errors_of(20, *[environment(rank, 3, port) for rank in (1, 2)])

    assert run_threads(lambda: errors_of(20, environment(0, 3, port)), others) == [[""], ["", ""]]


@pytest.mark.parametrize("reason", ["too slow", "too many", "too many for its files"])
def test_unauthenticated_callers_are_rejected(reason, monkeypatch):
    """A caller that proves nothing is rejected after a while.

    If there are too many, the oldest are rejected at once.
    """
    calls, dismissed = (2, 2) if reason == "too slow" else (5, 2)
    monkeypatch.setattr(tcp, "HANDSHAKE_SECONDS", 0.1 if reason == "too slow" else 60.0)
    if reason == "too many for its files":
        monkeypatch.setattr(tcp.resource, "getrlimit", lambda which: (9, -1))
    else:
        monkeypatch.setattr(tcp, "MAX_PENDING", 3)
    network = Network(b"s", "127.0.0.1", "", loopback=True)
    listener = network.listen()
    address = listener.getsockname()

    def callers():
        socks = [socket.create_connection(address, timeout=30) for _ in range(calls)]
        try:
            for sock in socks:
                assert sock.recv(GREETING, socket.MSG_WAITALL).startswith(b"kos/tcp4")
            for sock in socks[:dismissed]:
                assert sock.recv(1) == b"", "a stranger was kept"
        finally:
            monkeypatch.setattr(tcp, "HANDSHAKE_SECONDS", 30.0)
            network.call("127.0.0.1", address[1], b"purpose", 1, 2, soon()).close()
            for sock in socks:
                sock.close()

    def door():
        return list(admit_all(listener, network.key(b"purpose"), {1}, 2, soon())[0])

    assert run_threads(door, callers) == [[1], None]


# The handshake.


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        answerer, _ = listener.accept()
    caller.setblocking(False)
    answerer.setblocking(False)
    return caller, answerer


def authenticate(caller: socket.socket) -> Connection:
    greeting = drive(tcp.receive_greeting(caller), caller, soon())
    return drive(tcp.authenticate(caller, greeting, b"key", 5, 9), caller, soon())


def shake_hands(caller: socket.socket, answerer: socket.socket) -> tuple[Any, Any]:
    """What both sides of a handshake give: (connection, (rank, size, connection))."""

    def answer() -> tuple[int, int, Connection]:
        try:
            return drive(tcp.answer(answerer, b"key"), answerer, soon())
        except HandshakeError:
            answerer.close()
            raise

    called, answered = run_threads(lambda: authenticate(caller), answer)
    return called, answered


def say(sender: Connection, receiver: Connection, message: bytes) -> bytes:
    sender.post(message)
    drive(sender.flush(), sender.sock, soon())
    return drive(receiver.receive(), receiver.sock, soon())


class Wire:
    """A socket that others' sends are recorded on and played again."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.sent = sock, bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def send(self, data: Any) -> int:
        count = self.sock.send(data)
        self.sent += bytes(data[:count])
        return count


def test_a_recorded_handshake_is_refused():
    caller, answerer = tcp_pair()
    wire = Wire(caller)
    called, answered = shake_hands(wire, answerer)
    assert isinstance(called, Connection) and isinstance(answered, tuple)
    assert len(wire.sent) == HELLO
    replayer, answerer = tcp_pair()
    replayer.send(wire.sent)
    with pytest.raises(HandshakeError, match="expected a proof of the secret, got a wrong one"):
        drive(tcp.answer(answerer, b"key"), answerer, soon())


def test_a_listener_without_the_secret_is_refused():
    """Even a listener that forwards what it receives: it cannot answer."""
    caller, answerer = tcp_pair()
    answerer.send(b"kos/tcp4" + bytes(4) + os.urandom(32) + os.urandom(32))
    with pytest.raises(HandshakeError, match="expected the same secret"):
        authenticate(caller)


@pytest.mark.parametrize("byte", range(0, HELLO, 7))
def test_a_hello_that_was_changed_on_the_way_is_refused(byte):
    caller, answerer = tcp_pair()

    class Changing(Wire):
        def send(self, data):
            changed = bytearray(data)
            changed[byte] ^= 1
            return self.sock.send(changed)

    called, answered = shake_hands(Changing(caller), answerer)
    assert isinstance(answered, HandshakeError), answered
    assert isinstance(called, HandshakeError | OSError), called


def test_nobody_learns_a_proof_by_calling():
    caller, answerer = tcp_pair()
    caller.send(b"kos/tcp4" + bytes(HELLO - 8))
    with pytest.raises(HandshakeError):
        drive(tcp.answer(answerer, b"key"), answerer, soon())
    answerer.close()
    assert caller.recv(1000)[GREETING:] == bytes(32)


def test_a_connection_that_is_reset_at_once(monkeypatch):
    """The system of a rank that is ending resets it.

    The error is a ConnectionError, after which ``shrink`` can continue.
    """
    create = socket.create_connection
    with socket.create_server(("127.0.0.1", 0)) as door:

        def reset(*arguments, **more):
            sock = create(*arguments, **more)
            with door.accept()[0] as called:
                called.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return sock

        monkeypatch.setattr(socket, "create_connection", reset)
        with pytest.raises(ConnectionResetError, match="closed the connection at once"):
            tcp.connect(*door.getsockname(), soon())


def test_a_socket_that_called_itself(monkeypatch):
    """If no process listens, the kernel may give a caller the same port to which it connects."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.connect(sock.getsockname())
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: sock)
    with pytest.raises(ConnectionRefusedError, match="no process listens"):
        tcp.connect("127.0.0.1", 7, soon())
    assert sock.fileno() == -1


# Messages.


@pytest.mark.parametrize("what", ["again", "changed", "from the other side", "longer"])
def test_messages_that_were_tampered_with(what):
    caller, answerer = tcp_pair()
    wire = Wire(caller)
    ours, (_, _, theirs) = shake_hands(wire, answerer)
    wire.sent.clear()
    say(ours, theirs, b"first message")
    first = bytes(wire.sent)
    number = 1
    if what == "again":
        caller.send(first)
    elif what == "changed":
        ours._outgoing.clear()
        ours.post(b"second message")
        [view] = ours._outgoing
        caller.send(bytes(view[:-1]) + b"E")
    elif what == "from the other side":
        say(theirs, ours, b"said by the listener")
        theirs.post(b"said by the listener")
        caller.send(bytes(theirs._outgoing[0]))
    else:
        ours.post(b"longer")
        [view] = ours._outgoing
        caller.send(struct.pack("!I", 7) + bytes(view[4:]) + b"!")
    with pytest.raises(RendezvousError, match=f"message {number}: expected its HMAC, got another"):
        drive(theirs.receive(), answerer, soon())


def test_a_message_of_another_epoch_is_dropped():
    """It was sent before the membership changed, or after it."""
    ours, (_, _, theirs) = shake_hands(*tcp_pair())
    for epoch in (1, 0, 2, 1):
        ours.epoch = epoch
        ours.post(f"of epoch {epoch}".encode())
    drive(ours.flush(), ours.sock, soon())
    assert drive(theirs.receive(), theirs.sock, soon()) == b"of epoch 0"
    theirs.epoch = 1
    assert drive(theirs.receive(), theirs.sock, soon()) == b"of epoch 1"


@pytest.mark.parametrize(("mine", "its"), [(0, 1), (2, 1)])
def test_a_caller_of_another_epoch_is_refused(mine, its):
    network = Network(b"s", "127.0.0.1", "", loopback=True, epoch=mine)
    listener = network.listen()
    port = listener.getsockname()[1]

    def call():
        with pytest.raises(HandshakeError) as caught:
            network.call("127.0.0.1", port, b"purpose", 1, 2, soon())
        replace(network, epoch=its).call("127.0.0.1", port, b"purpose", 1, 2, soon()).close()
        return str(caught.value)

    def door():
        return list(admit_all(listener, network.key(b"purpose"), {1}, 2, soon(), epoch=its)[0])

    assert run_threads(door, call) == [[1], f"expected epoch {mine} of the membership, got {its}"]


def test_a_message_of_too_many_bytes_is_not_sent():
    ours, _ = shake_hands(*tcp_pair())
    with pytest.raises(RendezvousError, match=f"message: expected at most {tcp.MAX_MESSAGE} bytes, got"):
        ours.post(bytes(tcp.MAX_MESSAGE + 1))


def test_a_rank_that_breaks_the_protocol_is_named():
    def body(rendezvous):
        rendezvous.barrier()
        if rendezvous.rank == 1:
            rendezvous.connection.sock.send(struct.pack("!II", 0xFFFFFFFF, 0) + bytes(32))
            return
        with pytest.raises(RankLost, match="rank 1 is gone: message: expected at most"):
            rendezvous.barrier()

    run_ranks(3, body)


# The secret.


def test_the_users_own_secret(tmp_path):
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": "not/absolute"}
    secrets = run_threads(*[lambda: load_secret(home)] * 16)
    assert len(set(secrets)) == 1 and len(secrets[0]) == 64
    [path] = (tmp_path / ".cache" / "kos").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o640)
    with pytest.raises(RendezvousError, match=f"expected {path} to be its owner's alone, got mode 0640"):
        load_secret(home)
    path.unlink()
    path.mkdir()
    with pytest.raises(RendezvousError, match=f"secret: expected .* {path} to be readable, or KOS_SECRET to be set"):
        load_secret(home)


def test_secrets_that_are_given(tmp_path):
    assert load_secret({"HOME": str(tmp_path), "KOS_SECRET": "x"}) == b"x"
    assert load_secret({"HOME": str(tmp_path), "KOS_SECRET": "\udcff"}) == b"\xff"  # as os.environ has such a byte
    with pytest.raises(RendezvousError, match="KOS_SECRET: expected a secret, got an empty one"):
        load_secret({"HOME": str(tmp_path), "KOS_SECRET": ""})
    assert not list(tmp_path.iterdir())
