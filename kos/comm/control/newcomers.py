"""The newcomers that wait at one member of a group, until a change of the membership admits them.

The lowest rank leads a change, so a newcomer must reach it.  Other members send the leader's address to a newcomer, and
count it once it has reached the leader.  Before the leader sends the plan, it asks newcomers whether they are ready.  A
stopped newcomer does not answer, and the next one takes its place.
"""

from __future__ import annotations

import json
import logging
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kos.comm import timeouts
from kos.comm.control.hub import send
from kos.comm.control.wire import Acceptor, Connection, Waiting
from kos.errors import RendezvousError

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
