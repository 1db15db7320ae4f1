"""The key-value store of a group: its table, which the hub or a group of threads keeps, and the calls of the ranks."""

from __future__ import annotations

import itertools
import json
import select
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from kos.comm import timeouts, waits
from kos.comm.arguments import check_int, check_timeout
from kos.comm.failures import WHY_CLOSED
from kos.errors import CollectiveTimeout, InvalidArgument

STORE, STORED = b"K", b"V"  # the first byte of a rank's request to the hub, and of the answer
MOST_BYTES, MOST_CHARACTERS = 1 << 20, 1024
"""The most bytes of a value, and characters of a key."""
_LENGTH = struct.Struct("!I")
_POLL_SECONDS = 0.001  # between two looks for an answer, which another thread of the rank may have read
_tokens = itertools.count()

Answer = tuple[Any, bytes]
"""What a request returns, of JSON's types, and the value of ``get``."""


def pack(header: Any, value: bytes = b"") -> bytes:
    """A message: a header of JSON's types, and a value."""
    text = json.dumps(header).encode()
    return _LENGTH.pack(len(text)) + text + value


def unpack(message: bytes) -> Answer:
    """The header and the value of a message."""
    start = _LENGTH.size + _LENGTH.unpack_from(message)[0]
    return json.loads(message[_LENGTH.size : start]), message[start:]


class Table:
    """The values of a store, and the requests that wait for keys.  One thread at a time uses it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[int, int, str, list[str]]] = []  # rank, token, request and keys

    def serve(self, rank: int, header: Any, value: bytes) -> Iterator[tuple[int, int, Answer]]:
        """Carry out a request.  Yields the rank, the token and the answer of each request that is then complete."""
        token, request, keys, *rest = header
        if request == "cancel":
            self._waiting = [each for each in self._waiting if each[:2] != (rank, token)]
            return
        if request in ("get", "wait"):
            self._waiting.append((rank, token, request, keys))
        else:
            yield rank, token, (self._change(request, keys, value, *rest), b"")
        complete = [each for each in self._waiting if self._values.keys() >= {*each[3]}]
        for each in complete:
            self._waiting.remove(each)
            yield each[0], each[1], (None, self._values[each[3][0]] if each[2] == "get" else b"")

    def _change(self, request: str, keys: list[str], value: bytes, amount: int = 0) -> Any:
        """The answer of a request that does not wait."""
        if request == "set":
            self._values[keys[0]] = value
            return None
        if request == "delete":
            return self._values.pop(keys[0], None) is not None
        if request == "count":
            return len(self._values.keys() & {*keys} if keys else self._values)
        try:
            total = int(self._values.get(keys[0], b"0")) + amount
        except ValueError:
            return repr(self._values[keys[0]][:40])
        self._values[keys[0]] = str(total).encode()
        return total


class KeyValueStore:
    """A small store of control data, which all ranks of a communicator share: ``comm.store``.

    Keys are strings of 1 to 1,024 characters; values are bytes, at most 1 MiB each.  The process of rank 0 keeps them
    until all ranks have closed the communicator.  Each group has a store of its own, and a membership change begins an
    empty one.  Calls are not collective; any thread may make them, and each takes effect at once.

    ``timeout`` in seconds replaces that of the communicator.  Calls raise InvalidArgument for wrong arguments; a
    failure of the communicator, such as RankLost, as soon as it is known; and CollectiveTimeout, which does not end the
    communicator.

        if comm.rank == 0:
            comm.store.set("address", b"10.0.0.1:8000")
        address = comm.store.get("address", timeout=30)
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __repr__(self) -> str:
        return f"<KeyValueStore of {self._comm!r}>"

    def set(self, key: str, value: bytes | str) -> None:
        """Set the value of ``key``.  A string is stored as UTF-8."""
        if isinstance(value, str):
            value = value.encode()
        try:
            data = bytes(memoryview(value))
        except TypeError:
            raise InvalidArgument(f"value: expected bytes or a string, got {type(value).__name__}") from None
        if len(data) > MOST_BYTES:
            raise InvalidArgument(f"value: expected at most {MOST_BYTES} bytes, got {len(data)}")
        self._ask("set", [key], data)

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """The value of ``key``.  Waits until a rank has set it."""
        return self._ask("get", [key], timeout=timeout)[1]

    def wait(self, keys: Sequence[str], timeout: float | None = None) -> None:
        """Wait until all ``keys`` have been set."""
        if isinstance(keys, str) or not isinstance(keys, Sequence):
            raise InvalidArgument(f"keys: expected a list of strings, got {keys!r}")
        self._ask("wait", [*keys], timeout=timeout)

    def add(self, key: str, amount: int = 1) -> int:
        """Add ``amount`` to the number of ``key``, which begins at 0, and return the sum.

        ``get`` returns the number in decimal digits.  Raises InvalidArgument if the value is not a whole number.
        """
        total = self._ask("add", [key], b"", check_int("amount", amount))[0]
        if isinstance(total, str):
            raise InvalidArgument(f"add: expected a whole number as the value of {key!r}, got {total}")
        return int(total)

    def delete(self, key: str) -> bool:
        """Remove ``key``; whether it was there."""
        return bool(self._ask("delete", [key])[0])

    def __contains__(self, key: str) -> bool:
        return bool(self._ask("count", [key])[0])

    def __len__(self) -> int:
        return int(self._ask("count", [])[0])

    def _ask(
        self, request: str, keys: list[str], value: bytes = b"", *rest: int, timeout: float | None = None
    ) -> Answer:
        self._comm._check_open()
        for key in keys:
            if not isinstance(key, str) or not 0 < len(key) <= MOST_CHARACTERS:
                raise InvalidArgument(f"key: expected a string of 1 to {MOST_CHARACTERS} characters, got {key!r:.80}")
        seconds = self._comm.timeout if timeout is None else check_timeout(timeout)
        what = f"store.{request}({', '.join(f'{key!r:.80}' for key in keys[:4])}{', …' * (len(keys) > 4)})"
        header, failures = [next(_tokens), request, keys, *rest], self._comm.rendezvous.failures
        failures.refuse(what)
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        failures.status.post_wait(failures.in_world(others))
        try:
            ask = _ask_hub if self._comm.rendezvous.threads is None else _ask_threads
            if (answer := ask(self._comm.rendezvous, header, value, seconds, what)) is not None:
                return answer
            missing = ("the answer", "did not arrive")
            if request in ("get", "wait"):
                missing = ("no rank", "has set the key") if len(keys) == 1 else ("not all keys", "have been set")
            me = failures.names([self._comm.rank], False)
            raise CollectiveTimeout(f"{me}: {what}: {timeouts.late(*missing, seconds)}")
        finally:
            failures.status.post_wait(None)


