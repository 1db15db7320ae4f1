"""A newcomer: it calls at all known members of a group, until the leader of a change of the membership admits it."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kos.comm import timeouts
from kos.comm.control.group import TCPRendezvous
from kos.comm.control.grow import CALL_SECONDS, POLL_SECONDS, Address
from kos.comm.control.wire import (
    JOIN,
    Connection,
    HandshakeError,
    Network,
    Waiting,
    authenticate,
    connect,
    is_loopback,
    receive_greeting,
)
from kos.errors import CollectiveError, RendezvousError


def call_members(
    address: str, secret: bytes, hello: dict[str, Any], timeout: float
) -> tuple[TCPRendezvous, dict[str, Any]]:
    """The group that admits this process, at the ``address`` of its members, and what the leader tells newcomers.

    Raises RendezvousError if the members refuse this process, or none admits it within ``timeout`` seconds.
    """
    deadline, problem = time.monotonic() + timeout, list[str]()
    while True:
        with ExitStack() as undo:
            connection, answer, listener = _first_answer(address, secret, hello, deadline, problem, undo)
            if connection is None:
                why = "".join(f": {each}" for each in problem[-1:])
                raise RendezvousError(timeouts.not_admitted(address, timeout, why))
            if "refused" in answer:
                raise RendezvousError(f"join: {answer['refused']}")
            plan, rank, host = answer["plan"], answer["rank"], answer["plan"]["members"][answer["rank"]][0]
            known = connection.mask(bytes.fromhex(answer["secret"]), sent=False)
            network = Network(known, host, host, is_loopback(host), plan["epoch"], host)
            group = TCPRendezvous(rank, len(plan["members"]), plan["timeout"], network, None)
            group.family, group.join_secret, group.host = plan["family"], secret, os.environ.get("KOS_HOST", "")
            try:
                group.enter(plan, listener, {0: connection})
            except (CollectiveError, RendezvousError) as error:  # the members begin again
                problem.append(str(error))
            else:
                return group, answer["terms"]  # the group has a copy of the listener


def _first_answer(
    address: str, secret: bytes, hello: dict[str, Any], deadline: float, problem: list[str], undo: ExitStack
) -> tuple[Any, dict[str, Any], Any]:
    """Call at all places, again where a call ends: the first connection with an answer, the answer, and the listener.

    None at the deadline.  ``undo`` closes what is left over, and the listener.
    """
    calls = dict[Address, tuple[socket.socket, Waiting[tuple[Connection, dict[str, Any]]]]]()
    again, listener = dict[Address, float](), None  # when to call again
    undo.callback(lambda: _close(sock for sock, _ in calls.values()))
    while time.monotonic() < deadline:
        try:
            places = parse(_published(address))
        except OSError as error:  # the file is not there yet
            places, problem[:] = [], [str(error)]
        for place in places:
            if listener is None:
                host = place[0]
                listener = undo.enter_context(Network(b"", host, "", is_loopback(host)).listen())
            if place not in calls and again.get(place, 0.0) <= (began := time.monotonic()):
                try:
                    sock = connect(*place, min(deadline, began + CALL_SECONDS))
                    me = _own_host(sock, place[0]), listener.getsockname()[1]
                    calls[place] = sock, _knock(sock, secret, {**hello, "me": me})
                except OSError as error:
                    problem[:] = [f"{place[0]}:{place[1]}: {error}"]
                    again[place] = time.monotonic() + max(POLL_SECONDS, 4 * (time.monotonic() - began))
        for place, (sock, waiting) in list(calls.items()):
            try:
                next(waiting)
            except StopIteration as end:
                del calls[place]
                return *end.value, listener
            except HandshakeError as error:
                raise RendezvousError(f"join: {place[0]}:{place[1]}: {error}") from error
            except OSError as error:
                problem[:] = [f"{place[0]}:{place[1]}: {error}"]
                del calls[place]
                sock.close()
                again[place] = time.monotonic() + POLL_SECONDS
        poll = select.poll()
        for sock, _ in calls.values():
            poll.register(sock, select.POLLIN)
        poll.poll(POLL_SECONDS * 1000)
    return None, {}, None


def _own_host(sock: socket.socket, host: str) -> str:
    """By which address of this host the peer at ``host`` can reach it."""
    own = str(sock.getsockname()[0]).removeprefix("::ffff:")
    return host if is_loopback(own) else own


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _knock(sock: socket.socket, secret: bytes, hello: Mapping[str, Any]) -> Waiting[tuple[Connection, dict[str, Any]]]:
    greeting = yield from receive_greeting(sock)
    key = Network(secret, "", "", False).key(b"join")
    connection = yield from authenticate(sock, greeting, key, JOIN, 0, None)
    connection.post(json.dumps(hello).encode())
    yield from connection.flush()
    answer = json.loads((yield from connection.receive()))
    return connection, answer


def _published(address: str) -> str:
    """The address, which may be in a file."""
    return Path(address).read_text().strip() if os.sep in address else address


def parse(address: str) -> list[Address]:
    """The places of an address "host:port,host:port".  Raises RendezvousError."""
    places = [each.rpartition(":") for each in address.split(",")]
    if not all(host and port.isdecimal() and 0 < int(port) < 1 << 16 for host, _, port in places):
        raise RendezvousError(f'join: address: expected "host:port", several with commas, got {address!r}')
    return [(host.strip("[]"), int(port)) for host, _, port in places]
