"""A newcomer: it calls at all known members of a group, until the leader of a change of the membership admits it."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import time
from contextlib import ExitStack, suppress
from typing import Any

from kos.comm import timeouts
from kos.comm.control.group import TCPControlPlane
from kos.comm.control.grow import CALL_SECONDS, POLL_SECONDS, as_address
from kos.comm.control.network import Network, bound, is_loopback
from kos.comm.control.newcomers import Address, place_name, send_message
from kos.comm.control.wire import JOIN, Connection, HandshakeError, Waiting, authenticate, prepare, receive_greeting
from kos.environment import KOS_HOST
from kos.errors import CollectiveError, RendezvousError

FOREIGN_SECONDS = 5.0  # limit for a member to answer where another address has another secret or protocol
SILENT = "accepts connections and sends nothing: a member that has not called grow or replace, or another service"
CLOSES = "expected a member that calls grow or replace, got a service that closes the connection at once"
_LONGEST = 1 << 16  # bytes of a file that holds an address
Answer = tuple[Connection, dict[str, Any]]


def call_members(
    address: str, secret: bytes, hello: dict[str, Any], timeout: float
) -> tuple[TCPControlPlane, dict[str, Any]]:
    """The group that admits this process, at the ``address`` of its members, and the terms that its leader sends.

    Raises RendezvousError if the members refuse this process, or none admits it within ``timeout`` seconds.
    """
    deadline, failed = time.monotonic() + timeout, ""
    while True:
        with ExitStack() as undo:
            calls = Calls(address, secret, hello)
            undo.callback(calls.close)
            if (found := calls.first_answer(deadline)) is None:
                raise RendezvousError(timeouts.not_admitted(address, timeout, calls.state() + failed))
            connection, answer = found
            if "refused" in answer:
                raise RendezvousError(f"join: {answer['refused']}{calls.problems()}")
            plan, rank, host = answer["plan"], answer["rank"], answer["plan"]["members"][answer["rank"]][0]
            known = connection.mask(bytes.fromhex(answer["secret"]), sent=False)
            network = Network(known, host, host, is_loopback(host), plan["epoch"], host)
            group = TCPControlPlane(rank, len(plan["members"]), plan["timeout"], network, None)
            group.family, group.join_secret, group.host = plan["family"], secret, KOS_HOST.get()
            assert calls.listener is not None
            try:
                group.enter(plan, calls.listener, {0: connection})
            except (CollectiveError, RendezvousError) as error:  # the members begin again
                failed = f"; admitted before, but: {error}"
            else:
                return group, answer["terms"]  # the group has a copy of the listener


class Calls:
    """The connections of a newcomer to all addresses where members listen; a closed one is made again."""

    def __init__(self, address: str, secret: bytes, hello: dict[str, Any]) -> None:
        self._address, self._secret, self._hello = address, secret, hello
        self.listener: socket.socket | None = None
        self._calls = dict[Address, tuple[socket.socket, Waiting[Answer]]]()
        self._events = dict[Address, int]()  # the poll events that a connection waits for
        self._again = dict[Address, float]()  # when to connect again
        self._states = dict[Address, str]()  # the state of each connection, as text
        self._reached = set[Address]()
        self._leaders = dict[Address, Address]()  # that members have named
        self._untold = dict[Address, Connection]()  # those members, until they know that it is reached
        self._foreign = dict[Address, HandshakeError]()  # where another service, job or protocol answers
        self._foreign_until = 0.0  # how long others are awaited that may be members
        self._proved = set[Address]()  # where members with this secret answer
        self._no_file = ""  # why the address is not known

    def first_answer(self, deadline: float) -> Answer | None:
        """The first connection that receives an answer, and the answer; None at the deadline.

        Raises RendezvousError if those at the addresses have another secret or protocol.
        """
        while time.monotonic() < deadline:
            for place in [place for place in self._places() if place not in self._calls]:
                if self._again.get(place, 0.0) <= time.monotonic():
                    self._call(place)
            for place in list(self._calls):
                if (answer := self._advance(place)) is not None:
                    return answer
            for place in list(self._untold):
                if self._leaders[place] in self._reached:
                    send_message(self._untold.pop(place), {"reached": True})
            self._check_foreign()
            poll = select.poll()
            for place, (sock, _) in self._calls.items():
                poll.register(sock, self._events[place])
            poll.poll(POLL_SECONDS * 1000)
        return None

    def _check_foreign(self) -> None:
        """Raise if no member has admitted this process's proof, and none may: it has the wrong secret or protocol."""
        silent = self._calls.keys() - self._foreign.keys()
        if self._foreign and not self._proved and (not silent or time.monotonic() > self._foreign_until):
            place, error = next(iter(self._foreign.items()))
            raise RendezvousError(f"join: {place_name(*place)}: {error}") from error

    def _places(self) -> list[Address]:
        """The addresses of members: the given ones, which may be in a file, and those of leaders that members name."""
        self._no_file = ""
        try:
            places = parse(_read_address(self._address) if os.sep in self._address else self._address)
        except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
            raise RendezvousError(f"join: address: expected a file that holds it, got: {error}") from error
        except OSError as error:  # the file is not there yet
            places, self._no_file = [], str(error)
        return list(dict.fromkeys([*places, *self._leaders.values()]))

    def _call(self, place: Address) -> None:
        host, _ = place
        if self.listener is None:
            self.listener = Network(b"", host, "", is_loopback(host)).listen()
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            return self._failed(place, error)
        prepare(sock)
        if (problem := sock.connect_ex(where)) not in (0, errno.EINPROGRESS):
            sock.close()
            return self._failed(place, OSError(problem, os.strerror(problem)))
        self._calls[place] = sock, self._knock(place, sock)

    def _advance(self, place: Address) -> Answer | None:
        try:
            self._events[place] = next(self._calls[place][1])
        except StopIteration as end:
            del self._calls[place]
            answer: Answer = end.value
            return answer
        except HandshakeError as error:
            self._foreign_until = self._foreign_until or time.monotonic() + FOREIGN_SECONDS
            self._foreign[place] = error
            self._failed(place, error)
        except OSError as error:
            self._failed(place, error)
        return None

    def _failed(self, place: Address, error: Exception) -> None:
        self._states[place], self._again[place] = str(error), time.monotonic() + POLL_SECONDS
        self._leaders.pop(place, None)
        self._untold.pop(place, None)
        if place in self._calls:
            self._calls.pop(place)[0].close()

    def _knock(self, place: Address, sock: socket.socket) -> Waiting[Answer]:
        """One connection, until the member admits or refuses this newcomer."""
        yield from _connected(sock)
        self._reached.add(place)
        self._states[place] = SILENT
        try:
            greeting = yield from receive_greeting(sock)
        except ConnectionError:
            raise ConnectionError(CLOSES) from None
        self._states[place] = "is there, and has not admitted this process yet"
        key = Network(self._secret, "", "", False).key(b"join")
        connection = yield from authenticate(sock, greeting, key, JOIN, 0, None)
        self._proved.add(place)
        assert self.listener is not None
        me = bound() or _own_host(sock, place[0]), self.listener.getsockname()[1]
        connection.post(json.dumps({**self._hello, "me": me}).encode())
        yield from connection.flush()
        while True:
            answer = json.loads((yield from connection.receive()))
            if "leader" in answer:
                self._leaders[place], self._untold[place] = (leader := as_address(answer["leader"])), connection
                self._states[place] = f"is there, and waits for its leader at {place_name(*leader)}"
            elif "ready" in answer:
                connection.post(json.dumps({"ready": True}).encode())
                yield from connection.flush()
            else:
                return connection, answer

    def state(self) -> str:
        """A text that says what this newcomer waits for."""
        each = (f"{place_name(*place)}: {text}" for place, text in self._states.items())
        return "; ".join(filter(None, [self._no_file, *each])) or "no member"

    def problems(self) -> str:
        """The addresses that were not reached, and why, as text."""
        places = {place: text for place, text in self._states.items() if place not in self._reached}
        return "".join(f"; {place_name(*place)}: {text}" for place, text in places.items())

    def close(self) -> None:
        """Close the connections and the listener."""
        for sock, _ in self._calls.values():
            sock.close()
        if self.listener is not None:
            self.listener.close()