def _ask_hub(plane: Any, header: list[Any], value: bytes, seconds: float, what: str) -> Answer | None:
    """The hub's answer, None if there is none in time."""
    inbox, failures, token = plane.inbox, plane.failures, header[0]
    answers = inbox.answers

    def answered() -> bool:
        plane.deaths()  # reads from the hub
        if token in answers:
            return True
        plane.channel.record_deaths()
        if (failure := failures.find()) is not None:
            raise failure.copy(None, what)
        if plane.connection is None or inbox.ended:
            raise failures.lost(0, WHY_CLOSED, what)
        return False

    def pause() -> None:
        if (sock := plane.channel.sock) is not None:
            poll = select.poll()
            with suppress(OSError, ValueError):  # another thread closes the group
                poll.register(sock, select.POLLIN)
                poll.poll(_POLL_SECONDS * 1000)

    inbox.expected.add(token)
    try:
        plane.post(STORE + pack(header, value))
        if waits.wait(answered, time.monotonic() + seconds, waiter=pause):
            return answers.pop(token)
        return None
    finally:
        inbox.expected.discard(token)
        if answers.pop(token, None) is None and header[1] in ("get", "wait"):
            plane.post(STORE + pack([token, "cancel", []]))


def _ask_threads(plane: Any, header: list[Any], value: bytes, seconds: float, what: str) -> Answer | None:
    """The answer of the table that the ranks of a process share, None if there is none in time."""
    group, rank, deadline = plane.threads, plane.rank, time.monotonic() + seconds
    mine, others = (rank, header[0]), [other for other in range(plane.size) if other != plane.rank]
    with group.world.lock:
        table, answers = group.shared("store", lambda: (Table(), dict[tuple[int, int], Answer]()))
        try:
            for to, token, answer in table.serve(rank, header, value):
                answers[to, token] = answer
            group.notify_all()
            while mine not in answers:
                group.raise_reported(plane.failures, None)
                for other in others:
                    if plane.failures.left.get(other, (0, "", None))[1] != WHY_CLOSED:  # the others may set the key
                        group.raise_end(other, plane.failures, what)
                if not group.wait(rank, deadline, what, others):
                    return None
            return answers.pop(mine)
        finally:
            answers.pop(mine, None)
            for _ in table.serve(rank, [header[0], "cancel", []], b""):
                pass
