"""Newcomers: those that wait at one member of a group, and how a newcomer calls the members.

A newcomer calls at all known members, until the leader of a change of the membership admits it.  The lowest rank leads
a change, so a newcomer must reach it.  Other members send the leader's address to a newcomer, and count it once it has
reached the leader.  Before the leader sends the plan, it asks newcomers whether they are ready.  A stopped newcomer
does not answer, and the next one takes its place.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kos.comm import timeouts
from kos.comm.control.hub import send
from kos.comm.control.network import Network, bound, is_loopback
from kos.comm.control.wire import (
    JOIN,
    Acceptor,
    Connection,
    HandshakeError,
    Waiting,
    authenticate,
    prepare,
    receive_greeting,
)
from kos.errors import CollectiveError, RendezvousError

T = TypeVar("T")
CALL_SECONDS = 2.0  # limit for a live host to answer
POLL_SECONDS = 0.05
log = logging.getLogger(__name__)
Address = tuple[str, int]
READY_SECONDS = 2.0  # limit for the answer of a newcomer that is asked whether it is ready
REACH_SECONDS = 5.0  # limit for a newcomer to reach the leader
_ANSWER_SECONDS = 0.05  # limit for one wait for answers: a running newcomer needs less


@dataclass(eq=False)
class Newcomer:
    """A waiting newcomer and its last messages; times are of ``time.monotonic``, 0 for never."""

    connection: Connection
    hello: Mapping[str, Any]
    reaches: bool  # whether it has reached the leader
    reading: Waiting[bytes] = field(init=False)
    came: float = field(default_factory=time.monotonic)
    asked: float = 0.0  # when the leader last asked whether it is ready
    answered: float = 0.0
    ended: bool = False

    def __post_init__(self) -> None:
        self.reading = self.connection.receive()

    def __str__(self) -> str:
        host, port = self.hello.get("me", ("?", 0))
        return f"the newcomer at {place_name(host, port)}"

    def read(self) -> bool:
        """Read its messages; returns whether it is still connected."""
        try:
            while not self.ended:  # a generator that has raised has no more messages
                try:
                    next(self.reading)
                    return True
                except StopIteration as end:
                    message, self.reading = json.loads(end.value), self.connection.receive()
                    self.reaches = self.reaches or "reached" in message
                    if "ready" in message:
                        self.answered = time.monotonic()
            return False
        except (OSError, RendezvousError, ValueError):
            self.ended = True
            return False


class Newcomers:
    """The newcomers that wait at this rank."""

    def __init__(self) -> None:
        self._waiting: list[Newcomer] = []
        self.door: Acceptor | None = None
        """Where newcomers call, and members that change the membership."""
        self.refused: list[str] = []
        """Why newcomers were refused or dropped."""

    def __iter__(self) -> Iterator[Newcomer]:
        """The connected ones, each once: a newcomer that knows two names of this host connects twice."""
        for each in [each for each in self._waiting if not each.read()]:
            self._waiting.remove(each)
            each.connection.close()
        return iter(self._once())

    def _once(self) -> list[Newcomer]:
        first: dict[str, Newcomer] = {}
        for each in self._waiting:
            first.setdefault(str(each), each)
        return list(first.values())

    def add(self, connection: Connection, hello: Mapping[str, Any], leader: Address | None) -> None:
        """Add a newcomer that has connected; ``leader`` is None on the leader."""
        self._waiting.append(Newcomer(connection, hello, leader is None))
        if leader is not None:
            send_message(connection, {"leader": leader})

    def count(self, name: str, leader: Address) -> int:
        """How many waiting newcomers have reached the leader ``name``; refuses those that do not reach it in time."""
        for each in self:
            if not each.reaches and time.monotonic() - each.came > REACH_SECONDS:
                where = f"{name} at {place_name(*leader)}"
                self.refuse(each, f"expected a newcomer that reaches {where}, which leads, got one that does not")
        return sum(each.reaches for each in self)

    def ready(self, count: int) -> bool:
        """Whether the first ``count`` have just answered.  Asks them, and refuses those that do not answer."""
        now, chosen = time.monotonic(), list(self)[:count]
        for each in chosen:
            if now - max(each.asked, each.answered) <= READY_SECONDS:
                continue
            if each.asked > each.answered:
                self.refuse(each, timeouts.late("it", timeouts.ANSWER, READY_SECONDS))
            else:
                each.asked = now
                send_message(each.connection, {"ready": True})
        chosen = [each for each in chosen if each in self._waiting]
        _await_answers([each for each in chosen if each.asked > each.answered])
        return len(chosen) == count and all(each.answered > each.asked for each in chosen)

    def refuse(self, newcomer: Newcomer, problem: str) -> None:
        """Send the newcomer the reason, and close its connection.  One that was stopped then connects again."""
        self._waiting.remove(newcomer)
        self.refused.append(f"{newcomer}: {problem}")
        log.warning("refused %s: %s", newcomer, problem)
        if newcomer.asked <= newcomer.answered:
            send_message(newcomer.connection, {"refused": problem})
        newcomer.connection.close()

    def take(self, count: int) -> list[Newcomer]:
        """The first ``count``, which were ``ready`` and wait no longer; the new group finds one that ended since."""
        taken = self._once()[:count]
        self._waiting = [each for each in self._waiting if each not in taken]
        return taken

    def close(self) -> None:
        """Close the door and their connections: they connect again."""
        if self.door is not None:
            self.door.close()
            self.door = None
        for each in self._waiting:
            each.connection.close()
        self._waiting.clear()


def _await_answers(newcomers: Sequence[Newcomer]) -> None:
    """Wait briefly until all have answered, or one has disconnected."""
    deadline, waiting = time.monotonic() + _ANSWER_SECONDS, list(newcomers)
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        poll = select.poll()
        for each in waiting:
            poll.register(each.connection.sock, select.POLLIN)
        poll.poll(remaining * 1000)
        if not all(each.read() for each in waiting):
            return
        waiting = [each for each in waiting if each.asked > each.answered]


def place_name(host: str, port: int) -> str:
    """An address as text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def send_message(connection: Connection, message: Mapping[str, Any]) -> None:
    """Send a message, of JSON's types, now; ignores a closed connection."""
    send(connection, json.dumps(message).encode())


def as_address(pair: Sequence[Any]) -> Address:
    """An address, as JSON has it."""
    host, port = pair
    return str(host), int(port)


# On a newcomer.

FOREIGN_SECONDS = 5.0  # limit for a member to answer where another address has another secret or protocol
SILENT = "accepts connections and sends nothing: a member that has not called grow or replace, or another service"
CLOSES = "expected a member that calls grow or replace, got a service that closes the connection at once"
_LONGEST = 1 << 16  # bytes of a file that holds an address
Answer = tuple[Connection, dict[str, Any]]


def call_members(
    address: str, secret: bytes, hello: dict[str, Any], timeout: float,
    enter: Callable[[Connection, dict[str, Any], socket.socket], T],
) -> tuple[T, dict[str, Any]]:  # fmt: skip
    """The group that admits this process, at the ``address`` of its members, and the terms that its leader sends.

    ``enter`` makes the group, of the connection to the leader, its answer, and the listener of this process.  Raises
    RendezvousError if the members refuse this process, or none admits it within ``timeout`` seconds.
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
            assert calls.listener is not None
            try:
                return enter(connection, answer, calls.listener), answer["terms"]
            except (CollectiveError, RendezvousError) as error:  # the members begin again
                failed = f"; admitted before, but: {error}"


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
