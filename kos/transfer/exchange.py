"""The protocol between publishers and subscribers, over the authenticated connections of ``kos.comm.control.wire``.

A request and its answer are JSON, in messages with an HMAC each.  Both contain the version of the protocol and the
incarnation of the publisher.  The bytes of tensors follow an answer without an HMAC, in the order of the request.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from kos.comm.communicator import Communicator
from kos.comm.control.base import machine_id
from kos.comm.control.identity import load_secret
from kos.comm.control.network import Network, bound, is_loopback
from kos.comm.control.wire import MAX_MESSAGE, Connection, Waiting, drive
from kos.comm.host.shared.segment import namespaces
from kos.dtypes import DTYPES
from kos.errors import CollectiveError, CudaError, InvalidArgument, KosError, TransferError, TransferTimeout, in_words
from kos.memory.ipc import pretended_host
from kos.transfer.placement import Placement
from kos.transfer.plan import Array, Layout, Offers

PROTOCOL = 1
PURPOSE = b"kos transfer"
NO_ANSWER = "expected an answer before the deadline, got none"
_PIECE = MAX_MESSAGE // 2  # bytes
GRACE = 2.0
"""Seconds: the longest wait of a publisher before it answers, and of subscriber ranks for the results of the others."""


class Stale(Exception):
    """The version no longer exists: its buffer was used again, or the publisher was restarted (a new incarnation)."""


class Address(NamedTuple):
    """Where a publisher rank listens, and where it runs."""

    host: str
    port: int
    place: str
    """Equal to that of a process that can map its memory."""
    pid: int
    file: int
    """The descriptor of its memory."""
    token: str
    """The random number at the beginning of its memory.  The token of rank 0 is the incarnation of the publisher."""
    nbytes: int
    """The size of the arrays that it publishes."""
    gpus: Sequence[str] = ()
    """The CUDA IPC handles of its memory on GPUs."""

    def name(self, rank: int) -> str:
        """The rank, for errors."""
        return f"publisher rank {rank} (pid {self.pid} at {self.host}:{self.port}, {self.nbytes:,} bytes of arrays)"


class Catalogue:
    """What a publisher offers, and where its ranks are."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.incarnation, self.name, self.buffers = answer["incarnation"], answer["name"], answer["buffers"]
        self.ranks = [Address(*each) for each in answer["ranks"]]
        self.offers = Offers([(layout_from_json(layout), ranks) for layout, ranks in answer["groups"]])


def place() -> str:
    """A string that is equal in processes that can share memory: the machine, ``KOS_HOST`` and the namespaces."""
    return json.dumps([machine_id(), pretended_host(), sorted(namespaces().items())])


