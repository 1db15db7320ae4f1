"""A newcomer: it calls at all known members of a group, until the leader of a change of the membership admits it."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kos.comm.control.group import TCPRendezvous
from kos.comm.control.grow import CALL_SECONDS, POLL_SECONDS, Address, unanswered
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
    deadline, problem = time.monotonic() + timeout, ""
    while time.monotonic() < deadline:
        listener = None
        try:
            places = parse(_published(address))
            loopback = is_loopback(places[0][0])
            listener = Network(b"", places[0][0], "", loopback).listen()
            found, connection, answer = _first_answer(places, secret, hello, listener, deadline)
            if "refused" in answer:
                connection.close()
                raise RendezvousError(f"join: {answer['refused']}")
            plan, rank = answer["plan"], answer["rank"]
            mine = plan["members"][rank][0]
            known = connection.mask(bytes.fromhex(answer["secret"]), sent=False)
            network = Network(known, found, mine, loopback, plan["epoch"], found)
            group = TCPRendezvous(rank, len(plan["members"]), plan["timeout"], network, None)
            group.family, group.join_secret, group.host = plan["family"], secret, os.environ.get("KOS_HOST", "")
            group.enter(plan, listener, {0: connection})
        except HandshakeError as error:
            raise RendezvousError(f"join: {address}: {error}") from error
        except (OSError, CollectiveError, FileNotFoundError) as error:
            problem = f": {error}"
            time.sleep(min(POLL_SECONDS, max(deadline - time.monotonic(), 0.0)))
        else:
            return group, answer["terms"]
        finally:
            if listener is not None:
                listener.close()
    raise RendezvousError(unanswered(address, timeout, problem))


def _first_answer(
    places: Sequence[Address], secret: bytes, hello: dict[str, Any], listener: socket.socket, deadline: float
) -> tuple[str, Connection, dict[str, Any]]:
    """Call at all places: the host, the connection and the answer of the first member that answers."""
    calls = dict[int, tuple[str, socket.socket, Waiting[tuple[Connection, dict[str, Any]]]]]()
    problem: Exception = ConnectionError("no member was reached")
    try:
        for host, port in places:
            try:
                sock = connect(host, port, min(deadline, time.monotonic() + CALL_SECONDS))
            except OSError as error:
                problem = error
                continue
            own = sock.getsockname()[0].removeprefix("::ffff:")
            me = (host if is_loopback(own) else own), listener.getsockname()[1]
            calls[sock.fileno()] = host, sock, _knock(sock, secret, {**hello, "me": me})
        poll = select.poll()
        for descriptor in calls:
            poll.register(descriptor, select.POLLIN)
        ready = list(calls)
        while calls and time.monotonic() < deadline:
            for descriptor in ready:
                host, sock, waiting = calls[descriptor]
                try:
                    next(waiting)
                except StopIteration as end:
                    del calls[descriptor]
                    return host, *end.value
                except ConnectionError as error:
                    problem = error
                    poll.unregister(descriptor)
                    del calls[descriptor]
                    sock.close()
            ready = [descriptor for descriptor, _ in poll.poll(POLL_SECONDS * 1000)]
        raise problem if not calls else ConnectionError("no member answered")
    finally:
        for _, sock, _ in calls.values():
            sock.close()


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
