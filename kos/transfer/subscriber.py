"""The side that wants the weights: it pulls the newest version into its own arrays.

``update`` asks rank 0 of the publisher for the newest version and a lease on it, and reads its boxes from the ranks
that hold them: from mapped memory on the same host, else over several TCP connections.  All of it goes to staging
memory first.  It is copied to the arrays when the version was read whole, on all ranks of the subscriber.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from kos.comm.arguments import check_int, check_timeout
from kos.comm.communicator import Communicator
from kos.comm.control.wire import Connection, drive, fill
from kos.dtypes import BY_NUMPY, DType
from kos.errors import InvalidArgument, KosError, TransferError, TransferTimeout
from kos.transfer import exchange
from kos.transfer.buffers import Buffers
from kos.transfer.exchange import GRACE, Address, Restarted, Stale
from kos.transfer.placement import Arrays
from kos.transfer.plan import Copy, Offers, Plan

CHUNK = 8 << 20  # bytes of a request
_MOST_BOXES = 64  # of a request
_MOST_THREADS = 16
_AGAIN_SECONDS = 0.05  # between two tries to reach a publisher that has not come yet
_RANK = "subscriber rank"
_LINGER = 5.0  # seconds that a lease outlives the deadline of the reader


class Update(NamedTuple):
    """The result of ``Subscriber.update``."""

    version: int
    """The version that the arrays hold now."""
    changed: bool
    """Whether it is another one than before."""
    restarted: bool
    """Whether the publisher is another one than before: its incarnation has changed."""
    seconds: float
    nbytes: int
    """Bytes that this rank has read."""


class Version(NamedTuple):
    """A version of a publisher."""

    incarnation: str
    serial: int
    number: int


class Catalogue:
    """What a publisher offers, and where its ranks are."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.incarnation, self.name, self.buffers = answer["incarnation"], answer["name"], answer["buffers"]
        self.ranks = [Address(*each) for each in answer["ranks"]]
        self.offers = Offers([(exchange.layout_from_json(layout), ranks) for layout, ranks in answer["groups"]])


def read_catalogue(address: str, timeout: float = 30.0) -> Catalogue:
    """What the publisher at ``address`` offers, such as the shapes of its tensors: ``offers.shapes``.

    Waits at most ``timeout`` seconds until a publisher answers.  Raises TransferError, TransferTimeout.
    """
    with Subscriber(address, None) as subscriber:
        return subscriber.catalogue(timeout)