def parse(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT".

    Raises InvalidArgument, also for 0.0.0.0 and ::, by which a subscriber would connect to its own host.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise InvalidArgument(f'address: expected "HOST:PORT", got {address!r:.80}')
    host = host.strip("[]")
    if host == "::" or (host.replace(".", "").isdecimal() and not int(host.replace(".", ""))):  # "0" is 0.0.0.0, too
        got = f"{host}, which is not the address of a host"
        raise InvalidArgument(f"address: expected the host of the publisher's rank 0, got {got}")
    return host, int(port)


def network(host: str) -> Network:
    """The connections to ``host`` and the secret of ``KOS_SECRET``, or the user's.

    Raises TransferError if the secret cannot be used.
    """
    try:
        return Network(load_secret(os.environ), host, "", is_loopback(host))
    except KosError as error:  # a RendezvousError: that class is for ranks that connect to each other
        raise TransferError(f"{error}") from error


def listen(host: str, port: int) -> socket.socket:
    """The listener of rank 0.  ``host`` is an address of this host, or with ``KOS_BIND`` one that is routed to it.

    Raises InvalidArgument if this host has no such address, OSError for another problem, RendezvousError for a wrong
    ``KOS_PORTS`` or ``KOS_BIND``, and TransferError.
    """
    if not bound():
        try:
            family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            socket.create_server(place, family=family).close()
        except OSError as error:
            expected = "expected an address of this host, or KOS_BIND with the one to which it leads"
            raise InvalidArgument(f"address: {expected}, got {host} ({error})") from error
    return network(host).listen(port)


def layout_to_json(layout: Layout) -> dict[str, Any]:
    return {name: [dtype.name, gpu, *placement.to_json()] for name, (dtype, placement, gpu) in layout.items()}


def layout_from_json(value: dict[str, Any]) -> Layout:
    return {name: Array(DTYPES[dtype], Placement.from_json(rest), gpu) for name, (dtype, gpu, *rest) in value.items()}


def send(connection: Connection, message: dict[str, Any], incarnation: str, deadline: float) -> None:
    """Send a request or an answer.  Raises OSError, TimeoutError."""
    text = json.dumps({"protocol": PROTOCOL, "incarnation": incarnation, **message}).encode()
    for start in range(0, len(text), _PIECE):  # a catalogue of many ranks is longer than a message may be
        last = start + _PIECE >= len(text)
        connection.post((b"." if last else b"+") + text[start : start + _PIECE])
        drive(connection.flush(), connection.sock, deadline)


def receive(connection: Connection, deadline: float) -> dict[str, Any]:
    """A request or an answer.  Raises OSError, TimeoutError."""
    pieces = [drive(connection.receive(), connection.sock, deadline)]
    while pieces[-1][:1] == b"+":
        pieces.append(drive(connection.receive(), connection.sock, deadline))
    message: dict[str, Any] = json.loads(b"".join(piece[1:] for piece in pieces))
    return message


def receive_into(memory: memoryview, connection: Connection, deadline: float, count: Callable[[int], None]) -> None:
    """Fill the memory with the bytes that follow an answer.

    ``count`` is called with the size in bytes of each piece that arrives.  Raises OSError, TimeoutError.
    """
    while memory:
        try:
            got = connection.sock.recv_into(memory)
        except BlockingIOError:
            drive(_readable(), connection.sock, deadline)
            continue
        if not got:
            raise ConnectionError("the connection was closed")
        count(got)
        memory = memory[got:]


def _readable() -> Waiting[None]:
    yield select.POLLIN


def answered(message: dict[str, Any], incarnation: str) -> dict[str, Any]:
    """The message, if it has this protocol and incarnation ("": any) and is no error.  Raises Stale, TransferError."""
    if message["protocol"] != PROTOCOL:
        raise TransferError(f"expected protocol {PROTOCOL} of kos.transfer, got {message['protocol']}")
    theirs = message["incarnation"]
    if message.get("stale") or (theirs != incarnation and "" not in (theirs, incarnation)):
        raise Stale
    if "error" in message:
        raise TransferError(message["error"])
    return message


def shut_down(connections: Iterable[Connection]) -> None:
    """End the waits of the threads that use these connections."""
    for each in connections:
        with suppress(OSError):
            each.sock.shutdown(socket.SHUT_RDWR)


def as_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The memory of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def checksum(arrays: Iterable[np.ndarray[Any, Any]]) -> int:
    """The CRC-32 of arrays one after another."""
    found = 0
    for each in arrays:
        found = zlib.crc32(as_bytes(np.ascontiguousarray(each)), found)
    return found


def together(
    comm: Communicator | None, who: str, work: Callable[[], Any], deadline: float | None = None,
    what: Callable[[], str] | None = None,
) -> list[Any]:  # fmt: skip
    """The results of ``work`` on all ranks, in JSON.  Collective.

    If one rank raises an error, all ranks raise it; Stale is raised only if no rank has another error.  The error names
    that rank on the others, as ``who`` and its number.  They wait for its result until the deadline, or without a
    deadline for the timeout of ``comm``.  With ``what``, they raise
    a TransferError that begins with ``what()`` if a rank is late or lost.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as problem:
        error = problem
    stale = isinstance(error, Stale)
    mine = json.dumps([result, error and in_words(error), stale, isinstance(error, TimeoutError)]).encode()
    timeout = None if deadline is None else max(round(deadline - time.monotonic(), 3), 0.001)
    try:
        every = [mine] if comm is None else comm.all_gather_bytes(mine, timeout=timeout)
    except (CollectiveError, TransferError) as failure:
        if what is None:
            raise
        also = "" if error is None or stale else f"; this rank has also failed: {in_words(error)}"
        raise _no_answer_error(comm, who, what(), failure, also) from failure
    if error is not None and not stale:
        try:
            raise error
        finally:
            error = None  # else its traceback keeps this frame, and what the frames below hold, until a collection
    found = [json.loads(each) for each in every]
    for rank, (_, text, replaced, timed_out) in enumerate(found):
        if text is not None and not replaced:
            raise (TransferTimeout if timed_out else TransferError)(f"{who} {rank}: {text}", ranks=[rank])
    if any(replaced for _, _, replaced, _ in found):
        raise Stale
    return [each for each, *_ in found]


def _no_answer_error(comm: Any, who: str, what: str, failure: KosError, also: str) -> TransferError:
    """The error if ranks are late or lost in ``together``.  After a CollectiveError, the communicator has failed."""
    collective = isinstance(failure, CollectiveError)
    ranks = [comm.world_ranks.index(rank) for rank in failure.ranks if rank in comm.world_ranks] if collective else []
    named = f" from {who} {', '.join(map(str, ranks))}" if ranks else ""
    remedy = "; to continue, call comm.shrink() and make a new Subscriber" if collective else ""
    kind = TransferTimeout if isinstance(failure, TimeoutError) else TransferError
    text = f"{what}: expected an answer from each {who} in time, got none{named} ({in_words(failure)}){also}{remedy}"
    return kind(text, ranks=ranks, cause=failure)


@contextmanager
def naming(
    peer: Callable[[], str], deadline: float, ranks: Sequence[int] = (), late: Callable[[], str] = lambda: NO_ANSWER
) -> Iterator[None]:
    """A context that turns errors into a TransferError that names ``peer``, which has ended or is late.

    ``late()`` says what was missing at the deadline.  Errors of a GPU of this process are not changed.
    """
    try:
        yield
    except (CudaError, MemoryError, TransferTimeout):
        raise
    except (OSError, ValueError, KosError) as error:
        kind = TransferError
        if isinstance(error, TransferError):
            why = str(error)
        elif isinstance(error, socket.gaierror):
            why = f"expected the name of a host, got one without an address: {error}"
        elif isinstance(error, TimeoutError) or time.monotonic() >= deadline:
            kind, why = TransferTimeout, late()
        else:
            why = f"expected it to answer, got: {str(error) or type(error).__name__}"
        raise kind(f"{peer()}: {why}", ranks=ranks) from error