def _read_address(path: str) -> str:
    """The address that the file holds.  Raises OSError, RendezvousError."""
    with open(path, "rb") as file:
        data = file.read(_LONGEST + 1)
    if len(data) <= _LONGEST:
        with suppress(UnicodeDecodeError):
            return data.decode().strip()
    raise RendezvousError(f"join: address: expected {path} to hold the address of members, got {data[:16]!r}…")


def _connected(sock: socket.socket) -> Waiting[None]:
    """Wait until the socket is connected.  Raises OSError."""
    deadline, poll = time.monotonic() + CALL_SECONDS, select.poll()
    poll.register(sock, select.POLLOUT)
    while not poll.poll(0):
        if time.monotonic() > deadline:
            raise TimeoutError(timeouts.late("it", timeouts.ANSWER, CALL_SECONDS))
        yield select.POLLOUT
    if problem := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(problem, os.strerror(problem))
    if sock.getpeername() == sock.getsockname():  # connected to itself: the kernel chose this port for its own end
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no process listens")


def _own_host(sock: socket.socket, host: str) -> str:
    """By which address of this host the peer at ``host`` can reach it."""
    own = str(sock.getsockname()[0]).removeprefix("::ffff:")
    return host if is_loopback(own) else own


def parse(address: str) -> list[Address]:
    """The places of an address "host:port,host:port".  Raises RendezvousError."""
    places = [each.rpartition(":") for each in address.split(",")]
    if not all(host and port.isdecimal() and 0 < int(port) < 1 << 16 for host, _, port in places):
        raise RendezvousError(f'join: address: expected "host:port", several with commas, got {address!r:.80}')
    return [(host.strip("[]"), int(port)) for host, _, port in places]