class Subscriber:
    """Pulls versions of a publisher's tensors into ``arrays``.

    Args:
        address: "HOST:PORT" of the publisher's rank 0.  It may come later than the subscriber.
        arrays: arrays in host memory (NumPy, torch, ...), and which tensors' elements each gets.
        comm: the communicator of several ranks that subscribe together; None: one process.  ``update`` is then
            collective, and all ranks get the same version or none.
        streams: TCP connections to each publisher rank.
        way: "shared" maps the publisher's memory, on the same host; "tcp" does not; "auto" takes what works.
        staged: read into staging memory, as large as the arrays, so that the arrays never hold a part of a version.
            Without it an update takes one copy less, and a failed one leaves the arrays undefined until the next.

    Raises InvalidArgument, such as for memory of a GPU.
    """

    def __init__(
        self, address: str, arrays: Arrays | None, *, comm: Communicator | None = None, streams: int = 4,
        way: Literal["auto", "shared", "tcp"] = "auto", staged: bool = True,
    ) -> None:  # fmt: skip
        self.address, self._comm, self._way, self._streams = address, comm, way, check_int("streams", streams)
        self._rank = 0 if comm is None else comm.rank
        if arrays is not None and not arrays:
            raise InvalidArgument("arrays: expected at least one, got none")
        if streams < 1 or way not in ("auto", "shared", "tcp"):
            raise InvalidArgument(f"streams, way: expected at least 1 and auto, shared or tcp, got {streams}, {way!r}")
        self._host, self._port = exchange.parse(address)
        self._network = exchange.network(self._host)
        self._flat, self._layout = ({}, {}) if arrays is None else exchange.flat_arrays(arrays, True)
        self._staged, self.into = staged, {n: np.empty_like(x) if staged else x for n, x in self._flat.items()}
        self._lead: Connection | None = None
        self._data: dict[tuple[Address, int], Connection] = {}
        self._mapped: dict[int, Buffers] = {}
        self._known: Catalogue | None = None
        self._plan: Plan | None = None
        self._held: Version | None = None
        self._failed = False  # whether a reader has failed, so that the others end

    @property
    def version(self) -> int | None:
        """The version that the arrays hold; None before the first, and after an update without staging failed."""
        return None if self._held is None else self._held.number

    def update(self, timeout: float = 30.0, *, verify: bool = False) -> Update:
        """Pull the newest version.  Collective if there is a communicator.

        Waits at most ``timeout`` seconds in all, until the publisher answers, has a version, and has sent its bytes.
        If the publisher uses the buffer of the version again, the update begins again with the newest one.
        ``verify`` reads over TCP, and compares checksums of all bytes with the publisher's, and where it was made with
        ``checksums``, these with the checksums at ``publish``.

        Raises TransferError, which names the publisher's rank and what it holds, if it has ended or its bytes are
        wrong; TransferTimeout if it does not answer in time.  The arrays then hold the version from before, unless
        ``staged`` is False.  A later ``update`` connects again.
        """
        began, before = time.monotonic(), self._held
        deadline = began + check_timeout(timeout)
        while True:
            found = exchange.together(self._comm, _RANK, lambda: self._newest(deadline), deadline)
            wanted = Version(*found[0])  # of rank 0, which has the lease
            if before is not None and wanted[:2] == before[:2]:
                return Update(wanted.number, False, False, time.monotonic() - began, 0)
            with suppress(Stale):  # rank 0 ends the loop at the deadline, for all ranks
                nbytes = self._pull_together(wanted, deadline, verify)
                restarted = before is not None and before.incarnation != wanted.incarnation
                return Update(wanted.number, True, restarted, time.monotonic() - began, nbytes)

    def catalogue(self, timeout: float = 30.0) -> Catalogue:
        """What the publisher offers."""
        deadline = time.monotonic() + check_timeout(timeout)
        while True:
            try:
                found = Catalogue(self._ask("catalogue", deadline, incarnation=""))
                break
            except TransferError as error:  # it may still come
                if not isinstance(error.__cause__, OSError):
                    raise
                if time.monotonic() + _AGAIN_SECONDS > deadline:
                    why = f"{self._name()}, which never answered ({error.__cause__})"
                    raise exchange.late(why, deadline, TimeoutError()) from error
                time.sleep(_AGAIN_SECONDS)
        if self._known is None or self._known.incarnation != found.incarnation:
            self._drop_data()
            self._known, self._plan = found, None
        return self._known

    def plan(self, timeout: float = 30.0) -> Plan:
        """Which bytes this rank reads from which publisher rank."""
        known = self._known or self.catalogue(timeout)
        if self._plan is None:
            self._plan = Plan(known.offers, [self._layout], self._rank)
            self._plan.check()
        return self._plan

    def close(self) -> None:
        """Close the connections, and unmap the publisher's memory."""
        self._drop_data()
        self._drop_lead()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the exchange with rank 0 of the publisher ----------------------------------------------------------

    def _name(self) -> str:
        name = "publisher" if self._known is None else f"publisher {self._known.name}"
        return f"{name} at {self.address}" + ("" if self._held is None else f", which had version {self.version}")

    def _ask(self, what: str, deadline: float, incarnation: str, **more: Any) -> dict[str, Any]:
        """An answer of the publisher's rank 0.  Raises Restarted, Stale, TransferError."""
        try:
            if self._lead is None:
                self._lead = self.call(self._host, self._port, deadline)
            exchange.send(self._lead, {"ask": what, **more}, incarnation, deadline)
            answer = exchange.receive(self._lead, deadline)
        except BaseException as error:  # the answer to this request may still come: not on the next connection
            self._drop_lead()
            if isinstance(error, OSError | KosError):
                raise exchange.late(self._name(), deadline, error) from error
            raise
        return exchange.answered(answer, incarnation)

    def call(self, host: str, port: int, deadline: float) -> Connection:
        """A new connection to a publisher rank."""
        return self._network.call(host, port, exchange.PURPOSE, self._rank, 1, deadline)

    def _newest(self, deadline: float) -> Version | None:
        """The newest version, and a lease unless it is held here already; None on other ranks than 0."""
        if self._rank:
            return None
        if self._lead is not None and self._lead.drain():  # the publisher may have been restarted since the last update
            self._drop_lead()
        while (left := deadline - time.monotonic()) > 0:
            known, held = self._known or self.catalogue(left), self._held
            have = held.serial if held is not None and held.incarnation == known.incarnation else None
            wants = {"have": have, "wait": left * 0.75, "seconds": left + _LINGER}
            try:
                answer = self._ask("newest", deadline, known.incarnation, **wants)
            except (Restarted, Stale):
                self._known = None
                continue
            if answer["serial"] is not None:
                return Version(known.incarnation, answer["serial"], answer["version"])
            if left < GRACE:  # the answer to another request could come late
                break
        why = "none was published, or each was replaced before it was read whole"
        raise TransferTimeout(f"{self._name()}: expected a version, got none in time ({why})")

    def _release(self) -> None:
        """End the lease.  Nobody waits for an answer, as there is nothing to do about it."""
        if self._lead is not None:
            try:
                exchange.send(self._lead, {"ask": "release"}, "", time.monotonic())
            except OSError:  # which ends it, too
                self._drop_lead()

    def _drop_lead(self) -> None:
        lead, self._lead = self._lead, None
        if lead is not None:
            lead.close()

    def _drop_data(self) -> None:
        held: list[Connection | Buffers] = [*self._data.values(), *self._mapped.values()]
        for each in held:
            each.close()
        self._data.clear()
        self._mapped.clear()

    # --- several ranks that subscribe together --------------------------------------------------------------

    def _pull_together(self, wanted: Version, deadline: float, verify: bool) -> int:
        """Read a version, and copy it to the arrays if all ranks have it.  Raises Stale on all ranks if on one."""
        self._held = self._held if self._staged else None
        try:
            read = exchange.together(self._comm, _RANK, lambda: self._pull(wanted, deadline, verify), deadline)
        finally:
            self._release()
        self._held = None
        for name, flat in self._flat.items() if self._staged else ():
            np.copyto(flat, self.into[name])
        self._held = wanted
        return int(read[self._rank])

    # --- reading --------------------------------------------------------------------------------------------

    def _pull(self, wanted: Version, deadline: float, verify: bool) -> int:
        """Read all boxes of a version; returns the bytes read.  Raises Stale, TransferError."""
        known = self._known
        if known is None or known.incarnation != wanted.incarnation:
            known = self.catalogue(max(deadline - time.monotonic(), 0.001))
            if known.incarnation != wanted.incarnation:
                raise Stale
        by_rank: dict[int, list[Copy]] = {}
        for copy in self.plan().copies(0):
            itemsize = max(copy.source.dtype.itemsize, self._layout[copy.array].dtype.itemsize)
            by_rank.setdefault(copy.source.rank, []).extend(_chunks(copy, itemsize))
        work: list[Callable[[], int]] = []
        for rank, copies in by_rank.items():
            requests, mapped = [*_requests(copies)], None if verify else self._map(known, rank)
            names = sorted({copy.source.array for copy in copies}) if verify else []
            for stream in range(streams := min(self._streams, len(requests))):
                parts = requests[stream::streams], names[stream::streams]
                work.append(Reader(self, wanted, known, rank, mapped, stream, *parts, deadline, verify).run)
        self._failed = False
        try:
            with ThreadPoolExecutor(min(_MOST_THREADS, len(work) or 1), "kos-subscriber") as pool:
                try:
                    return sum(each.result() for each in as_completed([pool.submit(each) for each in work]))
                except BaseException:
                    self._failed = True
                    for connection in list(self._data.values()):
                        with suppress(OSError):
                            connection.sock.shutdown(socket.SHUT_RDWR)  # so that the other readers end now
                    raise
        except BaseException:
            self._drop_data()
            raise

    def _map(self, known: Catalogue, rank: int) -> Buffers | None:
        """The mapped memory of a publisher rank, if that works."""
        where = known.ranks[rank]
        if rank not in self._mapped and self._way != "tcp" and where.place == exchange.place():
            layout = next(layout for layout, ranks in known.offers.groups if rank in ranks)
            path = f"/proc/{where.pid}/fd/{where.file}"
            with suppress(KosError, OSError):
                self._mapped[rank] = Buffers(layout, known.buffers, known.incarnation, rank, path)
        if rank not in self._mapped and self._way == "shared":
            raise TransferError(f"{where.name(rank)}: expected memory that this process can map, got none")
        return self._mapped.get(rank)

    def data(self, where: Address, stream: int, deadline: float) -> Connection:
        """The connection of a reader."""
        held = self._data.get((where, stream))
        if held is None or held.drain():  # the publisher closes those that are not used
            if held is not None:
                held.close()
            held = self._data[where, stream] = self.call(where.host, where.port, deadline)
        if self._failed:  # perhaps while this one connected
            raise ConnectionError("another reader has failed")
        return held


class Reader:
    """Reads some requests from one publisher rank, in a thread of its own."""

    def __init__(
        self, of: Subscriber, wanted: Version, known: Catalogue, rank: int, mapped: Buffers | None, stream: int,
        requests: Sequence[Sequence[Copy]], compared: Sequence[str], deadline: float, verify: bool,
    ) -> None:  # fmt: skip
        """``compared``: the publisher's arrays that it compares with their checksums afterwards."""
        self._of, self._wanted, self._rank, self._mapped, self._stream = of, wanted, rank, mapped, stream
        self._where, self._name = known.ranks[rank], f"{known.name}: {known.ranks[rank].name(rank)}"
        self._requests, self._compared, self._deadline, self._verify = requests, compared, deadline, verify

    def run(self) -> int:
        try:
            return self._read_tcp() if self._mapped is None else self._read_mapped(self._mapped)
        except Restarted:
            raise Stale from None
        except (OSError, ValueError, KosError) as error:
            tensors = sorted({copy.tensor for request in self._requests for copy in request})
            more = f" and {len(tensors) - 1} more" * (len(tensors) > 1)
            what = f"{self._name}, from which {tensors[0]}{more} should come"
            failure = exchange.late(what, self._deadline, error)
            failure.ranks = (self._rank,)
            raise failure from error

    def _view(self, copy: Copy) -> np.ndarray[Any, Any]:
        return copy.part.view(self._of.into[copy.array], copy.start, copy.size)

    def _read_mapped(self, memory: Buffers) -> int:
        serial, nbytes = self._wanted.serial, 0
        if not memory.holds(serial):
            raise Stale
        for copy in (copy for request in self._requests for copy in request):
            if time.monotonic() > self._deadline:
                raise TimeoutError
            source = copy.source.part.view(memory.array(copy.source.array, serial), copy.start, copy.size)
            np.copyto(self._view(copy), source, casting="unsafe")
            nbytes += source.nbytes
        if not memory.holds(serial):
            raise Stale
        return nbytes

    def _read_tcp(self) -> int:
        nbytes, scratch = 0, np.empty(CHUNK, np.uint8)
        connection = self._of.data(self._where, self._stream, self._deadline)
        self._post(connection, self._requests[0])
        for index, request in enumerate(self._requests):
            answer = self._answer(connection)
            if index + 1 < len(self._requests):  # while the bytes of this one come
                self._post(connection, self._requests[index + 1])
            for copy in request:
                nbytes += self._take(connection, copy, scratch)
            self._answer(connection)  # the publisher still had the version after it sent the bytes, or Stale
            if self._verify and (got := exchange.checksum(map(self._view, request))) != answer["sum"]:
                names = ", ".join(sorted({copy.tensor for copy in request}))
                raise TransferError(f"{names}: expected checksum {answer['sum']:08x}, got {got:08x}")
        if self._compared:
            message = {"ask": "compare", "serial": self._wanted.serial, "arrays": self._compared}
            exchange.send(connection, message, self._wanted.incarnation, self._deadline)
            self._answer(connection)
        return nbytes

    def _take(self, connection: Connection, copy: Copy, scratch: np.ndarray[Any, Any]) -> int:
        """Receive one box."""
        view, dtype = self._view(copy), self._dtype(copy)
        direct = dtype.numpy == view.dtype and view.flags.c_contiguous
        memory = exchange.as_bytes(view if direct else scratch[: copy.elements * dtype.itemsize])
        drive(fill(connection.sock, lambda: memory), connection.sock, self._deadline)
        if not direct:
            np.copyto(view, scratch[: len(memory)].view(dtype.numpy).reshape(view.shape), casting="unsafe")
        return len(memory)

    def _dtype(self, copy: Copy) -> DType:
        """Of the bytes that travel: the smaller of both; with checksums, that of the array."""
        mine = BY_NUMPY[self._of.into[copy.array].dtype]
        return mine if self._verify or mine.itemsize < copy.source.dtype.itemsize else copy.source.dtype

    def _post(self, connection: Connection, request: Sequence[Copy]) -> None:
        boxes = [
            (copy.source.array, self._dtype(copy).name, copy.source.part.at(copy.start), copy.size,
             copy.source.part.strides) for copy in request
        ]  # fmt: skip
        message = {"ask": "read", "serial": self._wanted.serial, "boxes": boxes, "verify": self._verify}
        exchange.send(connection, message, self._wanted.incarnation, self._deadline)

    def _answer(self, connection: Connection) -> dict[str, Any]:
        return exchange.answered(exchange.receive(connection, self._deadline), self._wanted.incarnation)


def _chunks(copy: Copy, itemsize: int) -> Iterator[Copy]:
    """A copy in pieces of at most ``CHUNK`` bytes, split along its first axes."""
    nbytes = copy.elements * itemsize
    axis = next((axis for axis, count in enumerate(copy.size) if count > 1), None)
    if nbytes <= CHUNK or axis is None:
        yield copy
        return
    step = max(1, copy.size[axis] * CHUNK // nbytes)
    for first in range(0, copy.size[axis], step):
        count = min(step, copy.size[axis] - first)
        start = (*copy.start[:axis], copy.start[axis] + first, *copy.start[axis + 1 :])
        size = (*copy.size[:axis], count, *copy.size[axis + 1 :])
        yield from _chunks(copy._replace(start=start, size=size), itemsize)


def _requests(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Copies that are asked for at once: at most ``CHUNK`` bytes and ``_MOST_BOXES`` boxes."""
    found, nbytes = list[Copy](), 0
    for copy in copies:
        size = copy.elements * copy.source.dtype.itemsize
        if found and (nbytes + size > CHUNK or len(found) == _MOST_BOXES):
            yield found
            found, nbytes = [], 0
        found.append(copy)
        nbytes += size
    if found:
        yield found
